"""Memory for one ring only: after a kill, trainers release the dead ring, the next daemon waits.

The daemon runs in a memory cgroup that is a little larger than its ring. The trainers are outside,
but the cgroup is charged for the ring until they unmap it.
"""

import re
import time
from itertools import pairwise

import numpy as np
import pytest

from batchd.runtime.available import holders
from support.cgroups import into, memory_group
from support.waiting import wait_until

MEBIBYTE = 1 << 20
RING_BYTES = 640 * MEBIBYTE
GROUP_BYTES = RING_BYTES + 256 * MEBIBYTE
ROWS = 8
WINDOW = 64
BATCHES = WINDOW + 1
"""Slots of 8 MiB each: a trainer then maps more than the cgroup has besides the ring. That is one
more than can be ready when a daemon is killed: so the trainer waits, and frees the dead ring."""
MANY_KILLS = 100
NO_MEMORY_STATUS = 5


@pytest.fixture
def group():
    """Make the cgroup; it outlives the daemon, as fixtures end in reverse order."""
    with memory_group(GROUP_BYTES) as group:
        yield group


@pytest.fixture(params=["start", "demand"])
def daemon(request, group, tmp_path, start_daemon):
    """Start a daemon in a tight cgroup. Each epoch is one batch, and no two are equal."""
    np.save(tmp_path / "x.npy", np.arange(ROWS, dtype=np.uint8)[:, None] + np.zeros((1, MEBIBYTE), np.uint8))
    stream = {
        "source": {"type": "npy", "path": str(tmp_path / "x.npy"), "field": "x"},
        "batch_size": ROWS,
        "window": WINDOW,
        "pipeline": [],
    }
    options = {"workers": 1, "memory": RING_BYTES, "reserve": request.param}
    return start_daemon({"photos": stream}, through=into(group), **options)


def read_and_kill(daemon, trainer, kills):
    """Kill daemons during a read; return the trainer's batches and each wait in seconds."""
    seen, waits_s = trainer.take(BATCHES), []
    for _ in range(kills):
        killed_s = time.monotonic()
        daemon.kill()
        trainer.begin(do="take", batches=BATCHES)
        daemon.start()
        seen.append(trainer.next_seen())
        waits_s.append(time.monotonic() - killed_s)
        seen += trainer.finish()[0]
    return seen, waits_s


def has_started(daemon):
    """Tell whether it serves; restart one that has exited for memory, as a service manager does."""
    try:
        daemon.wait_ready()
    except AssertionError:
        assert daemon.wait() == NO_MEMORY_STATUS
        daemon.start(ready=False)
        return False
    return True


def check(seen):
    """Check that each position came once, in order, with all its samples."""
    assert all(later.epoch == earlier.epoch + 1 for earlier, later in pairwise(seen))
    assert {tuple(sorted(one.samples)) for one in seen} == {tuple(range(ROWS))}


def held_by(trainer, folder):
    """Return what the log says of a trainer, whoever else holds memory of this machine."""
    folder.mkdir()
    (folder / str(trainer.pid)).symlink_to(f"/proc/{trainer.pid}")
    said = holders(folder)
    assert f"(pid {trainer.pid}): " in said
    return said


@pytest.mark.thorough(after_first=True)
def test_a_killed_daemon_is_followed_by_one_with_as_large_a_ring(daemon, start_trainer, tmp_path):
    """Memory is reserved at the start or on demand. The daemon waits for a stopped trainer."""
    trainer = start_trainer(daemon.address, epochs=1000)
    seen, _waits_s = read_and_kill(daemon, trainer, 1)
    assert len(seen) == 2 * BATCHES

    trainer.stop()
    daemon.kill()
    daemon.start(ready=False)
    (line,) = wait_until(lambda: daemon.log_lines("waiting for memory"), "the daemon waits")
    assert re.match(r"need 6[34]\d\.\d MiB of shared memory, have ", line["reason"])
    # other daemons of the machine may hold more, and only the largest are named
    assert held_by(trainer, tmp_path / "own") in line["held_by"] or line["held_by"].endswith(" more")
    trainer.go_on()
    trainer.begin(do="take", batches=BATCHES)
    wait_until(lambda: has_started(daemon), "there is memory for it")

    check(seen + trainer.finish()[0])
    trainer.quit()


@pytest.mark.slow
@pytest.mark.parametrize("daemon", ["start"], indirect=True)
def test_a_hundred_kills_in_a_tight_group_lose_and_repeat_nothing(daemon, start_trainer):
    """A long run of the first test also prints how long the trainer waited."""
    trainer = start_trainer(daemon.address, epochs=100_000)

    seen, waits_s = read_and_kill(daemon, trainer, MANY_KILLS)

    check(seen)
    p50, p99 = np.percentile(waits_s, [50, 99])
    print(  # noqa: T201  with pytest -s
        f"kill to next batch: p50 {p50:.2f} s, p99 {p99:.2f} s, longest {max(waits_s):.2f} s of {len(waits_s)}"
    )
    trainer.quit()
