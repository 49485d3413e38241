"""Sources as workers see them: scanned, shared, and read by their own readers.

For tests of sources.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from batchd.samples.errors import SampleUnreadable
from batchd.sources.interface import Reader, open_reader
from batchd.sources.kinds import source_from_plain, source_to_plain
from batchd.sources.options import SourceOptions
from batchd.sources.scan import scan_source
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.index_cache import IndexCache
from support.source_files import nothing


def scan(source: SourceOptions) -> SourceIndex:
    """The index of a source, made anew."""
    return scan_source(source, nothing, IndexCache(None), Storage())


@contextmanager
def opened(source: SourceOptions, max_bytes: int = 1 << 24) -> Iterator[tuple[Reader, SourceIndex]]:
    """A reader over the index as it comes to a worker."""
    descriptor = scan(source).to_memfd()
    try:
        index = SourceIndex.from_descriptor(descriptor)
    finally:
        os.close(descriptor)
    reader = open_reader(source_from_plain(source_to_plain(source)), index, max_bytes, Storage())
    try:
        yield reader, index
    finally:
        reader.close()


def read_samples(source: SourceOptions) -> list[Mapping[str, Any]]:
    """All samples, the last one read first, as any order will do.

    What is only valid until the next one is copied.
    """
    with opened(source) as (reader, index):
        return [_copied(reader.read(sample)) for sample in reversed(range(len(index)))][::-1]


def reason(reader: Reader, sample: int = 0) -> str:
    """Why a sample cannot be read."""
    with pytest.raises(SampleUnreadable) as caught:
        reader.read(sample)
    return str(caught.value)


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: bytes(value) if isinstance(value, memoryview) else value.copy() if hasattr(value, "copy") else value
        for name, value in values.items()
    }
