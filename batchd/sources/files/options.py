"""Sources whose samples are files, or lie in tar files. Daemon, workers and CLI; standard library only.

The string under a field is its documentation everywhere: in error messages, ``batchd config``, the
JSON Schema and the manual.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from batchd.samples.checks import Checks
from batchd.samples.columns import Column, Default, check_declared, check_defaults, check_names, declared_columns
from batchd.sources.options import SourceOptions, check_path_bytes
from batchd.sources.webdataset.options import IMAGE_ENDINGS, LABEL_ENDING, coding_of, member_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource(SourceOptions):
    """A folder of images with one sub-folder for each class, or a flat folder of images without classes."""

    type: Literal["folder"] = "folder"
    """Kind of source."""

    path: Path
    """The folder. Each sub-folder is a class; classes are numbered in the order of their names. Hidden files are skipped."""

    allow_outside_root: bool = False
    """Whether links may lead out of the folder."""

    path_bytes: int = 0
    """Length of the field `path`, in which a batch carries the path of each sample, relative to the folder, as UTF-8 and zeros;
    0 leaves the field out. `batchd_client.text(batch["path"])` gives strings."""

    def __post_init__(self) -> None:
        self.settle_paths()
        check_path_bytes(self.path_bytes)

    @property
    def place(self) -> str:
        """Where the samples come from, for people."""
        return str(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSource(SourceOptions):
    """A text file with one sample on each line: the file's path, white space, and its label, a whole number."""

    type: Literal["list"] = "list"
    """Kind of source."""

    path: Path
    """The text file of `path label` lines. Paths may hold spaces; blank lines and lines that start with # are skipped."""

    root: Path | None = None
    """The folder that the paths in the list are relative to; when not set, the folder of the
    list."""

    allow_outside_root: bool = False
    """Whether files may lie outside of the root: absolute paths, paths with `..` in them, and links that lead out of it."""

    path_bytes: int = 0
    """Length of the field `path`, in which a batch carries the path of each sample, as in the list,
    as UTF-8 and zeros; 0 leaves the field out. `batchd_client.text(batch["path"])` gives
    strings."""

    def __post_init__(self) -> None:
        self.settle_paths()
        check_path_bytes(self.path_bytes)

    @property
    def place(self) -> str:
        """Where the samples come from, for people."""
        return str(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobSource(SourceOptions):
    """The files below a folder whose paths match patterns, in the order of their paths, each once."""

    type: Literal["glob"] = "glob"
    """Kind of source."""

    root: Path
    """The folder where the search begins. Links to folders are followed."""

    patterns: tuple[str, ...]
    """Patterns of the paths below the root, such as ["train/**/*.{jpg,png}", "more/*.jpg"]: `*` and
    `?` match within a name, `[abc]` one of some characters, `**` any folders, `{a,b}` one or the
    other."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root."""

    classes: Literal["none", "folder"] = "none"
    """Where labels come from: "folder" numbers the names of the folders that files lie in, in their order; "none" makes all 0."""

    path_bytes: int = 0
    """Length of the field `path`, in which a batch carries the path of each sample, relative to the root, as UTF-8 and zeros;
    0 leaves the field out. `batchd_client.text(batch["path"])` gives strings."""

    def __post_init__(self) -> None:
        self.settle_paths()
        check_path_bytes(self.path_bytes)
        if not self.patterns:
            raise ValueError("patterns must not be empty")

    @property
    def place(self) -> str:
        """Where the samples come from, for people."""
        return f"{self.root}: {' '.join(self.patterns)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebDatasetSource(SourceOptions):
    """Shards in tar format, in which members of the same name but for their endings are one sample."""

    type: Literal["webdataset"] = "webdataset"
    """Kind of source."""

    root: Path
    """The folder of the shards."""

    shards: tuple[str, ...]
    """The paths of the shards below the root, or patterns of them, such as ["train-{0000..0123}.tar"]. Each that is named has to
    be there. They are plain tar files, not compressed ones."""

    allow_outside_root: bool = False
    """Whether links may lead out of the root."""

    image: tuple[str, ...] = IMAGE_ENDINGS
    """Endings of the members that are images; where a sample has several, the first of these."""

    label: str = LABEL_ENDING
    """Where labels come from: the ending of a member that is a whole number, or "json:KEY" for a number in a JSON object; ""
    makes all labels 0."""

    fields: dict[str, str] | None = None
    """The fields of a sample other than one image and one label, such as { image = "image", mask =
    "image", caption = "text", box = "float32[4]", label = "int64" }: "image" is the bytes of an
    image file, "text" is UTF-8, "float32" is a number, "int32[?]" and "uint8[28,28]" are several.
    They are read from the members to which `batchd prepare` writes them: an image from NAME.jpg,
    NAME.png and the like, and the one called `image` from the plain endings; a text from NAME.txt;
    an array from NAME.npy; a whole number called `label` from cls; other numbers from the key NAME
    of json."""

    names: dict[str, str] = field(default_factory=dict)
    """The members of fields with other names, such as { mask = "seg.png", caption = "txt", width =
    "json:width" }: the ending of the member's name, from the first dot on; "jpg;png" for the first of two
    that a sample has; "json:KEY" for a value in a JSON object."""

    defaults: dict[str, Default] = field(default_factory=dict)
    """The value of a field whose member, or key in it, is missing: a number for each element, a
    list of all elements, [] for none if the length may differ, or a text, such as { label = -1,
    boxes = [], caption = "" }. Without a default it is a bad sample."""

    path_bytes: int = 0
    """Length of the field `path`, in which a batch carries the name of each image within its shard, as UTF-8 and zeros; 0 leaves
    the field out. With `fields` it is the name that all members of a sample have in common. `batchd_client.text(batch["path"])`
    gives strings."""

    def __post_init__(self) -> None:
        checks = Checks()
        with checks.at():
            self.settle_paths()
        with checks.at("path_bytes"):
            check_path_bytes(self.path_bytes)
        for name, given in (("shards", self.shards), ("image", self.image)):
            if not given or not all(given):
                checks.say(f"{name} must not be empty", name)
        if self.label.endswith(":"):
            checks.say('label must name the key, as in "json:label"', "label")
        if self.fields is not None:
            self._check_fields(checks, self.fields)
        elif self.names or self.defaults:
            checks.say('names and defaults are of fields; say these too, as in fields = { image = "image" }')
        checks.done()

    def _check_fields(self, checks: Checks, fields: dict[str, str]) -> None:
        """Tell ``checks`` of the fields that cannot be read from a sample."""
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
                    coding_of(column, member_of(column, self.names))
        check_defaults(checks, columns, self.defaults)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The fields, in their order."""
        return declared_columns(self.fields or {}, with_shapes=True)

    @property
    def place(self) -> str:
        """Where the samples come from, for people."""
        return f"{self.root}: {' '.join(self.shards)}"
