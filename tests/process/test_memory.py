"""Memory: reserved before anything starts, bounded while it runs, and enough if there is less."""

import os
import resource
import signal
from pathlib import Path

import pytest

import batchd_client
from support.commands import batchd
from support.expected import Expected
from support.kernel import descriptors_of, mapped_slots
from support.seen import see
from support.settings import SLOT_BYTES, folder_stream, write_settings
from support.waiting import wait_until

HUGE = [{"op": "decode"}, {"op": "resize", "size": [1024, 1024]}]


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["serve"])
def test_more_memory_than_the_machine_has_is_refused_at_the_start(tmp_path, photos, command):
    """Exit status 5, and a message with both numbers and the key; the daemon reserved nothing."""
    config = write_settings(
        tmp_path / "batchd.toml",
        {"photos": folder_stream(photos, batch_size=65536, pipeline=HUGE)},
        {"runtime_dir": str(tmp_path / "run"), "memory": "40TiB"},
    )

    message = batchd(command, "-c", config, status=5).stderr

    assert "need 40.0 TiB of shared memory, have " in message or "need 39." in message
    assert "memory =" in message
    assert not list((tmp_path / "run").glob("*.sock"))


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("command", [("check",), ("serve", "-c")])
def test_a_ring_without_two_slots_is_refused(tmp_path, photos, command):
    """Exit status 5; the message names the stream, the memory it needs and the memory it has."""
    config = write_settings(
        tmp_path / "batchd.toml",
        {"photos": folder_stream(photos), "other": folder_stream(photos, batch_size=512)},
        {"runtime_dir": str(tmp_path / "run"), "memory": "1MiB"},
    )
    message = batchd(*command, config, status=5).stderr

    assert "streams.other.memory: need 3.1 MiB for 2 slots of 512 samples, have 512.0 KiB" in message
    assert "streams.photos" not in message


def test_slots_are_made_when_they_are_wanted_and_kept(start_daemon):
    """The ring is empty without a reader; one reader has its window's slots at any time."""
    daemon = start_daemon()
    assert daemon.status()["daemon"]["memory_bytes"] == 0
    slots = [number for number, name in descriptors_of(daemon.pid).items() if "batchd-slot" in name]
    assert not any(Path(f"/proc/{daemon.pid}/fd/{number}").stat().st_blocks for number in slots)

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=20)
        for _ in range(20):
            see(stream)
        status = connection.status()

    assert status["streams"][0]["slots"] <= 6
    assert status["daemon"]["memory_bytes"] == status["streams"][0]["slots"] * SLOT_BYTES
    assert mapped_slots(daemon.pid) == len(daemon.worker_pids())  # the workers' notes; never a slot


def test_a_slot_for_which_there_is_no_memory_shrinks_the_ring(start_daemon):
    """Only the first slots get memory: the trainer reads on, the operator gets the reason."""
    daemon = start_daemon()
    expected = Expected(daemon.config)
    with batchd_client.connect(daemon.address) as connection:
        with connection.stream("photos", window=3, epochs=1) as stream:
            assert see(stream) == expected.epoch(0)
        slots = daemon.stream_status()["slots"]
        limit_file_size(daemon.pid, SLOT_BYTES - 1)
        wide = connection.stream("photos", window=16, epochs=4)
        assert [see(wide) for _ in range(4)] == [expected.epoch(epoch) for epoch in range(4)]
        status = connection.status()["streams"][0]

    assert status["stopped"] is None
    assert status["slots"] == status["slots_max"] == slots >= 3
    (line, *_) = daemon.log_lines("no memory for a slot")
    assert "File too large" in line["reason"]


def test_no_memory_for_two_slots_stops_the_stream_with_the_reason(start_daemon):
    """A trainer that can never read gets an error at once, as does the next; the daemon lives."""
    daemon = start_daemon()
    limit_file_size(daemon.pid, SLOT_BYTES - 1)
    with batchd_client.connect(daemon.address) as connection:
        for _ in range(2):
            with pytest.raises(batchd_client.errors.StreamStopped, match="File too large"):
                see(connection.stream("photos"))

    assert daemon.status()["streams"][0]["stopped"]
    assert daemon.terminate() == 0


def limit_file_size(pid, bytes_max):
    """Have the kernel refuse files, also those in memory, that are larger than this."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (bytes_max, hard))


def test_a_daemon_without_free_descriptors_goes_on_with_what_it_has(start_daemon):
    """The daemon logs that it can start no worker and accept no trainer, and retries both."""
    daemon = start_daemon()
    expected = Expected(daemon.config)
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=3)
        seen = see(stream, 1)
        soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3, hard))
        for worker in daemon.worker_pids():
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: daemon.log_lines("worker not started"), "a worker could not be started")
        assert connection.status()["daemon"]["worker_deaths"] >= 2
        with pytest.raises(batchd_client.errors.ConnectTimeout):
            batchd_client.connect(daemon.address, connect_timeout_s=0.2)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(3):
            seen += see(stream)

    assert seen == expected.epoch(0) + expected.epoch(1) + expected.epoch(2)


def test_a_low_soft_limit_of_descriptors_does_not_bound_the_ring(start_daemon, photos):
    """Each slot takes two descriptors; the daemon raises its limit up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors_of(os.getpid())) + 16, hard))
    try:
        daemon = start_daemon({"photos": folder_stream(photos, batch_size=1)})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    with batchd_client.connect(daemon.address) as connection:
        connection.stream("photos", window=40)
        wait_until(lambda: daemon.stream_status()["ready_slots"] >= 40, "forty batches are ready")
    assert not daemon.log_lines("no memory for a slot")
