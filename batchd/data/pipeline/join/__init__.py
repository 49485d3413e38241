"""The steps that make one sample of several."""
