"""A session with a running daemon of this host, without the trainer's library. Commands and observer.

``find`` says where a daemon is, and ``session`` asks it. Invariant: nothing here loads numpy, so it is cheap to start.
"""
