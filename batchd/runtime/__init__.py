"""What several processes of the server need, and what is about no sample and no stream.

children      starts, watches and ends child processes; child_log: their lines
poller        waits for descriptors, ZeroMQ's sockets, timers and signals
descriptors   sockets of peers that nobody trusts; how many descriptors there may be
tcp           a ROUTER socket for untrusted peers; keys: files with their keys
slots         shared memory of slots; available, sizes: how much there is; cpus: how many
numa          the memory nodes of the machine: whose CPUs, whose memory
limits        what one peer may have: sessions, handshakes, connections, log lines
compiled      whether the extensions are those of the sources
plain         records as JSON and msgpack carry them, and the way back
mapped_files  unmaps what only loading libraries needed
sandbox       what a worker gives up before it reads data; rights: whose it reads with
failpoints    named steps at which tests kill, stop or hang a process
directories   of caches and keys, where the configuration names none
addresses, suggestions   what users write: addresses, "did you mean"
"""

__version__ = "0.1.0"
