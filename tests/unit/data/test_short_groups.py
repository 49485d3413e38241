"""Videos with short groups of pictures: the same frames at the same times, and a measured loss."""

from pathlib import Path

import av
import numpy as np
import pytest

from batchd.data.media.frames import PixelOptions, Pixels, VideoFrames
from batchd.data.media.short_groups import longest_group, with_short_groups
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import MediaFile
from support.videos import Coding, number_in, write_video

FRAMES, SHORT = 40, 8
LIMITS = 1 << 20, 1 << 20
KINDS = {
    "h264.mp4": Coding(gop=40),
    "open_groups.mov": Coding(options={"x264-params": "open-gop=1:bframes=3:b-pyramid=normal:scenecut=0"}),
    "uneven.mkv": Coding(units=12800, times=lambda number: 512 * number + number % 3 * 100 + number // 10 * 7000),
    "vp9.webm": Coding("libvpx-vp9", gop=40),
    "mpeg4.avi": Coding("mpeg4", b_frames=0),
    "late.mp4": Coding(times=lambda number: number + 7),
    "turned.mp4": Coding(turn=90),
    "deep.mp4": Coding(pixels="yuv420p10le"),
}


def media(content: bytes) -> MediaFile:
    return MediaFile.of(memoryview(content))


def made_of(content: bytes, longest: int = SHORT):
    return with_short_groups(media(content), longest, *LIMITS)


def opened(content: bytes) -> VideoFrames:
    return VideoFrames(media(content), None, *LIMITS)


def sound_packets(path: Path) -> list[tuple[float, bytes]]:
    with av.open(path) as container:
        return [(float(one.pts * one.time_base), bytes(one)) for one in container.demux(audio=0) if one.size]


@pytest.mark.parametrize("name", KINDS)
def test_frames_keep_their_times_and_the_loss_is_what_it_is_said_to_be(tmp_path, name) -> None:
    """The PSNR is checked by its formula."""
    before = write_video(tmp_path / name, FRAMES, KINDS[name]).read_bytes()
    made = made_of(before)
    assert (made.done, made.bytes_before) == ("re-encoded", len(before))
    assert made.longest > SHORT
    old, new = opened(before), opened(made.content)
    assert longest_group(new.frames) <= SHORT
    upright = Pixels(PixelOptions(1, "gray", "apply"))
    errors = []
    for number in range(FRAMES):
        assert new.frames.seconds(number) == old.frames.seconds(number)
        assert number_in(upright.of(new.frame(number))) == number_in(upright.of(old.frame(number)))
        if old.frame(number).format.name == "yuv420p":
            luma, other = (one.frame(number).to_ndarray()[: one.frame(number).height] for one in (old, new))
            errors.append(np.square(luma / 255 - other / 255).mean())
    if errors:
        assert made.psnr == pytest.approx([-10 * np.log10(np.mean(errors)), -10 * np.log10(max(errors))], abs=0.01)
    assert min(made.psnr) > 40


def test_sound_stays_as_it_is(tmp_path) -> None:
    """Its packets are copied, at their times."""
    path, new = tmp_path / "sound.mp4", tmp_path / "new.mp4"
    with av.open(path, "w") as container:
        video, sound = container.add_stream("libx264", rate=25), container.add_stream("aac", rate=16000)
        video.width, video.height, video.pix_fmt, sound.layout = 64, 48, "yuv420p", "mono"
        for number in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), number, np.uint8))
            container.mux(video.encode(frame))
            wave = np.sin(np.arange(640) / 9, dtype=np.float32).reshape(1, -1)
            tone = av.AudioFrame.from_ndarray(wave, "fltp", "mono")
            tone.rate, tone.pts = 16000, number * 640
            container.mux(sound.encode(tone))
        container.mux(video.encode())
        container.mux(sound.encode())
    new.write_bytes(made_of(path.read_bytes()).content)
    assert sound_packets(new) == sound_packets(path)


def test_short_groups_stay_as_they_are(tmp_path) -> None:
    """Also those that are as long as is allowed."""
    content = write_video(tmp_path / "short.mp4", FRAMES, Coding(gop=SHORT)).read_bytes()
    made = made_of(content)
    assert (made.done, made.content, made.psnr) == ("kept", content, None)


@pytest.mark.parametrize("name", ["a.mp4", "a.avi"])
def test_a_lost_index_is_made_again_without_decoding(tmp_path, name) -> None:
    """The packets are the same, and a seek finds the key frame."""
    coding = Coding(gop=5) if name == "a.mp4" else Coding("mpeg4", gop=5, b_frames=0)
    content = write_video(tmp_path / name, FRAMES, coding).read_bytes()
    if name == "a.mp4":
        place = content.index(b"stss") + 8
        lost = content[:place] + bytes(4) + content[place + 4 :]
    else:
        lost = content[: content.index(b"idx1")]
    made = made_of(lost)
    assert (made.done, made.psnr) == ("remuxed", None)
    assert opened(made.content).frames.checksums.tolist() == opened(lost).frames.checksums.tolist()
    assert made_of(made.content).done == "kept"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no video", "is no mp4"), (b"", "is empty")],
)
def test_what_is_no_video_is_a_bad_sample(content, message) -> None:
    with pytest.raises(SampleUndecodable, match=message):
        made_of(content)


def test_damage_and_pixels_that_cannot_be_kept_are_bad_samples(tmp_path) -> None:
    """They name the second, or the form of pixels."""
    path = write_video(tmp_path / "a.mp4", FRAMES, Coding(gop=40))
    with av.open(path) as container:
        place = [one for one in container.demux(video=0) if one.size][20].pos
    content = bytearray(path.read_bytes())
    content[place + 8 : place + 12] = b"\xff\x00\xff\x00"
    with pytest.raises(SampleUndecodable, match=r"frame \d+ at 0\.\d+ s"):
        made_of(bytes(content))
    rgb = write_video(tmp_path / "rgb.avi", FRAMES, Coding("ffv1", pixels="bgr0", b_frames=0))
    with pytest.raises(SampleUndecodable, match=r"bgr0, which H\.264 does not keep"):
        made_of(rgb.read_bytes())
