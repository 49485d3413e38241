"""Fields of a batch as tensors on the host: dtype, layout, normalisation. Runs in the trainer.

    field in the slot        view                tensor that the loop gets
    uint8 [B, H, W, C]  -->  [B, C, H, W]  ----> dtype, (x / 255 - mean) / std, contiguous or
                                                 channels_last
    other fields        -->  unchanged     ----> unchanged

Invariants: a tensor that the loop gets has memory of its own. Views into a slot stay in this
package, except where the program asks for them (``Batch.to_torch``): torch has no read-only
tensors, and a write into the mapping would crash the program. The host placement releases a batch
as soon as its tensors are made, also after an error.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from batchd_client.batch import Batch, WholeField, ragged_view, tensors_of_batch
from batchd_client.errors import TensorsInvalid
from batchd_client.stream import FieldSchema
from batchd_wire.fields import RAGGED, Varying
from batchd_wire.views import Array

CHANNELS = (1, 3, 4)
"""Numbers of channels by which a field is recognised as an image."""
IMAGE_DIMENSIONS = 3
WHITE = 255

Tensors: TypeAlias = torch.Tensor | list[torch.Tensor]
"""A field of a batch: a tensor, or a list with one tensor per sample for a ragged field."""


class TensorSchema(NamedTuple):
    """One field of the loop's item. ``shape``: of one sample, the largest if samples vary."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    varying: Varying | None


class ImageLayout(NamedTuple):
    """Options for images; see ``BatchdLoader``."""

    images: Sequence[str] | None = None
    dtype: torch.dtype | None = None
    normalize: tuple[Sequence[float], Sequence[float]] | None = None
    channels_last: bool = False


class Rows(NamedTuple):
    """The samples of a ragged field in ``values``, ``[elements, ...]``.

    The last sample ends ``values``. ``offsets`` and ``lengths``: in elements, by sample.
    ``shapes``: of each sample.
    """

    values: torch.Tensor
    offsets: list[int]
    lengths: list[int]
    shapes: list[list[int]]

    @property
    def gap_bytes(self) -> int:
        """Bytes of unused room between the samples."""
        gaps = len(self.values) - sum(self.lengths)
        return gaps * prod(self.values.shape[1:]) * self.values.element_size()

    def views(self) -> list[torch.Tensor]:
        """A tensor for each sample, with its shape and the dtype of ``values``, without a copy."""
        return [
            self.values[offset : offset + length].view(shape)
            for offset, length, shape in zip(self.offsets, self.lengths, self.shapes, strict=True)
        ]

    def packed(
        self,
        memory: Callable[[Sequence[int], torch.dtype], torch.Tensor],
        copy: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> "Rows":
        """Copy the samples without gaps into fresh ``memory``, each by ``copy(source, target)``.

        ``memory(shape, dtype)`` allocates a tensor.
        """
        values = memory((sum(self.lengths), *self.values.shape[1:]), self.values.dtype)
        starts = [0, *accumulate(self.lengths)][:-1]
        for start, offset, length in zip(starts, self.offsets, self.lengths, strict=True):
            copy(self.values[offset : offset + length], values[start : start + length])
        return Rows(values, starts, self.lengths, self.shapes)


class Recipe:
    """How one field becomes a tensor. Belongs to one device."""

    def __init__(self, name: str, field: FieldSchema, layout: ImageLayout, device: torch.device) -> None:
        """Raises ``TensorsInvalid`` if the field cannot have this layout."""
        self.name = name
        self.is_image = name in layout.images if layout.images is not None else _is_image(field)
        self._channels_last = layout.channels_last
        stored = _torch_dtype(name, field.dtype)
        shape = field.shape
        self._scale: torch.Tensor | None = None
        if not self.is_image:
            self.schema = TensorSchema(stored, shape, field.varying)
            return
        if len(shape) < IMAGE_DIMENSIONS:
            raise TensorsInvalid(
                f"field {name!r} has the shape {list(shape)}, and images have [height, width, channels]"
            )
        dtype = layout.dtype or stored
        if layout.normalize is not None:
            dtype = layout.dtype or torch.float32
            self._scale, self._bias = _normalization(name, field, dtype, layout.normalize, device)
        self.schema = TensorSchema(dtype, (*shape[:-3], shape[-1], *shape[-3:-1]), _moved(field.varying, len(shape)))

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """Scale and bias for ``tensor``: float32 on the device; () without normalisation."""
        return () if self._scale is None else (self._scale, self._bias)

    def tensor(self, raw: torch.Tensor, *, owned: bool) -> torch.Tensor:
        """Convert ``raw``, ``[B, ...]`` as in the slot, to the schema's; copy if not ``owned``."""
        dtype = self.schema.dtype if self._scale is None else torch.float32
        tensor = self._laid_out(raw, dtype) if owned else self._copied(raw, dtype)
        if self._scale is None:
            return tensor
        torch.addcmul(self._bias, tensor, self._scale, out=tensor)
        return tensor.to(self.schema.dtype)

    def _laid_out(self, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``raw`` itself if its layout is right, else a copy, made in one pass."""
        if not self.is_image:
            return _dense(raw, dtype)
        if self._channels_last:
            return _dense(raw, dtype).movedim(-1, -3)
        return _dense(raw.movedim(-1, -3), dtype)

    def _copied(self, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy ``raw`` into new host memory, in one pass."""
        if not self.is_image:
            return fill(raw, fresh(raw.shape, dtype))
        view = raw.movedim(-1, -3)
        if self._channels_last:
            return fill(raw, fresh(raw.shape, dtype)).movedim(-1, -3)
        return fill(view, fresh(view.shape, dtype))


def recipes_for(
    schema: Mapping[str, FieldSchema], fields: Sequence[str], layout: ImageLayout, device: torch.device
) -> tuple[Recipe, ...]:
    """Make the recipes of ``fields``, in order. Raises ``TensorsInvalid``."""
    for name in layout.images or ():
        if name not in schema:
            raise TensorsInvalid(f"images: the stream has no field {name!r}; it has {', '.join(schema)}")
    recipes = tuple(Recipe(name, schema[name], layout, device) for name in fields)
    if not any(recipe.is_image for recipe in recipes) and (layout.dtype is not None or layout.normalize is not None):
        raise TensorsInvalid(
            "dtype and normalize are for images, and no field is one that has the shape [height, width, 1, 3 or 4]: name them "
            "with images="
        )
    return recipes


def over(array: Array) -> torch.Tensor:
    """View a read-only array as a tensor of the same shape and dtype, to copy from.

    Keeps the array and its batch alive.
    """
    return torch.from_numpy(np.asarray(_WritableView(array)))


@tensors_of_batch.register
def tensors_of(batch: Batch, copy: bool) -> dict[str, Tensors]:
    """The fields of a batch, with the shapes and dtypes of the slot: see ``Batch.to_torch``."""

    def tensor(name: str, array: Array) -> torch.Tensor:
        _torch_dtype(name, array.dtype)
        view = over(array)
        return fill(view, fresh(view.shape, view.dtype)) if copy else view

    fields = {name: batch[name] for name in batch}
    return {
        name: [tensor(name, row) for row in field] if isinstance(field, list) else tensor(name, field)
        for name, field in fields.items()
    }


def _dense(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor if it is contiguous and of ``dtype``, else a copy that is.

    Not ``Tensor.to(memory_format=)``: it takes every tensor for contiguous that is not 4-D with
    channels last.
    """
    if tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def fill(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy ``source`` into ``target``, of the same shape on the host, and return ``target``.

    Without a conversion, numpy copies in this thread. Torch would use its thread pool, whose
    threads then spin for more work: next to decoders on the same cores that costs more than the
    copy.
    """
    if source.dtype != target.dtype:
        return target.copy_(source)
    np.copyto(target.numpy(), source.numpy())
    return target


def fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate an uninitialised tensor of ``shape`` and ``dtype`` on the host.

    The memory is numpy's, which asks the kernel for huge pages for large arrays: with small pages,
    the page faults of a batch of 38 MB take five times as long as its copy.
    """
    if not prod(shape):
        return torch.empty(tuple(shape), dtype=dtype)
    room = np.empty(prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(room).view(dtype).view(*shape)


def largest_in(room: WholeField) -> dict[int, int]:
    """Lengths of a padded field's largest sample, by dimension of the batch; else none."""
    if room.varying is None or room.sizes is None:
        return {}
    lengths = room.sizes.max(axis=0, initial=0).tolist()
    return {1 + axis: length for axis, length in zip(room.varying.axes, lengths, strict=True)}


def cut(raw: torch.Tensor, lengths: Mapping[int, int]) -> torch.Tensor:
    """View a tensor, of any dtype, cut to ``lengths`` by dimension: {1: 7} is ``[B, 7, ...]``."""
    for axis, length in lengths.items():
        raw = raw.narrow(axis, 0, length)
    return raw


def rows_in(room: WholeField) -> Rows:
    """View the samples of a ragged field in the slot, to copy from. Keeps the batch alive."""
    assert room.varying is not None
    assert room.sizes is not None
    ragged = ragged_view(room.array, room.sizes, room.varying)
    offsets, lengths = ragged.offsets.tolist(), ragged.lengths.tolist()
    shapes = []
    for size in room.sizes.tolist():
        shape = list(room.array.shape[1:])
        for axis, length in zip(room.varying.axes, size, strict=True):
            shape[axis] = length
        shapes.append(shape)
    end = offsets[-1] + lengths[-1] if lengths else 0
    return Rows(over(ragged.values)[:end], offsets, lengths, shapes)


def is_ragged(room: WholeField) -> bool:
    """True for a ragged field."""
    return room.varying is not None and room.varying.kind == RAGGED


class _WritableView:
    """An array that looks writable, because torch warns about others. It is never written."""

    __slots__ = ("__array_interface__", "_array")

    def __init__(self, array: Array) -> None:
        self._array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _is_image(field: FieldSchema) -> bool:
    shape = field.shape
    return len(shape) == IMAGE_DIMENSIONS and shape[-1] in CHANNELS and shape[0] not in CHANNELS


def _moved(varying: Varying | None, dimensions: int) -> Varying | None:
    """The varying dimensions of an image once its channels are first."""
    if varying is None:
        return None
    moved = {dimensions - 3: dimensions - 2, dimensions - 2: dimensions - 1, dimensions - 1: dimensions - 3}
    return Varying(varying.kind, tuple(sorted(moved.get(axis, axis) for axis in varying.axes)))


def _torch_dtype(name: str, dtype: np.dtype[np.generic]) -> torch.dtype:
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise TensorsInvalid(f"field {name!r} is {dtype.name}, which this version of torch does not have")
    return found


def _normalization(
    name: str,
    field: FieldSchema,
    dtype: torch.dtype,
    normalize: tuple[Sequence[float], Sequence[float]],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and bias, float32 ``[C, 1, 1]``: ``(x / 255 - mean) / std`` is ``x * scale + bias``."""
    if field.dtype != np.uint8 or not dtype.is_floating_point:
        raise TensorsInvalid(
            f"normalize makes floating-point images of uint8 ones, and field {name!r} is {field.dtype.name} and should be {dtype}"
        )
    channels = field.shape[-1]
    mean, std = (np.asarray(numbers, np.float64).reshape(-1) for numbers in normalize)
    if not (len(mean) == len(std) == channels) or not (std > 0).all() or not np.isfinite([*mean, *std]).all():
        raise TensorsInvalid(
            f"normalize=({mean.tolist()}, {std.tolist()}): field {name!r} has {channels} channels, and needs (mean, std) with a "
            "number for each of them, std above 0"
        )
    scale, bias = 1 / (WHITE * std), -mean / std
    return tuple(torch.tensor(one, dtype=torch.float32, device=device).view(-1, 1, 1) for one in (scale, bias))  # type: ignore[return-value]


MakeItem = Callable[[list[Tensors]], object]
"""Turns the tensors of a batch, in the order of the recipes, into the loop's item."""
HOST = torch.device("cpu")


class Placed(NamedTuple):
    """Finished tensors; the user's ``transform`` runs when the loop asks."""

    tensors: list[Tensors]
    make_item: MakeItem

    def finish(self) -> object:
        """See ``prefetch.Transfer``."""
        return self.make_item(self.tensors)


class HostPlacement:
    """Copies and converts batches in one pass on the host; then, if wanted, to another device."""

    def __init__(self, recipes: Sequence[Recipe], make_item: MakeItem, device: torch.device = HOST) -> None:
        self._recipes = recipes
        self._make_item = make_item
        self._device = device

    def begin(self, batch: Batch) -> Placed:
        """See ``prefetch.Placement``."""
        with batch:
            return Placed([self._tensors(recipe, batch) for recipe in self._recipes], self._make_item)

    def _tensors(self, recipe: Recipe, batch: Batch) -> Tensors:
        room = batch.room(recipe.name)
        if is_ragged(room):
            rows = rows_in(room).packed(fresh, fill)
            if self._device != HOST:
                rows = rows._replace(values=rows.values.to(self._device))
            return [recipe.tensor(row, owned=True) for row in rows.views()]
        source = cut(over(room.array), largest_in(room))
        if self._device == HOST:
            return recipe.tensor(source, owned=False)
        return recipe.tensor(source.to(self._device), owned=True)

    def sweep(self, *, wait: bool = False) -> None:
        """See ``prefetch.Placement``. Nothing is in transit."""

    def close(self) -> None:
        """See ``prefetch.Placement``."""
