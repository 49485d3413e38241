"""Which member of a sample in a WebDataset shard a field comes from, and what its bytes are. Daemon, workers and CLI.

    field                                 member, unless ``names`` has another
    image = "image"                       jpg, jpeg, png, webp, gif or bmp
    NAME = "image"                        NAME.jpg, NAME.jpeg, ...
    NAME = "text"                         NAME.txt
    label = "int64", or a like number     cls
    NAME = "float32", one number          json:NAME
    NAME = "float32[4]", several          NAME.npy

This is where ``batchd prepare`` puts them. Standard library only.

Invariant: all members that a field may come from are read in the same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from batchd.samples.columns import Column

IMAGE, LABEL = "image", "label"
IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp", "gif", "bmp")
LABEL_ENDING, JSON_ENDING, TEXT_ENDING, ARRAY_ENDING = "cls", "json", "txt", "npy"
WRITTEN_ENDINGS = (LABEL_ENDING, TEXT_ENDING, "text")
"""Numbers in these are written in digits."""
PICKLE_ENDINGS = ("pickle", "pkl", "pth", "pt", "pyd")

Coding = Literal["image", "text", "npy", "json", "written", "bytes"]
"""What the bytes of a member are; ``written``: numbers in digits; ``bytes``: little-endian numbers."""


@dataclass(frozen=True, slots=True)
class Member:
    """Where a field comes from: the first of the ``endings`` that a sample has, and a ``key`` where that is a JSON object."""

    endings: tuple[str, ...]
    key: str = ""

    @property
    def text(self) -> str:
        """The member as people write it."""
        return ";".join(self.endings) + (f":{self.key}" if self.key else "")


def parse_member(name: str, text: str) -> Member:
    """Read what people write, such as ``"seg.png"``, ``"jpg;png"`` or ``"json:width"``. Raises ``ValueError``.

    An ending may have its dot in front, as messages show it.
    """
    endings, colon, key = text.partition(":")
    member = Member(tuple(ending.removeprefix(".") for ending in endings.split(";")), key)
    if not all(member.endings) or (colon and not key):
        raise ValueError(
            f'names.{name} = "{text}" is no member: write what stands behind the first dot of its name, as in "seg.png", '
            '"jpg;png" for the first of two, or "json:KEY" for a value in a JSON object'
        )
    return member


def usual_member(column: Column) -> Member:
    """Where a field comes from that ``names`` says nothing of."""
    name = column.name
    if column.kind == "encoded":
        return Member(IMAGE_ENDINGS if name == IMAGE else tuple(f"{name}.{ending}" for ending in IMAGE_ENDINGS))
    if column.kind == "text":
        return Member((f"{name}.{TEXT_ENDING}",))
    if column.shape:
        return Member((f"{name}.{ARRAY_ENDING}",))
    return Member((LABEL_ENDING,)) if is_label(column) else Member((JSON_ENDING,), name)


def member_of(column: Column, names: Mapping[str, str]) -> Member:
    """Where a field comes from. Raises ``ValueError``."""
    return parse_member(column.name, names[column.name]) if column.name in names else usual_member(column)


def is_label(column: Column) -> bool:
    """Is it what has a member of its own, as other readers of shards expect it: one whole number that is called the label?"""
    is_whole = column.kind == "array" and column.dtype != "bool" and "float" not in column.dtype
    return column.name == LABEL and is_whole and not column.shape


def coding_of(column: Column, member: Member) -> Coding:
    """What the bytes are that a field comes from. Raises ``ValueError`` where that cannot be."""
    codings = {_coding_of(column, member, ending) for ending in member.endings}
    if len(codings) > 1:
        raise ValueError(
            f'{column.name} = "{column.text}" may come from {member.text}, which are not read in the same way; name those alone '
            "that are"
        )
    return codings.pop()


def _coding_of(column: Column, member: Member, ending: str) -> Coding:
    last = ending.rpartition(".")[2].lower()
    if last in PICKLE_ENDINGS:
        raise ValueError(f"{column.name} comes from .{ending}, a pickle, which batchd never reads: write .npy or .json")
    if last == "npz":
        raise ValueError(f"{column.name} comes from .{ending}, which holds several arrays: write each as .npy")
    if column.kind == "encoded":
        if member.key:
            raise ValueError(
                f"{column.name} is an image, and {member.text} is a value in JSON; name a member of its own"
            )
        return "image"
    if member.key:
        coding: Coding = "json"
    elif column.kind == "text":
        coding = "text"
    elif last == ARRAY_ENDING:
        coding = "npy"
    elif last == JSON_ENDING:
        raise ValueError(f'{column.name} comes from .{ending}: name the key too, as in "{ending}:{column.name}"')
    else:
        coding = "written" if not column.shape or last in WRITTEN_ENDINGS else "bytes"
    if coding in ("written", "bytes") and column.shape.count(None) > 1:
        raise ValueError(
            f'{column.name} = "{column.text}": in .{ending} one length may differ from sample to sample, not several'
        )
    return coding
