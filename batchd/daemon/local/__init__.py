"""Trainers and commands of this host: sockets and sessions. DAEMON process."""
