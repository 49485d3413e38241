"""The changes of a reload in a running daemon, all at once. DAEMON process.

    document of ``rescan`` + descriptors -> streams under new numbers -> one event for the core
                                         -> limits of sessions and storage

A stream that has changed is another one under the same name: its number is new, so no message about
the old one can be taken for it.

Invariant: a document takes effect completely, or not at all; then its descriptors are closed.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from batchd.config.tree import DaemonConfig
from batchd.core.events import Event, Reconfigured
from batchd.core.state import DaemonState
from batchd.daemon.doors import Doors
from batchd.daemon.reload.messages import ReloadDocument, ReloadRequest
from batchd.daemon.workers import AllWorkers
from batchd.data.storage.index import SourceIndex
from batchd.runtime.limits import SessionLimits
from batchd.runtime.slots import MailboxMemory, SlotPool
from batchd.stream.cache_memory import different
from batchd.stream.served import ServedStream, StreamFacts
from batchd.worker.messages import CHUNK_ROWS_MAX

_log = structlog.get_logger()

Code = dict[str, tuple[str, tuple[str, ...]]]
"""By the module's name: its digest, and the folders that are searched for it."""
Descriptors = dict[str, list[int]]
"""For each new stream: its index and perhaps its mailbox."""


@dataclass(slots=True)
class ReloadApplier:
    """Everything of the daemon that a reload changes.

    ``daemon``: the one in force. ``last_number``: the highest that any stream has had.
    ``imported``: versions of modules that workers may have imported.
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

    def apply(self, document: ReloadDocument, descriptors: Descriptors) -> str:
        """Put a document into force; a summary for users. Raises ``OSError``, without a change."""
        before = self._numbers
        made = self._streams(document.streams, descriptors)
        code = code_in(made)
        renews_workers = any(self.imported.get(name, one) != one for name, one in code.items())
        self.imported.update(code)
        self.last_number += len(made)
        self.streams.update({stream.number: stream for stream in made})
        workers_before, self.workers_wanted = self.workers_wanted, document.workers
        former, changed = self.daemon, json.dumps({**self.daemon.model_dump(mode="json"), **document.daemon})
        self.daemon = DaemonConfig.model_validate_json(changed)
        keys = [
            key
            for key in document.daemon
            if getattr(former, key) != getattr(self.daemon, key)
            and (key != "workers" or self.workers_wanted == workers_before)
        ]
        names = {stream.name for stream in made}
        for stream in made:  # the same rows: their digests go on
            same = self.streams.get(before.get(stream.name, -1))
            if same is not None and same.spec.fingerprint == stream.spec.fingerprint and stream.spec.has_digests:
                stream.digests = same.digests or stream.digests
        replaced = [number for name, number in before.items() if name in names]
        removed = [number for name, number in before.items() if name not in names and name not in document.same]
        kept = {name: number for name, number in before.items() if name in document.same}
        self._numbers = kept | {stream.name: stream.number for stream in made}
        self._limit(document, sum(self.state.streams[number].delivery.ring.made for number in kept.values()))
        chunk_rows = self.daemon.chunk_rows
        self.enqueue(
            Reconfigured(
                tuple(stream.spec for stream in made),
                tuple(removed),
                tuple(replaced),
                self.workers_wanted,
                self.daemon.sample_timeout_s,
                CHUNK_ROWS_MAX if chunk_rows == "auto" else chunk_rows,
                renews_workers,
            )
        )
        signatures = {name: self.streams[number].facts.signature for name, number in before.items()}
        revived = {stream.name for stream in made if signatures.get(stream.name) == stream.facts.signature}
        changes = {
            "added": sorted(names - before.keys()),
            "removed": sorted(self.streams[number].name for number in removed),
            "changed": sorted(names & before.keys() - revived),
            "revived": sorted(revived),
        }
        _log.info(
            "configuration reloaded",
            **{what: ", ".join(which) for what, which in changes.items()},
            workers_before=workers_before,
            workers=self.workers_wanted,
            keys=", ".join(keys),
        )
        if document.restart:
            _log.warning("restart needed", keys=", ".join(document.restart), advice="the old values stay until then")
        return _summary(changes, (workers_before, self.workers_wanted), keys, document.restart)

    def _streams(self, plain: Mapping[str, object], descriptors: Descriptors) -> list[ServedStream]:
        """Make all streams, or none; they take their descriptors out of ``descriptors``."""
        made: list[ServedStream] = []
        try:
            for number, (name, facts) in enumerate(plain.items(), self.last_number + 1):
                made.append(_stream(number, facts, descriptors.pop(name)))
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
        for door in self.doors:
            door.limit(SessionLimits(self.daemon.sessions_max, self.daemon.sessions_per_peer))
        sends_bytes = self.daemon.tcp is not None
        mapped_bytes = max(stream.layout.slot_bytes for stream in self.streams.values()) if sends_bytes else 0
        self.memory.blanks.expect(max(0, document.reserved - slots_kept), mapped_bytes)


def _stream(number: int, plain: object, descriptors: list[int]) -> ServedStream:
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


def _summary(changes: dict[str, list[str]], workers: tuple[int, int], keys: list[str], restart: list[str]) -> str:
    """Summary for users. ``workers``: before and after. ``keys``: of [daemon], now in force."""
    parts = [f"{what} {', '.join(which)}" for what, which in changes.items() if which]
    before, after = workers
    if after != before:
        parts.append(f"workers {before} to {after}")
    if keys:
        parts.append(f"[daemon] {', '.join(keys)} changed")
    if restart:
        parts.append(f"[daemon] {', '.join(restart)} need a restart, and stay as they were until then")
    return "; ".join(parts) or "nothing has changed"
