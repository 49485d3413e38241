"""Trainers die, stop and hoard: the kernel notifies, their slots return, others do not notice."""

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

import batchd_client
from batchd_client import reader as client_reader
from batchd_client.errors import RingBusy, RingExhausted, RingTooSmall
from batchd_wire import PROTOCOL_VERSION
from batchd_wire.channel import receive_message, send_message
from batchd_wire.messages import TO_TRAINER_LIFELINE, Hello, Welcome
from support.expected import Expected
from support.kernel import descriptors_of, is_alive
from support.seen import look_at, see
from support.settings import SLOT_BYTES, folder_stream
from support.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve forty samples in batches of eight; also from small rings, one for each test."""
    rings = {
        "photos": {},
        "hoarded": {"memory": 8 * SLOT_BYTES, "window": 2},
        "crowded": {"memory": 8 * SLOT_BYTES, "window": 4},
        "held": {"memory": 6 * SLOT_BYTES, "window": 1},
        "shared": {"memory": 4 * SLOT_BYTES},
    }
    return start_shared_daemon({name: folder_stream(photos, **keys) for name, keys in rings.items()})


@pytest.fixture(scope="module")
def expected(daemon):
    """Compute the content of each position of that daemon's stream."""
    return Expected(daemon.config)


def is_idle(daemon):
    """Tell whether no session but the asking one has claims or slots."""
    status = daemon.status()
    stream = status["streams"][0]
    return not stream["subscriptions"] and not stream["leased_slots"] and len(status["trainers"]) == 1


def test_killed_trainer_gives_its_slots_back(daemon, expected, start_trainer):
    """The trainer held three batches; another one reads on undisturbed."""
    with batchd_client.connect(daemon.address) as connection:
        survivor = connection.stream("photos", epochs=2)
        victim = start_trainer(daemon.address, epochs=2)
        seen = see(survivor, 2)
        assert victim.hold(3) == expected.epoch(0)[:3]
        assert daemon.stream_status()["leased_slots"] >= 3
        victim.kill()
        seen += see(survivor) + see(survivor)

    assert seen == expected.epoch(0) + expected.epoch(1)
    wait_until(lambda: is_idle(daemon), "the slots are free")


@pytest.mark.parametrize("moment", ["waiting", "taking", "holding", "subscribed"])
def test_a_trainer_may_die_at_any_moment(daemon, expected, start_trainer, moment):
    """A death at any step frees everything, and the next trainer gets every batch."""
    trainer = start_trainer(daemon.address, epochs=1000)
    match moment:
        case "taking":
            trainer.begin(do="take")
            trainer.next_seen()
        case "holding":
            trainer.hold(2)
        case "waiting":
            trainer.stop()
            trainer.begin(do="take")
    trainer.kill()

    wait_until(lambda: is_idle(daemon), "the slots are free")
    with batchd_client.connect(daemon.address) as connection:
        assert see(connection.stream("photos", epochs=1)) == expected.epoch(0)


def test_stopped_trainer_reads_its_batch_unchanged_and_then_its_own_next(daemon, expected, start_trainer):
    """Others finish three epochs meanwhile; its batch has not changed, and it misses none."""
    stopped = start_trainer(daemon.address, epochs=3)
    held = stopped.hold(2)
    stopped.stop()
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=3)
        assert [see(stream) for _ in range(3)] == [expected.epoch(epoch) for epoch in range(3)]
    stopped.go_on()

    assert stopped.look() == held == expected.epoch(0)[:2]
    stopped.release()
    assert held + stopped.take() == expected.epoch(0) + expected.epoch(1) + expected.epoch(2)
    stopped.quit()


def test_stopped_trainer_that_is_killed_gives_its_slots_back(daemon, start_trainer):
    """SIGKILL ends a stopped process."""
    trainer = start_trainer(daemon.address, epochs=3)
    trainer.hold(2)
    trainer.stop()
    assert daemon.stream_status()["leased_slots"] >= 2
    trainer.kill()

    wait_until(lambda: is_idle(daemon), "the slots are free")


def test_slots_stay_while_a_forked_child_of_a_dead_trainer_maps_them(daemon, start_trainer):
    """The child maps the memory too, so the parent's death frees nothing until the child ends."""
    trainer = start_trainer(daemon.address)
    trainer.hold(2)
    child = trainer.fork()
    os.kill(trainer.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(trainer.pid), "the parent is dead")
    assert len(daemon.status()["trainers"]) == 2
    assert daemon.stream_status()["leased_slots"] >= 2

    os.kill(child, signal.SIGKILL)

    wait_until(lambda: is_idle(daemon), "the slots are free")


@pytest.mark.parametrize("words", [0, 1, 2])
def test_a_trainer_that_dies_in_the_handshake_leaves_nothing(daemon, words):
    """The trainer connects, perhaps greets, perhaps receives the answer, and dies."""
    before = len(descriptors_of(daemon.pid))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as lifeline:
        lifeline.connect(str(daemon.runtime_dir / "lifeline.sock"))
        if words >= 1:
            send_message(lifeline, Hello(PROTOCOL_VERSION, "short-lived", os.getpid()))
        if words >= 2:
            welcome, _ = receive_message(lifeline, TO_TRAINER_LIFELINE)
            assert isinstance(welcome, Welcome)

    wait_until(lambda: is_idle(daemon), "the daemon has forgotten the trainer")
    wait_until(lambda: len(descriptors_of(daemon.pid)) <= before, "its descriptors are closed")


def test_a_hoarder_is_told_and_goes_on_after_releasing(daemon):
    """The hoarder gets all slots except reserved ones, then an error with the numbers."""
    expected = Expected(daemon.config, "hoarded")
    slots = daemon.stream_status("hoarded")["slots_max"]

    with batchd_client.connect(daemon.address) as one, batchd_client.connect(daemon.address) as other:
        hoarder, modest = one.stream("hoarded", epochs=2), other.stream("hoarded", epochs=2)
        hoard = []
        with pytest.raises(RingExhausted, match=rf"holds (\d+) of the {slots} slots of stream 'hoarded'") as told:
            hoard.extend(batch for _ in range(2) for batch in hoarder)
        assert f"({len(hoard)} of its batches are alive in this program)" in str(told.value)
        assert "release()" in str(told.value)
        assert "memory =" in str(told.value)
        assert len(hoard) >= slots - 2

        assert see(modest) + see(modest) == expected.epoch(0) + expected.epoch(1)

        assert [look_at(batch) for batch in hoard] == (expected.epoch(0) + expected.epoch(1))[: len(hoard)]
        seen = [look_at(batch) for batch in hoard]
        hoard[0].release()
        seen += see(hoarder, 1)
        for batch in hoard:
            batch.release()
        seen += see(hoarder) if hoarder.epoch < 2 else []

    assert seen == expected.epoch(0) + expected.epoch(1)


def test_a_newcomer_finds_room_between_trainers_that_read_ahead(daemon):
    """Eight slots, windows of four, and as many trainers as possible: each is admitted at once."""
    expected = Expected(daemon.config, "crowded").epoch(0)

    with batchd_client.connect(daemon.address) as connection:
        streams = []
        for _ in range(4):
            streams.append(connection.stream("crowded", epochs=1))
            for stream in streams:
                see(stream, 1)
        taken = [4, 3, 2, 1]
        assert [see(stream) for stream in streams] == [expected[count:] for count in taken]


def test_a_newcomer_waits_for_memory_that_others_hold(daemon, pausing):
    """The trainer waits for a release or its timeout, whose error says how much others hold."""
    with (
        batchd_client.connect(daemon.address) as one,
        batchd_client.connect(daemon.address, connect_timeout_s=PATIENCE_S) as other,
        batchd_client.connect(daemon.address) as third,
    ):
        hoarder = one.stream("held", epochs=3)
        hoard = [batch for batch, _ in zip(hoarder, range(5), strict=False)]
        with (
            pausing(client_reader, 0.0, PATIENCE_S),
            pytest.raises(RingBusy, match="5 of the 6 slots of stream 'held' are held by other trainers"),
        ):
            other.stream("held", epochs=1)
        with ThreadPoolExecutor(1) as background:
            patient = background.submit(third.stream, "held", epochs=1)
            for batch in hoard:
                batch.release()
            hoarder.close()
            assert see(patient.result(PATIENCE_S)) == Expected(daemon.config, "held").epoch(0)


def test_a_trainer_for_whom_there_is_no_memory_is_refused_with_the_numbers(daemon):
    """Each needs two slots; when one of the others leaves, the next is admitted."""
    assert daemon.stream_status("shared")["slots_max"] == 4

    with batchd_client.connect(daemon.address) as connection:
        first, second = connection.stream("shared", epochs=1), connection.stream("shared", epochs=1)
        with pytest.raises(RingTooSmall, match=r"4 slots and 2 trainers, and each needs 2"):
            connection.stream("shared", epochs=1)
        first.close()
        third = connection.stream("shared", epochs=1)
        assert see(second) == see(third) == Expected(daemon.config, "shared").epoch(0)
