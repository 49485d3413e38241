"""The changes of a reload in a running daemon, all at once. DAEMON process.

    document of ``rescan`` + descriptors -> streams under new numbers -> one event for the core
                                         -> limits of sessions and storage

A stream that has changed is another one under the same name: its number is new, so no message about
the old one can be taken for it.

Invariant: a document takes effect completely, or not at all; then its descriptors are closed.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import structlog

from batchd.config.tree import DaemonConfig
from batchd.core.events import Event, Reconfigured
from batchd.core.state import DaemonState
from batchd.daemon.doors import Doors
from batchd.daemon.identity import Numbers, Tenancy, weights_of
from batchd.daemon.reload.messages import ReloadDocument, ReloadRequest
from batchd.daemon.workers import AllWorkers
from batchd.data.storage.index import SourceIndex
from batchd.runtime.limits import SessionLimits
from batchd.runtime.plain import from_plain
from batchd.runtime.slots import MailboxMemory, SlotPool
from batchd.stream.cache_memory import different
from batchd.stream.fingerprints import card_differences
from batchd.stream.served import ServedStream, StreamFacts
from batchd.worker.messages import CHUNK_ROWS_MAX
from batchd_wire.keys import DERIVED_MARK
from batchd_wire.record import frozen

_log = structlog.get_logger()

Code = dict[str, tuple[str, tuple[str, ...]]]
"""By the module's name: its digest, and the folders that are searched for it."""
Descriptors = dict[str, list[int]]
"""For each new stream: its index and perhaps its mailbox."""


@frozen
class Changes:
    """What a reload changes. ``streams``: their names by what happens to them.

    ``workers``: before and after. ``keys``: of [daemon], that take effect; ``restart``: the others.
    ``details``: a line for each setting of a stream. ``ends``: a line for each trainer that ends.
    """

    streams: dict[str, list[str]]
    workers: tuple[int, int]
    keys: list[str]
    restart: list[str]
    details: list[str]
    ends: list[str]

    @property
    def text(self) -> str:
        """A line with the summary, and then the others."""
        parts = [f"{what} {', '.join(which)}" for what, which in self.streams.items() if which]
        before, after = self.workers
        if after != before:
            parts.append(f"workers {before} to {after}")
        if self.keys:
            parts.append(f"[daemon] {', '.join(self.keys)} changed")
        if self.restart:
            parts.append(f"[daemon] {', '.join(self.restart)} need a restart, and stay as they were until then")
        return "\n  ".join(["; ".join(parts) or "nothing has changed", *self.details, *self.ends])

    def log(self) -> None:
        """Log that they are in force."""
        workers_before, workers = self.workers
        _log.info(
            "configuration reloaded",
            **{what: ", ".join(which) for what, which in self.streams.items()},
            workers_before=workers_before,
            workers=workers,
            keys=", ".join(self.keys),
        )
        if self.restart:
            _log.warning("restart needed", keys=", ".join(self.restart), advice="the old values stay until then")


@dataclass(slots=True)
class ReloadApplier:
    """Everything of the daemon that a reload changes.

    ``daemon``: the one in force. ``last_number``: the highest that any stream has had.
    ``imported``: versions of modules that workers may have imported. ``numbers``: see ``identity``.
    """

    state: DaemonState
    streams: dict[int, ServedStream]
    memory: SlotPool
    workers: AllWorkers
    doors: Doors
    enqueue: Callable[[Event], None]
    daemon: DaemonConfig
    workers_wanted: int
    last_number: int
    imported: Code
    numbers: Numbers
    derived: dict[int, int] = field(default_factory=dict)
    """Numbers of derived streams in service, and of those that they are derived from; 0 of those
    that are defined."""
    applied: Callable[[], None] = lambda: None
    """Called when a document is in force."""
    _numbers: dict[str, int] = field(init=False)
    """Streams after the last reload; the core may not have handled it when the next one begins."""

    def __post_init__(self) -> None:
        self._numbers = dict(self.state.numbers)

    def request(self, version: str, file: str, overrides: dict[str, str]) -> ReloadRequest:
        """Facts that ``rescan`` needs of the streams in service.

        A stopped stream has no signature: its cause may be repaired, so a new one replaces it.
        """
        served = [self.streams[number] for number in self._numbers.values()]
        known = {number: stream.delivery for number, stream in self.state.streams.items()}
        stopped = {number for number, delivery in known.items() if delivery.stopped is not None}
        made = {number: delivery.ring.made for number, delivery in known.items()}
        caches = different(stream.cache for stream in self.streams.values())
        return ReloadRequest(
            version=version,
            file=file,
            overrides=overrides,
            daemon=self.daemon.model_dump(mode="json"),
            signatures={stream.name: stream.facts.signature for stream in served if stream.number not in stopped},
            slots={stream.name: stream.spec.slots_max for stream in served},
            made_bytes=sum(
                made.get(stream.number, 0) * stream.layout.slot_bytes + stream.facts.mailbox_bytes for stream in served
            ),
            cached_bytes={cache.spec.key: cache.used_bytes for cache in caches if not cache.spec.folder},
        )

    def changes(self, document: ReloadDocument) -> Changes:
        """What a document changes, compared with what is in force."""
        before = {name: self.streams[number] for name, number in self._numbers.items()}
        made: dict[str, StreamFacts] = {
            name: from_plain(StreamFacts, plain) for name, plain in document.streams.items()
        }
        revived = {
            name for name, facts in made.items() if name in before and before[name].facts.signature == facts.signature
        }
        removed = before.keys() - made.keys() - set(document.same)
        details: list[str] = []
        ends: list[str] = []
        for name in sorted(made.keys() & before.keys() - revived):
            old, new = before[name].facts, made[name]
            details += [f"{name}: {line}" for line in card_differences(old.card, new.card)]
            if old.cache is not None and new.cache is not None and old.cache.key != new.cache.key:
                details.append(f"{name}: its cache is filled again")
        for name, stream in before.items():
            if name in removed or (name in made and made[name].spec.fingerprint != stream.spec.fingerprint):
                ends += self._readers(name)
        wanted = self._daemon_after(document)
        return Changes(
            streams={
                "added": sorted(made.keys() - before.keys()),
                "removed": sorted(removed),
                "changed": sorted(made.keys() & before.keys() - revived),
                "revived": sorted(revived),
            },
            workers=(self.workers_wanted, document.workers),
            keys=[
                key
                for key in document.daemon
                if getattr(self.daemon, key) != getattr(wanted, key)
                and (key != "workers" or document.workers == self.workers_wanted)
            ],
            restart=document.restart,
            details=details,
            ends=ends,
        )

    def _readers(self, name: str) -> Iterator[str]:
        """Each trainer of a stream, and where it is; some may not have asked for its last form.

        Also those of the streams that are derived from it.
        """
        for number, stream in self.state.streams.items():
            known_as = self.streams[number].name
            if known_as.partition(DERIVED_MARK)[0] != name:
                continue
            for subscription in stream.delivery.subscriptions.values():
                share = subscription.course.at(subscription.consumed)
                where = f" at {share.position.epoch}:{share.position.step}" if share is not None else ""
                yield f"{known_as}: ends {self.doors.peer(subscription.session).name}{where}"

    def _daemon_after(self, document: ReloadDocument) -> DaemonConfig:
        return DaemonConfig.model_validate_json(json.dumps({**self.daemon.model_dump(mode="json"), **document.daemon}))

    def apply(self, document: ReloadDocument, descriptors: Descriptors) -> None:
        """Put a document into force. Raises ``OSError``, without a change."""
        before = self._numbers
        made = self._streams(document.streams, descriptors)
        code = code_in(made)
        renews_workers = any(self.imported.get(name, one) != one for name, one in code.items())
        self.imported.update(code)
        self.workers.local.roots = document.roots
        of_file = [one for number, one in self.streams.items() if self.derived.get(number) != 0]
        needed = [stream.message.recipe.needed for stream in [*of_file, *made]]
        renews_workers = self.workers.local.enclose_for(needed) or renews_workers
        self.last_number += len(made)
        self.streams.update({stream.number: stream for stream in made})
        self.workers_wanted, self.daemon = document.workers, self._daemon_after(document)
        self.numbers = document.numbers
        names = {stream.name for stream in made}
        for stream in made:  # the same rows: their digests go on
            same = self.streams.get(before.get(stream.name, -1))
            if same is not None and same.spec.fingerprint == stream.spec.fingerprint and stream.spec.has_digests:
                stream.digests = same.digests or stream.digests
        replaced = [number for name, number in before.items() if name in names]
        removed = [number for name, number in before.items() if name not in names and name not in document.same]
        for number, base in list(self.derived.items()):  # their trainers ask again
            if base in removed:
                removed.append(number)
            elif base in replaced or self.streams[number].name in names:
                replaced.append(number)
            else:
                continue
            del self.derived[number]
        kept = {name: number for name, number in before.items() if name in document.same}
        self._numbers = kept | {stream.name: stream.number for stream in made}
        self._limit(document, sum(self.state.streams[number].delivery.ring.made for number in kept.values()))
        self._reconfigure(made, removed, replaced, renews_workers=renews_workers)
        self.applied()

    def add(self, derived: ServedStream, name: str, base: int, settings: str, owner: str = "") -> int:
        """Serve a stream derived from ``base``, or defined; its number. Raises ``OSError``."""
        stream = derived.named(name, self.last_number + 1, settings, owner)
        stream.provide_cache(self.streams.values())
        self.last_number += 1
        self.imported.update(code_in([stream]))
        self.streams[stream.number] = stream
        self.derived[stream.number] = base
        if self.daemon.tcp is not None:
            self.memory.blanks.expect(None, stream.layout.slot_bytes)
        self._reconfigure([stream], [], [])
        return stream.number

    def remove(self, number: int, *, asks_again: bool = False) -> None:
        """Serve a derived stream no more. ``asks_again``: its trainers may get it once more."""
        del self.derived[number]
        self._reconfigure([], [] if asks_again else [number], [number] if asks_again else [])

    def _reconfigure(
        self, added: list[ServedStream], removed: list[int], replaced: list[int], *, renews_workers: bool = False
    ) -> None:
        chunk_rows = self.daemon.chunk_rows
        self.enqueue(
            Reconfigured(
                tuple(stream.spec for stream in added),
                tuple(removed),
                tuple(replaced),
                self.workers_wanted,
                self.daemon.sample_timeout_s,
                CHUNK_ROWS_MAX if chunk_rows == "auto" else chunk_rows,
                renews_workers,
                weights_of(self.daemon),
            )
        )

    def _streams(self, plain: Mapping[str, object], descriptors: Descriptors) -> list[ServedStream]:
        """Make all streams, or none; they take their descriptors out of ``descriptors``."""
        made: list[ServedStream] = []
        try:
            for number, (name, facts) in enumerate(plain.items(), self.last_number + 1):
                made.append(stream_from(number, facts, descriptors.pop(name)))
                made[-1].provide_cache([*self.streams.values(), *made])
                made[-1].provide_journal(self.streams.values())
        except OSError:
            for stream in made:
                stream.close()
            raise
        return made

    def _limit(self, document: ReloadDocument, slots_kept: int) -> None:
        """Limit sessions, slots and storage. ``slots_kept`` stay; the others are to be made."""
        limits = document.storage.to_wire()
        if any(stream.message.storage != limits for stream in self.streams.values()):
            for stream in self.streams.values():
                stream.message = replace(stream.message, storage=limits)
            for kind in self.workers:
                kind.use_storage(limits)
        tenancy = Tenancy(self.daemon.shares, self.numbers)
        for door in self.doors:
            door.limit(SessionLimits(self.daemon.sessions_max, self.daemon.sessions_per_peer), tenancy)
        sends_bytes = self.daemon.tcp is not None
        mapped_bytes = max(stream.layout.slot_bytes for stream in self.streams.values()) if sends_bytes else 0
        self.memory.blanks.expect(max(0, document.reserved - slots_kept), mapped_bytes)


def stream_from(number: int, plain: object, descriptors: list[int]) -> ServedStream:
    """A stream of a document. Raises ``OSError``."""
    index, *mailbox = descriptors
    facts = StreamFacts.from_wire(plain, number, SourceIndex.from_descriptor(index))
    stream = ServedStream(facts, index)
    if mailbox:
        try:
            stream.mailbox = MailboxMemory.adopt(mailbox[0], facts.mailbox_bytes)
        except OSError:
            stream.close()
            raise
    return stream


def code_in(streams: Iterable[ServedStream]) -> Code:
    """The modules that workers import for these streams."""
    return {
        name: (digest, tuple(stream.message.recipe.python_path))
        for stream in streams
        for name, digest in stream.message.recipe.modules
    }
