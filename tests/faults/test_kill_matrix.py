"""Kill, stop and hang worker and daemon at every named step. Positions are exact afterwards."""

import os
import signal

import pytest

from support.expected import Expected
from support.kernel import is_stopped
from support.settings import folder_stream
from support.trainer_process import TrainerProcess
from support.waiting import wait_until

WORKER_STEPS = [
    "worker.starting",
    "worker.idle",
    "worker.order.received",
    "worker.sample.begin",
    "worker.sample.opened",
    "worker.sample.read",
    "worker.sample.decoded",
    "worker.sample.written",
    "worker.chunk.written",
    "worker.done.sent",
]
"""In the order in which a new worker reaches them."""
PASSAGES = {
    step: min(number, 3) if step in {"worker.order.received", "worker.done.sent"} else number
    for number, step in enumerate(WORKER_STEPS, 1)
}
"""The passage of each fault: each at another sample, so that no sample fails twice and counts as
poison. There are fewer messages than samples."""
DAEMON_START_STEPS = ["daemon.starting", "daemon.bound", "daemon.worker.spawned"]
DAEMON_STEPS = [
    "daemon.subscribed",
    "daemon.slot.created",
    "daemon.slot.reserved",
    "daemon.order.sent",
    "daemon.done.received",
    "daemon.handle.sent",
    "daemon.release.received",
]
"""In the order in which a new daemon reaches them."""
EPOCHS = 6
"""So many that a worker sends and receives three messages: each may be of 32 chunks."""


@pytest.fixture
def start_pair(start_daemon, photos):
    """Start a daemon with faults and a trainer that reads epochs of ten batches."""
    trainers = []

    def start(*, ready=True, **options):
        daemon = start_daemon({"photos": folder_stream(photos, batch_size=4)}, ready=ready, **options)
        return daemon, begin(daemon) if ready else None

    def begin(daemon):
        trainer = TrainerProcess(daemon.address, epochs=EPOCHS)
        trainers.append(trainer)
        trainer.begin(do="take")
        return trainer

    start.trainer = begin
    yield start
    for trainer in trainers:
        trainer.close()


def assert_exact(daemon, trainer):
    """Check the trainer's batches, that no sample is suspected, and that the daemon ends well."""
    trainer.ready()
    seen, _ = trainer.finish()
    expected = Expected(daemon.config)
    assert seen == [one for epoch in range(EPOCHS) for one in expected.epoch(epoch)]
    (stream,) = daemon.status()["streams"]
    assert stream["quarantined_samples"] == stream["bad_samples"] == 0
    trainer.quit()


@pytest.mark.slow
@pytest.mark.parametrize("step", WORKER_STEPS)
def test_a_worker_killed_at_any_step_changes_nothing(start_pair, step):
    """Another worker replaces it and fills its rows from scratch."""
    daemon, trainer = start_pair(faults={step: "kill"}, chunk_rows=3)

    assert_exact(daemon, trainer)
    victim = daemon.wait_for_fault(step)
    wait_until(lambda: daemon.log_lines("worker ended"), "the daemon knows of the death")
    assert [line["pid"] for line in daemon.log_lines("worker ended")] == [victim]


@pytest.mark.thorough
def test_workers_killed_at_every_step_one_after_the_other_change_nothing(start_pair):
    """See ``PASSAGES``."""
    kills = {step: f"kill@{passage}" for step, passage in PASSAGES.items()}
    daemon, trainer = start_pair(faults=kills, workers=1, chunk_rows=2)

    assert_exact(daemon, trainer)
    assert len({daemon.wait_for_fault(step) for step in kills}) == len(kills)


def test_a_worker_stopped_at_every_step_goes_on_where_it_stood(start_pair):
    """The worker stops once at each step; no process kills it, as its timeout has not expired."""
    daemon, trainer = start_pair(faults=dict.fromkeys(WORKER_STEPS, "stop"), workers=1)
    for step in WORKER_STEPS:
        go_on(daemon.wait_for_fault(step))

    assert_exact(daemon, trainer)
    assert not daemon.log_lines("worker ended")


@pytest.mark.thorough
def test_a_worker_hung_at_every_step_is_replaced_in_time(start_pair):
    """See ``PASSAGES``. Three daemons wait at once, so that each can wait longer.

    On a busy machine a good worker may be late, too: twice for one sample would count as poison.
    """
    pairs = []
    for first in (1, 4, 7):
        hangs = {step: f"hang@{PASSAGES[step]}" for step in WORKER_STEPS[first : first + 3]}
        pairs.append((*start_pair(faults=hangs, workers=1, sample_timeout_s=3, chunk_rows=2), hangs))

    for daemon, trainer, hangs in pairs:
        assert_exact(daemon, trainer)
        victims = {daemon.wait_for_fault(step) for step in hangs}
        assert victims <= {line["pid"] for line in daemon.log_lines("worker killed")}


@pytest.mark.thorough
def test_daemons_killed_at_every_step_cost_no_batch(start_pair):
    """No daemon leaves remains that hinder the next, which serves from the trainer's position."""
    daemon, _ = start_pair(ready=False, faults=dict.fromkeys([*DAEMON_START_STEPS, *DAEMON_STEPS], "kill"))

    def end_at(step):
        assert daemon.wait() == -signal.SIGKILL, step
        daemon.wait_for_fault(step)
        wait_until(lambda: not daemon.offspring(), f"the workers of the daemon killed at {step} have ended")
        daemon.start(ready=False)

    for step in DAEMON_START_STEPS:
        end_at(step)
    daemon.wait_ready()
    trainer = start_pair.trainer(daemon)
    for step in DAEMON_STEPS:
        end_at(step)
    assert_exact(daemon, trainer)


def test_a_daemon_killed_at_the_last_handle_of_an_epoch_costs_no_batch(start_pair):
    """Its successor serves the next epoch; a kill while it drains leaves no remains either."""
    daemon, trainer = start_pair(faults={"daemon.handle.sent": "kill@10", "daemon.draining": "kill"})
    assert daemon.wait() == -signal.SIGKILL
    daemon.start()
    wait_until(lambda: daemon.stream_status()["subscriptions"], "the trainer is connected again")
    daemon.send(signal.SIGTERM)
    assert daemon.wait() == -signal.SIGKILL
    daemon.start()

    assert_exact(daemon, trainer)


def test_a_daemon_stopped_at_every_step_goes_on_where_it_stood(start_pair):
    """The daemon stops during its start, while it serves, and during its end."""
    steps = [*DAEMON_START_STEPS, *DAEMON_STEPS, "daemon.draining"]
    daemon, _ = start_pair(ready=False, faults=dict.fromkeys(steps, "stop"))
    for step in DAEMON_START_STEPS:
        go_on(daemon.wait_for_fault(step))
    daemon.wait_ready()
    trainer = start_pair.trainer(daemon)
    for step in DAEMON_STEPS:
        go_on(daemon.wait_for_fault(step))

    assert_exact(daemon, trainer)
    daemon.send(signal.SIGTERM)
    go_on(daemon.wait_for_fault("daemon.draining"))
    assert daemon.wait() == 0
    assert daemon.files() == {"lock", "log"}


def go_on(pid):
    """Continue a process once it is stopped."""
    wait_until(lambda: is_stopped(pid), f"process {pid} is stopped")
    os.kill(pid, signal.SIGCONT)
