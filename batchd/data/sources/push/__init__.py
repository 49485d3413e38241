"""The source ``push``: samples that producers push while they are read."""
