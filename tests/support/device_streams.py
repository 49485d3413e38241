"""Streams of fields that differ in shape, or do not, and the batches of a device loader."""

from pathlib import Path
from typing import Any

import numpy as np

import batchd_client
from support.daemon_process import DaemonProcess
from support.images import encode, photo
from support.settings import folder_stream

LARGEST = [40, 56, 3]
SIZES = [(12 + 7 * number % 29, 16 + 11 * number % 41) for number in range(22)]


def write_sizes(folder: Path) -> None:
    """Twenty-two images, each of another size."""
    folder.mkdir()
    for number, (height, width) in enumerate(SIZES):
        (folder / f"{number:02}.png").write_bytes(encode(photo(height, width, number), ".png"))


def streams_over(photos: Path, sizes: Path, **changes: Any) -> dict[str, Any]:
    """A stream of photographs, and streams of images of different sizes.

    They are padded, ragged, those of a batch cut to one of two sizes, in one that each batch draws,
    or four on a canvas.
    """
    room = {"max_shape": LARGEST}
    crop = {"op": "crop_to_bucket", "sizes": [[20, 24], [16, 32]]}
    return {
        "photos": folder_stream(photos, **changes),
        "padded": folder_stream(sizes, pipeline=[{"op": "decode"}, {"op": "pad_batch", "fill": 7, **room}]),
        "ragged": folder_stream(sizes, pipeline=[{"op": "decode"}, {"op": "ragged", **room}]),
        "cropped": folder_stream(sizes, pipeline=[{"op": "decode"}, crop]),
        "letterboxed": folder_stream(
            sizes, pipeline=[{"op": "decode"}, {"op": "letterbox", "sizes": [[20, 24], [16, 32]]}]
        ),
        "mosaic": folder_stream(sizes, pipeline=[{"op": "decode"}, {"op": "mosaic", "size": [16, 24]}]),
    }


def bare(
    daemon: DaemonProcess, stream: str = "photos", epochs: int = 1, batch_size: int | None = None
) -> list[dict[str, Any]]:
    """Copies of all batches from the bare client, images with their channels first."""
    with batchd_client.connect(daemon.address) as connection:
        claim = connection.stream(stream, epochs=epochs, batch_size=batch_size)
        return [
            {
                name: [row.copy() for row in field] if type(field) is list else field.copy()
                for name, field in one.items()
            }
            for _ in range(epochs)
            for one in claim
        ]


def channels_first(field: Any) -> Any:
    """Put the channels of images first, as the loader does."""
    if type(field) is list:
        return [channels_first(row[np.newaxis])[0] for row in field]
    return field.transpose(0, 3, 1, 2) if field.dtype == np.uint8 and field.ndim == 4 else field


def assert_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that every tensor of a batch equals the bare client's array."""
    assert list(given) == list(expected)
    for name, tensor in given.items():
        array = channels_first(expected[name])
        if type(array) is list:
            assert all(np.array_equal(one.numpy(), other) for one, other in zip(tensor, array, strict=True))
        else:
            assert np.array_equal(tensor.numpy(), array)


def idle(daemon: DaemonProcess, stream: str = "photos") -> bool:
    """Whether there is no subscription and no slot is held."""
    status = daemon.stream_status(stream)
    return not status["subscriptions"] and status["leased_slots"] == 0
