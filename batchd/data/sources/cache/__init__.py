"""Caches of samples: what a source gave is kept, so that it is read once."""
