"""Samples: what a source gives and a step takes. Daemon and workers."""
