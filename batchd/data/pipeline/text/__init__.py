"""The steps on text."""
