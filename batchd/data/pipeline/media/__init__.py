"""The steps that decode sound and moving pictures: of any file, from any source."""
