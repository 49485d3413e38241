"""How the fields of a batch look as tensors: type, layout, normalisation. Runs in the trainer.

    field in the slot        view                  tensor that the loop gets
    uint8 [B, H, W, C]  -->  [B, C, H, W]  ------> dtype, (x / 255 - mean) / std, contiguous or channels_last
    everything else     -->  as it is      ------> as it is

Invariant: a tensor that is given out has memory of its own. What looks into a slot stays in this
package, since torch has no read-only tensors, and a write into the mapping would end the program.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchd_client.batch import Batch, Room, ragged_view
from batchd_client.errors import TensorsInvalid
from batchd_client.stream import FieldSchema
from batchd_wire.fields import RAGGED, Varying

CHANNELS = (1, 3, 4)
"""How many channels an image has that is found by its shape."""
IMAGE_DIMENSIONS = 3
WHITE = 255

Tensors = torch.Tensor | list[torch.Tensor]
"""A field of a batch: a list, with one tensor for each sample, where it is ragged."""


class TensorSchema(NamedTuple):
    """One field of what the loop gets; ``shape`` is that of one sample, the largest that there may be where they vary."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    varying: Varying | None


class ImageLayout(NamedTuple):
    """What the user wants images to be like; see ``BatchdLoader``."""

    images: Sequence[str] | None = None
    dtype: torch.dtype | None = None
    normalize: tuple[Sequence[float], Sequence[float]] | None = None
    channels_last: bool = False


class Rows(NamedTuple):
    """The samples of a ragged field in one run of ``values``, ``[elements, ...]``, which ends with the last of them.

    ``offsets`` and ``lengths``: in elements, by sample. ``shapes``: what each sample is.
    """

    values: torch.Tensor
    offsets: list[int]
    lengths: list[int]
    shapes: list[list[int]]

    @property
    def gap_bytes(self) -> int:
        """How much lies between the samples."""
        gaps = len(self.values) - sum(self.lengths)
        return gaps * prod(self.values.shape[1:]) * self.values.element_size()

    def views(self) -> list[torch.Tensor]:
        """A tensor for each sample, all over the same memory."""
        return [
            self.values[offset : offset + length].view(shape)
            for offset, length, shape in zip(self.offsets, self.lengths, self.shapes, strict=True)
        ]

    def over(self, values: torch.Tensor) -> "Rows":
        """The samples in a copy of ``values``."""
        return self._replace(values=values)

    def packed(
        self,
        memory: Callable[[Sequence[int], torch.dtype], torch.Tensor],
        copy: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> "Rows":
        """Copy the samples one behind the other, without gaps: ``copy(source, target)`` for each, into fresh ``memory``."""
        values = memory((sum(self.lengths), *self.values.shape[1:]), self.values.dtype)
        starts = [0, *accumulate(self.lengths)][:-1]
        for start, offset, length in zip(starts, self.offsets, self.lengths, strict=True):
            copy(self.values[offset : offset + length], values[start : start + length])
        return Rows(values, starts, self.lengths, self.shapes)


class Recipe:
    """How one field becomes a tensor. Belongs to one device."""

    def __init__(self, name: str, field: FieldSchema, look: ImageLayout, device: torch.device) -> None:
        """Raises ``TensorsInvalid`` where the field cannot look like that."""
        self.name = name
        self.is_image = name in look.images if look.images is not None else _is_image(field)
        self._channels_last = look.channels_last
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
        dtype = look.dtype or stored
        if look.normalize is not None:
            dtype = look.dtype or torch.float32
            self._scale, self._bias = _normalization(name, field, dtype, look.normalize, device)
        self.schema = TensorSchema(dtype, _channels_first(shape), _moved(field.varying, len(shape)))

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """What ``look`` reads besides the batch: on the device, and made by the stream that was the current one then."""
        return () if self._scale is None else (self._scale, self._bias)

    def look(self, raw: torch.Tensor, *, owned: bool) -> torch.Tensor:
        """Make of a tensor as it lies in the slot one as it is wanted; a copy, unless ``raw`` is ``owned``."""
        dtype = self.schema.dtype if self._scale is None else torch.float32
        tensor = self._laid_out(raw, dtype) if owned else self._copied(raw, dtype)
        if self._scale is None:
            return tensor
        torch.addcmul(self._bias, tensor, self._scale, out=tensor)
        return tensor.to(self.schema.dtype)

    def _laid_out(self, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor itself where it is as it should be, else a copy, made in one pass."""
        if not self.is_image:
            return _dense(raw, dtype)
        if self._channels_last:
            return _dense(raw, dtype).movedim(-1, -3)
        return _dense(raw.movedim(-1, -3), dtype)

    def _copied(self, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy in fresh memory of the host, made in one pass."""
        if not self.is_image:
            return fill(raw, fresh(raw.shape, dtype))
        view = raw.movedim(-1, -3)
        if self._channels_last:
            return fill(raw, fresh(raw.shape, dtype)).movedim(-1, -3)
        return fill(view, fresh(view.shape, dtype))


def recipes_for(
    schema: Mapping[str, FieldSchema], fields: Sequence[str], look: ImageLayout, device: torch.device
) -> tuple[Recipe, ...]:
    """The recipes of the fields that are wanted, in their order. Raises ``TensorsInvalid``."""
    for option, names in (("fields", fields), ("images", look.images)):
        for name in names or ():
            if name not in schema:
                raise TensorsInvalid(f"{option}: the stream has no field {name!r}; it has {', '.join(schema)}")
    recipes = tuple(Recipe(name, schema[name], look, device) for name in fields)
    if not any(recipe.is_image for recipe in recipes) and (look.dtype is not None or look.normalize is not None):
        raise TensorsInvalid(
            "dtype and normalize are for images, and no field is one that has the shape [height, width, 1, 3 or 4]: name them "
            "with images="
        )
    return recipes


def over(array: npt.NDArray[Any]) -> torch.Tensor:
    """View an array as a tensor, though it is read-only: to copy from. Holds the array, and with it the batch."""
    return torch.from_numpy(np.asarray(_Claimed(array)))


def _dense(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor where it is contiguous and of this type, else a copy that is.

    ``Tensor.to(memory_format=)`` would not do: it takes every tensor for contiguous that is not 4-D
    with channels last.
    """
    if tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def fill(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Fill the target, both in the host's memory.

    Where nothing is converted, numpy does it, in this thread. Torch would share it among its own,
    which then wait for more to do by spinning: beside decoders on the same cores that costs more
    than the copy.
    """
    if source.dtype != target.dtype:
        return target.copy_(source)
    np.copyto(target.numpy(), source.numpy())
    return target


def fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a tensor on the host.

    It is numpy's, which asks the kernel for huge pages where an array is large: with small ones the
    page faults of a batch of 38 MB cost five times what copying it does.
    """
    if not prod(shape):
        return torch.empty(tuple(shape), dtype=dtype)
    room = np.empty(prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(room).view(dtype).view(*shape)


def largest_in(room: Room) -> dict[int, int]:
    """How long the largest sample of a padded field is, by dimension of the batch's array. Empty where samples are alike."""
    if room.varying is None or room.sizes is None:
        return {}
    lengths = room.sizes.max(axis=0, initial=0).tolist()
    return {1 + axis: length for axis, length in zip(room.varying.axes, lengths, strict=True)}


def cut(raw: torch.Tensor, lengths: Mapping[int, int]) -> torch.Tensor:
    """View the beginning of a tensor in some of its dimensions."""
    for axis, length in lengths.items():
        raw = raw.narrow(axis, 0, length)
    return raw


def rows_in(room: Room) -> Rows:
    """The samples of a ragged field as they lie in the slot: to copy from. Holds the batch."""
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


def is_ragged(room: Room) -> bool:
    """Are there samples of their own shapes?"""
    return room.varying is not None and room.varying.kind == RAGGED


class _Claimed:
    """An array that numpy takes for writable, since torch warns of others. Nobody writes."""

    __slots__ = ("__array_interface__", "_array")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _is_image(field: FieldSchema) -> bool:
    shape = field.shape
    return len(shape) == IMAGE_DIMENSIONS and shape[-1] in CHANNELS and shape[0] not in CHANNELS


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-3], shape[-1], *shape[-3:-1])


def _moved(varying: Varying | None, dimensions: int) -> Varying | None:
    """Which dimensions vary once the channels stand first."""
    if varying is None:
        return None
    moved = {dimensions - 3: dimensions - 2, dimensions - 2: dimensions - 1, dimensions - 1: dimensions - 3}
    return Varying(varying.kind, tuple(sorted(moved.get(axis, axis) for axis in varying.axes)))


def _torch_dtype(name: str, dtype: np.dtype[Any]) -> torch.dtype:
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
    """Scale and bias for each channel: ``(x / 255 - mean) / std`` is ``x * scale + bias``. float32 ``[C, 1, 1]``."""
    if field.dtype != np.uint8 or not dtype.is_floating_point:
        raise TensorsInvalid(
            f"normalize makes floating-point images of uint8 ones, and field {name!r} is {field.dtype.name} and shall be {dtype}"
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


Give = Callable[[list[Tensors]], Any]
"""Makes of the tensors of a batch, in the order of the recipes, what the user's loop gets."""
HOST = torch.device("cpu")


class Placed:
    """Tensors that are there; the user's own part in them comes when the loop wants them."""

    def __init__(self, tensors: list[Tensors], give: Give) -> None:
        self._tensors = tensors
        self._give = give

    def finish(self) -> Any:
        """See ``feed.Transfer``."""
        return self._give(self._tensors)


class HostPlacement:
    """Copies batches, in one pass together with whatever is done to them; then, where that is wanted, to another device."""

    def __init__(self, recipes: Sequence[Recipe], give: Give, device: torch.device = HOST) -> None:
        self._recipes = recipes
        self._give = give
        self._device = device

    def begin(self, batch: Batch) -> Placed:
        """See ``feed.Placement``."""
        with batch:
            return Placed([self._tensors(recipe, batch) for recipe in self._recipes], self._give)

    def _tensors(self, recipe: Recipe, batch: Batch) -> Tensors:
        room = batch.room(recipe.name)
        if is_ragged(room):
            rows = rows_in(room).packed(fresh, fill)
            if self._device != HOST:
                rows = rows.over(rows.values.to(self._device))
            return [recipe.look(row, owned=True) for row in rows.views()]
        source = cut(over(room.array), largest_in(room))
        if self._device == HOST:
            return recipe.look(source, owned=False)
        return recipe.look(source.to(self._device), owned=True)

    def sweep(self, *, wait: bool = False) -> None:
        """See ``feed.Placement``. Nothing is under way."""

    def close(self) -> None:
        """See ``feed.Placement``."""
