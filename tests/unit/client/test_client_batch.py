"""The content of a batch, and the lifetime of its memory.

Leases follow the lifetime of Python's objects.
"""

import gc
import sys
import threading
import zlib

import numpy as np
import pytest

import batchd_client
from batchd_client.errors import BatchReleased, RingExhausted
from batchd_wire.codes import ErrorCode
from batchd_wire.messages import Pull
from support.fake_daemon import FakeDaemon
from support.fake_stream import FakeStream


@pytest.fixture
def fake(tmp_path):
    with FakeDaemon(tmp_path / "run", FakeStream(steps=50)) as fake:
        yield fake


@pytest.fixture
def batches(daemon):
    return iter(daemon.stream("photos"))


@pytest.fixture
def held(fake, daemon, batches):
    """Take one more batch; return the earlier ones that the daemon still counts as held."""

    def take_and_look() -> list[int]:
        newest = next(batches).step
        daemon.status()  # its reply comes after the pull
        return [sequence for sequence in fake.held_sequences() if sequence < newest]

    return take_and_look


def test_batch_holds_what_its_position_says(batches, fake) -> None:
    """Arrays have the stream's fields, rows and values."""
    batch = next(batches)

    assert (batch.epoch, batch.step, batch.samples) == (0, 0, 4)
    assert batch["image"].shape == (4, 2, 2, 3)
    assert batch["image"].dtype == np.uint8
    np.testing.assert_array_equal(batch["label"], fake.stream.label(0, 0))
    assert batch.wait_s > 0


def test_batch_is_a_mapping(batches) -> None:
    """It can replace a dict of arrays."""
    batch = next(batches)

    assert list(batch) == list(batch.keys()) == ["image", "label"]
    assert len(batch) == 2
    assert dict(batch)["label"] is batch["label"]
    assert "path" not in batch
    assert batch == batch  # noqa: PLR0124  by identity: comparing arrays has no single answer
    assert {batch: 1}[batch] == 1


def test_unknown_field_is_refused_with_the_known_ones(batches) -> None:
    """A mistyped name raises at once."""
    with pytest.raises(KeyError, match="image, label"):
        next(batches)["images"]


def test_arrays_are_read_only_and_not_copied(batches) -> None:
    """No trainer can write into memory that other trainers read."""
    batch = next(batches)
    array = batch["image"]

    assert not array.flags.writeable
    assert not array.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_an_export_by_dlpack_is_read_only_and_not_copied(batches) -> None:
    """A consumer that does not know the read-only flag gets an error."""
    batch = next(batches)
    exported = np.from_dlpack(batch.dlpack("image"))

    assert not exported.flags.writeable
    assert np.shares_memory(exported, batch["image"])
    with pytest.raises(BufferError, match="readonly"):
        batch.dlpack("image").__dlpack__()
    batch.release()
    with pytest.raises(BatchReleased):
        batch.dlpack("image")


def test_tensors_without_torch_are_refused_with_what_to_install(batches, monkeypatch) -> None:
    """The batch stays usable."""
    for name in ("batchd_client.torch", "batchd_client.torch.tensors"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    batch = next(batches)

    with pytest.raises(ImportError, match="pip install torch"):
        batch.to_torch()
    assert batch["image"].shape == (4, 2, 2, 3)


def test_batch_without_references_is_returned_with_the_next_pull(batches, held) -> None:
    """It is enough to assign the loop's variable again."""
    next(batches)

    assert held() == []


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch,
        lambda batch: batch["label"],
        lambda batch: batch["image"][1, :, 0],
        lambda batch: memoryview(batch["label"]),
        lambda batch: np.frombuffer(batch["image"], np.uint8),
        lambda batch: batch["image"].reshape(-1).view(np.int8),
        lambda batch: np.from_dlpack(batch.dlpack("image")),
        lambda batch: batch.dlpack("image").__dlpack__(max_version=(1, 0)),
    ],
    ids=["batch", "array", "slice", "memoryview", "frombuffer", "view", "dlpack", "capsule"],
)
def test_lease_lives_as_long_as_any_reader_of_its_memory(batches, held, keep) -> None:
    """The batch object itself may be deleted earlier.

    Its last view ends the lease, and the next pull returns the slot.
    """
    kept = keep(next(batches))
    assert held() == [0]

    del kept

    assert held() == []


def test_copy_does_not_hold_the_lease(batches, fake, held) -> None:
    """This is the remedy that the error about hoarding names."""
    kept = next(batches)["label"].copy()

    assert held() == []
    np.testing.assert_array_equal(kept, fake.stream.label(0, 0))


def test_batch_in_a_cycle_is_returned_when_the_collector_finds_it(batches, held) -> None:
    """A lease can end inside the garbage collector."""
    cycle = [next(batches)]
    cycle.append(cycle)
    assert held() == [0]

    del cycle
    gc.collect()

    assert held() == []


def test_release_returns_the_slot_while_views_are_alive(batches, held) -> None:
    """The explicit call is enough."""
    batch = next(batches)
    view = batch["image"]

    batch.release()

    assert held() == []
    assert view.shape == (4, 2, 2, 3)  # still mapped, though the slot was returned


def test_released_batch_refuses_access_by_name(batches) -> None:
    """This also holds for a batch whose array was read before."""
    batch = next(batches)
    batch["label"]

    batch.release()

    assert batch.released
    with pytest.raises(BatchReleased, match=r"epoch 0, step 0.*'photos'.*'label'"):
        batch["label"]
    assert "[released]" in repr(batch)
    assert (batch.epoch, batch.step) == (0, 0)


def test_a_checksum_of_a_batch_covers_its_rows_field_after_field(batches) -> None:
    """It is the CRC-32 of the rows' bytes, and a released batch has none."""
    batch = next(batches)
    rows = [b"".join(np.asarray(batch[name])[row].tobytes() for name in batch) for row in range(batch.samples)]

    assert batch.crc32() == zlib.crc32(b"".join(rows))
    batch.release()
    with pytest.raises(BatchReleased):
        batch.crc32()


def test_with_releases_at_its_end(batches) -> None:
    """This also holds if the body raises."""
    with pytest.raises(ZeroDivisionError), next(batches) as batch:
        1 / 0  # noqa: B018

    assert batch.released


def test_releasing_twice_returns_the_slot_once(batches, held) -> None:
    """Two releases and the end of the object end one lease, and no other."""
    kept = next(batches)
    batch = next(batches)
    array = batch["label"]
    batch.release()
    batch.release()
    del batch, array

    assert held() == [0]
    assert kept["label"][0] == 0


def test_repr_shows_the_content(batches) -> None:
    """The fields and the position are enough to identify a batch."""
    assert repr(next(batches)) == "<Batch photos epoch=0 step=0 samples=4 image=uint8[4, 2, 2, 3] label=int64[4]>"


def test_release_in_another_thread_wakes_a_waiting_trainer(tmp_path) -> None:
    """While the loop waits for a slot, another thread that reads one can release it."""
    with (
        FakeDaemon(tmp_path / "run", FakeStream(slots=2)) as fake,
        batchd_client.connect(fake.address) as daemon,
    ):
        batches = iter(daemon.stream("photos"))
        first, second = next(batches), next(batches)
        waiting = threading.Event()

        def release_when_waiting() -> None:
            fake.wait_until(lambda: any(pull.waiting and pull.consumed == 2 for pull in fake.heard_of(Pull)))
            waiting.set()
            first.release()

        thread = threading.Thread(target=release_when_waiting)
        thread.start()
        third = next(batches)
        thread.join()

        assert waiting.is_set()
        assert [second.step, third.step] == [1, 2]


def test_hoarding_is_an_error_that_counts_and_ends_with_a_release(batches, fake) -> None:
    """After that remedy, the loop continues at the same position."""
    fake.grant_up_to(3)
    hoard = [next(batches) for _ in range(3)]
    fake.answer = lambda session, message: fake.refuses(
        session, message, ErrorCode.RING_EXHAUSTED, "holds 3 of 3 slots"
    )
    with pytest.raises(RingExhausted, match=r"holds 3 of 3 slots \(3 .*alive in this program\)[\s\S]*release"):
        next(batches)
    hoard.clear()
    fake.answer = lambda _session, _message: False
    fake.grant_up_to(9)

    assert next(batches).step == 3


def test_batches_outlive_the_connection(fake) -> None:
    """The lifeline ends with the last lease, not with ``close``.

    Until then the daemon writes nothing over them.
    """
    with batchd_client.connect(fake.address) as daemon:
        stream = daemon.stream("photos")
        array = next(iter(stream))["label"]
    fake.wait_until(lambda: fake.sessions[0].subscriptions[1].ended)
    assert fake.held_sequences() == [0]
    assert fake.ended_sessions == 0
    np.testing.assert_array_equal(array, fake.stream.label(0, 0))

    del array

    fake.wait_until(lambda: fake.ended_sessions == 1)
