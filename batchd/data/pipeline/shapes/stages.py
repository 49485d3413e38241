"""The steps for samples that differ in shape. Worker process.

After the last step on a field, a row has room for the largest sample. The sizes, here (2, 3), have
their own field:

    padded    v v v f f     ragged    v v v v v v 0 0 0 0 ...
              v v v f f
              f f f f f

Values keep their order (C order) and begin at the start of the row; of a sample that is cut, the
beginning is kept.

The bytes after a sample do not depend on the former content of the row, and zeros need not be
written where they are: for a ragged row, the sizes in the slot, which any process can read there,
say how far the former sample reached.

Where buckets have layouts of their own, the former batch of a slot may have had another one: the
worker first writes sizes that are invalid, so all of the room is cleared.

Invariant: after as many elements of a ragged row as its sizes say, there are only zeros. This is
true of fresh memory, which is zeros; and while a row is written its sizes say that all of the room
is used, so it stays true wherever a worker dies.
"""

from math import prod

import numpy as np

from batchd.data.pipeline.effects import Columns, sizes_column
from batchd.data.pipeline.image.opencv import Image
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.shapes.options import Interleave, Patches, RoomStep
from batchd.data.pipeline.stages import Row, Stage, make_stage
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import Value, array_of
from batchd_wire.fields import PADDED, Varying
from batchd_wire.wording import counted


@make_stage.register
def _give_room(step: RoomStep, before: Columns, after: Columns) -> Stage:
    source, made = before[step.field], after[step.field]
    source = source.stacked if source.kind == "arrays" else source
    sizes_name, varying = sizes_column(made).name, made.varying
    assert varying is not None, "as both steps make it"

    def run(values: dict[str, Value], _random: SampleRandom, row: Row) -> None:
        whole = array_of(source, values[step.field])
        array = whole[tuple(map(slice, step.max_shape))]
        if step.too_large == "bad" and array.shape != whole.shape:
            shown = f"{step.field!r} is {whole.dtype}{list(whole.shape)}"
            raise SampleUndecodable(f"{shown}, larger than the max_shape {list(step.max_shape)}")
        out, sizes = row[step.field], row[sizes_name]
        if array.size > out.size or (varying.kind == PADDED and len(array) > len(out)):
            raise SampleUndecodable(
                f"{step.field!r} is {whole.dtype}{list(whole.shape)}, larger than the largest of its bucket: it had another "
                "size when the sizes of all samples were found"
            )
        if varying.kind == PADDED:
            _pad(array, out, made.fill)
        else:
            former = _elements(out.shape, sizes, varying)
            _set_sizes(sizes, out.shape, varying)
            _begin(array, out, former)
        _set_sizes(sizes, array.shape, varying)
        values[step.field], values[sizes_name] = out, sizes

    return run


@make_stage.register
def _cut_patches(step: Patches, before: Columns, _after: Columns) -> Stage:
    source, side = before[step.field], step.size

    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        image = array_of(source, values[step.field])
        rows, columns, channels = image.shape[0] // side, image.shape[1] // side, image.shape[2]
        if not rows * columns:
            raise SampleUndecodable(
                f"{step.field!r} is {image.dtype}{list(image.shape)}, smaller than a patch of {side} x {side}"
            )
        cut = image[: rows * side, : columns * side].reshape(rows, side, columns, side, channels)
        values[step.field] = cut.swapaxes(1, 2).reshape(rows * columns, side * side * channels)
        values[step.grid] = np.array([rows, columns], np.int32)

    return run


@make_stage.register
def _interleave(step: Interleave, before: Columns, after: Columns) -> Stage:
    channels = (after[step.images].shape[1] or 0) // step.size**2
    tokens_before = [before[name] for name in (step.field, *step.also)]

    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        given = values[step.images]
        several = [given] if before[step.images].kind == "array" else given
        assert isinstance(several, list | np.ndarray), "a list of images, or those of one shape as one array"
        images: list[Image] = [np.asarray(image) for image in several]
        tokens, *others = (array_of(column, values[column.name]) for column in tokens_before)
        places = np.flatnonzero(tokens == step.image_token)
        if len(places) != len(images):
            raise SampleUndecodable(
                f"{step.field!r} has {counted(len(places), 'place')} for images (number {step.image_token}), and there "
                f"are {counted(len(images), 'image')} in {step.images!r}"
            )
        grids = [_grid(step, number, image) for number, image in enumerate(images)]
        sizes = [rows * columns for rows, columns in grids]
        ends = np.cumsum([0, *sizes]).tolist()
        patches = np.empty((ends[-1], step.size**2 * channels), np.uint8)
        positions = np.empty((ends[-1], 2), np.int32)
        for image, (rows, columns), first, end in zip(images, grids, ends, ends[1:], strict=False):
            _cut_merged(step, image[: rows * step.size, : columns * step.size], patches[first:end])
            grid = np.indices((rows, columns), np.int32).reshape(2, rows // step.merge, step.merge, -1, step.merge)
            positions[first:end] = grid.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
        counts = np.ones(len(tokens), np.int64)
        counts[places] = np.array(sizes, np.int64) // step.merge**2
        values[step.field] = np.repeat(tokens, counts)
        for name, numbers in zip(step.also, others, strict=True):
            if len(numbers) != len(tokens):
                raise SampleUndecodable(f"{name!r} has {len(numbers)} numbers, and {step.field!r} {len(tokens)}")
            values[name] = np.repeat(np.where(tokens == step.image_token, 0, numbers).astype(numbers.dtype), counts)
        segments = np.repeat(np.arange(1, len(images) + 1, dtype=np.int32), sizes)
        values |= {step.images: patches, step.positions: positions, step.segments: segments}

    return run


def _grid(step: Interleave, number: int, image: Image) -> tuple[int, int]:
    """The rows and columns of patches of an image. Raises ``SampleUndecodable`` without any."""
    unit = step.size * step.merge
    height, width = image.shape[:2]
    if height < unit or width < unit:
        raise SampleUndecodable(
            f"{step.images}[{number}] has {width} x {height} pixels, less than {unit} x {unit}, those of a token"
        )
    return height // unit * step.merge, width // unit * step.merge


def _cut_merged(step: Interleave, image: Image, patches: Image) -> None:
    """Write the patches of an image, those of one token after those of the other."""
    rows, columns = image.shape[0] // (step.size * step.merge), image.shape[1] // (step.size * step.merge)
    shape = rows, step.merge, step.size, columns, step.merge, step.size, image.shape[2]
    tokens = patches.reshape(rows, columns, step.merge, step.merge, step.size, step.size, image.shape[2])
    tokens[...] = image.reshape(shape).transpose(0, 3, 1, 4, 2, 5, 6)


def _pad(array: Image, out: Image, fill: float) -> None:
    """Write ``array`` into the first corner of ``out``, and ``fill`` after it in each dimension."""
    corner = tuple(map(slice, array.shape))
    out[corner] = array
    for axis, length in enumerate(array.shape):
        out[(*corner[:axis], slice(length, None))] = fill


def _begin(array: Image, out: Image, former: int) -> None:
    """Write ``array`` at the start of ``out``, then zeros up to ``former`` elements."""
    assert out.flags.c_contiguous, "a row is one run of bytes"
    flat, used = out.reshape(-1), prod(array.shape)
    flat[:used].reshape(array.shape)[...] = array
    flat[used:former] = 0


def _elements(room: tuple[int, ...], sizes: Image, varying: Varying) -> int:
    """Count the used elements of a row by its sizes; all of its room if these are invalid."""
    shape = list(room)
    for axis, size in zip(varying.axes, sizes.reshape(-1).tolist(), strict=True):
        if not 0 <= size <= room[axis]:
            return prod(room)
        shape[axis] = size
    return prod(shape)


def _set_sizes(sizes: Image, shape: tuple[int, ...], varying: Varying) -> None:
    sizes.reshape(-1)[:] = [shape[axis] for axis in varying.axes]
