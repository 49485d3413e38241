"""Memory of the daemon: slots, rings, mailboxes, caches, held descriptors. DAEMON process."""
