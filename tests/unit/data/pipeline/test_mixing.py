"""Noise and rooms from the files of a folder, and silence cut off: formulas, draws, bad files."""

import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.options import step_from_plain, step_to_plain
from batchd.data.pipeline.sound import mixing, resample
from batchd.data.pipeline.sound.options import AddNoise, Room, Trim
from batchd.data.pipeline.step_files import StepFileInvalid, changed_file, digest_of, digests_of, named_by_content
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from support.steps import check_steps

if resample.IS_BUILT:
    from batchd.data.pipeline import _sound

RANDOM = np.random.default_rng(5)
RATE = 16_000
WAVE = (0.1 * RANDOM.standard_normal(4000)).astype(np.float32)
COLUMN = Column("audio", dtype="float32", shape=(None,))


def write(root, name, wave, rate=RATE, kind="WAV"):
    """Write a file of float32 below a folder; return its samples."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wave, rate, format=kind, subtype="FLOAT" if kind == "WAV" else None)
    return wave


def make(step, wave=WAVE, sample=0, epoch=0):
    """Return what a step makes of a sample, and what it says that it drew."""
    pipeline = Pipeline(
        [Column("audio", dtype=wave.dtype.name, shape=(None, *wave.shape[1:]))], [step], 3, has_rows=False
    )
    notes = pipeline.note_draws()
    made = np.array(pipeline.make({"audio": wave}, epoch, sample, 0)["audio"])
    return made, notes[0] if notes else None


def energy(wave):
    """Return the sum of squares."""
    return np.sum(np.square(wave, dtype=np.float64))


def test_noise_has_the_ratio_that_was_drawn(tmp_path):
    """Longer noise is cut at a start that is drawn; shorter noise goes on from its beginning."""
    noises = {
        name: write(tmp_path, name, RANDOM.standard_normal(count))
        for name, count in [("a.wav", 9000), ("b/c.wav", 700)]
    }
    seen = set()
    for sample in range(20):
        made, drawn = make(AddNoise(root=tmp_path, snr_db=(-5, 15)), sample=sample)
        noise, start = noises[drawn["file"]].astype(np.float32), round(drawn["start_s"] * RATE)
        part = noise[(start + np.arange(4000)) % len(noise)].astype(np.float64)
        factor = np.sqrt(energy(WAVE) / energy(part)) * 10 ** (-drawn["snr_db"] / 20)

        assert -5 <= drawn["snr_db"] <= 15
        assert len(noise) < 4000 or start + 4000 <= len(noise)
        assert np.allclose(made, WAVE + factor * part, rtol=0, atol=1e-6)
        seen.add(drawn["file"])
    assert seen == noises.keys()


def test_noise_takes_the_rate_and_the_channels_of_the_sound(tmp_path):
    """Each channel has the ratio by itself; silence adds nothing, and nothing is added to it."""
    write(tmp_path, "a.flac", 0.1 * RANDOM.standard_normal(30_000), 44_100, "FLAC")
    wave = np.stack([WAVE, WAVE * 0, WAVE / 2], axis=1)

    made, drawn = make(AddNoise(root=tmp_path, snr_db=(6, 6)), wave)

    added = made - wave
    assert np.isclose(10 * np.log10(energy(WAVE) / energy(added[:, 0])), 6, atol=1e-3)
    assert np.allclose(added[:, 2], added[:, 0] / 2, atol=1e-6)
    assert not added[:, 1].any()
    by_another_filter = make(AddNoise(root=tmp_path, snr_db=(6, 6), quality="fast"), wave)[0]
    assert 0 < np.abs(by_another_filter - made).max() < np.abs(added).max() / 5
    write(tmp_path, "a.flac", np.zeros(30_000), 44_100, "FLAC")
    assert np.array_equal(make(AddNoise(root=tmp_path), wave)[0], wave)
    write(tmp_path, "a.flac", np.ones((900, 2)) / 2, RATE, "FLAC")
    with pytest.raises(SampleUndecodable, match=r"a.flac, which has 2 channels, and channels = 3"):
        make(AddNoise(root=tmp_path), wave)
    assert drawn["file"] == "a.flac"


@pytest.mark.parametrize("normalize", ["none", "energy", "level"])
def test_a_room_is_a_convolution_that_keeps_the_place_of_the_direct_sound(tmp_path, normalize):
    """Its largest sample is sample 0."""
    response = write(tmp_path, "a.wav", (RANDOM.standard_normal(900) * np.exp(-np.arange(900) / 90)).astype(np.float32))
    response[7] = -9
    write(tmp_path, "a.wav", response)

    made, drawn = make(Room(root=tmp_path, normalize=normalize))

    wanted = np.convolve(WAVE.astype(np.float64), response)[7 : 7 + len(WAVE)]
    factor = {"none": 1.0, "energy": energy(response) ** -0.5, "level": np.sqrt(energy(WAVE) / energy(wanted))}[
        normalize
    ]
    assert np.allclose(made, factor * wanted, rtol=0, atol=1e-6 * abs(factor * wanted).max())
    assert drawn == {"file": "a.wav"}
    assert len(made) == len(WAVE)


def test_a_response_of_several_channels_is_for_as_many(tmp_path):
    """Sound of one channel takes the first."""
    response = write(tmp_path, "a.wav", np.eye(2, 40, 3).T + np.eye(2, 40, 20).T / 3)
    step = Room(root=tmp_path, normalize="none")

    both, _drawn = make(step, np.stack([WAVE, 2 * WAVE], axis=1))

    for channel in range(2):
        wanted = (1 + channel) * np.convolve(WAVE, response[:, channel])[3:4003]
        assert np.allclose(both[:, channel], wanted, atol=1e-6)
    assert np.array_equal(make(step)[0], both[:, 0])
    with pytest.raises(SampleUndecodable, match="has 2 channels, and the sound 3"):
        make(step, np.stack([WAVE] * 3, axis=1))


@pytest.mark.skipif(not resample.IS_BUILT, reason="the extension was not built")
@pytest.mark.parametrize(("samples", "taps"), [(1, 1), (5, 3), (3, 9), (5000, 400), (700, 3000), (9000, 4100)])
def test_numpy_and_any_processor_make_the_same_convolution(samples, taps):
    """It is that of numpy's float64, from any number on."""
    wave, response = (RANDOM.standard_normal(count).astype(np.float32) for count in (samples, taps))
    made = []
    try:
        for bits in (256, 128, 0):
            resample.IS_BUILT = bits > 0
            _sound.use_vectors(bits)
            made.append([mixing.convolve(wave, response, first) for first in (0, taps // 2, taps - 1)])
    finally:
        resample.IS_BUILT = True
        _sound.use_vectors(512)

    whole = np.convolve(wave.astype(np.float64), response)
    for first, of_each in zip((0, taps // 2, taps - 1), zip(*made, strict=True), strict=True):
        assert len({one.tobytes() for one in of_each}) == 1
        assert np.allclose(of_each[0], whole[first : first + samples], rtol=0, atol=1e-12 * abs(whole).max())


def trimmed(wave, top_db, frame, hop):
    """Return the first sample and the end as librosa finds them, by its formulas."""
    padded = np.pad(wave.astype(np.float64), [(frame // 2, frame // 2), (0, 0)])
    count = 1 + (len(padded) - frame) // hop
    levels = np.sqrt([np.mean(padded[j * hop : j * hop + frame] ** 2, axis=0) for j in range(count)])
    levels_db = 20 * np.log10(np.maximum(levels, 1e-5)) - 20 * np.log10(max(levels.max(), 1e-5))
    heard = np.flatnonzero(levels_db.max(axis=1) > -top_db)
    return heard[0] * hop, min(len(wave), (heard[-1] + 1) * hop)


@pytest.mark.parametrize(("frame", "hop"), [(2048, 512), (400, 160), (255, 100), (64, 200), (7, 1)])
def test_silence_is_cut_off_as_librosa_does(frame, hop):
    """Samples keep their type; all zeros stay."""
    for top_db in (10, 30, 60):
        loudness = 10 ** np.interp(np.arange(9000), np.sort(RANDOM.integers(0, 9000, 4)), RANDOM.uniform(-4, 0, 4))
        wave = (RANDOM.standard_normal((9000, 2)) * loudness[:, np.newaxis] * 9000).astype(np.int16)

        made, _drawn = make(Trim(top_db=top_db, frame=frame, hop=hop), wave)

        first, end = trimmed(wave / 32768, top_db, frame, hop)
        assert made.dtype == np.int16
        assert np.array_equal(made, wave[first:end])
    assert len(make(Trim(frame=frame, hop=hop), WAVE * 0)[0]) == len(WAVE)


def test_steps_draw_the_same_whether_they_act_or_not(tmp_path):
    """So what later steps draw stays; each epoch draws anew."""
    for name in "abcd":
        write(tmp_path, f"{name}.wav", RANDOM.standard_normal(100 + ord(name)))
    drawn = []
    for probability in (1e-9, 0.999999):
        steps = [kind(root=tmp_path, probability=probability) for kind in (AddNoise, Room)]
        pipeline = Pipeline([COLUMN], [*steps, AddNoise(root=tmp_path)], 3, has_rows=False)
        notes = pipeline.note_draws()
        made = pipeline.make({"audio": WAVE}, 0, 1, 0)["audio"]
        drawn.append(notes[2])
        assert np.array_equal(made, WAVE) is False
    assert drawn[0] == drawn[1]
    files = {make(AddNoise(root=tmp_path), epoch=epoch)[1]["file"] for epoch in range(30)}
    assert files == {"a.wav", "b.wav", "c.wav", "d.wav"}


def test_a_bad_file_makes_a_bad_sample_that_names_it(tmp_path):
    """Not a sound file, of another format, silent, and too long."""
    (tmp_path / "a.wav").write_bytes(b"RIFFxxxxWAVE")
    with pytest.raises(SampleUndecodable, match=rf'"add_noise" draws {tmp_path}/a.wav, which '):
        make(AddNoise(root=tmp_path))
    write(tmp_path, "a.wav", WAVE)
    with pytest.raises(SampleUndecodable, match=r"a.wav, which is WAV, and formats = "):
        make(AddNoise(root=tmp_path, formats=("flac",)))
    with pytest.raises(SampleUndecodable, match=r"a.wav, which lasts 0.250 s"):
        make(Room(root=tmp_path, max_seconds=0.2))
    write(tmp_path, "a.wav", WAVE * 0)
    with pytest.raises(SampleUndecodable, match=r"a.wav, which is silent"):
        make(Room(root=tmp_path))


def test_a_file_that_changes_while_a_worker_runs_stops_the_stream(tmp_path):
    """So does one that is gone."""
    write(tmp_path, "a.wav", WAVE)
    pipeline = Pipeline([COLUMN], [AddNoise(root=tmp_path)], 3, has_rows=False)
    pipeline.make({"audio": WAVE}, 0, 0, 0)
    os.utime(tmp_path / "a.wav", (0, 0))
    with pytest.raises(StepFileInvalid, match=r"a.wav has changed since the worker started"):
        pipeline.make({"audio": WAVE}, 0, 0, 0)
    (tmp_path / "a.wav").unlink()
    with pytest.raises(StepFileInvalid, match=r"there is no file .*a.wav"):
        pipeline.make({"audio": WAVE}, 0, 0, 0)


def test_the_content_of_the_folder_is_in_the_fingerprint_and_its_path_is_not(tmp_path):
    """Names, sizes and content count, times and hidden files do not."""
    here, there = tmp_path / "here", tmp_path / "there"
    for root in (here, there):
        write(root, "b/a.wav", WAVE)
    steps = [AddNoise(root=root) for root in (here, there)]
    named = [named_by_content(step, digests_of([step])) for step in steps]
    assert named[0] == named[1]
    assert step_from_plain(step_to_plain(steps[0])) == steps[0]

    told = [(str(here), digest_of(here))]
    os.utime(here / "b" / "a.wav", (0, 0))
    (here / ".hidden").write_text("x")
    assert changed_file(told) is None
    for change in (lambda: write(here, "b/a.wav", -WAVE), lambda: write(here, "c.wav", WAVE)):
        change()
        assert changed_file(told).startswith(f"{here} has changed since the daemon started")
        told = [(str(here), digest_of(here))]


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    """Missing, a file, without such files, with a link that leads out; a URL is refused."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "a.wav").symlink_to(tmp_path / "file")

    found = {name: check_steps([COLUMN], [Room(root=tmp_path / name)]) for name in ("none", "file", "empty", "linked")}

    assert found["none"] == [f"there is no folder {tmp_path / 'none'}"]
    assert found["file"] == [f"{tmp_path / 'file'} cannot be read: Not a directory"]
    assert found["empty"] == [f"{tmp_path / 'empty'} has no file that patterns = ['**/*.wav', '**/*.flac'] match"]
    assert found["linked"][0].startswith(f"{tmp_path / 'linked' / 'a.wav'} is a link that leads out of the folder")
    with pytest.raises(ValueError, match="root must be a path on this machine, not a URL"):
        AddNoise(root=Path("s3://bucket/noise"))
    with pytest.raises(ValueError, match="not a pattern of paths below the root"):
        AddNoise(root=tmp_path, patterns=("../*.wav",))
