"""Definitions shared by daemon and trainers. Every process; standard library and msgpack only.

record     the classes of messages and other values
fields     the arrays of a batch, and their offsets in a slot
slot       the header page of a slot, and the checksums of its rows
messages   trainer and daemon, over ZeroMQ and the lifeline socket
codec      messages to bytes and back; the one place where received bytes are checked
channel    messages and file descriptors over an AF_UNIX SOCK_SEQPACKET socket
codes      error codes, never reused
runtime    the runtime directory and the addresses in it
keys       the connection file of a trainer on another host
status     a daemon's status, for commands, observer and trainers; reports: of training loops
mailbox    shared memory that producers push samples into
tcp        TCP heartbeats, and the frames that carry a batch to another host
position   the address of a batch
threads    whether threads can be started before libzmq needs them
wording    words that several processes say to users
views      numpy arrays over a slot (the only module that needs numpy)
"""

PROTOCOL_VERSION = 3
"""Grows with each change that an older side cannot understand; see ``codec``."""
OLDEST_VERSION = 2
"""The oldest client that a daemon serves; a client needs a daemon at least as new as itself."""
OPEN_ENDED_SINCE = 3
"""First version that skips unknown fields at the end of a message; older ones refuse it."""
