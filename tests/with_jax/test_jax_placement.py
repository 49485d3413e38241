"""How long a batch is held on its way to a device with memory of its own."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")

from batchd_client.batch import WholeField  # noqa: E402
from batchd_client.jax import JaxPlacement, JaxTarget  # noqa: E402


class Batch:
    """A batch of two fields that records its release."""

    def __init__(self):
        self.fields = {name: np.arange(4, dtype=np.float32) for name in ("image", "label")}
        self.released = False

    def room(self, name):
        assert not self.released, "no code may read a released batch"
        return WholeField(self.fields[name], None, None)

    def release(self):
        self.released = True

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.release()


class Array:
    """An array that is ready when the test says so, or awaited; or donated by the loop."""

    def __init__(self, source):
        self.source = source
        self.ready = self.donated = self.failed = False

    def is_ready(self):
        assert not self.donated, "JAX may crash on this"
        return self.ready

    def block_until_ready(self):
        assert not self.donated
        if self.failed:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        self.ready = True


class Device:
    """A device with or without memory of its own; array number ``fail_at`` fails at once."""

    def __init__(self, *, keeps=False, fail_at=None):
        self.arrays = []
        self._keeps = keeps
        self._fail_at = fail_at

    def keeps_host_memory(self):
        return self._keeps

    def put(self, local):
        if len(self.arrays) == self._fail_at:
            raise KeyboardInterrupt
        self.arrays.append(Array(local))
        return self.arrays[-1]


def placed(device):
    """Return a placement, and a batch whose transfer it has begun."""
    placement, batch = JaxPlacement(["image", "label"], device), Batch()
    return placement, batch, placement.begin(batch)


def test_a_batch_is_held_until_all_of_its_arrays_are_there():
    """The transfer reads the slot; the batch is released at the next opportunity."""
    device = Device()
    placement, batch, _ = placed(device)
    assert all(array.source is batch.fields[name] for array, name in zip(device.arrays, batch.fields, strict=True))
    placement.sweep()
    device.arrays[0].ready = True
    placement.sweep()
    assert not batch.released
    device.arrays[1].ready = True
    placement.sweep()
    assert batch.released


def test_the_loop_gets_arrays_that_are_there():
    """No transfer reads the batch any more, so it is released; the arrays are the loop's."""
    device = Device()
    placement, batch, transfer = placed(device)
    given = transfer.finish()
    assert list(given.values()) == device.arrays
    assert all(array.ready for array in device.arrays)
    assert batch.released
    for array in device.arrays:
        array.donated = True
    placement.sweep()
    placement.close()


def test_finishing_again_gives_the_same():
    """An interrupt in between can cause a second call."""
    _, _, transfer = placed(Device())
    assert transfer.finish() == transfer.finish()


def test_where_an_array_keeps_host_memory_it_gets_its_own():
    """The batch is released before there is an array."""
    device = Device(keeps=True)
    _, batch, _ = placed(device)
    assert batch.released
    for array, name in zip(device.arrays, batch.fields, strict=True):
        assert not np.shares_memory(array.source, batch.fields[name])
        assert np.array_equal(array.source, batch.fields[name])


@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_batch_that_is_cut_off_is_let_go_of_and_not_given_back(fail_at):
    """The transfer still reads it, and holds it by itself."""
    device = Device(fail_at=fail_at)
    placement, batch = JaxPlacement(["image", "label"], device), Batch()
    with pytest.raises(KeyboardInterrupt):
        placement.begin(batch)
    placement.sweep()
    placement.close()
    assert not batch.released


def test_closing_waits_for_all_and_gives_them_back():
    """A second close has no effect."""
    device = Device()
    placement, first, _ = placed(device)
    second = Batch()
    placement.begin(second)
    placement.close()
    placement.close()
    assert all(array.ready for array in device.arrays)
    assert first.released
    assert second.released


def test_a_transfer_that_fails_is_an_error_of_the_loop_and_not_of_the_end():
    """The next batches are released all the same."""
    device = Device()
    placement, _, transfer = placed(device)
    device.arrays[0].failed = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        transfer.finish()
    second = Batch()
    placement.begin(second)
    placement.close()
    assert second.released


def test_a_cpu_and_memory_of_the_host_are_no_memory_of_a_devices_own():
    """An unknown kind of device does not count either."""
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    for sharding in (None, jax.sharding.SingleDeviceSharding(jax.devices()[0]), host):
        assert JaxTarget(sharding, 8, 1).keeps_host_memory()


@pytest.mark.parametrize(
    ("platform", "keeps"), [("gpu", False), ("cuda", False), ("tpu", False), ("cpu", True), ("metal", True)]
)
def test_only_devices_that_are_known_to_copy_are_let_into_the_slots(platform, keeps, monkeypatch):
    """The platform decides."""
    monkeypatch.setattr(JaxTarget, "platform", platform)
    assert JaxTarget(None, 8, 1).keeps_host_memory() == keeps


def test_the_platform_is_that_of_the_default_device_at_the_time():
    """The default device may be a name, a device, or unset."""
    target = JaxTarget(None, 8, 1)
    assert target.platform == "cpu"
    for device in (jax.devices()[0], "cpu"):
        with jax.default_device(device):
            assert target.platform == "cpu"
