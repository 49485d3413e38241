"""The daemon process: decides through ``core``, touches no pixels, and supervises the workers.

serve            its entry: from a configuration to a running daemon, and back loop
waits, turns input into events, performs the actions doors            the ways in for trainers:
``local`` (this host) and ``tcp`` (other hosts) workers          the worker processes and their fork
server memory           slots, rings, mailboxes, caches, and held descriptors streams          from
the configuration of a stream to the facts for core and workers reload           SIGHUP: ``rescan``
reads and scans in a process of its own, ``apply`` applies the result config_checks    every problem
of a configuration service          systemd, and the observer's process runtime          the runtime
directory and its lock
"""
