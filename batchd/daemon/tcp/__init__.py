"""Trainers on other hosts: sockets, keys, sessions, and the connection guard. DAEMON process."""
