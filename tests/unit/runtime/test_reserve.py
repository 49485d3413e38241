"""Descriptors reserved for slots: planned at the start, held by blanks, the last to be used."""

import os
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from batchd.config.tree import Config
from batchd.daemon.doors import DaemonSide
from batchd.daemon.local.sessions import LocalDoor
from batchd.data.storage.access import Storage
from batchd.runtime import slots as slot_memory
from batchd.runtime.limits import SessionLimits
from batchd.runtime.poller import Poller
from batchd.runtime.slots import MAPPING_DESCRIPTORS, SLOT_DESCRIPTORS, BlankSlots, SlotPool
from batchd.stream.rings import (
    OWN_DESCRIPTORS,
    SLOTS_MIN,
    WORKER_DESCRIPTORS,
    DescriptorPlan,
    plan_descriptors,
    plan_rings,
)

SLOT_BYTES = 1 << 16


@contextmanager
def no_free_descriptors() -> Iterator[list[int]]:
    """Open every number up to a low limit; a test may close those in the list."""
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


@contextmanager
def no_large_files(bytes_max: int) -> Iterator[None]:
    """Let the kernel make no larger file, not even in memory. Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough


# --- blanks ---------------------------------------------------------------------------------------


def test_slots_are_made_where_no_descriptor_is_free_as_many_as_there_are_blanks() -> None:
    """The next slot is rejected with advice, and nothing of it remains."""
    before = open_descriptors()
    memory = SlotPool(BlankSlots(3))
    with no_free_descriptors():
        for slot in range(3):
            memory.create(slot, SLOT_BYTES)
        with pytest.raises(OSError, match=r"Too many open files; raise the limit \(LimitNOFILE="):
            memory.create(3, SLOT_BYTES)
    assert [slot in memory for slot in range(4)] == [True, True, True, False]
    assert all(os.fstat(memory.readable(slot)).st_size == SLOT_BYTES for slot in range(3))
    memory.close()
    assert open_descriptors() == before


def test_a_slot_for_which_there_is_no_memory_leaves_its_blank() -> None:
    """The blank is empty again for the next attempt."""
    blanks = BlankSlots(1)
    memory = SlotPool(blanks)
    with no_free_descriptors():
        with no_large_files(SLOT_BYTES - 1), pytest.raises(OSError, match="File too large"):
            memory.create(0, SLOT_BYTES)
        assert len(blanks) == 1
        memory.create(0, SLOT_BYTES)
    assert os.fstat(memory.writable(0)).st_size == SLOT_BYTES
    memory.close()


def test_blanks_take_no_memory_and_end_with_the_slots() -> None:
    """They are made ahead, as many as there may be slots and within a limit."""
    before = open_descriptors()
    blanks = BlankSlots(10)
    memory = SlotPool(blanks)
    assert len(open_descriptors()) == len(before) + 10 * SLOT_DESCRIPTORS
    assert all(os.fstat(blank.writable).st_blocks == 0 for blank in blanks._blanks)
    for slot in range(4):
        memory.create(slot, SLOT_BYTES)
    assert len(blanks) == 6
    memory.close()
    assert open_descriptors() == before


def test_no_more_blanks_are_made_ahead_than_the_kernel_should_carry(monkeypatch) -> None:
    """Further blanks follow as the first ones are used."""
    monkeypatch.setattr(slot_memory, "BLANKS_MAX", 2)
    blanks = BlankSlots(3)
    taken = []
    for left in (2, 1, 0):
        taken.append(blanks.take())
        assert len(blanks) == left
    for blank in taken:
        blanks.give_back(blank)
    blanks.close()


def test_blanks_are_made_when_there_are_descriptors_again() -> None:
    """The next slot triggers another attempt."""
    with no_free_descriptors() as taken:
        blanks = BlankSlots(3)
        assert len(blanks) == 0
        for _ in range(SLOT_DESCRIPTORS + 1):
            os.close(taken.pop())
        memory = SlotPool(blanks)
        memory.create(0, SLOT_BYTES)
        assert len(blanks) == 0
    memory.create(1, SLOT_BYTES)
    assert len(blanks) == 1
    memory.close()


def test_slots_that_go_over_tcp_are_mapped_where_no_descriptor_is_free() -> None:
    """They were mapped early; a slot smaller than others shows only its own bytes."""
    before = open_descriptors()
    blanks = BlankSlots(2, 2 * SLOT_BYTES)
    memory = SlotPool(blanks)
    assert len(open_descriptors()) == len(before) + 2 * (SLOT_DESCRIPTORS + MAPPING_DESCRIPTORS)
    assert all(os.fstat(blank.writable).st_blocks == 0 for blank in blanks._blanks)
    with no_free_descriptors():
        for slot, slot_bytes in ((0, SLOT_BYTES), (1, 2 * SLOT_BYTES)):
            memory.create(slot, slot_bytes)
            os.pwrite(memory.writable(slot), b"pixels", slot_bytes - 6)
            shown = memory.mapped(slot)
            assert (len(shown), bytes(shown[-6:]), shown.readonly) == (slot_bytes, b"pixels", True)
    memory.close()
    assert bytes(shown[-6:]) == b"pixels"
    del shown
    assert open_descriptors() == before


def test_a_slot_that_cannot_be_mapped_is_refused_with_the_kernels_reason() -> None:
    """The address space is full, so descriptors do not help; nothing of the slot remains."""
    before = open_descriptors()
    memory = SlotPool(BlankSlots(1, 1 << 52))
    with pytest.raises(OSError, match=r"Cannot allocate memory$"):
        memory.create(0, SLOT_BYTES)
    assert open_descriptors() == before
    memory.close()


# --- the plan -------------------------------------------------------------------------------------


def test_the_plan_counts_everything_that_may_be_wanted(monkeypatch) -> None:
    """Slots and mappings count, local trainers twice, TCP connections once, and pending ones."""
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
        rings = plan_rings(config, Storage())
        plans.append(plan_descriptors(config, rings))
    slots = sum(ring.slots_max for ring in rings.values())

    own = OWN_DESCRIPTORS + 3 * WORKER_DESCRIPTORS + 2
    assert plans[0] == DescriptorPlan(limit=5000, own=own, slots=2 * slots, connections=600, strangers=600)
    assert plans[1].connections == 600 + 2 * 300 + 300 + 2048
    assert plans[1].per_slot == 2 + MAPPING_DESCRIPTORS
    assert plans[1].slots == plans[1].per_slot * slots


def test_slots_that_take_three_descriptors_are_counted_so() -> None:
    """The test covers the reserved number and the number that is required to start."""
    plan = DescriptorPlan(limit=2_500, own=100, slots=1500, connections=500, per_slot=3, strangers=500)

    assert plan.reserved == 500
    assert DescriptorPlan(limit=1000, own=100, slots=1500, connections=500, per_slot=3).reserved == 150
    least = 100 + 2 * SLOTS_MIN * 3 * 5
    assert [replace(plan, limit=limit).refusal(5) is None for limit in (least - 1, least)] == [False, True]


@pytest.mark.parametrize(
    ("limit", "reserved", "is_short"),
    [
        (10_000, 0, False),
        (2100, 0, False),
        (2099, 500, False),
        (1600, 500, False),
        (1599, 499, True),
        (1000, 225, True),
        (200, 25, True),
        (50, 0, True),
    ],
)
def test_where_there_are_too_few_slots_have_what_connections_leave_and_half_at_least(limit, reserved, is_short) -> None:
    """So neither slots nor connections can use all descriptors."""
    plan = DescriptorPlan(limit=limit, own=100, slots=1000, connections=500, strangers=500)

    assert plan.reserved == reserved
    assert (plan.shortage() is not None) is is_short


def test_a_shortage_has_the_numbers_and_the_remedy() -> None:
    """The operator finds them in the log."""
    text = DescriptorPlan(limit=1024, own=100, slots=1000, connections=500).shortage()

    assert text is not None
    assert "need up to 1600 descriptors (1000 for slots, 500 for connections, 100 others), have 1024" in text
    assert "LimitNOFILE=" in text
    assert "sessions_max" in text


def test_a_limit_without_two_slots_for_each_stream_is_refused() -> None:
    """No trainer could read from such a daemon."""
    assert DescriptorPlan(limit=124, own=100, slots=1000, connections=500).refusal(3) is None
    problem = DescriptorPlan(limit=123, own=100, slots=1000, connections=500).refusal(3)

    assert problem is not None
    assert "need 124 descriptors at least, have 123; raise the limit" in problem.message
    assert problem.message.endswith("100 are for the daemon and its workers")


# --- accepting local trainers ---------------------------------------------------------------------


def test_a_trainer_that_cannot_be_accepted_waits_and_does_not_keep_the_loop_awake(tmp_path: Path) -> None:
    """It is tried again with the next tick, and accepted when there are descriptors."""
    poller = Poller()
    with ExitStack() as stack:
        stack.callback(poller.close)
        sessions = LocalDoor(DaemonSide(poller, print, SlotPool()), SessionLimits(4, 4))
        stack.callback(sessions.close)
        sessions.bind(tmp_path / "l", tmp_path / "z")
        trainer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        with no_free_descriptors(), capture_logs() as lines:
            trainer.connect(str(tmp_path / "l"))
            for _ in range(3):
                assert is_awake(poller)
                poller.dispatch()
                assert not is_awake(poller)
                sessions.tick()
        poller.dispatch()
        assert len(sessions._by_number) == 1
        assert [line["event"] for line in lines] == ["cannot accept a trainer"]


def is_awake(poller: Poller) -> bool:
    """Return whether the loop would run again at once."""
    poll = select.poll()
    poll.register(poller.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def test_a_limit_that_is_enough_for_everything_needs_no_blanks() -> None:
    """Slots are then made as trainers need them.

    Small streams hold no descriptors for rings of 640.
    """
    plan = DescriptorPlan(limit=20_000, own=100, slots=11_520, connections=2_048, strangers=2_048)
    assert plan.need == 13_668

    assert plan.reserved == 0
    assert replace(plan, limit=plan.need + plan.strangers - 1).reserved == 11_520 // SLOT_DESCRIPTORS
    assert plan.shortage() is None
