"""Orders of a packed stream: each row of a batch gets several documents. WORKER process.

    core.packs: row -> documents      tokens        d1 d1 d1 d1 d2 d2 d3 d3 d3 .  .     ".": fill
    for each: read -> pipeline --->   segment_ids   1  1  1  1  2  2  3  3  3  0  0
              one after the other     position_ids  0  1  2  3  0  1  0  1  2  0  0
                                      lengths       4  2  3  0 ...
                                      index         its sample in the source; -1: no document

A bad sample leaves its room empty: another one need not fit there.

Invariant: every element of every ordered row is written, whatever happens to a sample.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from batchd.core.packs import packed_in
from batchd.core.plan import Plan, Tables
from batchd.core.rows import Rows
from batchd.data.pipeline.effects import INDEX
from batchd.data.pipeline.options import step_from_plain
from batchd.data.pipeline.shapes.effects import LENGTHS, PLACES, SEGMENTS, is_packed
from batchd.data.pipeline.shapes.options import Pack
from batchd.data.pipeline.stages import Row
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import Value, array_of
from batchd.runtime import failpoints
from batchd.worker import messages as orders
from batchd.worker.filling import Bad, ChunkRows, Strategy, StreamContext
from batchd.worker.sample_maker import shortened
from batchd_wire.position import Position
from batchd_wire.views import Array


def planned_documents(plan: Plan, tables: Tables, position: Position, rows: Rows) -> NDArray[np.int64]:
    """The documents of some rows, as ``Packs.contents`` or ``Cuts.contents`` gives them."""
    packs = packed_in(tables)
    assert packs is not None, "the daemon has planned them"
    numbers = plan.first_place(position) + np.asarray(rows, np.int64)
    return packs.contents(position.epoch, numbers, plan.seed, shuffle=plan.shuffle, order=plan.order)


class PackedRows(Strategy):
    """Fills each row with its documents."""

    def __init__(self, context: StreamContext) -> None:
        super().__init__(context)
        pack = step_from_plain(context.message.pack)
        assert isinstance(pack, Pack), "the daemon sends it"
        self._pack = pack

    def fill(self, chunk: ChunkRows) -> tuple[Bad, str]:
        """See ``Strategy``."""
        self._note.begin(chunk.order)
        bad: Bad = []
        of_row = np.split(chunk.samples[:, 1:], np.searchsorted(chunk.samples[:, 0], np.arange(1, len(chunk.rows))))
        for row, parts in zip(chunk.rows, of_row, strict=True):
            writer = PackWriter(
                self._pack, self._maker.columns, {name: array[row] for name, array in chunk.arrays.items()}
            )
            for sample, *part in parts.tolist():
                offset = writer.elements
                reason = self._add(chunk.draw_epoch, row, sample, part, writer)
                if reason is not None:
                    self._tell(bad, sample, reason)
                if self._made is not None:
                    length = writer.elements - offset
                    self._made.append(self._document_made(chunk.order, row, sample, part[0], offset, length, reason))
            writer.finish()
            chunk.write_checksums(row)
            if self._made is not None:
                self._made.append(orders.RowMade(chunk.order, row, 0, 0, "", True, [], 0, []))
        self._note.clear()
        failpoints.passing("worker.chunk.written")
        return bad, ""

    def _document_made(  # noqa: PLR0913, PLR0917  each is a fact of the document
        self, order: int, row: int, sample: int, first: int, offset: int, length: int, reason: str | None
    ) -> orders.DocumentMade:
        return orders.DocumentMade(
            order=order,
            row=row,
            sample=sample,
            name=self._maker.shown_name(sample),
            first=first,
            offset=offset,
            length=length,
            reason=shortened(reason or "", orders.REASON_BYTES_MAX),
            modified_ns=self._maker.modified_ns(sample),
            draws=[] if reason is not None else list(self._draws),
        )

    def _add(self, epoch: int, row: int, sample: int, part: list[int], writer: "PackWriter") -> str | None:
        """Make a document and add a part of it to a row; says why it is bad, if it is."""
        first, *count = part
        if not self._begin(row, sample):
            return "quarantined"
        return self._maker.make_for(
            epoch, sample, partial(writer.add, sample, first, count=count[0] if count else None)
        )


class PackWriter:
    """Writes the documents of one ``row``. ``columns``: of a sample, by name."""

    def __init__(self, pack: Pack, columns: Mapping[str, Column], row: Row) -> None:
        self._pack = pack
        self._row = row
        self._packed = [column for column in columns.values() if is_packed(column)]
        self._numbered = [column.name for column in self._packed if column.beside and column.shape == (None,)]
        """The numbers of the images of patches."""
        self._single = [column for column in columns.values() if not is_packed(column)]
        self.elements = 0
        """Written so far."""
        self._patches = self._images = 0
        self._documents = 0

    def add(self, sample: int, first: int, values: Mapping[str, Value], *, count: int | None = None) -> None:
        """Add the elements of a sample from ``first`` on. Raises ``SampleUndecodable``.

        ``count``: how many; None: all, or as many as a row has.
        """
        arrays = {column.name: array_of(column, values[column.name]) for column in self._packed}
        single = {column.name: array_of(column, values[column.name]) for column in self._single}
        length = len(arrays[self._pack.field])
        patches = {column.name: arrays.pop(column.name) for column in self._packed if column.beside is not None}
        for name, array in arrays.items():
            if len(array) != length:
                raise SampleUndecodable(f"{name!r} has {len(array)} elements, and {self._pack.field!r} {length}")
        planned = count
        count = min(length - first, self._pack.length if planned is None else planned)
        begin, end = self.elements, self.elements + count
        if count <= 0 or end > self._pack.length or count != (planned or count):
            raise SampleUndecodable(
                f"{self._pack.field!r} has {length} elements, another number than when its rows were planned: the sample "
                "has changed; restart the daemon, so that it is measured again"
            )
        row, number = self._row, self._documents
        for name, array in arrays.items():
            row[name][begin:end] = array[first : first + count]
        self._add_patches(patches)
        for name, array in single.items():
            row[name][number] = array
        if self._pack.ids:
            row[SEGMENTS][begin:end] = number + 1
            row[PLACES][begin:end] = np.arange(count)
        row[INDEX][number] = sample
        row[LENGTHS][number] = count
        self.elements, self._documents = end, number + 1

    def _add_patches(self, patches: Mapping[str, Array]) -> None:
        """Add the patches of the images of a sample; their images are numbered within the row."""
        if not patches:
            return
        begin = self._patches
        (end,) = {begin + len(array) for array in patches.values()}
        for name, array in patches.items():
            if end > len(self._row[name]):
                raise SampleUndecodable(
                    f"its images have {end - begin} patches, more than the row has room for: their sizes have changed since "
                    "the rows were planned; restart the daemon, so that they are measured again"
                )
            self._row[name][begin:end] = array + self._images if name in self._numbered else array
        self._patches = end
        self._images += max((int(patches[name].max(initial=0)) for name in self._numbered), default=0)

    def finish(self) -> None:
        """Fill the room that is left."""
        for column in self._packed:
            end = self.elements if column.beside is None else self._patches
            self._row[column.name][end:] = self._pack.fill if column.name == self._pack.field else 0
        for name in (SEGMENTS, PLACES) if self._pack.ids else ():
            self._row[name][self.elements :] = 0
        for name in (*(column.name for column in self._single), LENGTHS):
            self._row[name][self._documents :] = 0
        self._row[INDEX][self._documents :] = -1
