"""One batch in shared memory, and its lease. Runs in the trainer.

    Batch ----> Lease <---- FieldMemory <---- numpy array <---- slices, tensors, memoryviews
                |   |
                |   +--> SlotMemory (the mapping), Lifeline (its end would end the lease)
                +~ ~ ~ > LeaseToken (weak): appended to the subscription's ``ended`` at the end

The lease ends when the batch and the last array over its memory are gone, or by ``release()``. The
garbage collector may end it in any thread, at any point of the program. So the end only appends to
a queue, and the next pull reports it. Not ``__del__`` or ``weakref.finalize``: those run Python
code, which a signal handler may interrupt half way. A weak reference whose callback is
``deque.append`` runs none, and costs a tenth.

A ragged field as one array (``Ragged`` is Arrow's LargeListView, ``CompactRagged`` the form of
TensorFlow's ``RaggedTensor.from_row_splits`` and torch's ``nested.nested_tensor_from_jagged``):

    values    a a a . . . b . . . . . c c . . . .     the room of all rows; "." is unused room
    offsets   0           6           12              the start of each row
    lengths   3           1           2               the length of each row

    values    a a a b c c                           compacted: a copy
    row_splits  0     3 4   6                       row i: values[row_splits[i] : row_splits[i + 1]]

Invariant: while a lease has not ended, the daemon writes nothing to its slot.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import ref

import numpy as np
import numpy.typing as npt

from batchd_client.errors import BatchReleased, NotCopyable, ProtocolError
from batchd_client.extensions import Extension
from batchd_client.memory import BatchMemory, ReceiveBuffer
from batchd_wire.fields import RAGGED, SlotLayout, Varying, largest_shape, length_texts, sizes_field
from batchd_wire.messages import Handle, Parcel, Subscribed
from batchd_wire.slot import rows_crc32
from batchd_wire.views import Array, checked_sizes, cut_to_largest, row_views

if TYPE_CHECKING:
    from torch import Tensor

html_of_batch: "Extension[[Batch, str, Shown], str]" = Extension("batchd_client.notebook")
tensors_of_batch: "Extension[[Batch, bool], dict[str, Tensor | list[Tensor]]]" = Extension(
    "batchd_client.torch.tensors"
)


class Shown(NamedTuple):
    """What pictures of a stream's batches show besides the arrays: ``classes`` of labels."""

    classes: Sequence[str] = ()
    overlays: Sequence[tuple[str, str, str, str, bool]] = ()
    """See ``fields.Overlay``."""

    @classmethod
    def of(cls, admitted: Subscribed) -> Self:
        """Of a subscription."""
        return cls(admitted.classes, admitted.overlays or ())


class CompactRagged(NamedTuple):
    """A ragged field copied without gaps; see the drawing.

    ``values``: ``[elements, ...]``, in the field's dtype. ``row_splits``: int64 ``[rows + 1]``.
    """

    values: Array
    row_splits: npt.NDArray[np.int64]


class Ragged(NamedTuple):
    """A ragged field over shared memory, not a copy; see the drawing.

    ``values``: ``[elements, ...]``, in the field's dtype, read-only. Dimensions behind the last
    varying one are kept: for ``float32[<=128, 768]`` it is ``[rows * 128, 768]``. ``offsets`` and
    ``lengths``: int64 ``[rows]``, in elements of ``values``.
    """

    values: Array
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def compact(self) -> CompactRagged:
        """Copy the values without gaps between the rows. The copy does not keep the batch alive."""
        row_splits = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=row_splits[1:])
        values = np.empty((int(row_splits[-1]), *self.values.shape[1:]), self.values.dtype)
        for start, end, offset in zip(row_splits[:-1], row_splits[1:], self.offsets, strict=True):
            values[start:end] = self.values[offset : offset + end - start]
        return CompactRagged(values, row_splits)


class Packed(NamedTuple):
    """A packed field over shared memory, not a copy: the rows of a batch, one after the other.

    ``values``: ``[rows * length, ...]``, in the field's dtype, read-only. ``row_splits``: int32
    ``[pieces + 1]``; a piece is a document, or what is left of a row after its last one, so they
    cover all values, as attention with ``cu_seqlens`` needs it. ``is_document``: bool ``[pieces]``.
    """

    values: Array
    row_splits: npt.NDArray[np.int32]
    is_document: npt.NDArray[np.bool_]

    def documents(self) -> list[Array]:
        """Return the values of each document, ``[elements, ...]``: views, in the rows' order."""
        pieces = zip(self.row_splits[:-1], self.row_splits[1:], self.is_document, strict=True)
        return [self.values[begin:end] for begin, end, is_document in pieces if is_document]

    @property
    def max_length(self) -> int:
        """The length of the longest piece."""
        return int(np.diff(self.row_splits).max(initial=0))


def ragged_view(array: Array, sizes: npt.NDArray[np.int64], varying: Varying) -> Ragged:
    """View a ragged field: contiguous ``[rows, *shape]``, with ``sizes`` of ``checked_sizes``."""
    shape = array.shape[1:]
    last = varying.axes[-1] + 1
    room = prod(shape[:last])
    fixed = prod(length for axis, length in enumerate(shape[:last]) if axis not in varying.axes)
    values = array.reshape(len(array) * room, *shape[last:])
    offsets = np.arange(len(array), dtype=np.int64) * room
    return Ragged(values, offsets, sizes.prod(axis=1, dtype=np.int64) * fixed)


class FieldView(NamedTuple):
    """A field prepared for ``__array_interface__``; ``sizes`` names its field of sizes, if any."""

    name: str
    type_text: str
    shape: tuple[int, ...]
    row_bytes: int
    offset: int
    varying: Varying | None
    sizes: str


def field_views(layout: SlotLayout) -> dict[str, FieldView]:
    """Prepare the fields of a sample, once for all batches of a stream."""
    views = {}
    for field in layout.sample_fields:
        sizes = sizes_field(field)
        views[field.name] = FieldView(
            field.name,
            np.dtype(field.dtype).newbyteorder("<").str,
            field.shape,
            field.row_bytes,
            field.offset,
            field.varying,
            sizes.name if sizes else "",
        )
    return views


class BatchRows(NamedTuple):
    """The rows of a batch: ``first`` to ``first + rows`` of the position (``epoch``, ``step``)."""

    epoch: int
    step: int
    first: int
    rows: int


class WholeField(NamedTuple):
    """A field of a batch with the whole room of its samples.

    ``array``: ``[samples, *shape]``, contiguous and read-only. ``sizes``: int64
    ``[samples, varying dimensions]``, the size of each sample; None if all have one shape.
    """

    array: Array
    sizes: npt.NDArray[np.int64] | None
    varying: Varying | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The largest lengths of a sample."""
        return largest_shape(self.array.shape[1:], self.varying)


class LeaseToken(ref["Lease"]):
    """An ended lease: the numbers that report its end."""

    __slots__ = ("generation", "sequence")
    sequence: int
    generation: int


class Lease:
    """A trainer's right to read one slot.

    Its end appends its ``token`` to ``ended``, at least once. ``lifeline`` is only kept alive: its
    end would end all leases at once.
    """

    __slots__ = ("__weakref__", "_ended", "lifeline", "memory", "token")

    def __init__(
        self, memory: BatchMemory, lifeline: object, ended: deque[LeaseToken], handle: Handle | Parcel
    ) -> None:
        self.memory = memory
        self.lifeline = lifeline
        self._ended = ended
        self.token = LeaseToken(self, ended.append)
        self.token.sequence = handle.sequence
        self.token.generation = handle.generation

    def end(self) -> None:
        """End the lease early; repeated calls do no harm."""
        self._ended.append(self.token)


class SharedLease:
    """A lease of several batches, each with a ``part``: it ends early with the last of them.

    ``let_go``: there will be no further part.
    """

    __slots__ = ("_alive", "lease")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self._alive = 1

    def part(self) -> "LeasePart":
        """The lease for one batch more."""
        self._alive += 1
        return LeasePart(self)

    def let_go(self) -> None:
        """End one of the parts, or the wait for a further one."""
        self._alive -= 1
        if not self._alive:
            self.lease.end()


class LeasePart:
    """A batch's part of a lease; the whole lasts as long as any part is alive."""

    __slots__ = ("_whole", "memory")

    def __init__(self, whole: SharedLease) -> None:
        self.memory = whole.lease.memory
        self._whole: SharedLease = whole

    def end(self) -> None:
        """End the part early, once: its batch forgets it."""
        self._whole.let_go()


class FieldMemory:
    """The memory of one field of one batch; an array built on it keeps the lease alive."""

    __slots__ = ("__array_interface__", "lease")

    def __init__(self, lease: Lease | LeasePart, field: FieldView, first: int, count: int) -> None:
        self.lease = lease
        self.__array_interface__ = _interface(lease.memory, field, first, count)


class RowsMemory:
    """The rows of a slot's field for whichever batch is in it; an array on it keeps no lease."""

    __slots__ = ("__array_interface__", "memory")

    def __init__(self, memory: BatchMemory, field: FieldView, first: int, count: int) -> None:
        self.memory = memory
        self.__array_interface__ = _interface(memory, field, first, count)


def _interface(memory: BatchMemory, field: FieldView, first: int, count: int) -> dict[str, object]:
    return {
        "version": 3,
        "typestr": field.type_text,
        "shape": (count, *field.shape),
        "data": (memory.address + field.offset + first * field.row_bytes, True),
    }


class Batch(NotCopyable, Mapping[str, Any]):
    """One batch: maps field names to read-only numpy arrays ``[samples, ...]`` over shared memory.

    Shapes and dtypes are those of ``Stream.schema``. A padded field is cut to the largest sample of
    this batch. A ragged field is a list with one read-only array per sample, in the sample's own
    shape; ``ragged`` gives it as one array.

    ``epoch`` and ``step``: the position of the batch. ``samples``: the number of rows. ``wait_s``:
    seconds that the trainer waited for it. As in every mapping, ``len(batch)`` is the number of
    fields.

    The memory does not change while the batch or any array made from it is alive; then it returns
    to the daemon. ``release()``, or leaving ``with batch:``, returns it at once. From then on the
    batch refuses access. Do not read arrays that you took from it earlier: the daemon may write
    another batch over them.
    """

    COPY_ADVICE = 'to release one would let the daemon write under the other; copy its arrays, batch["image"].copy()'
    __slots__ = (
        "_arrays",
        "_fields",
        "_first",
        "_lease",
        "_shown",
        "_span",
        "_stream",
        "bucket",
        "epoch",
        "samples",
        "step",
        "wait_s",
    )

    def __init__(  # noqa: PLR0913, PLR0917  each is a fact of a batch
        self,
        stream: str,
        fields: dict[str, FieldView],
        lease: Lease | LeasePart,
        handle: Handle | Parcel,
        shown: Shown | None = None,
        span: BatchRows | None = None,
    ) -> None:
        self._stream = stream
        self._shown = shown or Shown()
        self._fields = fields
        self._lease: Lease | LeasePart | None = lease
        self._span = span
        self._first = handle.first
        self._arrays: dict[str, Any] = {}
        self.epoch = handle.epoch
        self.step = handle.step
        self.bucket = handle.bucket
        """The number of its layout; 0 where all batches of the stream have the same one."""
        self.samples = handle.count
        self.wait_s = 0.0

    def __getitem__(self, name: str) -> Any:
        """Return the array ``[samples, ...]`` of a field, or the list of arrays of a ragged field.

        Raises ``KeyError`` for an unknown name, ``BatchReleased`` after ``release()``, and
        ``ProtocolError`` if the sizes of a padded or ragged field exceed its room.
        """
        lease = self._lease_of(name)
        array = self._arrays.get(name)
        if array is None:
            field = self._field(name)
            array, varying = self._whole(lease, field), field.varying
            if varying is not None:
                show = row_views if varying.kind == RAGGED else cut_to_largest
                array = show(array, self._sizes(lease, field, varying), varying)
            self._arrays[name] = array
        return array

    def ragged(self, name: str) -> Ragged:
        """Return a ragged field as one array. Raises as ``[]``, ``KeyError`` if not ragged."""
        lease, field = self._lease_of(name), self._field(name)
        if field.varying is None or field.varying.kind != RAGGED:
            raise KeyError(f"{name!r} is not a ragged field: read it with batch[{name!r}]")
        return ragged_view(self._whole(lease, field), self._sizes(lease, field, field.varying), field.varying)

    def packed(self, name: str) -> Packed:
        """Return a packed field as one array.

        Raises as ``[]``, ``KeyError`` if not packed, and ``ProtocolError`` if the documents exceed
        their row.
        """
        lease, field = self._lease_of(name), self._field(name)
        lengths_field, segments = self._fields.get("lengths"), self._fields.get("segment_ids")
        is_packed = lengths_field is not None and lengths_field.shape == self._fields["index"].shape != ()
        if segments is not None:
            is_packed &= field.shape[:1] == segments.shape
        elif lengths_field is not None:  # rows have more elements than documents
            is_packed &= field.shape[:1] > lengths_field.shape
        if not is_packed:
            raise KeyError(f"{name!r} is not a packed field: read it with batch[{name!r}]")
        array, room = self._whole(lease, field), field.shape[0]
        lengths = np.array(self["lengths"], np.int64)
        rests = room - lengths.sum(axis=1, keepdims=True)
        if (lengths < 0).any() or (rests < 0).any():
            raise ProtocolError(f"{self._where}: the lengths of packed documents exceed the room of {room} in a row")
        pieces = np.concatenate([lengths, rests], axis=1)
        is_piece = pieces > 0
        row_splits = np.zeros(int(is_piece.sum()) + 1, np.int32)
        np.cumsum(pieces[is_piece], out=row_splits[1:])
        is_document = np.broadcast_to(np.arange(pieces.shape[1]) < lengths.shape[1], pieces.shape)[is_piece]
        return Packed(array.reshape(len(array) * room, *field.shape[1:]), row_splits, is_document)

    def dlpack(self, name: str) -> Array:
        """Export a field by DLPack, without a copy: ``torch.from_dlpack(batch.dlpack("image"))``.

        Returns the array ``[samples, ...]``. The export is marked read-only, which needs numpy 2.1
        and a consumer of DLPack 1.0; others refuse it. Torch ignores the mark: writing into its
        tensor crashes the program. The consumer keeps the batch alive, unless it is released.

        Raises what access by name raises, and ``KeyError`` for a ragged field: export
        ``ragged(name).values``.
        """
        array = self[name]
        if isinstance(array, list):
            raise KeyError(
                f"{name!r} is a ragged field: export batch.ragged({name!r}).values, and its offsets and lengths"
            )
        exported: Array = array
        return exported

    def to_torch(self, *, copy: bool = False) -> "dict[str, Tensor | list[Tensor]]":
        """Return the fields as CPU tensors, by name, with the shapes and dtypes of ``[name]``.

        A ragged field is a list of tensors. Without ``copy`` they are views of shared memory: they
        keep the batch alive, must not be read after ``release()`` or the end of ``with batch:``,
        and a write into one (``tensor.div_(255)``) crashes the program, as torch has no read-only
        tensors. With ``copy`` they are yours, and the batch can be released.

        For layouts, normalisation and GPUs use ``batchd_client.torch.BatchdLoader``. Raises the
        errors of access by name, ``TensorsInvalid`` if torch lacks a dtype, and ``ImportError``
        without torch.
        """
        return tensors_of_batch(self, copy)

    def room(self, name: str) -> WholeField:
        """A field with its whole room, to be copied in one piece. Raises what ``[name]`` raises."""
        lease, field = self._lease_of(name), self._field(name)
        sizes = None if field.varying is None else self._sizes(lease, field, field.varying)
        return WholeField(self._whole(lease, field), sizes, field.varying)

    def unleased(self, name: str) -> Array:
        """The array of a field with one shape, which keeps no lease; for a caller that does.

        Another batch in the same memory, with the same rows and ``bucket``, has the same array.
        Raises what ``[name]`` raises.
        """
        return np.asarray(RowsMemory(self.memory, self._field(name), self._first, self.samples))

    def crc32(self) -> int:
        """CRC-32 of the rows, as ``verify = true`` has it of each: some 1 ms for each MB.

        Log it with the position: ``batchd replay --verify CRC`` then shows whether a batch that is
        made again has the same bytes. Raises ``BatchReleased``.
        """
        page = self._lease_of("crc32").memory.page
        covered = [(field.offset, field.row_bytes) for field in self._fields.values()]
        return rows_crc32(page, covered, range(self._first, self._first + self.samples))

    def detached(self) -> "Batch":
        """Copy the batch into memory of this program, which holds no slot.

        Raises ``BatchReleased``, and ``OSError`` without memory.
        """
        memory = self._lease_of("memory").memory
        own = ReceiveBuffer(memory.slot_bytes)
        own.page[:] = memory.page
        rows = {"first": self._first, "count": self.samples, "bucket": self.bucket}
        handle = Handle(0, 0, self.epoch, self.step, slot=0, generation=0, **rows)
        return Batch(self._stream, self._fields, Lease(own, None, deque(), handle), handle, self._shown, self._span)

    @property
    def span(self) -> BatchRows:
        """The rows that this is of its position; ``first`` is not 0 where ranks share a batch."""
        return self._span or BatchRows(self.epoch, self.step, self._first, self.samples)

    @property
    def first_row(self) -> int:
        """The first of its rows in its memory."""
        return self._first

    @property
    def fields(self) -> dict[str, FieldView]:
        """Where its fields are, by name."""
        return self._fields

    def shared(self) -> SharedLease:
        """Its lease, for batches that are parts of it. Raises ``BatchReleased``."""
        lease = self._lease_of("memory")
        assert isinstance(lease, Lease), "a part of a batch has no parts"
        return SharedLease(lease)

    def part(self, first: int, span: BatchRows, lease: LeasePart) -> "Batch":
        """A batch of some of its rows, from row ``first`` of its memory on."""
        handle = Handle(0, 0, span.epoch, span.step, 0, 0, first, span.rows, self.bucket)
        return Batch(self._stream, self._fields, lease, handle, self._shown, span)

    @property
    def memory(self) -> BatchMemory:
        """The memory of the batch: ``address`` and ``slot_bytes``. Raises ``BatchReleased``.

        The daemon writes many batches into the same memory, one after the other, so registering it
        with a device once is enough.
        """
        return self._lease_of("memory").memory

    def _lease_of(self, name: str) -> Lease | LeasePart:
        lease = self._lease
        if lease is None:
            raise BatchReleased(
                f"{self._where} has been released, so its field {name!r} may already hold another batch"
            )
        return lease

    def _field(self, name: str) -> FieldView:
        field = self._fields.get(name)
        if field is None:
            raise KeyError(f"{name!r} is not a field of this batch; it has {', '.join(self._fields)}")
        return field

    def _whole(self, lease: Lease | LeasePart, field: FieldView) -> Array:
        return np.asarray(FieldMemory(lease, field, self._first, self.samples))

    def _sizes(self, lease: Lease | LeasePart, field: FieldView, varying: Varying) -> npt.NDArray[np.int64]:
        """Check the sizes, which another process wrote: int64 ``[samples, varying dimensions]``."""
        try:
            return checked_sizes(self._whole(lease, self._fields[field.sizes]), field.shape, varying)
        except ValueError as error:
            raise ProtocolError(f"{self._where}: field {field.name!r}: {error}") from None

    @property
    def _where(self) -> str:
        return f"batch (epoch {self.epoch}, step {self.step}) of stream {self._stream!r}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        """Number of fields; ``samples`` is the number of rows."""
        return len(self._fields)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def released(self) -> bool:
        """True once the batch has been released."""
        return self._lease is None

    def release(self) -> None:
        """Return the memory to the daemon now, from any thread. Releasing twice does nothing."""
        lease, self._lease = self._lease, None
        self._arrays = {}
        if lease is not None:
            lease.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        self.release()

    def __repr__(self) -> str:
        where = f"<Batch {self._stream} epoch={self.epoch} step={self.step}"
        if self._lease is None:
            return f"{where} [released]>"
        shapes = " ".join(
            f"{field.name}={np.dtype(field.type_text).name}"
            f"[{', '.join([str(self.samples), *length_texts(field.shape, field.varying)])}]"
            for field in self._fields.values()
        )
        return f"{where} samples={self.samples} {shapes}>"

    def _repr_html_(self) -> str | None:
        """HTML for notebooks: pictures with labels, and the first values of other fields."""
        # without HTML, a notebook shows the repr
        return None if self._lease is None else html_of_batch(self, self._stream, self._shown)


def text(array: npt.NDArray[np.uint8]) -> list[str]:
    """Decode a text field such as ``path``: uint8 ``[samples, bytes]``, UTF-8 padded with zeros.

    Bytes that are not UTF-8 decode as in Python's file names (``surrogateescape``).
    """
    return [bytes(row).rstrip(b"\0").decode("utf-8", "surrogateescape") for row in array]
