"""The size of the available memory by each limit, and access to the memory of a slot."""

import errno
import fcntl
import mmap
import os
import re
import resource
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from batchd.runtime import available
from batchd.runtime import slots as slot_memory
from batchd.runtime.available import (
    OOM_KILL_S,
    RESERVE_BYTES,
    UNLIMITED_BYTES,
    OomKills,
    available_bytes,
    holders,
    limit_bytes,
    shortage,
    wait_for_memory,
)
from batchd.runtime.slots import HUGE_PAGE_BYTES, MADV_POPULATE_WRITE, SEALS, SLOT_DESCRIPTORS, SlotPool
from batchd_wire.slot import UNFINISHED, SlotHeader, holds_generation, unpack_header
from support.kernel import descriptors_of

GIBIBYTE = 1 << 30
MEBIBYTE = 1 << 20
SLOT_BYTES = 8192
NOBODY = 65_534


class Machine:
    """A simulated /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self._write(self.proc / "meminfo", "MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable: 8388608 kB\n")
        self.belongs_to("0::/")

    def belongs_to(self, *lines: str) -> None:
        self._write(self.proc / "self" / "cgroup", "\n".join(lines) + "\n")

    def group(self, path: str, **files: object) -> None:
        """Write files of a group."""
        for name, content in files.items():
            self._write(self.cgroups / path / name, f"{content}\n")

    def limit(self, path: str, limit: object, used: int, statistics: str = "") -> None:
        """Set a limit of version 2."""
        self.group(path, **{"memory.max": limit, "memory.current": used, "memory.stat": statistics})

    def limit_v1(self, path: str, limit: object, used: int, statistics: str = "") -> None:
        """Set a limit of version 1."""
        self.group(
            f"memory/{path}",
            **{"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": statistics},
        )

    @property
    def available(self) -> int:
        return available_bytes(self.proc, self.cgroups)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path):
    """A machine with 8 GiB available of 16, without cgroup limits."""
    return Machine(tmp_path)


class Giving:
    """Memory that is released in equal parts, one with each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: int, limit: int = 16 * GIBIBYTE) -> None:
        self.looks = list(looks)
        self.told: list[str] = []
        monkeypatch.setattr(available, "available_bytes", self._look)
        monkeypatch.setattr(available, "limit_bytes", lambda: limit)
        monkeypatch.setattr(available, "LOOK_EVERY_S", 0.0)

    def _look(self) -> int:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


def test_the_daemon_waits_for_memory_that_other_processes_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log reports the wait once, and so does the message to the service manager."""
    giving = Giving(monkeypatch, GIBIBYTE, GIBIBYTE, 2 * GIBIBYTE, 5 * GIBIBYTE)
    with capture_logs() as lines:
        assert wait_for_memory(4 * GIBIBYTE, giving.told.append) is None

    assert giving.looks == [5 * GIBIBYTE]
    assert giving.told == ["waiting for memory: need 4.0 GiB of shared memory, have 960.0 MiB"]
    (line,) = lines
    assert line["event"] == "waiting for memory"
    assert line["reason"] == "need 4.0 GiB of shared memory, have 960.0 MiB"


@pytest.mark.parametrize(
    ("looks", "limit", "left"),
    [((GIBIBYTE, 5 * GIBIBYTE), 4 * GIBIBYTE, 1), ((GIBIBYTE,), 16 * GIBIBYTE, 1), ((5 * GIBIBYTE,), 16 * GIBIBYTE, 1)],
    ids=["can never come", "does not come", "is there"],
)
def test_the_daemon_does_not_wait_for_memory_in_vain(monkeypatch: pytest.MonkeyPatch, looks, limit, left) -> None:
    """A size beyond the machine is refused at once, and one that is not released later."""
    giving = Giving(monkeypatch, *looks, limit=limit)
    monkeypatch.setattr(available, "MEMORY_WAIT_S", 0.01)
    problem = wait_for_memory(4 * GIBIBYTE, giving.told.append)

    assert len(giving.looks) == left
    assert (problem is None) == (looks[0] == 5 * GIBIBYTE)
    assert problem is None or problem.startswith("need 4.0 GiB of shared memory, have 960.0 MiB: set memory =")


def test_processes_that_have_slots_mapped_are_named(tmp_path: Path) -> None:
    """The largest is first; a process that cannot be inspected is left out."""
    line = "7f00{:04x}000-7f00{:04x}000 r--s 00000000 00:01 7 /memfd:{} (deleted)\n"
    for pid, pages in ((12, 3), (7, 512), (9, 0)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "comm").write_text("train.py\n")
        (folder / "maps").write_text(line.format(0, pages, "batchd-slot") + line.format(0, 9, "other"))
    (tmp_path / "99").mkdir()
    (tmp_path / "meminfo").write_text("")

    assert holders(tmp_path) == "train.py (pid 7): 2.0 MiB, train.py (pid 12): 12.0 KiB"


def test_names_of_any_bytes_hide_no_holder(tmp_path: Path) -> None:
    """Names of mapped files and of processes may have any bytes.

    They have invalid UTF-8, and characters that end a line only for Python.
    """
    line = b"7f0000000000-7f0000003000 r--s 00000000 00:01 7 /%b\n"
    for pid, comm in ((7, b"tr\xffin\n"), (8, b"a\x85b\n")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_bytes(comm)
        names = (b"\xff", b"a\x0cb\x1c/memfd:batchd-slot", "a\x85\u2028/memfd:batchd-slot".encode())
        maps = b"".join(line % name for name in (*names, b"memfd:batchd-slot (deleted)"))
        (tmp_path / str(pid) / "maps").write_bytes(maps)
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "maps").write_bytes(b"this is no line of /memfd:batchd-slot\n")

    assert holders(tmp_path) == "tr\ufffdin (pid 7): 12.0 KiB, a\ufffdb (pid 8): 12.0 KiB"


@pytest.mark.parametrize(("limit", "most"), [(None, 16 * GIBIBYTE), (3 * GIBIBYTE, 3 * GIBIBYTE)])
def test_the_largest_possible_memory_is_that_of_the_machine_or_the_group(machine, limit, most) -> None:
    """The amount in use does not matter."""
    if limit is not None:
        machine.belongs_to("0::/a/b")
        machine.limit("a", limit, limit)

    assert limit_bytes(machine.proc, machine.cgroups) == most


def test_without_limits_the_machines_memory_counts(machine) -> None:
    """MemAvailable counts, not MemFree or MemTotal."""
    assert machine.available == 8 * GIBIBYTE


@pytest.mark.parametrize(
    ("vmstat", "kills"),
    [("pgfault 9\noom_kill 3\ndrop_slab 7\n", 3), ("oom_kill_other 5\npgfault 9\n", 0), (None, 0)],
    ids=["counted", "not counted", "no such file"],
)
def test_the_kernels_count_of_processes_killed_for_memory_is_read(machine, vmstat, kills) -> None:
    """Containers may hide the count."""
    oom_kills = OomKills(machine.proc)
    if vmstat is not None:
        (machine.proc / "vmstat").write_text(vmstat)

    assert [oom_kills.explain(1.0, is_killed=True) for _ in range(5)] == [True] * kills + [False] * (5 - kills)


def test_two_kills_for_memory_before_the_first_death_explain_both(machine) -> None:
    """They do not explain a much later death, or a death without a kill."""
    (machine.proc / "vmstat").write_text("oom_kill 3\n")
    oom_kills = OomKills(machine.proc)
    (machine.proc / "vmstat").write_text("oom_kill 6\n")

    assert not oom_kills.explain(1.0, is_killed=False)
    assert oom_kills.explain(1.0, is_killed=True)
    assert oom_kills.explain(2.0, is_killed=True)
    assert not oom_kills.explain(2.0 + OOM_KILL_S, is_killed=True)


def test_a_kernel_that_reports_no_memory_is_assumed_to_have_enough(machine) -> None:
    """The kernel refuses later if the memory cannot be reserved."""
    (machine.proc / "meminfo").write_text("MemTotal: 16777216 kB\n")

    assert machine.available == UNLIMITED_BYTES


def test_the_tightest_group_on_the_way_up_counts(machine) -> None:
    """In version 2, the limit of a slice binds the service in it."""
    machine.belongs_to("0::/system.slice/batchd.service")
    machine.limit("system.slice/batchd.service", 4 * GIBIBYTE, 1 * GIBIBYTE)
    assert machine.available == 3 * GIBIBYTE
    machine.limit("system.slice", 6 * GIBIBYTE, 4 * GIBIBYTE)
    assert machine.available == 2 * GIBIBYTE
    machine.limit("", 5 * GIBIBYTE, 4 * GIBIBYTE)
    assert machine.available == 1 * GIBIBYTE


def test_a_group_without_a_limit_limits_nothing(machine) -> None:
    """Version 2 writes max, version 1 a number near 2^63."""
    machine.belongs_to("5:memory:/jobs", "0::/user.slice")
    machine.limit("user.slice", "max", 3 * GIBIBYTE)
    machine.limit_v1("jobs", 9_223_372_036_854_771_712, 3 * GIBIBYTE)

    assert machine.available == 8 * GIBIBYTE


def test_a_limit_of_version_1_counts(machine) -> None:
    """Its mount may have other controllers, and the parent's limit counts, too."""
    machine.belongs_to("11:cpu,cpuacct:/jobs/9", "7:memory,hugetlb:/jobs/9", "1:name=systemd:/jobs/9", "0::/")
    machine.limit_v1("jobs/9", 4 * GIBIBYTE, 1 * GIBIBYTE)
    assert machine.available == 3 * GIBIBYTE
    machine.limit_v1("jobs", 2 * GIBIBYTE, 1 * GIBIBYTE)
    assert machine.available == 1 * GIBIBYTE


def test_in_a_container_the_visible_root_counts(machine) -> None:
    """The path is that of the host, which is not mounted.

    The container's own limit is at the root of the mounted tree.
    """
    machine.belongs_to("0::/docker/0123456789abcdef")
    machine.limit("", 2 * GIBIBYTE, GIBIBYTE // 2)
    assert machine.available == 3 * GIBIBYTE // 2
    machine.belongs_to("4:memory:/docker/0123456789abcdef", "0::/")
    machine.limit_v1("", GIBIBYTE, GIBIBYTE // 2)
    assert machine.available == GIBIBYTE // 2


@pytest.mark.parametrize("path", ["/../elsewhere", "/a:b/c", "/"])
def test_odd_paths_of_groups_do_no_harm(machine, path) -> None:
    """The path is outside of the namespace, has a colon, or is the root."""
    machine.belongs_to(f"0::{path}")
    machine.limit("", 2 * GIBIBYTE, GIBIBYTE)

    assert machine.available == GIBIBYTE


def test_a_group_over_its_limit_has_nothing_left(machine) -> None:
    """The remaining memory is never negative."""
    machine.limit("", GIBIBYTE, 2 * GIBIBYTE)

    assert machine.available == 0


def test_cached_files_count_as_free_memory(machine) -> None:
    """A group that reads images fills up with cache that the kernel reclaims on demand.

    Shared memory is not part of that cache.
    """
    cached = f"anon {GIBIBYTE}\nfile {7 * GIBIBYTE}\nshmem {GIBIBYTE}\ninactive_file {4 * GIBIBYTE}\nactive_file {2 * GIBIBYTE}"
    machine.limit("", 8 * GIBIBYTE, 8 * GIBIBYTE, cached)
    assert machine.available == 6 * GIBIBYTE


def test_cached_files_of_groups_below_count_in_version_1(machine) -> None:
    """In version 1 the plain names count the group alone, and ``total_`` counts the usage."""
    machine.belongs_to("4:memory:/")
    cached = f"inactive_file 0\nactive_file 0\ntotal_inactive_file {2 * GIBIBYTE}\ntotal_active_file {GIBIBYTE}"
    machine.limit_v1("", 8 * GIBIBYTE, 8 * GIBIBYTE, cached)

    assert machine.available == 3 * GIBIBYTE


def test_the_memory_of_this_machine_can_be_read() -> None:
    """The test reads the real /proc and cgroups, with any values."""
    assert 0 <= available_bytes() < UNLIMITED_BYTES


def test_shortage_reports_need_supply_and_remedy() -> None:
    """The remedy does not offer the memory that is reserved for other processes."""
    text = shortage(3 * GIBIBYTE, 2 * GIBIBYTE + RESERVE_BYTES)

    assert text is not None
    assert "need 3.0 GiB of shared memory, have 2.0 GiB: set memory = to less" in text
    assert "have 0 B" in (shortage(GIBIBYTE, RESERVE_BYTES - 1) or "")


def test_shortage_is_to_the_byte() -> None:
    """Exactly enough is enough, and different numbers are never printed as equal."""
    assert shortage(GIBIBYTE, GIBIBYTE + RESERVE_BYTES) is None
    assert "need 1.0 GiB of shared memory, have 1023.9 MiB" in (shortage(GIBIBYTE, GIBIBYTE + RESERVE_BYTES - 1) or "")


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough


@pytest.fixture
def memory() -> Iterator[SlotPool]:
    memory = SlotPool()
    yield memory
    memory.close()


def header(memory: SlotPool, slot: int) -> bytes:
    return os.pread(memory.readable(slot), 4096, 0)


def test_a_slot_is_sealed_reserved_and_private(memory) -> None:
    """No process can change its size, all its pages exist, and only its owner can open it."""
    memory.create(5, SLOT_BYTES)
    descriptor = memory.writable(5)

    facts = os.fstat(descriptor)
    assert facts.st_size == SLOT_BYTES
    assert facts.st_blocks * 512 == SLOT_BYTES
    assert stat.S_IMODE(facts.st_mode) == 0o600
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == SEALS
    assert not any(os.get_inheritable(one) for one in (descriptor, memory.readable(5)))
    for size in (0, SLOT_BYTES - 1, SLOT_BYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("refused", [None, mmap.MADV_HUGEPAGE, MADV_POPULATE_WRITE])
def test_a_slot_asks_for_the_huge_pages_that_fit_into_it_and_needs_none(memory, monkeypatch, refused) -> None:
    """The requests precede the reservation. With or without them, a slot has its bytes, no more."""
    asked: list[tuple[int, ...]] = []

    class Mapped(mmap.mmap):
        def madvise(self, option: int, *place: int) -> None:
            asked.append((option, *place))
            if option == refused:
                raise OSError(errno.EINVAL, "refused")
            super().madvise(option, *place)

    monkeypatch.setattr(mmap, "mmap", Mapped)
    slot_bytes = 2 * HUGE_PAGE_BYTES + SLOT_BYTES
    memory.create(1, slot_bytes)

    touches = [(MADV_POPULATE_WRITE, start, mmap.PAGESIZE) for start in (0, HUGE_PAGE_BYTES)]
    expected = [(mmap.MADV_HUGEPAGE,), *touches]
    assert asked == expected[: {None: 3, mmap.MADV_HUGEPAGE: 1, MADV_POPULATE_WRITE: 2}[refused]]
    facts = os.fstat(memory.writable(1))
    assert (facts.st_size, facts.st_blocks * 512) == (slot_bytes, slot_bytes)


def test_a_slot_smaller_than_a_huge_page_asks_for_none(memory, monkeypatch) -> None:
    """One would take more memory than the slot has."""
    monkeypatch.setattr(mmap, "mmap", None)
    memory.create(1, HUGE_PAGE_BYTES - mmap.PAGESIZE)

    assert os.fstat(memory.writable(1)).st_blocks * 512 == HUGE_PAGE_BYTES - mmap.PAGESIZE


def huge_page_bytes(descriptor: int) -> int:
    """Read all of a memfd by a new mapping; return how many bytes of it huge pages map."""
    inode = os.fstat(descriptor).st_ino
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped:
        assert not any(mapped[:: mmap.PAGESIZE])
        mappings = Path("/proc/self/smaps").read_text("utf-8", "replace")
    return 1024 * int(re.findall(rf" {inode} +/memfd:.*\n(?:\w+: .*\n)*?ShmemPmdMapped: +(\d+)", mappings)[0])


def test_a_trainer_reads_a_slot_by_huge_pages(memory) -> None:
    """The trainer's mapping needs no request of its own."""
    wanted_bytes = 2 * HUGE_PAGE_BYTES
    with os.fdopen(os.memfd_create("asked"), "r+b") as asked:
        asked.truncate(wanted_bytes)
        with mmap.mmap(asked.fileno(), 0) as mapped:
            mapped.madvise(mmap.MADV_HUGEPAGE)
            mapped[::HUGE_PAGE_BYTES] = bytes(2)
        if huge_page_bytes(asked.fileno()) < wanted_bytes:
            pytest.skip("the kernel gives shared memory no huge pages, or has none left")
    memory.create(1, wanted_bytes + SLOT_BYTES)

    assert huge_page_bytes(memory.readable(1)) == wanted_bytes


def test_slots_have_numbers_and_are_counted_in_bytes(memory) -> None:
    """``batchd status`` shows the reserved bytes."""
    memory.create(1, SLOT_BYTES)
    memory.create(7, 2 * SLOT_BYTES)

    assert 1 in memory
    assert 2 not in memory
    assert memory.slot_bytes(7) == 2 * SLOT_BYTES
    assert memory.total_bytes == 3 * SLOT_BYTES
    assert os.fstat(memory.readable(1)).st_ino != os.fstat(memory.readable(7)).st_ino


def slots_open() -> int:
    names = descriptors_of("self").values()
    return sum("memfd:batchd-slot" in name for name in names) // SLOT_DESCRIPTORS


def test_returned_slots_are_closed_before_a_slot_is_refused(memory, monkeypatch) -> None:
    """They are closed one by one until there is enough: each open one still has its memory."""
    before = slots_open()
    for slot in range(3):
        memory.create(slot, SLOT_BYTES)
    memory.free(range(3))

    def still_open() -> int:
        return slots_open() - before - len(memory._slots)

    monkeypatch.setattr(slot_memory, "_available_bytes", lambda: RESERVE_BYTES + (3 - still_open()) * SLOT_BYTES)
    memory.create(7, 2 * SLOT_BYTES)
    assert still_open() == 1
    with pytest.raises(MemoryError, match="shared memory"):
        memory.create(8, 4 * SLOT_BYTES)
    assert still_open() == 0


def test_closing_releases_everything() -> None:
    """A second close is allowed."""
    before = open_descriptors()
    memory = SlotPool()
    for slot in range(3):
        memory.create(slot, SLOT_BYTES)
    memory.close()
    memory.close()

    assert open_descriptors() == before
    assert memory.total_bytes == 0
    assert 1 not in memory


def test_a_process_that_has_a_slot_mapped_keeps_its_pages(memory) -> None:
    """The daemon may end; the trainer can still read."""
    memory.create(1, SLOT_BYTES)
    os.pwrite(memory.writable(1), b"pixels", 4096)
    with mmap.mmap(memory.readable(1), SLOT_BYTES, prot=mmap.PROT_READ) as mapped:
        memory.close()

        assert mapped[4096:4102] == b"pixels"


def test_both_descriptors_are_the_same_memory(memory) -> None:
    """A trainer sees the bytes that a worker writes."""
    memory.create(1, SLOT_BYTES)
    with (
        mmap.mmap(memory.writable(1), SLOT_BYTES) as worker,
        mmap.mmap(memory.readable(1), SLOT_BYTES, prot=mmap.PROT_READ) as trainer,
    ):
        worker[8000:8003] = b"abc"

        assert trainer[8000:8003] == b"abc"


def test_the_trainers_descriptor_cannot_be_written_or_mapped_for_writing(memory) -> None:
    """The kernel enforces this, not the client."""
    memory.create(1, SLOT_BYTES)
    readable = memory.readable(1)

    assert fcntl.fcntl(readable, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    with pytest.raises(PermissionError):
        mmap.mmap(readable, SLOT_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(readable, b"x", 0)


def test_a_writable_descriptor_for_a_trainer_changes_neither_the_slots_size_nor_our_own_descriptor(memory) -> None:
    """The descriptor maps writable, and the trainer may change its flags.

    Headers are in their places afterwards.
    """
    memory.create(1, SLOT_BYTES)
    theirs = memory.open_writable(1)
    try:
        assert not os.get_inheritable(theirs)
        for size in (0, SLOT_BYTES + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(theirs, size)
        for seal in (fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK):
            with pytest.raises(PermissionError):
                fcntl.fcntl(theirs, fcntl.F_ADD_SEALS, seal)
        with mmap.mmap(theirs, SLOT_BYTES) as trainer:
            trainer[8000:8003] = b"abc"
        fcntl.fcntl(theirs, fcntl.F_SETFL, os.O_APPEND)
        memory.commit(1, SlotHeader(4, 1, 2, 3, 8, 64))
    finally:
        os.close(theirs)
    assert holds_generation(header(memory, 1), 4)
    assert os.pread(memory.readable(1), 3, 8000) == b"abc"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a program as another user")
@pytest.mark.parametrize(("mode", "may"), [(0o600, False), (0o666, True)])
def test_another_user_cannot_reopen_a_descriptor_for_writing(memory, mode, may) -> None:
    """Without the mode, /proc would allow it.

    The second case shows that nothing else prevents it.
    """
    memory.create(1, SLOT_BYTES)
    os.fchmod(memory.writable(1), mode) if may else None
    readable = memory.readable(1)

    done = subprocess.run(
        ["/bin/sh", "-c", "head -c 8 >/dev/null && printf x 1<>/proc/self/fd/0"],
        stdin=readable,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode == 0) is may
    assert ("Permission denied" in done.stderr) is not may
    assert (os.pread(readable, 1, 0) == b"x") is may


def test_the_header_is_unfinished_until_it_is_committed(memory) -> None:
    """A reader with a handle's generation never opens a slot that is being filled."""
    whole = SlotHeader(generation=4, slot=1, epoch=2, step=3, samples=8, payload_bytes=64)
    memory.create(1, SLOT_BYTES)
    memory.reserve(1)
    assert unpack_header(header(memory, 1)).generation == UNFINISHED

    memory.commit(1, whole)
    assert unpack_header(header(memory, 1)) == whole
    assert holds_generation(header(memory, 1), 4)

    memory.reserve(1)
    assert not holds_generation(header(memory, 1), 4)


def test_marking_a_slot_leaves_its_pixels_alone(memory) -> None:
    """The daemon writes only 64 bytes of the header page."""
    memory.create(1, SLOT_BYTES)
    os.pwrite(memory.writable(1), b"\xa5" * SLOT_BYTES, 0)
    memory.reserve(1)
    memory.commit(1, SlotHeader(4, 1, 2, 3, 8, 64))

    assert os.pread(memory.readable(1), SLOT_BYTES, 0)[64:] == b"\xa5" * (SLOT_BYTES - 64)


def test_too_little_memory_makes_no_slot(memory, monkeypatch) -> None:
    """The error is that of a shortage, and nothing is left to clean up."""
    monkeypatch.setattr(slot_memory, "available_bytes", lambda: RESERVE_BYTES + SLOT_BYTES - 1)
    before = open_descriptors()

    with pytest.raises(MemoryError, match=r"need 8\.0 KiB of shared memory, have 7\.9 KiB: set memory ="):
        memory.create(1, SLOT_BYTES)

    assert open_descriptors() == before
    assert 1 not in memory
    assert memory.total_bytes == 0


@contextmanager
def limited(kind: int, number: int) -> Iterator[None]:
    """Set a limit of the kernel for this process for a moment."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def lowest_free_descriptor() -> int:
    number = os.open("/dev/null", os.O_RDONLY)
    os.close(number)
    return number


@pytest.mark.parametrize(
    ("kind", "number", "error"),
    [
        (resource.RLIMIT_FSIZE, lambda: SLOT_BYTES - 1, errno.EFBIG),
        (resource.RLIMIT_NOFILE, lowest_free_descriptor, errno.EMFILE),
        (resource.RLIMIT_NOFILE, lambda: lowest_free_descriptor() + 1, errno.EMFILE),
    ],
    ids=["no room", "no descriptor for the memory", "no descriptor for the trainer"],
)
def test_a_slot_that_cannot_be_made_leaves_nothing_open(memory, monkeypatch, kind, number, error) -> None:
    """This holds for a failure at any step; later the slot can be made."""
    monkeypatch.setattr(slot_memory, "available_bytes", lambda: UNLIMITED_BYTES)
    before = open_descriptors()

    with limited(kind, number()), pytest.raises(OSError) as caught:  # noqa: PT011  the number is what counts
        memory.create(1, SLOT_BYTES)

    assert caught.value.errno == error
    assert open_descriptors() == before
    assert 1 not in memory
    memory.create(1, SLOT_BYTES)
    assert memory.total_bytes == SLOT_BYTES
