"""Messages from the process that reads the configuration again to the daemon; numbers are never reused.

daemon                                        rescan
|  <-----------------------------------------  |   ScanProgressed, RescanLogged: again and again
|  <-----------------------------------------  |   StreamScanned (+ fds): once for each new source
|  <-----------------------------------------  |   ConfigRead (+ fd): the last one
"""

from batchd_wire.codec import Message, Vocabulary, message


@message(53)
class StreamScanned(Message):
    """A stream of the configuration that was read again. Travels with the source's index, and a live stream's mailbox, to write.

    ``name`` is the stream's.
    """

    name: str


@message(54)
class ConfigRead(Message):
    """The last word of the process that reads the configuration again. Travels with one descriptor: memory with JSON in it.

    ``document_bytes``: how long that is.
    """

    document_bytes: int


@message(55)
class ScanProgressed(Message):
    """The process that reads the configuration again gets on: ``found`` samples of the stream ``name`` so far.

    ``name`` is empty as long as no source is scanned. ``patience_s``: after so long without another
    word it hangs.
    """

    name: str
    found: int
    patience_s: int


@message(56)
class RescanLogged(Message):
    """A line for the daemon's log, of the process that reads the configuration again.

    ``level`` as structlog calls it; ``event`` is what happened, and ``facts`` belong to it, by
    name.
    """

    level: str
    event: str
    facts: dict[str, object]


TO_DAEMON_FROM_RESCAN = Vocabulary(ScanProgressed, RescanLogged, StreamScanned, ConfigRead)
