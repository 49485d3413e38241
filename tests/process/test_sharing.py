"""Many trainers, one daemon: which batches are decoded once, and which each trainer reads."""

from contextlib import ExitStack
from threading import Timer

import pytest

import batchd_client
from batchd_client import subscription
from support.expected import Expected
from support.seen import look_at, samples, see
from support.settings import PIPELINE, SLOT_BYTES, STILL_PIPELINE, folder_stream
from support.waiting import PATIENCE_S, wait_until

STEPS = 5
"""Forty samples in batches of eight."""
WITHHELD_S = 1.0
"""A batch that does not arrive within this time is withheld."""
KINDS = {
    "lockstep": {"lag": "lockstep", "max_skew": 2},
    "waits": {"lag": "lockstep", "max_skew": 2},
    "turns": {"lag": "lockstep", "max_skew": 8, "batch_size": 1},
    "apart": {"memory": 6 * SLOT_BYTES},
    "plain": {},
    "sixes": {"batch_size": 6},
    "drops": {"batch_size": 3, "drop_last": True},
    "still": {"shuffle": False, "pipeline": STILL_PIPELINE},
    "sevens": {"shuffle": False, "pipeline": STILL_PIPELINE, "batch_size": 7},
    "other": {"seed": 5, "pipeline": [*PIPELINE, {"op": "normalize"}, {"op": "layout"}]},
    "ahead": {"batch_size": 4},
    "once": {},
}
"""The special options of each stream. Where batches are counted, no two tests read the same one."""


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve all of these streams."""
    return start_shared_daemon({name: folder_stream(photos, **kind) for name, kind in KINDS.items()})


def test_mirror_trainers_in_lockstep_share_every_decoded_batch(daemon):
    """One runs ahead as far as it may, and still no batch is decoded twice."""
    expected = Expected(daemon.config, "lockstep")

    with batchd_client.connect(daemon.address) as one, batchd_client.connect(daemon.address) as other:
        first, second = (connection.stream("lockstep", epochs=2) for connection in (one, other))
        for epoch in range(2):
            for step in range(STEPS):
                assert see(first, 1) == see(second, 1) == [expected.batch(epoch, step)]
        status = daemon.stream_status("lockstep")

    assert status["decoded_batches"] == status["shared_batches"] == 2 * STEPS
    assert status["delivered_batches"] == 4 * STEPS


def test_a_lockstep_trainer_waits_for_the_slowest(daemon, let_pass):
    """The fast one waits at the allowed distance until the slow one has moved."""
    with (
        batchd_client.connect(daemon.address, batch_timeout_s=PATIENCE_S) as one,
        batchd_client.connect(daemon.address) as other,
    ):
        fast, slow = (connection.stream("waits", epochs=1) for connection in (one, other))
        ahead = see(fast, 3)
        withheld = Timer(WITHHELD_S, let_pass, [PATIENCE_S])
        withheld.start()
        with pytest.raises(batchd_client.errors.BatchTimeout):
            see(fast, 1)
        withheld.join()
        assert see(slow, 1) == ahead[:1]
        assert [batch.step for batch in see(fast, 1)] == [3]


def test_one_thread_may_read_trainers_in_lockstep_in_turn(daemon, monkeypatch):
    """A batch that the first took counts at once: the thread comes back to it only afterwards."""
    with (
        batchd_client.connect(daemon.address) as one,
        batchd_client.connect(daemon.address, batch_timeout_s=PATIENCE_S) as other,
    ):
        first, second = (connection.stream("turns", epochs=1, window=64) for connection in (one, other))
        for _ in range(16):  # batches come ahead to those that read
            assert see(first, 1) == see(second, 1)
        monkeypatch.setattr(subscription, "REPORT_EVERY_S", 3600.0)
        wait_until(
            lambda: daemon.stream_status("turns")["delivered_batches"] >= 2 * (16 + 8), "both have what they may"
        )
        one.status()  # its answer is behind all handles
        assert see(first, 5) == see(second, 12)[:5]


def test_trainers_far_apart_each_get_their_own(daemon):
    """Neither trainer waits: a batch that left the ring is decoded again, and is equal."""
    expected = Expected(daemon.config, "apart")

    with batchd_client.connect(daemon.address) as one, batchd_client.connect(daemon.address) as other:
        first, second = (connection.stream("apart", epochs=2) for connection in (one, other))
        assert see(first) + see(first) == expected.epoch(0) + expected.epoch(1)
        assert see(second) + see(second) == expected.epoch(0) + expected.epoch(1)
        status = daemon.stream_status("apart")

    assert 2 * STEPS < status["decoded_batches"] <= 4 * STEPS
    assert status["slots"] <= status["slots_max"] <= 6


def test_a_trainer_that_stands_still_does_not_hold_others_up(daemon):
    """The trainer keeps its claims and its batch; another one reads three epochs meanwhile."""
    expected = Expected(daemon.config, "plain")

    with batchd_client.connect(daemon.address) as one, batchd_client.connect(daemon.address) as other:
        still = iter(one.stream("plain", epochs=1))
        held = next(still)
        moving = other.stream("plain", epochs=3)
        assert [see(moving) for _ in range(3)] == [expected.epoch(epoch) for epoch in range(3)]
        assert look_at(held) == expected.batch(0, 0)
        held.release()
        assert [look_at(batch) for batch in still] == expected.epoch(0)[1:]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_together_read_every_sample_once(daemon, world_size):
    """All ranks get the same number of batches: whole ones, or parts of the last round's."""
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("sixes", rank, world_size, epochs=1) for rank in range(world_size)]
        read = [see(stream) for stream in streams]

    assert {len(part) for part in read} == {len(streams[0])}
    assert samples(one for part in read for one in part) == list(range(40))


def test_drop_last_leaves_out_what_makes_no_whole_round(daemon):
    """With three ranks and thirteen whole batches, each rank gets four."""
    expected = Expected(daemon.config, "drops")

    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("drops", rank, 3, epochs=1) for rank in range(3)]
        read = [see(stream) for stream in streams]

    assert read == [expected.epoch(0, range(rank, 12, 3)) for rank in range(3)]


def test_a_stream_that_never_changes_is_decoded_once_for_all_epochs(daemon):
    """Without shuffling and random steps all epochs are equal; a ring that fits one keeps it."""
    expected = Expected(daemon.config, "still")

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("still", epochs=4)
        for epoch in range(4):
            assert see(stream) == [one._replace(epoch=epoch) for one in expected.epoch(0)]
        status = daemon.stream_status("still")

    assert status["decoded_batches"] == STEPS
    assert status["delivered_batches"] == 4 * STEPS


def test_several_streams_share_the_workers(daemon):
    """One connection reads three streams of different kinds in turn."""
    streams = ("plain", "sevens", "other")

    with batchd_client.connect(daemon.address) as connection:
        opened = {name: connection.stream(name, epochs=1) for name in streams}
        seen = {name: see(opened[name], 1) for name in streams}
        workers = wait_until(
            lambda: [one for one in daemon.status()["workers"] if one["state"] == "ready"][1:], "both workers are ready"
        )
        for name, stream in opened.items():
            seen[name] += see(stream)
    status = daemon.status()

    for name in streams:
        assert seen[name] == Expected(daemon.config, name).epoch(0)
    assert len(workers) == 1
    assert sum(worker["samples"] for worker in status["workers"]) >= sum(
        one["decoded_samples"] for one in status["streams"]
    )
    assert status["daemon"]["worker_deaths"] == 0


def test_a_window_is_how_far_ahead_batches_are_made_ready(daemon):
    """A window of six gets six ready batches without any read; the daemon decodes no further."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("ahead", window=6)
        assert stream.window == 6
        wait_until(
            lambda: daemon.stream_status("ahead")["subscriptions"][0]["ready_ahead"] == 6, "six batches are ready ahead"
        )
        assert daemon.stream_status("ahead")["decoded_batches"] == 6


def test_only_so_many_epochs_are_decoded_as_the_trainer_says(daemon):
    """Prefetch stops at the end of a training whose length is known."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("once", epochs=1)
        assert len(see(stream)) == STEPS
        assert see(stream) == []
        assert daemon.stream_status("once")["decoded_batches"] == STEPS


@pytest.mark.thorough
def test_256_trainers_of_one_stream_are_served_together(start_daemon, photos):
    """Each takes a batch, holds none and stays: what came to it beyond that refuses nobody."""
    daemon = start_daemon({"photos": folder_stream(photos, batch_size=2, window=64)}, sessions_max=300)
    with ExitStack() as trainers:
        for number in range(256):
            connection = trainers.enter_context(batchd_client.connect(daemon.address, name=f"trainer {number}"))
            next(iter(connection.stream("photos", epochs=1 << 20))).release()

        assert len(daemon.stream_status("photos")["subscriptions"]) == 256
