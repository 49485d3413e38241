"""Reading a sample gives the whole file, or the reason why it cannot be read."""

import errno
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.files.reader import SampleReader
from batchd.data.storage import reader as reader_module
from batchd.data.storage import rows
from batchd.data.storage.access import Storage
from support.source_files import make, scan_list


def reader_of(folder: Path, *names: str, max_bytes: int = 1000) -> SampleReader:
    text = "".join(f"{name} 0\n" for name in names)
    return SampleReader(scan_list(folder / "list.txt", text), max_bytes, Storage())


def reason(reader: SampleReader, sample: int = 0) -> str:
    with pytest.raises(SampleUnreadable) as caught:
        reader.read(sample)
    return str(caught.value)


def test_a_sample_is_the_whole_file(tmp_path: Path) -> None:
    """One buffer serves small, large and again small files."""
    sizes = [1, 100, 3 << 20, 5, (8 << 20) + 1, 7]
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).write_bytes(random.Random(number).randbytes(size))
    reader = reader_of(tmp_path, *map(str, range(len(sizes))), max_bytes=1 << 30)

    for number, size in enumerate(sizes):
        assert bytes(reader.read(number)) == random.Random(number).randbytes(size)


def test_one_huge_file_does_not_cost_for_ever(tmp_path: Path) -> None:
    """The buffer that is kept for further files has a limit."""
    (tmp_path / "huge").write_bytes(bytes(20 << 20))
    reader = reader_of(tmp_path, "huge", max_bytes=1 << 30)

    assert len(reader.read(0)) == 20 << 20
    assert len(reader._buffer) <= 8 << 20


def test_a_buffer_takes_only_the_memory_that_samples_need(tmp_path: Path) -> None:
    """Photographs of 100 KiB do not take a buffer of 1 MiB."""
    (tmp_path / "photo").write_bytes(bytes(100 << 10))
    program = f"""if True:
        from pathlib import Path
        from unit.data.storage.test_sample_reader import reader_of
        private = lambda: sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if "Anonymous:" in line)
        reader = reader_of(Path({str(tmp_path)!r}), "photo", max_bytes=1 << 20)
        before = private()
        length = len(reader.read(0))
        print(length, len(reader._buffer), private() - before)
    """
    said = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=Path(__file__).parents[3])
    length, buffer_bytes, grown_kib = map(int, said.split())

    assert (length, buffer_bytes) == (100 << 10, 1 << 20)
    assert 100 <= grown_kib < 512


@pytest.mark.parametrize("is_built", [True, False])
def test_each_thing_that_is_no_readable_file_has_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_built: bool
) -> None:
    """No read hangs, and no such path is taken for a picture, with the extension and without it."""
    monkeypatch.setattr(rows, "IS_BUILT", is_built and rows.IS_BUILT)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good").write_bytes(b"good")
    (tmp_path / "empty").touch()
    (tmp_path / "long").write_bytes(bytes(1001))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    names = ["gone", "empty", "long", "folder", "fifo", "device", "socket", "loop", "x" * 300, "empty/x"]
    reader = reader_of(tmp_path, *names, "good")
    assert bytes(reader.read(len(names))) == b"good"

    assert [reason(reader, sample) for sample in range(len(names))] == [
        "No such file or directory",
        "is empty",
        "has 1001 bytes, more than max_bytes = 1000",
        "is a directory, not a regular file",
        "is a FIFO, not a regular file",
        "is a character device, not a regular file",
        "No such device or address",
        "Too many levels of symbolic links",
        "File name too long",
        "Not a directory",
    ]
    assert bytes(reader.read(len(names))) == b"good"


@pytest.mark.skipif(not rows.IS_BUILT, reason="the extension is not built")
def test_files_after_the_first_are_read_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python opens only the first file of a folder; a file as long as the buffer is read, too."""
    sizes = [5, reader_module.FIRST_BUFFER_BYTES, 7]
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).write_bytes(random.Random(number).randbytes(size))
    reader = reader_of(tmp_path, "0", "1", "2", max_bytes=1 << 30)
    reader.read(0)
    assert bytes(reader.read(1)) == random.Random(1).randbytes(sizes[1])
    before = descriptors()

    monkeypatch.setattr(os, "open", None)

    assert bytes(reader.read(0)) == random.Random(0).randbytes(5)
    assert bytes(reader.read(2)) == random.Random(2).randbytes(7)
    assert descriptors() == before


@pytest.mark.skipif(not rows.IS_BUILT, reason="the extension is not built")
def test_the_call_reads_whole_files_that_fit_and_no_others(tmp_path: Path) -> None:
    """It leaves the others to Python, which says what is wrong."""
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to("a")
    folder = os.open(tmp_path, os.O_RDONLY)

    def read(name: bytes, room: int, bytes_max: int = 100, flags: int = os.O_RDONLY) -> tuple[int, bytes]:
        memory = memoryview(bytearray(b"." * room))
        return rows.read_file(folder, name, flags, memory, bytes_max, 0), bytes(memory)

    try:
        assert read(b"a", 12) == (10, b"0123456789..")
        assert read(b"a", 11, 10) == (10, b"0123456789.")
        assert read(b"a", 10) == (0, b"." * 10)
        assert read(b"a", 12, 9) == (0, b"." * 12)
        assert read(b"link", 12) == (10, b"0123456789..")
        assert read(b"link", 12, flags=os.O_NOFOLLOW) == (0, b"." * 12)
        assert read(b"", 12) == read(b"b", 12) == read(b".", 12) == (0, b"." * 12)
        with pytest.raises(TypeError, match="read-write"):
            rows.read_file(folder, b"a", 0, b"." * 12, 100, 0)  # type: ignore[arg-type]  it cannot be written to
    finally:
        os.close(folder)


@pytest.mark.skipif(not Path("/sys/devices/system/cpu/possible").exists(), reason="needs sysfs")
def test_a_file_with_fewer_bytes_than_its_length_is_a_bad_sample(tmp_path: Path) -> None:
    """A file of sysfs is one that shrinks between two calls: it announces a page and has less."""
    (tmp_path / "good").write_bytes(b"good")
    (tmp_path / "link").symlink_to("/sys/devices/system/cpu/possible")
    reader = reader_of(tmp_path, "good", "link", max_bytes=1 << 20)
    reader.read(0)

    assert reason(reader, 1).startswith("changed while it was read: ")


def test_a_file_without_permission_is_a_bad_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is simulated, because the kernel refuses root nothing."""

    def refuse(*_arguments: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    reader = reader_of(make(tmp_path, "a"), "a")
    monkeypatch.setattr(os, "open", refuse)

    assert reason(reader) == "Permission denied"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_worker_that_is_out_of_something_does_not_blame_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A lack of descriptors or memory in the worker makes no good sample bad."""

    def fail(*_arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    reader = reader_of(make(tmp_path, "a"), "a")
    monkeypatch.setattr(os, "open", fail)

    with pytest.raises(OSError, match=os.strerror(number)):
        reader.read(0)


@pytest.mark.parametrize(
    ("size_afterwards", "message"),
    [(3, "changed while it was read: 3 bytes, not 10"), (30, "changed while it was read: 11 bytes or more, not 10")],
)
def test_a_file_that_changes_while_it_is_read_is_a_bad_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_afterwards: int, message: str
) -> None:
    """Half of an old file and half of a new one together are no sample."""
    file = tmp_path / "a"
    file.write_bytes(bytes(10))
    reader = reader_of(tmp_path, "a")
    fstat = os.fstat

    def change_after_looking(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        os.truncate(file, size_afterwards)
        return status

    monkeypatch.setattr(reader_module.os, "fstat", change_after_looking)

    assert reason(reader) == message


def descriptors() -> list[str]:
    return sorted(entry.name for entry in Path("/proc/self/fd").iterdir())


def test_a_disk_that_fails_is_a_bad_sample_and_closes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error is reported with its reason, and no descriptor stays open."""

    def fail(*_arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    reader = reader_of(make(tmp_path, "a"), "a")
    monkeypatch.setattr(os, "readv", fail)
    before = descriptors()

    assert reason(reader) == "Input/output error"
    assert descriptors() == before


def test_a_read_in_pieces_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems may return a file in pieces."""
    readv = os.readv
    monkeypatch.setattr(os, "readv", lambda descriptor, buffers: readv(descriptor, [buffers[0][:4]]))

    assert bytes(reader_of(make(tmp_path, "a"), "a").read(0)) == b"bytes of a"


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize(
    ("modified_s", "as_of_s", "is_read"),
    [(0, -10, False), (-3600, -10, True), (3600, 10, True), (3600, -10, False), (0, 10, True)],
    ids=["rewritten", "another mode", "time in the future", "rewritten in the future", "before the scan"],
)
def test_a_file_that_was_written_after_the_scan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_built: bool, modified_s: int, as_of_s: int, is_read: bool
) -> None:
    """That is one whose times, of modification and of change, are both later.

    All times are from now on.
    """
    monkeypatch.setattr(rows, "IS_BUILT", is_built and rows.IS_BUILT)
    (tmp_path / "a").write_bytes(b"a file")
    now = time.time()
    os.utime(tmp_path / "a", (now, now + modified_s))
    storage = Storage()
    storage.as_of_ns = int((now + as_of_s) * 1e9)
    reader = SampleReader(scan_list(tmp_path / "list.txt", "a 0\n"), 1000, storage)

    for _time in range(2):  # the second one without the search for links
        if is_read:
            assert bytes(reader.read(0)) == b"a file"
        else:
            assert reason(reader).endswith("s after its source was scanned; restart the daemon, or the command")
