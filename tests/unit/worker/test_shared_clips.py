"""Clips of samples that a worker makes together are decoded in one pass over each group."""

from collections import deque

import numpy as np
import pytest

from batchd.worker.messages import Chunk, FillChunks
from batchd_wire.views import slot_arrays
from support.videos import Coding, fed_packets, write_video
from support.worker_streams import fill

SAMPLES, FRAMES = 12, 50
SOURCE = "{{ type = 'csv', path = '{path}', fields = {{ video = 'video', at = 'float64' }} }}"
STEPS = "{ op = 'decode_video', frames = 8, stride = 1, start = 'at' }, { op = 'resize', size = [24, 32] }"


@pytest.fixture
def source(tmp_path) -> str:
    """Segments of two files of one group each, in turn."""
    for name in ("a.mp4", "b.mp4"):
        write_video(tmp_path / name, FRAMES, Coding(gop=FRAMES))
    rows = [f"{'ab'[number % 2]}.mp4,{number * 5 % 13 / 10}\n" for number in range(SAMPLES)]
    (tmp_path / "segments.csv").write_text("video,at\n" + "".join(rows))
    return SOURCE.format(path=tmp_path / "segments.csv")


@pytest.fixture
def fed(monkeypatch) -> list[int]:
    """The packets that decoders get."""
    return fed_packets(monkeypatch)


def test_the_clips_of_an_order_share_a_pass_over_each_group(streams, source, fed) -> None:
    """Their bytes are those of orders of one row each, which share nothing."""
    alone = [fill(streams.start(source, STEPS), row, 1)[1]["image"] for row in range(SAMPLES)]
    fed.clear()
    bad, rows = fill(streams.start(source, STEPS))
    assert bad == []
    np.testing.assert_array_equal(rows["image"], np.concatenate(alone))
    assert len(fed) <= 2 * FRAMES


def test_orders_that_wait_share_with_the_one_before_them(streams, source, fed) -> None:
    """What was announced for them lasts until they are filled, and no longer."""
    stream = streams.start(source, STEPS)
    page = memoryview(bytearray(stream.layout.slot_bytes))
    messages = [FillChunks(1, [Chunk(number, 1, 0, 0, [(number * 4, 4)], [])], is_packed=False) for number in range(3)]
    for message in messages[1:]:
        stream.expect(message)
    heard = [(message, []) for message in messages[1:]]
    list(stream.answer(messages[0], {1: (page, {})}, lambda: None, deque(heard)))
    assert slot_arrays(page, stream.layout)["image"].any(axis=(1, 2, 3, 4)).all()
    assert len(fed) <= 2 * FRAMES
    (video,) = stream.maker._pipeline.videos
    assert video.videos.ahead == {}
    assert stream._joined == {}


def test_a_sample_that_cannot_be_read_ahead_is_bad_when_its_turn_comes(streams, source, tmp_path) -> None:
    """The others share what they have in common."""
    with (tmp_path / "segments.csv").open("a") as file:
        file.write("none.mp4,0.5\n")
    bad, rows = fill(streams.start(source, STEPS, "mask", samples=SAMPLES + 1))
    assert bad == [SAMPLES]
    assert rows["valid"].tolist() == [True] * SAMPLES + [False]
