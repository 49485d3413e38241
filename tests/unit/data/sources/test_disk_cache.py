"""A cache on disk returns stored samples, also after a restart; a damaged file is no error."""

import errno
import mmap
import os
import resource
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchd.config.tree import Config, StreamConfig
from batchd.data.pipeline.image.options import Decode, RandomResizedCrop
from batchd.data.sources.cache import disk as disk_cache
from batchd.data.sources.cache.disk import FULL_PAUSE_S, DiskCache, Trouble, records_start, troubles
from batchd.data.sources.files.options import FolderSource
from batchd.stream.cache_file import (
    CacheOnDisk,
    CacheUnusable,
    cache_files,
    cache_path,
    cache_problems,
    file_problem,
)
from batchd.stream.cache_memory import CacheSpec
from support.kernel import descriptors_of

SAMPLES = 1000
BUDGET_BYTES = 4 << 20
SAMPLE_BYTES = 5000
KEY = "5e" * 32


class Opened:
    """Caches of a folder, opened as by daemons and workers."""

    def __init__(self, folder):
        self.spec = CacheSpec("encoded", KEY, SAMPLES, BUDGET_BYTES, str(folder))
        self.path = cache_path(self.spec)
        self._daemons = []
        self._workers = []

    def daemon(self, **changes):
        """Open the caches as a starting daemon does."""
        self._daemons.append(CacheOnDisk(self.spec._replace(**changes)))
        return self._daemons[-1]

    def worker(self):
        """Open the caches as one more worker of the last daemon does."""
        with self._daemons[-1].opened() as descriptors:
            self._workers.append(DiskCache(*descriptors))
        return self._workers[-1]

    def restart(self):
        """End the daemon and its workers; start another daemon and return a worker of it."""
        self.close()
        self.daemon()
        return self.worker()

    def close(self):
        """Close all caches."""
        for one in [*self._workers, *self._daemons]:
            one.close()
        self._workers, self._daemons = [], []


@pytest.fixture
def opened(tmp_path):
    before = len(descriptors_of(os.getpid()))
    opened = Opened(tmp_path)
    yield opened
    opened.close()
    assert len(descriptors_of(os.getpid())) == before


def content(sample, size=SAMPLE_BYTES):
    """The unique bytes of a sample."""
    return sample.to_bytes(4, "little") * (size // 4)


def keep(cache, sample, size=SAMPLE_BYTES):
    cache.keep(sample, b"facts", [content(sample, size)])


def held(cache, samples=range(SAMPLES), size=SAMPLE_BYTES):
    """Return the samples that a cache has, after a check of their bytes."""
    kept = []
    for sample in samples:
        found = cache.find(sample)
        if found is not None:
            assert [bytes(part) for part in found] == [b"facts", content(sample, size)]
            kept.append(sample)
    return kept


def place_of(path, sample):
    """The start of a sample's record, according to the file."""
    return int.from_bytes(path.read_bytes()[4096 + 8 * sample :][:8], "little")


def flip(path, place):
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def test_a_restart_finds_everything(opened):
    """Any worker may have stored it; later records follow it."""
    opened.daemon()
    workers = [opened.worker() for _ in range(3)]
    for sample in range(100):
        keep(workers[sample % 3], sample)
    assert [held(worker) for worker in workers] == [list(range(100))] * 3

    worker = opened.restart()
    keep(worker, 200)

    assert held(worker) == [*range(100), 200]
    assert held(opened.restart()) == [*range(100), 200]


def test_samples_of_all_lengths_come_back(opened):
    """One sample is longer than all before it, and one is empty."""
    opened.daemon()
    worker = opened.worker()
    for sample, size in enumerate((4, 1 << 20, 0, 400)):
        keep(worker, sample, size)

    for sample, size in enumerate((4, 1 << 20, 0, 400)):
        assert held(worker, [sample], size) == [sample]


def test_it_never_grows_beyond_its_budget(opened):
    """Stored samples stay, and a larger budget gives room again."""
    daemon = opened.daemon()
    worker = opened.worker()
    for sample in range(SAMPLES):
        keep(worker, sample)
    kept = held(worker)
    assert BUDGET_BYTES * 0.9 < opened.path.stat().st_size <= BUDGET_BYTES
    assert daemon.used_bytes == opened.path.stat().st_size

    daemon.resize(2 * BUDGET_BYTES)
    keep(worker, SAMPLES - 1)

    assert held(worker) == [*kept, SAMPLES - 1]


@pytest.mark.parametrize("offset", [0, 9, 13, 21, 26, 40, 3000])
def test_a_flipped_bit_loses_only_one_sample(opened, offset):
    """This holds for any bit of its record; one log line reports it, and a new store works."""
    opened.daemon()
    worker = opened.worker()
    for sample in range(3):
        keep(worker, sample)
    flip(opened.path, place_of(opened.path, 1) + offset)

    assert held(worker) == [0, 2]
    assert held(worker) == [0, 2]
    daemon = opened._daemons[-1]
    daemon.tell_troubles()
    daemon.tell_troubles()
    assert daemon.spoilt_samples == 1
    keep(worker, 1)
    assert held(worker) == held(opened.restart()) == [0, 1, 2]


def test_a_truncated_file_has_lost_only_the_samples_behind_the_cut(opened):
    """Open workers and a restart get no error, and no bus error."""
    opened.daemon()
    worker = opened.worker()
    for sample in range(4):
        keep(worker, sample)
    os.truncate(opened.path, place_of(opened.path, 2) + 100)

    assert held(worker) == [0, 1]
    os.truncate(opened.path, place_of(opened.path, 1) + 100)
    assert held(opened.restart()) == [0]
    os.truncate(opened.path, 100)
    worker = opened.restart()
    assert held(worker) == []
    keep(worker, 5)
    assert held(opened.restart()) == [5]


def test_a_worker_that_starts_after_a_truncation_or_removal_works(opened):
    """It relies on no part of the file, not even on its beginning."""
    opened.daemon()
    for sample in range(3):
        keep(opened.worker(), sample)
    os.truncate(opened.path, 10)
    worker = opened.worker()
    assert held(worker) == []
    keep(worker, 5)
    assert held(opened.worker()) == []
    keep(opened.restart(), 6)

    opened.path.unlink()

    assert held(opened.worker()) == [6]
    assert held(opened.restart()) == []


def test_a_file_that_cannot_be_opened_any_more_is_read_and_not_written(opened, monkeypatch):
    """The daemon gets a report."""
    daemon = opened.daemon()
    keep(opened.worker(), 1)
    really = os.open

    def refuse(path, *arguments):
        if path == f"/proc/self/fd/{daemon.descriptors[2]}":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return really(path, *arguments)

    monkeypatch.setattr(disk_cache.os, "open", refuse)
    worker = opened.worker()
    keep(worker, 2)

    assert held(worker) == [1]
    assert troubles(daemon.descriptors[1], 0) == [Trouble(0, errno.EIO)]


def test_an_entry_without_its_record_is_absent(opened):
    """After a power cut it may point to zeros, to another sample, or beyond the end."""
    opened.daemon()
    keep(opened.worker(), 1)
    place, end = place_of(opened.path, 1), opened.path.stat().st_size
    os.truncate(opened.path, end + (1 << 16))
    with opened.path.open("r+b") as file:
        for sample, entry in enumerate((end, place, end + (1 << 20), 1 << 63, 4096, place + 1), 2):
            file.seek(4096 + 8 * sample)
            file.write(entry.to_bytes(8, "little"))

    assert held(opened.restart()) == [1]


@pytest.mark.parametrize("damage", [b"BATCHDD0", b"other"])
def test_a_file_with_a_wrong_beginning_is_replaced(opened, damage):
    """It has another format or is another cache's. Old workers write into the removed file."""
    opened.daemon()
    old = opened.worker()
    keep(old, 1)
    with opened.path.open("r+b") as file:
        file.write(damage)
    memory = opened._daemons.pop()
    memory.close()

    opened.daemon()
    keep(old, 2)

    assert held(opened.worker()) == []


def test_records_of_another_cache_are_not_returned(opened):
    """They are at the places of this cache's records.

    A disk may return old blocks of a deleted file.
    """
    opened.daemon()
    keep(opened.worker(), 1)
    opened.close()
    other = opened.spec._replace(key="5f" * 32)
    start = records_start(SAMPLES)
    records = opened.path.read_bytes()[start:]
    entry = place_of(opened.path, 1)
    CacheOnDisk(other).close()
    with cache_path(other).open("r+b") as file:
        file.seek(4096 + 8)
        file.write(entry.to_bytes(8, "little"))
        file.seek(start)
        file.write(records)

    opened.daemon(key="5f" * 32)
    assert held(opened.worker()) == []


def test_two_daemons_do_not_fill_one_file(opened):
    """The second daemon gets the reason, and can use another cache of the same folder.

    A leftover worker holds no lock.
    """
    first = opened.daemon()
    opened.worker()
    with pytest.raises(CacheUnusable, match=r"another daemon fills .*: give one of them another cache_dir"):
        CacheOnDisk(opened.spec)
    opened.daemon(key="5f" * 32)
    assert [one.in_use for one in cache_files(Path(opened.spec.folder))] == [True, True]

    first.close()

    opened.daemon()


def test_files_that_other_users_could_change_are_not_used(opened, tmp_path):
    """The file is writable for others, or a link."""
    opened.daemon()
    opened.close()
    opened.path.chmod(0o620)
    with pytest.raises(CacheUnusable, match="can be written by other users"):
        opened.daemon()
    opened.path.rename(tmp_path / "elsewhere")
    opened.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheUnusable, match=r"is a link: remove it"):
        opened.daemon()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_reported_with_its_owner(opened):
    """The daemon reports it, and so does a check by a user other than the daemon's.

    In the latter case it may be valid.
    """
    opened.daemon()
    opened.close()
    os.chown(opened.path, 12345, -1)
    says = "belongs to user 12345, so its content cannot be trusted: run the daemon as that user, or remove it"
    with pytest.raises(CacheUnusable, match=says):
        opened.daemon()
    assert file_problem(opened.spec) == f"{opened.path} {says}"


def test_a_missing_folder_is_named(opened, tmp_path):
    """The error names the command that creates it."""
    with pytest.raises(CacheUnusable, match=r"gone does not exist: create it on a local disk \(mkdir -p"):
        opened.daemon(folder=str(tmp_path / "gone"))


class Clock:
    """A clock for caches."""

    def __init__(self):
        self.s = 1000.0

    def __call__(self):
        return self.s


def test_a_full_disk_is_tried_again_later(opened, monkeypatch):
    """A limit of the file size fails writes: samples are not stored, and no part is a record."""
    later = Clock()
    monkeypatch.setattr(disk_cache, "monotonic", later)
    daemon = opened.daemon()
    worker = opened.worker()
    keep(worker, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (opened.path.stat().st_size + 1000, hard))
    try:
        keep(worker, 2)
        later.s += FULL_PAUSE_S
        keep(worker, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert held(worker) == [1]
    assert troubles(daemon.descriptors[1], 0) == [Trouble(2, errno.ENOSPC), Trouble(3, errno.EFBIG)]
    keep(worker, 4)
    assert held(worker) == [1]

    later.s += FULL_PAUSE_S
    keep(worker, 5)

    assert held(worker) == held(opened.restart()) == [1, 5]


def test_a_failing_disk_makes_a_sample_absent(opened, monkeypatch):
    """Reads and writes fail."""
    daemon = opened.daemon()
    worker = opened.worker()
    keep(worker, 1)

    def fail(*_call):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(disk_cache.os, "preadv", fail)
        assert worker.find(1) is None
    with monkeypatch.context() as patch:
        patch.setattr(disk_cache.os, "writev", fail)
        keep(worker, 2)

    assert held(worker) == [1]
    assert troubles(daemon.descriptors[1], 0) == [Trouble(1, errno.EIO), Trouble(2, errno.EIO)]


def test_no_process_can_truncate_the_index(opened):
    """The index is mapped, so a truncation would kill its readers."""
    opened.daemon()
    memory = opened._daemons[-1].descriptors[0]
    with pytest.raises(PermissionError):
        os.truncate(memory, 4096)
    with mmap.mmap(memory, 0) as mapped:
        assert len(mapped) == records_start(SAMPLES)


@given(
    damage=st.lists(
        st.tuples(st.floats(0, 1), st.sampled_from(["flip", "zero", "cut", "shift"])), min_size=1, max_size=6
    )
)
@settings(max_examples=60, deadline=None)
def test_for_any_damage_a_sample_is_right_or_absent(damage):
    """Bits, pages and the end of the file change, in header, index and records.

    The file is open during the change, or opened after it.
    """
    with TemporaryDirectory() as folder:
        opened = Opened(folder)
        opened.daemon()
        worker = opened.worker()
        for sample in range(20):
            keep(worker, sample, 400)
        for where, how in damage:
            size = max(1, opened.path.stat().st_size)
            place = int(where * (size - 1))
            content_now = bytearray(opened.path.read_bytes())
            match how:
                case "flip":
                    content_now[place : place + 1] = bytes([content_now[place] ^ 16]) if content_now else b""
                case "zero":
                    content_now[place : place + 512] = bytes(min(512, size - place))
                case "cut":
                    del content_now[max(place, 1) :]
                case "shift":
                    content_now[place:place] = b"\1"
            with opened.path.open("r+b") as file:
                file.write(content_now)
                file.truncate()
            held(worker, range(30), 400)
        worker = opened.restart()
        held(worker, range(30), 400)
        for sample in range(20):
            keep(worker, sample, 400)
        assert held(worker, range(30), 400) == list(range(20))
        opened.close()


def problems_of(folder, *sizes, **changes):
    """The problems of streams whose caches are in a folder, with these sizes, by key."""
    keys = {
        "source": FolderSource(path=Path("/data")),
        "batch_size": 4,
        "pipeline": (Decode(), RandomResizedCrop(size=(8, 8))),
    }
    streams = {
        f"s{number}": StreamConfig(**keys, cache="encoded", cache_dir=folder, cache_size=size, **changes)
        for number, size in enumerate(sizes)
    }
    return {problem.path: problem.message for problem in cache_problems(Config(streams=streams))}


def test_check_reports_problems_of_folders_and_sizes(tmp_path):
    """The check opens no cache."""
    (tmp_path / "file").touch()

    assert problems_of(tmp_path, 1 << 30, 1 << 30) == {}
    assert problems_of(tmp_path, 1 << 30, 1 << 20) == {
        "streams.s1.cache_size": "s1 and s0 share one file, so both need the same cache_size"
    }
    assert problems_of(tmp_path / "gone", 1 << 30)["streams.s0.cache_dir"].startswith(f"{tmp_path}/gone does not exist")
    assert problems_of(tmp_path / "file", 1 << 30) == {"streams.s0.cache_dir": f"{tmp_path / 'file'} is not a folder"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_another_user_is_reported(tmp_path):
    """The report has a remedy."""
    tmp_path.chmod(0o500)

    assert "may not write into" in problems_of(tmp_path, 1 << 30)["streams.s0.cache_dir"]
