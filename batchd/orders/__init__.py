"""Messages between the daemon and its own processes, always of the same version.

The trainers' protocol is ``batchd_wire``.

worker    orders to workers, and their reports; the fork server's messages
rescan    from the process that reads the configuration again
gateway   to a gateway, and back; link: between a gateway and worker hosts
log       lines for the daemon's log
prepare   to the processes of ``batchd prepare``
"""
