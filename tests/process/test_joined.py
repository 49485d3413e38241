"""Rows of several samples are the same, whichever worker makes them, and whatever it has kept."""

import pytest

import batchd_client
from support.seen import see
from support.settings import folder_stream

JOINED = [
    {"op": "decode"},
    {"op": "mosaic", "size": [24, 32], "near": 3},
    {"op": "mixup", "near": 2, "probability": 0.5},
]


def _seen(start_daemon, photos, workers):
    daemon = start_daemon({"photos": folder_stream(photos, batch_size=5, pipeline=JOINED)}, workers=workers)
    with batchd_client.connect(daemon.address) as connection:
        batches = connection.stream("photos", epochs=2)
        return [see(batches) for _epoch in range(2)]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("workers", [2, 3])
def test_rows_that_join_samples_near_them_do_not_depend_on_the_number_of_workers(start_daemon, photos, workers):
    """One worker has all rows of the batches from which they are taken; several have some each."""
    assert _seen(start_daemon, photos, workers) == _seen(start_daemon, photos, 1)
