"""The daemon is killed: trainers keep their batches, find its successor, and continue exactly."""

import pytest

import batchd_client
from batchd_client import connection as client_connection
from batchd_client.errors import ReconnectTimeout
from support.expected import Expected
from support.kernel import is_alive
from support.seen import look_at, see
from support.settings import folder_stream
from support.trainer_process import TrainerFailed
from support.waiting import PATIENCE_S, wait_until


def test_trainers_finish_their_epochs_exactly_across_a_restart(start_daemon, start_trainer, photos):
    """A mirror trainer and two ranks, each a process, are at different positions at the restart."""
    daemon = start_daemon({"photos": folder_stream(photos, batch_size=2)})
    expected = Expected(daemon.config)
    mirror = start_trainer(daemon.address, epochs=3)
    ranks = [start_trainer(daemon.address, rank=rank, world_size=2, epochs=3) for rank in range(2)]
    seen = mirror.take(7)
    shares = [rank.take(batches) for rank, batches in zip(ranks, (3, 9), strict=True)]
    for trainer in (mirror, *ranks):
        trainer.begin(do="take")

    daemon.restart()

    everything = expected.epoch(0) + expected.epoch(1) + expected.epoch(2)
    assert seen + mirror.finish()[0] == everything
    for number, (rank, share) in enumerate(zip(ranks, shares, strict=True)):
        assert share + rank.finish()[0] == [one for one in everything if one.step % 2 == number]
    for trainer in (mirror, *ranks):
        trainer.quit()


@pytest.mark.parametrize("state", ["hang", "stop"])
def test_a_worker_that_cannot_see_the_end_of_its_channel_ends_with_the_daemon_too(start_daemon, state):
    """The worker hangs in a sample, or is stopped; the kernel ends it when the daemon dies."""
    daemon = start_daemon(workers=1, faults={"worker.sample.read": f"{state}@3"})
    with batchd_client.connect(daemon.address) as connection:
        connection.stream("photos")
        worker = daemon.wait_for_fault("worker.sample.read")
        daemon.kill()

    wait_until(lambda: not is_alive(worker), "the worker has ended")


def test_without_a_successor_trainers_get_a_typed_error_keep_what_they_hold_and_may_go_on_later(
    start_daemon, start_trainer, pausing
):
    """After ``reconnect_timeout_s`` the same loop continues at its position with a new daemon."""
    daemon = start_daemon(workers=3)
    expected = Expected(daemon.config)
    other = start_trainer(daemon.address, connect={"reconnect_timeout_s": 0.2}, epochs=2)
    other.take(1)

    with batchd_client.connect(daemon.address, reconnect_timeout_s=PATIENCE_S) as connection:
        stream = connection.stream("photos", epochs=2)
        held = [next(iter(stream)) for _ in range(2)]
        seen = [look_at(batch) for batch in held]
        workers = daemon.worker_pids()
        daemon.kill()
        with (
            pausing(client_connection, PATIENCE_S),
            pytest.raises(ReconnectTimeout, match=rf"did not come back within {PATIENCE_S:g} s"),
        ):
            # The batches that had arrived are still good.
            seen.extend(look_at(batch) for _ in range(2) for batch in stream)
        with pausing(client_connection, PATIENCE_S), pytest.raises(ReconnectTimeout):
            see(stream)
        with pytest.raises(TrainerFailed, match=f"ReconnectTimeout: the daemon at {daemon.address} went away"):
            other.take()
        state = stream.state_dict()
        position = divmod(len(seen), len(stream))
        wait_until(lambda: not any(map(is_alive, workers)), "the workers have ended")
        assert [look_at(batch) for batch in held] == expected.epoch(0)[:2]
        daemon.start()
        while stream.epoch < 2:
            seen += see(stream)
        assert [look_at(batch) for batch in held] == expected.epoch(0)[:2]
        for batch in held:
            batch.release()

    assert (state["epoch"], state["step"]) == position
    assert seen == expected.epoch(0) + expected.epoch(1)
