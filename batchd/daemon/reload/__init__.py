"""Reload of the configuration. DAEMON process; ``rescan`` is a process of its own."""
