"""The daemon process: decides through ``core``, touches no pixels, and supervises the workers.

serve            its entry: from a configuration to a daemon that runs, and back to nothing
loop             waits, turns what happened into events, performs the actions
doors            what a way in for trainers is; ``sessions`` has the one of this host, ``remote`` the one over TCP
workers          the worker processes; ``forks`` has the process that they are forked from
slot_memory      the memory of the slots; ``memory`` and ``rings`` say how much there is and how it is divided
streams          from the configuration of a stream to what everybody must know of it
reload           SIGHUP: a process of ``rescan`` reads and scans, ``switch`` puts it into force
checkup          everything that is wrong with a configuration
runtime          the runtime directory and its lock
"""
