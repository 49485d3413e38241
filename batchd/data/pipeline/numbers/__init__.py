"""The steps on labels and numbers."""
