"""The steps on fields, labels and numbers."""
