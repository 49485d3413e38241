"""The daemon process: decides through ``core``, touches no pixels, and supervises the workers.

Its parts:

    serve           its entry: from a configuration to a running daemon, and back
    loop            waits, turns input into events, performs the actions, answers queries
    doors           the ways in for trainers: ``local`` (this host) and ``tcp`` (other hosts)
    workers         the worker processes and their fork server
    memory          slots, rings, mailboxes, caches
    streams         from the configuration of a stream to the facts for core and workers
    reload          SIGHUP: ``rescan`` reads and scans in its own process, ``apply`` applies it
    config_checks   every problem of a configuration
    service         systemd, and the observer's process
    runtime         the runtime directory and its lock
"""
