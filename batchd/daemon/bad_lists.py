"""Files with the bad samples of streams that have more than one answer holds. DAEMON process.

    cache_dir/batchd-STREAM.bad    {"sample": 7, "path": "a/b.jpg", "reason": "empty file"}
                                   ... a line for each bad sample, in the order of their discovery

`batchd bad` names the first ones by number and this file, and `batchd seen --bad` reads it. It
begins with all that were found before it was needed, and again with each daemon.

Invariant: a file never has more than ``FILE_BYTES_MAX`` bytes, and whole lines. An error of the
disk costs lines, which are counted in the log, and nothing else.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from batchd.core.suspicion import ListedBadSample
from batchd.data.storage.paths import open_own
from batchd.runtime.limits import OncePerMinute

_log = structlog.get_logger()

FILE_FROM = 100
"""Bad samples of a stream from which on a file has them all: an answer holds the first ones."""
FILE_BYTES_MAX = 64 << 20
"""Some 500,000 names of usual length."""


@dataclass(slots=True)
class _List:
    """The bad samples of one stream. ``early``: those that are not in the file yet."""

    stream: int
    descriptor: int = -1
    is_begun: bool = False
    early: dict[int, ListedBadSample] = field(default_factory=dict)


class BadLists:
    """The files of all streams, by the stream's name. Without a ``folder`` there are none."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lists: dict[str, _List] = {}
        self._missing = 0
        self._once_per_minute = OncePerMinute()

    def path(self, name: str) -> str:
        """The file of a stream; "" if it has none."""
        known = self._lists.get(name)
        return str(self._path(name)) if known is not None and known.is_begun else ""

    def add(self, stream: int, name: str, sample: int, bad: ListedBadSample) -> None:
        """Append a sample that was found bad.

        Another ``stream`` of this name begins the file again.
        """
        if self._folder is None:
            return
        known = self._lists.setdefault(name, _List(stream))
        if known.stream != stream:
            known.stream, known.is_begun = stream, False
            known.early.clear()
        known.early[sample] = bad
        if not known.is_begun and len(known.early) < FILE_FROM:
            return
        new, known.early = known.early, {}
        try:
            if not known.is_begun:
                self._begin(name, known)
            _append(known.descriptor, new)
        except OSError as error:
            self._missing += len(new)
            if self._once_per_minute.allows("missing", name):
                reason, file = error.strerror or str(error), str(self._path(name))
                _log.warning("bad samples are missing in their file", file=file, reason=reason, missing=self._missing)

    def close(self) -> None:
        """Close the files, which stay."""
        for known in self._lists.values():
            if known.descriptor >= 0:
                os.close(known.descriptor)
        self._lists.clear()

    def _path(self, name: str) -> Path:
        assert self._folder is not None, "there are files"
        return self._folder / f"batchd-{name}.bad"

    def _begin(self, name: str, known: _List) -> None:
        """Empty the file of a stream; open and lock it first. Raises ``OSError``."""
        path = self._path(name)
        if known.descriptor < 0:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise
            known.descriptor = descriptor
        os.ftruncate(known.descriptor, 0)
        known.is_begun = True


def _append(descriptor: int, found: Mapping[int, ListedBadSample]) -> None:
    """Append lines, or none of them. Raises ``OSError``."""
    lines = [{"sample": sample, "path": bad.path, "reason": bad.reason} for sample, bad in found.items()]
    data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    size = os.fstat(descriptor).st_size
    if size + len(data) > FILE_BYTES_MAX:
        raise OSError(0, f"it has {size} bytes, and at most {FILE_BYTES_MAX} are kept")
    if os.write(descriptor, data) != len(data):
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise OSError(0, "no space is left")
