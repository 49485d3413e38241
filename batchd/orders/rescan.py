"""Messages from the process that reads the configuration again to the daemon. Never reused numbers.

daemon                                        rescan
|  <-----------------------------------------  |   ScanProgressed, ChildLogged: repeatedly
|  <-----------------------------------------  |   StreamScanned (+ fds): once for each new source
|  <-----------------------------------------  |   ConfigRead (+ fd): the last one
"""

from batchd.orders.log import ChildLogged
from batchd_wire.codec import Message, Vocabulary, message


@message(53)
class StreamScanned(Message):
    """A new stream. Travels with the source's index, and a live stream's mailbox, to write."""

    name: str


@message(54)
class ConfigRead(Message):
    """The last message. Travels with one descriptor: memory with ``document_bytes`` of JSON."""

    document_bytes: int


@message(55)
class ScanProgressed(Message):
    """``found`` samples of the stream ``name`` so far; no name while no source is scanned.

    ``patience_s``: if no message follows within so many seconds, the process hangs.
    """

    name: str
    found: int
    patience_s: int


TO_DAEMON_FROM_RESCAN = Vocabulary(ScanProgressed, ChildLogged, StreamScanned, ConfigRead)
