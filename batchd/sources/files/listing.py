"""A list file becomes an index. Daemon.

    list.txt: "a b/1.jpg 7"     the label is the last word of the line

Invariant: what cannot be served as the user means it is refused here with the file and the line,
and is never left out quietly.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from batchd.errors import SourceInvalid
from batchd.sources.csv.values import BYTE_ORDER_MARK
from batchd.sources.files.index import GrowingIndex
from batchd.sources.files.options import ListSource
from batchd.sources.files.reader import FilesReader, image_columns
from batchd.sources.interface import BuiltInKind
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex, readable
from batchd.storage.paths import may_lead_out
from batchd.storage.survey import Survey

PATH_BYTES_MAX = 4095
"""``PATH_MAX`` of limits.h without the closing zero."""
LINE_BYTES_MAX = PATH_BYTES_MAX + 64
_LABEL = re.compile(rb"[+-]?\d{1,19}")
_LABEL_MAX = (1 << 63) - 1


def _scan(source: ListSource, survey: Survey) -> SourceIndex:
    growing = GrowingIndex(survey.progress, source.path_bytes)
    root = source.path.absolute().parent if source.root is None else source.root
    for number, line in _lines(source.path, survey):
        try:
            path, label = _read_line(line, allow_outside_root=source.allow_outside_root)
        except ValueError as error:
            shown = readable(line[:80]) + ("…" if len(line) > 80 else "")  # noqa: PLR2004  a line of a terminal
            raise SourceInvalid(f"{source.path}:{number}: {error}: {shown}") from None
        growing.add(path, label)
    if not len(growing):
        raise SourceInvalid(f"the list {source.path} names no sample; each line is a path, a space and a label")
    return growing.finish(root, [], survey)


def _lines(file: Path, survey: Survey) -> Iterator[tuple[int, bytes]]:
    """The lines that name samples, with their numbers from 1 on."""
    with survey.open(file) as stream:
        number = 0
        while line := stream.readline(LINE_BYTES_MAX + 1):
            number += 1
            if len(line) > LINE_BYTES_MAX:
                raise SourceInvalid(f"{file}:{number}: a line longer than {LINE_BYTES_MAX} bytes; is this a list?")
            stripped = line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"").strip()
            if stripped and not stripped.startswith(b"#"):
                yield number, stripped


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
    if not allow_outside_root and may_lead_out(path):
        raise ValueError("a path that may lead out of the root; set allow_outside_root = true if you mean it")
    return path, int(label[0])


def _problems(source: ListSource, storage: Storage) -> list[str]:
    root = storage.at(source.root).folder_problems(source.root) if source.root is not None else []
    return root + storage.at(source.path).file_problems(source.path, "the list")


KIND = BuiltInKind(
    problems=_problems,
    columns=lambda source, _storage: image_columns(source.path_bytes),
    scan=_scan,
    open=FilesReader.of,
)
