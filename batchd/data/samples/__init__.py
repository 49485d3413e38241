"""Samples: their columns and values, between sources and steps. Daemon and workers."""
