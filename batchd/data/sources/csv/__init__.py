"""The source ``csv``: records of text tables."""
