"""Where samples come from: one frozen dataclass for each kind of source. Daemon, workers and CLI; standard library only.

Workers import this module, so it knows nothing of pydantic; ``__pydantic_config__`` is plain data that ``config.tree`` reads.
The string under a field is its documentation everywhere: in error messages, ``batchd config``, the JSON Schema and the manual.

Invariant: ``source_from_plain(source_to_plain(source)) == source``.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

STRICT: dict[str, object] = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource:
    """A folder of images with one sub-folder for each class, or a flat folder of images without classes."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    type: Literal["folder"] = "folder"
    """Kind of source."""

    path: Path
    """The folder. Each sub-folder is a class; classes are numbered in the order of their names. Hidden files are skipped."""

    def __post_init__(self) -> None:
        _check_path("path", self.path)


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

    def __post_init__(self) -> None:
        _check_path("path", self.path)
        if self.root is not None:
            _check_path("root", self.root)


Source = FolderSource | ListSource
SOURCE_KINDS: dict[str, type[Source]] = {"folder": FolderSource, "list": ListSource}


def source_to_plain(source: Source) -> dict[str, object]:
    """The source as strings, booleans and None, for a message."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(source).items()}


def source_from_plain(plain: dict[str, object]) -> Source:
    """Read what ``source_to_plain`` wrote. Raises ``ValueError`` or ``TypeError`` for anything else."""
    match plain:
        case {"type": "folder", "path": str(path), **rest} if not rest:
            return FolderSource(path=Path(path))
        case {
            "type": "list",
            "path": str(path),
            "root": str() | None as root,
            "allow_outside_root": bool(allow_outside_root),
            **rest,
        } if not rest:
            return ListSource(
                path=Path(path),
                root=None if root is None else Path(root),
                allow_outside_root=allow_outside_root,
            )
        case _:
            raise ValueError(f"not a source as source_to_plain writes it: {plain!r}")


def _check_path(name: str, path: Path) -> None:
    """An empty path would mean the current directory, which nobody means; the kernel takes no NUL."""
    if not path.parts:
        raise ValueError(f"{name} must not be empty")
    if "\0" in str(path):
        raise ValueError(f"{name} must not hold the character NUL")
