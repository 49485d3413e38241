"""A trainer's reaction to batches whose bytes differ from the written ones.

It counts them by position and asks again after a pause.
"""

import pytest

import batchd_client
from batchd_client import reader as client_reader
from batchd_client.errors import BatchCorrupt, BatchTimeout
from batchd_client.reader import MISMATCH_PAUSE_S, MISMATCHES_MAX
from batchd_wire.fields import CHECKSUM
from support.fake_daemon import FakeDaemon, spoilt
from support.fake_stream import FakeStream


@pytest.fixture
def fake(tmp_path):
    """A daemon all of whose batches are wrong."""
    stream = FakeStream(steps=100)
    stream.fields += (CHECKSUM,)
    with FakeDaemon(tmp_path / "run", stream) as fake:
        fake.alter_page = lambda _epoch, _step, page: spoilt(page)
        yield fake


@pytest.fixture
def daemon(fake):
    with batchd_client.connect(fake.address, batch_timeout_s=20) as daemon:
        yield daemon


@pytest.fixture
def pauses(monkeypatch, daemon):
    """The times that the trainer wanted to sleep; no real time passes.

    Meanwhile the connection is used, as by another thread.
    """
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        assert daemon.status() == {"version": "fake"}
        pauses.append(seconds)

    monkeypatch.setattr(client_reader.time, "sleep", sleep)
    return pauses


def test_other_threads_use_the_connection_while_a_trainer_waits_to_retry(daemon, pauses) -> None:
    """Each pause is twice the previous one; the last mismatch raises at once."""
    stream = daemon.stream("photos")
    with pytest.raises(BatchCorrupt, match=f"the {MISMATCHES_MAX}th time"):
        next(iter(stream))

    assert pauses == [MISMATCH_PAUSE_S * 2**time for time in range(MISMATCHES_MAX - 1)]
    assert stream.statistics().mismatches == MISMATCHES_MAX
    assert stream.statistics().resubscribed == MISMATCHES_MAX - 1


def test_mismatches_elsewhere_do_not_count_against_a_batch(daemon, pauses, monkeypatch) -> None:
    """Four mismatches at one position and a seek: the batch there still has all its tries."""
    stream = daemon.stream("photos")

    def interrupt(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == MISMATCHES_MAX - 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client_reader.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(iter(stream))
    pauses.clear()
    stream.seek(0, 7)
    with pytest.raises(BatchCorrupt, match=r"\(epoch 0, step 7\)"):
        next(iter(stream))

    assert len(pauses) == MISMATCHES_MAX - 1
    assert stream.statistics().mismatches == 2 * MISMATCHES_MAX - 1


def test_a_pause_ends_before_the_deadline_of_the_batch(fake, monkeypatch) -> None:
    """The deadline also holds for wrong batches."""
    monkeypatch.setattr(client_reader, "MISMATCH_PAUSE_S", 1000.0)
    with batchd_client.connect(fake.address, batch_timeout_s=0.05) as daemon:
        stream = daemon.stream("photos")
        with pytest.raises(BatchTimeout, match="epoch 0, step 0"):
            next(iter(stream))


def test_batches_that_become_right_are_read(fake, daemon, pauses) -> None:
    """The trainer reads each of them once."""
    filled: set[int] = set()

    def spoil_first(_epoch: int, step: int, page: bytearray) -> bytearray:
        if step in filled:
            return page
        filled.add(step)
        return spoilt(page)

    fake.alter_page = spoil_first
    assert [batch.step for batch in daemon.stream("photos", epochs=1)] == list(range(100))
    assert set(pauses) == {MISMATCH_PAUSE_S}
