"""Slots that trainers may map writable if allowed; checksums find a trainer that spoils them."""

import pytest

import batchd_client
from support.expected import Expected
from support.network import free_port
from support.seen import see
from support.settings import folder_stream


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve writable slots, also with checksums."""
    streams = {"photos": folder_stream(photos), "verified": folder_stream(photos, verify=True)}
    return start_shared_daemon(streams, writable_slots=True, tcp=f"127.0.0.1:{free_port()}")


def is_writable(batch):
    """Tell whether the memory of this batch is mapped writable."""
    return not batch.memory.page.readonly


def read(connection):
    """Read an epoch; also return whether any batch was in writable memory."""
    with connection.stream("photos", epochs=1) as stream:
        first = next(iter(stream))
        writable = is_writable(first)
        first.release()
        stream.seek(0)
        return see(stream), writable


def test_a_trainer_that_asks_gets_writable_slots_if_allowed_and_all_get_the_same_batches(daemon, start_daemon):
    """Trainers that do not ask notice no difference."""
    for serving, allowed in ((start_daemon(), False), (daemon, True)):
        expected = Expected(serving.config)
        with (
            batchd_client.connect(serving.address, writable_slots=True) as asking,
            batchd_client.connect(serving.address) as other,
        ):
            assert read(asking) == (expected.epoch(0), allowed)
            assert read(other) == (expected.epoch(0), False)


def test_over_tcp_no_trainer_asks(daemon):
    """Batches over TCP are copies."""
    with batchd_client.connect(daemon.tcp_address, writable_slots=True) as far:
        assert see(far.stream("photos", epochs=1)) == Expected(daemon.config).epoch(0)


def test_a_batch_that_another_trainer_spoilt_is_noticed_and_made_again(daemon):
    """With ``verify = true``, a later reader gets the bytes that the worker wrote."""
    expected = Expected(daemon.config, "verified")
    with (
        batchd_client.connect(daemon.address, writable_slots=True) as bad,
        batchd_client.connect(daemon.address) as good,
    ):
        spoiler, stream = bad.stream("verified", epochs=1), good.stream("verified", epochs=1)
        batch = next(iter(spoiler))
        start = batch["image"].__array_interface__["data"][0] - batch.memory.address
        batch.memory.page[start] ^= 1

        assert see(stream) == expected.epoch(0)
        assert stream.statistics().mismatches >= 1
