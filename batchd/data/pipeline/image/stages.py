"""The steps on pixels: from the bytes of a file, or pixels, into a row of a batch. Worker process.

    probe header -> steps on paper (geometry) -> decode, no more than needed
        -> moves -> turn -> recolor -> convert
           scratch  scratch  ...      the row

The last change of the pixels writes into the row; earlier ones write into memory that is reused for
the next sample. Geometry after a step on pixels is a stage of its own, so each step sees what the
steps before it made; ``can_join`` says where a stage ends.

Interpolation, which tests compare with a float64 reference. The centre of pixel ``i`` is at ``i +
1/2``, edges repeat, the result is rounded to 8 bits, from a value within 0.03 of the reference; see
``resample``:

    nearest  the pixel that has the centre of the new one
    linear   between the two nearest pixels, in each direction; no smoothing before it
    area     the mean over the area that the target's pixel covers
    cubic    over four pixels in each direction, with the coefficient -0.75; no smoothing before it
    auto     linear where both sides shrink by less than 2 (or grow), else area

Without smoothing, shrinking folds detail finer than the target's pixels back into the image. "auto"
bounds that: scaled decoding averages reductions of 2 and more away where it can, "area" the rest.

Invariant: the bytes written are a function of (steps, seed, epoch, sample, attempt, the file) and
the decoders' versions.
"""

from collections.abc import Mapping, Sequence
from functools import singledispatch
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from batchd.data.pipeline.effects import IMAGE_DIMENSIONS
from batchd.data.pipeline.image import options
from batchd.data.pipeline.image.decode import Decoder
from batchd.data.pipeline.image.followers import Followers
from batchd.data.pipeline.image.geometry import (
    SKIPPED,
    TURN_OF_ORIENTATION,
    UPRIGHT,
    Cut,
    DecodePlan,
    Geometry,
    acts,
    noting,
    perhaps,
    plan_decoding,
    planner_for,
    smallest_crop,
)
from batchd.data.pipeline.image.jpeg_box import MAKES_ROWS, FileMade, FileTask, part_of, probe_file
from batchd.data.pipeline.image.opencv import Image, Pixels, Scratch, cv2, written
from batchd.data.pipeline.image.recolor import recolor_for
from batchd.data.pipeline.image.resample import cut_out, make_moves, plan_scaling
from batchd.data.pipeline.join.options import JoinStep
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.stages import Row, RowsStage, Timings
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.image_header import PIXELS_MAX, ImageHeader
from batchd.data.samples.kept_files import DecodedFile, FileHead, FilePart, KeptFiles, KnownFile
from batchd.data.samples.values import Canvas, Clips, Value
from batchd.runtime import failpoints
from batchd_wire.views import Array

_GRAY_DIMENSIONS = 2
Levels: TypeAlias = npt.NDArray[np.float64]


def can_join(step: options.ImageStep, following: options.ImageStep) -> bool:
    """True if the stage of ``step`` can do the ``following`` one, too."""
    if isinstance(step, JoinStep) or isinstance(following, JoinStep):
        return False
    return step.field == following.field and _part(step) <= _part(following)


def _part(step: options.ImageStep) -> int:
    """The part of a stage that does a step: 0 decodes, 1 moves, 2 recolors, 3 converts."""
    if isinstance(step, options.Decode | options.Follow):
        return 0
    if planner_for(step):
        return 1
    kinds = recolor_for.registry
    return 2 if type(step) in kinds else 3


def _parts_of(steps: Sequence[options.ImageStep], timings: Timings) -> tuple[tuple[int, int, int], list[int]]:
    """The timings of decoding, moving and converting, and that of each step that recolors.

    Work without a step (a turn by EXIF, a copy) counts for the part before it, else after it.
    """
    decoding, moving, recoloring, converting = (
        [step.op for step in steps if _part(step) == part and not isinstance(step, options.Follow)] for part in range(4)
    )
    before = [timings.part("+".join(names)) if names else None for names in (decoding, moving)]
    each = [timings.part(name) for name in recoloring]
    numbers = [*before, each[-1] if each else None, timings.part("+".join(converting)) if converting else None]
    known = [number for number in numbers if number is not None] or [timings.part(steps[0].op)]
    found, last = [], known[0]
    for number in numbers:
        last = last if number is None else number
        found.append(last)
    return (found[0], found[1], found[3]), each


class ImagePlan(NamedTuple):
    """The work of one image stage on one image, decided before any pixel of it is touched."""

    header: ImageHeader
    height: int
    width: int
    """Of the whole image, as the viewer sees it."""
    geometry: Geometry
    decoding: DecodePlan
    is_cut_by_decoder: bool
    """True if the decoder decodes this box alone, as far as the header tells."""
    tiles: tuple[int, int] | None = None
    """Parts of the file between restart markers that are read, of how many; only ``plan`` asks."""


class ImageStage:
    """Successive steps on one image field, ready to run on one sample after the other.

    ``before``, ``after``: the sample's columns. ``writes``: fields that no later step changes, so
    they are written straight into the row. ``timings`` measures the steps. ``kept``: what
    a cache keeps of the sample's files. ``decoder``: that of several views. Then the scale of a
    JPEG follows from the smallest crop that the steps may draw, so more views have the same one.
    ``sized``: the field whose row has the size of the images of its bucket, if these have one each.
    """

    def __init__(  # noqa: PLR0913, PLR0917  each is one thing that all samples share
        self,
        steps: Sequence[options.ImageStep],
        before: Mapping[str, Column],
        after: Mapping[str, Column],
        writes: frozenset[str],
        timings: Timings,
        kept: KeptFiles | None = None,
        decoder: Decoder | None = None,
        sized: Column | None = None,
    ) -> None:
        decode = steps[0] if isinstance(steps[0], options.Decode) else None
        self._timings = timings
        self.field = steps[0].field
        source, made = before[self.field], after[self.field]
        self._written = made if self.field in writes else None
        self._sized = sized if any(isinstance(step, options.CropToBucket) for step in steps) else None
        self._dtype = np.dtype(made.dtype)
        self._channels = _channel_count(made)
        self._channels_first = made.channels_first
        self._scratch = Scratch()
        self._decoder = (decoder or Decoder(decode, self._scratch, kept)) if decode else None
        self.step = ""
        """The step that is being done to a sample; "" while it is decoded."""
        self._pixels_max = made.pixels_max or PIXELS_MAX
        self._applies_exif = decode is not None and decode.exif == "apply"
        self._scales_decoding = decode is not None and decode.scale == "auto"
        self._planners = [(step, planner, perhaps(step, planner)) for step in steps if (planner := planner_for(step))]
        self._first_crop = _first_crop(steps) if decode and decoder else None
        moves_followers = bool(made.followers) and (
            bool(self._planners)
            or any(
                isinstance(step, options.Follow) or (isinstance(step, options.ChanceStep) and step.loses_edges)
                for step in steps
            )
        )
        follow = next((step for step in steps if isinstance(step, options.Follow)), None)
        self._followers = Followers(made, before, after, writes, follow) if moves_followers else None
        recolors = (recolor_for(step, self._scratch, is_bgr=made.is_bgr) for step in steps)
        (self._decoding, self._moving, self._converting), recoloring = _parts_of(steps, timings)
        on_pixels = [(step, recolor) for step, recolor in zip(steps, recolors, strict=True) if recolor]
        self._recolors = [(*each, part) for each, part in zip(on_pixels, recoloring, strict=True)]
        self.last_part = timings.part("follow") if self._followers else self._converting
        """The last part of a call."""
        self._tables = next(
            (table for table in (_tables(step, self._channels) for step in steps) if table is not None), None
        )
        self._writes_pixels = not self._channels_first and self._tables is None
        self._may_resize = any(step.may_resize for step in steps)
        first = next((step for step, _recolor, _part in self._recolors), None)
        is_alone = not self._decoder and not self._planners
        is_certain = isinstance(first, options.ChanceStep) and first.probability == 1 and first.takes_canvas
        self._takes_canvas = is_alone and is_certain
        self._moves_channels = (1 if decode.color == "gray" else 3) if decode else _channel_count(source)

    def __call__(self, values: dict[str, Value], random: SampleRandom, row: Mapping[str, Image]) -> None:
        """Replace the image and what follows it. Raises ``SampleUndecodable``."""
        self.make(values, random, row, self.planned(self.look(values[self.field]), random, row))

    def make(
        self,
        values: dict[str, Value],
        random: SampleRandom,
        row: Mapping[str, Image],
        plan: ImagePlan,
        decoded: Pixels | None = None,
    ) -> None:
        """Do what was planned. ``decoded``: the pixels of the plan's box, if they are known.

        Raises ``SampleUndecodable``.
        """
        value = values[self.field]
        self.step = ""
        out = row[self.field] if self._written is not None else None
        assert out is None or self._written is None or self._written.takes(out.shape), (
            f"a row of shape {out.shape}, where {self.field!r} is {self._written.text}"
        )
        is_last_shape = self._moves_channels == self._channels and not self._may_resize
        into = out if self._writes_pixels and is_last_shape else None
        if isinstance(value, Canvas):
            pixels = cast("Pixels", value)  # until the first step, which takes it
        else:
            pixels = self._moved(value, plan, random.sample, into, decoded)
            self._timings.lap(self._moving)
            if self._recolors:
                pixels = self._own(pixels, value, into)
        for step, recolor, part in self._recolors:
            self.step = step.op
            is_done = acts(step, random.random)
            change = recolor(random.random, pixels.shape)
            if random.draws is not None and step.is_random:
                random.draws.append(dict(change.drew) if is_done else SKIPPED)
            if is_done:
                pixels = change.make(pixels, out if self._writes_pixels else None)
                if plan.geometry.trail is not None:
                    plan.geometry.trail.extend(change.trail)
            self._timings.lap(part)
        if pixels is not out:
            pixels = self._converted(pixels, out)
        values[self.field] = pixels
        if self._followers:
            self._timings.lap(self._converting)
            self._follow(self._followers, values, row, plan)

    def _follow(
        self, followers: Followers, values: dict[str, Value], row: Mapping[str, Image], plan: ImagePlan
    ) -> None:
        trail, size, turn = plan.geometry.trail, (plan.height, plan.width), UPRIGHT
        assert trail is not None, "the image is followed"
        if followers.starts_stored and self._applies_exif:
            turn = TURN_OF_ORIENTATION[plan.header.orientation]
        if turn == UPRIGHT:
            followers.run(values, row, size, trail)
        else:
            followers.run(values, row, (plan.header.height, plan.header.width), [turn, *trail])

    def takes_canvas(self, field: str) -> bool:
        """Whether ``field`` may be an image in parts, as the first step makes another one of it."""
        return field == self.field and self._takes_canvas

    @property
    def decoding_part(self) -> int:
        """The part of ``Timings`` that decoding belongs to."""
        return self._decoding

    @property
    def on_rows(self) -> RowsStage | None:
        """The same for the images of many samples; None if the steps do more than convert them."""
        is_more = self._decoder or self._planners or self._recolors or self._followers
        return None if is_more else self._convert_rows

    def plan(self, values: Mapping[str, Value], random: SampleRandom) -> ImagePlan | None:
        """Plan a call, with ``tiles``; None without ``decode``. Raises ``SampleUndecodable``."""
        if self._decoder is None:
            return None
        value = values[self.field]
        assert isinstance(value, memoryview), "the bytes of a file, as there is a decode step"
        plan = self.planned(self.look(value), random)
        return plan._replace(tiles=self._decoder.tiles(value, plan.header, plan.decoding.factor, plan.decoding.box))

    def part(
        self, field: str, head: FileHead, points: memoryview | bytes, random: SampleRandom
    ) -> tuple[int, int] | None:
        """The bytes of a file with these points that a call would read, as ``part_of``."""
        if self._decoder is None or field != self.field:
            return None
        try:
            decoding = self.planned(self.look(FilePart(head.header, memoryview(b""), 0)), random).decoding
        except SampleUndecodable:
            return None
        return part_of(head, points, decoding.factor, decoding.box)

    def boxes(self, header: ImageHeader, random: SampleRandom) -> list[tuple[int, Cut]]:
        """1/scale and box of what a call would decode of a file. Raises ``SampleUndecodable``."""
        decoding = self.planned(header, random).decoding
        return [(decoding.factor, decoding.box)]

    @property
    def makes_files(self) -> bool:
        """True if one call of the extension can do all of it: see ``file_task``."""
        is_more = not self._writes_pixels or self._moves_channels != self._channels or self._recolors or self._followers
        return self._decoder is not None and self._written is not None and not is_more and MAKES_ROWS

    def file_task(self, file: KnownFile, random: SampleRandom, row: Mapping[str, Image]) -> FileTask | None:
        """Plan a call without the file; None if it takes more. Raises ``SampleUndecodable``.

        Only if ``makes_files``.
        """
        assert self._decoder is not None, "it makes files"
        decoding, turn = (plan := self.planned(file.header, random, row)).decoding, plan.geometry.turn
        scaling = plan_scaling(decoding, turn, self._channels, self._scratch, row[self.field])
        return self._decoder.file_task(file, decoding.factor, decoding.box, scaling) if scaling else None

    def make_files(self, tasks: list[FileTask], file: memoryview, note: memoryview) -> list[FileMade]:
        """Make rows by one call of the extension, and say what became of each."""
        assert self._decoder is not None, "it makes files"
        self._timings.lap(self._decoding)  # the plans
        made = self._decoder.make_rows(tasks, file, note)
        good = [one for one in made if one.is_made]
        self._timings.add(self._decoding, sum([one.decoded_ns for one in good]))
        self._timings.add(self._moving, sum([one.resampled_ns for one in good]))
        return made

    def planned(self, header: ImageHeader, random: SampleRandom, row: Row = MappingProxyType({})) -> ImagePlan:
        """Draw the numbers of the moves and plan them. Raises ``SampleUndecodable``."""
        orientation = header.orientation if self._applies_exif else 1
        is_followed = self._followers is not None or random.draws is not None
        geometry = Geometry(header.height, header.width, orientation, self._pixels_max, is_followed=is_followed)
        geometry.drawn = random.size
        height, width = geometry.height, geometry.width
        if self._sized is not None and self._sized.name in row:
            down, across = self._sized.size_axes
            shape = row[self._sized.name].shape
            geometry.bucket_size = shape[down], shape[across]
        for step, planner, perhaps_planner in self._planners:
            self.step = step.op
            if random.draws is not None and step.is_random:
                noting(step, planner, random.draws)(geometry, random.random)
            else:
                perhaps_planner(geometry, random.random)
        is_scaled = self._scales_decoding and header.format == "JPEG"
        smallest = None
        if self._first_crop is not None and is_scaled:
            smallest = smallest_crop(self._first_crop, height, width)
            smallest = smallest[::-1] if TURN_OF_ORIENTATION[orientation].transpose else smallest
        decoding = plan_decoding(geometry.moves, header.height, header.width, is_scaled=is_scaled, smallest=smallest)
        is_cut_by_decoder = self._decoder is not None and self._decoder.decodes_boxes(header)
        return ImagePlan(header, height, width, geometry, decoding, is_cut_by_decoder)

    def look(self, value: Value) -> ImageHeader:
        """Read size and orientation of the image, before any pixel is touched.

        Raises ``SampleUndecodable``.
        """
        if self._decoder is None:
            if isinstance(value, Canvas):
                return ImageHeader("pixels", value.shape[0], value.shape[1], 1, 0)
            assert isinstance(value, np.ndarray), "pixels, as there is no decode step"
            if not value.size:
                raise SampleUndecodable(f"an image without pixels: {value.shape[1]} x {value.shape[0]}")
            return ImageHeader("pixels", value.shape[0], value.shape[1], 1, 0)
        if isinstance(value, DecodedFile):
            return value.header
        if isinstance(value, FilePart):
            self._decoder.check_limits(value.data, value.header)  # limits differ by stream
            return value.header
        assert isinstance(value, memoryview), "the bytes of a file, as there is a decode step"
        header = probe_file(value)
        self._decoder.check_limits(value, header)
        return header

    def _moved(self, value: Value, plan: ImagePlan, sample: int, into: Pixels | None, decoded: Pixels | None) -> Pixels:
        """Decode, make the moves and turn, in one call if possible; into ``into`` if given."""
        decoding, turn = plan.decoding, plan.geometry.turn
        if decoded is not None:
            pixels = decoded
        elif self._decoder is None:
            assert isinstance(value, np.ndarray)
            pixels = value[:, :, np.newaxis] if value.ndim == _GRAY_DIMENSIONS else value
            pixels = cut_out(pixels, decoding.box)
        else:
            assert isinstance(value, memoryview | DecodedFile | FilePart)
            scaling = plan_scaling(decoding, turn, self._moves_channels, self._scratch, into)
            pixels = self._decoder.decode(value, plan.header, decoding.factor, decoding.box, decoding.moves, scaling)
            if scaling is not None and pixels is scaling.target:
                self._timings.lap(self._decoding, self._decoder.decoded_ns)
                failpoints.passing("worker.sample.decoded", sample)
                return pixels
        self._timings.lap(self._decoding)
        failpoints.passing("worker.sample.decoded", sample)
        return make_moves(pixels, decoding.moves, turn, self._scratch, into)

    def _own(self, pixels: Pixels, value: Value, into: Pixels | None) -> Pixels:
        """Return the pixels in writable memory: ``into`` if given, else never the source's."""
        is_value = isinstance(value, np.ndarray) and np.may_share_memory(pixels, value)
        if into is None and pixels.flags.writeable and not is_value:
            return pixels
        own = self._scratch.image("own", pixels.shape) if into is None else into
        if pixels is not own:
            np.copyto(own, pixels)
        return own

    def _converted(self, pixels: Pixels, out: Image | None) -> Image:
        """Convert the upright image to its final dtype and order, in ``out`` if given."""
        if out is None:
            if self._writes_pixels:
                return pixels
            height, width = pixels.shape[:2]
            size = (self._channels, height, width) if self._channels_first else (height, width, self._channels)
            out = np.empty(size, self._dtype)
        if self._channels_first:
            self._write_planes(pixels, out)
        elif self._tables is not None:
            _look_up(pixels, self._tables, out)
        else:
            np.copyto(out, pixels)
        return out

    def _convert_rows(self, made: dict[str, Array], rows: Row) -> None:
        if self._writes_pixels:
            return
        images = made[self.field]
        count, height, width = images.shape[:3]
        size = (self._channels, height, width) if self._channels_first else (height, width, self._channels)
        out = np.empty((count, *size), self._dtype) if self._written is None else rows[self.field]
        pixels = images.reshape(count, height, width, self._channels)
        if self._channels_first:
            for image, planes in zip(pixels, out, strict=True):
                self._write_planes(image, planes)
        else:
            self._converted(pixels.reshape(-1, width, self._channels), out.reshape(-1, width, self._channels))
        made[self.field] = out

    def _write_planes(self, pixels: Pixels, out: Image) -> None:
        planes = list(out)
        if self._tables is None:
            for made, plane in zip(cv2.split(pixels, planes), planes, strict=True):
                written(made, plane)
            return
        for channel, plane in enumerate(planes):
            grey = self._scratch.image("plane", (*plane.shape, 1))
            written(cv2.extractChannel(pixels, channel, dst=grey), grey)
            _look_up(grey, self._tables[:, :, channel], plane[:, :, np.newaxis])


class ClipsStage:
    """Successive steps on one field of clips: one ``ImageStage`` for each frame.

    The frames of a clip are made with the same numbers, and each clip with its own.
    """

    def __init__(self, stage: ImageStage, after: Column, *, writes: bool) -> None:
        self._stage = stage
        self._front = len(after.shape) - IMAGE_DIMENSIONS
        self._dtype = after.dtype
        self._writes = writes

    def __call__(self, values: dict[str, Value], random: SampleRandom, row: Row) -> None:
        """Replace the clips. Raises ``SampleUndecodable``."""
        field, value = self._stage.field, values[self._stage.field]
        assert isinstance(value, Clips | np.ndarray), "frames"
        clips = value if isinstance(value, Clips) else Clips.of(value, self._front)
        out, draws = row[field] if self._writes else None, random.draws
        of_clips: list[list[dict[str, object]]] = []
        mark = random.mark()
        size: tuple[int, ...] = ()
        for place, frame in zip(np.ndindex(clips.lengths), clips.frames, strict=True):
            if place[-1]:
                random.return_to(mark)
                random.draws = None
            else:
                mark, random.draws = random.mark(), None if draws is None else []
                of_clips += [] if random.draws is None else [random.draws]
            made: dict[str, Value] = {field: frame}
            if place != (0,) * len(place) and frame.shape != size:
                raise SampleUndecodable(f"its frames have several sizes: {sorted({size, frame.shape})}")
            size = frame.shape
            try:
                self._stage(made, random, {} if out is None or not self._writes else {field: out[place]})
            finally:
                random.draws = draws
            pixels = np.asarray(made[field])
            if out is None:
                out = np.empty((*clips.lengths, *pixels.shape), self._dtype)
            if not self._writes:
                if out.shape[self._front :] != pixels.shape:
                    raise SampleUndecodable(
                        f"its clips have several sizes: {[*out.shape[self._front :]]} and {[*pixels.shape]}"
                    )
                out[place] = pixels
        if out is None:
            raise SampleUndecodable("it has no frame")
        if draws is not None:
            steps = zip(*of_clips, strict=True)
            draws += [drew[0] if len(drew) == 1 else {f"clip {n}": one for n, one in enumerate(drew)} for drew in steps]
        values[field] = out


def _first_crop(steps: Sequence[options.ImageStep]) -> options.RandomResizedCrop | None:
    """The crop of random size that decides which part of an image is decoded, if there is one."""
    moving = (step for step in steps if planner_for(step) and not isinstance(step, options.RandomFlip))
    first = next(moving, None)
    return first if isinstance(first, options.RandomResizedCrop) else None


def _channel_count(column: Column) -> int:
    """How many channels an image has; one without an axis for them has one."""
    if len(column.shape) == _GRAY_DIMENSIONS:
        return 1
    channels = column.shape[0 if column.channels_first else 2]
    assert channels is not None, f"{column.name} is {column.text}"
    return channels


def _look_up(pixels: Pixels, tables: Image, out: Image) -> None:
    """cv2 has no tables of float16, but it copies 16 bits of any meaning."""
    if out.dtype == np.float16:
        out, tables = out.view(np.int16), tables.view(np.int16)
    written(cv2.LUT(pixels, tables, dst=out), out)


@singledispatch
def conversion(_step: options.ImageStep, _levels: Levels) -> tuple[Levels, str] | None:
    """The numbers and the dtype that a step makes of the levels 0 to 255; None if it makes none."""
    return None


@conversion.register
def _normalize(step: options.Normalize, levels: Levels) -> tuple[Levels, str]:
    return (levels / 255 - np.array(step.mean)) / np.array(step.std), step.dtype


@conversion.register
def _subtract_mean(step: options.SubtractMean, levels: Levels) -> tuple[Levels, str]:
    return (levels - np.array(step.mean)) * step.scale, "float32"


@conversion.register
def _to(step: options.To, levels: Levels) -> tuple[Levels, str] | None:
    if step.dtype == "uint8":
        return None
    return levels / 255 if step.scale else levels, step.dtype


def _tables(step: options.ImageStep, channels: int) -> npt.NDArray[np.floating] | None:
    """Compute every result of a step that makes floating-point numbers, each rounded once."""
    levels = np.broadcast_to(np.arange(256, dtype=np.float64)[np.newaxis, :, np.newaxis], (1, 256, channels))
    made = conversion(step, levels)
    return None if made is None else np.ascontiguousarray(made[0].astype(made[1]))
