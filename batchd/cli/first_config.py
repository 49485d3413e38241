"""The first configuration for recognised data: facts about it, the stream, and the text.

Runs in the user's shell; only ``look_at`` reads data. The pipeline follows from the columns of a
sample and from a few samples:

    one image file         decode, random_resized_crop, random_flip; without augmentation resize
                           and center_crop
    several image files    decode and resize each: random crops would not match
    lists of images        the same, and ragged, with room for as many as the list has at most
    frames of a video      random_resized_crop, random_flip
    text                   text_bytes, with room for the longest text; a longer one is bad
    arrays, lengths vary   pad_batch, with room for the largest array; a larger one is bad
    tokens                 cast to int64
    other arrays           no step

Invariant: the comments state every fact on which the configuration relies.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import Field, dataclass, field, fields, replace
from itertools import chain, count
from math import ceil
from time import monotonic

import numpy as np

from batchd.cli.text import escaped, wrapped
from batchd.config.schema import toml_value
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.media.sound_files import open_sound
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.values import MediaFile, Value
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.sources.options import SourceOptions, source_to_plain
from batchd.data.sources.recognise import FoundSource, endings_text
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.errors import SourceInvalid, path_text
from batchd_wire.wording import counted

LOOKED_AT = 32
"""Number of samples that are read, whatever time it takes."""
TOKENS = "tokens"
BOXES = "boxes"
"""The field of boxes that follow the image: left, top, right, bottom, in pixels."""
LOOK_S = 3.0
"""How long the others are read."""
UNREADABLE_SHOWN_MAX = 100
BATCH_SIZE = 64
SIDE_PIXELS = 224
"""Height and width of a crop; less if images are smaller."""
SHORTER_SIDE = 256
"""The shorter side, in pixels, of an image from which a crop of ``SIDE_PIXELS`` is cut."""
DROPPING_BATCHES = 16
"""With fewer, the last batch of an epoch is too large a part of the data to be left out."""
RECORD_BYTES_MAX = 1 << 28
CLASSES_SHOWN, FIELDS_SHOWN = 5, 12
LINE_CHARACTERS = 78
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_PIXEL_DIMENSIONS = 3
SEGMENT_S = 10
"""The longest segment of a sound that is proposed, in seconds."""
_FILES = {"encoded": "image file", "video": "video file", "audio": "sound file"}
_CHANNELS = (1, 3)


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Facts from the headers of a few image files of one field.

    ``widths`` and ``heights``: the smallest and the largest, in pixels. ``shorter_side``: the
    largest one, in pixels, so that one small image shrinks no other.
    """

    looked_at: int
    formats: list[str]
    widths: tuple[int, int]
    heights: tuple[int, int]
    shorter_side: int


@dataclass(frozen=True, slots=True)
class SoundFacts:
    """Facts from the headers of a few sound files of one field.

    ``rate``: the usual one, in Hz. ``seconds``: of the shortest and the longest.
    """

    looked_at: int
    rate: int
    seconds: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a source.

    ``classes``: the number of samples by class name, None if the index does not have it.
    ``images``, ``sounds``: by field. ``longest``: by field whose length varies, the largest shape
    among the samples that were read; of texts, in bytes. ``unreadable``: the reasons of some bad
    ones.
    ``read`` samples were read, and ``bad`` of them are bad. ``of_boxes``: the fields that had a row
    for each box in all of them. ``notes``: of the scan. ``box_form``: see ``SourceOptions``.
    """

    samples: int
    columns: tuple[Column, ...]
    classes: dict[str, int | None]
    images: dict[str, ImageFacts]
    longest: dict[str, tuple[int, ...]]
    unreadable: tuple[str, ...]
    read: int
    bad: int
    of_boxes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    box_form: Mapping[str, object] = field(default_factory=dict)
    sounds: Mapping[str, SoundFacts] = field(default_factory=dict)


def look_at(  # noqa: C901  a branch for each kind of column
    source: SourceOptions, index: SourceIndex, storage: Storage, clock: Callable[[], float] = monotonic
) -> Facts:
    """Read a few samples, evenly spread, and then all others as far as time allows.

    Of servers, and where images alone decide, only the few are read. Raises ``SourceInvalid`` if
    none of the few can be used.
    """
    columns = kind_of(source).columns(source, storage)
    longest: dict[str, tuple[int, ...]] = {}
    of_boxes = [
        column.name
        for column in columns
        if column.name != BOXES and column.kind == "array" and column.shape[:1] == (None,)
    ]
    unreadable: list[str] = []
    images: dict[str, list[tuple[str, int, int]]] = {}
    sounds: dict[str, list[tuple[int, float]]] = {}
    read = bad = 0
    least = min(LOOKED_AT, len(index))
    few = [number * len(index) // least for number in range(least)]
    end_s = clock() + LOOK_S
    has_images, varies = (
        any(column.is_file for column in columns),
        any(not column.is_file and not column.is_fixed for column in columns),
    )
    reads_more = not source.reads_urls and (varies or not has_images)
    with closing(open_reader(source, index, RECORD_BYTES_MAX, storage)) as reader:
        for sample in chain(few, _others(few, len(index)) if reads_more else ()):
            if read >= least and (bad == read or clock() > end_s):
                break
            read += 1
            try:
                found = reader.read(sample)
                for column in columns:
                    value = found[column.name]
                    if column.kind == "encoded":
                        images.setdefault(column.name, []).append(_header(value))
                    elif column.kind == "images":
                        assert isinstance(value, list), "a list of files"
                        images.setdefault(column.name, []).extend(map(_header, value))
                        longest[column.name] = _larger(longest.get(column.name), value)
                    elif column.kind == "audio":
                        sounds.setdefault(column.name, []).append(_lasting(value))
                    elif column.kind in ("text", "array") and not column.is_fixed:
                        longest[column.name] = _larger(longest.get(column.name), value)
                if BOXES in found:
                    rows = np.asarray(found[BOXES]).shape[:1]
                    of_boxes = [name for name in of_boxes if np.asarray(found[name]).shape[:1] == rows]
            except (SampleUnreadable, SampleUndecodable) as error:
                bad += 1
                if len(unreadable) < UNREADABLE_SHOWN_MAX:
                    unreadable.append(f"{reader.name(sample)}: {error}")
    if bad == read:
        raise SourceInvalid(
            f"{source.place}: none of {counted(least, 'sample')} can be used, for example {unreadable[0]}"
        )
    facts = {name: _image_facts(headers) for name, headers in images.items()}
    looked = _classes(index), facts, longest, tuple(unreadable), read, bad, tuple(of_boxes), index.notes
    return Facts(len(index), columns, *looked, source.box_form, {name: _sound_facts(of) for name, of in sounds.items()})


def _others(few: Sequence[int], samples: int) -> Iterator[int]:
    """The samples that are not among the ``few``, in order."""
    done = set(few)
    return (sample for sample in range(samples) if sample not in done)


def _larger(before: tuple[int, ...] | None, value: Value) -> tuple[int, ...]:
    """The largest lengths so far; of a text, in bytes, and of a list, in values."""
    if isinstance(value, str | list):
        shape: tuple[int, ...] = (len(value.encode() if isinstance(value, str) else value),)
    else:
        shape = np.asarray(value).shape
    return shape if before is None else tuple(map(max, before, shape))


def _header(value: object) -> tuple[str, int, int]:
    assert isinstance(value, memoryview), "the bytes of a file"
    header = probe_image(value)
    return header.format, header.width, header.height


def _lasting(value: Value) -> tuple[int, float]:
    """The rate of a sound file, in Hz, and its seconds."""
    assert isinstance(value, memoryview | MediaFile), "the bytes of a file"
    with open_sound(value) as sound:
        return sound.rate, sound.frames / sound.rate


def _sound_facts(lasting: Sequence[tuple[int, float]]) -> SoundFacts:
    rates, seconds = zip(*lasting, strict=True)
    return SoundFacts(len(lasting), Counter(rates).most_common(1)[0][0], (min(seconds), max(seconds)))


def _image_facts(headers: Sequence[tuple[str, int, int]]) -> ImageFacts:
    formats, widths, heights = zip(*headers, strict=True)
    sides = [min(width, height) for width, height in zip(widths, heights, strict=True)]
    return ImageFacts(
        len(headers),
        list(dict.fromkeys(formats)),
        (min(widths), max(widths)),
        (min(heights), max(heights)),
        max(sides),
    )


def _classes(index: SourceIndex) -> dict[str, int | None]:
    names = [name for name in index.class_names if name]
    labels = index.arrays.get("labels", index.arrays.get("numbers.label"))
    if labels is None or len(labels) != len(index) or not names:
        return dict.fromkeys(names)
    counts = np.bincount(np.clip(labels.astype(np.int64), 0, len(names)), minlength=len(names)).tolist()
    return dict(zip(names, counts[: len(names)], strict=True))


def same_shapes(training: Facts, others: Sequence[Facts]) -> Facts:
    """The facts of the training part, with the largest lengths that any part has."""
    longest = dict(training.longest)
    for name, shape in chain.from_iterable(other.longest.items() for other in others):
        longest[name] = tuple(map(max, longest.get(name, shape), shape))
    return replace(training, longest=longest)


# --- the stream -----------------------------------------------------------------------------------


def stream_name(place: str) -> str:
    """A name for the stream of the data at a path or URL, from its last folder or file."""
    last = re.split(r"[/\\]", re.split(r"[*?\[{]", place)[0].rstrip("/"))[-1]
    stem = last.split(".")[0] or last.strip(".")
    return _NOT_IN_NAMES.sub("-", stem).strip("-_")[:64] or "data"


def free_name(name: str, taken: Collection[str]) -> str:
    """The name, or the first of NAME-2, NAME-3 and so on that is not taken."""
    names = chain([name], (f"{name[:60]}-{number}" for number in count(2)))
    return next(one for one in names if one not in taken)


def stream_table(
    source: SourceOptions, facts: Facts, batch_size: int, *, is_training: bool | None = None
) -> dict[str, object]:
    """The table of the stream, as plain values by key; keys with defaults are left out.

    ``is_training``: true for the training part of several, false for another one, which has each
    sample once, in order, without a random step.
    """
    plain, kind = source_to_plain(source), type(source)
    table = {
        field.name: plain[field.name]
        for field in fields(kind)
        if field.name == "type" or not _is_default(source, field)
    }
    pipeline = steps_for(facts, is_augmented=is_training is not False)
    order = {"shuffle": False} if is_training is False else {}
    if is_training and facts.samples >= DROPPING_BATCHES * batch_size:
        order = {"drop_last": True}
    return {"source": table, "batch_size": batch_size, **order, **({"pipeline": pipeline} if pipeline else {})}


def _is_default(source: SourceOptions, field: Field[object]) -> bool:
    value = getattr(source, field.name)
    return bool(value == (field.default_factory() if callable(field.default_factory) else field.default))


def first_batch_size(samples: int) -> int:
    """64, or the largest power of two up to the number of samples."""
    return min(BATCH_SIZE, 1 << max(0, samples.bit_length() - 1))


def steps_for(facts: Facts, *, is_augmented: bool = True) -> list[dict[str, object]]:
    """The steps, as plain tables, that give each field one shape: the same without random ones."""
    encoded = [column.name for column in facts.columns if column.kind == "encoded"]
    steps: list[dict[str, object]] = []
    for name in encoded:
        side = min(SIDE_PIXELS, facts.images[name].shorter_side) if name in facts.images else SIDE_PIXELS
        steps.append(_step("decode", name))
        if name_of_boxes(facts) is not None:
            labels = {"labels": list(facts.of_boxes)} if facts.of_boxes else {}
            steps.append(_step("follow", name, boxes=BOXES, **facts.box_form, **labels))
        if name_of_boxes(facts) is not None:  # a crop would lose boxes
            steps += [_step("resize", name, size=[side, side]), *([_step("random_flip", name)] if is_augmented else [])]
        elif len(encoded) == 1:
            steps += _cropped(name, side, is_augmented=is_augmented)
        else:
            steps.append(_step("resize", name, size=[side, side]))
    steps += _steps_for_lists(facts)
    steps += _steps_for_sounds(facts, is_augmented=is_augmented)
    for column in facts.columns:
        if column.name == TOKENS and column.dtype != "int64":
            steps.append({"op": "cast", "field": column.name, "dtype": "int64"})
        if column.kind == "text":
            length = _room(facts.longest.get(column.name, (1,))[0])
            steps.append({"op": "text_bytes", "field": column.name, "length": length, "truncation": False})
        elif column.kind == "array" and not column.is_fixed:
            steps += _steps_for_array(column, facts.longest.get(column.name), is_augmented=is_augmented)
    return steps


def _steps_for_lists(facts: Facts) -> Iterator[dict[str, object]]:
    for column in facts.columns:
        if column.kind == "images":
            side = min(
                [SIDE_PIXELS, *(facts.images[name].shorter_side for name in facts.images if name == column.name)]
            )
            yield _step("decode", column.name)
            yield _step("resize", column.name, size=[side, side])
            yield _step("ragged", column.name, max_shape=[column.most, side, side, 3])


def _steps_for_sounds(facts: Facts, *, is_augmented: bool) -> Iterator[dict[str, object]]:
    for name, sound in facts.sounds.items():
        seconds = min(SEGMENT_S, max(1, ceil(sound.seconds[1])))
        start = {} if is_augmented else {"start": 0.0}
        field = {} if name == "audio" else {"field": name}
        yield {"op": "decode_audio", **field, "rate": sound.rate, "seconds": float(seconds), **start}


def name_of_boxes(facts: Facts) -> str | None:
    """The field of boxes that the only image of a sample has; None if there is none."""
    images = [column for column in facts.columns if column.kind == "encoded"]
    has_boxes = any(
        (column.name, column.dtype, column.shape) == (BOXES, "float32", (None, 4)) for column in facts.columns
    )
    return BOXES if has_boxes and len(images) == 1 else None


def _steps_for_array(column: Column, largest: tuple[int, ...] | None, *, is_augmented: bool) -> list[dict[str, object]]:
    largest = largest or tuple(length or 1 for length in column.shape)
    if len(largest) == _PIXEL_DIMENSIONS and column.dtype == "uint8" and largest[2] in _CHANNELS:
        return _cropped(column.name, min(SIDE_PIXELS, *largest[:2]), is_augmented=is_augmented)
    shape = [length or _room(most) for length, most in zip(column.shape, largest, strict=True)]
    return [{"op": "pad_batch", "field": column.name, "max_shape": shape}]


def _cropped(field: str, side: int, *, is_augmented: bool) -> list[dict[str, object]]:
    """The usual steps of ImageNet, of training and of validation, for other sizes, too."""
    if is_augmented:
        return [_step("random_resized_crop", field, size=[side, side]), _step("random_flip", field)]
    shorter = side * SHORTER_SIDE // SIDE_PIXELS
    return [_step("resize", field, shorter_side=shorter), _step("center_crop", field, size=[side, side])]


def _step(op: str, field: str, **options: object) -> dict[str, object]:
    return {"op": op, **({"field": field} if field != "image" else {}), **options}


def _room(length: int) -> int:
    """The next power of two."""
    return 1 << max(0, length - 1).bit_length()


# --- the text -------------------------------------------------------------------------------------


def config_text(name: str, table: Mapping[str, object], comments: Sequence[str]) -> str:
    """The text of batchd.toml: ``comments``, each on as many lines as it takes, and the stream."""
    lines = []
    for comment in comments:
        lines += wrapped(escaped(comment), LINE_CHARACTERS, "# ", "#   ")
    lines += [f"[{path_text(('streams', name))}]", *(_pair(key, value) for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _pair(key: str, value: object) -> str:
    """A key and its value, a long list with a line for each item."""
    line = f"{key} = {toml_value(value)}"
    if len(line) <= LINE_CHARACTERS or not isinstance(value, Sequence) or isinstance(value, str):
        return line
    return "\n".join([f"{key} = [", *(f"    {toml_value(item)}," for item in value), "]"])


def comments_on(found: FoundSource, facts: Facts) -> list[str]:
    """Comments for the file: facts about the data, and the files that are left out."""
    shown = [f"{column.name} ({_FILES.get(column.kind, column.text)})" for column in facts.columns[:FIELDS_SHOWN]]
    more = ["…"] if len(facts.columns) > FIELDS_SHOWN else []
    lines = [f"{counted(facts.samples, 'sample')}: {', '.join(shown + more)}"]
    if facts.classes:
        lines.append(f"{_classes_text(facts.classes)}")
    lines += [_images_text(name, images) for name, images in facts.images.items()]
    lines += [
        f"{name}: {sound.rate:,} Hz, {sound.seconds[0]:.1f} to {sound.seconds[1]:.1f} s, in {sound.looked_at:,} of them"
        for name, sound in facts.sounds.items()
    ]
    for name, shape in facts.longest.items():
        unit = " bytes" if len(shape) == 1 and _is_text(facts, name) else ""
        larger = "" if facts.read == facts.samples else "; what is larger than its room is a bad sample"
        lines.append(f"{name}: up to {' x '.join(map(str, shape))}{unit} in {_looked_at(facts)}{larger}")
    if any(column.kind == "encoded" for column in facts.columns):
        places = [column.name for column in facts.columns if column.shape in ((None, 4), (None, 2), (4,))]
        is_plain = not facts.box_form
        lines += [
            _places_text(name, is_followed=name == name_of_boxes(facts)) for name in places if is_plain or name != BOXES
        ]
    lines += [*found.recognised.notes, *facts.notes]
    for reason, names in found.left_out_by_reason().items():
        share = f"{len(names):,} of {counted(len(found.files.names), 'file')} left out"
        lines.append(f"{share}, {reason}: {endings_text(names)}")
    if facts.unreadable:
        lines.append(f"{facts.bad:,} of {_looked_at(facts)} cannot be used: {facts.unreadable[0]}")
    return lines


def _places_text(name: str, *, is_followed: bool) -> str:
    if is_followed:
        return f"{name}: taken as left, top, right, bottom in pixels of the upright image, which they follow"
    return f"{name}: not changed with the image; boxes and points follow its crops by the step follow"


def _is_text(facts: Facts, name: str) -> bool:
    return any(column.name == name and column.kind == "text" for column in facts.columns)


def _looked_at(facts: Facts) -> str:
    return f"the {counted(facts.read, 'sample')} read"


def _classes_text(classes: Mapping[str, int | None]) -> str:
    shown = [name if count is None else f"{name} ({count:,})" for name, count in list(classes.items())[:CLASSES_SHOWN]]
    plural = "classes" if len(classes) != 1 else "class"
    return f"{len(classes):,} {plural}: {', '.join(shown)}{', …' if len(classes) > CLASSES_SHOWN else ''}"


def _images_text(name: str, images: ImageFacts) -> str:
    (narrow, wide), (low, high) = images.widths, images.heights
    sizes = f"{narrow} x {low}" if (narrow, low) == (wide, high) else f"{narrow}..{wide} x {low}..{high}"
    return f"{name}: {' and '.join(images.formats)}, {sizes} pixels ({counted(images.looked_at, 'file')} checked)"
