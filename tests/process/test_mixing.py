"""Mixup and cutmix: each batch has the numbers of its position, whoever makes and reads it."""

import numpy as np
import pytest

import batchd_client
from batchd.core.mixing import RowMixing
from batchd_client.mixing import MIX_FIELDS, mixed
from batchd_wire.position import Position
from support.commands import batchd as command
from support.settings import STILL_PIPELINE, folder_stream

MIX = {"mixup": 0.8, "cutmix": 1.0, "by": "row"}


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve forty photographs in batches of six, the last with four."""
    streams = {
        "photos": folder_stream(photos, batch_size=6, mix=MIX),
        "still": folder_stream(photos, batch_size=6, mix=MIX, pipeline=STILL_PIPELINE, shuffle=False),
    }
    return start_shared_daemon(streams, workers=2, chunk_rows=2)


def numbers_of(batch):
    return [np.array(batch[name]) for name in MIX_FIELDS]


@pytest.mark.parametrize("stream", ["photos", "still"])
def test_a_batch_has_the_numbers_of_its_position(daemon, stream):
    """Also a short last one, and in each epoch others, where the images stay the same."""
    with batchd_client.connect(daemon.address) as connection, connection.stream(stream, epochs=2) as reads:
        height, width = reads.schema["image"].shape[:2]
        mixing = RowMixing(0.8, 1.0, 1.0, 0.5, by_row=True, height=height, width=width)
        for _epoch in range(2):
            for batch in reads:
                wanted = mixing.numbers(0, Position(batch.epoch, batch.step), batch.samples)
                for array, expected in zip(numbers_of(batch), wanted, strict=True):
                    assert array.tolist() == expected.tolist()


def test_ranks_that_share_a_batch_mix_the_rows_that_they_have(daemon):
    """The rows of the last round are each with one rank, and so are its targets."""
    with batchd_client.connect(daemon.address) as connection:
        for rank in range(4):
            for batch in connection.stream("photos", rank, 4, epochs=1):
                images, targets = mixed(batch, 4)
                assert images.shape == batch["image"].shape
                assert np.allclose(targets.sum(1), 1)


def test_a_replayed_batch_has_the_numbers_of_the_run_and_a_picture_of_the_mix(daemon, tmp_path):
    """The sheet has the images as they are, and below as they are mixed."""
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
        ('[{ op = "decode" }, { op = "ragged", max_shape = [64, 64, 3] }]', "which images are mixed is not clear"),
        (
            '[{ op = "decode" }, { op = "resize", size = [8, 8] }, { op = "rename", field = "label", to = "mix_row" }]',
            "rename",
        ),
    ):
        config.write_text(f"[streams.photos]\n{source}batch_size = 4\npipeline = {steps}\nmix = {{ mixup = 0.8 }}\n")
        found = command("check", config, status=2).stderr
        assert "streams.photos.mix" in found
        assert text in found
    config.write_text(f"[streams.photos]\n{source}batch_size = 4\nmix = {{ probability = 0.5 }}\n")
    assert "such as mixup = 0.8, cutmix = 1.0" in command("check", config, status=2).stderr
