"""A folder or a list file becomes an index. The daemon, once at the start of each stream, before its workers get orders.

    folder/cat/1.jpg            class per sub-folder: labels follow the names of the classes, order as torchvision's
    folder/cat/more/2.jpg       ImageFolder has it (folders by path, then files by name), so that sample numbers agree
    folder/dog/3.jpg

    folder/1.jpg                flat: one class "", label 0

    list.txt: "a b/1.jpg 7"     the label is the last word of the line

    root/**/*.jpg               every path that matches, once, in the order of the bytes of the paths

Invariant: what cannot be served as the user means it is refused here with the file's name (and line), and is never left
out quietly. Names are bytes all the way: they need not be text. No list of all paths is ever made.
"""

import os
import re
import stat
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from batchd.config.sources import FolderSource, GlobSource, ListSource, Source
from batchd.errors import SourceInvalid
from batchd.sources.index import NUMBER, SourceIndex, readable
from batchd.sources.patterns import Pattern, resolve_braces

IMAGE_SUFFIXES = (b".bmp", b".gif", b".jpeg", b".jpg", b".png", b".webp")
"""Endings of the file names that a folder source takes, in any case."""
PROGRESS_EVERY = 4096
"""Samples between two reports of progress."""
PATH_BYTES_MAX = 4095
"""``PATH_MAX`` of limits.h without the closing zero."""
LINE_BYTES_MAX = PATH_BYTES_MAX + 64
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LABEL = re.compile(rb"[+-]?\d{1,19}")
_LABEL_MAX = (1 << 63) - 1

ReportProgress = Callable[[int], None]
"""Called now and then with the number of samples found so far."""


def scan_source(source: Source, progress: ReportProgress) -> SourceIndex:
    """Find all samples of a source. Raises ``SourceInvalid`` naming the folder, or the file and line, that is wrong."""
    growing = _GrowingIndex(progress, source.path_bytes)
    match source:
        case FolderSource():
            return _scan_folder(source, growing)
        case GlobSource():
            return _scan_glob(source, growing)
        case ListSource():
            return _scan_list(source, growing)


def source_problems(source: Source) -> list[str]:
    """Tell what is wrong with a source without scanning it: is it there, and is it what it should be?"""
    problems = []
    folder = source.path if isinstance(source, FolderSource) else source.root
    if isinstance(source, GlobSource):
        try:
            _patterns(source)
        except SourceInvalid as error:
            problems.append(str(error))
    if folder is not None and not folder.is_dir():
        problems.append(f"{folder} is no folder" if folder.exists() else f"there is no folder {folder}")
    elif folder is not None and not os.access(folder, os.R_OK | os.X_OK):
        problems.append(f"the folder {folder} is not readable for this user")
    if isinstance(source, ListSource):
        if not source.path.is_file():
            problems.append(f"{source.path} is no file" if source.path.exists() else f"there is no file {source.path}")
        elif not os.access(source.path, os.R_OK):
            problems.append(f"the list {source.path} is not readable for this user")
    return problems


class _GrowingIndex:
    """An index while it is built; grows as three flat arrays."""

    def __init__(self, progress: ReportProgress, path_bytes: int) -> None:
        self._path_bytes = path_bytes
        self._paths = bytearray()
        self._offsets = array("q", [0])
        self._labels = array("q")
        self._progress = progress

    def add(self, path: bytes, label: int) -> None:
        """Add one sample; ``path`` is relative to the root, or absolute."""
        if self._path_bytes and len(path) > self._path_bytes:
            raise SourceInvalid(
                f"the path {readable(path)} has {len(path)} bytes, more than path_bytes = {self._path_bytes}"
            )
        self._paths += path
        self._offsets.append(len(self._paths))
        self._labels.append(label)
        if len(self._labels) % PROGRESS_EVERY == 0:
            self._progress(len(self._labels))

    def __len__(self) -> int:
        return len(self._labels)

    def finish(self, root: Path, class_names: list[bytes]) -> SourceIndex:
        """Make the index; nothing may be added afterwards."""
        self._progress(len(self._labels))
        offsets = np.frombuffer(self._offsets, np.int64).astype(NUMBER, copy=False)
        labels = np.frombuffer(self._labels, np.int64).astype(NUMBER, copy=False)
        return SourceIndex.build(os.fsencode(root.absolute()), class_names, offsets, labels, memoryview(self._paths))


# --- folders ---------------------------------------------------------------------------------------------------------


def _scan_folder(source: FolderSource, growing: _GrowingIndex) -> SourceIndex:
    top = os.fsencode(source.path)
    folders, images = _entries(top)
    if folders and images:
        raise SourceInvalid(
            f"{source.path} holds both class folders ({readable(folders[0])}, …) and images of its own "
            f"({readable(images[0])}, …), so it is neither one class per folder nor flat; move the images into a "
            "class folder, or name the files in a list source"
        )
    for name in images:
        growing.add(name, 0)
    for label, class_name in enumerate(folders):
        found = len(growing)
        for folder, names in _walk(top, class_name, lambda folder: _entries(os.path.join(top, folder))):  # noqa: PTH118  bytes
            for name in names:
                growing.add(_below(folder, name), label)
        if len(growing) == found:
            raise SourceInvalid(
                f"the class folder {readable(os.path.join(top, class_name))} holds no image ({_suffixes()}); "  # noqa: PTH118
                "fill it or remove it"
            )
    if not len(growing):
        raise SourceInvalid(f"{source.path} holds no image ({_suffixes()}) and no class folder")
    return growing.finish(source.path, folders or [b""])


_Look = Callable[[bytes], tuple[list[bytes], list[bytes]]]
"""Which folders of a folder to go into, and which of its files to take, in order."""


def _walk(top: bytes, start: bytes, look: _Look) -> list[tuple[bytes, list[bytes]]]:
    """Every folder from ``start`` down with the names of its files, folders in the order of their paths.

    Links are followed, as people build subsets of them; one that leads back to a folder around it is refused.
    """
    found = []
    waiting: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(start, frozenset())]
    while waiting:
        folder, around = waiting.pop()
        full = os.path.join(top, folder)  # noqa: PTH118  bytes
        try:
            status = os.stat(full)  # noqa: PTH116  bytes
        except OSError as error:
            raise _unreadable(full, error) from None
        identity = (status.st_dev, status.st_ino)
        if identity in around:
            raise SourceInvalid(f"{readable(full)} is a link to a folder that it lies in; remove it")
        folders, files = look(folder)
        found.append((folder, files))
        waiting += [(_below(folder, name), around | {identity}) for name in folders]
    return sorted(found)


def _below(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name if folder else name


def _is_image(name: bytes) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _entries(
    folder: bytes, *, is_wanted: Callable[[bytes], bool] = _is_image, hidden: bool = False
) -> tuple[list[bytes], list[bytes]]:
    """The names of the folders and of the wanted files in a folder, sorted, without hidden ones where they are not asked for.

    Whatever is no folder and ends like an image is an image here; the reader looks at what it really is.
    """
    folders, files = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(b".") and not hidden:
                    continue
                is_file = is_wanted(entry.name)
                if _is_folder(entry, or_else=is_file):
                    folders.append(entry.name)
                elif is_file:
                    files.append(entry.name)
    except OSError as error:
        raise _unreadable(folder, error) from None
    return sorted(folders), sorted(files)


def _is_folder(entry: os.DirEntry[bytes], *, or_else: bool) -> bool:
    """Tell a folder; a link that leads nowhere is none if ``or_else`` it is taken for an image, and is refused otherwise."""
    try:
        return entry.is_dir()
    except OSError as error:
        if or_else:
            return False
        raise SourceInvalid(f"{readable(entry.path)} cannot be read: {error.strerror}") from None


def _suffixes() -> str:
    return b" ".join(IMAGE_SUFFIXES).decode()


def _unreadable(path: bytes, error: OSError) -> SourceInvalid:
    return SourceInvalid(f"{readable(path)} cannot be read: {error.strerror}")


# --- patterns --------------------------------------------------------------------------------------------------------


def _scan_glob(source: GlobSource, growing: _GrowingIndex) -> SourceIndex:
    patterns, top = _patterns(source), os.fsencode(source.root)

    def look(folder: bytes) -> tuple[list[bytes], list[bytes]]:
        around = folder.split(b"/") if folder else []
        folders, files = _entries(os.path.join(top, folder), is_wanted=lambda _name: True, hidden=True)  # noqa: PTH118
        return (
            [name for name in folders if any(one.may_match_below([*around, name]) for one in patterns)],
            [name for name in files if any(one.matches([*around, name]) for one in patterns)],
        )

    found = [(folder, names) for folder, names in _walk(top, b"", look) if names]
    if not found:
        raise SourceInvalid(f"no file below {source.root} matches {', '.join(map(repr, source.patterns))}")
    for label, (folder, names) in enumerate(found):
        for name in names:
            growing.add(_below(folder, name), label if source.classes == "folder" else 0)
    return growing.finish(source.root, [folder for folder, _ in found] if source.classes == "folder" else [b""])


def _patterns(source: GlobSource) -> list[Pattern]:
    try:
        return [Pattern(plain) for pattern in source.patterns for plain in resolve_braces(pattern)]
    except ValueError as error:
        raise SourceInvalid(f"patterns: {error}") from None


# --- lists -----------------------------------------------------------------------------------------------------------


def _scan_list(source: ListSource, growing: _GrowingIndex) -> SourceIndex:
    root = source.path.absolute().parent if source.root is None else source.root
    for number, line in _lines(source.path):
        try:
            path, label = _read_line(line, allow_outside_root=source.allow_outside_root)
        except ValueError as error:
            shown = readable(line[:80]) + ("…" if len(line) > 80 else "")  # noqa: PLR2004  a line of a terminal
            raise SourceInvalid(f"{source.path}:{number}: {error}: {shown}") from None
        growing.add(path, label)
    if not len(growing):
        raise SourceInvalid(f"the list {source.path} names no sample; each line is a path, a space and a label")
    return growing.finish(root, [])


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that name samples, with their numbers from 1 on."""
    try:
        with open(file, "rb", opener=_open_regular) as stream:
            number = 0
            while line := stream.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise SourceInvalid(f"{file}:{number}: a line longer than {LINE_BYTES_MAX} bytes; is this a list?")
                stripped = line.removeprefix(_BYTE_ORDER_MARK if number == 1 else b"").strip()
                if stripped and not stripped.startswith(b"#"):
                    yield number, stripped
    except OSError as error:
        raise _unreadable(os.fsencode(file), error) from None


def _open_regular(path: str, flags: int) -> int:
    """Open without waiting for the other end of a FIFO, and refuse what is no file."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SourceInvalid(f"the list {path} is no regular file")
    return descriptor


def _read_line(line: bytes, *, allow_outside_root: bool) -> tuple[bytes, int]:
    """Split a line into path and label. Raises ``ValueError`` saying what is wrong with it."""
    path, *label = line.rsplit(maxsplit=1)
    if len(path) > PATH_BYTES_MAX:
        raise ValueError(f"the path is longer than {PATH_BYTES_MAX} bytes")
    if b"\0" in line:
        raise ValueError("a character NUL in the line; a list is plain text, not UTF-16")
    if not label or not _LABEL.fullmatch(label[0]):
        raise ValueError("not a path, a space and a whole number")
    if not -_LABEL_MAX <= int(label[0]) <= _LABEL_MAX:
        raise ValueError("a label that does not fit into 64 bits")
    if not allow_outside_root and (path.startswith(b"/") or b".." in path.split(b"/")):
        raise ValueError("a path that may lead out of the root; set allow_outside_root = true if you mean it")
    return path, int(label[0])
