"""The worker processes, behind an interface that hides where they run. DAEMON process."""
