"""A daemon that sends messages that no real daemon sends.

None of them reaches the user, and afterwards the stream continues.
"""

import fcntl
import os
from dataclasses import replace
from functools import partial

import pytest

import batchd_client
from batchd_client import session as session_module
from batchd_client import subscription as subscription_module
from batchd_client.errors import ProtocolError
from batchd_wire import messages as wire
from batchd_wire.channel import send_message
from batchd_wire.codes import ErrorCode
from support.fake_daemon import SEALS, FakeDaemon, altered_handle, make_slot
from support.waiting import wait_until


def well_behaved(message):
    return message


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough


def take(daemon, batches: int = 1) -> None:
    stream = daemon.stream("photos")
    for _ in range(batches):
        next(iter(stream))


def make_honest(fake: FakeDaemon) -> None:
    fake.alter = well_behaved
    fake.alter_slot = lambda *shared: shared


BAD_HANDLES = {
    "a sequence that was left out": {"sequence": 1},
    "another epoch": {"epoch": 1},
    "another step": {"step": 3},
    "more rows than there are": {"count": 5},
    "rows outside": {"first": 1},
    "a bucket that is not there": {"bucket": 1},
    "a bucket beyond all": {"bucket": 1 << 60},
    "a generation that is not there": {"generation": 99},
    "the generation of a slot that is being filled": {"generation": 0},
}


@pytest.mark.parametrize("changes", BAD_HANDLES.values(), ids=BAD_HANDLES)
def test_handle_that_does_not_fit_is_refused_and_the_next_session_works(fake, daemon, changes) -> None:
    """The client checks the due position, the layout and the slot's own header."""
    fake.alter = altered_handle(**changes)
    stream = daemon.stream("photos")
    with pytest.raises(ProtocolError):
        next(iter(stream))
    assert stream.statistics().batches_held == 0

    make_honest(fake)

    assert [batch.step for batch in stream] == [0, 1, 2, 3, 4]
    assert stream.statistics().resubscribed == 1


def joined(message, *, fields: int = 99, further: tuple[int, ...] = ()):
    """For ``alter``: send the first ``fields`` fields of a handle as one of several, and more."""
    if not isinstance(message, wire.Handle):
        return message
    return wire.Handles([[*wire.Handle.values_of(message)[:fields], *further]])


def test_handles_that_come_together_are_taken_in_order(fake, daemon) -> None:
    """Fields of a later version are skipped."""
    fake.alter = partial(joined, further=(5, 6))

    assert [batch.step for batch in daemon.stream("photos")] == [0, 1, 2, 3, 4]


def test_a_handle_that_lacks_a_field_is_refused_and_the_next_session_works(fake, daemon) -> None:
    """It has one field less than the first version of the message."""
    fake.alter = partial(joined, fields=wire.Handle.required - 1)
    stream = daemon.stream("photos")
    with pytest.raises(ProtocolError, match="a handle of 7 fields"):
        next(iter(stream))

    make_honest(fake)

    assert [batch.step for batch in stream] == [0, 1, 2, 3, 4]


def test_repeated_handle_is_refused(fake, daemon) -> None:
    """A repeated batch would be one batch too many."""
    fake.alter = altered_handle(sequence=0, step=0)

    with pytest.raises(ProtocolError, match="number 1"):
        take(daemon, batches=2)


def larger_memory(number: int, slot_bytes: int, _descriptor: int) -> tuple[int, int, int]:
    return number, slot_bytes, make_slot(slot_bytes + 4096)


def smaller_memory(number: int, slot_bytes: int, _descriptor: int) -> tuple[int, int, int]:
    return number, slot_bytes, make_slot(slot_bytes - 4096)


def honest_about_being_smaller(number: int, slot_bytes: int, _descriptor: int) -> tuple[int, int, int]:
    return number, slot_bytes - 4096, make_slot(slot_bytes - 4096)


def not_sealed(number: int, slot_bytes: int, _descriptor: int) -> tuple[int, int, int]:
    return number, slot_bytes, make_slot(slot_bytes, seals=SEALS & ~fcntl.F_SEAL_SHRINK)


def a_plain_file(number: int, slot_bytes: int, _descriptor: int) -> tuple[int, int, int]:
    return number, slot_bytes, os.open("/proc/self/exe", os.O_RDONLY)


def a_device(number: int, slot_bytes: int, _descriptor: int) -> tuple[int, int, int]:
    return number, slot_bytes, os.open("/dev/zero", os.O_RDONLY)


@pytest.mark.parametrize(
    "share", [larger_memory, smaller_memory, honest_about_being_smaller, not_sealed, a_plain_file, a_device]
)
def test_memory_with_wrong_size_or_seals_is_never_mapped(fake, daemon, share) -> None:
    """Size and seals come from the kernel, so the daemon cannot shrink a reader's memory."""
    daemon.status()
    before = descriptors()
    fake.alter_slot = share
    with pytest.raises(ProtocolError, match="slot"):
        take(daemon)
    make_honest(fake)

    assert [batch.step for batch in daemon.stream("photos")] == [0, 1, 2, 3, 4]
    # Each slot has a descriptor for writing and one of its mapping.
    wait_until(lambda: descriptors() <= before + 2 * len(fake.slots), "no refused descriptor stays open")


def test_slot_whose_memory_never_arrives_is_an_error_and_no_hang(fake, daemon, monkeypatch) -> None:
    """The client waits for the lifeline only until its deadline."""
    monkeypatch.setattr(session_module, "SLOT_WAIT_S", 0.05)
    fake.alter = altered_handle(slot=77)

    with pytest.raises(ProtocolError, match=r"slot 77.*never came"):
        next(iter(daemon.stream("photos")))


def test_memory_that_arrives_after_its_handle_is_accepted(fake, daemon) -> None:
    """The two sockets need no common order."""
    late = []

    def hold_back(number: int, slot_bytes: int, descriptor: int) -> tuple[int, int, int]:
        late.append(wire.SlotShared(number, slot_bytes))
        return number + 1000, slot_bytes, descriptor

    fake.alter_slot = hold_back
    fake.grants_at_most = 1
    stream = daemon.stream("photos")
    daemon.status()  # the handle has arrived, and its memory has not

    def share() -> None:
        make_honest(fake)
        send_message(fake.sessions[0].lifeline, late[0], (fake.slots[0].descriptor,))

    fake.do(share)

    assert next(iter(stream)).step == 0


BAD_LAYOUTS = {
    "none": None,
    "no field": [[], 4, 8192],
    "a field outside": [[["image", "uint8", [2, 2, 3], 8192, "", []]], 4, 8192],
    "an object": [[["image", "object", [2], 4096, "", []]], 4, 8192],
    "a field over the header": [[["image", "uint8", [2], 64, "", []]], 4, 8192],
    "rows that vary and do not say how": [[["image", "uint8", [2], 4096, "ragged", [0]]], 4, 8192],
}


@pytest.mark.parametrize("layout", BAD_LAYOUTS.values(), ids=BAD_LAYOUTS)
def test_impossible_layout_is_refused(fake, daemon, layout) -> None:
    """The client never reads outside of a slot."""
    fake.alter = lambda message: replace(message, layout=layout) if isinstance(message, wire.Subscribed) else message

    with pytest.raises(ProtocolError, match="slots"):
        daemon.stream("photos")


NONSENSE = {
    "no msgpack": b"\xc1",
    "nothing": b"",
    "no array": b"\x05",
    "an unknown number": b"\x91\x7f",
    "too few fields": b"\x91\x16",
    "trailing bytes": wire.Opened("x").encode() + b"!",
    "a second opening": wire.Opened("x").encode(),
    "a negative number": b"\x98\x16" + 7 * b"\x00" + b"\xff",
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE)
def test_bytes_that_are_no_message_are_refused_and_the_next_session_works(fake, daemon, data) -> None:
    """Bytes from ZeroMQ are a known message or an error."""
    stream = daemon.stream("photos")
    fake.do(lambda: fake.send(fake.sessions[0], data))

    with pytest.raises(ProtocolError):
        list(stream)

    assert daemon.status() == {"version": "fake"}


def test_flood_of_handles_is_disconnected(fake, daemon, monkeypatch) -> None:
    """The client limits the memory for messages that it did not ask for."""
    monkeypatch.setattr(subscription_module, "HANDLES_MAX", 10)
    daemon.stream("photos").close()
    stream = daemon.stream("photos")
    number = max(fake.sessions[0].subscriptions)
    fake.do(
        lambda: [
            fake.send(fake.sessions[0], wire.Handle(number, 2 + more, 0, 2 + more, 1, 1, 0, 4)) for more in range(20)
        ]
    )

    with pytest.raises(ProtocolError, match="never asked for"):
        daemon.status()
    assert [batch.step for batch in stream] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "message",
    [wire.Welcome(1, b"x" * 16), wire.Refused(0, 0, ErrorCode.NOT_ALLOWED, "no"), wire.SlotShared(1, 4096)],
    ids=["a second welcome", "a refusal", "a slot without memory"],
)
def test_nonsense_on_the_lifeline_is_refused(fake, daemon, message) -> None:
    """In an open session, the lifeline carries only slots with their memory."""
    fake.grants_at_most = 0
    fake.do(lambda: send_message(fake.sessions[0].lifeline, message))

    with pytest.raises(ProtocolError, match="lifeline"):
        take(daemon)


def test_answer_of_another_kind_is_refused(fake, daemon) -> None:
    """Each request accepts only its own kind of answer."""

    def confuse(session, message) -> bool:
        if isinstance(message, wire.Subscribe):
            fake.send(session, b"\x93\x18" + bytes([message.request]) + b"\x80")
        return isinstance(message, wire.Subscribe)

    fake.answer = confuse
    with pytest.raises(ProtocolError):
        daemon.stream("photos")


@pytest.mark.parametrize(
    "reply",
    [wire.Welcome(1, b"short"), wire.SlotShared(1, 4096)],
    ids=["a short secret", "a slot"],
)
def test_nonsense_instead_of_a_welcome_is_refused(fake, reply) -> None:
    """The process that listens there is no daemon."""

    def answer(session, message) -> bool:
        if isinstance(message, wire.Hello):
            send_message(session.lifeline, reply)
        return isinstance(message, wire.Hello)

    fake.answer = answer
    with pytest.raises(ProtocolError, match=r"lifeline\.sock"):
        batchd_client.connect(fake.address)


def test_opening_with_a_nonsense_answer_is_refused(fake) -> None:
    """No half-open connection remains."""

    def answer(session, message) -> bool:
        if isinstance(message, wire.Open):
            fake.send(session, b"\x93\x18\x00\x80")
        return isinstance(message, wire.Open)

    fake.answer = answer
    with pytest.raises(ProtocolError):
        batchd_client.connect(fake.address)
