"""Batches with a budget: pictures in their own size, as many as it holds."""

import numpy as np
import pytest

import batchd_client
from support.images import encode, jpeg, jpeg_with_exif, photo
from support.pools import links, pool_keys, wait_serving, worker_hosts
from support.seen import digest_of
from support.waiting import wait_until

SIDE, BUDGET, IMAGES_MAX = 4, 300, 7
SHAPES = [(24 + 7 * number % 60, 24 + 11 * number % 60) for number in range(60)]
"""Of 36 to 400 patches."""


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, (height, width) in enumerate(SHAPES):
        pixels = photo(height, width)
        upright, sideways = jpeg(pixels), jpeg_with_exif(jpeg(photo(width, height)), 6)
        files = {0: (".jpg", sideways), 1: (".jpg", upright)}
        ending, data = files.get(number % 5, (".png", encode(pixels, ".png")))
        (folder / f"{number:02}{ending}").write_bytes(data)
    return folder


def stream_of(folder, **keys):
    return {
        "source": {"type": "folder", "path": str(folder)},
        "batch_size": 1,
        "pipeline": [
            {"op": "decode"},
            {"op": "patches", "size": SIDE},
            {
                "op": "pack",
                "field": "image",
                "length": BUDGET,
                "documents": IMAGES_MAX,
                "too_long": "drop",
                "ids": False,
            },
        ],
        **keys,
    }


def images_of(batch):
    """The sample and the pixels of each image of a batch."""
    (indices,), (grids,) = batch["index"], batch["image_grid"]
    found = {}
    for sample, (rows, columns), patches in zip(
        indices.tolist(), grids.tolist(), batch.packed("image").documents(), strict=False
    ):
        cut = patches.reshape(rows, columns, SIDE, SIDE, 3).swapaxes(1, 2)
        found[sample] = cut.reshape(rows * SIDE, columns * SIDE, 3)
    assert (indices >= 0).sum() == len(found)
    return found


def epoch_of(stream):
    """The pixels of each sample of an epoch, and a digest of each batch."""
    images, digests = {}, []
    for batch in stream:
        with batch:
            found = images_of(batch)
            with pytest.raises(KeyError, match="'image_grid' is not a packed field"):
                batch.packed("image_grid")
            assert images.keys().isdisjoint(found)
            assert sum(image.shape[0] * image.shape[1] for image in found.values()) <= BUDGET * SIDE * SIDE
            images |= {sample: image.copy() for sample, image in found.items()}
            digests.append(digest_of(batch.items()))
    return images, digests


def patches_in(height, width):
    return (height // SIDE) * (width // SIDE)


FITTING = [number for number, shape in enumerate(SHAPES) if patches_in(*shape) <= BUDGET]


def test_each_picture_has_its_own_size_and_its_own_pixels_once(start_daemon, pictures):
    """A batch has few large ones or many small ones; those above the budget are counted."""
    daemon = start_daemon({"pictures": stream_of(pictures)})

    with batchd_client.connect(daemon.address) as connection, connection.stream("pictures", epochs=1) as stream:
        images, digests = epoch_of(stream)

    assert sorted(images) == FITTING
    for sample in FITTING:
        height, width = (side // SIDE * SIDE for side in SHAPES[sample])
        assert images[sample].shape == (height, width, 3)
        if sample % 5 > 1:
            assert np.array_equal(images[sample], photo(*SHAPES[sample])[:height, :width])
    assert len(digests) < 0.6 * len(FITTING)
    (line,) = daemon.log_lines("samples in no row")
    assert line["too_long"] == len(SHAPES) - len(FITTING) > 0


@pytest.mark.thorough
def test_any_number_of_workers_and_worker_hosts_give_the_same_bytes(start_daemon, tmp_path, pictures):
    """Ranks read the same batches, in equal numbers of steps."""
    seen = []
    for workers in (1, 2, 5):
        daemon = start_daemon({"pictures": stream_of(pictures)}, workers=workers)
        with batchd_client.connect(daemon.address) as connection, connection.stream("pictures", epochs=3) as stream:
            seen.append([epoch_of(stream)[1] for _epoch in range(3)])
    daemon = start_daemon({"pictures": stream_of(pictures)}, **pool_keys())
    with worker_hosts(tmp_path) as start_host:
        start_host(daemon, "--name", "one")
        wait_serving(daemon, 1, "pictures")
        with batchd_client.connect(daemon.address) as connection, connection.stream("pictures", epochs=3) as stream:
            seen.append([epoch_of(stream)[1] for _epoch in range(3)])
        (link,) = links(daemon)

    assert all(one == seen[0] for one in seen)
    assert link["disagreements"] == 0


def test_ranks_have_equal_steps_and_together_all_pictures(start_daemon, pictures):
    daemon = start_daemon({"pictures": stream_of(pictures, balance=2)})

    with batchd_client.connect(daemon.address) as connection:
        ranks = [connection.stream("pictures", rank=rank, world_size=3, epochs=1) for rank in range(3)]
        read = [epoch_of(rank) for rank in ranks]

    assert len({len(digests) for _images, digests in read}) == 1
    assert sorted({sample for images, _digests in read for sample in images}) == FITTING


def test_no_image_is_decoded_to_find_its_patches(start_daemon, pictures):
    """A picture with a good header and damaged pixels has its room, which stays empty."""
    damaged = pictures / "17.png"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)
    daemon = start_daemon({"pictures": stream_of(pictures)})

    with batchd_client.connect(daemon.address) as connection:
        with connection.stream("pictures", epochs=1) as stream:
            images, _digests = epoch_of(stream)
        (bad,) = wait_until(lambda: connection.bad("pictures").samples, "the bad sample is listed")

    assert sorted(images) == [sample for sample in FITTING if sample != 17]
    assert bad.path.endswith("17.png")
    (line,) = daemon.log_lines("samples in no row")
    assert line["bad_or_empty"] == 0
