"""Descriptors kept for slots: planned at the start, held by placeholders, and there when everything else is taken."""

import os
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from batchd.config.tree import Config
from batchd.daemon.descriptors import Watch
from batchd.daemon.reserve import (
    OWN_DESCRIPTORS,
    SLOT_DESCRIPTORS,
    WORKER_DESCRIPTORS,
    DescriptorPlan,
    DescriptorReserve,
    plan_descriptors,
)
from batchd.daemon.rings import plan_rings
from batchd.daemon.sessions import Sessions
from batchd.daemon.slot_memory import SlotMemory
from batchd.daemon.speech import Desk, Numbers
from batchd_wire.messages import Refused

SLOT_BYTES = 1 << 16


@contextmanager
def no_free_descriptors() -> Iterator[list[int]]:
    """Every number up to a low limit is taken, by those in the list, which a test may close."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))  # noqa: PTH208
    taken: list[int] = []
    try:
        while (descriptor := _dup()) is not None:
            taken.append(descriptor)
        yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def _dup() -> int | None:
    try:
        return os.dup(0)
    except OSError:
        return None


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough


# --- placeholders ----------------------------------------------------------------------------------------------------


def test_slots_are_made_where_no_descriptor_is_free_as_many_as_were_reserved() -> None:
    """The next one is refused with what helps, and nothing of it is left."""
    before = open_descriptors()
    memory = SlotMemory(DescriptorReserve(3 * SLOT_DESCRIPTORS))
    with no_free_descriptors():
        for slot in range(3):
            memory.create(slot, SLOT_BYTES)
        with pytest.raises(OSError, match=r"Too many open files: raise the limit \(LimitNOFILE="):
            memory.create(3, SLOT_BYTES)
    assert [slot in memory for slot in range(4)] == [True, True, True, False]
    memory.close()
    assert open_descriptors() == before


def test_a_number_that_is_snatched_away_costs_the_reserve_not_the_slot(monkeypatch) -> None:
    """ZeroMQ's thread may accept a connection between our closing and our opening; what it gives back is reserved again."""
    reserve = DescriptorReserve(3 * SLOT_DESCRIPTORS)
    memory = SlotMemory(reserve)
    stolen: list[int] = []
    create = os.memfd_create

    def snatch(name: str, flags: int) -> int:
        if not stolen:
            stolen.append(os.dup(0))
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", snatch)
    with no_free_descriptors():
        memory.create(0, SLOT_BYTES)
        assert 0 in memory
        assert len(reserve) == 3
        os.close(stolen[0])
        memory.create(1, SLOT_BYTES)
        assert len(reserve) == SLOT_DESCRIPTORS
    memory.close()


def test_a_slot_that_fails_for_other_reasons_gives_its_descriptors_back() -> None:
    """What was freed for it is reserved for the next one."""
    reserve = DescriptorReserve(2 * SLOT_DESCRIPTORS)
    memory = SlotMemory(reserve)
    with pytest.raises(MemoryError):
        memory.create(0, 1 << 60)
    assert len(reserve) == 2 * SLOT_DESCRIPTORS
    memory.close()
    assert len(reserve) == 0


def test_a_reserve_takes_no_more_than_there_is() -> None:
    """And fills up when there is more."""
    with no_free_descriptors() as taken:
        reserve = DescriptorReserve(4)
        assert len(reserve) == 0
        for _ in range(2):
            os.close(taken.pop())
        reserve.used(0)
        assert len(reserve) == 2
    reserve.used(0)
    assert len(reserve) == 4
    reserve.close()


# --- the plan --------------------------------------------------------------------------------------------------------


def test_the_plan_counts_everything_that_may_be_wanted(monkeypatch) -> None:
    """Slots twice, local trainers twice, connections over TCP once, with those that are no sessions."""
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (5000, 5000))
    stream = {
        "source": {"type": "folder", "path": "/data"},
        "batch_size": 8,
        "pipeline": [{"op": "decode"}, {"op": "resize", "size": [32, 32]}],
    }
    daemon = {"workers": 3, "memory": "1MiB", "sessions_max": 300}
    plans = []
    for tcp in ({}, {"tcp": "127.0.0.1:7070"}):
        config = Config.model_validate({"daemon": daemon | tcp, "streams": {"a": stream, "b": stream}}, strict=False)
        rings = plan_rings(config)
        plans.append(plan_descriptors(config, rings))
    slots = sum(ring.slots_max for ring in rings.values())

    own = OWN_DESCRIPTORS + 3 * WORKER_DESCRIPTORS + 2
    assert plans[0] == DescriptorPlan(limit=5000, own=own, slots=2 * slots, connections=600)
    assert plans[1].connections == 600 + 300 + 300 + 2048


@pytest.mark.parametrize(
    ("limit", "reserved", "is_short"),
    [(10_000, 1000, False), (1600, 1000, False), (1599, 999, True), (1000, 450, True), (200, 50, True), (50, 0, True)],
)
def test_where_there_are_too_few_slots_have_what_connections_leave_and_half_at_least(limit, reserved, is_short) -> None:
    """So neither can take everything from the other."""
    plan = DescriptorPlan(limit=limit, own=100, slots=1000, connections=500)

    assert plan.reserved == reserved
    assert (plan.shortage() is not None) is is_short


def test_a_shortage_has_the_numbers_and_the_remedy() -> None:
    """For the operator's log."""
    text = DescriptorPlan(limit=1024, own=100, slots=1000, connections=500).shortage()

    assert text is not None
    assert "need up to 1600 descriptors (1000 for slots, 500 for connections, 100 others), have 1024" in text
    assert "LimitNOFILE=" in text
    assert "sessions_max" in text


def test_a_limit_without_two_slots_for_each_stream_is_refused() -> None:
    """Nobody could read from such a daemon."""
    assert DescriptorPlan(limit=124, own=100, slots=1000, connections=500).refusal(3) is None
    problem = DescriptorPlan(limit=123, own=100, slots=1000, connections=500).refusal(3)

    assert problem is not None
    assert "need 124 descriptors at least, have 123; raise the limit" in problem.message


# --- accepting local trainers ----------------------------------------------------------------------------------------


def _never(_question: object) -> Refused:
    raise AssertionError("nobody asks")


def test_a_trainer_that_cannot_be_accepted_waits_and_does_not_keep_the_loop_awake(tmp_path: Path) -> None:
    """He is tried again with the next tick, and comes in when there are descriptors."""
    watch = Watch()
    with ExitStack() as stack:
        stack.callback(watch.close)
        sessions = Sessions(watch, Desk(lambda _event: None, _never, Numbers()), 4)
        stack.callback(sessions.close)
        sessions.bind(tmp_path / "l", tmp_path / "z")
        trainer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        with no_free_descriptors(), capture_logs() as lines:
            trainer.connect(str(tmp_path / "l"))
            for _ in range(3):
                assert is_awake(watch)
                watch.dispatch()
                assert not is_awake(watch)
                sessions.tick()
        watch.dispatch()
        assert len(sessions._by_number) == 1
        assert [line["event"] for line in lines] == ["cannot accept a trainer"]


def is_awake(watch: Watch) -> bool:
    """Would the loop come round at once?"""
    poll = select.poll()
    poll.register(watch.fileno(), select.POLLIN)
    return bool(poll.poll(0))
