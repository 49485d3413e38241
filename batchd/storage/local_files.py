"""Files and folders of this machine, as scans and checks see them; ``RemoteFiles`` does the same for servers. Daemon and CLI."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from batchd.errors import SourceInvalid
from batchd.storage.index import readable
from batchd.storage.paths import check_bound, open_regular, status_of, unreachable, unreadable
from batchd.storage.values import Witness, version_of, witness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from batchd.storage.survey import Survey


class WantedNames(NamedTuple):
    """Which names of a folder are wanted: all folders, and files that ``is_wanted``; with ``hidden``, also those with a dot.

    ``bound``: a real path that no link to a wanted file may lead out of; None for anywhere.
    """

    is_wanted: Callable[[bytes], bool]
    bound: bytes | None = None
    hidden: bool = False


class FoundNames(NamedTuple):
    """The names of folders and files in a folder, sorted."""

    folders: list[bytes]
    files: list[bytes]


class LocalFiles:
    """The interface to files; what a scan opens or lists, its survey has seen."""

    def file_problems(self, file: Path, what: str) -> list[str]:
        """What is wrong with a file, which is ``what`` for people ("the list"); empty where it can be read."""
        if (problem := unreachable(file)) is not None:
            return [problem]
        if not file.is_file():
            return [f"{file} is no file" if file.exists() else f"there is no file {file}"]
        if not os.access(file, os.R_OK):
            return [f"{what} {file} is not readable for this user"]
        return []

    def folder_problems(self, folder: Path, *, is_listed: bool = False) -> list[str]:
        """What is wrong with a folder of samples; empty where it can be scanned. ``is_listed``: a scan lists it."""
        del is_listed  # any folder here can be listed
        if (problem := unreachable(folder)) is not None:
            return [problem]
        if not folder.is_dir():
            return [f"{folder} is no folder" if folder.exists() else f"there is no folder {folder}"]
        if not os.access(folder, os.R_OK | os.X_OK):
            return [f"the folder {folder} is not readable for this user"]
        return []

    def known_size(self, file: Path) -> int | None:
        """Bytes of a file; None where asking for it is a request. Raises ``SourceInvalid``."""
        return status_of(os.fsencode(file)).st_size

    @contextmanager
    def open(self, file: Path, survey: Survey) -> Iterator[BinaryIO]:
        """A file, to be read and sought in. Raises ``SourceInvalid`` where it cannot be read."""
        path = os.fsencode(file)
        try:
            with open(file, "rb", opener=open_regular) as stream:
                status = os.fstat(stream.fileno())
                survey.reads(file, witness(path, status), version_of(status))
                yield stream
        except OSError as error:
            raise unreadable(path, error) from None

    def look_at(self, folder: bytes, survey: Survey) -> tuple[int, int] | None:
        """What tells a folder from others, where links may lead to it: device and inode. Raises ``SourceInvalid``."""
        status = status_of(folder)
        survey.saw(folder, status)
        return status.st_dev, status.st_ino

    def names_in(self, folder: bytes, wanted: WantedNames, survey: Survey) -> FoundNames:
        """The names in a folder. Raises ``SourceInvalid``, also for a wanted file that is a link out of the bound.

        Whatever is no folder and has a wanted name is a file here; the reader looks at what it
        really is.
        """
        folders, files = [], []
        try:
            with os.scandir(folder) as found:
                for entry in found:
                    survey.looked()
                    if entry.name.startswith(b".") and not wanted.hidden:
                        continue
                    is_file = wanted.is_wanted(entry.name)
                    if _is_folder(entry, or_else=is_file or wanted.hidden):
                        folders.append(entry.name)
                    elif is_file:
                        if entry.is_symlink():
                            check_bound(entry.path, wanted.bound)
                        files.append(entry.name)
        except OSError as error:
            raise unreadable(folder, error) from None
        return FoundNames(sorted(folders), sorted(files))

    def first_changed(self, witnesses: Sequence[Witness]) -> str:
        """The first of files and folders that is not what it was; "" where all are the same. Raises ``OSError``."""
        changed = (one.path for one in witnesses if witness(os.fsencode(one.path), os.stat(one.path)) != one)  # noqa: PTH116
        return next(changed, "")


def _is_folder(entry: os.DirEntry[bytes], *, or_else: bool) -> bool:
    """Tell a folder; a link that leads nowhere is none if ``or_else`` it is taken for a file, and is refused otherwise."""
    try:
        return entry.is_dir()
    except OSError as error:
        if or_else:
            return False
        raise SourceInvalid(f"{readable(entry.path)} cannot be read: {error.strerror}") from None
