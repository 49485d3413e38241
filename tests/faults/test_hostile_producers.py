"""Producers that lie, overwrite places, or never answer: others lose a place at most.

A process that may push can write into every place at any time, so it can damage samples, and
nothing else.
"""

import fcntl
import os
import signal
import struct

import pytest

import batchd_client
from batchd_wire import messages as wire
from batchd_wire.channel import receive_message
from batchd_wire.codes import ErrorCode
from batchd_wire.mailbox import place_layout_from_wire
from support.producers import frame, push_stream, read
from support.raw_peer import RawPeer
from support.waiting import wait_until

DECODED = {
    **push_stream(batch_size=1, sample_bytes_max="4KiB", fields={"image": "image", "more": "image"}),
    "pipeline": [
        step
        for field in ("image", "more")
        for step in ({"op": "decode", "field": field}, {"op": "resize", "size": [8, 8], "field": field})
    ],
    "max_bad_fraction": 1.0,
}


@pytest.fixture(scope="module")
def daemon(start_shared_daemon):
    """Serve a live stream for each test."""
    live = {name: push_stream() for name in ("not-lent", "other", "uncut", "flagged")}
    few = {name: push_stream(capacity=8) for name in ("overwritten", "stopped")}
    streams = {**live, **few, "held": push_stream(capacity=16), "lengths": DECODED}
    return start_shared_daemon(streams)


class Hostile:
    """A producer that does not follow the protocol."""

    def __init__(self, daemon, stream):
        self.peer = RawPeer(daemon.runtime_dir).open()
        told = self.peer.ask(wire.Produce(1, stream))
        assert isinstance(told, wire.Producing)
        self.stream, self.layout = told.stream, place_layout_from_wire(told.layout)
        shared, (self.mailbox,) = receive_message(self.peer.lifeline, wire.TO_TRAINER_LIFELINE)
        assert isinstance(shared, wire.MailboxShared)

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        os.close(self.mailbox)
        self.peer.close()

    def ask(self):
        lent = self.peer.ask(wire.AskPlace(2, self.stream))
        assert isinstance(lent, wire.PlaceLent)
        return lent.place

    def write(self, place, data):
        os.pwrite(self.mailbox, data, place * self.layout.place_bytes)


def test_places_that_were_not_lent_are_refused(daemon):
    """A wrong number, another stream's place and a second use are each refused and counted."""
    with Hostile(daemon, "not-lent") as hostile:
        for stream, place in ((hostile.stream, 0), (hostile.stream, 1 << 62), (hostile.stream + 1, 0), (77, 0)):
            refused = hostile.peer.ask(wire.Pushed(3, stream, place))
            assert isinstance(refused, wire.Refused)
            assert (refused.request, refused.error) == (3, ErrorCode.PLACE_NOT_LENT)
        place = hostile.ask()
        assert hostile.ask() == place, "a producer that asks twice has one place"
        assert isinstance(hostile.peer.ask(wire.Pushed(4, hostile.stream, place)), wire.PushTaken)
        hostile.peer.dealer.send(wire.WithdrawAsk(hostile.stream).encode())
        assert isinstance(hostile.peer.ask(wire.Pushed(5, hostile.stream, place)), wire.Refused)
    live = daemon.stream_status("not-lent")["live"]
    assert (live["pushed_samples"], live["refused_pushes"]) == (1, 3)


def test_producers_that_never_write_delay_no_other_producer(daemon):
    """Each holds a place; the rest is enough, and all places return when the producers die."""
    hostile = [Hostile(daemon, "held") for _ in range(5)]
    try:
        assert len({one.ask() for one in hostile}) == 5
        with (
            batchd_client.push("held", daemon.address) as producer,
            batchd_client.connect(daemon.address) as connection,
        ):
            stream = connection.stream("held")
            for number in range(40):
                producer.put(frame(number))
                if number % 4 == 3:
                    assert read(stream, 1) == list(range(number - 3, number + 1))
    finally:
        for one in hostile:
            one.__exit__()
    wait_until(lambda: daemon.stream_status("held")["live"]["lent_places"] == 0, "the places are free")


IMPOSSIBLE = [(1 << 63, 1 << 63), ((1 << 64) - 1, 0), (1 << 20, 5), (0, 0), (3, 1 << 40), (0xDEADBEEF, 0xDEADBEEF)]


def test_lengths_that_cannot_be_make_a_bad_sample(daemon):
    """The worker reads a copy, and survives."""
    workers = daemon.worker_pids()
    with Hostile(daemon, "lengths") as hostile, batchd_client.connect(daemon.address) as connection:
        reads = iter(connection.stream("lengths"))
        for lengths in IMPOSSIBLE:
            place = hostile.ask()
            hostile.write(place, struct.pack("<2Q", *lengths) + os.urandom(4096))
            assert isinstance(hostile.peer.ask(wire.Pushed(3, hostile.stream, place)), wire.PushTaken)
            with next(reads) as batch:
                assert batch["valid"].tolist() == [False], lengths
                assert batch["image"].max() == 0
    assert daemon.worker_pids() == workers


def test_a_producer_that_writes_into_others_places_spoils_pixels_and_nothing_else(daemon):
    """Batches keep their shape and keep coming while a producer overwrites every place."""
    workers = daemon.worker_pids()
    with (
        Hostile(daemon, "overwritten") as hostile,
        batchd_client.push("overwritten", daemon.address) as producer,
        batchd_client.connect(daemon.address) as connection,
    ):
        stream = iter(connection.stream("overwritten"))
        for number in range(40):
            for place in range(8):
                hostile.write(place, os.urandom(hostile.layout.place_bytes))
            producer.put(frame(number))
            if number % 4 == 3:
                with next(stream) as batch:
                    assert batch["image"].shape == (4, 6, 8)
    assert daemon.worker_pids() == workers


def test_the_mailbox_can_neither_be_cut_nor_sealed_nor_grown(daemon):
    """The memory that a worker reads stays mapped."""
    with Hostile(daemon, "uncut") as hostile:
        size = os.fstat(hostile.mailbox).st_size
        for length in (0, size - 1, size + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(hostile.mailbox, length)
        with pytest.raises(PermissionError):
            os.pwrite(hostile.mailbox, b"x", size)
        with batchd_client.push("uncut", daemon.address) as producer:
            producer.put(frame(1))


def test_flags_of_a_hostile_descriptor_are_its_own(daemon):
    """Copied descriptors would share flags: O_APPEND on a sealed mailbox would stop all writers."""
    with Hostile(daemon, "flagged") as hostile:
        fcntl.fcntl(hostile.mailbox, fcntl.F_SETFL, os.O_APPEND)
        with pytest.raises(PermissionError):
            os.pwrite(hostile.mailbox, b"x", 0)
        with batchd_client.push("flagged", daemon.address) as producer:
            producer.put(frame(1))


def test_a_stopped_producer_keeps_its_place_until_it_is_dead(daemon):
    """The producer may be in the middle of its sample."""
    child = os.fork()
    if not child:
        try:
            with Hostile(daemon, "stopped") as hostile:
                hostile.ask()
                signal.pause()
        finally:
            os._exit(0)
    try:
        wait_until(lambda: daemon.stream_status("stopped")["live"]["lent_places"] == 1, "it has its place")
        os.kill(child, signal.SIGSTOP)
        with batchd_client.push("stopped", daemon.address) as producer:
            assert [producer.put(frame(number)) for number in range(7)] == [True] * 7
        assert daemon.stream_status("stopped")["live"]["lent_places"] == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    wait_until(lambda: daemon.stream_status("stopped")["live"]["lent_places"] == 0, "its place is free")
