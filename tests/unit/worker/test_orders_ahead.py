"""What orders need from servers is requested while a worker fills the rows of earlier ones."""

import io
from collections import deque

import numpy as np
import pytest

from batchd.data.storage.reader import RemoteBytes
from batchd.worker.messages import Chunk, FillChunks
from batchd_wire.views import slot_arrays
from support.http_files import FileServer
from support.shards import write_shard
from support.waiting import wait_until
from support.worker_streams import WorkerStreams, worker_streams

SAMPLES, LENGTH = 8, 50_000
SOURCE = "{{ type = 'webdataset', root = '{url}', shards = ['a.tar'], "
FIELDS = "fields = { x = 'int32[50000]' }, names = { x = 'x.npy' } }"


@pytest.fixture
def rows() -> np.ndarray:
    """Long enough that no two samples are in one request: int32 ``[samples, length]``."""
    return np.random.default_rng(0).integers(0, 1000, (SAMPLES, LENGTH), np.int32)


@pytest.fixture
def streams(tmp_path, _network_library, web: FileServer, rows):
    """Make streams over a shard with gaps between the samples."""
    members = [(f"{number}.{name}", data) for number, row in enumerate(rows) for name, data in _members(row)]
    web.files["a.tar"] = write_shard(tmp_path / "a.tar", members).read_bytes()
    with worker_streams(tmp_path) as made:
        yield made


def _members(row: np.ndarray) -> list[tuple[str, bytes]]:
    file = io.BytesIO()
    np.save(file, row)
    return [("x.npy", file.getvalue()), ("gap", bytes(1 << 18))]


def message(number: int, first: int, count: int) -> FillChunks:
    """An order of one chunk."""
    return FillChunks(1, [Chunk(number, 1, 0, 0, [(first, count)], [])], is_packed=False)


def start(streams: WorkerStreams, web: FileServer):
    """Return the stream, and the slot that it fills."""
    stream = streams.start(SOURCE.format(url=web.url) + FIELDS, samples=SAMPLES)
    return stream, {1: (memoryview(bytearray(stream.layout.slot_bytes)), {})}


def test_the_next_order_is_requested_before_the_current_one_is_filled(streams, web, rows):
    """Nothing is requested twice, and the next order finds its samples."""
    stream, slots = start(streams, web)
    web.asked.clear()
    following = [message(2, 4, 4)]
    (first,) = stream.answer(message(1, 0, 4), slots, lambda: following and stream.expect(following.pop()))
    wait_until(lambda: len(web.asked) == SAMPLES, "all are requested")

    web.files.clear()
    (second,) = stream.answer(message(2, 4, 4), slots)
    assert first.bad == second.bad == []
    assert np.array_equal(slot_arrays(slots[1][0], stream.layout)["x"], rows)
    assert len(web.asked) == SAMPLES


def test_an_order_that_servers_are_asked_for_is_reported_by_itself(streams, web):
    """Its samples may be long on their way, and the rows before it are filled."""
    stream, slots = start(streams, web)
    heard = deque([(message(2, 4, 4), [])])
    (first,) = stream.answer(message(1, 0, 4), slots, lambda: None, heard)
    assert first.orders == [1]
    assert len(heard) == 1


def test_what_orders_needed_is_forgotten(streams, web):
    """The room of a worker is as large as before."""
    stream, slots = start(streams, web)
    following = [message(2, 4, 4)]
    for order in (message(1, 0, 4), message(2, 4, 4)):
        list(stream.answer(order, slots, lambda: following and stream.expect(following.pop())))
    assert streams.storage.room.has(streams.storage.room.bytes_max)


def test_an_order_without_room_is_requested_when_it_begins(streams, web, rows, monkeypatch):
    """Its samples are not read one by one."""
    stream, slots = start(streams, web)
    room = streams.storage.room
    room.count(room.bytes_max)
    stream.expect(message(1, 0, 4))
    room.count(-room.bytes_max)
    monkeypatch.delattr(RemoteBytes, "_read")

    (done,) = stream.answer(message(1, 0, 4), slots)
    assert done.bad == []
    assert np.array_equal(slot_arrays(slots[1][0], stream.layout)["x"][:4], rows[:4])
