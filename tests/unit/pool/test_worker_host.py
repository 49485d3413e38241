"""Small parts of a worker host: mapped paths, kept indexes, the memory of rows."""

import errno
import os
import time
from hashlib import sha256

import pytest

from batchd.pool.messages import INDEX_PART_BYTES, INDEX_PARTS_AHEAD
from batchd.pool.worker_host import indexes, workers
from batchd.pool.worker_host.indexes import UNUSED_S, IndexDamaged, IndexFolder, ReceivedIndex
from batchd.pool.worker_host.streams import PathMap
from batchd.pool.worker_host.workers import OrderMemory
from batchd_wire.fields import Field, Rooms, Varying, place_fields

# --- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("/data", "/mnt/data"),
        ("/data/train/cat", "/mnt/data/train/cat"),
        ("/data/val", "/val"),
        ("/data/val/1.jpg", "/val/1.jpg"),
        ("/data/valid", "/mnt/data/valid"),
        ("/database", "/database"),
        ("data/x", "data/x"),
        ("s3://bucket/data", "s3://bucket/data"),
        ("", ""),
    ],
)
def test_paths_are_mapped_by_whole_components(there, here) -> None:
    """The longest prefix that matches counts."""
    assert PathMap([("/data", "/mnt/data"), ("/data/val", "/val")]).here(there) == here


def test_all_paths_in_a_value_are_mapped() -> None:
    """Keys, such as the paths of file versions, and nested values are mapped, too."""
    mapped = PathMap([("/a", "/b")]).here({"/a/1": ["/a", 3, None, {"x": "/a/y"}], "root": "/a/", "n": 1.5})

    assert mapped == {"/b/1": ["/b", 3, None, {"x": "/b/y"}], "root": "/b/", "n": 1.5}


def test_the_whole_tree_may_be_elsewhere() -> None:
    """A container may have the host's files below a folder."""
    assert PathMap([("/", "/host")]).here("/data/x") == "/host/data/x"
    assert PathMap([("/host", "/")]).here(["/host/data", "/host"]) == ["/data", "/"]


# --- indexes --------------------------------------------------------------------------------------

CONTENT = bytes(range(256)) * 4096 * 5 + b"the end"
DIGEST = sha256(CONTENT).hexdigest()


@pytest.fixture
def received():
    """A function that makes a completely received index, which is closed after the test."""
    made = []

    def receive(content=CONTENT, digest=DIGEST):
        made.append(ReceivedIndex(digest, len(content)))
        for first in range(0, len(content), INDEX_PART_BYTES):
            made[-1].add(memoryview(content)[first : first + INDEX_PART_BYTES])
        return made[-1]

    yield receive
    for one in made:
        one.close()


def test_an_index_is_asked_for_in_order_with_a_bound(received) -> None:
    """Each part that arrives allows one more, and no part is requested twice."""
    index = received(b"")
    index.size = len(CONTENT)

    assert index.next_offsets() == [part * INDEX_PART_BYTES for part in range(INDEX_PARTS_AHEAD)]
    assert index.next_offsets() == []
    index.add(memoryview(CONTENT)[:INDEX_PART_BYTES])
    assert index.next_offsets() == [INDEX_PARTS_AHEAD * INDEX_PART_BYTES]
    index.restart()
    assert index.next_offsets()[0] == INDEX_PART_BYTES


def test_an_index_with_another_digest_is_not_sealed(received) -> None:
    """It also accepts no more bytes than its size."""
    index = received(CONTENT, "0" * 64)
    assert index.is_complete
    with pytest.raises(IndexDamaged, match="digest"):
        index.seal()
    with pytest.raises(IndexDamaged, match="more than"):
        index.add(memoryview(b"x"))


def test_a_kept_index_is_loaded_sealed(received, tmp_path) -> None:
    """It can no longer change, and an index with another digest is not found."""
    folder = IndexFolder(tmp_path / "kept")
    index = received()
    index.seal()
    folder.keep(index)

    loaded = folder.load(DIGEST, len(CONTENT))

    assert os.pread(loaded.descriptor, len(CONTENT) + 1, 0) == CONTENT
    with pytest.raises(PermissionError):
        os.pwrite(loaded.descriptor, b"x", 0)
    assert folder.load("1" * 64, len(CONTENT)) is None
    loaded.close()


def test_unused_indexes_are_removed(received, tmp_path, monkeypatch) -> None:
    """Indexes expire after some time, or beyond a total size; abandoned files are removed, too."""
    folder = IndexFolder(tmp_path)
    old = tmp_path / f"{'a' * 64}.index"
    half = tmp_path / f"{'b' * 64}.17.unfinished"
    other = tmp_path / "notes.txt"
    for file in (old, half, other):
        file.write_bytes(b"x")
        os.utime(file, (time.time() - UNUSED_S - 60,) * 2)
    index = received()
    index.seal()

    folder.keep(index)
    assert {file.name for file in tmp_path.iterdir()} == {f"{DIGEST}.index", "notes.txt"}
    os.utime(tmp_path / f"{DIGEST}.index", (time.time() - 60,) * 2)
    monkeypatch.setattr(indexes, "FOLDER_BYTES_MAX", len(CONTENT) + 100)
    second = received(CONTENT[1:], sha256(CONTENT[1:]).hexdigest())
    second.seal()
    folder.keep(second)
    assert {file.name for file in tmp_path.iterdir()} == {f"{second.digest}.index", "notes.txt"}


def test_a_folder_that_cannot_be_written_costs_a_transfer(received, tmp_path) -> None:
    """The index is used all the same."""
    (tmp_path / "file").write_text("")
    folder = IndexFolder(tmp_path / "file" / "folder")
    index = received()
    index.seal()

    folder.keep(index)

    assert folder.load(DIGEST, len(CONTENT)) is None
    assert IndexFolder(None).load(DIGEST, len(CONTENT)) is None


# --- scratch memory -------------------------------------------------------------------------------


@pytest.fixture
def memory():
    """Memory for 64 rows of two fields, with 3,000 bytes for each row."""
    memory = OrderMemory(1, place_fields([Field("a", "uint8", (2000,)), Field("b", "uint8", (1000,))], 64))
    yield memory
    memory.close()


def used_bytes(memory):
    return os.fstat(memory.descriptor).st_blocks * 512


def test_only_the_rows_of_an_order_take_memory(memory) -> None:
    """An order with fewer rows takes no more memory."""
    assert used_bytes(memory) == 0
    memory.take(4)
    few = used_bytes(memory)
    memory.take(2)
    assert used_bytes(memory) == few < memory.layout.slot_bytes / 3
    memory.take(64)
    assert used_bytes(memory) >= 64 * 3000


def test_an_order_has_the_layout_of_its_bucket() -> None:
    """Memory for 8 rows of 4,000 bytes, or for 2 of 16,000: of either, no more than it takes."""
    varying = Field("a", "uint8", (20_000,), Varying("ragged", (0,)))
    layout = place_fields([varying, Field("a_length", "int32", ())], 8, Rooms("a", ((8, 4000), (2, 16_000))))
    memory = OrderMemory(1, layout)
    memory.take(8)
    many = used_bytes(memory)
    memory.take(1, 1)
    assert many == used_bytes(memory) <= layout.slot_bytes < 2 * 20_000
    os.pwrite(memory.descriptor, b"\1" * 16_000, layout.of(1).fields[0].offset)

    assert [len(frame) for frame in memory.frames(memory.memory(), 8)] == [32_000, 32]
    assert [bytes(frame) for frame in memory.frames(memory.memory(), 1, 1)] == [b"\1" * 16_000, bytes(4)]
    memory.close()


def test_an_idle_memory_gives_its_pages_back(memory, monkeypatch) -> None:
    """The pages are zeros afterwards; memory in use keeps its pages."""
    monkeypatch.setattr(workers, "KEPT_IDLE_S", -1.0)
    memory.take(64)
    os.pwrite(memory.descriptor, b"former", memory.layout.fields[0].offset)
    memory.rest()
    assert used_bytes(memory) > 0
    memory.release()
    memory.rest()

    assert used_bytes(memory) == 0
    assert bytes(memory.memory()) == bytes(memory.layout.slot_bytes)


def test_rows_are_cut_as_those_of_a_slot(memory) -> None:
    """Field follows field, each from its first row on."""
    first, second = memory.layout.fields
    os.pwrite(memory.descriptor, b"\1" * 2000 * 3, first.offset)
    os.pwrite(memory.descriptor, b"\2" * 1000 * 3, second.offset)

    frames = memory.frames(memory.memory(), 3)

    assert [bytes(frame) for frame in frames] == [b"\1" * 6000, b"\2" * 3000]


def test_no_memory_is_an_error_before_the_worker_touches_it(memory, monkeypatch) -> None:
    """The kernel reports it when the memory is reserved."""

    def refuse(*_arguments):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(workers.os, "posix_fallocate", refuse)

    with pytest.raises(OSError, match="memory"):
        memory.take(1)
    assert memory.is_free
