"""What was found of media files, by the file: a cache of samples used as a table. Workers only.

    key --its first bytes--> place p of the index, p + 1, ... : the first with this key, or free

    facts     key, 16 bytes
    values    record

A long file may have many samples, and a sample several files; so a file has a place by its key, and
there are twice as many places as samples.

Invariant: ``find`` gives a whole record that ``keep`` got with an equal key, or None. Of two
workers that take one place at once, one loses its record, and what it says is found again.
"""

from batchd.data.sources.cache.disk import DiskCache
from batchd.data.sources.cache.memory import SampleCache

RECORD_BYTES_MAX = 64 << 20
"""Of one file: the packets of some 30 hours of video."""
TRIED_MAX = 16
"""Places at which a key is looked for."""


class KeyedCache:
    """Records by their keys. Belongs to one worker and one stream; see ``kept_files.FileFacts``."""

    def __init__(self, cache: SampleCache | DiskCache) -> None:
        self._cache = cache

    def find(self, key: bytes) -> memoryview | None:
        """The record of a key, valid until the next call; None if there is none."""
        found = self._place_of(key)
        return None if found is None else found[1]

    def keep(self, key: bytes, record: bytes) -> None:
        """Keep a record, if there is room for it, in place of another one of this key."""
        found = self._place_of(key)
        if found is not None and len(record) <= RECORD_BYTES_MAX:
            self._cache.keep(found[0], key, [record])

    def _place_of(self, key: bytes) -> tuple[int, memoryview | None] | None:
        """The place of a key, with its record; else one that is free; None if there is none."""
        first, places = int.from_bytes(key[:8], "little"), len(self._cache)
        for place in range(first, first + min(TRIED_MAX, places)):
            found = self._cache.find(place % places)
            if found is None or found[0] == key:
                return place % places, None if found is None else found[1]
        return None
