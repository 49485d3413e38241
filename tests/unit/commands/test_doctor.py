"""The report of `batchd doctor` on simulated machines.

The machines are folders with copies of the kernel's files.
"""

import errno
import os
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from batchd.commands.doctor import checks, decoding, examine, storage
from batchd.commands.doctor.decoding import DecoderSpeed
from batchd.commands.doctor.machine import Finding, Level, Machine, Running
from batchd.commands.doctor.storage import PlaceSpeed
from batchd.config.load import load_config
from batchd.data.pipeline.image import jpeg_box
from batchd.data.samples.location import Url
from batchd.data.sources.composed.options import ConcatSource
from batchd.data.sources.files.options import FolderSource, ListSource
from batchd.data.storage.access import Storage
from batchd.stream.rings import DescriptorPlan, file_size_refusal, plan_rings
from batchd_wire.status import read_status
from support.images import write_photos
from support.machines import GROUP, made_machine
from support.settings import folder_stream, write_settings
from support.waiting import wait_until

GIBIBYTE = 1 << 30


def levels(findings):
    return [(finding.subject, finding.level) for finding in findings]


def test_a_good_machine_has_no_findings(tmp_path):
    """No check of the machine has a warning or a remedy."""
    machine = made_machine(tmp_path)
    findings = [
        checks.check_memory(machine, GIBIBYTE),
        checks.check_locked_memory(machine, GIBIBYTE),
        *checks.check_huge_pages(machine),
        checks.check_swap(machine),
        checks.check_nodes(machine),
        *checks.check_count(machine, 8),
        checks.check_flags(machine),
        checks.check_governor(machine),
        checks.check_files(machine, None, 0),
        checks.check_processes(machine, 8),
        checks.check_kernel(machine, {"memfd": "", "sealing": "", "pidfd": "", "populate": ""}),
        checks.check_source(machine),
        *checks.check_date(machine, 2e9, 1e9),
    ]

    assert [finding for finding in findings if finding.level is not Level.OK or finding.advice] == []


def test_a_machine_with_hidden_files_is_no_problem(tmp_path):
    """A container may hide any file of the kernel: unreadable values are not reported."""
    machine = made_machine(tmp_path)
    for folder in ("proc", "sys"):
        shutil.rmtree(tmp_path / folder)
    findings = [
        checks.check_memory(machine, GIBIBYTE),
        *checks.check_huge_pages(machine),
        checks.check_swap(machine),
        checks.check_nodes(machine),
        *checks.check_count(machine, 8),
        checks.check_flags(machine),
        checks.check_governor(machine),
        checks.check_processes(machine, 8),
        checks.check_source(machine),
    ]

    assert {finding.level for finding in findings} <= {Level.OK, Level.NOTE}


# --- memory ---------------------------------------------------------------------------------------


def test_memory_that_is_too_small_is_a_problem_with_its_key(tmp_path):
    """The daemon refuses to start by the same rule."""
    finding = checks.check_memory(made_machine(tmp_path), 32 * GIBIBYTE)

    assert finding.level is Level.PROBLEM
    assert "32.0 GiB available, 32.0 GiB needed" in finding.found
    assert finding.advice.startswith("reduce memory = in [daemon], or add memory")


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_control_group_counts(tmp_path, version):
    """Both versions count; the remedy is the group's limit, not the machine's memory."""
    files = (
        {f"{GROUP}/memory.max": str(2 * GIBIBYTE), f"{GROUP}/memory.current": str(GIBIBYTE)}
        if version == 2
        else {
            "proc/self/cgroup": "4:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(2 * GIBIBYTE),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(GIBIBYTE),
        }
    )
    finding = checks.check_memory(made_machine(tmp_path, files), GIBIBYTE)

    assert finding.level is Level.PROBLEM
    assert "1.0 GiB available" in finding.found
    assert "MemoryMax=" in finding.advice


def test_the_slots_of_a_running_daemon_are_not_missing(tmp_path):
    """The rings need them, and they are reserved already."""
    files = {"proc/meminfo": f"MemAvailable: {2 * GIBIBYTE // 1024} kB\n"}
    machine = made_machine(tmp_path, files)
    assert checks.check_memory(machine, 4 * GIBIBYTE).level is Level.PROBLEM

    finding = checks.check_memory(machine, 4 * GIBIBYTE, Running(3 * GIBIBYTE))
    assert finding.level is Level.OK
    assert "5.0 GiB available (3.0 GiB of it in slots of the running daemon), 4.0 GiB needed" in finding.found


@pytest.mark.parametrize(("group", "level"), [("batchd", Level.OK), ("other", Level.PROBLEM)])
def test_a_limit_counts_only_the_slots_of_its_own_group(tmp_path, group, level):
    """The daemon of another control group uses nothing of this one's limit."""
    files = {
        f"{GROUP}/memory.max": str(4 * GIBIBYTE),
        f"{GROUP}/memory.current": str(3 * GIBIBYTE),
        "proc/7/cgroup": f"0::/system.slice/{group}.service\n",
    }
    running = Running(3 * GIBIBYTE, frozenset({7}))

    assert checks.check_memory(made_machine(tmp_path, files), 3 * GIBIBYTE, running).level is level


def test_a_small_limit_of_locked_memory_is_a_note(tmp_path):
    """It matters only to trainers that let devices read the ring."""
    machine = made_machine(tmp_path, limits={"locked memory": 8 << 20})

    assert checks.check_locked_memory(machine, GIBIBYTE).level is Level.NOTE
    assert checks.check_locked_memory(machine, 1 << 20).level is Level.OK


@pytest.mark.parametrize(
    ("choice", "level"),
    [("never", Level.NOTE), ("within_size", Level.OK), ("always", Level.NOTE), ("advise", Level.OK)],
)
def test_huge_pages_are_described_by_their_effect_on_slots(tmp_path, choice, level):
    """None of the settings is a warning."""
    path = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    (finding,) = checks.check_huge_pages(made_machine(tmp_path, {path: f"x [{choice}] y\n"}))

    assert finding.level is level


def test_unused_huge_pages_are_counted(tmp_path):
    """They reduce the memory that batchd can use."""
    files = {"proc/meminfo": "MemAvailable: 1 kB\nHugePages_Total:    1024\nHugepagesize:       2048 kB\n"}
    *_, finding = checks.check_huge_pages(made_machine(tmp_path, files))

    assert "2.0 GiB are reserved" in finding.found
    assert finding.advice.endswith("sysctl vm.nr_hugepages=0")


@pytest.mark.parametrize(("free", "level"), [(100, Level.OK), (50, Level.WARNING)])
def test_swap_matters_if_it_is_used(tmp_path, free, level):
    """Slots that are on the disk are slow."""
    files = {"proc/meminfo": f"SwapTotal: 100 kB\nSwapFree: {free} kB\n"}

    assert checks.check_swap(made_machine(tmp_path, files)).level is level


def test_several_nodes_are_a_note(tmp_path):
    """The note has the command that pins a daemon to one node."""
    finding = checks.check_nodes(made_machine(tmp_path, {"sys/devices/system/node/node1/cpulist": "8-15"}))

    assert (finding.level, finding.found) == (Level.NOTE, "2 nodes")


# --- processors -----------------------------------------------------------------------------------


def test_workers_beyond_the_processors_are_a_note(tmp_path):
    """They help if they wait for files. The note has the affinity and the number of processors."""
    (finding,) = checks.check_count(made_machine(tmp_path, affinity=4), 16)

    assert finding.level is Level.NOTE
    assert finding.found == "4 of 8 CPUs usable; 16 workers"
    assert "storage-bound" in finding.advice


def test_a_quota_counts_and_so_does_its_throttling(tmp_path):
    """A group that was throttled half of the time has too low a limit, whatever its number."""
    files = {f"{GROUP}/cpu.max": "150000 100000\n", f"{GROUP}/cpu.stat": "nr_periods 1000\nnr_throttled 500\n"}
    count, throttled = checks.check_count(made_machine(tmp_path, files), 8)

    assert count.level is Level.NOTE
    assert "1.5 by the quota of the control group" in count.found
    assert throttled.level is Level.WARNING
    assert "50% of its periods" in throttled.found


CROPS = [{"op": "decode"}, {"op": "random_resized_crop", "size": [224, 224]}, {"op": "normalize"}]
PLAIN = [{"op": "decode"}, {"op": "resize", "size": [224, 224]}]


def about_pool(folder: Path, streams: dict[str, dict], cpus: int = 8, **daemon: object) -> list[Finding]:
    """The findings on worker hosts, for a configuration with a folder of photographs."""
    write_photos(folder / "photos", {"": 1})
    shared = {"workers": 8, "worker_address": "127.0.0.1:7072", **daemon}
    config = load_config(write_settings(folder / "batchd.toml", streams, shared))
    with Storage(config.daemon.storage_limits()) as files:
        return list(checks.check_pool(config, plan_rings(config, files), cpus))


def test_cheaper_remedies_are_named_before_worker_hosts(tmp_path, monkeypatch):
    """They are more CPUs, a cache, access points and less work; the network's rate is named."""
    monkeypatch.setattr(checks, "interface_of", lambda _address: ("eth0", 25e9 / 8))
    photos = folder_stream(tmp_path / "photos", pipeline=CROPS, cache="off")
    (finding,) = about_pool(tmp_path, {"photos": photos}, cpus=32)
    assert (finding.subject, finding.level) == ("worker hosts of photos", Level.NOTE)
    row_bytes = float(finding.found.removeprefix("rows of ").partition(" KiB")[0]) * 1024
    assert row_bytes == pytest.approx(4 * 224 * 224 * 3, rel=0.01)
    assert "eth0 of 25 Gbit/s carries" in finding.found
    rows_per_s = int(finding.found.partition("carries ")[2].split()[0].replace(",", ""))
    assert rows_per_s == pytest.approx(0.9 * 25e9 / 8 / row_bytes, rel=0.01)
    for remedy in ("workers = 32", "cache =", "access points", "on the GPU"):
        assert remedy in finding.advice


def test_a_stream_without_cheaper_remedies_is_ready_for_worker_hosts(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "interface_of", lambda _address: ("", None))
    photos = folder_stream(tmp_path / "photos", pipeline=PLAIN, cache="encoded", cache_memory="1MiB")
    (finding,) = about_pool(tmp_path, {"photos": photos})
    assert (finding.level, finding.advice) == (Level.OK, "")
    assert "a network of 10 Gbit/s" in finding.found


def test_worker_hosts_are_not_mentioned_where_none_can_connect(tmp_path):
    """There is no address for them, or the streams are local."""
    photos = folder_stream(tmp_path / "photos", pipeline=CROPS)
    (tmp_path / "none").mkdir()
    assert about_pool(tmp_path, {"photos": photos | {"decode_at": "here"}}) == []
    config = load_config(write_settings(tmp_path / "none" / "batchd.toml", {"photos": photos}, {"workers": 1}))
    assert list(checks.check_pool(config, {}, 8)) == []


@pytest.mark.parametrize(
    ("flags", "level"),
    [("flags : sse2 avx2", Level.OK), ("flags : sse2 sse4_2", Level.WARNING), ("Features : fp asimd", Level.OK)],
)
def test_instructions_are_those_that_decoders_use(tmp_path, flags, level):
    """The test has both kinds of processors."""
    assert checks.check_flags(made_machine(tmp_path, {"proc/cpuinfo": f"processor : 0\n{flags}\n"})).level is level


@pytest.mark.parametrize(
    ("governor", "driver", "level"),
    [
        ("powersave", "acpi-cpufreq", Level.WARNING),
        ("powersave", "intel_pstate", Level.OK),
        ("performance", "acpi-cpufreq", Level.OK),
    ],
)
def test_a_low_clock_is_a_warning_where_it_matters(tmp_path, governor, driver, level):
    """With some drivers "powersave" does not slow the processor down."""
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    files = {f"{folder}/scaling_governor": governor, f"{folder}/scaling_driver": driver}

    assert checks.check_governor(made_machine(tmp_path, files)).level is level


# --- limits, kernel, clocks -----------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "level"), [(50, Level.PROBLEM), (500, Level.WARNING), (5000, Level.OK)])
def test_open_files_are_judged_by_the_daemons_own_plan(tmp_path, limit, level):
    """There are too few to start, too few for all trainers, or enough."""
    plan = DescriptorPlan(limit=limit, own=70, slots=400, connections=100)
    machine = made_machine(tmp_path, limits={"files": limit})
    finding = checks.check_files(machine, plan, 1)

    assert finding.level is level
    assert ("LimitNOFILE=" in finding.advice) == (level is not Level.OK)


def test_a_limit_of_file_sizes_is_judged_by_the_largest_slot(tmp_path):
    """Shared memory is a file, too; the daemon refuses to start in the same words."""
    write_photos(tmp_path / "photos", {"cat": 2}, height=8, width=8)
    file = write_settings(tmp_path / "batchd.toml", {"photos": folder_stream(tmp_path / "photos")}, {})
    with Storage() as storage:
        rings = plan_rings(load_config(file, {}, {}), storage)
    need = rings["photos"].layout.slot_bytes
    few, enough = (made_machine(tmp_path / str(size), limits={"file size": size}) for size in (need - 1, need))
    finding = checks.check_file_size(few, rings)

    assert finding.level is Level.PROBLEM
    assert all(text in finding.advice for text in (f"{need:,}", f"{need - 1:,}", "ulimit -f", "LimitFSIZE="))
    assert file_size_refusal(rings, need - 1).message == finding.advice
    assert checks.check_file_size(enough, rings).level is Level.OK
    assert file_size_refusal(rings, resource.RLIM_INFINITY) is None


def test_processes_are_limited_by_user_and_group(tmp_path):
    """The tighter limit counts; the user's limit does not apply to root."""
    files = {f"{GROUP}/pids.max": "100\n", f"{GROUP}/pids.current": "90\n"}
    machine = made_machine(tmp_path, files)
    assert checks.check_processes(machine, 8).level is Level.PROBLEM
    assert "TasksMax=" in checks.check_processes(machine, 8).advice

    (tmp_path / GROUP / "pids.max").write_text("max\n")
    few = {"processes": 10}
    assert "LimitNPROC=" in checks.check_processes(made_machine(tmp_path / "b", limits=few), 8).advice
    assert checks.check_processes(made_machine(tmp_path / "c", limits=few, user=0), 8).level is Level.OK


def test_a_users_running_threads_count_against_the_limit(tmp_path):
    """The kernel counts threads.

    Those of other users do not count, nor does a daemon that would be replaced.
    """
    status = "Name: x\nUid:\t{user}\t0\t0\t0\nThreads:\t{threads}\n"
    files = {
        "proc/5/status": status.format(user=1000, threads=30),
        "proc/7/status": status.format(user=1000, threads=60),
        "proc/8/status": status.format(user=0, threads=500),
    }
    machine = made_machine(tmp_path, files, limits={"processes": 100})

    assert checks.check_processes(machine, 8).found == "10 more, 48 needed for 8 workers"
    assert checks.check_processes(machine, 8).level is Level.PROBLEM
    running = Running(pids=frozenset({7}))
    assert checks.check_processes(machine, 8, running).found == "70 more, 48 needed for 8 workers"


def test_the_enforced_limits_are_those_that_count(monkeypatch):
    """These are the soft ones; a daemon raises only that of open files to the hard one."""
    monkeypatch.setattr(resource, "getrlimit", lambda number: (number, 1000 + number))

    assert Machine().limits == {
        "files": 1000 + resource.RLIMIT_NOFILE,
        "locked memory": resource.RLIMIT_MEMLOCK,
        "file size": resource.RLIMIT_FSIZE,
        "processes": resource.RLIMIT_NPROC,
    }


def test_a_kernel_without_memfd_is_a_problem_and_one_without_populate_is_not(tmp_path):
    """A seccomp profile may block the call."""
    machine = made_machine(tmp_path)
    finding = checks.check_kernel(machine, {"memfd": "Operation not permitted", "sealing": "", "pidfd": ""})

    assert finding.level is Level.PROBLEM
    assert "without memfd (Operation not permitted)" in finding.found
    assert checks.check_kernel(machine, {"memfd": "", "populate": "Invalid argument"}).level is Level.OK


def test_calls_that_the_kernel_refuses_are_reported(monkeypatch):
    """One kernel allows everything; another forbids memfd_create."""
    assert {name: why for name, why in checks.try_features().items() if name in checks.WANTED} == dict.fromkeys(
        ("memfd", "sealing", "pidfd"), ""
    )

    def refuse(*_arguments):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert checks.try_features()["memfd"] == "Operation not permitted"


@pytest.mark.parametrize(("source", "level"), [("tsc", Level.OK), ("kvm-clock", Level.OK), ("hpet", Level.WARNING)])
def test_a_slow_clock_is_a_warning(tmp_path, source, level):
    """The daemon reads the clock for every batch."""
    path = "sys/devices/system/clocksource/clocksource0/current_clocksource"

    assert checks.check_source(made_machine(tmp_path, {path: source})).level is level


def test_the_date_is_not_before_the_installation(tmp_path):
    """If systemd manages the clock, the report says whether it is synchronised."""
    machine = made_machine(tmp_path)
    assert levels(checks.check_date(machine, 1e9, 1.1e9)) == [("date", Level.WARNING)]
    folder = tmp_path / checks.TIMESYNC
    folder.mkdir(parents=True)
    assert levels(checks.check_date(machine, 2e9, 1e9)) == [("date", Level.NOTE)]
    (folder / "synchronized").touch()
    assert levels(checks.check_date(machine, 2e9, 1e9)) == [("date", Level.OK)]


# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        (
            [DecoderSpeed("simplejpeg 1", 4.0, 10.0), DecoderSpeed("cv2 5", 16.0, 16.0)],
            [Level.OK, Level.OK, Level.NOTE],
        ),
        ([DecoderSpeed("simplejpeg 1", 10.0, 10.5)], [Level.WARNING, Level.NOTE]),
        ([DecoderSpeed("simplejpeg 1", 40.0, 90.0)], [Level.NOTE, Level.NOTE]),
        ([DecoderSpeed("simplejpeg 1", 4.0)], [Level.OK, Level.NOTE]),
        ([DecoderSpeed("cv2 5", 4.0, 10.0)], [Level.OK, Level.NOTE, Level.WARNING]),
        ([DecoderSpeed("libjpeg-turbo 2", 4.0, 10.0), DecoderSpeed("simplejpeg 1", 4.0, 4.0)], [Level.OK] * 3),
        (
            [DecoderSpeed("libjpeg-turbo 2", 9.0, 9.0), DecoderSpeed("simplejpeg 1", 4.0, 9.0)],
            [Level.WARNING, Level.OK, Level.OK],
        ),
        ([], [Level.PROBLEM]),
    ],
)
def test_a_decoder_without_simd_is_detected_by_its_speed(speeds, expected):
    """Only the first decoder counts.

    No decoder of crops is a note, and no simplejpeg at all a warning.
    """
    assert [finding.level for finding in decoding.check_decoding(speeds)] == expected


def test_a_missing_extension_for_resampling_is_a_warning():
    """Without it batches are only slower, and a compiler is enough to build it."""
    finding = decoding.check_resampling(is_built=False)

    assert finding.level is Level.WARNING
    assert "install a C compiler" in str(finding)
    assert decoding.check_resampling(is_built=True).level is Level.OK


@pytest.mark.thorough
def test_decoders_are_measured_with_simd_and_without():
    """They run in separate processes; the first one is that of workers."""
    first, *_ = decoding.measure_decoders()

    assert first.name.startswith("libjpeg-turbo" if jpeg_box.IS_BUILT else "simplejpeg")
    assert first.megapixel_ms > 0
    assert first.plain_ms is not None


class SlowStorage:
    """Files of this machine on a simulated slow storage, with a clock that only reads advance."""

    def __init__(self, monkeypatch):
        self._now_s = 0.0
        self._known = set()
        self.read = set()
        self._open, self._pread, self._stat = os.open, os.pread, os.stat
        for name in ("open", "pread", "stat"):
            monkeypatch.setattr(storage.os, name, getattr(self, name))
        monkeypatch.setattr(storage, "perf_counter", self.perf_counter)

    def perf_counter(self):
        """Return the time; no two calls return the same value."""
        self._now_s += 1e-9
        return self._now_s

    def _find(self, path):
        if str(path) not in self._known:
            self._known.add(str(path))
            self._now_s += 0.003

    def stat(self, path, **named):
        """Look a file up."""
        self._find(path)
        return self._stat(path, **named)

    def open(self, path, flags, *rest, **named):
        """Look a file up, which takes 3 ms the first time."""
        self._find(path)
        return self._open(path, flags, *rest, **named)

    def pread(self, descriptor, length, place):
        """Read a piece, which takes 2 ms the first time."""
        piece = (os.fstat(descriptor).st_ino, place)
        if piece not in self.read:
            self.read.add(piece)
            self._now_s += 0.002
        return self._pread(descriptor, length, place)


# --- storage --------------------------------------------------------------------------------------


def test_the_places_of_a_source_are_those_of_its_parts_without_duplicates(tmp_path):
    """The paths in a list are relative to its folder, so the files there are measured."""
    photos = FolderSource(type="folder", path=tmp_path / "photos")
    listed = ListSource(type="list", path=tmp_path / "lists" / "a.tsv")
    both = ConcatSource(type="concat", sources=(photos, listed, photos))

    assert storage.places_of(both) == [tmp_path / "photos", tmp_path / "lists"]


@pytest.mark.parametrize(
    ("kind", "speed", "level"),
    [
        ("ext4", PlaceSpeed(10, 900.0, 0.1, 1e8), Level.OK),
        ("ext4", PlaceSpeed(10, 50.0, 0.1, 1e4), Level.OK),
        ("ext4", PlaceSpeed(10, 50.0, 0.1, 1e8), Level.WARNING),
        ("ext4", PlaceSpeed(10, 900.0, 8.0, 1e8), Level.WARNING),
        ("nfs4", PlaceSpeed(10, 900.0, 0.1, 1e8), Level.NOTE),
        ("fuse.sshfs", PlaceSpeed(10, 900.0, 0.1, 1e8), Level.NOTE),
        ("nfs4", PlaceSpeed(failure="it has not answered for 10 s"), Level.PROBLEM),
        ("ext4", None, Level.NOTE),
    ],
)
def test_a_place_is_judged_by_its_speed_and_a_network_is_named(tmp_path, kind, speed, level):
    """Small files have no meaningful sequential speed."""
    mounts = f"22 1 8:1 / / rw - ext4 /dev/sda rw\n23 22 0:9 / /data\\040sets rw - {kind} server:/ rw\n"
    machine = made_machine(tmp_path, {"proc/self/mountinfo": mounts})
    finding = storage.check_place(machine, "photos", Path("/data sets/train"), speed)

    assert finding.level is level
    assert ("over the network" in finding.found) == (kind != "ext4" and speed is not None)


def test_a_folder_is_measured_and_stays_unchanged(tmp_path):
    """It has a few files; some are empty, and some are in folders below."""
    (tmp_path / "below").mkdir()
    for name in ("a", "b", "below/c"):
        (tmp_path / name).write_bytes(os.urandom(100_000))
    (tmp_path / "empty").touch()
    speed = storage.measure_place(tmp_path)

    assert (speed.files, speed.mean_bytes, speed.failure) == (3, 100_000, "")
    assert speed.mb_per_s > 0
    assert speed.piece_ms > 0


def test_nothing_is_looked_up_or_read_before_its_measurement(tmp_path, monkeypatch):
    """The storage takes 3 ms to find a file, 2 ms to read a piece, and 0 the second time."""
    small = [tmp_path / f"{number}.jpg" for number in range(50)]
    for file in small:
        file.write_bytes(bytes(1000))
    (tmp_path / "shard.tar").write_bytes(bytes(10 * storage.PIECE_BYTES))
    slow = SlowStorage(monkeypatch)
    speed = storage.measure_place(tmp_path)

    pieces = 50 + 3  # the large one fills up to 200 with the files
    assert (speed.files, len(slow.read)) == (51, pieces)
    assert speed.piece_ms == pytest.approx((51 * 3 + pieces * 2) / pieces, rel=0.01)


def test_no_piece_of_a_single_file_is_read_twice(tmp_path, monkeypatch):
    """The file is a shard with fewer pieces than the measurement could read."""
    (tmp_path / "shard.tar").write_bytes(bytes(10 * storage.PIECE_BYTES))
    slow = SlowStorage(monkeypatch)
    speed = storage.measure_place(tmp_path / "shard.tar")

    assert len(slow.read) == 10
    assert speed.piece_ms == pytest.approx(2, rel=0.01)


def test_unreadable_and_empty_files_are_skipped(tmp_path):
    """They are links to missing files, to folders, and to a FIFO that would block an open.

    Empty files are skipped, too.
    """
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "pipe").symlink_to(tmp_path / "fifo")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "up").symlink_to(tmp_path)
    (tmp_path / "empty").touch()
    assert "no file can be read" in storage.measure_place(tmp_path).failure
    (tmp_path / "photo").write_bytes(bytes(1000))

    assert storage.measure_place(tmp_path).files == 1


def test_a_failed_measurement_has_a_reason(tmp_path):
    """The path is missing, empty, or on a server."""
    assert storage.measure_place(tmp_path / "nothing").failure == "No such file or directory"
    assert "no file can be read" in storage.measure_place(tmp_path).failure
    assert storage.measure_place(Url("s3://bucket/train")) is None


def test_a_storage_that_does_not_answer_blocks_nothing(tmp_path, monkeypatch):
    """A lost file server blocks its readers; the test uses a FIFO without a writer."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    hangs = []

    def hang(_place):
        hangs.append(1)
        fifo.read_bytes()
        hangs.clear()
        return PlaceSpeed()

    monkeypatch.setattr(storage, "_measure", hang)
    monkeypatch.setattr(storage, "ANSWER_TIMEOUT_S", 0.1)
    assert "has not answered for 0.1 s" in storage.measure_place(tmp_path).failure

    assert hangs
    fifo.write_bytes(b"")
    wait_until(lambda: not hangs, "the reader has returned")


# --- surroundings ---------------------------------------------------------------------------------


def test_the_runtime_directory_exists_or_can_be_created(tmp_path):
    """It is not open to more users than it should be."""
    folder = tmp_path / "run"
    assert examine.check_runtime_directory(folder).level is Level.OK
    folder.mkdir(mode=0o750)
    assert examine.check_runtime_directory(folder).level is Level.OK
    folder.chmod(0o777)
    assert examine.check_runtime_directory(folder).level is Level.WARNING
    file = tmp_path / "file"
    file.touch()
    assert examine.check_runtime_directory(file).level is Level.PROBLEM


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_runtime_directory_of_another_user_is_a_problem():
    """The report has the command that helps."""
    assert re.search(r"as root$", examine.check_runtime_directory(Path("/usr/nowhere")).advice)


def test_libraries_must_exist_and_match():
    """Server and client must have one version; extras are optional."""
    there = dict.fromkeys(examine.LIBRARIES, "1.0")
    assert {level for _, level in levels(examine.check_libraries(there))} == {Level.OK}
    assert ("libraries", Level.PROBLEM) in levels(examine.check_libraries({**there, "numpy": None}))
    assert ("libraries", Level.PROBLEM) in levels(examine.check_libraries({**there, "batchd-client": "0.9"}))


def test_a_daemon_of_another_version_is_a_warning():
    """It was not restarted after an upgrade."""
    running = read_status({"daemon": {"version": "1.0", "pid": 7}}).daemon

    assert examine.check_daemon(running, "", "1.0").level is Level.OK
    assert examine.check_daemon(replace(running, version="0.9"), "", "1.0").level is Level.WARNING
    assert examine.check_daemon(None, "no daemon was found", "1.0").level is Level.NOTE


def test_a_core_that_was_slow_for_a_moment_does_not_look_like_a_missing_simd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For both decoders, the best of several rounds counts."""
    rounds = iter([{"simplejpeg": 8.0}, {"simplejpeg": 7.3}, {"simplejpeg": 7.9}, {"simplejpeg": 3.8}])
    monkeypatch.setattr(decoding, "measured_in_a_process", lambda _environment: next(rounds))

    assert decoding.measure_decoders() == [DecoderSpeed("simplejpeg", 3.8, 7.9)]


def test_a_decoder_without_simd_is_found_after_any_number_of_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of measurements is limited."""
    monkeypatch.setattr(decoding, "measured_in_a_process", lambda _environment: {"simplejpeg": 7.5})

    (speed,) = decoding.measure_decoders()
    assert not speed.has_simd
