"""The fork server dies, stops, or cannot fork: trainers see a delay and nothing else."""

import os
import signal

import pytest

import batchd_client
from support.expected import Expected
from support.kernel import descriptors_of, is_alive, is_stopped
from support.seen import samples, see
from support.settings import folder_stream
from support.waiting import wait_until


@pytest.mark.thorough
def test_its_death_takes_the_workers_along_and_others_come(start_daemon):
    """The kernel ends the workers amid orders; each sample still arrives once, in place."""
    daemon = start_daemon(workers=2, chunk_rows=1)
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=3)
        seen = see(stream, 1)
        for _ in range(2):
            workers, server = daemon.worker_pids(), daemon.fork_server_pid()
            os.kill(server, signal.SIGKILL)
            wait_until(lambda workers=workers: not any(map(is_alive, workers)), "its workers have ended")
            seen += see(stream, 1)
            wait_until(lambda: len(daemon.worker_pids()) == 2, "there are other workers")
        seen += [batch for _ in range(3) for batch in see(stream)]

    expected = Expected(daemon.config)
    assert seen == expected.epoch(0) + expected.epoch(1) + expected.epoch(2)
    assert [line["how"] for line in daemon.log_lines("fork server ended")] == ["signal 9 (SIGKILL)"] * 2
    assert daemon.stream_status()["quarantined_samples"] == 0


@pytest.mark.thorough
def test_a_sample_is_not_blamed_for_the_death_of_the_fork_server(start_daemon):
    """A worker has the sample each time, alone in its chunk."""
    daemon = start_daemon(workers=1, chunk_rows=1, lasting_faults={"worker.sample.begin:17": "stop"})
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=1)
        for _ in range(4):
            stopped = wait_until(
                lambda: {pid for pid in daemon.worker_pids() if is_stopped(pid)}, "a worker has the sample"
            )
            os.kill(daemon.fork_server_pid(), signal.SIGKILL)
            wait_until(lambda pids=stopped: not any(map(is_alive, pids)), "the worker has ended")
        status = daemon.stream_status()
        assert status["quarantined_samples"] == status["bad_samples"] == 0
        del stream


@pytest.mark.thorough
def test_one_that_dies_again_and_again_is_started_less_and_less_often(start_daemon):
    """The daemon answers meanwhile, reports its retries, and ends on request."""
    daemon = start_daemon(workers=1, lasting_faults={"forks.order.received": "kill"})
    wait_until(lambda: daemon.status()["daemon"]["worker_deaths"] >= 3, "three workers were not started")
    (failure,) = daemon.log_lines("worker not started")  # once a minute
    assert failure["reason"] == "the fork server ended (signal 9 (SIGKILL))"
    assert daemon.terminate() == 0


def test_one_that_is_stopped_holds_up_no_trainer_while_its_workers_live(start_daemon):
    """Forked workers no longer need it. The kernel reports a dead worker; another fills its rows.

    The daemon ends in time, too.
    """
    daemon = start_daemon(workers=2, chunk_rows=1)
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=2)
        victim = min(daemon.worker_pids())
        server = daemon.fork_server_pid()
        os.kill(server, signal.SIGSTOP)
        assert samples(see(stream)) == list(range(40))
        seen = see(stream, 1)
        os.kill(victim, signal.SIGSEGV)
        seen += see(stream)
    assert seen == Expected(daemon.config).epoch(1)
    (line,) = daemon.log_lines("worker ended")
    assert (line["pid"], line["how"]) == (victim, "signal 11 (SIGSEGV)")
    os.kill(server, signal.SIGCONT)
    wait_until(lambda: len(daemon.worker_pids()) == 2, "another worker is forked when the fork server continues")
    os.kill(server, signal.SIGSTOP)
    assert daemon.terminate() == 0
    assert not is_alive(server)


def test_workers_have_random_numbers_a_channel_and_a_note_of_their_own(start_daemon, photos, tmp_path):
    """Users' functions may use the random numbers of Python and of NumPy.

    Workers inherit no descriptor of the fork server or of earlier workers. The note is held by its
    mapping, and for what decoders print.
    """
    (tmp_path / "chance.py").write_text(
        "import os, random, time\nimport numpy as np\n"
        "def draw(sample, rng):\n"
        "    time.sleep(0.02)\n"
        "    drawn = [os.getpid(), random.getrandbits(48), np.random.randint(1 << 48)]\n"
        '    return {"image": np.array(drawn, np.int64)}\n'
    )
    draw = {"op": "call", "function": "chance:draw", "outputs": {"image": "int64[3]"}}
    stream = folder_stream(photos, batch_size=4, pipeline=[{"op": "decode"}, draw])
    daemon = start_daemon({"photos": stream}, python_path=[str(tmp_path)], workers=3, chunk_rows=1)
    with batchd_client.connect(daemon.address) as connection:
        drawn = [row for batch in connection.stream("photos", epochs=1) for row in batch["image"].tolist()]
    pids, ours, numpys = zip(*drawn, strict=True)
    assert len(set(pids)) > 1
    assert len(set(ours)) == len(set(numpys)) == len(drawn)
    for pid in daemon.worker_pids():
        descriptors = descriptors_of(pid)
        held = [target for target in descriptors.values() if target != descriptors[2]]  # its log
        assert [sum(what in target for target in held) for what in ("socket:", "note", "pidfd")] == [1, 2, 0], held
