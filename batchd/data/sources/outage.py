"""Whether a source's storage is away, so that no sample of it is bad. Workers only.

    its file can be opened                                   --> the sample is bad
    the root is gone, or an empty folder (a mount point)     --> away
    neither its file nor another of the source can be opened --> away; else the sample is bad

Only looked at after a sample could not be made, so good samples cost nothing.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from time import monotonic

from batchd.data.samples.errors import OUR_OWN_FAULTS
from batchd.data.samples.location import is_url
from batchd.data.sources.interface import HasParts, NamesFiles, Reader
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, readable
from batchd.data.storage.paths import OPEN_FLAGS
from batchd.data.storage.values import ObjectUnreadable

OTHERS_TRIED = 32
"""Files beside the sample's own one: where half of all files are gone, some can be opened."""
REQUESTS_PART = 8
"""Requests of a look take this part of the time that a sample may take, beyond that time."""
_OPENED = {*OUR_OWN_FAULTS, errno.EISDIR, errno.ESPIPE, errno.EINVAL}
"""Errors that do not say that a file is away."""


def why_away(reader: Reader, index: SourceIndex, sample: int, storage: Storage) -> str | None:
    """The reason if the storage of a sample is away; None if the sample itself is bad."""
    while isinstance(reader, HasParts):
        reader, index, sample = reader.part_with(sample)
    until_s = monotonic() + storage.limits.deadline_s / REQUESTS_PART
    own = reader.file(sample) if isinstance(reader, NamesFiles) else None
    if own is not None and _opens(own, storage, until_s):
        return None
    for root in _roots(index):
        if (reason := _root_away(root)) is not None:
            return f"{readable(root)} {reason}"
    tried = [] if own is None else [own]
    for file in islice(_others(reader, index, sample), OTHERS_TRIED):
        if is_url(file) and tried and monotonic() >= until_s:
            break
        if file != own and _opens(file, storage, until_s):
            return None
        tried.append(file)
    if not tried:
        return None
    others = f", and none of {len(tried) - 1} others" if len(tried) > 1 else ""
    return f"{readable(tried[0])} cannot be opened{others}"


def _roots(index: SourceIndex) -> Iterator[bytes]:
    """The folders of this machine that a source is below."""
    for name in ("root", "image_root"):
        root = os.fsencode(index.place.get(name) or "")
        if root and not is_url(root):
            yield root


def _root_away(root: bytes) -> str | None:
    try:
        with os.scandir(root) as entries:
            return None if any(True for _entry in entries) else "is empty"
    except OSError as error:
        is_there = error.errno in OUR_OWN_FAULTS
        with suppress(OSError):
            os.stat(root)  # noqa: PTH116  bytes
            # files in it are tried
            is_there = error.errno in {errno.EACCES, errno.ENOTDIR, errno.EPERM}
        return None if is_there else f"cannot be reached: {error.strerror}"


def _others(reader: Reader, index: SourceIndex, sample: int) -> Iterator[bytes]:
    """Files of a sample's source, or its objects; of many, some from all over it."""
    if not isinstance(reader, NamesFiles):
        yield from map(os.fsencode, index.place.get("versions", index.place.get("files", ())))
        return
    step = max(1, len(index) // (OTHERS_TRIED + 1))
    for number in range(1, min(OTHERS_TRIED + 1, len(index))):
        file = reader.file((sample + number * step) % len(index))
        if file is not None:
            yield file


def _opens(file: bytes, storage: Storage, until_s: float) -> bool:
    """Whether a file of this machine can be opened and read, or a server has an object."""
    if is_url(file):
        try:
            storage.client.head(os.fsdecode(file), max(0.1, until_s - monotonic()))
        except ObjectUnreadable:
            return False
        return True
    try:
        descriptor = os.open(file, OPEN_FLAGS)
        try:
            os.pread(descriptor, 1, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        return error.errno in _OPENED
    return True
