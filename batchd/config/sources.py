"""Where samples come from: one frozen dataclass for each kind of source. Daemon, workers and CLI; standard library only.

Workers import this module, so it knows nothing of pydantic; ``__pydantic_config__`` is plain data that ``config.tree`` reads.
The string under a field is its documentation everywhere: in error messages, ``batchd config``, the JSON Schema and the manual.

Invariant: ``source_from_plain(source_to_plain(source)) == source``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

PATH_BYTES_MAX = 4096
STRICT: dict[str, object] = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource:
    """A folder of images with one sub-folder for each class, or a flat folder of images without classes."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    type: Literal["folder"] = "folder"
    """Kind of source."""

    path: Path
    """The folder. Each sub-folder is a class; classes are numbered in the order of their names. Hidden files are skipped."""

    path_bytes: int = 0
    """Length of the field `path`, in which a batch carries the path of each sample, relative to the folder, as UTF-8 and zeros;
    0 leaves the field out. `batchd_client.text(batch["path"])` gives strings."""

    def __post_init__(self) -> None:
        _check_path("path", self.path)
        _check_path_bytes(self.path_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSource:
    """A text file with one sample on each line: the file's path, white space, and its label, a whole number."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    type: Literal["list"] = "list"
    """Kind of source."""

    path: Path
    """The text file of `path label` lines. Paths may hold spaces; blank lines and lines that start with # are skipped."""

    root: Path | None = None
    """The folder that the paths in the list are relative to; when not set, the folder where the list lies."""

    allow_outside_root: bool = False
    """Whether the list may name absolute paths and paths with `..` in them."""

    path_bytes: int = 0
    """Length of the field `path`, in which a batch carries the path of each sample, as it stands in the list, as UTF-8 and
    zeros; 0 leaves the field out. `batchd_client.text(batch["path"])` gives strings."""

    def __post_init__(self) -> None:
        _check_path("path", self.path)
        _check_path_bytes(self.path_bytes)
        if self.root is not None:
            _check_path("root", self.root)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobSource:
    """The files below a folder whose paths match patterns, in the order of their paths, each once."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    type: Literal["glob"] = "glob"
    """Kind of source."""

    root: Path
    """The folder where the search begins. Links to folders are followed."""

    patterns: tuple[str, ...]
    """What the paths below the root have to look like, such as ["train/**/*.{jpg,png}", "more/*.jpg"]: `*` and `?` match within a
    name, `[abc]` one of some characters, `**` any folders, `{a,b}` one or the other."""

    classes: Literal["none", "folder"] = "none"
    """Where labels come from: "folder" numbers the names of the folders that files lie in, in their order; "none" makes all 0."""

    path_bytes: int = 0
    """Length of the field `path`, in which a batch carries the path of each sample, relative to the root, as UTF-8 and zeros;
    0 leaves the field out. `batchd_client.text(batch["path"])` gives strings."""

    def __post_init__(self) -> None:
        _check_path("root", self.root)
        _check_path_bytes(self.path_bytes)
        if not self.patterns:
            raise ValueError("patterns must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebDatasetSource:
    """Shards in tar format, in which members of the same name but for their endings are one sample."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    type: Literal["webdataset"] = "webdataset"
    """Kind of source."""

    root: Path
    """The folder of the shards."""

    shards: tuple[str, ...]
    """The paths of the shards below the root, or patterns of them, such as ["train-{0000..0123}.tar"]. Each that is named has to
    be there. They are plain tar files, not compressed ones."""

    image: tuple[str, ...] = ("jpg", "jpeg", "png", "webp", "gif", "bmp")
    """Endings of the members that are images; where a sample has several, the first of these."""

    label: str = "cls"
    """Where labels come from: the ending of a member that is a whole number, or "json:KEY" for a number in a JSON object; ""
    makes all labels 0."""

    path_bytes: int = 0
    """Length of the field `path`, in which a batch carries the name of each image within its shard, as UTF-8 and zeros; 0 leaves
    the field out. `batchd_client.text(batch["path"])` gives strings."""

    def __post_init__(self) -> None:
        _check_path("root", self.root)
        _check_path_bytes(self.path_bytes)
        for name, given in (("shards", self.shards), ("image", self.image)):
            if not given or not all(given):
                raise ValueError(f"{name} must not be empty")
        if self.label.endswith(":"):
            raise ValueError('label must name the key, as in "json:label"')


Source = FolderSource | ListSource | GlobSource | WebDatasetSource
SOURCE_KINDS: dict[str, type[Source]] = {
    "folder": FolderSource,
    "list": ListSource,
    "glob": GlobSource,
    "webdataset": WebDatasetSource,
}


def place_of(source: Source) -> str:
    """Where the samples come from, for people."""
    match source:
        case GlobSource(root=root, patterns=patterns) | WebDatasetSource(root=root, shards=patterns):
            return f"{root}: {' '.join(patterns)}"
        case FolderSource(path=path) | ListSource(path=path):
            return str(path)


def source_to_plain(source: Source) -> dict[str, object]:
    """The source as strings, numbers, booleans, lists and None, for a message."""
    return {field.name: _to_plain(getattr(source, field.name)) for field in fields(source)}


def source_from_plain(plain: Mapping[str, object]) -> Source:
    """Read what ``source_to_plain`` wrote: every option, nothing else. Raises ``ValueError`` or ``TypeError``."""
    kind = SOURCE_KINDS.get(str(plain.get("type")))
    if kind is None:
        raise ValueError(f"the source {plain.get('type')!r} is not one of {', '.join(SOURCE_KINDS)}")
    hints = get_type_hints(kind, include_extras=True)
    names = {field.name for field in fields(kind)}
    if plain.keys() != names:
        raise ValueError(f"the source {plain['type']!r} has the options {sorted(names)}, not {sorted(plain)}")
    return kind(**{name: _from_plain(hints[name], value) for name, value in plain.items()})


def _to_plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _to_plain(item) for name, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def _from_plain(hint: object, value: object) -> Any:
    """A value of the type that ``hint`` says. Raises ``TypeError`` where it is none."""
    choices = get_args(hint)
    if get_origin(hint) is Literal:
        good = value in choices
    elif get_origin(hint) in (Union, UnionType):
        return None if value is None else _from_plain(choices[0], value)
    elif get_origin(hint) is tuple:
        if isinstance(value, list):
            return tuple(_from_plain(choices[0], item) for item in value)
        good = False
    elif hint is Path:
        if isinstance(value, str):
            return Path(value)
        good = False
    else:
        good = type(value) is hint
    if not good:
        raise TypeError(f"{value!r} is not {hint}")
    return value


def _check_path_bytes(count: int) -> None:
    if not 0 <= count <= PATH_BYTES_MAX:
        raise ValueError(f"path_bytes must be from 0 to {PATH_BYTES_MAX}, not {count}")


def _check_path(name: str, path: Path) -> None:
    """An empty path would mean the current directory, which nobody means; the kernel takes no NUL."""
    if not path.parts:
        raise ValueError(f"{name} must not be empty")
    if "\0" in str(path):
        raise ValueError(f"{name} must not hold the character NUL")
