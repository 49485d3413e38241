"""Orders the missing shards from the writers, and handles their results. In ``batchd prepare``.

    samples   0 ............ k-1 | k ............ 2k-1 | ...
              NAME-000000.tar    | NAME-000001.tar     | ...    an order for one writer each

If a writer dies, another one gets its order. A sample that killed two writers counts as bad. Bad
samples are left out. The command fails above the stream's ``max_bad_fraction``, and at the first
bad sample with ``on_error = "fail"``.

Invariant: a writer counts as ended when its pidfd is readable, so a shard that another writer
starts again has no second writer.
"""

import mmap
import os
import selectors
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from json import dumps
from pathlib import Path
from time import monotonic
from typing import Self, TypeAlias

from batchd.commands.prepare import messages
from batchd.commands.prepare.folder import ShardFolder, UnpreparedSample
from batchd.config.tree import StreamConfig
from batchd.data.pipeline.effects import StepInvalid
from batchd.data.pipeline.sample_fields import columns_after
from batchd.data.pipeline.shapes.options import LAST_STEPS
from batchd.data.pipeline.step_files import named_by_content
from batchd.data.samples.columns import Column
from batchd.data.sources.interface import kind_of
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import BatchdError, ConfigInvalid, Problem, ProblemKind, path_text
from batchd.runtime.children import Child, describe, start_linked
from batchd.stream.plan import code_problems, plan_stream
from batchd.worker.messages import NOTE, NOTE_BYTES
from batchd_wire.channel import SEND_BUFFER_BYTES, ChannelClosed, receive_message, send_message
from batchd_wire.codec import Message
from batchd_wire.wording import counted

TICK_S = 0.2
END_S = 2.0
DEATHS_MAX = 2
"""Deaths of writers during one sample; then it is bad."""
DEATHS_WITHOUT_A_SAMPLE_MAX = 5
"""Deaths of writers outside of samples: they cannot even start."""
SEEN_MIN = 100
"""Samples before their bad fraction counts."""


@dataclass(frozen=True, slots=True)
class Output:
    """Pixels in ``image_format`` (jpg, png, webp) with ``quality`` (1 to 100)."""

    folder: Path
    shard_samples: int
    image_format: str
    quality: int


Progress: TypeAlias = Callable[[int, int, int], None]
"""Gets the numbers of samples: all, those that are done, and the bad ones, which are left out."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result. ``shards``: the names of all shards."""

    samples: int
    shards: list[str]
    shard_bytes: int
    left_out: list[UnpreparedSample]
    empty: list[str]
    """Shards without a good sample."""
    columns: dict[str, Column]


@dataclass(frozen=True, slots=True)
class PrepareJob:
    """The stream, and the means to read it."""

    name: str
    config: StreamConfig
    cache: IndexCache
    workers: int
    sample_timeout_s: float
    storage: Storage
    python_path: Sequence[Path] = ()
    """Folders of the user's modules, searched first."""


def prepare(work: PrepareJob, output: Output, progress: Progress) -> Prepared:
    """Write the missing shards. Raises ``BatchdError``; a later call continues from there."""
    _check_source(work)
    columns = kind_of(work.config.source).columns(work.config.source, work.storage)
    # samples of a shard need not have one shape
    steps = tuple(step for step in work.config.pipeline if not isinstance(step, LAST_STEPS))
    try:
        made = dict(columns_after(columns, steps))
    except StepInvalid as problem:
        raise ConfigInvalid(
            [Problem(path_text(("streams", work.name, "pipeline")), ProblemKind.STEP_MISFIT, str(problem))]
        ) from None
    alone = work.config.model_copy(update={"pipeline": steps, "cache": "off", "cache_short_side": None})
    plan = plan_stream(work.name, alone, columns, work.python_path)
    index = scan_source(alone.source, lambda _found: None, work.cache, work.storage, work.python_path)
    recipe = plan.recipe()
    told = messages.PrepareStream(
        recipe,
        work.storage.limits.to_wire(),
        str(output.folder.absolute()),
        output.image_format,
        output.quality,
        work.storage.as_of_ns,
    )
    orders = _orders(work.name, len(index), output)
    named = [named_by_content(step, plan.digests) for step in steps]
    made_of = dumps([recipe.columns, named, recipe.seed, plan.code.digests], sort_keys=True)
    about = {
        "stream": work.name,
        "source": index.digest,
        "samples": len(index),
        "steps": sha256(made_of.encode()).hexdigest(),
        **{name: value for name, value in asdict(output).items() if name != "folder"},
    }
    with ShardFolder(output.folder, about) as folder:
        descriptor = index.to_memfd()
        try:
            _Run(work, folder, orders, told, descriptor, progress).run()
        finally:
            os.close(descriptor)
        names = [order.name for order in orders]
        size = sum((output.folder / name).stat().st_size for name in names)
        bad = Counter(one.shard for one in folder.left_out)
        empty = [order.name for order in orders if bad[order.name] == order.count]
        return Prepared(len(index), names, size, folder.left_out, empty, made)


def _check_source(work: PrepareJob) -> None:
    """Raise ``ConfigInvalid`` for a live source, and for a missing function."""
    source = work.config.source
    if source.is_live:
        text = (
            f'samples of type "{source.type}" cannot be read twice, so what was interrupted could not go on with them'
        )
        raise ConfigInvalid([Problem(f"streams.{work.name}.source", ProblemKind.NOT_TO_PREPARE, text)])
    problems = code_problems([((), source)], dict(enumerate(work.config.pipeline)), work.python_path)
    if problems:
        where = ("streams", work.name)
        raise ConfigInvalid(
            [Problem(path_text((*where, *key)), ProblemKind.OWN_FUNCTION, text) for key, text in problems]
        )


def _orders(name: str, samples: int, output: Output) -> list[messages.WriteShard]:
    return [
        messages.WriteShard(f"{name}-{number:06}.tar", first, min(output.shard_samples, samples - first), [])
        for number, first in enumerate(range(0, samples, output.shard_samples))
    ]


@dataclass(slots=True, eq=False)
class Writer:
    """One process that writes shards."""

    child: Child
    channel: socket.socket
    note: mmap.mmap
    order: messages.WriteShard | None = None
    left_out: list[messages.SampleLeftOut] = field(default_factory=list)
    note_since: tuple[tuple[int, int, int], float] = ((0, 0, 0), 0.0)
    """The last value of the note, and when it changed, by the monotonic clock in seconds."""

    @classmethod
    def start(cls, told: messages.PrepareStream, index_descriptor: int) -> Self:
        """Start a process and send it the recipe. Raises ``OSError``."""
        with ExitStack() as until_done, ExitStack() as where_it_fails:
            note = os.memfd_create("batchd-note", os.MFD_CLOEXEC)
            until_done.callback(os.close, note)
            os.posix_fallocate(note, 0, NOTE_BYTES)
            memory = mmap.mmap(note, NOTE_BYTES)
            child, channel = start_linked("batchd.commands.prepare", str(note), descriptors=[note])
            where_it_fails.enter_context(channel)
            where_it_fails.enter_context(child)
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            send_message(channel, told, [index_descriptor])
            where_it_fails.pop_all()
        return cls(child, channel, memory)

    def write(self, order: messages.WriteShard) -> None:
        """Order a shard. If the writer has ended, its pidfd reports that."""
        self.order, self.left_out = order, []
        self.note_since = (self.note_values, monotonic())
        try:
            send_message(self.channel, order)
        except ChannelClosed:
            return

    @property
    def note_values(self) -> tuple[int, int, int]:
        """The note: first sample of the shard, row + 1 (0 between samples), sample."""
        first, row_after, sample = NOTE.unpack_from(self.note)
        return first, row_after, sample

    @property
    def samples_done(self) -> int:
        """Samples of the present shard that are done."""
        first, row_after, _ = self.note_values
        return max(0, row_after - 1) if self.order is not None and first == self.order.first else 0

    def busy_for_s(self, now: float) -> float:
        """Seconds since it began its present sample."""
        seen, since = self.note_since
        if self.note_values != seen:
            self.note_since = (self.note_values, now)
            return 0.0
        return now - since if self.order is not None and seen[1] else 0.0

    def receive(self) -> Message | None:
        """Its next message; None at the end of the channel. Keeps what is ``left_out``."""
        try:
            message, _ = receive_message(self.channel, messages.TO_PREPARE_FROM_WRITER)
        except ChannelClosed:
            return None
        if isinstance(message, messages.SampleLeftOut):
            self.left_out.append(message)
        return message

    def reap(self) -> tuple[int | None, str]:
        """Reap the ended process: its sample, if it worked on one, and how it ended."""
        how = describe(self.child.reap())
        _, row_after, sample = self.note_values
        self._close()
        return (sample if row_after else None), how

    def end(self) -> None:
        """Kill it."""
        self.child.end(kill_timeout_s=END_S)
        self._close()

    def _close(self) -> None:
        self.channel.close()
        self.note.close()


@dataclass(slots=True)
class _Run:
    work: PrepareJob
    folder: ShardFolder
    orders: list[messages.WriteShard]
    told: messages.PrepareStream
    index_descriptor: int
    progress: Progress
    waiting: deque[messages.WriteShard] = field(init=False)
    done: int = field(init=False)
    deaths: Counter[int] = field(default_factory=Counter)
    deaths_without: int = 0
    writers: list[Writer] = field(default_factory=list)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        self.waiting = deque(order for order in self.orders if not self.folder.has(order.name))
        self.done = sum(order.count for order in self.orders) - sum(order.count for order in self.waiting)

    def run(self) -> None:
        """Order shards, receive results and replace writers until every shard is finished."""
        try:
            for _ in range(min(self.work.workers, len(self.waiting))):
                self._start()
            while any(writer.order is not None for writer in self.writers):
                ready = [(key.data, key.fileobj) for key, _ in self.selector.select(TICK_S)]
                gone = [writer for writer, file in ready if file == writer.child.pidfd]
                for writer, _ in ready:
                    if writer not in gone:
                        self._receive(writer)
                for writer in gone:
                    self._replace(writer)
                now = monotonic()
                for writer in self.writers:
                    if writer.busy_for_s(now) > self.work.sample_timeout_s:
                        writer.child.kill()
                self._report()
        finally:
            for writer in self.writers:
                writer.end()
            self.selector.close()

    def _start(self) -> None:
        """Start another writer process, watch it, and give it a shard."""
        writer = Writer.start(self.told, self.index_descriptor)
        self.writers.append(writer)
        self.selector.register(writer.channel, selectors.EVENT_READ, writer)
        self.selector.register(writer.child.pidfd, selectors.EVENT_READ, writer)
        self._next(writer)

    def _next(self, writer: Writer) -> None:
        writer.order = None
        if self.waiting:
            order = self.waiting.popleft()
            last = order.first + order.count
            skipped = [n for n, deaths in self.deaths.items() if deaths >= DEATHS_MAX and order.first <= n < last]
            writer.write(messages.WriteShard(order.name, order.first, order.count, skipped))

    def _receive(self, writer: Writer) -> Message | None:
        message = writer.receive()
        if isinstance(message, messages.ShardWritten):
            assert writer.order is not None, "it was ordered"
            name = writer.order.name
            left_out = [UnpreparedSample(name, one.sample, one.path, one.reason) for one in writer.left_out]
            self.folder.finish(name, message.shard_bytes, left_out)
            self.done += writer.order.count
            self._next(writer)
        elif isinstance(message, messages.ShardNotWritten):
            raise BatchdError(f"{message.reason}; the same command goes on from here")
        elif message is not None:
            self._check_bad(writer)
        return message

    def _replace(self, writer: Writer) -> None:
        """Read the last messages of a dead writer, count its death, and start another."""
        while self._receive(writer) is not None:
            pass
        self.selector.unregister(writer.channel)
        self.selector.unregister(writer.child.pidfd)
        self.writers.remove(writer)
        order = writer.order
        sample, how = writer.reap()
        if sample is None:
            self.deaths_without += 1
            if self.deaths_without >= DEATHS_WITHOUT_A_SAMPLE_MAX:
                raise BatchdError(f"the writing processes end before they write ({how}); what they say stands above")
        else:
            self.deaths[sample] += 1
        if order is not None:
            self.waiting.appendleft(order)
        if self.waiting:
            self._start()

    def _check_bad(self, writer: Writer) -> None:
        """Raise ``BatchdError`` if the stream allows no more bad samples."""
        last = writer.left_out[-1]
        if self.work.config.on_error == "fail":
            raise BatchdError(f'{last.path}: {last.reason} (sample {last.sample}; on_error = "fail")')
        bad = len(self.folder.left_out) + len(writer.left_out)
        seen = self.done + writer.samples_done + 1
        allowed = self.work.config.max_bad_fraction
        if seen >= SEEN_MIN and bad > allowed * seen:
            raise BatchdError(
                f"{counted(bad, 'bad sample')} of {seen}, more than max_bad_fraction = {allowed} of the stream allows; the last "
                f"one is {last.path}: {last.reason}"
            )

    def _report(self) -> None:
        samples = sum(order.count for order in self.orders)
        done = self.done + sum(writer.samples_done for writer in self.writers)
        bad = len(self.folder.left_out) + sum(len(writer.left_out) for writer in self.writers if writer.order)
        self.progress(samples, done, bad)
