"""Folders of images, lists and patterns become an index. Daemon.

    folder/cat/1.jpg            a class per sub-folder: labels follow the names of the classes; the
    folder/cat/more/2.jpg       order is that of torchvision's ImageFolder, folders by path and then
    folder/dog/3.jpg            files by name, so sample numbers agree

    folder/emu                  without an image: a class, too, so that it shifts no label

    folder/1.jpg                flat: one class "", label 0

    list.txt: "a b/1.jpg 7"     the label is the last word of the line

    root/**/*.jpg               every path that matches, once: folders by path, then files by name

Invariant: nothing is left out silently. What cannot be served as the user means it is refused with
the name of the file, or the list and the line.
"""

import os
import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.location import as_location
from batchd.data.sources.csv.values import BYTE_ORDER_MARK
from batchd.data.sources.files.index import GrowingIndex, files_neighbours, find_files, image_columns
from batchd.data.sources.files.options import FolderSource, GlobSource, ListSource
from batchd.data.sources.files.walk import below, matching, shards_problems, walk
from batchd.data.sources.interface import BuiltInKind
from batchd.data.storage.access import Storage, WantedNames
from batchd.data.storage.index import SourceIndex, readable
from batchd.data.storage.paths import bound_of, check_inside
from batchd.data.storage.patterns import NameRule
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid

PATH_BYTES_MAX = 4095
"""``PATH_MAX`` of limits.h without the closing zero."""
LINE_BYTES_MAX = PATH_BYTES_MAX + 64
_CLASSES_SHOWN = 8
_LABEL = re.compile(rb"[+-]?\d{1,19}")
_LABEL_MAX = (1 << 63) - 1
BLOCK_BYTES = 256 << 10
"""Of a list. It fits into the cache of a core, with the arrays that are made of it."""
_UNUSUAL = (b"\0", b"\t", b"\x0b", b"\x0c", b"..")
"""Other white space, paths that may lead out, and what is no text."""
_DIGITS_MAX = 18
_LINE_FEED, _CARRIAGE_RETURN, _SPACE, _HASH, _SLASH, _ZERO = b"\n\r #/0"


def _scan_folder(source: FolderSource, survey: Survey) -> SourceIndex:
    growing = GrowingIndex(survey.progress, source.path_bytes)
    top = os.fsencode(source.path)
    survey.storage.at(top).look_at(top, survey)
    bound = bound_of(source.path, allow_outside_root=source.allow_outside_root)
    files_only = WantedNames(NameRule(source.file_endings), bound)
    folders, images = survey.names_in(top, files_only)
    if folders and images:
        raise SourceInvalid(
            f"{source.path} holds both class folders ({readable(folders[0])}, …) and {source.media}s of its own "
            f"({readable(images[0])}, …), so it is neither one class per folder nor flat; move the images into a "
            "class folder, or name the files in a list source"
        )

    def list_folder(folder: bytes) -> tuple[list[bytes], list[bytes]]:
        return survey.names_in(os.path.join(top, folder), files_only)  # noqa: PTH118  bytes

    for name in images:
        growing.add(name, 0)
    class_names = _class_names(source, folders, survey)
    labels = labels_of(class_names, folders, str(source.path), survey)
    for class_name, label in zip(folders, labels, strict=True):
        found = len(growing)
        for folder, names in walk(top, class_name, list_folder, survey, bound):
            for name in names:
                growing.add(below(folder, name), label)
        if len(growing) == found:
            where = readable(os.path.join(top, class_name))  # noqa: PTH118  bytes
            survey.note("class folders without an image, which keep their numbers", where)
    if not len(growing):
        what = f"no {source.media} in its class folders" if folders else f"no {source.media} and no class folder"
        raise SourceInvalid(f"{source.path} holds {what} ({' '.join(source.file_endings)})")
    return growing.finish(source.path, class_names or [b""], survey)


def _class_names(source: FolderSource, folders: list[bytes], survey: Survey) -> list[bytes]:
    """The names of the classes, by their labels."""
    if not source.classes:
        return folders
    if isinstance(source.classes, tuple):
        return list(map(os.fsencode, source.classes))
    other = os.fsencode(source.classes)  # the folder of another stream
    survey.storage.at(other).look_at(other, survey)
    bound = bound_of(as_location("classes", Path(source.classes)), allow_outside_root=source.allow_outside_root)
    return survey.names_in(other, WantedNames(NameRule(source.file_endings), bound)).folders


def labels_of(names: Sequence[bytes], folders: Sequence[bytes], place: str, survey: Survey) -> list[int]:
    """The labels of class folders. Raises ``SourceInvalid`` for one that is none of the classes."""
    labels = {name: label for label, name in enumerate(names)}
    strange = [readable(folder) for folder in folders if folder not in labels]
    if strange:
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        known = ", ".join(map(readable, names[:_CLASSES_SHOWN])) + (", …" if len(names) > _CLASSES_SHOWN else "")
        raise SourceInvalid(
            f"{place} has the class folder {strange[0]!r}{more}, which is none of the classes {known}: add it behind them, "
            "where it changes no label"
        )
    for name in sorted(labels.keys() - set(folders)):
        survey.note("classes without a folder, which keep their numbers", f"{readable(name)} in {place}")
    return [labels[folder] for folder in folders]


def scan_list(source: ListSource, survey: Survey) -> SourceIndex:
    """Index the paths and labels of a list; raises ``SourceInvalid`` with the line at fault."""
    growing = GrowingIndex(survey.progress, source.path_bytes)
    root = source.path.absolute().parent if source.root is None else source.root
    lines_before = 0
    with survey.open(source.path) as stream:
        for block in _blocks_of(stream):
            plain = plain_lines(block, allow_outside_root=source.allow_outside_root)
            if plain is None:
                _add_lines(growing, source, block, lines_before)
            else:
                growing.add_all(*plain)
            lines_before += block.count(b"\n")
    if not len(growing):
        raise SourceInvalid(f"the list {source.path} names no sample; each line is a path, a space and a label")
    return growing.finish(root, [], survey)


def _add_lines(growing: GrowingIndex, source: ListSource, block: bytes, lines_before: int) -> None:
    for number, line in _samples_in(source.path, BytesIO(block), lines_before):
        try:
            path, label = read_line(line, allow_outside_root=source.allow_outside_root)
        except ValueError as error:
            shown = readable(line[:80]) + ("…" if len(line) > 80 else "")  # noqa: PLR2004  a line of a terminal
            raise SourceInvalid(f"{source.path}:{number}: {error}: {shown}") from None
        growing.add(path, label)


def _blocks_of(stream: BinaryIO) -> Iterator[bytes]:
    """The file in blocks of whole lines; a line that is too long may be in several."""
    begun = b""
    while data := stream.read(BLOCK_BYTES):
        lines, end, rest = (begun + data).rpartition(b"\n")
        begun = rest if len(rest) <= LINE_BYTES_MAX else b""
        yield lines + end if begun is rest else lines + end + rest
    if begun:
        yield begun


def plain_lines(
    block: bytes, *, allow_outside_root: bool
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]] | None:
    """The paths of lines, one right after the other, their lengths, and the labels.

    None if a line is anything but a path, a space and up to 18 digits: ``read_line`` reads those.
    """
    if not block.endswith(b"\n") or block.startswith(BYTE_ORDER_MARK) or any(text in block for text in _UNUSUAL):
        return None
    if block.count(b"\r") != block.count(b"\r\n"):
        return None
    characters = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(characters == _LINE_FEED)
    starts = np.append(0, ends[:-1] + 1)
    ends = ends - (characters[ends - 1] == _CARRIAGE_RETURN)
    spaces = np.append(-1, np.flatnonzero(characters == _SPACE))
    middles = spaces[np.searchsorted(spaces, ends) - 1]
    digits = ends - middles - 1
    first = characters[starts]
    is_usual = (middles > starts) & (digits > 0) & (digits <= _DIGITS_MAX) & (ends - starts <= PATH_BYTES_MAX)
    is_usual &= (first != _SPACE) & (first != _HASH) & (characters[np.maximum(middles - 1, 0)] != _SPACE)
    if not is_usual.all() or (not allow_outside_root and (first == _SLASH).any()):
        return None
    labels = np.zeros(len(ends), np.int64)
    for place in range(int(digits.max()), 0, -1):
        numbers = characters[ends - np.minimum(place, digits)].astype(np.int64) - _ZERO
        if ((numbers < 0) | (numbers > 9)).any():  # noqa: PLR2004  a digit
            return None
        labels += np.where(place <= digits, numbers * 10 ** (place - 1), 0)
    borders = np.zeros(len(block) + 1, np.int8)
    borders[starts] = 1
    borders[middles] = -1
    return characters[np.cumsum(borders[:-1], dtype=np.int8).view(bool)], middles - starts, labels


def lines_of(file: Path, survey: Survey) -> Iterator[tuple[int, bytes]]:
    """The lines that name samples, with their numbers, from 1."""
    with survey.open(file) as stream:
        yield from _samples_in(file, stream, 0)


def _samples_in(file: Path, stream: BinaryIO, number: int) -> Iterator[tuple[int, bytes]]:
    """The same, of a stream that has so many lines in front of it."""
    while line := stream.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise SourceInvalid(f"{file}:{number}: a line longer than {LINE_BYTES_MAX} bytes; is this a list?")
        stripped = line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"").strip()
        if stripped and not stripped.startswith(b"#"):
            yield number, stripped


def read_line(line: bytes, *, allow_outside_root: bool) -> tuple[bytes, int]:
    """Split a line into path and label. Raises ``ValueError`` with the reason."""
    path, *label = line.rsplit(maxsplit=1)
    if len(path) > PATH_BYTES_MAX:
        raise ValueError(f"the path is longer than {PATH_BYTES_MAX} bytes")
    if b"\0" in line:
        raise ValueError("a character NUL in the line; a list is plain text, not UTF-16")
    if not label or not _LABEL.fullmatch(label[0]):
        raise ValueError("not a path, a space and a whole number")
    if not -_LABEL_MAX <= int(label[0]) <= _LABEL_MAX:
        raise ValueError("a label that does not fit into 64 bits")
    if not allow_outside_root:
        check_inside(path)
    return path, int(label[0])


def _list_problems(source: ListSource, storage: Storage) -> list[str]:
    root = storage.at(source.root).folder_problems(source.root) if source.root is not None else []
    return root + storage.at(source.path).file_problems(source.path, "the list")


def _scan_glob(source: GlobSource, survey: Survey) -> SourceIndex:
    growing = GrowingIndex(survey.progress, source.path_bytes)
    found = matching(source.file_patterns, survey)
    labels, classes = folder_labels(source.classes, [folder for folder, _names in found], str(source.root), survey)
    for label, (folder, names) in zip(labels, found, strict=True):
        for name in names:
            growing.add(below(folder, name), label)
    return growing.finish(source.root, classes, survey)


def folder_labels(
    classes: str | tuple[str, ...], folders: list[bytes], place: str, survey: Survey
) -> tuple[list[int], list[bytes]]:
    """The label of each folder with files, and the names of the labels."""
    if classes == "none":
        return [0] * len(folders), [b""]
    names = folders if isinstance(classes, str) else list(map(os.fsencode, classes))
    return labels_of(names, folders, place, survey), names


KINDS = {
    FolderSource: BuiltInKind(
        problems=lambda source, storage: storage.at(source.path).folder_problems(source.path, is_listed=True),
        columns=lambda source, _storage: image_columns(source.path_bytes, source.media),
        scan=_scan_folder,
        neighbours=files_neighbours,
        find=find_files,
    ),
    ListSource: BuiltInKind(
        problems=_list_problems,
        columns=lambda source, _storage: image_columns(source.path_bytes, source.media),
        scan=scan_list,
        neighbours=files_neighbours,
        find=find_files,
    ),
    GlobSource: BuiltInKind(
        problems=shards_problems,
        columns=lambda source, _storage: image_columns(source.path_bytes, source.media),
        scan=_scan_glob,
        neighbours=files_neighbours,
        find=find_files,
    ),
}
