"""The folder of the shards: its purpose, its shards, its bad samples. In ``batchd prepare``.

    prepare.json         what is prepared here; a command for anything else is refused
    NAME-000000.tar ...  shards, whole
    *.unfinished         left by a killed process; removed
    sizes.tsv            name and bytes of each finished shard, written before it is renamed
    bad.tsv              shard, sample, path and reason of each sample that is in no shard

Invariant: ``bad.tsv`` has one line for each bad sample of the finished shards. A shard with another
size than the recorded one counts as missing.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

from batchd.data.storage.index import readable
from batchd.errors import BatchdError

ABOUT = "prepare.json"
SIZES = "sizes.tsv"
BAD = "bad.tsv"
UNFINISHED = ".unfinished"
DIGESTS = {
    "source": "the source's files have changed, or its options",
    "steps": "the pipeline, the seed, or what a step reads or calls has changed",
}
"""The facts that have changed if one of these digests differs."""


class UnpreparedSample(NamedTuple):
    """A bad sample, which is in no shard."""

    shard: str
    sample: int
    path: str
    reason: str


class ShardFolder:
    """Locks the folder while shards are written. A context manager.

    Raises ``BatchdError``: it is not writable, in use, or has something else.
    """

    def __init__(self, path: Path, about: dict[str, object]) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise BatchdError(f"{path} cannot be used: {error.strerror}") from None
        with ExitStack() as where_it_fails:
            where_it_fails.callback(os.close, self._descriptor)
            try:
                self._begin(about)
            except BlockingIOError:
                raise BatchdError(f"another batchd prepare is at work in {path}") from None
            except OSError as error:
                raise BatchdError(f"{error.filename or path} cannot be used: {error.strerror}") from None
            where_it_fails.pop_all()

    def _begin(self, about: dict[str, object]) -> None:
        """Lock the folder, remove unfinished files, and read the records of earlier runs."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._claim(about)
        for left in self.path.glob(f"*{UNFINISHED}"):
            left.unlink()
        there = {file.name: file.stat().st_size for file in self.path.iterdir() if file.is_file()}
        self._sizes = {shard: size for shard, size in self._read_sizes() if there.get(shard) == size}
        _write(self.path / SIZES, "".join(f"{shard}\t{size}\n" for shard, size in self._sizes.items()))
        self.left_out = [one for one in self._read_bad() if self.has(one.shard)]
        """The bad samples of the finished shards."""
        self._write_bad()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for left in self.path.glob(f"*{UNFINISHED}"):
            left.unlink()
        os.close(self._descriptor)

    def has(self, shard: str) -> bool:
        """True if this shard is finished."""
        return shard in self._sizes

    def finish(self, shard: str, size: int, left_out: Iterable[UnpreparedSample]) -> None:
        """Rename a shard of ``size`` bytes after its size and its bad samples are on the disk."""
        self.left_out += left_out
        try:
            self._write_bad()
            with (self.path / SIZES).open("a") as stream:
                stream.write(f"{shard}\t{size}\n")
                stream.flush()
                os.fsync(stream.fileno())
            self._sizes[shard] = size
            (self.path / f"{shard}{UNFINISHED}").rename(self.path / shard)
            os.fsync(self._descriptor)
        except OSError as error:
            raise BatchdError(f"{self.path / shard} cannot be written: {error.strerror}") from None

    def _claim(self, about: dict[str, object]) -> None:
        """Record what is prepared here, or compare it with the record."""
        file = self.path / ABOUT
        if not file.exists():
            others = sorted(entry.name for entry in self.path.iterdir())
            if others:
                raise BatchdError(f"{self.path} is not empty ({others[0]}): name a new folder")
            _write(file, json.dumps(about, indent=2) + "\n")
            return
        try:
            there = json.loads(file.read_text())
        except ValueError:
            there = None
        if not isinstance(there, dict):
            raise BatchdError(f"{file} is damaged: name a new folder, or remove this one")
        for name, value in about.items():
            if there.get(name) != value:
                why = DIGESTS.get(name, f"{name} was {there.get(name)!r}, and is {value!r} now")
                raise BatchdError(
                    f"something else was prepared in {self.path}: {why}; name a new folder, or remove this one"
                )

    def _read_sizes(self) -> Iterator[tuple[str, int]]:
        """Shard and bytes of each complete line of ``sizes.tsv``."""
        file = self.path / SIZES
        for line in file.read_text(errors="surrogateescape").splitlines(keepends=True) if file.exists() else []:
            shard, _, size = line.partition("\t")
            if line.endswith("\n") and size.strip().isdecimal() and "/" not in shard:
                yield shard, int(size)

    def _read_bad(self) -> list[UnpreparedSample]:
        file = self.path / BAD
        lines = file.read_text(errors="surrogateescape").splitlines()[1:] if file.exists() else []
        parts = (line.split("\t") for line in lines)
        return [
            UnpreparedSample(shard, int(sample), path, reason)
            for shard, sample, path, reason in (cells for cells in parts if len(cells) == len(UnpreparedSample._fields))
        ]

    def _write_bad(self) -> None:
        def cell(value: object) -> str:
            return readable(str(value).encode("utf-8", "surrogateescape"))

        rows = [("shard", "sample", "path", "reason"), *sorted(set(self.left_out))]
        _write(self.path / BAD, "".join("\t".join(map(cell, row)) + "\n" for row in rows))


def _write(file: Path, text: str) -> None:
    """Write a file under another name, flush it, and rename it."""
    unfinished = file.with_name(f".{file.name}")
    with unfinished.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(file)
