"""Reading the configuration again, and applying it to a running daemon. DAEMON process; ``rescan`` is one of its own."""
