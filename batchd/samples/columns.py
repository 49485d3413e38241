"""What a sample consists of: named columns, and what may be in each. Daemon, workers and CLI; standard library only.

    source  -->  columns  --step-->  columns  --step-->  ...  -->  fields of a batch
                 image: encoded      image: uint8[?,?,3]           image: uint8[224,224,3]
                 label: int64        label: int64                  label: int64

A source says which columns its samples have, and every step which columns it makes of which. What
is left at the end becomes the fields of a batch, so by then each must have one shape.

People write a column as they would say it: ``"float32"``, ``"uint8[28,28]"``, ``"int32[?]"`` where
a length differs from sample to sample, ``"image"`` for the bytes of an image file, and ``"text"``.

Invariant: ``parse_column(name, column.text) == column``, as a source has it.
"""

import re
from dataclasses import dataclass
from math import prod
from typing import Literal

from batchd.suggestions import nearest
from batchd_wire.fields import DIMENSIONS_MAX, ITEM_BYTES, Varying, length_texts

COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
LENGTH_MAX = 1 << 32
_ARRAY = re.compile(r"([a-z]+\d*)(?:\[([0-9?, ]*)\])?")

ColumnKind = Literal["encoded", "text", "array"]
"""``encoded``: the bytes of an image file. ``text``: a string. ``array``: numbers."""


@dataclass(frozen=True, slots=True)
class Column:
    """One named value of a sample. ``dtype`` and ``shape`` count for arrays; None in the shape differs from sample to sample.

    Once a step has given such a column room in a batch, ``varying`` says how its samples differ,
    and ``shape`` is the room.
    """

    name: str
    kind: ColumnKind = "array"
    dtype: str = "uint8"
    shape: tuple[int | None, ...] = ()
    channels_first: bool = False
    """Whether an image has its channels in front: [channels, height, width]."""
    is_bgr: bool = False
    """Whether the channels of an image are blue, green, red."""
    pixels_max: int = 0
    """How many pixels an image may have, height times width; 0 where no step says."""
    followers: tuple[tuple[str, str], ...] = ()
    """What the image's geometry is done to as well: ("mask", "boxes" or "points", name of its column)."""
    made_by: str = ""
    """The step that made it; "" where it is as the source has it."""
    varying: Varying | None = None
    """How its samples lie in a room that is larger than they are."""
    fill: float = 0.0
    """What stands in the room that a sample does not need, and in all of it for a bad one."""

    @property
    def is_fixed(self) -> bool:
        """Can it be a field of a batch as it is?"""
        return self.kind == "array" and None not in self.shape

    @property
    def fixed_shape(self) -> tuple[int, ...]:
        """The shape of a column that has one."""
        assert self.is_fixed, f"{self.name} is {self.text}"
        return tuple(length for length in self.shape if length is not None)

    @property
    def text(self) -> str:
        """The column as people write it."""
        if self.kind != "array":
            return {"encoded": "image", "text": "text"}[self.kind]
        if not self.shape:
            return self.dtype
        known = length_texts([length or 0 for length in self.shape], self.varying)
        lengths = ["?" if length is None else text for length, text in zip(self.shape, known, strict=True)]
        return f"{self.dtype}[{','.join(lengths)}]"


def parse_column(name: str, text: str) -> Column:
    """Read what people write, such as ``"image"``, ``"text"``, ``"float32"`` or ``"uint8[28,28]"``. Raises ``ValueError``."""
    if not COLUMN_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name of a field: letters, digits, _, . and -, at most 64, and no digit in front"
        )
    if text in ("image", "text"):
        return Column(name, "encoded" if text == "image" else "text")
    written = _ARRAY.fullmatch(text)
    if written is None or written[1] not in ITEM_BYTES:
        meant = _meant(text)
        if meant is not None:
            raise ValueError(f'{name} = "{text}" is no type; did you mean "{meant}"?')
        raise ValueError(
            f'{name} = "{text}" is no type: "image", "text", or one of {", ".join(ITEM_BYTES)}, with a shape where it has '
            'one, as in "uint8[28,28]", or "int32[?]" where a length differs from sample to sample'
        )
    return Column(name, "array", written[1], _lengths(name, text, written[2]))


def _meant(text: str) -> str | None:
    """The type that was probably meant: with the nearest name, and in the right brackets."""
    begins = re.match("[A-Za-z]+[0-9]*", text)
    word = begins[0] if begins else ""
    if sum(known.startswith(word) for known in ITEM_BYTES) > 1:
        return None
    known = nearest(word, ["image", "text", *ITEM_BYTES])
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
