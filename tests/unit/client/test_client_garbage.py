"""Connections that become garbage in a reference cycle.

They end by themselves, and the garbage collection does not hang.
"""

import gc
from functools import partial

import pytest

import batchd_client
from batchd_client.errors import DaemonClosed
from support.fake_live import FakeLive
from support.fake_remote import FakeRemoteDaemon
from support.garbage import CYCLES, collected
from support.kernel import descriptors_of


def everything(address):
    """A connection, a stream, its iterator, a batch and an array, all of them alive."""
    daemon = batchd_client.connect(address)
    stream = daemon.stream("photos")
    batches = iter(stream)
    batch = next(batches)
    return daemon, stream, batches, batch, batch["image"]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("tie", CYCLES.values(), ids=CYCLES)
def test_connection_in_a_cycle_is_collected(fake, tie) -> None:
    """It ends with all objects of a program, and alone; the daemon sees both ends."""
    collected(partial(everything, fake.address), tie)
    collected(partial(batchd_client.connect, fake.address), tie)

    fake.wait_until(lambda: fake.ended_sessions == 2)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("tie", CYCLES.values(), ids=CYCLES)
def test_connection_over_tcp_in_a_cycle_is_collected(tie) -> None:
    """Its sockets have monitors, which are sockets as well."""
    with FakeRemoteDaemon() as fake:
        collected(partial(everything, fake.address), tie)
        collected(partial(batchd_client.connect, fake.address), tie)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("tie", CYCLES.values(), ids=CYCLES)
def test_producer_in_a_cycle_is_collected(fake, tie) -> None:
    """Its mailbox is closed."""
    live = FakeLive(fake)
    try:
        collected(partial(batchd_client.push, "live", fake.address), tie)
        fake.wait_until(lambda: fake.ended_sessions == 1)
    finally:
        live.close()


def test_connection_that_the_collector_has_ended_refuses_use(fake) -> None:
    """A program's object may use it in its own finaliser, which runs after the connection's."""
    said = []

    class Model:
        def __init__(self) -> None:
            self.daemon = batchd_client.connect(fake.address)
            self.stream = self.daemon.stream("photos")
            self.me = self

        def __del__(self) -> None:
            for use in (self.daemon.status, lambda: next(iter(self.stream)), self.stream.close, self.daemon.close):
                try:
                    said.append(use())
                except DaemonClosed as error:
                    said.append(type(error))

    model = Model()
    del model
    gc.collect()

    assert said == [DaemonClosed, DaemonClosed, None, None]
    fake.wait_until(lambda: fake.ended_sessions == 1)


def test_producer_without_references_closes_its_mailbox(fake) -> None:
    """No object closes the raw descriptor by itself."""
    live = FakeLive(fake)
    try:
        producer = batchd_client.push("live", fake.address)
        del producer
        fake.wait_until(lambda: fake.ended_sessions == 1)
        # This descriptor belongs to the fake daemon.
        assert sum("batchd-fake" in name for name in descriptors_of("self").values()) == 1
    finally:
        live.close()
