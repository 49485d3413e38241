"""Kills during a reload: positions are exact, and one configuration or the other holds."""

import os
import resource
import signal

import pytest

import batchd_client
from support.expected import Expected
from support.kernel import descriptors_of
from support.settings import folder_stream, write_settings
from support.trainer_process import TrainerProcess
from support.waiting import wait_until

EPOCHS = 2
DAEMON_STEPS = [
    "daemon.reloading",
    "daemon.reload.read",
    "daemon.reloaded",
    "daemon.stream.ended",
]
READING_STEPS = ["rescan.starting", "rescan.scanning", "rescan.sending", "rescan.sent"]


@pytest.fixture
def start(start_daemon, start_trainer, photos):
    """Start a daemon with faults that will replace its second stream; a trainer reads the first."""

    def begin(**options):
        daemon = start_daemon({"photos": stream_of(photos), "old": stream_of(photos, seed=3)}, **options)
        trainer = start_trainer(daemon.address, epochs=EPOCHS)
        trainer.take(3)
        serve_beside(daemon, photos, "new")
        return daemon, trainer

    return begin


def serve_beside(daemon, photos, name):
    """Write a configuration that serves this stream beside the first one."""
    settings = {"runtime_dir": str(daemon.runtime_dir), "workers": 2, "memory": "64MiB"}
    write_settings(daemon.config, {"photos": stream_of(photos), name: stream_of(photos, seed=4)}, settings)


def stream_of(photos, **changes):
    return folder_stream(photos, batch_size=4, memory="1MiB", **changes)


def assert_exact(daemon, trainer):
    """Check that the rest of the trainer's epochs is as expected."""
    trainer.begin(do="take")
    seen, _ = trainer.finish()
    expected = Expected(daemon.config)
    assert seen == (expected.epoch(0) + expected.epoch(1))[3:]


def serves(daemon):
    return {stream["name"] for stream in daemon.status()["streams"]}


@pytest.mark.thorough
def test_an_index_that_found_no_descriptor_changes_nothing(start):
    """No descriptor is left for the index: the daemon serves on, and the next reload succeeds."""
    daemon, trainer = start(faults={"rescan.sending": "stop"})
    daemon.send(signal.SIGHUP)
    reader = daemon.wait_for_fault("rescan.sending")
    soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    used = set(descriptors_of(daemon.pid))
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), hard))
    os.kill(reader, signal.SIGCONT)
    (line,) = wait_until(lambda: daemon.log_lines("configuration not reloaded"), "the reload has ended")
    assert "LimitNOFILE" in line["reason"]
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert serves(daemon) == {"photos", "old"}
    daemon.send(signal.SIGHUP)
    wait_until(lambda: serves(daemon) == {"photos", "new"}, "the next reload is done")
    assert_exact(daemon, trainer)


def test_daemons_killed_while_they_reload_cost_no_batch(start, photos):
    """Daemons die at each step in turn: each successor reads the new configuration."""
    daemon, trainer = start(faults=dict.fromkeys(DAEMON_STEPS, "kill"))
    for step in DAEMON_STEPS:
        serve_beside(daemon, photos, step.replace(".", "-"))
        daemon.send(signal.SIGHUP)
        assert daemon.wait() == -signal.SIGKILL, step
        wait_until(lambda: not daemon.offspring(), "its workers and the reading process have ended")
        daemon.start()
        assert serves(daemon) == {"photos", step.replace(".", "-")}
    assert_exact(daemon, trainer)


@pytest.mark.thorough
def test_where_the_process_that_reads_is_killed_the_old_configuration_stays(start, photos):
    """A reader that has already sent everything is the exception; the next reload succeeds."""
    daemon, trainer = start(faults=dict.fromkeys(READING_STEPS, "kill"))
    present = "old"
    for step in READING_STEPS:
        serve_beside(daemon, photos, step.replace(".", "-"))
        daemon.reload(exit_code=0 if step == "rescan.sent" else 1)
        daemon.wait_for_fault(step)
        present = step.replace(".", "-") if step == "rescan.sent" else present
        assert serves(daemon) == {"photos", present}, step
    serve_beside(daemon, photos, "new")
    daemon.reload()
    assert serves(daemon) == {"photos", "new"}
    assert_exact(daemon, trainer)


@pytest.mark.thorough
def test_workers_and_trainers_killed_during_a_reload_change_nothing_for_others(start):
    """The reader hangs meanwhile, so that all of it happens during the reload."""
    daemon, trainer = start(faults={"rescan.sending": "stop"})
    victim = TrainerProcess(daemon.address, "old").ready()
    victim.begin(do="hold", batches=1)
    victim.finish()
    daemon.send(signal.SIGHUP)
    reader = daemon.wait_for_fault("rescan.sending")
    daemon.kill_a_worker()
    victim.kill()
    os.kill(reader, signal.SIGCONT)
    wait_until(lambda: serves(daemon) == {"photos", "new"}, "it is done")
    wait_until(lambda: not daemon.status()["daemon"]["ending_slots"], "the dead trainer's slots are free")
    assert_exact(daemon, trainer)
    with batchd_client.connect(daemon.address) as connection:
        assert len(list(connection.stream("new", epochs=1))) == 10


def test_a_daemon_killed_while_the_sources_are_scanned_leaves_no_process(start):
    """The scanning process sees the end of its channel, also while it hangs."""
    daemon, trainer = start(faults={"rescan.starting": "hang"})
    daemon.send(signal.SIGHUP)
    daemon.wait_for_fault("rescan.starting")
    daemon.kill()
    wait_until(lambda: not daemon.offspring(), "no process is left")
    daemon.start()
    assert_exact(daemon, trainer)
