"""Between daemon and the process that reads the configuration again. Never reused numbers.

daemon                                        rescan
|  ----------------------------------------->  |   ReloadRequest, as JSON on standard input
|  <-----------------------------------------  |   ScanProgressed, ChildLogged: repeatedly
|  <-----------------------------------------  |   StreamScanned (+ fds): once for each new source
|  <-----------------------------------------  |   ConfigRead (+ fd): the last one
"""

from dataclasses import field

from batchd.data.storage.values import USUAL_LIMITS, StorageLimits
from batchd.errors import ExitCode
from batchd.runtime.child_log import ChildLogged
from batchd.runtime.sandbox import NOTHING, Access
from batchd_wire.codec import Message, Vocabulary, message
from batchd_wire.record import frozen

SILENCE_MAX_S = 300
"""Silence that is allowed beside that of libraries: a scan reports after some thousand samples, but
not while it checks whether a large former index is still valid."""


@frozen
class ReloadRequest:
    """The streams in service, and where the configuration is.

    ``daemon``: the [daemon] in force. ``signatures``: of each stream that may continue
    unchanged, by name. ``slots`` (the most that a ring may have): of each stream by name.
    ``made_bytes``: memory of all their rings and mailboxes. ``cached_bytes``: memory of each of
    their caches, by its key.
    """

    version: str
    file: str
    overrides: dict[str, str]
    daemon: dict[str, object]
    signatures: dict[str, str]
    slots: dict[str, int]
    made_bytes: int
    cached_bytes: dict[str, int]


@frozen
class ReloadDocument:
    """What to put into force; or why nothing, with an ``exit_code``. As JSON in memory.

    ``daemon``: the keys of [daemon] that take effect; those in ``restart`` have changed, too.
    ``reserved``: slots of all rings that may be made. ``same``: streams that continue.
    ``numbers``: of the users and groups that it names. ``roots``: what workers may read for streams
    that trainers define.
    ``streams``: the others, each as ``StreamFacts.to_wire`` gives it.
    """

    exit_code: int = ExitCode.FINE
    problem: str = ""
    daemon: dict[str, object] = field(default_factory=dict)
    workers: int = 0
    storage: StorageLimits = USUAL_LIMITS
    restart: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    roots: Access = NOTHING
    reserved: int = 0
    same: list[str] = field(default_factory=list)
    streams: dict[str, object] = field(default_factory=dict)


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
