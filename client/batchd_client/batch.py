"""One batch in shared memory, and how long it stays there. Runs in the trainer.

    Batch ----> Lease <---- FieldMemory <---- numpy array <---- whatever is built on it: slices, tensors, memoryviews
                |   |
                |   +--> SlotMemory (the mapping), Lifeline (its end would give the lease back)
                +~ ~ ~ > LeaseToken (weak): on the lease's end appended to the subscription's ``ended``

The lease ends when the batch and the last array over its memory are gone, or by ``release()``. Its
end may come in any thread and in the middle of anything (the garbage collector decides), so it only
appends to a queue, and the next pull gives it back. Not ``__del__`` or ``weakref.finalize``: those
run Python code, which a signal handler may cut off half way. A weak reference whose callback is
``deque.append`` runs none, and costs a tenth of them.

Invariant: while a lease has not ended, the daemon writes nothing to its slot.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from math import prod
from types import TracebackType
from typing import Any, NamedTuple, Self
from weakref import ref

import numpy as np
import numpy.typing as npt

from batchd_client.errors import BatchReleased, ProtocolError, Unique
from batchd_client.memory import SlotMemory
from batchd_client.remote import ReceiveBuffer
from batchd_wire.fields import RAGGED, SlotLayout, Varying, length_texts, sizes_field
from batchd_wire.messages import Handle, Parcel
from batchd_wire.views import checked_sizes, cut_to_largest, row_views


class CompactRagged(NamedTuple):
    """A copy without gaps. ``values``: ``[elements, ...]``. ``row_splits``: int64 ``[rows + 1]``, see the drawing."""

    values: npt.NDArray[Any]
    row_splits: npt.NDArray[np.int64]


class Ragged(NamedTuple):
    """A ragged field over shared memory, not a copy; see the drawing.

    ``values``: ``[elements, ...]``, read-only; what stands behind the last dimension that varies
    stays as it is, so of ``float32[<=128, 768]`` it is ``[rows * 128, 768]``. ``offsets`` and
    ``lengths``: int64 ``[rows]``, in elements of ``values``.
    """

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def compact(self) -> CompactRagged:
        """Copy the values without the gaps between the rows; the copy does not hold the batch."""
        row_splits = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=row_splits[1:])
        values = np.empty((int(row_splits[-1]), *self.values.shape[1:]), self.values.dtype)
        for start, end, offset in zip(row_splits[:-1], row_splits[1:], self.offsets, strict=True):
            values[start:end] = self.values[offset : offset + end - start]
        return CompactRagged(values, row_splits)


def ragged_view(array: npt.NDArray[Any], sizes: npt.NDArray[np.int64], varying: Varying) -> Ragged:
    """View a ragged field ``[rows, *shape]``, contiguous, whose rows have these checked ``sizes``."""
    shape = array.shape[1:]
    last = varying.axes[-1] + 1
    room = prod(shape[:last])
    fixed = prod(length for axis, length in enumerate(shape[:last]) if axis not in varying.axes)
    values = array.reshape(len(array) * room, *shape[last:])
    offsets = np.arange(len(array), dtype=np.int64) * room
    return Ragged(values, offsets, sizes.prod(axis=1, dtype=np.int64) * fixed)


class FieldView(NamedTuple):
    """How a field looks in memory, made ready for ``__array_interface__``. ``shape`` is that of one sample.

    Where samples vary it is the largest that one may have, and ``sizes`` is the name of the field
    that says how large each is.
    """

    name: str
    type_text: str
    shape: tuple[int, ...]
    row_bytes: int
    offset: int
    varying: Varying | None
    sizes: str


def field_views(layout: SlotLayout) -> dict[str, FieldView]:
    """Prepare the fields of a sample once for all batches of their stream."""
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


class Room(NamedTuple):
    """A field of a batch with all the room that its samples have: ``array`` is ``[samples, *shape]``, contiguous and read-only.

    ``sizes``: int64 ``[samples, varying dimensions]``, how large each sample is; None where all are
    alike.
    """

    array: npt.NDArray[Any]
    sizes: npt.NDArray[np.int64] | None
    varying: Varying | None


class LeaseToken(ref["Lease"]):
    """What is left of a lease when it has ended: enough to give it back."""

    __slots__ = ("generation", "sequence")
    sequence: int
    generation: int


class Lease:
    """A trainer's right to read one slot. When it ends, its ``token`` is appended to ``ended``, at least once.

    ``lifeline`` is not used: it must live as long as the lease, since its end gives back all leases
    at once.
    """

    __slots__ = ("__weakref__", "_ended", "lifeline", "memory", "token")

    def __init__(
        self, memory: SlotMemory | ReceiveBuffer, lifeline: object, ended: deque[LeaseToken], handle: Handle | Parcel
    ) -> None:
        self.memory = memory
        self.lifeline = lifeline
        self._ended = ended
        self.token = LeaseToken(self, ended.append)
        self.token.sequence = handle.sequence
        self.token.generation = handle.generation

    def end(self) -> None:
        """Give the lease back early; more than once does no harm."""
        self._ended.append(self.token)


class FieldMemory:
    """The memory of one field of one batch: what numpy builds an array on, and what keeps the lease while the array lives."""

    __slots__ = ("__array_interface__", "lease")

    def __init__(self, lease: Lease, field: FieldView, first: int, count: int) -> None:
        self.lease = lease
        self.__array_interface__ = {
            "version": 3,
            "typestr": field.type_text,
            "shape": (count, *field.shape),
            "data": (lease.memory.address + field.offset + first * field.row_bytes, True),
        }


class Batch(Unique, Mapping[str, Any]):
    """One batch: a mapping of field name to a read-only numpy array ``[samples, ...]`` over shared memory, not a copy.

    A padded field is cut to the largest sample of this batch. Of a ragged field there is a list
    instead, with a read-only array for each sample, in that sample's own shape; ``ragged`` gives it
    as one array.

    ``epoch`` and ``step`` say which batch of the stream it is, ``samples`` how many rows it has,
    ``wait_s`` how long the trainer waited for it, in seconds. As in every mapping, ``len(batch)``
    is the number of fields.

    The memory stays as it is while the batch or any array made from it lives, and goes back to the
    daemon after that. ``release()``, or leaving ``with batch:``, gives it back at once: from then
    on the batch refuses access, and arrays taken from it earlier must not be read any more, since
    another batch may be written over them.
    """

    INSTEAD = 'to release one would let the daemon write under the other; copy its arrays, batch["image"].copy()'
    __slots__ = ("_arrays", "_fields", "_first", "_lease", "_stream", "epoch", "samples", "step", "wait_s")

    def __init__(self, stream: str, fields: dict[str, FieldView], lease: Lease, handle: Handle | Parcel) -> None:
        self._stream = stream
        self._fields = fields
        self._lease: Lease | None = lease
        self._first = handle.first
        self._arrays: dict[str, Any] = {}
        self.epoch = handle.epoch
        self.step = handle.step
        self.samples = handle.count
        self.wait_s = 0.0

    def __getitem__(self, name: str) -> Any:
        """Give the array of one field, or the list of a ragged one's.

        Raises ``KeyError`` for an unknown name, ``BatchReleased`` after ``release()``, and
        ``ProtocolError`` where the sizes of a padded or ragged field are larger than its room.
        """
        lease = self._lease_of(name)
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = self._view(lease, self._field(name))
        return array

    def ragged(self, name: str) -> Ragged:
        """Give a ragged field as one array, with where each sample begins in it and how long it is; see ``Ragged``.

        Raises what access by name raises, and ``KeyError`` where the field is not ragged.
        """
        lease, field = self._lease_of(name), self._field(name)
        if field.varying is None or field.varying.kind != RAGGED:
            raise KeyError(f"{name!r} is not a ragged field: read it with batch[{name!r}]")
        return ragged_view(self._whole(lease, field), self._sizes(lease, field, field.varying), field.varying)

    def dlpack(self, name: str) -> npt.NDArray[Any]:
        """Give a field to another library by DLPack, without a copy: ``torch.from_dlpack(batch.dlpack("image"))``.

        The export is marked read-only, which takes numpy 2.1 and a consumer that knows DLPack 1.0;
        others refuse it. Torch ignores the mark: writing into its tensor ends the program. The
        consumer keeps the batch alive, unless it is released.

        Raises what access by name raises, and ``KeyError`` for a ragged field: export
        ``ragged(name).values``.
        """
        array = self[name]
        if isinstance(array, list):
            raise KeyError(
                f"{name!r} is a ragged field: export batch.ragged({name!r}).values, and its offsets and lengths"
            )
        exported: npt.NDArray[Any] = array
        return exported

    def room(self, name: str) -> Room:
        """Give a field as it lies in memory, for those who copy it as a whole, to a device for instance.

        Raises what access by name raises.
        """
        lease, field = self._lease_of(name), self._field(name)
        sizes = None if field.varying is None else self._sizes(lease, field, field.varying)
        return Room(self._whole(lease, field), sizes, field.varying)

    @property
    def memory(self) -> SlotMemory | ReceiveBuffer:
        """The memory that the batch lies in: ``address`` and ``slot_bytes``. Raises ``BatchReleased``.

        The daemon writes many batches into the same memory, one after the other, so a device needs
        to be told of it once.
        """
        return self._lease_of("memory").memory

    def _lease_of(self, name: str) -> Lease:
        lease = self._lease
        if lease is None:
            raise BatchReleased(
                f"{self._where} has been released, so its field {name!r} may already hold another batch"
            )
        return lease

    def _field(self, name: str) -> FieldView:
        field = self._fields.get(name)
        if field is None:
            raise KeyError(f"{name!r} is no field of this batch; it has {', '.join(self._fields)}")
        return field

    def _whole(self, lease: Lease, field: FieldView) -> npt.NDArray[Any]:
        return np.asarray(FieldMemory(lease, field, self._first, self.samples))

    def _view(self, lease: Lease, field: FieldView) -> Any:
        whole, varying = self._whole(lease, field), field.varying
        if varying is None:
            return whole
        sizes = self._sizes(lease, field, varying)
        show = row_views if varying.kind == RAGGED else cut_to_largest
        return show(whole, sizes, varying)

    def _sizes(self, lease: Lease, field: FieldView, varying: Varying) -> npt.NDArray[np.int64]:
        """How large each sample is. Another process wrote that, so it is checked first."""
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
        """How many fields the batch has; ``samples`` is the number of its rows."""
        return len(self._fields)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def released(self) -> bool:
        """Has the batch been given back?"""
        return self._lease is None

    def release(self) -> None:
        """Give the memory back now, from any thread. Releasing twice does nothing."""
        lease, self._lease = self._lease, None
        self._arrays = {}
        if lease is not None:
            lease.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def text(array: npt.NDArray[np.uint8]) -> list[str]:
    """The strings in a field of text, such as ``path``: uint8 ``[samples, bytes]``, UTF-8 with zeros behind it.

    Bytes that are no UTF-8 come as they do in file names of Python (``surrogateescape``).
    """
    return [bytes(row).rstrip(b"\0").decode("utf-8", "surrogateescape") for row in array]
