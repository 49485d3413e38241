"""Mixup, cutmix, erasing: a batch has the numbers of its position, whoever makes and reads it."""

import numpy as np
import pytest

import batchd_client
from batchd.core.erasing import RowErasing
from batchd.core.mixing import RowMixing
from batchd_client.mixing import mixed
from batchd_wire.position import Position
from support.commands import batchd as command
from support.expected import Expected
from support.images import write_photos
from support.pools import links, pool_keys, wait_serving, worker_hosts
from support.seen import digest_of, see
from support.settings import STILL_PIPELINE, folder_stream

VIEWS = '{ op = "decode" }, { op = "views", into = { image = { count = 2, steps = [ { op = "resize", size = [8, 8] } ] } } }'
MIX = {"mixup": 0.8, "cutmix": 1.0, "by": "row"}
ERASE = {"probability": 0.5, "count": 2, "fill": "noise"}
ERASING = (0.5, (0.02, 0.33), (0.3, 3.3), 2, "noise")


def assert_drawn(batch, drawn):
    """Check that a batch has the numbers of its position, and return the names of their fields."""
    position = Position(batch.epoch, batch.step)
    wanted = {
        name: values for one in drawn for name, values in one.numbers(0, position, batch.samples)._asdict().items()
    }
    assert [name for name, values in wanted.items() if (batch[name] != values).any()] == []
    return wanted.keys()


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve forty photographs in batches of six, the last with four."""
    streams = {
        "photos": folder_stream(photos, batch_size=6, mix=MIX, erase=ERASE),
        "still": folder_stream(photos, batch_size=6, erase=ERASE, pipeline=STILL_PIPELINE, shuffle=False),
    }
    return start_shared_daemon(streams, workers=2, chunk_rows=2)


@pytest.mark.parametrize("stream", ["photos", "still"])
def test_a_batch_has_the_numbers_of_its_position(daemon, stream):
    """Also a short last one, and in each epoch others, where the images stay the same."""
    with batchd_client.connect(daemon.address) as connection, connection.stream(stream, epochs=2) as reads:
        size = reads.schema["image"].shape[:2]
        drawn = [RowErasing(*ERASING, *size)]
        if stream == "photos":
            drawn.append(RowMixing(0.8, 1.0, 1.0, 0.5, True, *size))
        for _epoch in range(2):
            for batch in reads:
                assert_drawn(batch, drawn)


def test_ranks_that_share_a_batch_mix_the_rows_that_they_have(daemon):
    """The rows of the last round are each with one rank, and so are its targets."""
    with batchd_client.connect(daemon.address) as connection:
        for rank in range(4):
            for batch in connection.stream("photos", rank, 4, epochs=1):
                images, targets = mixed(batch, 4)
                assert images.shape == batch["image"].shape
                assert np.allclose(targets.sum(1), 1)


def test_worker_hosts_fill_mixed_rows_of_views(start_daemon, tmp_path):
    """Their memory has a part of a batch, and each row the numbers of its place in the whole."""
    write_photos(tmp_path / "photos", {"cat": 12, "dog": 12}, height=300, width=400)
    crop, local = ({"op": "random_resized_crop", "size": [side, side]} for side in (64, 24))
    views = {
        "image": {"steps": [crop, {"op": "random_flip"}]},
        "other": {"steps": [crop, {"op": "color_jitter", "brightness": 0.4}, {"op": "blur"}]},
        "local": {"count": 3, "steps": [{**local, "scale": [0.05, 0.4]}]},
    }
    steps = [{"op": "decode"}, {"op": "views", "into": views}]
    plain = folder_stream(tmp_path / "photos", batch_size=8, pipeline=steps)
    streams = {
        "photos": plain,
        "mixed": {**plain, "mix": {**MIX, "field": "other"}, "erase": {**ERASE, "field": "other"}},
    }
    daemon = start_daemon(streams, **pool_keys(), chunk_rows=2)
    expected = Expected(daemon.config)
    drawn = [RowMixing(0.8, 1.0, 1.0, 0.5, True, 64, 64), RowErasing(*ERASING, 64, 64)]
    with worker_hosts(tmp_path) as start_host, batchd_client.connect(daemon.address) as connection:
        start_host(daemon, "--name", "one")
        wait_serving(daemon, 1)
        alone, together = connection.stream("photos", epochs=4), connection.stream("mixed", epochs=4)
        for epoch in range(4):
            assert see(alone) == expected.epoch(epoch)
            for batch in together:
                drawn_names = assert_drawn(batch, drawn)
                arrays = {name: np.array(batch[name]) for name in batch if name not in drawn_names}
                assert digest_of(arrays.items()) == expected.batch(batch.epoch, batch.step).digest
        (link,) = links(daemon)

    assert link["samples"] > 0
    assert link["disagreements"] == 0


def test_a_replayed_batch_has_the_numbers_of_the_run_and_a_picture_of_what_trainers_make(daemon, tmp_path):
    """The sheet has the images as they are, and below as they are mixed and erased."""
    with batchd_client.connect(daemon.address) as connection:
        crc32 = connection.stream("photos").at(1, 3).crc32()
    sheet = tmp_path / "sheet.png"
    command("replay", daemon.config, "photos", "1:3", "--verify", f"{crc32:08x}", "-o", sheet)
    assert sheet.stat().st_size > 0


def test_a_stream_without_images_of_one_size_is_refused(photos, tmp_path):
    """The key, what is wrong, and what to do are in one line."""
    config = tmp_path / "batchd.toml"
    source = f'source = {{ type = "folder", path = "{photos}" }}\n'
    for steps, text in (
        ('[{ op = "decode" }, { op = "ragged", max_shape = [64, 64, 3] }]', "which images are meant is not clear"),
        (
            '[{ op = "decode" }, { op = "resize", size = [8, 8] }, { op = "rename", field = "label", to = "mix_row" }]',
            "rename",
        ),
        (
            '[{ op = "decode" }, { op = "crop_to_bucket", pixels = 65536 }]',
            "images have another size in each batch",
        ),
        (
            f"[{VIEWS}]",
            "'image' has several views: give each a field of its own",
        ),
    ):
        stream = f"[streams.photos]\n{source}batch_size = 4\npipeline = {steps}\n"
        for key, table in [("mix", "{ mixup = 0.8 }"), ("erase", "{}")]:
            config.write_text(
                f"{stream}{key} = {table}\n".replace("mix_row", "mix_row" if key == "mix" else "erase_box")
            )
            found = command("check", config, status=2).stderr
            assert f"streams.photos.{key}" in found
            assert text in found
    config.write_text(f"[streams.photos]\n{source}batch_size = 4\nmix = {{ probability = 0.5 }}\n")
    assert "such as mixup = 0.8, cutmix = 1.0" in command("check", config, status=2).stderr
    config.write_text(f"[streams.photos]\n{source}batch_size = 4\nerase = {{ area = [0.3, 0.1] }}\n")
    assert "write the smaller number first" in command("check", config, status=2).stderr
