"""Where in the daemon's status the values of metrics are, and which labels they have. OBSERVER process.

A scope gives rows: the values of its labels, and the part of the status that they stand for. What
has the same labels, as two steps of one name do, becomes one value.

Trainers are told apart by their sessions, as many have one name: their sum would fall when one of
them goes, which a scraper takes for a counter that began anew.

Invariant: how many values a scope gives is bounded, whatever trainers call themselves: by streams,
workers, and ``TRAINERS_MAX``.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain

from batchd_wire.status import DaemonStatus, SubscriptionStatistics, TrainerStatistics

TRAINERS_MAX = 200
"""Further trainers are counted together, as ``OTHER``, by gauges alone."""
OTHER = "other"
SESSION = "session"
WORKER_STATES = ("starting", "ready", "leaving", "ending")
TRANSPORTS = ("shared memory", "tcp")

_GONE = TrainerStatistics(session=0, name="", pid=None, user=None, transport="")

Labels = tuple[str, ...]
Row = tuple[Labels, object]
"""The values of the labels, and the object whose attributes are values of metrics."""


@dataclass(frozen=True, slots=True)
class Scope:
    """``where`` is the place in the status, for people."""

    where: str
    labels: tuple[str, ...]
    rows: Callable[[DaemonStatus], Iterable[Row]]

    def is_others(self, labels: Labels) -> bool:
        """Do these labels stand for whoever has none of his own? These come and go, so nothing of theirs only grows."""
        return SESSION in self.labels and labels[self.labels.index(SESSION)] == OTHER


@dataclass(frozen=True, slots=True)
class _Counted:
    """Values that no one object of the status has."""

    one: int = 1
    count: int = 0
    waited_s: float = 0.0


def _daemon(status: DaemonStatus) -> Iterator[Row]:
    yield (), status.daemon


def _info(status: DaemonStatus) -> Iterator[Row]:
    daemon = status.daemon
    yield (daemon.version, daemon.decoders), _Counted()


def _reload(status: DaemonStatus) -> Iterator[Row]:
    if status.daemon.reload is not None:
        yield (), status.daemon.reload


def _tcp(status: DaemonStatus) -> Iterator[Row]:
    if status.daemon.tcp is not None:
        yield (), status.daemon.tcp


def _worker_states(status: DaemonStatus) -> Iterator[Row]:
    for state in WORKER_STATES:
        yield (state,), _Counted(count=sum(worker.state == state for worker in status.workers))


def _workers(status: DaemonStatus) -> Iterator[Row]:
    for worker in status.workers:
        yield (str(worker.place),), worker


def _transports(status: DaemonStatus) -> Iterator[Row]:
    for transport in TRANSPORTS:
        yield (transport,), _Counted(count=sum(one.transport == transport for one in status.trainers))


def _streams(status: DaemonStatus) -> Iterator[Row]:
    for stream in status.streams:
        yield (stream.name,), stream


def _work(status: DaemonStatus) -> Iterator[Row]:
    for stream in status.streams:
        yield (stream.name,), stream.work


def _parts(status: DaemonStatus) -> Iterator[Row]:
    for stream in status.streams:
        for part in stream.work.parts:
            yield (stream.name, part.name), part


def _mailboxes(status: DaemonStatus) -> Iterator[Row]:
    for stream in status.streams:
        if stream.live is not None:
            yield (stream.name,), stream.live


def _caches(status: DaemonStatus) -> Iterator[Row]:
    """Streams that share a cache all show it."""
    for stream in status.streams:
        if stream.cache is not None:
            yield (stream.name,), stream.cache


def _trainers(status: DaemonStatus) -> Iterator[tuple[Labels, SubscriptionStatistics]]:
    """Those that came first have their own labels; spectators are none.

    A trainer that is gone may have batches on their way: it is nobody by name.
    """
    sessions = {one.session: one for one in status.trainers}
    claims = sorted(
        chain.from_iterable(
            ((one.session, stream.name, one) for one in stream.subscriptions if not one.is_spectator)
            for stream in status.streams
        ),
        key=lambda found: found[:2],
    )
    known: set[Labels] = set()
    for session, stream, claim in claims:
        trainer = sessions.get(session, _GONE)
        labels = (stream, trainer.name, str(claim.rank), trainer.transport, str(session))
        if labels not in known and len(known) >= TRAINERS_MAX:
            labels = (stream, OTHER, OTHER, OTHER, OTHER)
        else:
            known.add(labels)
        yield labels, claim


def _waits(status: DaemonStatus) -> Iterator[Row]:
    for labels, claim in _trainers(status):
        for cause, waited_s in asdict(claim.waits).items():
            yield (*labels, cause.removesuffix("_s")), _Counted(waited_s=waited_s)


def _remote(status: DaemonStatus) -> Iterator[Row]:
    remote = sorted((one for one in status.trainers if one.transport == "tcp"), key=lambda one: one.session)
    for place, trainer in enumerate(remote):
        yield (trainer.name, str(trainer.session)) if place < TRAINERS_MAX else (OTHER, OTHER), trainer


DAEMON = Scope("daemon", (), _daemon)
INFO = Scope("daemon", ("version", "decoders"), _info)
RELOAD = Scope("daemon.reload", (), _reload)
TCP = Scope("daemon.tcp", (), _tcp)
WORKER_COUNTS = Scope("workers", ("state",), _worker_states)
WORKER = Scope("workers[]", ("worker",), _workers)
TRAINER_COUNTS = Scope("trainers", ("transport",), _transports)
STREAM = Scope("streams[]", ("stream",), _streams)
WORK = Scope("streams[].work", ("stream",), _work)
PART = Scope("streams[].work.parts[]", ("stream", "part"), _parts)
CACHE = Scope("streams[].cache", ("stream",), _caches)
MAILBOX = Scope("streams[].live", ("stream",), _mailboxes)
TRAINER = Scope("streams[].subscriptions[]", ("stream", "trainer", "rank", "transport", SESSION), _trainers)
WAIT = Scope("streams[].subscriptions[].waits", (*TRAINER.labels, "cause"), _waits)
REMOTE = Scope("trainers[]", ("trainer", SESSION), _remote)
