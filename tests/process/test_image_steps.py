"""Streams with every step on images: the bytes that one process computes."""

from pathlib import Path

import numpy as np

import batchd_client
from support import followed_source
from support.expected import Expected
from support.seen import see
from support.settings import folder_stream

EVERY_STEP = [
    {"op": "decode"},
    {"op": "random_resized_crop", "size": [36, 40]},
    {"op": "color_jitter", "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    {"op": "random_crop", "size": [32, 32], "padding": 4, "fill": [124, 116, 104]},
    {"op": "random_flip", "direction": "both"},
    {"op": "rotate", "quarter_turns": [0, 1, 2, 3]},
    {"op": "rotate", "degrees": [-10, 10]},
    {"op": "cutout", "size": [6, 6]},
    {"op": "pad", "border": [1, 1, 1, 1]},
]
FOLLOWED = [
    {"op": "decode"},
    {"op": "follow", "mask": "mask", "boxes": "boxes", "points": "points", "mask_fill": 255},
    {"op": "random_flip", "direction": "both"},
    {"op": "color_jitter", "brightness": 0.1},
    {"op": "random_crop", "size": [44, 44], "padding": 6},
    {"op": "to", "dtype": "float32"},
]


def test_every_step_gives_the_bytes_that_one_process_works_out(start_daemon, photos):
    """The test computes whole epochs from the configuration alone."""
    ends = {
        "floats": [{"op": "subtract_mean"}, {"op": "layout"}],
        "grey": [{"op": "gray", "channels": 1}, {"op": "to"}],
    }
    streams = {name: folder_stream(photos, pipeline=[*EVERY_STEP, *end]) for name, end in ends.items()}
    daemon = start_daemon(streams)
    with batchd_client.connect(daemon.address) as connection:
        for name in streams:
            expected = Expected(daemon.config, name)
            reads = connection.stream(name, epochs=2)
            assert [see(reads), see(reads)] == [expected.epoch(0), expected.epoch(1)]


def test_masks_boxes_and_points_reach_the_trainer_in_step_with_their_image(start_daemon, tmp_path, monkeypatch):
    """Rectangle, mask, box and corners flip and crop together; a mask of another size is bad."""
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "site")))
    source = {"type": "plugin", "name": "followed", "options": {"samples": 40}}
    stream = {"source": source, "batch_size": 8, "pipeline": FOLLOWED, "max_bad_fraction": 1.0, "on_error": "mask"}
    daemon = start_daemon({"rectangles": stream})

    with batchd_client.connect(daemon.address) as connection:
        for batch in connection.stream("rectangles", epochs=1):
            for row, number in enumerate(batch["index"]):
                assert batch["valid"][row] == (number % 5 != 4)
                check_rectangle({name: batch[name][row] for name in ("image", "mask", "boxes", "points")})
        bad = connection.bad("rectangles").samples

    assert len(bad) == 8
    assert all("its 'mask': has 64 x 47 pixels, and the image 64 x 48" in one.reason for one in bad)


def check_rectangle(sample):
    """Check that the image is bright where the mask is 1: inside the box, between the points."""
    bright = sample["image"][0] > 0.6
    assert np.array_equal(bright, sample["mask"] == 1)
    rows, columns = np.nonzero(bright)
    if len(rows):
        assert np.array_equal(sample["boxes"][0], [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        corners = np.clip(sample["points"], 0, 44)
        assert np.array_equal(np.concatenate([corners.min(axis=0), corners.max(axis=0)]), sample["boxes"][0])
    else:
        assert not sample["boxes"].any()


def install(site: Path) -> Path:
    """Put the kind of source into a folder of packages, with the metadata that pip would write."""
    about = site / "followed-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: followed\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[batchd.sources]\nfollowed = followed_source:KIND\n")
    (site / "followed_source.py").write_bytes(Path(followed_source.__file__).read_bytes())
    return site
