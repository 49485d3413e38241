"""Trainers on other hosts: sockets, keys, sessions, and guards against too many connections. DAEMON process."""
