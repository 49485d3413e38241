"""Streams that trainers derive from those of the file. ``process`` is a process of its own."""
