"""The worker processes, behind an interface that does not say where they run. DAEMON process."""
