"""Where the samples of one order go: the members of a shard, or files of their own. A WRITER of ``batchd prepare``.

    TarShard    NAME-000000.tar                  a member for each value, called after the sample's number
    FileRun     files/a/b.jpg ...                each image under the path that it had below its source's root
                NAME-000000.list                 path and label of each, as a ``list`` source reads them; written last

Invariant: what an order makes is a function of the source, the steps, the seed and the encoding. A
file has its name when it is whole and on the disk.
"""

import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self

from batchd.prepare.members import MemberEncoder
from batchd.samples.values import Value
from batchd.sources.files.index import FilesIndex
from batchd.storage.index import readable

FILES = "files"
"""The folder, within that of the command, below which files are written."""
NAME_DIGITS = 9
_JPEG_SUFFIXES = (b".jpg", b".jpeg")


class Sink(Protocol):
    """Takes the samples of one order; a context manager. Raises ``OSError`` where nothing can be written."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def add(self, sample: int, values: Mapping[str, Value]) -> None:
        """Write one sample, or nothing of it. Raises ``SampleUndecodable`` where it cannot be encoded."""


class TarShard:
    """A shard in WebDataset format, into an open file. Members have no times and no owners."""

    def __init__(self, raw: BinaryIO, encoder: MemberEncoder) -> None:
        self._tar = tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115  closed by __exit__
        self._encoder = encoder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._tar.close()

    def add(self, sample: int, values: Mapping[str, Value]) -> None:
        """See ``Sink``."""
        for ending, content in list(self._encoder.members(values)):
            member = tarfile.TarInfo(f"{sample:0{NAME_DIGITS}}.{ending}")
            member.size = len(content)
            self._tar.addfile(member, io.BytesIO(content))


class NameUnusable(Exception):  # noqa: N818  names what is wrong
    """A path that no file below a folder can have, or no list can name; with what to do."""


class FileRun:
    """Files below a folder, and their list into an open file."""

    def __init__(self, raw: BinaryIO, encoder: MemberEncoder, index: FilesIndex, folder: Path) -> None:
        self._raw = raw
        self._encoder = encoder
        self._index = index
        self._folder = os.fsencode(folder / FILES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        return

    def add(self, sample: int, values: Mapping[str, Value]) -> None:
        """See ``Sink``. Raises ``NameUnusable``, too."""
        ending, content = self._encoder.image(values)
        name = file_name(self._index.name(sample), ending)
        path = os.path.join(self._folder, name)  # noqa: PTH118  bytes, because names need not be text
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120  the same
        unfinished = b"%s.%d.unfinished" % (path, sample)  # a list may name a file twice
        with open(unfinished, "wb") as stream:  # noqa: PTH123  the same
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(unfinished, path)  # noqa: PTH104  the same
        self._raw.write(b"%s %d\n" % (name, self._index.label(sample)))


def file_name(name: bytes, ending: str) -> bytes:
    """The path of a file below its folder: as it was, with ``.jpg`` behind it if it is a JPEG by now. Raises ``NameUnusable``."""
    parts = name.split(b"/")
    if b":" in parts[0] or not parts[0] or b".." in parts:
        raise NameUnusable(f"{readable(name)} does not lie below its source's root: write shards, without --files")
    if name.startswith(b"#") or name != name.strip() or b"\n" in name or b"\r" in name:
        raise NameUnusable(f"{name!r} cannot stand in a list of files: rename it, or write shards, without --files")
    is_jpeg = ending == "jpg" and not name.lower().endswith(_JPEG_SUFFIXES)
    return name + b".jpg" if is_jpeg else name
