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
from collections.abc import Iterator
from pathlib import Path

from batchd.config.sources import FolderSource, GlobSource, ListSource, Source, WebDatasetSource
from batchd.errors import SourceInvalid
from batchd.sources.growing import GrowingIndex, ReportProgress
from batchd.sources.index import SourceIndex, readable
from batchd.sources.walk import IMAGE_SUFFIXES, below, entries, matching, open_regular, read_patterns, unreadable, walk
from batchd.sources.webdataset import scan_webdataset

PATH_BYTES_MAX = 4095
"""``PATH_MAX`` of limits.h without the closing zero."""
LINE_BYTES_MAX = PATH_BYTES_MAX + 64
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LABEL = re.compile(rb"[+-]?\d{1,19}")
_LABEL_MAX = (1 << 63) - 1


def scan_source(source: Source, progress: ReportProgress) -> SourceIndex:
    """Find all samples of a source. Raises ``SourceInvalid`` naming the folder, or the file and line, that is wrong."""
    growing = GrowingIndex(progress, source.path_bytes)
    match source:
        case FolderSource():
            return _scan_folder(source, growing)
        case GlobSource():
            return _scan_glob(source, growing)
        case ListSource():
            return _scan_list(source, growing)
        case WebDatasetSource():
            return scan_webdataset(source, growing)


def source_problems(source: Source) -> list[str]:
    """Tell what is wrong with a source without scanning it: is it there, and is it what it should be?"""
    problems = []
    folder = source.path if isinstance(source, FolderSource) else source.root
    if isinstance(source, GlobSource | WebDatasetSource):
        try:
            if isinstance(source, GlobSource):
                read_patterns(source.patterns, "patterns")
            else:
                read_patterns(source.shards, "shards")
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


# --- folders ---------------------------------------------------------------------------------------------------------


def _scan_folder(source: FolderSource, growing: GrowingIndex) -> SourceIndex:
    top = os.fsencode(source.path)
    folders, images = entries(top)
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
        for folder, names in walk(top, class_name, lambda folder: entries(os.path.join(top, folder))):  # noqa: PTH118  bytes
            for name in names:
                growing.add(below(folder, name), label)
        if len(growing) == found:
            raise SourceInvalid(
                f"the class folder {readable(os.path.join(top, class_name))} holds no image ({_suffixes()}); "  # noqa: PTH118
                "fill it or remove it"
            )
    if not len(growing):
        raise SourceInvalid(f"{source.path} holds no image ({_suffixes()}) and no class folder")
    return growing.finish(source.path, folders or [b""])


def _suffixes() -> str:
    return b" ".join(IMAGE_SUFFIXES).decode()


# --- patterns --------------------------------------------------------------------------------------------------------


def _scan_glob(source: GlobSource, growing: GrowingIndex) -> SourceIndex:
    found = matching(source.root, source.patterns, "patterns")
    if not found:
        raise SourceInvalid(f"no file below {source.root} matches {', '.join(map(repr, source.patterns))}")
    for label, (folder, names) in enumerate(found):
        for name in names:
            growing.add(below(folder, name), label if source.classes == "folder" else 0)
    return growing.finish(source.root, [folder for folder, _ in found] if source.classes == "folder" else [b""])


# --- lists -----------------------------------------------------------------------------------------------------------


def _scan_list(source: ListSource, growing: GrowingIndex) -> SourceIndex:
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
        with open(file, "rb", opener=open_regular) as stream:
            number = 0
            while line := stream.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise SourceInvalid(f"{file}:{number}: a line longer than {LINE_BYTES_MAX} bytes; is this a list?")
                stripped = line.removeprefix(_BYTE_ORDER_MARK if number == 1 else b"").strip()
                if stripped and not stripped.startswith(b"#"):
                    yield number, stripped
    except OSError as error:
        raise unreadable(os.fsencode(file), error) from None


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
