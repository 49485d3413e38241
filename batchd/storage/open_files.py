"""Shards, which are files with many samples, open while samples of them are read. Workers only.

Invariant: at most ``SHARDS_MAX`` are open for one stream in one worker: the most recently used.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType

from batchd.samples.errors import OUR_OWN_FAULTS, SampleUnreadable
from batchd.storage.index import readable
from batchd.storage.paths import is_within
from batchd.storage.values import Version, version_of

SHARDS_MAX = 64
"""Shards that one worker keeps open for one stream."""
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class OpenShards:
    """Descriptors of shards by their paths. Belongs to one reader.

    ``bound``: a real path that links must not lead out of. ``versions``: the files as they were
    scanned.
    """

    def __init__(self, bound: bytes | None = None, versions: Mapping[str, Version] = MappingProxyType({})) -> None:
        self._bound = bound
        self._versions = {os.fsencode(where): version for where, version in versions.items()}
        self._descriptors: dict[bytes, int] = {}
        """Those used lately last."""

    def descriptor(self, file: bytes) -> int:
        """The descriptor of a shard, which stays this object's.

        The least recently used one is closed if there are too many.
        """
        descriptor = self._descriptors.pop(file, None)
        if descriptor is None:
            if len(self._descriptors) >= SHARDS_MAX:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            descriptor = open_within(file, self._bound)
        self._descriptors[file] = descriptor
        return descriptor

    def check(self, file: bytes) -> None:
        """Check, after bytes of an open shard were read, that it has not changed since the scan.

        Raises ``SampleUnreadable``.
        """
        version = self._versions.get(file)
        difference = version.differs_from(version_of(os.fstat(self._descriptors[file]))) if version is not None else ""
        if difference:
            raise SampleUnreadable(f"its file has changed since the daemon read it: {difference}; restart the daemon")

    def close(self) -> None:
        """Close those that are open."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def open_within(path: bytes, bound: bytes | None) -> int:
    """Open a file to read; the caller closes it. Raises as ``check_opened``, and ``OSError``."""
    with ExitStack() as where_it_fails:
        descriptor = os.open(path, OPEN_FLAGS)
        where_it_fails.callback(os.close, descriptor)
        check_opened(descriptor, bound)
        where_it_fails.pop_all()
    return descriptor


def check_opened(descriptor: int, bound: bytes | None) -> None:
    """Refuse an open file outside of ``bound``. Raises ``SampleUnreadable``.

    The open descriptor is checked, so no link can be changed in between.
    """
    if bound is None:
        return
    real = os.readlink(b"/proc/self/fd/%d" % descriptor)  # noqa: PTH115  bytes
    if not is_within(real, bound):
        raise SampleUnreadable(
            f"is a link that leads out of the root, to {readable(real)}; set allow_outside_root = true if you mean it"
        )


@contextmanager
def blaming_the_sample() -> Iterator[None]:
    """What the system refuses makes the sample a bad one; see ``blamed``."""
    try:
        yield
    except OSError as error:
        raise blamed(error) from None


def blamed(error: OSError) -> Exception:
    """An error of the system as a fault of the sample.

    It stays an ``OSError`` if this process has no descriptors or no memory left.
    """
    return error if error.errno in OUR_OWN_FAULTS else SampleUnreadable(os.strerror(error.errno or errno.EIO))
