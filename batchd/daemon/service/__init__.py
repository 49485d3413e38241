"""The daemon as a service: notifications to systemd, readiness, and the observer's process. DAEMON process."""
