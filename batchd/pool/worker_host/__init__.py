"""The worker host: workers on this machine for a daemon on another one. WORKER HOST process.

host        the program: one loop round everything below
connection  the DEALER to a gateway: pauses, keys, and the ends of connections
workers     worker processes, their orders, and the memory that rows are filled into and sent from
streams     the daemon's streams, with the paths and the caches of this host
indexes     indexes of sources, received once and kept by digest
"""
