"""The JAX loader on a real GPU: what ``test_jax_placement`` cannot show. Skipped without one."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")

from jax.sharding import SingleDeviceSharding  # noqa: E402

import batchd_client  # noqa: E402
from batchd_client.jax import BatchdLoader  # noqa: E402
from support.settings import folder_stream  # noqa: E402

EPOCHS = 20


@pytest.fixture(scope="module")
def sharding():
    try:
        return SingleDeviceSharding(jax.devices("cuda")[0])
    except RuntimeError:
        pytest.skip("there is no GPU here that JAX can use")


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve from a small ring, which is filled many times over."""
    return start_shared_daemon({"photos": folder_stream(photos)})


@pytest.mark.parametrize("prefetch", [0, 2])
def test_arrays_on_the_gpu_are_the_streams_and_never_change(daemon, sharding, prefetch):
    """Arrays are kept while the ring is reused, and compared at the end."""
    with BatchdLoader("photos", address=daemon.address, sharding=sharding, prefetch=prefetch, window=1) as loader:
        kept = [batch for _ in range(EPOCHS) for batch in loader]
    assert {array.device for batch in kept for array in batch.values()} == set(sharding.device_set)
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=EPOCHS)
        for number, arrays in enumerate(kept):
            with stream.take(number // len(stream)) as batch:
                for name, array in arrays.items():
                    assert np.array_equal(array, batch[name])


def test_a_step_that_donates_its_batch_gets_whole_arrays(daemon, sharding):
    """A donated array's memory is reused on the device while later batches arrive."""
    invert = jax.jit(lambda images: 255 - images, donate_argnums=0)
    with BatchdLoader("photos", address=daemon.address, sharding=sharding, fields=["image"], epochs=2) as loader:
        sums = [invert(batch["image"]).astype("int32").sum() for _ in range(2) for batch in loader]
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=2)
        expected = [int((255 - batch["image"].astype(np.int64)).sum()) for _ in range(2) for batch in stream]
    assert [int(one) for one in sums] == expected
