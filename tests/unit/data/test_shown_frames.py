"""Frames of videos as they are made in practice: those that decoding the whole file shows.

Whatever a container does with times (edit lists, frames before 0, uneven rates), and whatever a
codec does with their order, a clip has the frames that a player shows.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from batchd.data.media.frames import PixelOptions, Pixels
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.media.options import DecodeVideo
from batchd.data.samples.columns import Column, parse_column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import MediaFile
from support.videos import Coding, number_in, write_video

FRAMES = 50


def copied(old: Path, new: Path, first_s: float = 0.0, shift: int = 0, **muxer: str) -> Path:
    """The packets from a time on in another file, as ``ffmpeg -ss -c copy`` and -itsoffset do."""
    with av.open(old) as source, av.open(new, "w", container_options=muxer) as target:
        into = target.add_stream_from_template(source.streams.video[0])
        begin = round(first_s / source.streams.video[0].time_base)
        if begin:
            source.seek(begin, stream=source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = into
                packet.pts, packet.dts = packet.pts - begin + shift, packet.dts - begin + shift
                target.mux(packet)
    return new


def _edit_list(folder: Path) -> Path:
    return copied(write_video(folder / "whole.mp4", FRAMES, Coding(gop=20)), folder / "cut.mp4", first_s=1.0)


def _before_zero(folder: Path) -> Path:
    coding = Coding(gop=20, b_frames=3, times=lambda number: number - 6, muxer={"avoid_negative_ts": "disabled"})
    return write_video(folder / "before.mp4", FRAMES, coding)


def _uneven(folder: Path) -> Path:
    times = [0]
    for number in range(FRAMES):
        times.append(times[-1] + (1, 40, 3, 7)[number % 4])
    return write_video(folder / "uneven.mp4", FRAMES, Coding(units=600, gop=20, times=times.__getitem__))


def _open_groups(folder: Path) -> Path:
    options = {"x264-params": "open-gop=1:bframes=3:b-pyramid=normal:scenecut=0"}
    return write_video(folder / "open.mkv", FRAMES, Coding(gop=20, options=options))


def _interlaced(folder: Path) -> Path:
    return write_video(folder / "woven.mp4", FRAMES, Coding(gop=20, options={"x264-params": "tff=1"}))


def _alpha(folder: Path) -> Path:
    options = {"auto-alt-ref": "0"}
    return write_video(folder / "alpha.webm", FRAMES, Coding("libvpx-vp9", gop=20, options=options, pixels="yuva420p"))


def _fragments(folder: Path) -> Path:
    return write_video(folder / "pieces.mp4", FRAMES, Coding(gop=20, muxer={"movflags": "frag_keyframe+empty_moov"}))


def _hevc(folder: Path) -> Path:
    return write_video(
        folder / "h265.mp4", FRAMES, Coding("libx265", {"x265-params": "log-level=none:pools=1"}, gop=20)
    )


KINDS = [_edit_list, _before_zero, _uneven, _open_groups, _interlaced, _alpha, _fragments, _hevc]


def media(content: bytes, name: object = None) -> MediaFile:
    return MediaFile(len(content), lambda at, n: content[at : at + n], name)


def clip(pipeline: Pipeline, content: bytes, at: float, sample: int = 0, name: object = None):
    made = pipeline.make({"video": media(content, name), "at": at}, 0, sample, 0)
    return made["image"], made["seconds"]


def pipeline_of(step: DecodeVideo) -> Pipeline:
    return Pipeline([parse_column("video", "video"), Column("at", dtype="float64")], [step], 7, has_rows=False)


@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__.strip("_"))
def test_a_clip_shows_what_decoding_the_whole_file_shows_at_its_times(tmp_path, write) -> None:
    """Clips of 40 drawn starts, some with starts that share groups, against one pass of FFmpeg."""
    path = write(tmp_path)
    content = path.read_bytes()
    with av.open(path) as container:
        container.streams.video[0].codec_context.thread_count = 1
        shown = [(float(frame.pts * frame.time_base), frame) for frame in container.decode(video=0)]
    times = np.array([time for time, _frame in shown])
    assert (np.diff(times) > 0).all()
    last = times[-1] + (times[-1] - times[0]) / (len(times) - 1)
    pixels = Pixels(PixelOptions(1, "rgb", "apply"))
    drawn = random.Random(3)
    starts = [times[0], *(drawn.uniform(times[0], last - 1e-3) for _clip in range(40))]
    pipeline = pipeline_of(DecodeVideo(frames=5, fps=20.0, start="at", times="seconds"))
    for sample, at in enumerate(starts):
        pipeline.announce({"video": media(content, "a name"), "at": at}, 0, sample)
    for sample, at in enumerate(starts):
        image, seconds = clip(pipeline, content, at, sample, "a name")
        wanted = np.searchsorted(times, at + np.arange(5) / 20 + 1e-9, "right") - 1
        off = np.abs((at + np.arange(5) / 20)[:, None] - times).min(1)
        for place, number in enumerate(wanted):
            # files round times, so a time near to that of a frame may be either
            if off[place] > 2e-3:
                assert seconds[place] == pytest.approx(times[number], abs=1e-9)
            (exact,) = np.flatnonzero(np.isclose(times, seconds[place], atol=1e-9))
            np.testing.assert_array_equal(image[place], pixels.of(shown[exact][1]))


def test_a_corrupt_packet_in_the_middle_is_a_bad_sample_that_names_the_second(tmp_path) -> None:
    """Clips of other groups, and before it, are good."""
    path = write_video(tmp_path / "a.mp4", FRAMES, Coding(gop=10))
    with av.open(path) as container:
        packet = [one for one in container.demux(video=0) if one.size][24]
    content = bytearray(path.read_bytes())
    content[packet.pos + 8 : packet.pos + 12] = b"\xff\x00\xff\x00"
    step = DecodeVideo(frames=2, fps=25.0, start="at", times="seconds")
    found = {}
    for number in range(0, FRAMES - 2, 2):
        try:
            image, _seconds = clip(pipeline_of(step), bytes(content), number / 25)
            found[number] = [number_in(one) for one in image] == [number, number + 1]
        except SampleUndecodable as error:
            found[number] = str(error)
    bad = {number: text for number, text in found.items() if text is not True}
    assert set(bad) <= set(range(20, 30))
    assert bad
    for number, text in bad.items():
        assert f"at {number / 25:.3f} s" in text or f"at {(number + 1) / 25:.3f} s" in text


def test_texts_of_a_container_may_be_no_utf_8(tmp_path) -> None:
    content = write_video(tmp_path / "a.mp4", 10).read_bytes()
    named = content.replace(b"VideoHandler", b"\xff\xfe\x80\xc3Handler\xe4")
    assert named != content
    image, _seconds = clip(pipeline_of(DecodeVideo(frames=2, fps=25.0, start="at", times="seconds")), named, 0.2)
    assert [number_in(one) for one in image] == [5, 6]


QUIET = """
import os, sys
sys.path[:0] = {paths!r}
from unit.data.test_shown_frames import clip, pipeline_of, DecodeVideo, SampleUndecodable
from batchd.worker.process import thread_count
content = open({path!r}, "rb").read()
pipeline = pipeline_of(DecodeVideo(frames=4, fps=25.0, start="at", times="seconds"))
before = thread_count()
for part in (content, content[: len(content) // 2], content[:3000] + bytes(200) + content[3200:]):
    try:
        clip(pipeline, part, 0.4)
    except SampleUndecodable:
        pass
assert thread_count() == before, "a thread of FFmpeg"
child = os.fork()
if not child:
    clip(pipeline, content, 0.8)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_ffmpeg_writes_nothing_starts_no_thread_and_bears_a_fork(tmp_path) -> None:
    """Damaged packets make its lines, and fork servers have decoders of their own."""
    path = write_video(tmp_path / "a.mp4", FRAMES, Coding(gop=10))
    program = QUIET.format(path=str(path), paths=[path for path in sys.path if path])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
