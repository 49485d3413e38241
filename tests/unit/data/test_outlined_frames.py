"""Frames of MP4 that the index of the file tells, without a byte of its media data.

They are those that all packets tell: as FFmpeg writes files, and wherever these are damaged.
"""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from batchd.data.media import containers
from batchd.data.media.containers import OutlinedFile, PlainFile, VideoUnreadable, open_video
from batchd.data.media.frames import VideoFrames, open_frames
from batchd.data.media.packets import FileFrames, frames_of, outlined_frames
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import MediaFile
from support.facts import Facts
from support.videos import HEIGHT, WIDTH, Coding, with_sound, write_video

from .test_shown_frames import copied

FRAMES = 50
LIMITS = 1 << 24, 1 << 28
FRAGMENTS = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
OPEN = {"x264-params": "open-gop=1:bframes=3:b-pyramid=normal:scenecut=0"}
UNEVEN = [0, *np.cumsum([(1, 40, 3, 7)[number % 4] for number in range(FRAMES)]).tolist()]
CODINGS = {
    "b_frames.mp4": Coding(gop=20, b_frames=3),
    "front.mp4": Coding(muxer={"movflags": "faststart"}),
    "before_zero.mp4": Coding(b_frames=3, times=lambda number: number - 6, muxer={"avoid_negative_ts": "disabled"}),
    "negative.mp4": Coding(b_frames=3, muxer={"movflags": "negative_cts_offsets"}),
    "no_list.mp4": Coding(b_frames=3, muxer={"use_editlist": "0"}),
    "uneven.mp4": Coding(units=600, times=UNEVEN.__getitem__),
    "open.mov": Coding(gop=20, options=OPEN),
    "refresh.mp4": Coding(gop=20, options={"x264-params": "intra-refresh=1"}),
    "fragments.mp4": Coding(muxer=FRAGMENTS),
    "indexed_fragments.mp4": Coding(muxer={"movflags": "frag_keyframe+dash+global_sidx"}),
    "hevc.mp4": Coding("libx265", {"x265-params": "log-level=none:pools=1"}),
    "vp9.mp4": Coding("libvpx-vp9"),
    "av1.mp4": Coding("libsvtav1", {"preset": "12", "svtav1-params": "lp=1"}, b_frames=0),
    "mpeg4.mp4": Coding("mpeg4"),
    "mjpeg.mov": Coding("mjpeg", pixels="yuvj420p", b_frames=0),
}


def _cut(folder: Path) -> Path:
    return copied(write_video(folder / "whole.mp4", FRAMES, Coding(gop=20)), folder / "cut.mp4", first_s=1.0)


def _late(folder: Path) -> Path:
    return copied(write_video(folder / "whole.mp4", FRAMES), folder / "late.mp4", shift=7000)


FILES: dict[str, Callable[[Path], Path]] = {
    **{name: lambda folder, name=name: write_video(folder / name, FRAMES, CODINGS[name]) for name in CODINGS},  # type: ignore[misc]
    "edit_list": _cut,
    "later": _late,
    "with_sound": lambda folder: with_sound(folder / "sound.mp4", "aac", 0.3),
}


@pytest.fixture(autouse=True)
def _short_files_have_outlines(monkeypatch) -> None:
    monkeypatch.setattr(containers, "HOLE_BYTES", 1)


def media(content: bytes, name: object = None) -> MediaFile:
    return MediaFile(len(content), lambda at, count: content[at : at + count], name)


def read_through(file: MediaFile) -> FileFrames | None:
    """The frames as all packets tell them; None of a file that is no video."""
    try:
        container, stream = open_video(PlainFile(file))
        with container:
            return frames_of(container, stream)
    except VideoUnreadable:
        return None


def equal(one: FileFrames, other: FileFrames) -> bool:
    """Whether order, key frames, times and unit are the same."""
    return one.unit == other.unit and all(
        np.array_equal(*both) for both in ((one.order, other.order), (one.keys, other.keys), (one.times, other.times))
    )


def without_media_data(content: bytes) -> bytes:
    """The file with other bytes in its boxes ``mdat``."""
    made, place = bytearray(content), 0
    while place < len(made):
        size = int.from_bytes(made[place : place + 4])
        if made[place + 4 : place + 8] == b"mdat":
            made[place + 8 : place + size] = b"\xa5" * (size - 8)
        place += size
    return bytes(made)


@pytest.mark.parametrize("name", FILES)
def test_the_index_tells_what_all_packets_tell(tmp_path, name) -> None:
    """Times, order and key frames. What is in the media data changes nothing."""
    content = FILES[name](tmp_path).read_bytes()
    told = read_through(media(content))
    assert told is not None
    for file in (content, without_media_data(content)):
        outlined = outlined_frames(media(file))
        assert outlined is not None
        assert equal(outlined, told)
        assert outlined.is_outlined


def test_what_only_packets_tell_is_read_through(tmp_path) -> None:
    """Other containers, coders whose packets FFmpeg divides, short files, and no videos."""
    others = {"a.mkv": Coding(), "b.avi": Coding(b_frames=0), "c.mp4": Coding("mpeg2video")}
    for name, coding in others.items():
        content = write_video(tmp_path / name, FRAMES, coding).read_bytes()
        assert outlined_frames(media(content)) is None
        assert not shown(content)[0].is_outlined
    for content in (b"", b"no video", b"\x00\x00\x00\x01mdat" + b"\xff" * 90, b"\x00\x00\x00\x08free" * 40_000):
        assert outlined_frames(media(content)) is None
        (tmp_path / "file").write_bytes(content)
        with (tmp_path / "file").open("rb") as file:
            assert outlined_frames(file.fileno()) is None


def shown(content: bytes, facts: Facts | None = None) -> tuple[FileFrames, list[bytes | None]]:
    """The frames of a file, and the pixels of some; None for one that is damaged.

    Raises ``SampleUnreadable`` for no video.
    """
    video = open_frames(media(content, "a name"), None, *LIMITS, facts)
    count, made = len(video.frames.order), list[bytes | None]()
    for number in (count - 1, count // 2, count // 3, 1, 0):
        try:
            made.append(video.frame(min(number, count - 1)).to_ndarray().tobytes())
        except SampleUnreadable:
            made.append(None)
    video.close()
    return video.frames, made


def both(content: bytes, monkeypatch) -> list[tuple[FileFrames, list[bytes | None]] | None]:
    """What ``shown`` gives, by the index and by all packets."""
    found: list[tuple[FileFrames, list[bytes | None]] | None] = []
    for least in (1, 1 << 40):
        monkeypatch.setattr(containers, "HOLE_BYTES", least)
        try:
            found.append(shown(content))
        except SampleUnreadable:
            found.append(None)
    return found


def same(content: bytes, monkeypatch) -> bool:
    """Whether both ways show the same frames at the same times, or neither shows any."""
    one, other = both(content, monkeypatch)
    if one is None or other is None:
        return one is other
    return np.array_equal(one[0].times, other[0].times) and one[1] == other[1]


def box(content: bytes, kind: bytes) -> int:
    """Where the content of a box begins."""
    return content.index(kind) + 4


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("name", ["front.mp4", "open.mov", "fragments.mp4", "edit_list"])
def test_a_file_that_is_cut_or_changed_at_any_byte_shows_what_it_showed(tmp_path, monkeypatch, name) -> None:
    """Also where the index lies about key frames, sizes, or places."""
    content, random_bytes = FILES[name](tmp_path).read_bytes(), random.Random(5)
    heads = [at for at in range(len(content)) if content[at : at + 4] in (b"moov", b"moof")]
    of_index = [at for head in heads for at in range(head - 4, head + int.from_bytes(content[head - 4 : head]) - 4)]
    for at in random_bytes.sample(of_index, 150):
        damaged = bytearray(content)
        damaged[at] ^= random_bytes.randrange(1, 256)
        assert same(bytes(damaged), monkeypatch), at
    for end in random_bytes.sample([*of_index, *range(0, len(content), 37)], 60):
        assert same(content[:end], monkeypatch), end


def test_every_cut_of_the_index_tells_the_same_or_nothing(tmp_path) -> None:
    content = FILES["b_frames.mp4"](tmp_path).read_bytes()
    for end in range(box(content, b"moov") - 8, len(content)):
        told, outlined = read_through(media(content[:end])), outlined_frames(media(content[:end]))
        assert outlined is None or (told is not None and equal(outlined, told)), end


def test_key_frames_that_are_none_are_found_out(tmp_path, monkeypatch) -> None:
    """An index without a list says that all are: the first packets prove that it lies.

    If it lies about some, decoding begins at the key frame before.
    """
    content = bytearray(FILES["front.mp4"](tmp_path).read_bytes())
    unlisted = content.replace(b"stss", b"free")
    [by_index, _read] = both(bytes(unlisted), monkeypatch)
    assert by_index is not None
    assert not by_index[0].is_outlined
    assert same(bytes(unlisted), monkeypatch)

    listed = box(bytes(content), b"stss")
    content[listed + 12 : listed + 20] = (6).to_bytes(4) + (8).to_bytes(4)
    [by_index, _read] = both(bytes(content), monkeypatch)
    assert by_index is not None
    assert by_index[0].is_outlined
    assert {5, 7} <= set(by_index[0].keys.tolist())
    assert same(bytes(content), monkeypatch)


@pytest.mark.parametrize("table", [b"stsz", b"stts", b"ctts", b"stsc", b"stco", b"stss"])
@pytest.mark.parametrize("count", [(1 << 32) - 1, 1 << 30, 100_000])
def test_a_table_that_announces_more_than_it_has_takes_no_memory(tmp_path, table, count) -> None:
    """The file is refused, or has the frames that are there."""
    content = bytearray(FILES["front.mp4"](tmp_path).read_bytes())
    at = box(bytes(content), table) + (8 if table == b"stsz" else 4)
    content[at : at + 4] = count.to_bytes(4)
    outlined = outlined_frames(media(bytes(content)))
    assert outlined is None or len(outlined.times) <= FRAMES


def test_frames_that_the_index_told_are_kept(tmp_path) -> None:
    """A worker that finds the record shows the same; one that packets told is good, too."""
    content, facts = FILES["front.mp4"](tmp_path).read_bytes(), Facts()
    frames, expected = shown(content, facts)
    [record] = facts.records.values()
    kept = FileFrames.from_bytes(memoryview(record))
    assert kept is not None
    assert kept.is_outlined
    assert equal(kept, frames)
    assert shown(content, facts)[1] == expected
    through = read_through(media(content))
    assert through is not None
    facts.records = dict.fromkeys(facts.records, through.to_bytes())
    assert shown(content, facts)[1] == expected


def test_a_file_that_changed_is_not_shown_as_another(tmp_path) -> None:
    """Its packets are elsewhere, or have other sizes."""
    content = FILES["front.mp4"](tmp_path).read_bytes()
    other = write_video(tmp_path / "other.mp4", FRAMES, CODINGS["front.mp4"], first=9).read_bytes()
    frames = outlined_frames(media(content))
    video = VideoFrames(media(other), frames, *LIMITS)
    with pytest.raises(SampleUnreadable, match="changed"):
        video.frame(FRAMES - 1)
    video.close()


def test_sizes_of_64_bits_and_boxes_up_to_the_end_have_holes(tmp_path) -> None:
    content = FILES["front.mp4"](tmp_path).read_bytes()
    at = content.rindex(b"mdat") - 4
    head, data = content[:at], content[at + 8 :]
    for made in (b"\x00\x00\x00\x01mdat" + (len(data) + 16).to_bytes(8), b"\x00\x00\x00\x00mdat"):
        file = OutlinedFile(media(head + made + data))
        file.seek(len(head) + len(made) - 3)
        assert file.read(100) == made[-3:]
        assert file.read(1 << 20) == bytes(len(data))
        assert file.read(1) == b""


def test_a_clip_of_a_file_beyond_4_gib_takes_its_bytes(tmp_path) -> None:
    """``co64``: the media data lies behind a hole of a sparse file."""
    content = FILES["b_frames.mp4"](tmp_path).read_bytes()
    head = box(content, b"mdat") - 8
    gap = (5 << 30).to_bytes(8)
    path = tmp_path / "long.mp4"
    at = box(content, b"stco")
    count = int.from_bytes(content[at + 4 : at + 8])
    places = [int.from_bytes(content[at + 8 + 4 * n : at + 12 + 4 * n]) + (5 << 30) for n in range(count)]
    table = b"co64" + bytes(4) + count.to_bytes(4) + b"".join(place.to_bytes(8) for place in places)
    moov = bytearray(content[box(content, b"moov") - 8 :])
    local = at - (box(content, b"moov") - 8)
    moov[local - 4 : local + 8 + 4 * count] = table
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"co64"):
        size = moov.index(kind) - 4
        moov[size : size + 4] = (int.from_bytes(moov[size : size + 4]) + 4 * count).to_bytes(4)
    with path.open("wb") as file:
        file.write(content[:head] + b"\x00\x00\x00\x01free" + gap)
        file.seek(head + (5 << 30))
        file.write(content[head : box(content, b"moov") - 8] + moov)
    with path.open("rb") as file:
        read: list[int] = []

        def read_some(first: int, count: int) -> bytes:
            read.append(count)
            file.seek(first)
            return file.read(count)

        video = open_frames(MediaFile(path.stat().st_size, read_some, None), None, *LIMITS, None)
        assert video.frames.is_outlined
        assert video.frame(30).to_ndarray().shape == (HEIGHT * 3 // 2, WIDTH)
        video.close()
    assert sum(read) < 1 << 20
