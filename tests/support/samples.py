"""Sources as workers see them: scanned, shared, and read by their own readers.

For tests of sources.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import MediaFile
from batchd.data.sources.interface import Reader, ReadsRows, open_reader, read_ahead
from batchd.data.sources.options import SourceOptions, source_from_plain, source_to_plain
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import SourceInvalid
from support.source_files import as_shared, nothing


def scan(source: SourceOptions) -> SourceIndex:
    """Scan a source and return its new index."""
    return scan_source(source, nothing, IndexCache(None), Storage())


def request(storage: Storage, reader: Reader, samples: Sequence[int]) -> None:
    """Request samples, as a worker does for an order, and wait. Earlier ones are forgotten."""
    storage.requested.forget()
    requested = storage.begin_reading_ahead()
    read_ahead(reader, samples)
    assert requested.wait(30)


@contextmanager
def opened(source: SourceOptions, max_bytes: int = 1 << 24) -> Iterator[tuple[Reader, SourceIndex]]:
    """Make a reader over the index as a worker gets it."""
    index = as_shared(scan(source))
    reader = open_reader(source_from_plain(source_to_plain(source)), index, max_bytes, Storage())
    try:
        yield reader, index
    finally:
        reader.close()


def read_samples(source: SourceOptions) -> list[Mapping[str, Any]]:
    """Read all samples from the last to the first, because any order must work.

    Values that are valid only until the next read are copied.
    """
    with opened(source) as (reader, index):
        samples = [copied(reader.read(sample)) for sample in reversed(range(len(index)))][::-1]
        if isinstance(reader, ReadsRows) and reader.reads_rows():
            _check_rows(reader, samples)
        return samples


def reason(reader: Reader, sample: int = 0) -> str:
    """Return the reason why a sample cannot be read."""
    with pytest.raises(SampleUnreadable) as caught:
        reader.read(sample)
    return str(caught.value)


def _check_rows(reader: ReadsRows, samples: list[Mapping[str, Any]]) -> None:
    """Check that rows read together, in any order and repeatedly, equal rows read one by one."""
    wanted = np.random.default_rng(7).integers(len(samples), size=2 * len(samples))
    one = {name: np.asarray(value) for name, value in samples[0].items()}
    rows = {name: np.full((len(wanted), *value.shape), 77, value.dtype) for name, value in one.items()}
    halves = [{name: value[part] for name, value in rows.items()} for part in (slice(1), slice(1, None))]
    begun: list[int] = []
    reader.read_rows(wanted, halves, begun.append)
    assert set(begun) == {0, 1}
    for row, sample in enumerate(wanted):
        for name, value in samples[sample].items():
            np.testing.assert_array_equal(rows[name][row], value)


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a sample, of files their bytes, that stay valid after the next read."""

    def lasting(value: Any) -> Any:
        if isinstance(value, MediaFile):
            return bytes(value.whole())
        if isinstance(value, memoryview):
            return bytes(value)
        return value.copy() if hasattr(value, "copy") else value

    return {name: lasting(value) for name, value in values.items()}


def refused(source: SourceOptions) -> str:
    """Return the error text of the scan."""
    with pytest.raises(SourceInvalid) as caught:
        scan(source)
    return str(caught.value)
