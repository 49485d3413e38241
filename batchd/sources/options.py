"""What all kinds of sources have in common. Daemon, workers and CLI; standard library only.

Workers import this, so it knows nothing of pydantic: ``__pydantic_config__`` is plain data, which
``config.tree`` reads.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from batchd.storage.location import as_location, check_written

PATH_BYTES_MAX = 4096


class SourceOptions:
    """Base of the sources: a key that is no option is refused, and the string under a field is its documentation."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    __dataclass_fields__: ClassVar[dict[str, Any]]
    """Every kind of source is a dataclass."""
    is_live: ClassVar[bool] = False
    """Do its samples come as they come? Then a number is a place in the stream, and asking for it again gives something else."""

    requires: ClassVar[tuple[str, ...]] = ()
    """Modules beyond those of batchd's own dependencies, for its scan and its reader."""
    extra: ClassVar[str] = ""
    """The extra of the distribution that installs them."""

    type: str
    """Kind of source, by which it is found."""

    @property
    def place(self) -> str:
        """Where the samples come from, for people."""
        raise NotImplementedError

    def settle_paths(self) -> None:
        """Check all paths, and make URLs of those that are: the first thing that a new source does. Raises ``ValueError``."""
        for field in fields(self):
            path = getattr(self, field.name)
            if isinstance(path, Path):
                check_written(field.name, path)
                object.__setattr__(self, field.name, as_location(field.name, path))


def check_path_bytes(count: int) -> None:
    """Raise ``ValueError`` where no field can be so long."""
    if not 0 <= count <= PATH_BYTES_MAX:
        raise ValueError(f"path_bytes must be from 0 to {PATH_BYTES_MAX}, not {count}")


def check_files(path: Path | None, root: Path | None, files: tuple[str, ...]) -> None:
    """Raise ``ValueError`` where a source is not either one file, or files below a folder."""
    if (path is None) == (not files) or (root is None) != (not files):
        raise ValueError("set either path, for one file, or root and files, for several")
    if not all(files):
        raise ValueError("files must not hold an empty path")


def place_of_files(path: Path | None, root: Path | None, files: tuple[str, ...]) -> str:
    """Where the samples of one file, or of files below a folder, come from, for people."""
    return str(path) if path else f"{root}: {' '.join(files)}"
