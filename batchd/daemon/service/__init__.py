"""The daemon as a service: systemd's notifications, and the observer's process. DAEMON process."""
