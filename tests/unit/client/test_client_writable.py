"""Slots that are mapped writable, for devices.

The client asks for them in each session, and arrays over them stay read-only.
"""

import os

import numpy as np
import pytest

import batchd_client
from batchd_wire.messages import AskWritable
from support.fake_daemon import FakeDaemon
from support.fake_stream import FakeStream
from support.kernel import mapped_slots


@pytest.fixture
def fake(tmp_path):
    """A daemon that allows writable slots."""
    with FakeDaemon(tmp_path / "run", FakeStream(steps=6)) as fake:
        fake.writable_slots = True
        yield fake


@pytest.fixture
def connect(fake):
    """Connect to the daemon; the connection is closed with the test."""
    connections = []

    def connect(**options):
        connections.append(batchd_client.connect(fake.address, reconnect_timeout_s=20, **options))
        return connections[-1]

    yield connect
    for connection in connections:
        connection.close()


def is_writable(batch):
    """Whether the memory of this batch is mapped writable."""
    return not batch.memory.page.readonly


@pytest.mark.parametrize(("allowed", "asked"), [(True, True), (True, False), (False, True)])
def test_a_slot_is_mapped_as_it_was_shared(fake, connect, allowed, asked) -> None:
    """The mapping is writable if the client asks for it and the daemon allows it."""
    fake.writable_slots = allowed
    batch = next(iter(connect(writable_slots=asked).stream("photos")))

    assert is_writable(batch) is (allowed and asked)
    assert len(fake.heard_of(AskWritable)) == asked
    assert mapped_slots(os.getpid()) > 0


@pytest.mark.parametrize("writable", [True, False])
def test_no_write_goes_through_an_array(connect, writable) -> None:
    """The field, its views and a request to numpy for write access all refuse."""
    batch = next(iter(connect(writable_slots=writable).stream("photos")))
    for array in (batch["image"], batch["image"][1:], batch.room("label").array, np.asarray(batch["label"])):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_it_is_asked_for_again_after_every_reconnect(fake, connect) -> None:
    """The daemon may have changed its setting by then."""
    connection = connect(writable_slots=True)
    batches = iter(connection.stream("photos", epochs=1))
    seen = [(batch.step, is_writable(batch)) for batch in (next(batches), next(batches))]
    for allowed in (False, True):
        fake.kill()
        fake.writable_slots = allowed
        fake.start()
        connection.status()
        seen += [(batch.step, is_writable(batch)) for batch in (next(batches), next(batches))]

    assert seen == [(0, True), (1, True), (2, False), (3, False), (4, True), (5, True)]
    assert len(fake.heard_of(AskWritable)) == 3
