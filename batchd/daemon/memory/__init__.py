"""The daemon's memory: slots, rings, mailboxes, caches, and the descriptors that are kept for them. DAEMON process."""
