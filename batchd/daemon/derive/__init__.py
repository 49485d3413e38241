"""Streams that trainers derive or define. ``process`` and its forks are processes of their own."""
