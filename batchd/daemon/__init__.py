"""The daemon process: decides through ``core``, and touches no pixels.

Its parts:

    serve           its entry: from a configuration to a running daemon, and back
    loop            waits, turns input into events, performs the actions, answers queries
    workers         the workers that it has: of this host, and of worker hosts
    doors           the ways in for trainers: ``local`` (this host) and ``tcp`` (other hosts)
    reload          SIGHUP: ``rescan`` reads and scans in its own process, ``apply`` applies it
    config_checks   every problem of a configuration
    manager         readiness, status and watchdog, by systemd's protocol
    observer        the process that answers HTTP: its socket and restarts
    runtime         the runtime directory and its lock
"""
