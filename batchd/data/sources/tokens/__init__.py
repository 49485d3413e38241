"""The source ``tokens``: files of token numbers."""
