"""The steps that augment images."""
