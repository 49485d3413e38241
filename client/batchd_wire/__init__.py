"""What the daemon and its trainers share, defined once. Runs in every process; standard library and msgpack only.

fields     which arrays a batch holds and where they lie in a slot
slot       the header page of a slot, and the checksums of its rows
messages   trainer and daemon, over ZeroMQ and the lifeline socket
codec      how a message becomes bytes, and the one place where arriving bytes are checked
channel    messages and file descriptors over an AF_UNIX SOCK_SEQPACKET socket
codes      error codes, never reused
runtime    the runtime directory and the addresses in it
keys       the connection file, with which a trainer on another host is let in
tcp        TCP heartbeats, and the frames that carry a batch to another host
position   the address of a batch
views      numpy arrays over a slot (the only module that needs numpy)
"""

PROTOCOL_VERSION = 3
"""The version that this side speaks. It grows with a change that an older side cannot understand; a field added at the end of a
message is none, see ``codec``."""
OLDEST_VERSION = 2
"""The oldest client that a daemon serves. A client needs a daemon of its own version or a newer one."""
OPEN_ENDED_SINCE = 3
"""From this version on a side skips fields that it does not know at the end of a message; an older one takes it for malformed."""
