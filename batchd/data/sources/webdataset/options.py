"""Sources of samples in tar files. Daemon, workers and CLI; standard library only.

Each field is read from a member of a sample in a shard:

    field                                 member, unless ``names`` has another
    image = "image"                       jpg, jpeg, png, webp, gif or bmp
    NAME = "image"                        NAME.jpg, NAME.jpeg, ...
    video = "video"                       mp4, mkv, webm, mov, avi or bin; of NAME: NAME.mp4, ...
    audio = "audio"                       flac, wav, mp3, ogg, opus, m4a, aac or bin; likewise
    NAME = "text"                         NAME.txt
    NAME = "text[<=8]", or "json"         NAME.json
    NAME = "image[<=8]"                   NAME.0.jpg, NAME.1.png, ...
    NAME = "bytes"                        NAME.bin
    label = "int64", or a like number     cls
    NAME = "float32", one number          json:NAME
    NAME = "float32[4]", several          NAME.npy

This is where ``batchd prepare`` puts them. Behind KEY.jpg it writes KEY.jpg.points, with the access
points of that file (``data.samples.kept_files``).

Invariant: all members that may hold a field are read in the same way.
"""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, NamedTuple

from batchd.data.samples.checks import Checks, Example
from batchd.data.samples.columns import Column, Default, check_declared, check_defaults, check_names
from batchd.data.sources.options import ShardOptions, check_path_bytes, names_in
from batchd_wire.record import options

IMAGE, AUDIO, LABEL = "image", "audio", "label"
IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp", "gif", "bmp")
MEDIA_ENDINGS = {
    "video": ("mp4", "mkv", "webm", "mov", "avi"),
    "audio": ("flac", "wav", "mp3", "ogg", "opus", "m4a", "aac"),
}
LABEL_ENDING, JSON_ENDING, TEXT_ENDING, ARRAY_ENDING, BYTES_ENDING = "cls", "json", "txt", "npy", "bin"
WRITTEN_ENDINGS = (LABEL_ENDING, TEXT_ENDING, "text")
"""Endings of numbers in digits."""
POINTS_ENDING = "points"
"""Of the member that has the access points of the image in front: as in KEY.jpg.points."""
PICKLE_ENDINGS = ("pickle", "pkl", "pth", "pt", "pyd")

MEMBER_BYTES_MAX = (1 << 32) - 1
"""In the index, the length of a member of so many bytes or more: none is read that is so long."""
MISSING = 255
"""In the index, in place of the ending of a member that is absent."""

Coding = Literal["image", "text", "npy", "json", "written", "bytes"]
"""The content of a member. ``written``: numbers in digits; ``bytes``: little-endian numbers, or any
bytes; ``text`` of a list of texts: one in each of several members."""


class Member(NamedTuple):
    """The member of a field: the first of ``endings`` that a sample has; ``key`` in it, if JSON."""

    endings: tuple[str, ...]
    key: str = ""

    @property
    def text(self) -> str:
        """The member as in ``names``."""
        return ";".join(self.endings) + (f":{self.key}" if self.key else "")


class MemberField(NamedTuple):
    """A field of a sample; its member is number ``slot`` of those that are read.

    ``slots``: those of its texts or images, each in a member of its own.
    """

    column: Column
    member: Member
    slot: int
    coding: Coding
    slots: tuple[int, ...] = ()

    @property
    def members(self) -> str:
        """Its member, or all that it may be, for messages."""
        return " or ".join(f".{ending}" for ending in self.member.endings)


def parse_member(name: str, text: str) -> Member:
    """Parse such as ``"seg.png"``, ``"jpg;png"`` or ``"json:width"``. Raises ``ValueError``.

    An ending may begin with its dot, as messages show it.
    """
    endings, colon, key = text.partition(":")
    member = Member(tuple(ending.removeprefix(".") for ending in endings.split(";")), key)
    if not all(member.endings) or (colon and not key):
        raise ValueError(
            f'names.{name} = "{text}" is not a member: write what stands behind the first dot of its name, as in "seg.png", '
            '"jpg;png" for the first of two, or "json:KEY" for a value in a JSON object'
        )
    return member


def usual_member(column: Column) -> Member:
    """The member of a field that is not in ``names``."""
    name = column.name
    if column.kind == "encoded":
        return Member(IMAGE_ENDINGS if name == IMAGE else tuple(f"{name}.{ending}" for ending in IMAGE_ENDINGS))
    if column.is_file:
        plain = MEDIA_ENDINGS[column.kind]
        endings = (*plain, BYTES_ENDING)
        return Member((*(plain if name == column.kind else ()), *(f"{name}.{ending}" for ending in endings)))
    if column.kind == "images":
        return Member(tuple(f"{name}.{{0..{column.most - 1}}}.{ending}" for ending in IMAGE_ENDINGS))
    if column.kind == "text":
        return Member((f"{name}.{TEXT_ENDING}",))
    if column.kind != "array":
        return Member((f"{name}.{BYTES_ENDING if column.kind == 'bytes' else JSON_ENDING}",))
    if column.shape:
        return Member((f"{name}.{ARRAY_ENDING}",))
    return Member((LABEL_ENDING,)) if is_label(column) else Member((JSON_ENDING,), name)


def member_of(column: Column, names: Mapping[str, str]) -> Member:
    """The member of a field. Raises ``ValueError``."""
    return parse_member(column.name, names[column.name]) if column.name in names else usual_member(column)


def is_label(column: Column) -> bool:
    """True for a whole number called label: other readers of shards expect it in its own member."""
    is_whole = column.kind == "array" and column.dtype != "bool" and "float" not in column.dtype
    return column.name == LABEL and is_whole and not column.shape


def coding_of(column: Column, member: Member) -> Coding:
    """The content of a field's member. Raises ``ValueError`` if the field cannot be in it."""
    if member.key and column.kind in _WHOLE_MEMBERS:
        what = _WHOLE_MEMBERS[column.kind]
        raise ValueError(f"{column.name} is {what}, and {member.text} is a value in JSON; name a member of its own")
    codings = {_coding_of(column, member, ending) for ending in member.endings}
    if len(codings) > 1:
        raise ValueError(
            f'{column.name} = "{column.text}" may come from {member.text}, which are not read in the same way; name those alone '
            "that are"
        )
    return codings.pop()


LIST_CODINGS: Mapping[str, Coding] = MappingProxyType({"texts": "text", "images": "image"})
"""The coding of lists whose values are members of their own."""
_WHOLE_MEMBERS = {
    "encoded": "an image",
    "images": "a list of images",
    "video": "a video",
    "audio": "a sound",
    "bytes": "bytes",
}


def _coding_of(column: Column, member: Member, ending: str) -> Coding:
    if column.kind == "bytes":
        return "bytes"
    last = ending.rpartition(".")[2].lower()
    if last in PICKLE_ENDINGS:
        raise ValueError(f"{column.name} comes from .{ending}, a pickle, which batchd never reads: write .npy or .json")
    if last == "npz":
        raise ValueError(f"{column.name} comes from .{ending}, which holds several arrays: write each as .npy")
    if column.is_file or column.kind == "images":
        return "bytes" if column.kind == "video" else "image"
    is_json = column.kind == "json" or (column.kind == "texts" and "{" not in ending)
    coding: Coding
    if member.key or is_json:
        coding = "json"
    elif column.kind in ("text", "texts"):
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


@options
class WebDatasetSource(ShardOptions):
    """Shards in tar format; members with the same name but for their endings are one sample."""

    endings: ClassVar[tuple[str, ...]] = (".tar",)

    type: Literal["webdataset"] = "webdataset"
    """Kind of source."""

    root: Annotated[Path, Example("/data")]
    """The folder of the shards."""

    shards: Annotated[tuple[str, ...], Example(["train-{0000..0123}.tar"])]
    """The paths of the shards below the root, or patterns of them, such as
    ["train-{0000..0123}.tar"]. Each that is named has to be there. They are plain tar files, not
    compressed ones."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root."""

    image: tuple[str, ...] = IMAGE_ENDINGS
    """Endings of the members that are images; where a sample has several, the first of these."""

    label: str = LABEL_ENDING
    """The member of labels: the ending of one that is a whole number, or "json:KEY" for a number in
    a JSON object; "" makes all labels 0."""

    fields: Annotated[dict[str, str] | None, Example({"image": "uint8[32,32,3]", "label": "int64"})] = None
    """The fields of a sample other than one image and one label, such as { image = "image", mask =
    "image", caption = "text", box = "float32[4]", label = "int64" }: "image" is the bytes of an
    image file, "text" is UTF-8, "float32" is a number, "int32[?]" and "uint8[28,28]" are several,
    "text[<=8]" and "image[<=8]" are lists of up to eight texts or images, "json" any value in JSON,
    and "bytes" a member as it is. They are read from the members to which `batchd prepare` writes
    them: an image from NAME.jpg, NAME.png and the like, and the one called `image` from the plain
    endings; a text from NAME.txt; an array from NAME.npy; a whole number called `label` from cls;
    other numbers from the key NAME of json; JSON, and a list of texts, from NAME.json; bytes from
    NAME.bin; the images of a list from NAME.0.jpg, NAME.1.png and so on."""

    names: dict[str, str] = field(default_factory=dict)
    """The members of fields with other names, such as { mask = "seg.png", caption = "txt", width =
    "json:width" }: the ending of the member's name, from the first dot on; "jpg;png" for the first
    of two that a sample has; "json:KEY" for a value in a JSON object, also by a path of keys, such
    as "json:boxes.0.label"; "{0..7}.txt" or "{0..7}.jpg" for the texts or images of a list, as many
    as a sample has."""

    defaults: dict[str, Default] = field(default_factory=dict)
    """The value of a field whose member, or key in it, is missing: a number for each element, a
    list of all elements, [] for none if the length may differ, or a text, such as { label = -1,
    boxes = [], caption = "" }, or a list of texts. Without a default it is a bad sample."""

    path_bytes: int = 0
    """Length of the field `path`, in which a batch carries the name of each image within its shard,
    as UTF-8 and zeros; 0 leaves the field out. With `fields` it is the name that all members of a
    sample have in common. `batchd_client.text(batch["path"])` gives strings."""

    def _check(self, checks: Checks) -> None:
        self.check_shards(checks)
        with checks.at("path_bytes"):
            check_path_bytes(self.path_bytes)
        if not self.image or not all(self.image):
            checks.say("image must not be empty", "image")
        if self.label.endswith(":"):
            checks.say('label must name the key, as in "json:label"', "label")
        if self.fields is not None:
            self._check_fields(checks, self.fields)
        elif self.names or self.defaults:
            checks.say('names and defaults are of fields; say these too, as in fields = { image = "image" }')

    def _check_fields(self, checks: Checks, fields: dict[str, str]) -> None:
        if (self.image, self.label) != (IMAGE_ENDINGS, LABEL_ENDING):
            checks.say(
                'image and label are for a source without fields; write names = { image = "png", label = "cls" }'
            )
        columns = check_declared(checks, fields, with_shapes=True)
        check_names(checks, fields, self.names, defaults=self.defaults)
        if self.path_bytes and "path" in fields:
            checks.say("path stands for two fields: the one in fields, and that of path_bytes")
        for column in columns:
            key = "names" if column.name in self.names else "fields"
            with checks.at(key, column.name):
                if self.names.get(column.name) != "":
                    _members(column, member_of(column, self.names))
        check_defaults(checks, columns, self.defaults)

    @property
    def parts(self) -> list[MemberField]:
        """The fields, in their order, each with its member."""
        slots: dict[tuple[str, ...], int] = {}
        parts = []
        for column in self.columns:
            member = member_of(column, self.names)
            members = _members(column, member)
            numbers = tuple(slots.setdefault(endings, len(slots)) for endings in members)
            coding = coding_of(column, member)
            is_list = coding == LIST_CODINGS.get(column.kind)
            parts.append(MemberField(column, member, numbers[0], coding, numbers if is_list else ()))
        return parts

    @property
    def wanted(self) -> list[tuple[str, ...]]:
        """The possible endings of each member that is read, by its slot."""
        members = (_members(column, member_of(column, self.names)) for column in self.columns)
        return list(dict.fromkeys(endings for several in members for endings in several))


def _members(column: Column, member: Member) -> list[tuple[str, ...]]:
    """The endings of each member of a field: of a list several, as braces name them."""
    if coding_of(column, member) != LIST_CODINGS.get(column.kind):
        return [member.endings]
    names = list(map(names_in, member.endings))
    if column.kind == "texts":
        return [(name,) for several in names for name in several]
    if len(set(map(len, names))) > 1:
        raise ValueError(f"{member.text} names a different number of members for each ending")
    return list(zip(*names, strict=True))
