"""Sound files become numbers: any segment of any format, exactly; or a bad sample says why."""

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from batchd.data.pipeline.effects import StepInvalid
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.media import ffmpeg
from batchd.data.pipeline.media.ffmpeg import CodedSound
from batchd.data.pipeline.media.options import DecodeAudio
from batchd.data.pipeline.media.sound_files import open_sound
from batchd.data.pipeline.options import step_from_plain, step_to_plain
from batchd.data.pipeline.sample_fields import columns_after
from batchd.data.samples.columns import Column, parse_column
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.values import MediaFile
from support.facts import Facts
from support.sounds import RATE, SECONDS, coded, stored, sweep, without_table

AUDIO = (Column("audio", "audio"),)
STORED = {
    "wav": ("WAV", "PCM_16"),
    "wav of 24 bits": ("WAV", "PCM_24"),
    "wav of 8 bits": ("WAV", "PCM_U8"),
    "wav, extensible": ("WAVEX", "PCM_24"),
    "wav of floats": ("WAV", "DOUBLE"),
    "rf64": ("RF64", "PCM_16"),
    "w64": ("W64", "PCM_16"),
    "aiff": ("AIFF", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "flac of 24 bits": ("FLAC", "PCM_24"),
    "vorbis": ("OGG", "VORBIS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}
CODED = {
    "m4a": ("ipod", "aac"),
    "aac": ("adts", "aac"),
    "mp4": ("mp4", "aac"),
    "alac": ("mp4", "alac"),
    "matroska with aac": ("matroska", "aac"),
    "matroska with flac": ("matroska", "flac"),
    "ogg with flac": ("ogg", "flac"),
    "mp4 with ac3": ("mp4", "ac3"),
    "matroska with ac3": ("matroska", "ac3"),
    "matroska with mp2": ("matroska", "mp2"),
    "webm with vorbis": ("webm", "vorbis"),
    "avi": ("avi", "pcm_s16le"),
    "avi with mp3": ("avi", "libmp3lame"),
    "avi with ac3": ("avi", "ac3"),
}
KINDS = (*STORED, *CODED, "mp3 without a table", "opus", "webm")
LOSSY = frozenset(KINDS) - {name for name in STORED if name not in ("vorbis", "mp3")} - {"alac"}
LATE = {"aac": 1024, "mp3 without a table": 1105, "avi with mp3": 1105, "avi with ac3": 256}
"""Samples that an encoder puts in front, of which there is no word in the file."""


@cache
def file_of(kind: str) -> bytes:
    """A file of this kind, of two channels."""
    if kind == "mp3 without a table":
        return without_table(coded("mp3", "libmp3lame", sweep()))
    if kind in ("opus", "webm"):
        return coded("ogg" if kind == "opus" else "webm", "libopus", sweep(48_000), 48_000)
    return stored(*STORED[kind], sweep()) if kind in STORED else coded(*CODED[kind], sweep())


def media(data: bytes) -> MediaFile:
    """A file that is read in parts."""
    return MediaFile(len(data), lambda start, count: data[start : start + count], "file")


@contextmanager
def opened(data: bytes) -> Iterator[MediaFile]:
    """A file of this machine that is open."""
    with os.fdopen(os.memfd_create("sound"), "w+b") as file:
        file.write(data)
        file.flush()
        yield MediaFile(len(data), lambda start, count: os.pread(file.fileno(), count, start), "file", file.fileno())


def whole(data: bytes, *, is_mono: bool = False) -> NDArray[np.float32]:
    """All samples of a file."""
    with open_sound(memoryview(data)) as sound:
        return sound.read(0, sound.frames, is_mono=is_mono)


def made(data: bytes, sample: int = 0, values: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The values of a sample after ``decode_audio``."""
    columns = [*AUDIO, *(parse_column(name, "float64") for name in values or {})]
    pipeline = Pipeline(columns, [DecodeAudio(**options)], 7, has_rows=False)
    return pipeline.make({"audio": media(data), **(values or {})}, 0, sample, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_any_segment_has_the_samples_of_the_whole_file(kind: str) -> None:
    """Also at both ends, after another one, and read in parts."""
    data = file_of(kind)
    samples = whole(data)
    places = (0, 1, 700, 60_000, 130_001, len(samples) - 9_000, len(samples) - 4_000)
    with open_sound(media(data)) as sound:
        assert (sound.frames, sound.channels) == (len(samples), 2)
        again = [sound.read(place, 4_000, is_mono=False) for place in places]
    for place, found in zip(places, again, strict=True):
        with open_sound(media(data)) as sound:
            alone = sound.read(place, 4_000, is_mono=False)
        assert np.array_equal(alone, samples[place : place + 4_000]), place
        assert np.array_equal(alone, found), place


COUNTED = {
    "mp3 without a table",
    "aac",
    *(kind for kind in KINDS if kind.startswith(("matroska", "webm", "avi", "mp4 "))),
}
"""Kinds of which no place of the file tells how long they are."""


@pytest.mark.parametrize("kind", KINDS)
def test_how_long_a_file_lasts_is_found_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are the same where another worker has counted them; other content is counted."""
    data, facts = file_of(kind), Facts()
    whole_before = whole(data)
    with open_sound(media(data), facts=facts) as sound:
        frames = sound.frames
        expected = sound.read(frames - 9_000, 9_000, is_mono=False)
    assert len(facts.records) == (kind in COUNTED)
    for way in ("_count", "_end"):
        monkeypatch.setattr(CodedSound, way, lambda _self: pytest.fail("it was counted before"))
    with open_sound(media(data), facts=facts) as sound:
        assert sound.frames == frames
        assert np.array_equal(sound.read(frames - 9_000, 9_000, is_mono=False), expected)
        begin = sound.read(700, 9_000, is_mono=False)
    assert np.array_equal(begin, whole_before[700:9_700])
    if kind in COUNTED:
        with (
            pytest.raises(pytest.fail.Exception),
            open_sound(media(data)._replace(name="changed"), facts=facts) as sound,
        ):
            assert sound.frames


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in STORED])
def test_samples_are_those_that_soundfile_reads(kind: str) -> None:
    """As many, and the same; of MP3 as near as two decoders are."""
    expected, rate = soundfile.read(io.BytesIO(file_of(kind)), dtype="float32", always_2d=True)

    samples = whole(file_of(kind))

    assert (samples.shape, rate) == (expected.shape, RATE)
    assert np.abs(samples - expected).max() <= (1e-5 if kind == "mp3" else 0)


@pytest.mark.parametrize("kind", sorted({*STORED} - {"mp3"}))
def test_an_open_file_has_the_samples_of_its_bytes(kind: str) -> None:
    """The library reads it by itself, wherever the descriptor is."""
    data = file_of(kind)
    with opened(data) as value:
        for _time in range(2):
            with open_sound(value) as sound:
                assert np.array_equal(sound.read(0, sound.frames, is_mono=True), whole(data, is_mono=True))
                assert np.array_equal(sound.read(30_000, 5_000, is_mono=False), whole(data)[30_000:35_000])


@pytest.mark.parametrize("kind", sorted({*STORED} - {"mp3"}))
def test_a_damaged_open_file_has_the_reason_of_its_bytes(kind: str) -> None:
    """What the library reads by itself is read again."""
    data = file_of(kind)
    for damaged in (
        data[: len(data) // 2],
        data[:40],
        data[: len(data) // 2] + bytes(5_000) + data[len(data) // 2 + 5_000 :],
    ):
        with opened(damaged) as value:
            found = []
            for one in (memoryview(damaged), value):
                try:
                    with open_sound(one) as sound:
                        found.append(sound.read(0, sound.frames, is_mono=True).tobytes())
                except SampleUndecodable as error:
                    found.append(str(error).encode())
        assert found[0] == found[1]


@pytest.mark.parametrize("kind", sorted(LOSSY))
def test_coded_sound_is_where_it_was(kind: str) -> None:
    """What encoders put in front of it is left out, as far as the file says so."""
    late = LATE.get(kind, 0)
    rate = 48_000 if kind in ("opus", "webm") else RATE
    samples, expected = whole(file_of(kind)), sweep(rate)

    # the encoder of AC-3 drops the end of the last block
    assert len(samples) >= len(expected) - 256 * ("ac3" in kind)
    near = slice(20_000, 60_000)
    assert np.abs(samples[near.start + late : near.stop + late] - expected[near]).max() < 0.06


def test_channels_are_mixed_in_float64() -> None:
    """The mean of all, rounded once; one channel is repeated, and others are no sample."""
    wave = np.random.default_rng(1).uniform(-1, 1, (1_000, 3))
    data = stored("WAV", "FLOAT", wave, 16_000)
    expected = (sum(wave.astype(np.float32)[:, channel].astype(np.float64) for channel in range(3)) / 3).astype(
        np.float32
    )

    assert np.array_equal(made(data, rate=16_000)["audio"], expected)
    assert np.array_equal(whole(data, is_mono=True)[:, 0], expected)
    single = stored("WAV", "FLOAT", wave[:, :1], 16_000)
    assert (
        made(single, rate=16_000, channels=2)["audio"].tolist()
        == np.repeat(wave[:, :1].astype(np.float32), 2, 1).tolist()
    )
    with pytest.raises(SampleUndecodable, match="has 3 channels, and channels = 2"):
        made(data, rate=16_000, channels=2)


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24"])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_samples_of_16_bits_are_those_of_float64(channels: int, subtype: str) -> None:
    """They are read as whole numbers, scaled and mixed: rounded once, as those of 24 bits."""
    data = stored("FLAC", subtype, sweep(8_000, channels=channels), 8_000)
    read = soundfile.SoundFile(io.BytesIO(data)).read(always_2d=True)

    assert np.array_equal(whole(data), read.astype(np.float32))
    mixed = (sum(read[:, channel] for channel in range(channels)) / channels).astype(np.float32)
    assert np.array_equal(whole(data, is_mono=True)[:, 0], mixed)


def test_a_fast_filter_is_another_one() -> None:
    """It passes a tone that both pass, a little otherwise; the default stays."""
    tone = np.sin(2 * np.pi * 3000 * np.arange(66_150) / 22_050)[:, np.newaxis] / 2
    data = stored("FLAC", "PCM_16", tone, 22_050)
    high, fast = (made(data, rate=16_000, quality=quality)["audio"] for quality in ("high", "fast"))

    assert 0 < np.abs(high - fast)[100:-100].max() < 1e-4
    assert np.array_equal(made(data, rate=16_000)["audio"], high)


def test_a_second_is_the_same_in_every_segment_of_another_rate() -> None:
    """Whatever the rates, a segment is a part of the resampled file."""
    data = stored("FLAC", "PCM_16", sweep(22_050, channels=1), 22_050)
    for rate in (8_000, 16_000, 48_000):
        all_of_it = made(data, rate=rate)["audio"]
        assert len(all_of_it) == SECONDS * rate
        for start in (0.0, 0.5, 1.25, 2.5):
            part = made(data, rate=rate, seconds=1.5, start=start)["audio"]
            assert np.array_equal(part, all_of_it[round(start * rate) :][: len(part)]), (rate, start)


def test_a_start_is_drawn_by_position_and_fits() -> None:
    """Each sample and epoch draws its own; the first and the last place occur."""
    wave = np.arange(20, dtype=np.float64)[:, np.newaxis] / 32
    data = stored("WAV", "FLOAT", wave, 1_000)
    found = [made(data, sample, rate=1_000, seconds=0.017)["audio"] for sample in range(64)]

    starts = [int(segment[0] * 32) for segment in found]
    assert set(starts) == {0, 1, 2, 3}
    assert starts == [int(made(data, sample, rate=1_000, seconds=0.017)["audio"][0] * 32) for sample in range(64)]
    assert made(data, rate=1_000, seconds=0.017, start="middle")["audio"][0] == 1 / 32
    assert made(data, rate=1_000, seconds=0.005, start=0.004)["audio"][0] == 4 / 32
    assert made(data, values={"at": 0.006}, rate=1_000, seconds=0.005, start="at")["audio"][0] == 6 / 32


@pytest.mark.parametrize(("at", "reason"), [(0.02, "lasts 0.020 s"), (-1.0, "no place"), (float("nan"), "no place")])
def test_a_start_outside_of_the_file_is_a_bad_sample(at: float, reason: str) -> None:
    """So is one that is no number."""
    data = stored("WAV", "PCM_16", sweep(1_000, 0.02, 1), 1_000)
    with pytest.raises(SampleUndecodable, match=reason):
        made(data, values={"at": at}, rate=1_000, seconds=0.005, start="at")


def test_a_short_file_is_filled_with_zeros_and_says_how_long_it_is() -> None:
    """Or it is a bad sample."""
    data = stored("WAV", "PCM_16", sweep(16_000, 0.5, 1), 16_000)

    found = made(data, rate=16_000, seconds=1)

    assert found["audio"].shape == (16_000,)
    assert found["audio_length"] == 8_000
    assert not found["audio"][8_000:].any()
    with pytest.raises(SampleUndecodable, match=r"ends 0\.500 s before its segment of 1 s does"):
        made(data, rate=16_000, seconds=1, short="bad")


def test_whole_files_keep_their_length_up_to_a_limit() -> None:
    """A longer one is a bad sample before it is read."""
    data = stored("WAV", "PCM_16", sweep(16_000, 0.5, 1), 16_000)

    assert made(data, rate=16_000)["audio"].shape == (8_000,)
    with pytest.raises(SampleUndecodable, match=r"lasts 0\.500 s, more than max_seconds = 0\.4"):
        made(data, rate=16_000, max_seconds=0.4)
    with pytest.raises(SampleUndecodable, match="has no sample in it"):
        made(stored("WAV", "PCM_16", np.zeros((0, 1)), 16_000), rate=16_000)


def test_int16_has_the_numbers_of_a_file_of_16_bits() -> None:
    """Louder ones than fit are cut."""
    numbers = np.arange(-32_768, 32_768, 7, dtype=np.int16)
    made_of = io.BytesIO()
    soundfile.write(made_of, numbers, 16_000, format="WAV", subtype="PCM_16")

    assert np.array_equal(made(made_of.getvalue(), rate=16_000, dtype="int16")["audio"], numbers)
    loud = stored("WAV", "FLOAT", np.array([[2.0], [-2.0], [0.5]]), 16_000)
    assert made(loud, rate=16_000, dtype="int16")["audio"].tolist() == [32_767, -32_768, 16_384]


DAMAGED = ("flac", "vorbis", "mp3", "m4a", "aac", "opus", "matroska with flac")
WITHOUT_PLACES = ("mp3", "aac", "m4a")
"""Frames are counted: behind those that are lost, all are earlier. Or the decoder's noise is
another one behind them."""


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_names_the_second_and_leaves_the_rest(kind: str) -> None:
    """Segments beside it are as they were."""
    noise = np.random.default_rng(3)
    rate = 48_000 if kind == "opus" else RATE
    wave = sweep(rate) + noise.normal(0, 0.1, (SECONDS * rate, 2))
    good = stored(*STORED[kind], wave) if kind in STORED else coded(*CODED.get(kind, ("ogg", "libopus")), wave, rate)
    data = bytearray(good)
    middle = len(data) // 2
    data[middle : middle + 900] = noise.bytes(900)
    samples = whole(good)

    with pytest.raises(SampleUndecodable, match=r"damaged at [0-3]\.[0-9] s") as bad:
        whole(bytes(data))

    second = float(str(bad.value).partition("at ")[2].partition(" s")[0])
    assert abs(second - SECONDS / 2) < 1.1
    with open_sound(media(bytes(data))) as sound:
        assert np.array_equal(sound.read(2_000, 8_000, is_mono=False), samples[2_000:10_000])
        if kind in WITHOUT_PLACES:
            return
        last = len(samples) - 12_000
        assert np.array_equal(sound.read(last, 8_000, is_mono=False), samples[last : last + 8_000])


def lying(kind: str, samples: int) -> bytes:
    """A file whose header announces so many samples."""
    data = bytearray(stored(kind, "PCM_16", sweep(8_000, 1.0, 1), 8_000))
    if kind == "FLAC":
        facts = int.from_bytes(data[18:26], "big") >> 36 << 36 | samples
        data[18:26] = facts.to_bytes(8, "big")
    else:
        place = data.index(b"data") + 4
        data[place : place + 4] = min(2 * samples, 0xFFFF_FFFF).to_bytes(4, "little")
    return bytes(data)


def test_headers_that_lie_are_refused_and_take_no_memory() -> None:
    """What is announced is compared with the bytes that there are, and then with what is read."""
    with pytest.raises(SampleUndecodable, match="announces 2000000000 bytes of samples, and has 16000"):
        made(lying("WAV", 10**9), rate=8_000)
    with pytest.raises(SampleUndecodable, match=r"announces 1000000000 samples, which its \d+ bytes cannot hold"):
        made(lying("FLAC", 10**9), rate=8_000)
    with pytest.raises(SampleUndecodable, match=r"ends at 1\.000 s, and its header announces 10\.000 s"):
        made(lying("FLAC", 80_000), rate=8_000)
    # of a program that could not go back
    assert len(made(lying("WAV", 1 << 31), rate=8_000)["audio"]) == 8_000
    assert len(made(lying("FLAC", 0), rate=8_000)["audio"]) == 8_000


def test_an_avi_whose_times_are_not_those_of_its_packets_is_refused() -> None:
    """Its header says that a unit of time is a byte, and its index counts packets."""
    data = bytearray(file_of("avi with mp3"))
    data[(place := data.index(b"auds") + 20) : place + 8] = (1).to_bytes(4, "little") + (16_000).to_bytes(4, "little")
    data[place + 24 : place + 28] = (1).to_bytes(4, "little")
    with pytest.raises(SampleUndecodable, match="it is damaged, or its header is wrong"):
        whole(bytes(data))


@pytest.mark.parametrize("kind", ["WAV", "AIFF"])
def test_a_cut_file_is_a_bad_sample(kind: str) -> None:
    """Its header says how long it was."""
    data = stored(kind, "PCM_16", sweep(8_000, 1.0, 1), 8_000)
    with pytest.raises(SampleUndecodable, match="it is cut, or its header is wrong"):
        made(data[:-100], rate=8_000)


SMALL = {
    "wav": stored("WAV", "PCM_16", sweep(8_000, 0.02, 1), 8_000),
    "flac": stored("FLAC", "PCM_16", sweep(8_000, 0.02, 1), 8_000),
    "vorbis": stored("OGG", "VORBIS", sweep(8_000, 0.02, 1), 8_000),
    "mp3": stored("MP3", "MPEG_LAYER_III", sweep(16_000, 0.02, 1), 16_000),
    "aiff": stored("AIFF", "PCM_16", sweep(8_000, 0.02, 1), 8_000),
    "avi": coded("avi", "pcm_s16le", sweep(8_000, 0.02), 8_000),
    "webm with vorbis": coded("webm", "vorbis", sweep(16_000, 0.2), 16_000),
}


@pytest.mark.parametrize("kind", SMALL)
def test_files_that_are_cut_or_changed_at_any_byte_are_samples_or_bad_ones(kind: str) -> None:
    """Nothing else comes of them."""
    data = SMALL[kind]
    step = 1 + len(data) // 60
    damaged = [data[:length] for length in range(0, len(data), step)]
    damaged += [data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :] for place in range(0, len(data), step)]
    good = 0
    for one in damaged:
        try:
            made(one, rate=8_000, max_seconds=5)
            good += 1
        except (SampleUndecodable, SampleUnreadable):
            continue
    assert good < len(damaged)


def test_a_file_beyond_4_gib_is_read_in_parts(tmp_path: Path) -> None:
    """RF64 counts bytes in 64 bits; the file is sparse."""
    path = tmp_path / "long.wav"
    header = bytearray(stored("RF64", "PCM_16", np.zeros((1, 1)), 48_000))
    start, size = header.index(b"data") + 8, 5 << 30
    place = header.index(b"ds64") + 16
    header[place : place + 16] = size.to_bytes(8, "little") + (size // 2).to_bytes(8, "little")
    header[place - 8 : place] = (size + start - 8).to_bytes(8, "little")
    with path.open("wb") as file:
        file.write(header[:start])
        file.seek(start + 2 * 48_000 * 50_000)
        file.write(np.arange(1, 101, dtype="<i2").tobytes())
        file.truncate(start + size)
    asked: list[int] = []

    def read(first: int, count: int) -> bytes:
        asked.append(count)
        with path.open("rb") as file:
            file.seek(first)
            return file.read(count)

    with open_sound(MediaFile(path.stat().st_size, read, "long")) as sound:
        assert sound.frames == size // 2
        samples = sound.read(48_000 * 50_000, 100, is_mono=True)

    assert (samples[:, 0] * 32_768).tolist() == list(range(1, 101))
    assert sum(asked) < 4 << 20


def test_a_file_that_cannot_be_read_says_so() -> None:
    """Not that it is damaged."""

    def read(_first: int, _count: int) -> bytes:
        raise SampleUnreadable("the disk is gone")

    with pytest.raises(SampleUnreadable, match="the disk is gone"), open_sound(MediaFile(1_000, read, "gone")):
        pass


@pytest.mark.parametrize(
    ("data", "options", "reason"),
    [
        (b"no sound at all", {}, "is no sound file: it begins with b'no sound'"),
        (b"RIFF\0\0\0\0WEBP", {}, "is no sound file"),
        (b"", {}, "is no sound file: it begins with b''"),
        (SMALL["flac"], {"formats": ("wav",)}, r"is FLAC, and formats = \['wav'\]"),
        (coded("avi", "flac", sweep(8_000, 1.0), 8_000), {}, "is AVI coded as flac, which is not among aac, ac3"),
        (stored("WAV", "PCM_16", np.zeros((10, 1)), 500), {}, "has 500 Hz, which is not from 1000 to 768000"),
        (stored("WAV", "FLOAT", np.array([[0.5], [np.nan]]), 8_000), {}, r"no number, at 0\.000 s"),
    ],
    ids=["text", "image", "nothing", "other format", "flac in avi", "slow", "no number"],
)
def test_what_is_no_such_sound_is_a_bad_sample(data: bytes, options: dict[str, Any], reason: str) -> None:
    """The reason says what it is."""
    with pytest.raises(SampleUndecodable, match=reason):
        made(data, rate=8_000, **options)


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({"rate": 16_000, "seconds": 1.5}, {"audio": "float32[24000]", "audio_length": "int32"}),
        ({"rate": 16_000, "seconds": 1, "short": "bad", "channels": 2}, {"audio": "float32[16000,2]"}),
        ({"rate": 16_000, "dtype": "int16"}, {"audio": "int16[?]"}),
    ],
)
def test_columns_after_the_step_are_known(options: dict[str, Any], shapes: dict[str, str]) -> None:
    """A segment has one shape, and whole files have none."""
    step = DecodeAudio(**options)
    assert {name: column.text for name, column in columns_after(AUDIO, [step]).items()} == shapes
    assert step_from_plain(step_to_plain(step)) == step


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"start": 1.0}, "say its length too"),
        ({"short": "bad"}, "say its length too"),
        ({"seconds": 0.0}, "are no sample"),
        ({"seconds": 80_000.0, "channels": 64}, "are more than"),
        ({"seconds": 1.0, "start": "no field"}, "not a valid field name"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], reason: str) -> None:
    """By what is wrong with them."""
    with pytest.raises(ValueError, match=reason):
        DecodeAudio(rate=16_000, **options)


def test_a_step_says_which_fields_it_cannot_take() -> None:
    """An image, a start that is not there, and one that is no number."""
    with pytest.raises(StepInvalid, match="needs a sound file, and 'audio' is a video file"):
        columns_after([Column("audio", "video")], [DecodeAudio(rate=16_000)])
    with pytest.raises(StepInvalid, match='start = "begin", which is neither'):
        columns_after(AUDIO, [DecodeAudio(rate=16_000, seconds=1, start="begin")])
    with pytest.raises(StepInvalid, match="from one number, and 'begin' is text"):
        columns_after([*AUDIO, Column("begin", "text")], [DecodeAudio(rate=16_000, seconds=1, start="begin")])


def test_versions_of_libraries_count_where_formats_are_coded() -> None:
    """WAV, FLAC and AIFF are the same with all of them."""
    assert DecodeAudio(rate=16_000).libraries == ("av", "soundfile")
    assert DecodeAudio(rate=16_000, formats=("flac", "wav")).libraries == ()
    assert DecodeAudio(rate=16_000, formats=("flac", "mp3")).libraries == ("av", "soundfile")


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("kind", ["mp3", "mp3 without a table", "aac"])
def test_a_segment_of_a_known_file_takes_only_its_bytes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are those of the whole file; a record that is damaged, or lies, costs time alone."""
    monkeypatch.setattr(ffmpeg, "PLACES_FROM_S", 1)
    monkeypatch.setattr(ffmpeg, "PLACES_S", 1)
    data = coded(*(("adts", "aac") if kind == "aac" else ("mp3", "libmp3lame")), sweep(seconds=40))
    data = without_table(data) if kind == "mp3 without a table" else data
    samples, facts, read = whole(data), Facts(), []

    def read_some(start: int, count: int) -> bytes:
        read.append(len(data[start : start + count]))
        return data[start : start + count]

    def check(first: int) -> int:
        read.clear()
        with open_sound(MediaFile(len(data), read_some, "file"), facts=facts) as sound:
            assert sound.frames == len(samples)
            for place in (first, first + 30_000, first - 90_000):
                assert np.array_equal(sound.read(place, 9_000, is_mono=False), samples[place : place + 9_000])
        return sum(read)

    assert check(30 * RATE) >= len(data)
    assert check(30 * RATE) < len(data) * 2 // 3
    (key,) = facts.records
    good = np.frombuffer(facts.records[key], np.int64)
    for wrong in (good[:-1], good[::-1], np.append(good[:-1] + 1, good[-1]), np.append(good[:-1] * 0, good[-1])):
        facts.records[key] = wrong.tobytes()
        check(30 * RATE)
