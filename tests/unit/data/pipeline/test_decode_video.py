"""Clips of videos: which frames they have, and what steps on images do to them."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from batchd.data.media import frames as media_frames
from batchd.data.media import opened as opened_videos
from batchd.data.media.containers import READ_BYTES
from batchd.data.media.frames import PixelOptions, Pixels
from batchd.data.pipeline import execute
from batchd.data.pipeline.effects import StepInvalid, effect
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.options import (
    CenterCrop,
    ColorJitter,
    CropToBucket,
    Follow,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    To,
)
from batchd.data.pipeline.media import clips
from batchd.data.pipeline.media.options import DecodeAudio, DecodeVideo
from batchd.data.pipeline.media.windows import frames_of_clips
from batchd.data.pipeline.options import step_from_plain, step_to_plain
from batchd.data.pipeline.shapes.options import PadBatch
from batchd.data.pipeline.views.options import View, Views
from batchd.data.samples.columns import Column, parse_column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.kept_files import KeptFiles
from batchd.data.samples.values import MediaFile
from support.facts import Facts
from support.videos import (
    HEARD,
    HEIGHT,
    RATE,
    WIDTH,
    Coding,
    decoded_in_order,
    fed_packets,
    number_in,
    with_sound,
    write_video,
)

VIDEO = parse_column("video", "video")
FRAMES = 100
KINDS = {
    "h264.mp4": Coding(gop=30),
    "open_groups.mp4": Coding(options={"x264-params": "open-gop=1:bframes=3:b-pyramid=normal:scenecut=0"}),
    "uneven.mkv": Coding(units=12800, times=lambda number: 512 * number + number % 3 * 100 + number // 10 * 7000),
    "vp9.webm": Coding("libvpx-vp9"),
    "lossless.avi": Coding("ffv1", pixels="bgr0", b_frames=0),
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for name, coding in KINDS.items():
        write_video(folder / name, FRAMES, coding)
    return folder


def made(file: Path | bytes, *steps, draws=None, sample: int = 0, **values):
    """The values of a sample after the steps, of bytes or of a file that is read in parts."""
    content = file if isinstance(file, bytes) else file.read_bytes()
    video = (
        memoryview(content)
        if isinstance(file, bytes)
        else MediaFile(len(content), lambda at, n: content[at : at + n], 0)
    )
    columns = [VIDEO, *(Column(name, dtype="float64", shape=np.shape(value)) for name, value in values.items())]
    pipeline = Pipeline(columns, steps, 7, has_rows=False)
    if draws is not None:
        noted = pipeline.note_draws()
    result = pipeline.make({"video": video, **values}, 0, sample, 0)
    if draws is not None:
        draws += noted
    return result


def numbers(clips: np.ndarray) -> list:
    """The number that each frame shows."""
    return [numbers(one) for one in clips] if clips.ndim > 3 else number_in(clips)


def failed(file, *steps, **values) -> str:
    with pytest.raises(SampleUndecodable) as caught:
        made(file, *steps, **values)
    return str(caught.value)


# --- which frames ---------------------------------------------------------------------------------

EVEN = tuple(range(10))
UNEVEN = (0, 1, 2, 30, 31, 32, 33, 34, 35, 60)


@pytest.mark.parametrize(
    ("options", "ticks", "places", "expected"),
    [
        ({"stride": 2}, EVEN, [0.0, 0.999], [[0, 2, 4], [5, 7, 9]]),
        ({"stride": 2, "start": "uniform"}, EVEN, [0, 0.5, 1], [[0, 2, 4], [2, 4, 6], [5, 7, 9]]),
        ({"fps": 5.0}, EVEN, [0.0, 0.98], [[0, 2, 4], [3, 5, 7]]),
        ({"fps": 20.0}, EVEN, [0.0], [[0, 0, 1]]),
        ({"fps": 10.0, "start": 0.2}, EVEN, [0.2], [[2, 3, 4]]),
        ({"fps": 10.0, "start": 0.25}, EVEN, [0.25], [[2, 3, 4]]),
        ({"stride": 3, "start": 0.25}, EVEN, [0.25], [[2, 5, 8]]),
        ({"fps": 1.0}, UNEVEN, [0.0], [[0, 2, 2]]),
        ({"fps": 0.5}, UNEVEN, [0.0], [[0, 2, 8]]),
        ({"fps": 0.3}, EVEN, [0.7], [[0, 9, 9]]),
        ({"stride": 6}, EVEN, [0.7], [[0, 6, 9]]),
        ({}, EVEN, [0.0, 0.5, 0.999], [[0, 3, 6], [1, 5, 8], [3, 6, 9]]),
        ({"start": "uniform"}, (5,), [0.5], [[0, 0, 0]]),
        ({"fps": 8.0}, (5,), [0.9], [[0, 0, 0]]),
    ],
)
def test_a_clip_has_the_frames_that_are_shown_at_its_times(options, ticks, places, expected) -> None:
    """A tick is a tenth of a second; frames are shown until the next one."""
    step = DecodeVideo(frames=3, **options)
    found = frames_of_clips(step, np.array(ticks, np.int64), Fraction(1, 10), places)
    assert [clip.tolist() for clip in found] == expected


@pytest.mark.parametrize("unit", [Fraction(1, 30), Fraction(1, 1000), Fraction(1, 12800)])
def test_the_rate_of_the_file_gives_each_frame_once(unit) -> None:
    """Also in containers that round the times of frames, as Matroska to milliseconds."""
    ticks = np.array([round(number / 30 / unit) for number in range(90)], np.int64)
    step = DecodeVideo(frames=90, fps=30.0, start="uniform")
    assert frames_of_clips(step, ticks, unit, [0.5])[0].tolist() == list(range(90))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("where", ["in_memory", "in_parts"])
def test_the_frames_of_a_clip_are_those_of_the_file_decoded_in_order(videos, name, where) -> None:
    """Also of open groups, uneven times, and of several clips that overlap."""
    pixels = Pixels(PixelOptions(1, "rgb", "apply"))
    frames = decoded_in_order(videos / name)
    file = (videos / name).read_bytes() if where == "in_memory" else videos / name
    values = made(file, DecodeVideo(frames=6, stride=7, clips=3, times="seconds"))

    shown = numbers(values["image"])
    assert np.diff(shown).tolist() == [[7] * 5] * 3
    assert len({clip[0] for clip in shown}) == 3
    for clip, seconds in zip(values["image"], values["seconds"], strict=True):
        for frame, second in zip(clip, seconds, strict=True):
            np.testing.assert_array_equal(frame, pixels.of(frames[number_in(frame)]))
            assert second == pytest.approx(frames[number_in(frame)].time)


def test_starts_are_drawn_by_position_and_noted(videos) -> None:
    """Each sample has its own."""
    step = DecodeVideo(frames=4, fps=25.0, clips=2)
    draws: list[dict[str, object]] = []
    first = made(videos / "h264.mp4", step, draws=draws)["image"]

    np.testing.assert_array_equal(first, made(videos / "h264.mp4", step)["image"])
    assert draws == [{"starts": [round(clip[0] / 25, 6) for clip in numbers(first)]}]
    assert numbers(first) != numbers(made(videos / "h264.mp4", step, sample=1)["image"])


def media(file: Path, name: object) -> MediaFile:
    content = file.read_bytes()
    return MediaFile(len(content), lambda at, n: content[at : at + n], name)


@pytest.mark.parametrize(("room", "reads"), [(1 << 20, 2), (0, 6)])
def test_the_packets_of_a_file_are_read_once_while_they_have_room(videos, monkeypatch, room, reads) -> None:
    """Other clips of the same file find its frames without it."""
    found = []
    frames_of = media_frames.frames_of
    monkeypatch.setattr(media_frames, "frames_of", lambda *given: (found.append(given), frames_of(*given))[1])
    monkeypatch.setattr(clips, "KNOWN_BYTES_MAX", room)
    monkeypatch.setattr(clips, "OPEN_MAX", 1)
    step = DecodeVideo(frames=2, stride=3)
    pipeline = Pipeline([VIDEO], [step], 7, has_rows=False)
    for sample in range(6):
        video = media(videos / "h264.mp4", sample % 2)
        image = pipeline.make({"video": video}, 0, sample, 0)["image"]
        expected = made((videos / "h264.mp4").read_bytes(), step, sample=sample)["image"]
        np.testing.assert_array_equal(image, expected)
    assert len(found) == reads + 6  # those of bytes are read each time


@pytest.mark.parametrize("name", KINDS)
def test_the_packets_of_a_file_are_read_through_by_one_worker(videos, monkeypatch, name) -> None:
    """Another one has the same clips. Damaged records, and those of other content, are none."""
    kept, step = KeptFiles(), DecodeVideo(frames=3, stride=3, clips=2)
    kept.facts = facts = Facts()
    first = Pipeline([VIDEO], [step], 7, has_rows=False, kept=kept)
    expected = first.make({"video": media(videos / name, "one")}, 0, 0, 0)["image"]
    frames_of, found = media_frames.frames_of, []
    monkeypatch.setattr(media_frames, "frames_of", lambda *given: (found.append(given), frames_of(*given))[1])
    second = Pipeline([VIDEO], [step], 7, has_rows=False, kept=kept)
    np.testing.assert_array_equal(second.make({"video": media(videos / name, "one")}, 0, 0, 0)["image"], expected)
    assert not found
    second.make({"video": media(videos / name, "two")}, 0, 0, 0)
    assert len(found) == 1
    (record, _other) = facts.records.values()
    for damaged in (record[:-1], record[:10], b"\xff" * len(record), bytes(len(record))):
        facts.records = dict.fromkeys(facts.records, damaged)
        third = Pipeline([VIDEO], [step], 7, has_rows=False, kept=kept)
        np.testing.assert_array_equal(third.make({"video": media(videos / name, "one")}, 0, 0, 0)["image"], expected)
    assert len(found) == 5


def test_a_clip_of_an_mp4_takes_only_its_bytes(tmp_path) -> None:
    """As from a server: the index of the container, and the packets from the key frame before.

    At the first use of the file the index is read twice.
    """
    coding = Coding(gop=25, options={"qp": "0"}, muxer={"movflags": "faststart"})
    file = write_video(tmp_path / "long.mp4", 600, coding)
    content, read = file.read_bytes(), []

    def read_some(at: int, count: int) -> bytes:
        read.append(len(content[at : at + count]))
        return content[at : at + count]

    kept, step = KeptFiles(), DecodeVideo(frames=2, stride=1, start=20.0)
    kept.facts = Facts()
    taken = []
    for _worker in range(2):
        read.clear()
        pipeline = Pipeline([VIDEO], [step], 7, has_rows=False, kept=kept)
        assert numbers(pipeline.make({"video": MediaFile(len(content), read_some, "long")}, 0, 0, 0)["image"]) == [
            500,
            501,
        ]
        taken.append(sum(read))
    assert taken[0] <= 3 * READ_BYTES < len(content)
    assert taken[1] <= 2 * READ_BYTES


SEGMENTS = [1.9, 0.1, 0.7, 3.1, 1.0, 0.1, 2.6, 0.5]
"""Where clips of 16 frames begin, in seconds of a file with a key frame each 1.2 s."""


@pytest.mark.parametrize("name", ["h264.mp4", "open_groups.mp4", "uneven.mkv"])
@pytest.mark.parametrize("frames_kept", [1000, 20, 0])
def test_clips_of_one_group_are_decoded_in_one_pass(videos, monkeypatch, name, frames_kept) -> None:
    """They have the bytes that they have alone; with less room, frames are decoded again."""
    step = DecodeVideo(frames=16, stride=1, start="at")
    file = videos / name
    alone = [made(file, step, at=at)["image"] for at in SEGMENTS]
    monkeypatch.setattr(opened_videos, "SHARED_BYTES_MAX", frames_kept * WIDTH * HEIGHT * 3 // 2)
    fed = fed_packets(monkeypatch)
    pipeline = Pipeline([VIDEO, Column("at", dtype="float64")], [step], 7, has_rows=False)
    values = [{"video": media(file, "a name"), "at": at} for at in SEGMENTS]
    assert all(pipeline.announce(one, 0, sample) for sample, one in enumerate(values))
    for sample, one in enumerate(values):
        np.testing.assert_array_equal(pipeline.make(one, 0, sample, 0)["image"], alone[sample])
    stage = pipeline.videos[0]
    assert stage.videos.ahead == stage.videos._unknown == {}
    # open groups need the one before
    once = len(set(fed)) * (2 if name == "open_groups.mp4" else 1)
    assert (len(fed) <= once) == (frames_kept == 1000)
    stage.videos.end()
    assert (stage.videos.kept, stage.videos.wanted, stage.videos.kept_bytes) == ({}, {}, 0)


@pytest.mark.parametrize(
    ("resize", "behind", "is_smaller"),
    [
        (Resize(size=(20, 30)), [], True),
        (Resize(size=(24, 21), interpolation="linear"), [RandomFlip(), ColorJitter(brightness=0.4)], True),
        (Resize(shorter_side=21, interpolation="cubic"), [RandomResizedCrop(size=(16, 16))], True),
        (Resize(longer_side=32, interpolation="lanczos"), [RandomFlip(), CenterCrop(size=(8, 8))], True),
        (Resize(size=(200, 220)), [], False),
        (Resize(shorter_side=21, multiple_of=4), [], False),
    ],
)
def test_frames_are_kept_in_the_size_of_the_next_step(videos, monkeypatch, resize, behind, is_smaller) -> None:
    """If that is smaller: so more of them have room, with the same bytes."""
    steps, file = [DecodeVideo(frames=16, stride=1, start="at"), resize, *behind], videos / "h264.mp4"
    monkeypatch.setattr(opened_videos, "SHARED_BYTES_MAX", 20 * WIDTH * HEIGHT * 3 // 2)
    values = [{"video": media(file, "a name"), "at": at} for at in SEGMENTS]
    found = []
    for shrinks in (lambda _step: False, clips.shrinks):
        monkeypatch.setattr(execute, "shrinks", shrinks)
        fed = fed_packets(monkeypatch)
        pipeline = Pipeline([VIDEO, Column("at", dtype="float64")], steps, 7, has_rows=False)
        for sample, one in enumerate(values):
            pipeline.announce(one, 0, sample)
        images = [pipeline.make(one, 0, sample, 0)["image"] for sample, one in enumerate(values)]
        found.append((np.stack(images).tobytes(), len(fed)))
    (whole, before), (small, after) = found
    assert whole == small
    assert (after < before) == is_smaller


@pytest.mark.parametrize("method", ["auto", "nearest", "linear", "area", "cubic", "lanczos"])
def test_an_image_of_the_size_of_a_resize_stays(method) -> None:
    """So frames that have it already may go through it again."""
    image = np.random.default_rng(3).integers(0, 256, (21, 34, 3)).astype(np.uint8)
    pipeline = Pipeline(
        [Column("image", shape=(21, 34, 3))], [Resize(size=(21, 34), interpolation=method)], 7, has_rows=False
    )
    np.testing.assert_array_equal(pipeline.make({"image": image}, 0, 0, 0)["image"], image)


def test_clips_of_one_sample_are_decoded_in_one_pass(videos, monkeypatch) -> None:
    """In whatever order they are, also of a file in memory."""
    step = DecodeVideo(frames=8, stride=1, clips=4, start="at")
    at = np.array([0.8, 0.1, 0.3, 0.7])
    fed = fed_packets(monkeypatch)
    clips = made((videos / "h264.mp4").read_bytes(), step, at=at)["image"]
    assert [numbers(clip)[0] for clip in clips] == [20, 2, 7, 17]
    assert len(fed) == len(set(fed)) == 30


def test_samples_that_are_not_made_are_forgotten(videos) -> None:
    """Their frames take no memory when what they were ordered with has passed."""
    step = DecodeVideo(frames=8, stride=1, start="random")
    pipeline = Pipeline([VIDEO], [step], 7, has_rows=False)
    values = {"video": media(videos / "h264.mp4", "a name")}
    for sample in (0, 1, 1, 2, 3):
        pipeline.announce(values, 5, sample)
    pipeline.make(values, 5, 0, 0)
    stage = pipeline.videos[0]
    for sample in (1, 2, 3):
        pipeline.forget(5, sample)
    assert [place[1] for place in stage.videos.ahead] == [1]  # it was announced twice
    pipeline.forget(5, 1)
    stage.videos.end()
    assert stage.videos.ahead == stage.videos._unknown == stage.videos.kept == stage.videos.wanted == {}


@pytest.mark.parametrize(("packet", "expected"), [(18, {1, 3}), (20, set()), (25, {1, 3})])
def test_damage_is_the_matter_of_those_that_need_it(videos, tmp_path, packet, expected) -> None:
    """In whatever order samples come: those behind it need what other frames refer to."""
    with av.open(str(videos / "h264.mp4")) as container:
        place = [one for one in container.demux(video=0) if one.size][packet].pos
    content = bytearray((videos / "h264.mp4").read_bytes())
    content[place + 8 : place + 12] = b"\xff\x00\xff\x00"
    (tmp_path / "damaged.mp4").write_bytes(content)
    step = DecodeVideo(frames=4, stride=1, start="at")
    at = [0.1, 0.8, 0.3, 0.9, 0.2]
    for order in ([0, 1, 2, 3, 4], [3, 4, 1, 2, 0], [4, 3, 2, 1, 0]):
        pipeline = Pipeline([VIDEO, Column("at", dtype="float64")], [step], 7, has_rows=False)
        values = [{"video": media(tmp_path / "damaged.mp4", "a name"), "at": one} for one in at]
        for sample in order:
            pipeline.announce(values[sample], 0, sample)
        bad = set()
        for sample in order:
            try:
                pipeline.make(values[sample], 0, sample, 0)
            except SampleUndecodable:
                bad.add(sample)
        assert bad == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([DecodeVideo(frames=2, stride=1)], ["image"]),
        ([DecodeVideo(frames=2, stride=1), DecodeVideo(field="other", into="b", frames=2, stride=1)], ["image", "b"]),
        ([RandomFlip(field="x"), DecodeVideo(frames=2, stride=1)], []),
        ([RandomFlip(field="x"), DecodeVideo(frames=2, stride=1, start=1.0)], ["image"]),
    ],
)
def test_clips_are_known_ahead_where_no_step_draws_or_changes_before(steps, expected) -> None:
    """Else a sample would be decoded for frames that it does not want."""
    columns = [VIDEO, parse_column("other", "video"), Column("x", shape=(4, 4, 3))]
    assert [stage.into for stage in Pipeline(columns, steps, 7, has_rows=False).videos] == expected


def test_starts_come_from_a_field(videos) -> None:
    """As the seconds of annotations."""
    step = DecodeVideo(frames=2, fps=25.0, clips=2, start="at")
    assert numbers(made(videos / "h264.mp4", step, at=np.array([1.0, 2.0]))["image"]) == [[25, 26], [50, 51]]
    assert "a clip would start at 9 s, and the video is from 0.000 to 4.000 s" in failed(
        videos / "h264.mp4", step, at=np.array([1.0, 9.0])
    )
    assert "a clip would start at [1.0, nan] s" in failed(videos / "h264.mp4", step, at=np.array([1.0, np.nan]))


# --- steps on images ------------------------------------------------------------------------------

AUGMENT = (RandomResizedCrop(size=(24, 32)), RandomFlip(), ColorJitter(brightness=0.4, hue=0.1))


def same_frame(folder: Path) -> Path:
    """A video whose frames are all alike."""
    return write_video(folder / "still.avi", 12, Coding("ffv1", pixels="bgr0", b_frames=0, times=lambda n: n), first=5)


def test_all_frames_of_a_clip_are_augmented_alike_and_clips_by_themselves(tmp_path) -> None:
    """Frames that are repeated stay equal under random steps; the next clip has other numbers."""
    file = same_frame(tmp_path)
    first, second = made(
        file, DecodeVideo(frames=3, fps=1000.0, clips=2, start="uniform"), *AUGMENT, Resize(size=(8, 8))
    )["image"]

    drawn: list[dict] = []
    made(file, DecodeVideo(frames=3, fps=1000.0, clips=2), *AUGMENT, Resize(size=(8, 8)), draws=drawn)
    assert [set(one) for one in drawn] == [{"starts"}, *[{"clip 0", "clip 1"}] * len(AUGMENT)]

    assert first.shape == (3, 8, 8, 3)
    np.testing.assert_array_equal(first[0], first[1])
    np.testing.assert_array_equal(first[0], first[2])
    assert (first != second).any()


def test_a_clip_is_made_as_its_first_frame_alone(videos) -> None:
    """Each frame has what the steps make of an image with the same numbers."""
    file = videos / "lossless.avi"
    whole = made(file, DecodeVideo(frames=4, stride=5, start="uniform"))["image"]
    clip = made(file, DecodeVideo(frames=4, stride=5, start="uniform"), *AUGMENT, To(layout="nchw"))["image"]

    image = Pipeline([Column("image", shape=(None, None, 3))], (*AUGMENT, To(layout="nchw")), 7, has_rows=False)
    assert clip.shape == (4, 3, 24, 32)
    for frame, expected in zip(whole, clip, strict=True):
        np.testing.assert_array_equal(image.make({"image": frame.copy()}, 0, 0, 0)["image"], expected)


def test_the_clips_of_an_array_take_steps_too(videos) -> None:
    """As those of the source "video" have them."""
    frames = made(videos / "lossless.avi", DecodeVideo(frames=4, stride=5))["image"]
    pipeline = Pipeline([Column("image", shape=(4, HEIGHT, WIDTH, 3))], AUGMENT, 7, has_rows=False)
    assert pipeline.make({"image": frames}, 0, 0, 0)["image"].shape == (4, 24, 32, 3)


def test_clips_are_written_into_their_row(videos) -> None:
    """The last step writes each frame into the batch."""
    steps = DecodeVideo(frames=4, stride=5), *AUGMENT
    pipeline = Pipeline([VIDEO], steps, 7)
    row = {"image": np.zeros((4, 24, 32, 3), np.uint8)}
    pipeline.run({"video": memoryview((videos / "lossless.avi").read_bytes())}, 0, 0, 0, row)
    np.testing.assert_array_equal(row["image"], made(videos / "lossless.avi", *steps)["image"])


def test_views_of_clips_have_an_axis_in_front(videos) -> None:
    """Each view has its own numbers."""
    into = {"crops": View(count=2, steps=AUGMENT), "small": View(steps=(Resize(size=(8, 8)),))}
    views = made(videos / "lossless.avi", DecodeVideo(frames=3, stride=5), Views(into=into))
    assert (views["crops"].shape, views["small"].shape) == ((2, 3, 24, 32, 3), (3, 8, 8, 3))
    assert (views["crops"][0] != views["crops"][1]).any()


def test_clips_of_different_sizes_may_be_padded() -> None:
    """Their frames are then decoded as one array."""
    columns = {"video": VIDEO}
    for step in (DecodeVideo(frames=4, stride=5), PadBatch(max_shape=(4, 64, 64, 3))):
        columns = effect(step, columns)
    assert columns["image"].shape == (4, 64, 64, 3)


def test_a_video_is_turned_upright_and_gray_has_one_channel(tmp_path) -> None:
    """By its display matrix, unless that is ignored."""
    file = write_video(tmp_path / "a.mp4", 10, Coding(turn=90))
    assert made(file, DecodeVideo(frames=2, stride=1))["image"].shape == (2, WIDTH, HEIGHT, 3)
    step = DecodeVideo(frames=2, stride=1, rotation="ignore", color="gray")
    assert made(file, step)["image"].shape == (2, HEIGHT, WIDTH, 1)


# --- bad videos -----------------------------------------------------------------------------------

STEP = DecodeVideo(frames=8, stride=10, start="uniform")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no video at all", "is no mp4, mov, mkv, webm or avi"), (b"#EXTM3U\n", "is no mp4, mov, mkv, webm or avi")],
)
def test_what_is_no_video_is_a_bad_sample(content, message) -> None:
    assert message in failed(content, STEP)


@pytest.mark.parametrize("name", ["h264.mp4", "uneven.mkv", "vp9.webm", "lossless.avi"])
def test_a_cut_at_any_byte_gives_whole_frames_or_a_bad_sample(videos, name) -> None:
    """A frame that is returned is as the whole file has it."""
    content = (videos / name).read_bytes()
    frames = decoded_in_order(videos / name)
    pixels = Pixels(PixelOptions(1, "rgb", "apply"))
    for end in range(0, len(content), max(1, len(content) // 40)):
        try:
            clip = made(content[:end], STEP)["image"]
        except SampleUndecodable:
            continue
        for frame in clip:
            np.testing.assert_array_equal(frame, pixels.of(frames[number_in(frame)]))


def test_damage_names_the_second_and_spares_other_clips(videos) -> None:
    """A clip in front of it is as it was."""
    with av.open(str(videos / "h264.mp4")) as container:
        packet = [one for one in container.demux(video=0) if one.size][62]
        place, size = packet.pos, packet.size
    content = bytearray((videos / "h264.mp4").read_bytes())
    content[place + 4 : place + size] = bytes(size - 4)

    assert made(bytes(content), DecodeVideo(frames=8, fps=25.0, start=0.0))["image"].shape == (8, HEIGHT, WIDTH, 3)
    assert " s: packet 6" in failed(bytes(content), DecodeVideo(frames=8, fps=25.0, start=2.5))


def test_a_short_video_shows_its_last_frame_again_or_is_bad(videos) -> None:
    """As the option says."""
    step = DecodeVideo(frames=4, stride=30, start="uniform")
    assert made(videos / "h264.mp4", DecodeVideo(frames=4, stride=40, start="uniform"))["image"].shape[0] == 4
    assert numbers(made(videos / "h264.mp4", DecodeVideo(frames=4, stride=40, start=0.0))["image"]) == [0, 40, 80, 99]
    assert "its 4.000 s are too short for a clip of 4 frames" in failed(
        videos / "h264.mp4", DecodeVideo(frames=4, stride=40, short="bad")
    )
    assert made(videos / "h264.mp4", step)["image"].shape[0] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_pixels": 100}, "64 x 48 is 3072 pixels, more than max_pixels = 100"),
        ({"codecs": ("vp9", "av1")[:1]}, "is coded as h264, which is none of codecs = ['vp9']"),
    ],
)
def test_limits_make_bad_samples(videos, options, message) -> None:
    assert message in failed(videos / "h264.mp4", DecodeVideo(frames=2, stride=1, **options))


def test_hdr_is_refused(tmp_path) -> None:
    """Nobody sees the wrong brightness of its frames unwarned."""
    file = write_video(tmp_path / "a.mp4", 10, Coding(options={"x264-params": "transfer=smpte2084:colorprim=bt2020"}))
    assert "is HDR (PQ), which 8 bits cannot show" in failed(file, DecodeVideo(frames=2, stride=1))


# --- on paper -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 8.0, "stride": 2}, "fps and stride are both the distance"),
        ({"start": 2.0}, "frames need a distance"),
        ({"start": "at"}, "frames need a distance"),
        ({"fps": 8.0, "start": 2.0, "clips": 2}, "2 equal clips"),
        ({"fps": 8.0, "start": "0 at"}, "is not a valid field name"),
        ({"codecs": ("divx",)}, "codecs has 'divx'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeVideo(frames=4, **options)


@pytest.mark.parametrize(
    ("step", "columns", "message"),
    [
        (DecodeVideo(frames=4), [Column("video", "bytes")], "needs a video file, and 'video' is bytes"),
        (DecodeVideo(frames=4), [VIDEO, Column("image", "encoded")], "would make a field 'image'"),
        (DecodeVideo(frames=4, fps=8.0, start="at"), [VIDEO], 'neither "random" nor "uniform" nor a field'),
        (
            DecodeVideo(frames=4, fps=8.0, start="at", clips=2),
            [VIDEO, Column("at")],
            "from 2 numbers, and 'at' is uint8",
        ),
        (Resize(field="video", size=(2, 2)), [VIDEO], 'the first step must be { op = "decode_video" }'),
        (Follow(boxes="boxes"), [Column("image", shape=(4, None, None, 3))], "has several in each sample"),
        (CropToBucket(pixels=65536), [Column("image", shape=(4, None, None, 3))], "has several in each sample"),
    ],
)
def test_steps_that_do_not_fit_are_refused(step, columns, message) -> None:
    with pytest.raises(StepInvalid) as caught:
        effect(step, {column.name: column for column in columns})
    assert message in str(caught.value)


def test_the_version_of_ffmpeg_counts_unless_codecs_are_lossless() -> None:
    """And a step survives its way to the worker."""
    assert DecodeVideo(frames=4).libraries == ("av",)
    assert DecodeVideo(frames=4, codecs=("ffv1", "rawvideo")).libraries == ()
    step = DecodeVideo(frames=4, fps=8.0, start=2.0, codecs=("h264",), times="t")
    assert step_from_plain(step_to_plain(step)) == step


@pytest.mark.parametrize(("name", "delay_s"), [("a.mkv", 0.0), ("a.mkv", 0.75), ("a.avi", 0.0)])
def test_sound_is_that_of_the_seconds_of_each_clip(tmp_path, name, delay_s):
    """Whatever the starts are; zeros are in front of the sound and behind it."""
    file = with_sound(tmp_path / name, delay_s=delay_s)
    heard = np.concatenate([np.zeros((round(delay_s * RATE), 2)), HEARD / 32768, np.zeros((4 * RATE, 2))])
    options = {"frames": 8, "fps": 10, "audio": "sound", "audio_channels": 2, "times": "seconds"}
    for step in (
        DecodeVideo(**options, clips=3),
        DecodeVideo(**options, start="uniform", clips=3),
        DecodeVideo(**options, start=3.52),
    ):
        values = made(file, step, sample=4)
        waves, times = (np.asarray(values[name]) for name in ("sound", "seconds"))

        assert waves.dtype == np.float32
        assert waves.shape == (*step.lengths[:-1], 12_800, 2)
        for wave, seconds in zip(waves.reshape(-1, 12_800, 2), times.reshape(-1, 8), strict=True):
            around = [
                heard[first : first + 12_800]
                for first in range(round(seconds[0] * RATE), round((seconds[0] + 0.041) * RATE))
            ]
            assert any(np.array_equal(wave, part.astype(np.float32)) for part in around)
    assert np.array_equal(waves, heard[56_320:69_120].astype(np.float32))


@pytest.mark.parametrize("quality", ["high", "fast"])
def test_sound_draws_nothing_and_is_resampled_and_mixed(tmp_path, quality):
    """The frames are those without it, and the samples are those of "decode_audio"."""
    file = with_sound(tmp_path / "a.mp4", "aac")
    plain, heard = (
        {"frames": 10, "fps": 5, "clips": 2},
        {"audio": "sound", "audio_rate": 8_000, "audio_quality": quality},
    )

    values, drawn = made(file, DecodeVideo(**plain, **heard), draws=(draws := [])), draws
    without = made(file, DecodeVideo(**plain), draws=(others := []))

    assert drawn == others
    assert np.array_equal(values["image"], without["image"])
    content = file.read_bytes()
    columns = [parse_column("audio", "audio")]
    whole = Pipeline(columns, [DecodeAudio(rate=8_000, quality=quality)], 0, has_rows=False).make(
        {"audio": memoryview(content)}, 0, 0, 0
    )
    for wave in values["sound"]:
        assert wave.any()
        assert any(
            np.array_equal(wave, whole["audio"][first : first + 16_000])
            for first in range(len(whole["audio"]) - 15_999)
        )


def test_a_video_without_sound_is_bad_or_silent(videos):
    """As the step says."""
    step = {"frames": 4, "fps": 8, "audio": "sound"}
    for name, shown in (("h264.mp4", "MP4"), ("lossless.avi", "AVI")):
        with pytest.raises(SampleUndecodable, match=f'is {shown} without sound; no_audio = "zeros"'):
            made(videos / name, DecodeVideo(**step))
        assert not np.any(made(videos / name, DecodeVideo(**step, no_audio="zeros"))["sound"])
    with pytest.raises(ValueError, match="audio = 'sound' is the sound of a clip's seconds, which only fps says"):
        DecodeVideo(frames=4, stride=2, audio="sound")
