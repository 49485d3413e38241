"""Images of different sizes, served: padded to each batch's largest, and ragged; local and TCP."""

from itertools import chain

import cv2
import numpy as np
import pytest

import batchd_client
from support.commands import batchd
from support.images import encode, photo
from support.network import free_port
from support.seen import see

LARGEST = [40, 56, 3]
SIZES = [(12 + 7 * number % 29, 16 + 11 * number % 41) for number in range(22)]
BROKEN, TOO_LARGE = 3, 17
FILL = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make 22 images of different sizes; one is broken, and one is larger than the room."""
    folder = tmp_path_factory.mktemp("sizes") / "one"
    folder.mkdir()
    for number, (height, width) in enumerate(SIZES):
        wide = LARGEST[1] + 1 if number == TOO_LARGE else width
        (folder / f"{number:02}.png").write_bytes(encode(photo(height, wide, number), ".png"))
    (folder / f"{BROKEN:02}.png").write_bytes(b"no image")
    return folder.parent


def streams_over(folder):
    """Serve the same images in two layouts, with checksums and masked bad samples."""
    stream = {
        "source": {"type": "folder", "path": str(folder)},
        "batch_size": 8,
        "on_error": "mask",
        "max_bad_fraction": 1.0,
        "verify": True,
    }
    pad = {"op": "pad_batch", "max_shape": LARGEST, "fill": FILL}
    ragged = {"op": "ragged", "max_shape": LARGEST}
    flip = {"op": "random_flip"}
    return {
        "padded": {**stream, "shuffle": False, "pipeline": [{"op": "decode"}, pad]},
        "ragged": {**stream, "shuffle": False, "pipeline": [{"op": "decode"}, ragged]},
        "random": {**stream, "pipeline": [{"op": "decode"}, flip, {**ragged, "too_large": "crop"}]},
    }


def expected_images():
    """Compute each image; a bad one is None."""
    return [
        np.zeros((0, 0, 3), np.uint8) if number in (BROKEN, TOO_LARGE) else photo(*size, number)
        for number, size in enumerate(SIZES)
    ]


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, folder):
    """Two workers share each batch; the daemon serves over TCP too."""
    return start_shared_daemon(streams_over(folder), tcp=f"127.0.0.1:{free_port()}", chunk_rows=3)


@pytest.fixture(params=["here", "far"])
def connection(request, daemon):
    """Connect a trainer on this host, and one over TCP."""
    with batchd_client.connect(daemon.address if request.param == "here" else daemon.tcp_address) as connection:
        yield connection


def test_a_padded_batch_is_as_large_as_its_largest_image(connection):
    """Each image is in its corner, with filling around it; a masked one is filling, size zero."""
    images = expected_images()
    seen = 0
    for batch in connection.stream("padded", epochs=1):
        with batch:
            part = images[seen : seen + batch.samples]
            padded = batch["image"]
            assert padded.shape == (len(part), *np.max([image.shape for image in part], axis=0))
            expected = np.full(padded.shape, FILL, np.uint8)
            for row, image in zip(expected, part, strict=True):
                row[: image.shape[0], : image.shape[1]] = image
            assert np.array_equal(padded, expected)
            assert batch["image_shape"].tolist() == [list(image.shape[:2]) for image in part]
            assert batch["valid"].tolist() == [image.size > 0 for image in part]
            seen += batch.samples
    assert seen == len(images)


def test_a_ragged_batch_is_a_list_of_images(connection):
    """Each image has its own size, without a copy; one array has all of them, with row splits."""
    images = expected_images()
    seen = 0
    for batch in connection.stream("ragged", epochs=1):
        with batch:
            part = images[seen : seen + batch.samples]
            assert all(map(np.array_equal, batch["image"], part))
            assert [image.shape for image in batch["image"]] == [image.shape for image in part]
            values, row_splits = batch.ragged("image").compact()
            assert np.array_equal(values, np.concatenate([image.reshape(-1, 3) for image in part]))
            assert np.diff(row_splits).tolist() == [image.shape[0] * image.shape[1] for image in part]
            seen += batch.samples
    assert seen == len(images)


@pytest.mark.thorough
def test_the_same_bytes_on_one_worker_and_on_two(start_daemon, daemon, folder):
    """Samples are shuffled and flipped; every field is equal."""
    alone = start_daemon(streams_over(folder), workers=1)
    with batchd_client.connect(daemon.address) as two, batchd_client.connect(alone.address) as one:
        for name in ("padded", "ragged", "random"):
            many, single = two.stream(name, epochs=2), one.stream(name, epochs=2)
            assert many.fingerprint == single.fingerprint
            assert [see(many), see(many)] == [see(single), see(single)]


def test_slots_that_are_used_again_show_nothing_of_former_samples(start_daemon, folder):
    """Zeros follow each sample, whichever worker filled the row, though some workers die."""
    random = {**streams_over(folder)["random"], "memory": "192KiB"}
    daemon = start_daemon({"random": random}, workers=2, chunk_rows=3)
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("random", epochs=8)
        for epoch in range(8):
            for batch in stream:
                room = batch.ragged("image")
                rows = room.values.reshape(batch.samples, -1, 3)
                assert not any(row[length:].any() for row, length in zip(rows, room.lengths, strict=True))
                batch.release()
            if epoch % 3 == 1:
                daemon.kill_a_worker()
    assert daemon.stream_status("random")["slots"] <= 3


def test_rows_of_several_ranks_vary_by_themselves(connection):
    """The last batch is shared: each part is cut to its own largest image, with its own sizes."""
    images = expected_images()
    ranks = [connection.stream("padded", rank, 2, epochs=1) for rank in range(2)]
    parts = 0
    for batch in chain(*(list(rank) for rank in ranks)):
        own = [images[sample] for sample in batch["index"]]
        assert batch["image"].shape[1:] == tuple(np.max([image.shape for image in own], axis=0))
        assert batch["image_shape"].tolist() == [list(image.shape[:2]) for image in own]
        parts += batch.step == len(images) // 8
    assert parts == 2


def test_a_sample_that_is_too_large_is_listed_with_both_sizes(daemon):
    """The sizes tell users what to declare."""
    with batchd_client.connect(daemon.address) as connection:
        see(connection.stream("padded", epochs=1))
    printed = batchd("bad", "padded", address=daemon.address).stdout

    assert f"57, 3], larger than the max_shape {LARGEST}" in printed
    assert f"{TOO_LARGE:02}.png" in printed


def test_a_sample_that_is_too_large_may_be_cut(daemon):
    """A cut sample is as good as any other."""
    with batchd_client.connect(daemon.address) as connection:
        for batch in connection.stream("random", epochs=1):
            assert batch["valid"].tolist() == [sample != BROKEN for sample in batch["index"]]
            widths = {sample: image.shape[1] for sample, image in zip(batch["index"], batch["image"], strict=True)}
            assert widths.get(TOO_LARGE, LARGEST[1]) == LARGEST[1]


def test_check_shows_what_varies_and_what_is_its_room(daemon):
    """The command prints both as users write them."""
    printed = batchd("check", daemon.config).stdout

    assert "image uint8[8, <=40, <=56, 3] padded, image_shape int32[8, 2], label int64[8]" in printed
    assert "image uint8[8, <=40, <=56, 3] ragged" in printed


@pytest.mark.parametrize("stream", ["padded", "ragged"])
def test_peek_draws_each_image_in_its_own_size(daemon, tmp_path, stream):
    """The sheet has the first images of the first batch, without filling."""
    sheet = tmp_path / "sheet.png"
    printed = batchd("peek", stream, "-o", sheet, address=daemon.address).stdout

    assert printed == f"{sheet}: epoch 0, step 0, 8 samples\n"
    picture = cv2.imread(str(sheet))
    assert not (picture == FILL).all(axis=2).any()
    colours = (picture[6:166].astype(int).max(axis=2) - picture[6:166].min(axis=2)).max(axis=0)
    drawn = [bool((colours[6 + 166 * row : 166 + 166 * row] > 40).any()) for row in range(8)]
    assert drawn == [row != BROKEN for row in range(8)]
