"""Files that many samples lie in, open while samples of them are wanted. Workers only.

Invariant: at most ``SHARDS_MAX`` are open for one stream in one worker, those that were used lately.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from batchd.sources.errors import OUR_OWN_FAULTS, SampleUnreadable

SHARDS_MAX = 64
"""Shards that one worker keeps open for one stream."""
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class OpenShards:
    """Descriptors of shards by their paths. Belongs to one reader."""

    def __init__(self) -> None:
        self._descriptors: dict[bytes, int] = {}
        """Those used lately last."""

    def descriptor(self, file: bytes) -> int:
        """A shard, open; it stays this object's. The one that was used least lately is closed where there are too many."""
        descriptor = self._descriptors.pop(file, None)
        if descriptor is None:
            if len(self._descriptors) >= SHARDS_MAX:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            descriptor = os.open(file, OPEN_FLAGS)
        self._descriptors[file] = descriptor
        return descriptor

    def close(self) -> None:
        """Close those that are open."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


@contextmanager
def blaming_the_sample() -> Iterator[None]:
    """What the system refuses makes the sample a bad one, unless it is this process that has no descriptors or no memory."""
    try:
        yield
    except OSError as error:
        if error.errno in OUR_OWN_FAULTS:
            raise
        raise SampleUnreadable(os.strerror(error.errno or errno.EIO)) from None
