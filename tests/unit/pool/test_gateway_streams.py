"""Streams and their indexes in the gateway: digested in portions, shared, sent in parts."""

import gc
import os
from collections.abc import Iterator
from hashlib import sha256

import pytest

from batchd.pool.gateway import streams as module
from batchd.pool.gateway.streams import HostStreams, IndexMemory
from batchd.pool.messages import INDEX_PART_BYTES, HostQuarantine, HostServe
from batchd.worker.messages import QUARANTINED_AT_ONCE, TO_WORKER
from support.gateways import LAYOUT, index_descriptor, serve_message

CONTENT = os.urandom(3 * INDEX_PART_BYTES + 5)


@pytest.fixture
def streams(monkeypatch) -> Iterator[HostStreams]:
    """Streams without an entry; digests take one part at a time. Indexes end with the test."""
    monkeypatch.setattr(module, "DIGESTED_AT_ONCE", INDEX_PART_BYTES)
    streams = HostStreams()
    yield streams
    for stream in [*streams._streams]:
        streams.forget(stream)


def digest_all(streams) -> list[list[int]]:
    """The streams that became ready, portion by portion."""
    portions = []
    while streams.is_digesting:
        portions.append([stream.number for stream in streams.digest_some()])
    return portions


def test_a_large_index_is_digested_in_portions_and_then_its_stream_is_ready(streams) -> None:
    """So rows do not wait for the digest."""
    assert streams.add(serve_message(), index_descriptor(CONTENT)) is None
    assert streams.ready() == []

    assert digest_all(streams) == [[], [], [], [1]]
    assert [stream.index.digest for stream in streams.ready()] == [sha256(CONTENT).hexdigest()]
    assert streams.index(sha256(CONTENT).hexdigest()) is streams[1].index


def test_streams_over_one_source_share_its_index_and_one_digest(streams) -> None:
    """They have copies of one descriptor; a later one is ready at once."""
    descriptor = index_descriptor(CONTENT)
    streams.add(serve_message(1, "a"), os.dup(descriptor))
    streams.add(serve_message(2, "b"), os.dup(descriptor))
    assert digest_all(streams) == [[], [], [], [1, 2]]

    assert streams.add(serve_message(3, "c"), descriptor) is streams[3]
    assert streams[1].index is streams[2].index is streams[3].index
    streams.forget(1)
    assert streams.index(sha256(CONTENT).hexdigest()) is streams[2].index


def test_equal_indexes_in_two_places_have_one_digest(streams) -> None:
    """Hosts keep an index by its digest, so both are equivalent."""
    for number in (1, 2):
        streams.add(serve_message(number), index_descriptor(b"same"))
    digest_all(streams)
    assert streams[1].index is not streams[2].index
    streams.forget(1)
    assert streams.index(sha256(b"same").hexdigest()) is streams[2].index


def test_a_removed_stream_is_digested_no_more(streams) -> None:
    """The digest continues if another stream has the same index."""
    descriptor = index_descriptor(CONTENT)
    streams.add(serve_message(1), os.dup(descriptor))
    streams.add(serve_message(2), descriptor)
    streams.forget(1)
    assert streams.is_digesting
    streams.forget(2)
    assert not streams.is_digesting
    assert streams.index("") is None


def test_a_host_gets_the_same_stream_as_a_local_worker(streams) -> None:
    """The message has the name and the length of its index."""
    streams.add(serve_message(), index_descriptor(CONTENT))
    digest_all(streams)
    (serve,) = streams[1].messages(77)

    assert isinstance(serve, HostServe)
    assert (serve.link, serve.digest, serve.index_bytes) == (77, sha256(CONTENT).hexdigest(), len(CONTENT))
    assert TO_WORKER.decode(serve.serve) == TO_WORKER.decode(serve_message().encode())
    assert streams[1].layout == LAYOUT
    assert streams[1].record_bytes_max == 1 << 20


def test_quarantined_samples_are_sent_in_portions_that_fit_into_a_message(streams) -> None:
    """The first portion is sent with the stream."""
    streams.add(serve_message(), index_descriptor(b"x"))
    streams[1].quarantined.extend(range(2 * QUARANTINED_AT_ONCE + 1))
    serve, *more = streams[1].messages(77)

    assert isinstance(serve, HostServe)
    assert serve.quarantined == list(range(QUARANTINED_AT_ONCE))
    assert more == [
        HostQuarantine(77, 1, list(range(QUARANTINED_AT_ONCE, 2 * QUARANTINED_AT_ONCE))),
        HostQuarantine(77, 1, [2 * QUARANTINED_AT_ONCE]),
    ]


def test_the_parts_of_an_index_make_up_its_bytes() -> None:
    """The last part is shorter; parts begin only at fixed places."""
    index = IndexMemory(index_descriptor(CONTENT))
    offsets = range(0, len(CONTENT), INDEX_PART_BYTES)
    assert b"".join(index.part(offset) for offset in offsets) == CONTENT
    for wrong in (1, INDEX_PART_BYTES - 1, 4 * INDEX_PART_BYTES, 1 << 60):
        with pytest.raises(ValueError, match=f"has no part at {wrong}"):
            index.part(wrong)


def test_a_part_outlives_its_stream(streams) -> None:
    """ZeroMQ may send it later."""
    streams.add(serve_message(), index_descriptor(CONTENT))
    part = streams[1].index.part(INDEX_PART_BYTES)
    streams.forget(1)
    gc.collect()
    assert part == CONTENT[INDEX_PART_BYTES : 2 * INDEX_PART_BYTES]
