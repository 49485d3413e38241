"""Frames of videos by number, in any order, from all kinds of files; and damaged files."""

import os
import random
from contextlib import closing, suppress
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.media import opened as opened_videos
from batchd.data.media import packets
from batchd.data.media.containers import READ_BYTES, PlainFile, open_video, packets_of
from batchd.data.media.frames import Pixels, VideoFrames
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.sources.video import scan as video_scan
from batchd.data.sources.video.options import VideoSource
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from support.samples import opened, read_samples, reason, scan
from support.source_files import nothing
from support.videos import HEIGHT, WIDTH, Coding, decoded_in_order, fed_packets, number_in, picture, write_video

X265 = "log-level=none:pools=1:frame-threads=1"
KINDS = {
    "h264.mp4": Coding(),
    "h264.mkv": Coding(),
    "faststart.mp4": Coding(muxer={"movflags": "faststart"}),
    "fragments.mp4": Coding(muxer={"movflags": "frag_keyframe+empty_moov"}),
    "uneven.mp4": Coding(units=12800, times=lambda number: 512 * number + number % 3 * 100 + number // 10 * 7000),
    "long_groups.mp4": Coding(gop=250, b_frames=3),
    "open_groups.mp4": Coding(options={"x264-params": "open-gop=1:bframes=3:b-pyramid=normal:scenecut=0"}),
    "hevc.mp4": Coding("libx265", {"x265-params": f"{X265}:open-gop=1:keyint=12"}),
    "vp9.webm": Coding("libvpx-vp9"),
    "vp8.webm": Coding("libvpx", {"auto-alt-ref": "1", "lag-in-frames": "16"}),
    "mpeg4.mp4": Coding("mpeg4"),
    "mpeg4.avi": Coding("mpeg4", b_frames=0),
    "mjpeg.avi": Coding("mjpeg", {"strict": "-2"}, pixels="yuvj420p", b_frames=0),
}
FRAMES = 100


@pytest.fixture(autouse=True)
def scan_here(monkeypatch, request) -> None:
    """Scan in this process, because another one takes longer; ``apart`` marks the exceptions."""
    if "apart" not in request.fixturenames:
        monkeypatch.setattr(
            video_scan, "isolated_scan", lambda _module, source, survey, _silence: video_scan.scan(source, survey)
        )


@pytest.fixture
def apart() -> None:
    """Scan as the daemon does."""


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    """A folder with a video of each kind."""
    folder = tmp_path_factory.mktemp("videos")
    for name, coding in KINDS.items():
        write_video(folder / name, FRAMES, coding)
    return folder


def of(file: Path, **options) -> VideoSource:
    return VideoSource(root=file.parent, files=(file.name,), **options)


def refused(source: VideoSource) -> str:
    """The scan's error message."""
    with pytest.raises(SourceInvalid) as caught:
        scan(source)
    return str(caught.value)


def damaged(file: Path, folder: Path, place: int, count: int = 1) -> VideoSource:
    """A copy of a file with other bytes at one place."""
    content = bytearray(file.read_bytes())
    content[place : place + count] = bytes(255 - byte for byte in content[place : place + count])
    (folder / file.name).write_bytes(content)
    return of(folder / file.name)


def remuxed(file: Path, new: Path, part: slice) -> None:
    """Write some of the packets of a video into another file."""
    with av.open(file) as source, av.open(new, "w") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in [packet for packet in source.demux(video=0) if packet.size][part]:
            packet.stream = stream
            container.mux(packet)


def outcome(reader, sample: int) -> bytes | str:
    """The pixels of a sample, or the reason why it has none."""
    try:
        return reader.read(sample)["image"].tobytes()
    except SampleUnreadable as error:
        return str(error)


# --- the frame of a number ------------------------------------------------------------------------


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("name", KINDS)
def test_a_frame_read_at_random_is_the_frame_read_in_order(videos, name) -> None:
    """Both equal FFmpeg's frame of the whole file, and have the number drawn into the picture."""
    source = of(videos / name)
    pixels = Pixels(source)
    expected = [pixels.of(frame) for frame in decoded_in_order(videos / name)]
    with opened(source) as (reader, index):
        in_order = [reader.read(sample)["image"].copy() for sample in range(len(index))]
        assert [number_in(image) for image in in_order] == list(range(FRAMES))
        np.testing.assert_array_equal(in_order, expected)
        for sample in random.Random(1).choices(range(FRAMES), k=60):
            np.testing.assert_array_equal(reader.read(sample)["image"], in_order[sample])


@pytest.mark.parametrize("room", [1 << 20, 3 * HEIGHT * WIDTH * 20, 0])
def test_announced_samples_share_one_pass_over_their_group(videos, monkeypatch, room) -> None:
    """In any order they are what they are alone; with less room, frames are decoded again."""
    source = of(videos / "long_groups.mp4", frames=4, stride=3)
    with opened(source) as (reader, index):
        alone = [reader.read(sample)["image"].copy() for sample in range(len(index))]
    fed = fed_packets(monkeypatch)
    monkeypatch.setattr(opened_videos, "SHARED_BYTES_MAX", room)
    order = random.Random(3).sample(range(len(alone)), len(alone))
    with opened(source) as (reader, _index):
        reader.prefetch(order)
        for sample in order:
            np.testing.assert_array_equal(reader.read(sample)["image"], alone[sample])
        assert (len(fed) == FRAMES) == (room == 1 << 20)
        assert reader.videos.videos.kept == {}
        assert reader.videos.videos.kept_bytes == 0


def test_a_sample_that_comes_twice_is_decoded_once(videos, monkeypatch) -> None:
    """What is kept for its second time lasts until then, and no longer."""
    fed = fed_packets(monkeypatch)
    with opened(of(videos / "long_groups.mp4", frames=4, stride=3)) as (reader, _index):
        reader.prefetch([5, 40, 5])
        first, _other, second = (reader.read(sample)["image"] for sample in (5, 40, 5))
        np.testing.assert_array_equal(first, second)
        assert len(fed) == len(set(fed))
        assert (reader.videos.videos.kept, reader.videos.videos.ahead) == ({}, {})


def test_samples_that_are_not_read_are_forgotten(videos) -> None:
    """Their frames take no memory when their block has passed."""
    storage = Storage()
    source = of(videos / "long_groups.mp4", frames=4, stride=3)
    reader = open_reader(source, scan(source), 1 << 24, storage)
    with closing(reader):
        requested = storage.begin_reading_block()
        reader.prefetch(range(8))
        reader.read(2)
        assert len(reader.videos.videos.kept) == 16
        requested.forget()
        assert (reader.videos.videos.kept, reader.videos.videos.wanted) == ({}, {})


@pytest.mark.parametrize("order", [[20, 5, 70, 10], [70, 5, 10, 20]])
def test_damage_behind_a_frame_is_the_matter_of_the_samples_that_need_it(videos, tmp_path, order) -> None:
    """A pass over a group ends there."""
    with av.open(str(videos / "long_groups.mp4")) as container:
        packet = [one for one in container.demux(video=0) if one.size][30]
        place = packet.pos
    source = of(videos / "long_groups.mp4", frames=1)
    with opened(source) as (reader, index):
        good = [outcome(reader, sample) for sample in range(len(index))]
    copy = tmp_path / "long_groups.mp4"
    copy.write_bytes((videos / "long_groups.mp4").read_bytes())
    with opened(of(copy, frames=1)) as (reader, index):
        content = bytearray(copy.read_bytes())
        content[place + 8 : place + 12] = b"\xff\x00\xff\x00"
        copy.write_bytes(content)
        reader.prefetch(order)
        found = {sample: outcome(reader, sample) for sample in order}
    assert {sample for sample in order if found[sample] == good[sample]} == {5, 10, 20}
    assert "frame 70 at 2.800 s: packet" in found[70]


@pytest.mark.parametrize("name", ["h264.mp4", "h264.mkv", "uneven.mp4", "vp9.webm", "mjpeg.avi"])
def test_frames_have_the_times_of_their_file(videos, name) -> None:
    """This includes frames at uneven times."""
    expected = [frame.time for frame in decoded_in_order(videos / name)]
    with opened(of(videos / name)) as (reader, index):
        assert [reader.known(sample)["time"] for sample in range(len(index))] == pytest.approx(expected, abs=1e-9)
        assert reader.name(7) == f"{videos}/{name}: frame 7 at {expected[7]:.3f} s"


def test_frames_in_order_are_decoded_once_each(videos, monkeypatch) -> None:
    """Frames after the wanted one are not decoded, and no frame is decoded twice."""
    fed = fed_packets(monkeypatch)
    with opened(of(videos / "h264.mp4")) as (reader, index):
        for sample in range(len(index)):
            reader.read(sample)
    assert sorted(fed) == list(range(FRAMES))


def test_a_seek_begins_at_the_key_frame(videos, monkeypatch) -> None:
    """It does not begin at the start of the file, in any container with an index."""
    sought = []
    for name in ("h264.mp4", "h264.mkv", "vp9.webm", "mjpeg.avi", "fragments.mp4", "open_groups.mp4"):
        with opened(of(videos / name)) as (reader, _index):
            find = VideoFrames._find

            def counted(self, wanted, packets, *, find=find, **options):
                walked = []
                found = find(self, wanted, (walked.append(packet) or packet for packet in packets), **options)
                sought.append(len(walked))
                return found

            with monkeypatch.context() as patch:
                patch.setattr(VideoFrames, "_find", counted)
                for sample in (90, 50, 70, 30):
                    reader.read(sample)
    assert max(sought) <= 13


def test_frames_that_an_edit_list_hides_are_no_samples(tmp_path) -> None:
    """They are still decoded, because other frames refer to them."""
    hidden = 5
    file = write_video(tmp_path / "a.mp4", 40, Coding(units=12800, times=lambda number: 512 * (number - hidden)))
    samples = read_samples(of(file))
    assert [number_in(values["image"]) for values in samples] == list(range(hidden, 40))
    assert samples[0]["time"] == 0


def test_a_file_whose_table_of_key_frames_is_empty_is_read_all_the_same(videos, tmp_path) -> None:
    """The frames themselves show which of them can be decoded alone."""
    content = bytearray((videos / "h264.mp4").read_bytes())
    place = content.index(b"stss") + 8
    assert int.from_bytes(content[place : place + 4], "big") > 5
    content[place : place + 4] = bytes(4)
    (tmp_path / "a.mp4").write_bytes(content)
    assert [number_in(values["image"]) for values in read_samples(of(tmp_path / "a.mp4"))] == list(range(FRAMES))


def test_a_file_without_key_frames_is_decoded_from_its_first_packet(videos, tmp_path) -> None:
    """If that fails, all its frames are bad samples, in any order of reading."""
    remuxed(videos / "vp9.webm", tmp_path / "a.webm", slice(1, 11))
    with opened(of(tmp_path / "a.webm")) as (reader, index):
        assert index.arrays["keys"].tolist() == [0] * 10
        in_order = [outcome(reader, sample) for sample in range(10)]
        assert in_order[::-1] == [outcome(reader, sample) for sample in reversed(range(10))]
        assert "cannot be decoded" in str(in_order[0])


def test_what_the_header_says_about_the_number_of_frames_does_not_count(videos, tmp_path) -> None:
    """The packets are counted instead."""
    content = bytearray((videos / "mjpeg.avi").read_bytes())
    place = content.index(b"avih") + 8 + 16
    assert int.from_bytes(content[place : place + 4], "little") == FRAMES
    content[place : place + 4] = (7 * FRAMES).to_bytes(4, "little")
    (tmp_path / "a.avi").write_bytes(content)
    assert len(scan(of(tmp_path / "a.avi"))) == FRAMES


def test_frames_before_the_first_key_frame_are_bad_samples(videos, tmp_path) -> None:
    """The frames that they refer to are missing."""
    remuxed(videos / "h264.mkv", tmp_path / "a.mkv", slice(5, None))
    with opened(of(tmp_path / "a.mkv")) as (reader, index):
        assert reason(reader, 0).endswith("comes before the first key frame of the file")
        assert number_in(reader.read(len(index) - 1)["image"]) == FRAMES - 1


# --- the frames of a sample -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def classes(tmp_path_factory) -> Path:
    """Three files in two folders, with 10, 4 and 7 frames."""
    folder = tmp_path_factory.mktemp("classes")
    for name, frames, first in (("cats/a.mp4", 10, 0), ("cats/b.mp4", 4, 100), ("dogs/c.mkv", 7, 200)):
        write_video(folder / name, frames, first=first)
    return folder


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[n] for n in [*range(10), *range(100, 104), *range(200, 207)]]),
        ({"every": 3}, [[0], [3], [6], [9], [100], [103], [200], [203], [206]]),
        ({"frames": 4, "every": 4}, [[0, 1, 2, 3], [4, 5, 6, 7], [100, 101, 102, 103], [200, 201, 202, 203]]),
        ({"frames": 3, "stride": 3}, [[n, n + 3, n + 6] for n in (0, 1, 2, 3, 200)]),
        ({"frames": 3, "every": 2, "stride": 2}, [[n, n + 2, n + 4] for n in (0, 2, 4, 200, 202)]),
    ],
)
def test_samples_are_frames_or_clips_of_one_file(classes, options, expected) -> None:
    """Samples follow the order of the files and cross no file, in any order of reading."""
    source = VideoSource(root=classes, files=("**/*.mp4", "**/*.mkv"), classes="folder", path_bytes=12, **options)
    with opened(source) as (reader, index):
        assert len(index) == len(expected)
        assert index.class_names == ("cats", "dogs")
        for sample in [*range(len(expected)), *reversed(range(len(expected)))]:
            values = reader.read(sample)
            images = values["image"][None] if source.frames == 1 else values["image"]
            assert [number_in(image) for image in images] == expected[sample]
            assert values["label"] == expected[sample][0] // 200
            assert np.shape(values["time"]) == (() if source.frames == 1 else (source.frames,))
            assert np.ravel(values["time"]) == pytest.approx([number % 100 / 25 for number in expected[sample]])
            file = "dogs/c.mkv" if values["label"] else "cats/b.mp4" if expected[sample][0] >= 100 else "cats/a.mp4"
            assert values["path"].tobytes().rstrip(b"\0").decode() == file


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "uint8[?,?,3]"),
        ({"color": "gray"}, "uint8[?,?,1]"),
        ({"frames": 4}, "uint8[4,?,?,3]"),
        ({"frames": 4, "size": (24, 32), "color": "bgr"}, "uint8[4,24,32,3]"),
    ],
)
def test_the_columns_are_what_the_samples_are(classes, options, text) -> None:
    """They follow from the options, without a file."""
    source = VideoSource(root=classes, files=("cats/a.mp4",), **options)
    image, label, time = kind_of(source).columns(source, Storage())
    assert (image.text, label) == (text, Column("label", dtype="int64"))
    values = read_samples(source)[0]
    assert values["image"].dtype == np.uint8
    assert all(wanted in (None, found) for wanted, found in zip(image.shape, values["image"].shape, strict=True))
    assert np.shape(values["time"]) == time.shape
    assert np.asarray(values["time"]).dtype == time.dtype


def test_options_that_make_no_sense_are_refused() -> None:
    """The configuration is refused with the number."""
    for options, message in [
        ({"files": ()}, "files must not be empty"),
        ({"every": 0}, "every must be 1 or more, not 0"),
        ({"frames": 5000}, "frames must be from 1 to 4096, not 5000"),
        ({"size": (0, 3)}, "size must be two lengths"),
        ({"size": (4000, 4000), "frames": 100}, "100 frames of [4000, 4000] are 4800000000 bytes"),
    ]:
        with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
            VideoSource(**{"root": Path("/v"), "files": ("*",), **options})


def test_a_source_of_files_that_are_too_short_is_refused(classes) -> None:
    """Such a source would have no sample."""
    message = refused(VideoSource(root=classes, files=("**/*.mp4",), frames=11))
    assert "has the 11 frames that a sample reaches over" in message
    assert "no file below" in refused(VideoSource(root=classes, files=("*.mov",)))


def test_the_digest_names_the_content_and_the_options(classes, tmp_path) -> None:
    """It does not depend on the folder of the files."""
    (tmp_path / "a.mp4").write_bytes((classes / "cats/a.mp4").read_bytes())
    one, copy = of(classes / "cats/a.mp4"), of(tmp_path / "a.mp4")
    assert scan(one).digest == scan(copy).digest
    others = [of(tmp_path / "a.mp4", **options) for options in ({"color": "bgr"}, {"size": (9, 9)}, {"every": 2})]
    write_video(tmp_path / "b/a.mp4", 10, first=1)
    write_video(tmp_path / "c/a.mp4", 10, Coding(turn=90))
    others += [of(tmp_path / "b/a.mp4"), of(tmp_path / "c/a.mp4")]
    assert len({scan(other).digest for other in [one, *others]}) == 6


# --- pixels ---------------------------------------------------------------------------------------

BT601, BT709, BT2020, UNTAGGED = 6, 1, 9, 2
LIMITED, FULL = 1, 2
SHARES = {BT601: (0.299, 0.114), UNTAGGED: (0.299, 0.114), BT709: (0.2126, 0.0722), BT2020: (0.2627, 0.0593)}
"""The shares of red and blue in the luma, by FFmpeg's number of a matrix."""


def rgb_of(planes: np.ndarray, matrix: int, colour_range: int) -> np.ndarray:
    """Convert luma and colour differences, [3, ...], by the standards to RGB from 0 to 255."""
    luma, blue_difference, red_difference = planes.astype(np.float64)
    if colour_range == FULL:
        luma, scale = luma / 255, 255
    else:
        luma, scale = (luma - 16) / 219, 224
    red_share, blue_share = SHARES[matrix]
    red = luma + 2 * (1 - red_share) * (red_difference - 128) / scale
    blue = luma + 2 * (1 - blue_share) * (blue_difference - 128) / scale
    green = (luma - red_share * red - blue_share * blue) / (1 - red_share - blue_share)
    return np.clip(np.stack([red, green, blue], -1) * 255, 0, 255)


@pytest.mark.parametrize("matrix", SHARES)
@pytest.mark.parametrize("colour_range", [0, LIMITED, FULL])
def test_colours_are_what_the_tags_say(matrix, colour_range) -> None:
    """Colours agree within 4 of 255 in any channel order; gray is the luma itself."""
    planes = np.random.default_rng(0).integers(0, 256, (3, 16, 16), dtype=np.uint8)
    wide = np.kron(planes, np.ones((1, 8, 8), np.uint8))
    flat = np.concatenate([wide[0].ravel(), wide[1, ::2, ::2].ravel(), wide[2, ::2, ::2].ravel()]).reshape(192, 128)
    frame = av.VideoFrame.from_ndarray(flat, "yuv420p")
    frame.colorspace, frame.color_range = matrix, colour_range
    expected = rgb_of(planes, matrix, colour_range)

    def middles(color: str) -> np.ndarray:
        return Pixels(of(Path("/v/a"), color=color)).of(frame)[4::8, 4::8].astype(np.float64)

    assert np.abs(middles("rgb") - expected).max() < 4
    assert np.abs(middles("bgr")[..., ::-1] - expected).max() < 4
    luma = planes[0] if colour_range == FULL else np.clip((planes[0].astype(np.float64) - 16) / 219 * 255, 0, 255)
    assert np.abs(middles("gray")[..., 0] - luma).max() < 1


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "area"])
def test_frames_are_scaled_without_aliasing(interpolation) -> None:
    """Fine stripes become even gray with every filter; smooth content stays in place."""
    source = of(Path("/v/a"), size=(24, 32), interpolation=interpolation)
    stripes = np.zeros((192, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    made = Pixels(source).of(av.VideoFrame.from_ndarray(stripes, "rgb24"))
    assert np.abs(made[:, 2:-2].astype(int) - 128).max() <= 6

    ramp = np.broadcast_to(np.arange(256, dtype=np.uint8)[None, :, None], (192, 256, 3))
    made = Pixels(source).of(av.VideoFrame.from_ndarray(np.ascontiguousarray(ramp), "rgb24"))
    assert np.abs(made[:, 1:-1, 0].astype(float) - (np.arange(1, 31) * 8 + 3.5)).max() <= 1.5


@pytest.mark.parametrize("turn", [90, 180, 270])
@pytest.mark.parametrize("size", [None, (30, 20)])
def test_a_display_matrix_turns_frames_upright(tmp_path, turn, size) -> None:
    """The option can switch that off; a size is that of the upright picture."""
    file = write_video(tmp_path / "a.mp4", 3, Coding(turn=turn))
    turned = read_samples(of(file, size=size))[1]["image"]
    quarters = turn // 90
    sides = size or ((HEIGHT, WIDTH) if turn == 180 else (WIDTH, HEIGHT))
    expected = np.rot90(picture(1), quarters)
    if size is not None:
        expected = Pixels(of(file, size=size)).of(av.VideoFrame.from_ndarray(np.ascontiguousarray(expected), "rgb24"))

    assert turned.shape == (*sides, 3)
    assert np.abs(turned.astype(int) - expected).mean() < 12
    np.testing.assert_array_equal(
        read_samples(of(file, rotation="ignore"))[1]["image"],
        np.rot90(read_samples(of(file))[1]["image"], -quarters),
    )


def test_a_clip_of_frames_of_several_sizes_needs_a_size(tmp_path) -> None:
    """A video may change its size; single frames keep their own size."""
    with av.open(tmp_path / "a.avi", "w") as container:
        stream = container.add_stream("mjpeg", rate=25)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuvj420p"
        stream.codec_context.options = {"strict": "-2"}
        for number, height in enumerate((48, 96)):
            coder = av.CodecContext.create("mjpeg", "w")
            coder.width, coder.height, coder.pix_fmt = WIDTH, height, "yuvj420p"
            coder.time_base, coder.options = Fraction(1, 25), {"strict": "-2"}
            frame = av.VideoFrame.from_ndarray(picture(number, height), "rgb24").reformat(format="yuvj420p")
            frame.pts = number
            for packet in coder.encode(frame):
                packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1, 25)
                container.mux(packet)
    assert [values["image"].shape for values in read_samples(of(tmp_path / "a.avi"))] == [(48, 64, 3), (96, 64, 3)]
    assert read_samples(of(tmp_path / "a.avi", frames=2, size=(48, 64)))[0]["image"].shape == (2, 48, 64, 3)
    with opened(of(tmp_path / "a.avi", frames=2)) as (reader, _index):
        assert "its frames have several sizes" in reason(reader)


# --- refused files, and bad samples ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"no video at all", "is no mp4, mov, mkv, webm or avi"),
        (
            b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{other}\n#EXT-X-ENDLIST\n",
            "is no mp4, mov, mkv, webm or avi",
        ),
        (b"ffconcat version 1.0\nfile {other}\n", "is no mp4, mov, mkv, webm or avi"),
    ],
)
def test_what_is_no_video_is_refused_and_leads_nowhere(videos, tmp_path, content, message) -> None:
    """A playlist under the name of a video opens no other file."""
    file = tmp_path / "a.mp4"
    file.write_bytes(content.replace(b"{other}", os.fsencode(videos / "h264.mp4")))
    assert f"{file} {message}" in refused(of(file))


def test_an_mp4_that_refers_to_another_file_opens_nothing(videos, tmp_path) -> None:
    """The data reference in the file is not followed."""
    content = (videos / "faststart.mp4").read_bytes()
    place = content.index(b"url \0\0\0\1")
    reference = content[: place + 4] + bytes(4) + content[place + 8 :]  # data elsewhere
    (tmp_path / "a.mp4").write_bytes(reference)
    opened_files = set()
    descriptor_folder = "/proc/self/fd"
    with opened(of(tmp_path / "a.mp4")) as (reader, _index):
        outcome(reader, 0)
        for number in os.listdir(descriptor_folder):  # noqa: PTH208  the test looks at names
            path = Path(descriptor_folder, number)
            opened_files.add(str(path.readlink()) if path.is_symlink() else "")
    assert str(videos / "faststart.mp4") not in opened_files


def test_a_transport_stream_is_refused(tmp_path) -> None:
    """Such a file has no index of its frames."""
    assert "is no mp4, mov, mkv, webm or avi" in refused(of(write_video(tmp_path / "a.ts", 10)))


def test_a_scan_runs_no_decoder(videos) -> None:
    """Only MPEG-4 data has the frame size, and FFmpeg would decode a frame to know it."""
    with (videos / "mpeg4.mp4").open("rb") as file:
        container, stream = open_video(PlainFile(file.fileno()))
        with container:
            assert len(list(packets_of(container, stream))) == FRAMES
            assert (stream.codec_context.width, stream.codec_context.is_open) == (0, False)


@pytest.mark.usefixtures("apart")
def test_a_scan_in_a_process_of_its_own_finds_the_same(classes) -> None:
    """It also records the files it read, so the index is reused until one of them changes."""
    source = VideoSource(root=classes, files=("**/*",), classes="folder")
    survey = Survey(nothing)
    index = kind_of(source).scan(source, survey)
    here = Survey(nothing)
    assert index.digest == video_scan.scan(source, here).digest
    assert survey.witnesses == here.witnesses
    assert {Path(one.path).name for one in survey.witnesses} == {"classes0", "cats", "dogs", "a.mp4", "b.mp4", "c.mkv"}


@pytest.mark.usefixtures("apart")
def test_a_file_that_kills_the_scanning_process_is_named(classes, monkeypatch) -> None:
    """The daemon survives."""
    monkeypatch.setenv("BATCHD_FAILPOINTS", "scan.video.opening=segv@2")
    source = VideoSource(root=classes, files=("**/*",))
    with pytest.raises(SourceInvalid) as caught:
        kind_of(source).scan(source, Survey(nothing))
    assert str(caught.value).startswith(f"{classes}/cats/b.mp4 is damaged, or was changed while it was scanned")


@pytest.mark.usefixtures("apart", "forked_scans")
def test_a_file_in_which_a_scan_hangs_is_named(classes, monkeypatch) -> None:
    """The message says what to do, and the scanning process has ended."""
    monkeypatch.setenv("BATCHD_FAILPOINTS", "scan.video.opening=hang@2")
    source = VideoSource(root=classes, files=("**/*",), scan_timeout_s=2.0)
    with pytest.raises(SourceInvalid) as caught:
        kind_of(source).scan(source, Survey(nothing))
    assert str(caught.value).startswith(f"{classes}/cats/b.mp4: the scan got no further within 2 s, and was ended")
    assert "raise scan_timeout_s" in str(caught.value)


def test_a_long_file_is_progress_all_the_time(videos, monkeypatch) -> None:
    """Progress within the file shows that the scan does not hang."""
    monkeypatch.setattr(packets, "PROGRESS_EVERY_S", 0)
    reports: list[int] = []

    video_scan.scan(of(videos / "h264.mp4"), Survey(reports.append))

    assert reports == [0] * FRAMES + [FRAMES]


def test_sound_alone_is_refused(tmp_path) -> None:
    """The message names the file."""
    with av.open(tmp_path / "a.mp4", "w") as container:
        stream = container.add_stream("aac", rate=44100, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate, frame.pts = 44100, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert refused(of(tmp_path / "a.mp4")) == f"{tmp_path}/a.mp4 has no video in it"


def test_a_file_that_was_never_finished_is_refused(videos, tmp_path) -> None:
    """An mp4 has its header at its end, unless an option moves it."""
    (tmp_path / "a.mp4").write_bytes((videos / "h264.mp4").read_bytes()[:3000])
    assert f"{tmp_path}/a.mp4 is no mp4, mov, mkv, webm or avi, or damaged at its header" in refused(
        of(tmp_path / "a.mp4")
    )


@pytest.mark.parametrize("name", ["faststart.mp4", "h264.mkv", "mjpeg.avi", "fragments.mp4"])
def test_a_file_that_is_cut_has_the_frames_up_to_there(videos, tmp_path, name) -> None:
    """Frames at the cut and frames that refer to them are bad, in any order of reading."""
    content = (videos / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with opened(of(tmp_path / name)) as (reader, index):
        assert 20 < len(index) < 70
        in_order = [outcome(reader, sample) for sample in range(len(index))]
        assert [outcome(reader, sample) for sample in reversed(range(len(index)))] == in_order[::-1]
    with opened(of(videos / name)) as (reader, _index):
        good = [sample for sample, found in enumerate(in_order) if isinstance(found, bytes)]
        assert len(good) >= len(in_order) - 3
        assert all(in_order[sample] == outcome(reader, sample) for sample in good)


def test_a_frame_that_is_damaged_when_it_is_scanned_is_named(videos, tmp_path) -> None:
    """The reason has the frame's number and second; the next group of pictures is unharmed."""
    index = scan(of(videos / "h264.mkv"))
    content = (videos / "h264.mkv").read_bytes()
    with av.open(videos / "h264.mkv") as container:
        packet = [packet for packet in container.demux(video=0) if packet.size][30]
    with opened(damaged(videos / "h264.mkv", tmp_path, content.index(bytes(packet)), packet.size)) as (reader, _index):
        frame = index.arrays["order"].tolist().index(30)
        assert reason(reader, frame).startswith(f"frame {frame} at {frame / 25:.3f} s: packet 30 cannot be decoded: ")
        assert reader.name(frame) == f"{tmp_path}/h264.mkv: frame {frame} at {frame / 25:.3f} s"
        assert number_in(reader.read(frame - 12)["image"]) == frame - 12
        assert number_in(reader.read(frame + 12)["image"]) == frame + 12


def test_a_file_that_changes_after_the_scan_makes_bad_samples(videos, tmp_path) -> None:
    """Each packet is compared, so unchanged ones are still good."""
    file = tmp_path / "h264.mkv"
    content = (videos / file.name).read_bytes()
    file.write_bytes(content)
    with av.open(file) as container:
        packet = [packet for packet in container.demux(video=0) if packet.size][30]
    with opened(of(file)) as (reader, index):
        damaged(file, tmp_path, content.index(bytes(packet)) + packet.size - 1)
        frame = index.arrays["order"].tolist().index(30)
        assert "packet 30 is not what it was: the file has changed" in reason(reader, frame)
        assert number_in(reader.read(90)["image"]) == 90
    with opened(of(videos / file.name)) as (reader, _index):
        assert number_in(reader.read(50)["image"]) == 50


def test_a_file_that_shrinks_while_it_is_open_makes_bad_samples(tmp_path) -> None:
    """Each read gives a reason and no other error; a file that is whole again has good samples."""
    file = tmp_path / "a.avi"
    content = write_video(file, FRAMES, Coding("rawvideo")).read_bytes()
    with opened(of(file)) as (reader, _index):
        assert len(content) > 2 * READ_BYTES
        reader.read(3)
        for size in (100, 0):
            os.truncate(file, size)
            for sample in (90, 60, 91, 99):
                assert "the file" in reason(reader, sample)
        file.write_bytes(content)
        assert number_in(reader.read(70)["image"]) == 70


def test_large_frames_and_packets_are_bad_samples(videos) -> None:
    """The sizes are checked before anything is decoded."""
    with opened(of(videos / "h264.mp4", max_pixels=1000)) as (reader, _index):
        assert reason(reader) == "64 x 48 is 3072 pixels, more than max_pixels = 1000"
    with opened(of(videos / "h264.mp4"), max_bytes=100) as (reader, _index):
        assert "bytes, more than max_bytes = 100" in reason(reader)


def test_few_files_are_open_at_once(classes, tmp_path) -> None:
    """The number of files does not matter, and none stays open at the end."""
    for number in range(9):
        (tmp_path / f"{number}.mp4").write_bytes((classes / "cats/b.mp4").read_bytes())
    with opened(VideoSource(root=tmp_path, files=("*.mp4",))) as (reader, index):
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a count
        for sample in range(0, len(index), 2):
            reader.read(sample)
            assert len(os.listdir("/proc/self/fd")) <= before + 4  # noqa: PTH208
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("name", ["h264.mp4", "h264.mkv", "mjpeg.avi", "vp9.webm", "hevc.mp4", "open_groups.mp4"])
@given(seed=st.integers(0, 1 << 32))
def test_whatever_is_damaged_is_refused_or_bad_or_a_picture(videos, tmp_path_factory, name, seed) -> None:
    """There is no other outcome."""
    choice = random.Random(seed)
    content = bytearray((videos / name).read_bytes())
    for _ in range(choice.choice([1, 1, 5])):
        content[choice.randrange(len(content))] = choice.randrange(256)
    file = tmp_path_factory.getbasetemp() / name
    file.write_bytes(content[: choice.randrange(len(content)) if seed % 9 == 0 else None])
    with suppress(SourceInvalid), opened(of(file, max_pixels=1 << 20)) as (reader, index):
        for sample in choice.sample(range(len(index)), min(6, len(index))):
            assert outcome(reader, sample)


def test_times_of_frames_never_go_back(videos) -> None:
    """The number of a frame is therefore its place among all the frames that are shown."""
    for name in KINDS:
        with opened(of(videos / name)) as (reader, index):
            times = [reader.known(sample)["time"] for sample in range(len(index))]
        assert all(one < next_one for one, next_one in pairwise(times))
