"""Sources of images and, for each, files of the same name in other folders."""
