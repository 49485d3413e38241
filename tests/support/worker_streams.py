"""A stream of a worker without its process and its daemon."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchd.config.load import load_config
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.samples.shared_boxes import SharedBoxes
from batchd.data.sources.interface import kind_of
from batchd.data.storage.access import Storage
from batchd.stream.cache_file import CacheOnDisk
from batchd.stream.cache_memory import CacheMemory, CacheSpec
from batchd.stream.plan import plan_stream
from batchd.worker.loop import WorkerStream
from batchd.worker.messages import NOTE_BYTES, Chunk, FillChunks, ServeStream
from batchd.worker.process import NoteMemory
from batchd_wire.fields import CHECKSUM, place_fields
from batchd_wire.slot import RowChecksums
from batchd_wire.views import slot_arrays
from support.samples import scan

CACHE_BYTES = 4 << 20


class WorkerStreams:
    """Makes streams of one worker; ``note`` and ``storage`` are the worker's.

    They are closed with ``stack``.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.storage = Storage()
        self.shared = SharedBoxes()
        stack.callback(self.storage.close)
        self._last_cache: list[int] = []
        descriptor = os.memfd_create("note")
        os.truncate(descriptor, NOTE_BYTES)
        self.note = NoteMemory(descriptor)
        stack.callback(os.close, descriptor)
        stack.callback(self.note.close)

    def start(
        self,
        source: str,
        steps: str = "",
        on_error: str = "fail",
        cache: str = "off",
        cache_dir: str = "",
        samples: int = 12,
        *,
        shares_cache: bool = False,
        waits_for_storage: bool = False,
        repeats: int = 1,
        siblings: str = "",
    ) -> WorkerStream:
        """Open a stream, in order, with a batch of all ``samples``, or ``repeats`` of it.

        ``shares_cache``: its cache is that of the stream before. ``siblings``: of its order.
        """
        message, (index, *_none) = self.serve(source, steps, on_error, cache=cache, samples=samples)
        message = replace(message, waits_for_storage=waits_for_storage, repeats=repeats, siblings=siblings)
        others: list[int] = self._last_cache if shares_cache else []
        if cache != "off" and not shares_cache:
            spec = CacheSpec(cache, "5e" * 32, message.samples, CACHE_BYTES, cache_dir)
            kept: CacheMemory | CacheOnDisk = CacheOnDisk(spec) if cache_dir else CacheMemory(spec)
            others = list(self._stack.enter_context(closing(kept)).descriptors)
            if isinstance(kept, CacheMemory):
                kept.allow(CACHE_BYTES)
            else:
                others = self._stack.enter_context(kept.opened())
            self._last_cache = others
        try:
            stream = WorkerStream(message, index, others, self.note, self.storage, self.shared)
            return self._stack.enter_context(closing(stream))
        finally:
            os.close(index)

    def serve(
        self,
        source: str,
        steps: str = "",
        on_error: str = "fail",
        *,
        number: int = 1,
        cache: str = "off",
        samples: int = 12,
    ) -> tuple[ServeStream, list[int]]:
        """Return the message to a worker about such a stream, and the descriptor of its index."""
        keys = "" if cache == "off" else "cache_memory = '4MiB'"
        (self._folder / "batchd.toml").write_text(
            f"[streams.rows]\nbatch_size = {samples}\non_error = '{on_error}'\nsource = {source}\npipeline = [{steps}]\n"
            f"cache = '{cache}'\n{keys}\n"
        )
        whole = load_config(self._folder / "batchd.toml", {}, {})
        config = whole.streams["rows"]
        columns = kind_of(config.source).columns(config.source, Storage())
        plan = plan_stream("rows", config, columns, whole.daemon)
        fields = (*sample_fields(columns, plan.pipeline.steps, config.on_error), CHECKSUM)
        index = scan(config.source)
        message = ServeStream(
            stream=number,
            name="rows",
            recipe=plan.recipe(),
            samples=len(index),
            batch_size=samples,
            shuffle=False,
            on_error=config.on_error,
            storage=(5000, 3, 24000),
            layout=place_fields(fields, samples).to_wire(),
            cache=cache,
            pack={},
        )
        return message, [index.to_memfd()]


@contextmanager
def worker_streams(folder: Path) -> Iterator[WorkerStreams]:
    """Make streams; each writes its configuration into ``folder``."""
    with ExitStack() as stack:
        yield WorkerStreams(folder, stack)


def fill(
    stream: WorkerStream,
    first: int = 0,
    count: int | None = None,
    epoch: int = 0,
    step: int = 0,
    share: tuple[int, int] = (0, 0),
) -> tuple[list[int], dict[str, np.ndarray]]:
    """Return the bad samples and the rows of a batch, whose checksums are right."""
    count = stream.layout.rows if count is None else count
    page = memoryview(bytearray(b"\x4d" * stream.layout.slot_bytes))
    chunk = Chunk(1, 1, epoch, step, [(first, count)], [], share)
    (done,) = stream.answer(FillChunks(1, [chunk], is_packed=False), {1: (page, {})})
    assert done.hopeless == ""
    assert RowChecksums(stream.layout).wrong_rows(page, first, count) == []
    arrays = slot_arrays(page, stream.layout)
    return [sample for sample, _name, _reason in done.bad], {
        name: array[first : first + count] for name, array in arrays.items()
    }
