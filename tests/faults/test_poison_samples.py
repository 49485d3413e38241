"""Samples that kill their decoder: quarantined after two workers, and the stream continues."""

import json
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

import pytest

import batchd_client
from support.bombs import (
    empty_bmp,
    empty_gif,
    endless_jpeg,
    enveloped_webp,
    flat_webp,
    starved_gif,
    starved_jpeg,
    starved_webp,
)
from support.cgroups import memory_group
from support.commands import batchd
from support.expected import Expected
from support.images import write_photos
from support.kernel import is_stopped
from support.seen import samples, see
from support.settings import folder_stream, list_stream
from support.waiting import wait_until

POISON = 17
BOMBS = (
    *(empty_gif, empty_bmp, flat_webp, endless_jpeg) * 2,
    *(starved_gif, starved_jpeg, starved_webp, enveloped_webp),
)
"""Twelve files; the first kinds are at their formats' limits, and would take 600 MB each."""


def worker_deaths(daemon):
    """Return how each dead worker ended, as the log has it."""
    return [line["how"] for line in daemon.log_lines("worker ended")]


@pytest.mark.parametrize(
    ("step", "chunk_rows"),
    [
        ("worker.sample.decoded", 8),
        *(pytest.param("worker.sample.begin", rows, marks=pytest.mark.slow) for rows in (1, 8, "auto")),
        *(pytest.param("worker.sample.decoded", rows, marks=pytest.mark.slow) for rows in (1, "auto")),
    ],
)
def test_poison_sample_ends_two_workers_and_is_quarantined(start_daemon, step, chunk_rows):
    """The fault is a segmentation fault anywhere in a chunk; a substitute takes the sample's row.

    No later worker dies of it, and `batchd bad` names the file, so the log is not needed.
    """
    daemon = start_daemon(chunk_rows=chunk_rows, lasting_faults={f"{step}:{POISON}": "segv"})
    path = Expected(daemon.config).path(POISON)

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=3)
        epochs = [samples(see(stream)) for _ in range(3)]
        (bad,) = connection.bad("photos").samples
        status = connection.status()
    printed = batchd("bad", "photos", address=daemon.address).stdout
    (listed,) = json.loads(batchd("bad", "photos", "--json", address=daemon.address).stdout)["samples"]

    assert worker_deaths(daemon) == ["signal 11 (SIGSEGV)"] * 2
    assert [set(epoch) for epoch in epochs] == [set(range(40)) - {POISON}] * 3
    assert (bad.sample, bad.path) == (listed["sample"], listed["path"]) == (POISON, path)
    assert bad.reason == "quarantined: it ended 2 workers, the last by signal 11 (SIGSEGV)"
    assert f"{path}: quarantined: it ended 2 workers" in printed
    assert status["streams"][0]["quarantined_samples"] == status["streams"][0]["bad_samples"] == 1
    (line,) = daemon.log_lines("sample quarantined")
    assert line["sample"] == POISON
    assert path in daemon.log


def test_what_stands_in_for_a_poison_sample_is_what_stands_in_for_any_bad_one(start_daemon, photos, tmp_path):
    """The row has the bytes that it would have if the file were broken."""
    poisoned = start_daemon(lasting_faults={f"worker.sample.read:{POISON}": "segv"})
    paths = [Expected(poisoned.config).path(sample) for sample in range(40)]
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"")
    listed = [str(broken) if sample == POISON else path for sample, path in enumerate(paths)]
    list_file = tmp_path / "list.txt"
    list_file.write_text("".join(f"{path} {sample // 10}\n" for sample, path in enumerate(listed)))
    source = {"type": "list", "path": str(list_file), "root": "/", "allow_outside_root": True}
    repaired = start_daemon({"photos": folder_stream(photos, source=source)}, workers=1)

    with batchd_client.connect(poisoned.address) as one, batchd_client.connect(repaired.address) as other:
        expected = Expected(repaired.config).epoch(0)
        assert see(one.stream("photos", epochs=1)) == see(other.stream("photos", epochs=1)) == expected


def test_a_sample_that_hangs_is_poison_too(start_daemon):
    """The daemon kills its worker after ``sample_timeout_s`` each time, and names the file."""
    daemon = start_daemon(sample_timeout_s=2.0, lasting_faults={f"worker.sample.read:{POISON}": "hang"})
    path = Expected(daemon.config).path(POISON)

    with batchd_client.connect(daemon.address) as connection:
        seen = see(connection.stream("photos", epochs=2))
        (bad,) = connection.bad("photos").samples

    assert worker_deaths(daemon) == ["signal 9 (SIGKILL)"] * 2
    assert {line["reason"] for line in daemon.log_lines("worker killed")} == {"it worked on one sample for 2 s"}
    assert set(samples(seen)) == set(range(40)) - {POISON}
    assert (bad.sample, bad.path) == (POISON, path)


def join(group, daemon):
    """Put a daemon, and all that it will start, into a cgroup: the fork server joins it."""
    daemon.worker_pids()  # one that was forked between the list and the move would not be in it
    for pid in (daemon.pid, *daemon.offspring()):
        (group / "cgroup.procs").write_text(str(pid))


def leave(group):
    """Move all processes out of a cgroup, so that it can be removed.

    A worker that the fork server starts meanwhile is in the cgroup that the fork server had then.
    """

    def have_left():
        pids = (group / "cgroup.procs").read_text().split()
        for pid in pids:
            with suppress(ProcessLookupError):  # the process has ended
                (group.parent / "cgroup.procs").write_text(pid)
        return not pids

    wait_until(have_left, "no process is in the cgroup")


def memory_kills(group):
    """Return the number of processes in a cgroup that the kernel has killed for lack of memory."""
    return int((group / "memory.oom_control").read_text().split("oom_kill ")[1].split()[0])


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_any_number_of_samples_may_take_all_the_memory(start_daemon, photos, workers):
    """Twelve of forty, the configured maximum, each end two workers at most.

    All are of one epoch, and without substitutes: a worker that already has a sample of the next
    epoch, or as a substitute, may be the third.
    """
    poisons = set(range(1, 37, 3))
    daemon = start_daemon(
        {"photos": folder_stream(photos, max_bad_fraction=1, on_error="mask")},
        workers=workers,
        lasting_faults={f"worker.sample.read:{sample}": "eat" for sample in poisons},
    )
    with memory_group(256 << 20) as group:
        join(group, daemon)
        with batchd_client.connect(daemon.address) as connection:
            batches = [
                (batch["index"].copy(), batch["valid"].copy()) for batch in connection.stream("photos", epochs=1)
            ]
            bad = connection.bad("photos").samples
        leave(group)

    assert {one.sample for one in bad} == poisons
    assert {one.reason for one in bad} == {
        "quarantined: it ended 2 workers, the last by signal 9 (SIGKILL), out of memory"
    }
    assert len(worker_deaths(daemon)) == 2 * len(poisons)
    assert {int(sample) for index, valid in batches for sample in index[valid]} == set(range(40)) - poisons


def test_a_worker_that_is_refused_memory_says_so(start_daemon):
    """Python's MemoryError under an address space limit has the same outcome as a kill."""
    faults = {f"worker.sample.begin:{POISON}": "stop", f"worker.sample.read:{POISON}": "eat"}
    daemon = start_daemon(workers=1, lasting_faults=faults)

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=1)
        for _ in range(2):
            (worker,) = wait_until(
                lambda: {pid for pid in daemon.worker_pids() if is_stopped(pid)}, "a worker has the sample"
            )
            resource.prlimit(worker, resource.RLIMIT_AS, (1 << 30, 1 << 30))
            os.kill(worker, signal.SIGCONT)
            wait_until(lambda worker=worker: worker not in daemon.worker_pids(), "it is dead")
        seen = see(stream)
        (bad,) = connection.bad("photos").samples

    assert worker_deaths(daemon) == ["exit status 12"] * 2
    assert (bad.sample, bad.reason) == (
        POISON,
        "quarantined: it ended 2 workers, the last by exit status 12, out of memory",
    )
    assert set(samples(seen)) == set(range(40)) - {POISON}


def test_twelve_small_files_that_announce_large_images_end_no_worker(start_daemon, tmp_path):
    """Two workers have 600 MB: each file is bad by its header, and the kernel kills no worker."""
    write_photos(tmp_path, {"good": 24})
    names = [f"{number}-{bomb.__name__}" for number, bomb in enumerate(BOMBS)]
    for name, bomb in zip(names, BOMBS, strict=True):
        (tmp_path / "good" / f"{name}.jpg").write_bytes(bomb(9_900, 10_000))
    daemon = start_daemon({"photos": folder_stream(tmp_path, max_bad_fraction=1)}, workers=2)
    with memory_group(600 << 20) as group:
        join(group, daemon)
        with batchd_client.connect(daemon.address) as connection:
            stream = connection.stream("photos", epochs=3)
            for _ in range(3):
                assert len(set(samples(see(stream)))) == 24
            bad = connection.bad("photos").samples
        kills = memory_kills(group)
        leave(group)

    assert kills == 0
    assert worker_deaths(daemon) == []
    assert sorted(Path(one.path).stem for one in bad) == sorted(names)
    assert all("announces 10000 x 9900" in one.reason for one in bad)


def test_poison_samples_in_one_chunk_are_found_one_after_the_other(start_daemon, photos):
    """Each kills two workers at most."""
    poisons = {POISON, POISON + 1, 3}
    daemon = start_daemon(
        {"photos": folder_stream(photos, max_bad_fraction=0.5)},
        chunk_rows=256,
        workers=1,
        lasting_faults={f"worker.sample.begin:{sample}": "segv" for sample in poisons},
    )
    with batchd_client.connect(daemon.address) as connection:
        seen = see(connection.stream("photos", epochs=1))
        bad = connection.bad("photos").samples

    assert {one.sample for one in bad} == poisons
    assert len(worker_deaths(daemon)) == 2 * len(poisons)
    assert set(samples(seen)) == set(range(40)) - poisons


def test_a_poison_sample_is_treated_as_any_bad_one(start_daemon, photos):
    """The sample is masked, or the stream stops with the reason."""
    streams = {on_error: folder_stream(photos, on_error=on_error) for on_error in ("mask", "fail")}
    daemon = start_daemon(streams, lasting_faults={f"worker.sample.begin:{POISON}": "segv"})
    with batchd_client.connect(daemon.address) as connection:
        with pytest.raises(batchd_client.errors.StreamStopped, match=rf"sample {POISON}.*quarantined"):
            see(connection.stream("fail", epochs=1))
        batches = list(connection.stream("mask", epochs=1))
        (row,) = [(batch, row) for batch in batches for row in range(batch.samples) if not batch["valid"][row]]
        assert row[0]["index"][row[1]] == POISON
        assert not row[0]["image"][row[1]].any()
        assert sum(batch.samples for batch in batches) == 40
        del row, batches


def test_crashes_that_no_single_file_explains_stop_the_stream(start_daemon, photos, tmp_path):
    """More deadly samples than odd files can explain stop the stream: no data is lost silently."""
    file = min(photos.rglob("*.jpg"))
    list_file = tmp_path / "list.txt"
    list_file.write_text(f"{file.relative_to(photos)} 0\n" * 64)
    streams = {"photos": list_stream(list_file, photos, shuffle=False, max_bad_fraction=1.0)}
    deadly = {f"worker.sample.begin:{sample}": "segv" for sample in range(0, 64, 4)}
    daemon = start_daemon(streams, lasting_faults=deadly)

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=1)
        with pytest.raises(
            batchd_client.errors.StreamStopped, match="something is wrong with the decoder or the machine"
        ):
            see(stream)
        assert "11 samples ended their workers" in connection.status()["streams"][0]["stopped"]
