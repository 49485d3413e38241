"""Trainers and commands of this host: the sockets of the runtime directory, sessions, and what each peer is. DAEMON process."""
