"""Makes the batch of any position again: `batchd replay`, and ``batchd.replay`` in user's programs.

    Config --open_stream--> plan, layout, ServeStream --> workers --> a slot of memory
                                       orders of few rows --^   +---> how each row was made

Cache, window, memory and number of workers decide no byte, so none of them is needed: what a row is
made of is read from the source.

Invariant: plan, sample maker and pipeline are those of the daemon's workers, in processes of their
own: no code of the user runs in this one.
"""

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from operator import index
from pathlib import Path
from typing import NamedTuple, Self

from batchd.commands.history import cards
from batchd.config.draft import whole_draft
from batchd.config.load import load_config
from batchd.config.tree import Config
from batchd.core.course import Course, Share
from batchd.core.plan import Plan
from batchd.data.pipeline.options import step_from_plain
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import BatchdError, ConfigInvalid, SourceInvalid
from batchd.runtime.children import start_linked
from batchd.runtime.directories import default_cache_dir
from batchd.runtime.suggestions import suggestion
from batchd.stream.fingerprints import changes_since, content_from, part_differences
from batchd.stream.plan import look_at_stream
from batchd.stream.rings import RingSize, slot_layout
from batchd.stream.served import ServedStream, open_stream
from batchd.worker.messages import Chunk, ChunksFilled, DocumentMade, FillChunks, RowMade, UseSlot
from batchd.worker.order_runner import STREAM, OrderProgress, OrderRunner, OrderToRun, WorkersEnd
from batchd_wire.codec import Message
from batchd_wire.fields import CHECKSUM, RAGGED, SlotLayout, Varying, sizes_field
from batchd_wire.position import Position
from batchd_wire.slot import rows_crc32
from batchd_wire.views import Array, checked_sizes, cut_to_largest, field_array, row_views, slot_arrays
from batchd_wire.wording import counted

SLOTS = 2
"""Of the ring that the plan of a stream asks for; none is made."""
SLOT = 0
"""The number of the slot that is filled instead."""
CHUNK_ROWS = 8
"""Rows of one order: few enough for all workers to end at about the same time."""


class TrainerRank(NamedTuple):
    """A trainer among those that share a stream."""

    rank: int
    world_size: int

    def check(self) -> None:
        """Raise ``BatchdError`` if there is no such rank."""
        if not 0 <= self.rank < self.world_size:
            ranks = counted(self.world_size, "rank")
            raise BatchdError(f"there is no rank {self.rank} of {ranks}, counted from 0; give --world-size, too")


ALONE = TrainerRank(0, 1)


class Tried(NamedTuple):
    """A bad sample, in whose place another one was taken, or none."""

    sample: int
    name: str
    reason: str


class Draw(NamedTuple):
    """The results of one random step, by their names. ``field`` is "" for a function's."""

    op: str
    field: str
    drew: Mapping[str, object]


class ReplayedDocument(NamedTuple):
    """A document of a packed row.

    ``first``: its first element in ``sample``, later than 0 where a long one is split; ``offset``
    and ``length``: its elements in the row. ``reason``: "", or why the sample is bad: then it has
    no element in the row.
    """

    sample: int
    name: str
    first: int
    offset: int
    length: int
    reason: str
    draws: tuple[Draw, ...]
    is_changed: bool


@dataclass(frozen=True, slots=True)
class ReplayedRow:
    """One row of a batch.

    ``sample``: its number in the source; ``planned``: the one that the plan names. They differ if
    that was bad: ``tried`` has the bad ones in order. ``name``: its file, and the record in it.
    ``is_good``: false if the row has no sample, because of ``on_error``. ``label`` is None without
    such a field of one number, ``class_name`` "" without names. ``crc32``: as ``verify = true`` has
    it. ``is_changed``: the file was written after the time that the caller named. ``documents``: of
    a packed row, which has no sample of its own: ``planned`` and ``sample`` are -1.
    """

    row: int
    planned: int
    sample: int
    name: str
    is_good: bool
    tried: tuple[Tried, ...]
    draws: tuple[Draw, ...]
    label: int | None
    class_name: str
    crc32: int
    is_changed: bool
    documents: tuple[ReplayedDocument, ...] = ()

    def to_plain(self) -> dict[str, object]:
        """The facts as JSON."""
        plain: dict[str, object] = {name: getattr(self, name) for name in ReplayedRow.__slots__}
        plain["tried"] = [tried._asdict() for tried in self.tried]
        plain["draws"] = [draw._asdict() for draw in self.draws]
        plain["documents"] = [
            {**document._asdict(), "draws": [draw._asdict() for draw in document.draws]} for document in self.documents
        ]
        return {**plain, "crc32": crc_text(self.crc32)}


class ReplayedField(NamedTuple):
    """A field with the whole room of its samples, ``[rows, *shape]``.

    ``sizes``: int64 ``[rows, varying dimensions]``, None if all samples have one shape.
    """

    array: Array
    sizes: Array | None
    varying: Varying | None


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """The batch of a position, and how it was made.

    ``fields``: each ``[rows, *shape]`` as a trainer has it: a padded field is cut to the largest
    sample, a ragged one is a list of arrays. ``crc32``: of all rows, as ``Batch.crc32``.
    ``changed``: files that were written after the time that the caller named. ``bgr_fields``:
    images with blue as their first channel. ``overlays``: what is drawn over images. ``rooms``: the
    fields with the room of their samples.
    """

    stream: str
    position: Position
    rows: tuple[ReplayedRow, ...]
    fields: Mapping[str, Array | list[Array]]
    crc32: int
    fingerprint: str
    versions: Mapping[str, str]
    classes: Sequence[str]
    changed: tuple[str, ...]
    bgr_fields: Sequence[str]
    overlays: Sequence[tuple[str, str, str, str, bool]]
    rooms: Mapping[str, ReplayedField]

    def to_plain(self) -> dict[str, object]:
        """The facts as JSON, without the fields."""
        return {
            "stream": self.stream,
            "epoch": self.position.epoch,
            "step": self.position.step,
            "crc32": crc_text(self.crc32),
            "fingerprint": self.fingerprint,
            "versions": dict(self.versions),
            "changed": list(self.changed),
            "rows": [row.to_plain() for row in self.rows],
        }


def crc_text(crc32: int) -> str:
    """A checksum as eight hexadecimal digits."""
    return f"{crc32:08x}"


def check_stream(config: Config, name: str) -> None:
    """Raise ``BatchdError`` if there is no such stream, or if its batches cannot be made again."""
    if name not in config.streams:
        raise BatchdError(f"there is no stream {name!r}; {suggestion(name, list(config.streams))}")
    source = config.streams[name].source
    if source.is_live:
        raise BatchdError(
            f'stream {name!r} is live: samples of type "{source.type}" come once and are not kept, so none of its batches can '
            "be made again; write them to files, and serve those"
            + (
                '; with journal = "64MiB", `batchd replay` and `batchd seen` say what was in which'
                if source.type == "push"
                else ""
            )
        )


def open_alone(config: Config, name: str) -> ServedStream:
    """Open a stream as the daemon does, without serving it. The caller closes it.

    Raises ``ConfigInvalid``, ``SourceInvalid``, and what ``check_stream`` raises.
    """
    check_stream(config, name)
    stream = config.streams[name]
    storage = Storage(config.daemon.storage_limits(), encloses=config.daemon.encloses)
    findings = look_at_stream(name, whole_draft(stream), config.daemon.python_path or (), storage, thoroughly=False)
    if findings.columns is None or findings.problems:
        raise ConfigInvalid(findings.problems)
    ring = RingSize(findings.columns, slot_layout(stream, findings.columns, has_checksums=True), SLOTS)
    whole = config.model_copy(update={"streams": {name: stream}})
    cache = IndexCache(config.daemon.cache_dir or default_cache_dir())
    return open_stream(STREAM, name, whole, ring, storage, cache, lambda _found: None)


def card_of(opened: ServedStream, decoders: str) -> cards.RunCard:
    """The card of an open stream."""
    return cards.RunCard.of(opened.facts.card, cards.versions_here(decoders))


class MadeRow(NamedTuple):
    """How a row was made; of a packed row, also its documents, in order."""

    row: RowMade
    documents: list[DocumentMade]


class Replayer:
    """Makes batches of one stream again. A context manager; a second batch takes less time.

    ``since_s``: files that were written after this Unix time count as changed; None if nothing is
    known of the time of the run. Raises as ``open_alone``.
    """

    def __init__(self, config: Config, stream: str, *, since_s: float | None = None) -> None:
        check_stream(config, stream)
        self.name, self.source = stream, config.streams[stream].source
        self._since_ns = None if since_s is None else int(since_s * 1e9)
        with ExitStack() as where_it_fails:
            try:
                self._open(config, stream, where_it_fails)
            except OSError as error:
                raise BatchdError(
                    f"stream {stream!r} cannot be replayed: {error.strerror}; a batch of it takes memory, and so do its workers"
                ) from None
            self._close = where_it_fails.pop_all()

    def _open(self, config: Config, stream: str, where_it_fails: ExitStack) -> None:
        daemon = config.daemon
        launched = start_linked("batchd.worker")  # it imports while this one scans
        self._workers = OrderRunner(daemon.worker_count(), daemon.sample_timeout_s, launched)
        where_it_fails.enter_context(self._workers)
        self._opened = open_alone(config, stream)
        where_it_fails.callback(self._opened.close)
        slot = os.memfd_create("batchd-replay", os.MFD_CLOEXEC)
        where_it_fails.callback(os.close, slot)
        slot_bytes = self._opened.layout.slot_bytes
        os.posix_fallocate(slot, 0, slot_bytes)
        self._page = memoryview(mmap.mmap(slot, slot_bytes))
        message = replace(self._opened.message, cache="off", tells_rows=True, waits_for_storage=False)
        self._workers.serve((message, [self._opened.index_descriptor]), (UseSlot(SLOT, slot_bytes), [slot]))
        self._is_packed = bool(message.pack)
        self._random = [step for step in map(step_from_plain, message.recipe.steps) if step.is_random]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._close.close()

    @property
    def plan(self) -> Plan:
        """The plan of the stream."""
        return self._opened.spec.plan

    @property
    def index(self) -> SourceIndex:
        """The index of the stream's source, over memory that lasts as long as this."""
        return SourceIndex.from_descriptor(self._opened.index_descriptor)

    @property
    def fingerprint(self) -> str:
        """The present fingerprint of the stream."""
        return self._opened.spec.fingerprint

    def card(self) -> cards.RunCard:
        """The card of the stream; the versions of decoders are there once a batch was made."""
        return card_of(self._opened, self._workers.decoders)

    def at(self, position: Position, trainer: TrainerRank = ALONE, back: int = 0) -> Replayed:
        """Make the batch of a trainer that begins at ``position``, or one ``back`` batches earlier.

        With one rank that is the batch at the position. In an epoch's last round, ranks may share a
        batch; then it is the rows of this one. Raises ``BatchdError``.
        """
        return self.rows(*share_at(self._opened.name, self.plan, position, trainer, back))

    def rows(self, position: Position, first: int, count: int) -> Replayed:
        """Make ``count`` rows of the batch at ``position``, from ``first`` on.

        Raises ``BatchdError``.
        """
        planned = self.plan.indices(position, first, count).tolist()
        rows = range(first, first + count)
        made = self._made(position, rows, planned)
        layout = self._opened.layout_of(position)
        rooms = _rooms(self._page, layout, rows)
        sums = next(field for field in layout.fields if field.name == CHECKSUM.name)
        crcs = field_array(self._page, sums, layout.rows)[first : rows.stop].tolist()
        covered = [(field.offset, field.row_bytes) for field in layout.sample_fields]
        facts = zip(made, self._labels(rooms, count), crcs, strict=True)
        replayed = tuple(self._row(row, label, crc) for row, label, crc in facts)
        return Replayed(
            self._opened.name,
            position,
            replayed,
            {name: _as_trainers_have_it(room) for name, room in rooms.items()},
            rows_crc32(self._page, covered, rows),
            self.fingerprint,
            cards.versions_here(self._workers.decoders),
            self._opened.facts.classes,
            tuple(dict.fromkeys([*self._changed_containers(), *_changed_names(replayed)])),
            self._opened.spec.bgr_fields,
            self._opened.facts.overlays,
            rooms,
        )

    def _made(self, position: Position, rows: range, planned: Sequence[int]) -> list[MadeRow]:
        """Fill these rows; ``planned``: the samples of all of them. Raises ``BatchdError``."""
        made: list[MadeRow] = []

        def heard(work: OrderProgress) -> None:
            done = work.reports[-1]
            if isinstance(done, ChunksFilled):
                if done.hopeless:
                    raise BatchdError(f"stream {self._opened.name!r} stopped at this batch: {done.hopeless}")
                made.extend(_made_rows(work.reports))

        try:
            self._workers.run(_orders(position, rows, planned), heard)
        except WorkersEnd as how:
            raise BatchdError(f"the workers end before they make a sample ({how}); their output is above") from None
        return sorted(made, key=lambda made_row: made_row.row.row)

    def _labels(self, rooms: Mapping[str, ReplayedField], count: int) -> list[int | None]:
        room = rooms.get("label")
        is_number = room is not None and room.array.ndim == 1 and room.array.dtype.kind in "iu"
        return room.array.tolist() if room is not None and is_number else [None] * count

    def _row(self, made_row: MadeRow, label: int | None, crc32: int) -> ReplayedRow:
        made, classes = made_row.row, self._opened.facts.classes
        documents = tuple(map(self._document, made_row.documents))
        return ReplayedRow(
            row=made.row,
            planned=-1 if self._is_packed else made.planned,
            sample=-1 if self._is_packed else made.sample,
            name=made.name,
            is_good=made.is_good,
            tried=tuple(Tried(*tried) for tried in made.tried),
            draws=self._drawn(made.draws),
            label=label,
            class_name=classes[label] if label is not None and 0 <= label < len(classes) else "",
            crc32=crc32,
            is_changed=self._is_changed(made.modified_ns) or any(document.is_changed for document in documents),
            documents=documents,
        )

    def _document(self, made: DocumentMade) -> ReplayedDocument:
        return ReplayedDocument(
            made.sample,
            made.name,
            made.first,
            made.offset,
            made.length,
            made.reason,
            self._drawn(made.draws),
            self._is_changed(made.modified_ns),
        )

    def _drawn(self, draws: Sequence[Mapping[str, object]]) -> tuple[Draw, ...]:
        steps = self._random if draws else []  # without a sample, nothing was drawn
        return tuple(Draw(step.op, getattr(step, "field", ""), drew) for step, drew in zip(steps, draws, strict=True))

    def _is_changed(self, modified_ns: int) -> bool:
        return self._since_ns is not None and modified_ns > self._since_ns

    def _changed_containers(self) -> list[str]:
        """The files of many samples that were written too late; the scan has noted when."""
        place = SourceIndex.from_descriptor(self._opened.index_descriptor).place
        return [path for path, modified_ns in _modified_in(place) if self._is_changed(modified_ns)]


def _changed_names(rows: Sequence[ReplayedRow]) -> list[str]:
    parts = [part for row in rows for part in (row.documents or (row,))]
    return [part.name for part in parts if part.is_changed]


def check_position(stream: str, plan: Plan, position: Position) -> None:
    """Raise ``BatchdError`` if an epoch has no such step."""
    if position.step >= plan.steps:
        raise BatchdError(
            f"stream {stream!r} has no step {position.step}: an epoch has the steps 0 to {plan.steps - 1}, counted over all ranks"
        )


def share_at(stream: str, plan: Plan, position: Position, trainer: TrainerRank = ALONE, back: int = 0) -> Share:
    """The batch of a trainer at the ``position`` of all ranks, or ``back`` of its batches earlier.

    Ranks read a whole epoch in rounds from its step 0 on. An epoch that was begun with another
    number of ranks has other rounds before that. Raises ``BatchdError``.
    """
    rank, world_size = trainer
    trainer.check()
    if position.step == plan.steps:  # the end of an epoch is the beginning of the next
        position = Position(position.epoch + 1, 0)
    check_position(stream, plan, position)
    epoch, step = position
    rounds = Course(plan, rank, world_size, 0, 0, None).rounds
    if rounds == 0:
        raise BatchdError(
            f"stream {stream!r} has {counted(plan.steps, 'step')} in an epoch, and none for {world_size} ranks"
        )
    rounds_here, begun = divmod(step, world_size)
    turn = rounds_here - back
    if turn < 0 and begun:
        raise BatchdError(
            f"step {step} is no whole number of rounds of {world_size} ranks, so batches before step {begun} were read by "
            "another number of ranks; name their position instead of --back"
        )
    if turn < 0:
        earlier, turn = divmod(turn, rounds)
        epoch += earlier
    if epoch < 0:
        raise BatchdError(
            f"there are no {back} batches of a rank before epoch {position.epoch}, step {step}; give a smaller --back"
        )
    share = Course(plan, rank, world_size, epoch, begun, None).at(turn)
    assert share is not None, "a course without an end"
    return share


def _orders(position: Position, rows: range, planned: Sequence[int]) -> Iterator[OrderToRun]:
    """Orders of a few rows each. ``planned``: the sample of each row."""
    numbers = count(1)

    def order(first: int, end: int) -> OrderToRun:
        chunk = Chunk(next(numbers), SLOT, *position, [(rows[first], end - first)], [])
        single = [order(place, place + 1) for place in range(first, end)] if end - first > 1 else []
        return OrderToRun(chunk.order, FillChunks(STREAM, [chunk], is_packed=False), planned[first], single)

    for first in range(0, len(rows), CHUNK_ROWS):
        yield order(first, min(first + CHUNK_ROWS, len(rows)))


def _made_rows(reports: Sequence[Message]) -> Iterator[MadeRow]:
    documents: list[DocumentMade] = []
    for report in reports:
        if isinstance(report, DocumentMade):
            documents.append(report)
        elif isinstance(report, RowMade):
            yield MadeRow(report, documents)
            documents = []


def _rooms(page: memoryview, layout: SlotLayout, rows: range) -> dict[str, ReplayedField]:
    """The fields of some rows, copied, by name."""
    arrays = {name: array[rows.start : rows.stop].copy() for name, array in slot_arrays(page, layout).items()}
    rooms = {}
    for field in layout.sample_fields:
        sizes = sizes_field(field)
        known = None
        if sizes is not None and field.varying is not None:
            known = checked_sizes(arrays[sizes.name], field.shape, field.varying)
        rooms[field.name] = ReplayedField(arrays[field.name], known, field.varying)
    return rooms


def _as_trainers_have_it(room: ReplayedField) -> Array | list[Array]:
    if room.varying is None or room.sizes is None:
        return room.array
    show = row_views if room.varying.kind == RAGGED else cut_to_largest
    return show(room.array, room.sizes, room.varying)


def _modified_in(place: object) -> list[tuple[str, int]]:
    """(Path, last change in ns since 1970) of the files that an index names, also in its parts."""
    if isinstance(place, Mapping):
        versions = place.get("versions")
        named = versions.items() if isinstance(versions, Mapping) else ()
        own = [(str(path), int(version[2])) for path, version in named]
        return own + [time_ns for key, part in place.items() if key != "versions" for time_ns in _modified_in(part)]
    return [time_ns for part in place for time_ns in _modified_in(part)] if isinstance(place, list) else []


def replay(  # noqa: PLR0913  most have defaults
    config: str | os.PathLike[str],
    stream: str,
    position: tuple[int, int] | Mapping[str, object],
    *,
    rank: int = 0,
    world_size: int = 1,
    overrides: Mapping[str, str] | None = None,
) -> Replayed:
    """Make the batch of a position again, without a daemon: its fields, and how each row was made.

    ``config`` is a TOML file as `batchd serve` reads it, or a card (``.json``) that `batchd card`
    wrote; ``overrides`` are dotted keys with values, as for ``--set``. ``position`` is
    (epoch, step), or the state of a trainer, from ``state_dict()``: then it is the next batch of
    ``rank``. The result has ``fields`` (numpy arrays ``[rows, ...]`` by name), ``rows`` and
    ``crc32``, which ``Batch.crc32()`` of the trainer's batch gives, too.

    Raises ``BatchdError`` if the stream is live or unknown, the position is beyond the epoch, or
    the state or the card is of other files or other settings: it says which.
    """
    run = read_run_position(config, position, overrides)
    with Replayer(run.config, stream, since_s=None if run.card is None else run.card.time_s) as replayer:
        check_fingerprint(replayer.card(), run.card, run.state)
        return replayer.at(run.position, TrainerRank(rank, world_size))


class RunPosition(NamedTuple):
    """A position that a caller named: ``state`` is that of a trainer if it was one."""

    card: cards.RunCard | None
    state: cards.TrainerState | None
    config: Config
    position: Position


def read_run_position(
    config: str | os.PathLike[str],
    position: tuple[int, int] | Mapping[str, object],
    overrides: Mapping[str, str] | None,
) -> RunPosition:
    """Read a configuration, or a card (``.json``), and a position, or the state of a trainer.

    Raises ``BatchdError``, naming the file or the argument.
    """
    if not isinstance(config, (str, os.PathLike)):
        raise BatchdError(f"config is of type {type(config).__name__}; give the path of a configuration, or of a card")
    file = Path(config)
    card = cards.read_card(file) if file.suffix == ".json" else None
    state = cards.state_of(position, "position") if isinstance(position, Mapping) else None
    whole = load_config(file, overrides or {}) if card is None else card.config()
    return RunPosition(card, state, whole, state.position if state is not None else _pair(position))


def _pair(position: object) -> Position:
    """The position of two integers. Raises ``BatchdError``."""
    try:
        epoch, step = map(index, position)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise BatchdError(
            f"position is {position!r}; give (epoch, step), or a state as stream.state_dict() returns it"
        ) from None
    return Position(epoch, step)


def check_state_stream(state: cards.TrainerState, stream: str) -> None:
    """Raise ``BatchdError`` if the state is of another stream."""
    if state.stream != stream:
        raise BatchdError(f"the state is of stream {state.stream!r}, not {stream!r}; name that stream")


def check_fingerprint(
    now: cards.RunCard,
    card: cards.RunCard | None,
    state: cards.TrainerState | None,
    than: str = "when the card was written",
) -> None:
    """Raise ``SourceInvalid`` if a card or a state is of other batches than the stream ``now``.

    ``than``: of what the card is.
    """
    if state is not None:
        check_state_stream(state, now.stream)
    if card is not None and card.fingerprint != now.fingerprint:
        lines = "".join(f"\n  {line}" for line in part_differences(card.parts, now.parts))
        differ = f":{lines}" if lines else f" (fingerprint {card.fingerprint[:16]}, now {now.fingerprint[:16]})"
        raise SourceInvalid(f"stream {now.stream!r} makes other batches than {than}{differ}")
    if state is not None and state.fingerprint != now.fingerprint:
        found = changes_since(state.fingerprint, state.parts, content_from(now.parts)).lines
        lines = "".join(f"\n  {line}" for line in found)
        what = f":{lines}" if lines else "; a card of that run says what differs, and has its configuration"
        raise SourceInvalid(
            f"the state is of a stream {now.stream!r} with other files or other settings (fingerprint "
            f"{state.fingerprint[:16]}, now {now.fingerprint[:16]}), so its position is another batch{what}"
        )
