"""Workers are killed: trainers see a delay and nothing else."""

import os
import random
import signal

import pytest

import batchd_client
from support.expected import Expected
from support.images import jpeg, photo
from support.kernel import is_stopped
from support.seen import samples, see
from support.settings import list_stream
from support.waiting import wait_until


@pytest.fixture(scope="module")
def daemon(start_shared_daemon):
    """Serve forty samples."""
    return start_shared_daemon()


def long_epoch(photos, folder, samples_, **changes):
    """Make a stream of many samples from the few photographs: each is named many times."""
    files = sorted(path.relative_to(photos) for path in photos.rglob("*.jpg"))
    lines = [f"{files[number % len(files)]} {number % 7}" for number in range(samples_)]
    list_file = folder / "list.txt"
    list_file.write_text("\n".join(lines) + "\n")
    return {"photos": list_stream(list_file, photos, **changes)}


def kill_through_an_epoch(daemon, kills, seed):
    """Kill a worker after each batch until enough are dead; return the batches and the deaths."""
    chance = random.Random(seed)
    killed = set()
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=1)
        seen = []
        while len(killed) < kills:
            seen += see(stream, 1)
            pids = wait_until(lambda: sorted(daemon.worker_pids() - killed), "a worker lives")
            victim = chance.choice(pids)
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        seen += see(stream)
        return seen, connection.status()


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(("division", "kills"), [({"workers": 2}, 25), ({"workers": 3, "chunk_rows": 1}, 15)])
def test_many_killed_workers_lose_repeat_and_reorder_nothing(start_daemon, photos, tmp_path, division, kills):
    """Workers die at random moments of one epoch; every sample arrives once, in its place."""
    streams = long_epoch(photos, tmp_path, 1200, batch_size=16)
    daemon = start_daemon(streams, **division)

    seen, status = kill_through_an_epoch(daemon, kills, seed=kills)

    assert seen == Expected(daemon.config).epoch(0)
    assert samples(seen) == list(range(1200))
    (stream,) = status["streams"]
    assert stream["quarantined_samples"] == stream["bad_samples"] == 0
    wait_until(lambda: daemon.status()["daemon"]["worker_deaths"] == kills, "all deaths are counted")


ORDERS = {
    "bucket of a budget": {"bucket": {"field": "image", "by": "pixels", "count": 4, "budget": 24_576}, "balance": 2},
    "blocks": {"shuffle": {"blocks": 4, "block_samples": 10}},
    "weights": {"weights": {"by": "class", "power": 0.5}},
}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("order", ORDERS)
def test_killed_workers_change_no_batch_of_another_order(start_daemon, tmp_path, order):
    """Batches of a budget have different numbers of rows; blocks belong to workers."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, (height, width) in enumerate([(24, 32), (48, 64), (60, 90), (96, 128)] * 3):
        (folder / f"{number}.jpg").write_bytes(jpeg(photo(height, width, seed=number)))
    daemon = start_daemon(long_epoch(folder, tmp_path, 600, batch_size=16, **ORDERS[order]), workers=3, chunk_rows=1)

    seen, _status = kill_through_an_epoch(daemon, 8, seed=8)

    assert seen == Expected(daemon.config).epoch(0)
    rows = {len(batch.samples) for batch in seen}
    assert rows >= ({2, 4, 8, 16} if order == "bucket of a budget" else {16})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_killed_workers_lose_repeat_and_reorder_nothing(start_daemon, photos, tmp_path, seed):
    """Twenty times as many workers die as in the first test."""
    daemon = start_daemon(long_epoch(photos, tmp_path, 24_000, batch_size=16), chunk_rows=1 + seed)

    seen, status = kill_through_an_epoch(daemon, 1000, seed)

    assert seen == Expected(daemon.config).epoch(0)
    assert status["streams"][0]["quarantined_samples"] == 0


def test_a_row_whose_worker_is_killed_five_times_in_a_row_makes_no_sample_guilty(start_daemon):
    """A worker has it each time, alone in its chunk: kills from outside do not blame a sample."""
    hung = 17
    daemon = start_daemon(chunk_rows=1, workers=1, lasting_faults={f"worker.sample.begin:{hung}": "stop"})

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=1)
        for _ in range(5):
            (victim,) = wait_until(
                lambda: {pid for pid in daemon.worker_pids() if is_stopped(pid)}, "a worker has the sample"
            )
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda victim=victim: victim not in daemon.worker_pids(), "it is dead")
        assert connection.status()["streams"][0]["quarantined_samples"] == 0
        (victim,) = wait_until(lambda: {pid for pid in daemon.worker_pids() if is_stopped(pid)}, "one more has it")
        os.kill(victim, signal.SIGCONT)
        seen = see(stream)
        status = connection.status()

    assert seen == Expected(daemon.config).epoch(0)
    assert status["daemon"]["worker_deaths"] == 5
    assert status["streams"][0]["quarantined_samples"] == 0


def test_all_workers_killed_at_once_are_replaced(start_daemon):
    """For a moment no worker is left."""
    daemon = start_daemon(workers=3)

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=1)
        seen = see(stream, 1)
        for pid in daemon.worker_pids():
            os.kill(pid, signal.SIGKILL)
        seen += see(stream)

    assert seen == Expected(daemon.config).epoch(0)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGTERM])
def test_any_death_of_a_worker_is_named_in_the_log(daemon, number):
    """However it ends, the daemon replaces it, and the log says how it ended."""
    before = daemon.worker_pids()
    victim = min(before)
    os.kill(victim, number)

    wait_until(lambda: [one for one in daemon.log_lines("worker ended") if one["pid"] == victim], "the death is logged")
    (line,) = [one for one in daemon.log_lines("worker ended") if one["pid"] == victim]
    assert signal.Signals(number).name in line["how"]
    wait_until(lambda: len(daemon.worker_pids() - before) == 1, "another worker is ready")


def test_a_stopped_worker_is_replaced_when_its_time_is_over(start_daemon):
    """A trainer waits for its rows; after ``sample_timeout_s`` another worker fills them."""
    daemon = start_daemon(sample_timeout_s=2)

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=3)
        seen = see(stream, 1)
        wait_until(
            lambda: all(worker["state"] == "ready" for worker in daemon.status()["workers"]), "both workers take orders"
        )
        victim = min(daemon.worker_pids())
        os.kill(victim, signal.SIGSTOP)
        wait_until(lambda: is_stopped(victim), "the worker is stopped")
        for _ in range(3):
            seen += see(stream)
        status = connection.status()

    expected = Expected(daemon.config)
    assert seen == expected.epoch(0) + expected.epoch(1) + expected.epoch(2)
    assert victim not in daemon.worker_pids()
    assert [line["pid"] for line in daemon.log_lines("worker killed")] == [victim]
    assert status["streams"][0]["quarantined_samples"] == 0


def test_a_daemon_whose_workers_cannot_start_stays_in_command(start_daemon):
    """The daemon retries again and again, answers queries meanwhile, and ends on request."""
    daemon = start_daemon(workers=1, lasting_faults={"worker.starting": "kill"})

    deaths = wait_until(lambda: daemon.log_lines("worker ended")[2:], "three workers have died")

    assert deaths[0]["worker"] == 3
    assert daemon.status()["daemon"]["worker_deaths"] >= 3
    assert daemon.terminate() == 0
