"""The columns of samples: names, kinds, dtypes and shapes. Daemon, workers, CLI; standard library.

    source  -->  columns  --step-->  columns  --step-->  ...  -->  fields of a batch
                 image: encoded      image: uint8[?,?,3]           image: uint8[224,224,3]
                 label: int64        label: int64                  label: int64

A source says which columns its samples have, and each step which columns it turns them into. The
columns after the last step become the fields of a batch, so by then each must have one shape.

Users write a column as ``"float32"``, ``"uint8[28,28]"``, ``"int32[?]"`` where a length differs
from sample to sample, ``"image"``, ``"video"`` and ``"audio"`` for the bytes of such a file,
``"text"``, ``"text[<=8]"`` for up to eight texts, ``"image[<=8]"``, ``"json"`` and ``"bytes"``. Of
samples that have no shape of their own they declare the columns:

    fields   = { image = "image", label = "int64" }    the columns, in the order of a batch
    names    = { label = "class_id" }                  what the data calls a field, if it differs
    defaults = { label = -1, ids = [], caption = "" }  in the place of a value that a sample lacks

A list, JSON and bytes are no fields of a batch: a step makes something of them.

Invariants: ``parse_column(name, column.text) == column`` for a source's column. A field that is
wrong in itself has no further problems. A default that was checked fits into its field.
"""

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Literal, TypeAlias

from batchd.data.samples.checks import Checks
from batchd.runtime.suggestions import nearest
from batchd_wire.fields import BUCKETED, DIMENSIONS_MAX, ITEM_BYTES, Field, Varying, length_texts
from batchd_wire.record import frozen
from batchd_wire.wording import counted

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
LENGTH_MAX = 1 << 32
_ARRAY = re.compile(r"([a-z]+\d*)(?:\[([0-9?, ]*)\])?")
_LIST = re.compile(r"(text|image)\[<= ?([0-9]{1,9})\]")
LIST_MAX = 1 << 16

ColumnKind = Literal["encoded", "video", "audio", "text", "array", "json", "bytes", "texts", "images", "arrays"]
"""``encoded``: the bytes of an image file. ``video``: a video file. ``audio``: a sound file.
``text``: a string. ``array``: numbers. ``json``: any value in JSON. ``bytes``: any bytes.
``texts``, ``images``, ``arrays``: a list of these."""
LISTS: Mapping[ColumnKind, ColumnKind] = MappingProxyType({"texts": "text", "images": "encoded", "arrays": "array"})
"""The kind of each value of a list."""
MediaWord = Literal["image", "video", "audio"]
"""What a file of a sample may be, as users write it."""
_WORDS: dict[str, ColumnKind] = {
    "image": "encoded",
    "video": "video",
    "audio": "audio",
    "text": "text",
    "json": "json",
    "bytes": "bytes",
}
_FILE_KINDS = frozenset({"encoded", "video", "audio"})
_NOTHING: Mapping[str, str] = MappingProxyType({})


@frozen
class Following:
    """What follows the geometry of an image, as the step ``follow`` says."""

    roles: tuple[tuple[str, str], ...] = ()
    """("mask", "masks", "boxes", "points", "keypoints" or "label", name of the column)."""
    drops_rows: bool = False
    """Whether the rows of an object that vanishes leave all columns with a row for each."""
    min_visible: float = 0.0
    """The fraction of a box that has to be left by each step, or it vanishes."""
    min_area: float = 0.0
    """Square pixels that a box has to have after each step, or it vanishes."""
    flip_indices: tuple[int, ...] = ()
    """The keypoint that each one becomes in a mirror; empty if all stay."""

    @property
    def of_objects(self) -> tuple[str, ...]:
        """The columns with a row for each object."""
        return tuple(name for role, name in self.roles if role not in ("mask", "points"))


@frozen
class Beside:
    """What the first length of a column of patches goes with, other than that of the tokens."""

    field: str
    """The patches, whose length it has."""
    most: int
    """The most of them for each token."""


@frozen
class Column:
    """One named value of a sample.

    ``dtype`` and ``shape`` count for arrays; a length of None differs from sample to sample. Once a
    step has given such a column room in a batch, ``varying`` says how its samples differ,
    and ``shape`` is the room.
    """

    name: str
    kind: ColumnKind = "array"
    dtype: str = "uint8"
    shape: tuple[int | None, ...] = ()
    most: int = 0
    """Of a list: how many values it has at most."""
    channels_first: bool = False
    """Whether an image has its channels in front: [channels, height, width]."""
    is_bgr: bool = False
    """Whether the channels of an image are blue, green, red."""
    pixels_max: int = 0
    """The most pixels that an image may have, height times width; 0 if no step limits them."""
    following: Following = Following()
    """What follows the image."""
    made_by: str = ""
    """The step that made it; "" for a column of the source."""
    varying: Varying | None = None
    """How its samples are placed in a room that is larger than they are."""
    fill: float = 0.0
    """The value of the part of the room that a sample leaves, and of all of it for a bad one."""
    beside: Beside | None = None
    """Of what ``interleave`` has made of images."""
    sizes: tuple[tuple[int, int], ...] = ()
    """(Height, width) of the images of each bucket, or those that batches draw from: all images of
    a batch have one of them. Empty for images of one size, and where they differ in a batch."""

    @property
    def item(self) -> "Column":
        """A value of a list, as a column; ``in_list`` is the way back."""
        return replace(self, kind=LISTS[self.kind], most=0)

    def in_list(self, most: int) -> "Column":
        """A list of up to ``most`` values of this column."""
        return replace(self, kind=next(kind for kind, item in LISTS.items() if item == self.kind), most=most)

    @property
    def stacked(self) -> "Column":
        """The arrays of a list as one, whose first length is their number."""
        return replace(self, kind="array", shape=(None, *self.shape), most=0)

    @property
    def followers(self) -> tuple[tuple[str, str], ...]:
        """The columns that follow the image, by their roles."""
        return self.following.roles

    @property
    def is_file(self) -> bool:
        """True for what a step decodes: the bytes of a file, or a file that is read in parts."""
        return self.kind in _FILE_KINDS

    @property
    def is_fixed(self) -> bool:
        """True if all samples have one shape, or each has room for the largest."""
        return self.kind == "array" and None not in self.shape

    @property
    def fixed_shape(self) -> tuple[int, ...]:
        """The shape of a column that has one."""
        assert self.is_fixed, f"{self.name} is {self.text}"
        return tuple(length for length in self.shape if length is not None)

    @property
    def size_axes(self) -> tuple[int, ...]:
        """The dimensions of height and width, if the images of a batch have the same; else ()."""
        axes = (1, 2) if self.channels_first else (0, 1)
        others = (length for axis, length in enumerate(self.shape) if axis not in axes)
        is_sized = bool(self.sizes) and self.kind == "array" and self.shape[axes[0] : axes[-1] + 1] == (None, None)
        return axes if is_sized and None not in others else ()

    @property
    def field(self) -> Field | None:
        """The field of a batch that it becomes without further steps; None if it needs some."""
        if self.is_fixed:
            return Field(self.name, self.dtype, self.fixed_shape, self.varying)
        if not self.size_axes:
            return None
        largest = map(max, zip(*self.sizes, strict=True))
        shape = tuple(next(largest) if length is None else length for length in self.shape)
        return Field(self.name, self.dtype, shape, Varying(BUCKETED, self.size_axes))

    def takes(self, shape: tuple[int, ...]) -> bool:
        """True if a value may have this shape."""
        return len(shape) == len(self.shape) and all(
            wanted in (None, length) for wanted, length in zip(self.shape, shape, strict=True)
        )

    @property
    def text(self) -> str:
        """The column as users write it."""
        if self.kind in LISTS:
            return f"{self.item.text}[<={self.most}]"
        if self.kind != "array":
            return next(word for word, kind in _WORDS.items() if kind == self.kind)
        if not self.shape:
            return self.dtype
        known = length_texts([length or 0 for length in self.shape], self.varying)
        lengths = ["?" if length is None else text for length, text in zip(self.shape, known, strict=True)]
        return f"{self.dtype}[{','.join(lengths)}]"


def check_field_names(*names: str) -> None:
    """Raise ``ValueError`` for a name that no field can have."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a valid field name: letters, digits, _, . and -, at most 64, and no digit in front"
            )


def parse_column(name: str, text: str) -> Column:
    """Parse ``"image"``, ``"text[<=8]"``, ``"uint8[28,28]"`` and so on. Raises ``ValueError``."""
    check_field_names(name)
    if text in _WORDS:
        return Column(name, _WORDS[text])
    several = _LIST.fullmatch(text)
    if several is not None:
        if not 1 <= int(several[2]) <= LIST_MAX:
            raise ValueError(f'{name} = "{text}": a list has 1 to {LIST_MAX} {several[1]}s at most')
        return Column(name, _WORDS[several[1]]).in_list(int(several[2]))
    written = _ARRAY.fullmatch(text)
    if written is None or written[1] not in ITEM_BYTES:
        meant = _meant(text)
        if meant is not None:
            raise ValueError(f'{name} = "{text}" is not a valid type; did you mean "{meant}"?')
        raise ValueError(
            f'{name} = "{text}" is not a valid type: "image", "video", "audio", "text", "text[<=8]" for up to 8 texts, '
            f'"image[<=8]", "json", "bytes", or one of {", ".join(ITEM_BYTES)}, with a shape if it has one, as in '
            '"uint8[28,28]", or "int32[?]" where a length differs from sample to sample'
        )
    return Column(name, "array", written[1], _lengths(name, text, written[2]))


def _meant(text: str) -> str | None:
    """The type that was probably meant: with the nearest name, and in the right brackets."""
    begins = re.match("[A-Za-z]+[0-9]*", text)
    word = begins[0] if begins else ""
    if sum(known.startswith(word) for known in ITEM_BYTES) > 1:
        return None
    most = re.search("[0-9]+", text)
    if word in ("text", "texts", "images") or (word == "image" and most):
        return f"{word.removesuffix('s')}[<={most[0] if most else 8}]"
    known = nearest(word, [*_WORDS, *ITEM_BYTES])
    lengths = text[len(word) :].strip().translate(str.maketrans("(){}<>", "[][][]"))
    meant = f"{known}{lengths}"
    if known in ITEM_BYTES and _ARRAY.fullmatch(meant):
        return meant
    return known if known != word or known not in ITEM_BYTES else None


def _lengths(name: str, text: str, written: str | None) -> tuple[int | None, ...]:
    if written is None:
        return ()
    try:
        lengths = tuple(None if part.strip() == "?" else int(part) for part in written.split(","))
    except ValueError:
        raise ValueError(f'{name} = "{text}": a length is a number, or ? where it differs') from None
    known = [length for length in lengths if length is not None]
    if not all(known) or prod(known) > LENGTH_MAX or len(lengths) > DIMENSIONS_MAX:
        raise ValueError(
            f'{name} = "{text}": lengths are 1 and more, {LENGTH_MAX} elements together at most, in {DIMENSIONS_MAX} '
            "dimensions at most"
        )
    return lengths


def check_declared(
    checks: Checks,
    fields: Mapping[str, str],
    *,
    with_shapes: bool = False,
    lacks: Mapping[str, str] = _NOTHING,
) -> tuple[Column, ...]:
    """The columns of the valid fields; problems of the others are added to ``checks``.

    ``with_shapes``: the data has the shapes of arrays itself, so several lengths may differ.
    ``lacks``: see ``check_types``.
    """
    if not fields:
        checks.say('fields must name at least one field, as in { image = "image", label = "int64" }', "fields")
    columns = check_types(checks, "fields", fields, lacks)
    usable = []
    for column in columns:
        if column.name in ("index", "valid"):
            text = f"every batch calls something else {column.name!r}; choose another name, and say the old in names"
            checks.say(text, "fields", column.name)
        elif column.shape.count(None) > 1 and not with_shapes:
            text = f'{column.name} = "{column.text}": one length may differ from sample to sample, not several'
            checks.say(text, "fields", column.name)
        else:
            usable.append(column)
    return tuple(usable)


def check_types(
    checks: Checks, key: str, fields: Mapping[str, str], lacks: Mapping[str, str] = _NOTHING
) -> tuple[Column, ...]:
    """The columns of the valid types in table ``key``; problems of others go to ``checks``.

    ``lacks``: the kinds that the data cannot have, each with what to do.
    """
    columns = []
    for name, text in fields.items():
        with checks.at(key, name):
            column = parse_column(name, text)
            if column.kind in lacks:
                raise ValueError(f'{name} = "{text}": {lacks[column.kind]}')
            columns.append(column)
    return tuple(columns)


def check_names(
    checks: Checks, fields: Mapping[str, str], names: Mapping[str, str], **tables: Mapping[str, object]
) -> None:
    """Add problems for empty names, and for names in ``names`` or ``tables`` that are no fields."""
    check_known(checks, fields, names=names, **tables)
    for field, name in names.items():
        if field in fields and not name:
            checks.say(f"names.{field} must not be empty", "names", field)


def check_known(checks: Checks, fields: Mapping[str, str], **tables: Mapping[str, object]) -> None:
    """Add a problem for each name in one of the ``tables``, by their keys, that is no field."""
    for key, table in tables.items():
        for name in table if fields else ():
            if name not in fields:
                meant = nearest(name, fields)
                advice = f"; did you mean {meant}?" if meant else ""
                checks.say(f"{key} has {name!r}, which is none of the fields {', '.join(fields)}{advice}", key, name)


Default: TypeAlias = bool | int | float | str | tuple[bool | int | float | str, ...]
"""Replaces a missing value: a number for every element, all of the numbers, a text, or texts."""
_PACKED = {
    "uint8": "<B",
    "int8": "<b",
    "uint16": "<H",
    "int16": "<h",
    "float16": "<e",
    "uint32": "<I",
    "int32": "<i",
    "float32": "<f",
    "uint64": "<Q",
    "int64": "<q",
    "float64": "<d",
}


def check_defaults(checks: Checks, columns: Iterable[Column], defaults: Mapping[str, Default]) -> None:
    """Add a problem for every default that does not fit its field."""
    for column in columns:
        if column.name in defaults:
            with checks.at("defaults", column.name):
                _check_default(column, defaults[column.name])


def _check_default(column: Column, default: Default) -> None:
    what = f"defaults: {column.name} is {column.text}, so"
    if column.is_file or column.kind == "bytes":
        raise ValueError(f"{what} nothing can stand for it; leave it out of the defaults")
    if column.kind == "images" and default != ():
        raise ValueError(f"{what} its default is []")
    if column.kind == "texts":
        texts = default if isinstance(default, tuple) else (0,)
        if len(texts) > column.most or not all(isinstance(text, str) for text in texts):
            raise ValueError(f'{what} its default is a list of {column.most} texts at most, such as [] or [""]')
    if column.kind in ("text", "array") and (column.kind == "text") != isinstance(default, str):
        raise ValueError(
            f"{what} its default is {'a text' if column.kind == 'text' else 'a number, or a list of them'}"
        )
    if column.kind == "array" and not isinstance(default, str):
        _check_numbers(column, default, what)


def _check_numbers(column: Column, default: float | tuple[float | str, ...], what: str) -> None:
    if isinstance(default, tuple) and default and column.shape.count(None) > 1:
        raise ValueError(f"{what} its default is [], or none")
    if isinstance(default, tuple):
        known = prod(length for length in column.shape if length is not None)
        fits = len(default) % known == 0 if None in column.shape else len(default) == known
        if not fits or not column.shape:
            raise ValueError(f"{what} its default is not {counted(len(default), 'number')}")
    elif None in column.shape:
        raise ValueError(f"{what} its default is a list, such as []")
    for number in default if isinstance(default, tuple) else (default,):
        if isinstance(number, str) or not _holds(column.dtype, number):
            raise ValueError(f"{what} {number} cannot be in it")


def _holds(dtype: str, number: float) -> bool:
    if dtype == "bool":
        return number in (0, 1)
    try:
        struct.pack(_PACKED[dtype], number)
    except (struct.error, OverflowError):
        return False
    return not isinstance(number, bool)


MAGIC_BYTES = 16
"""The beginning of a file that decides."""


def image_format(start: bytes) -> str | None:
    """The format of an image file that starts so: JPEG, PNG, WebP, BMP or GIF; None for others.

    A file's name is never asked.
    """
    if start.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if start.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        return "WebP"
    if start.startswith(b"BM"):
        return "BMP"
    if start.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    return None
