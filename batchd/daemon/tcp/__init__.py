"""Trainers on other hosts. DAEMON process."""
