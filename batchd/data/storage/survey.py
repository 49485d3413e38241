"""One scan of a source: its progress, and its witnesses. Daemon.

A scan records each folder and file that it read as a witness: while none has changed, another
scan would find the same. It notes what it leaves out, and what it takes for granted, in words that
`batchd init`, `batchd check` and the log show.

Invariant: content that no sample has is refused, or noted. Compressed files are recognised by
their first bytes.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from time import time_ns
from typing import BinaryIO, NamedTuple, TypeAlias

from batchd.data.storage.access import FoundNames, Storage, WantedNames
from batchd.data.storage.values import Version, Witness, witness

ReportProgress: TypeAlias = Callable[[int], None]
"""Called now and then with the number of samples found so far."""


class Survey:
    """The context of one scan: where it reads, and what it reports.

    ``storage``: of the source's files. A source without witnesses is scanned at each start.
    """

    def __init__(
        self,
        progress: ReportProgress,
        python_path: Sequence[Path] = (),
        looked: Callable[[], None] = lambda: None,
        storage: Storage | None = None,
    ) -> None:
        self.progress = progress
        self.looked = looked
        """Called for each step that may take a while: an entry of a folder, a sample of a shard,
        a block of a file. What it raises ends the scan."""
        self.python_path = python_path
        """Folders that are searched first for modules of users' functions."""
        self.storage = storage or Storage()
        self.started_ns = time_ns()
        self._seen: list[Witness] = []
        self._parts: list[Survey] = []
        self._notes: dict[tuple[str, str], tuple[int, str]] = {}
        self.versions: dict[str, Version] = {}
        """The files and objects that were read; readers of their samples require them unchanged."""

    def part(self, found_before: int) -> "Survey":
        """The survey of one of several sources, when those before it have so many samples."""
        part = Survey(lambda found: self.progress(found_before + found), self.python_path, self.looked, self.storage)
        self._parts.append(part)
        return part

    @property
    def witnesses(self) -> list[Witness]:
        """All witnesses, also those of its parts."""
        return self._seen + [one for part in self._parts for one in part.witnesses]

    def is_settled(self, settled_ns: int) -> bool:
        """True if each witness would look different after a change; false without witnesses."""
        last_ns = max((one.last_change_ns(self.started_ns) for one in self._seen), default=None)
        is_settled = last_ns is None or last_ns < self.started_ns - settled_ns
        has_any = bool(self._seen or self._parts)
        return has_any and is_settled and all(part.is_settled(settled_ns) for part in self._parts)

    def saw(self, path: bytes, status: os.stat_result) -> None:
        """Record a folder or file that the scan looks at; ``status`` is from before it did."""
        self.add(witness(path, status))

    def add(self, seen: Witness) -> None:
        """Record the witness of what the scan looks at."""
        self.looked()
        self._seen.append(seen)

    def note(self, what: str, where: str, advice: str = "", count: int = 1) -> None:
        """Note something: ``what`` in the plural, where the first is, and how many there are."""
        noted, first = self._notes.get((what, advice), (0, where))
        self._notes[what, advice] = noted + count, first

    @property
    def notes(self) -> list[str]:
        """The notes, one for each thing, without those of its parts."""
        return [
            f"{what}: {first}{f' and {count - 1:,} more' if count > 1 else ''}{advice and f'; {advice}'}"
            for (what, advice), (count, first) in self._notes.items()
        ]

    def reads(self, file: Path, seen: Witness, version: Version) -> None:
        """The scan reads this file, and readers of its samples have to find it as it was."""
        self.add(seen)
        self.versions[str(file.absolute())] = version

    def open(self, file: Path) -> AbstractContextManager[BinaryIO]:
        """A file, open for the scan. Raises ``SourceInvalid``."""
        return self.storage.at(file).open(file, self)

    def names_in(self, folder: bytes, wanted: WantedNames) -> FoundNames:
        """The wanted names in a folder that the scan reads. Raises ``SourceInvalid``."""
        return self.storage.at(folder).names_in(folder, wanted, self)

    def place(self) -> dict[str, object]:
        """The versions of the files and the notes, for the place of an index."""
        versions: dict[str, list[object]] = {where: list(version) for where, version in self.versions.items()}
        return {name: found for name, found in (("versions", versions), ("notes", self.notes)) if found}


def quick_look(storage: Storage) -> Survey:
    """A survey without progress and witnesses: to look at a file without scanning the source."""
    return Survey(lambda _found: None, storage=storage)


MAGIC_BYTES_MAX = 10
"""The bytes at a file's beginning that identify every kind; fewer may identify none."""


class Compression(NamedTuple):
    """The name of a compression, and the command that unpacks standard input to standard output."""

    name: str
    unpack: str


ZLIB = Compression(
    "ZLIB", "python3 -c 'import sys, zlib; sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))'"
)
"""Has no magic bytes. TensorFlow writes it; the caller knows what else may begin like it."""
_BY_MAGIC = {
    b"\x1f\x8b": Compression("gzip", "gzip -dc"),
    **{b"BZh%d1AY&SY" % level: Compression("bzip2", "bzip2 -dc") for level in range(1, 10)},
    b"\xfd7zXZ\0": Compression("xz", "xz -dc"),
    b"\x28\xb5\x2f\xfd": Compression("zstd", "zstd -dc"),
    b"\x04\x22\x4d\x18": Compression("lz4", "lz4 -dc"),
}
assert max(map(len, _BY_MAGIC)) == MAGIC_BYTES_MAX


def compression_of(start: bytes) -> Compression | None:
    """How the file is compressed that starts with these bytes; None where it is not."""
    return next((found for magic, found in _BY_MAGIC.items() if start.startswith(magic)), None)
