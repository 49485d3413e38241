"""Benchmark: sound and videos, beside torchcodec, torchaudio, Lhotse and LeRobot.

    clips       frames/s of clips of 16 frames of videos with a key frame every 250 frames, scaled
                to 112 x 112, by two workers: shuffled, in blocks, and in order, beside torchcodec
                in the workers of a DataLoader; for one trainer, and for four that want the same
    sound       CPU of log-mel spectrograms of segments of ten seconds of a FLAC of one hour, at
                16 kHz and resampled from 44.1 kHz, beside torchaudio and Lhotse in such workers
    values      log-mel values that depend on the processor's instructions, of 10**6; how far they
                are from float64 by numpy, and from torchaudio
    filters     of sound at another rate: what passes, and what aliases
    uses        bytes and CPU of a clip of a video of ten minutes: as when its packets are read
                through, at its first use, and when its frames are known; of a segment of MP3
                without a table and of AAC (ADTS) of one hour, at its first use and later
    memory      memory of a worker without its slots: clips in order, which keeps no frames for
                others; clips shuffled; segments of a FLAC of ten hours beside those of six minutes;
                a header that announces 10**9 samples
    robots      samples/s of frames of robots' episodes: four cameras of 640 x 480 with two frames
                each, in AV1 as LeRobot writes it, shuffled, beside LeRobot's own loader

Sides take turns; each is a process for its turn, peers in their environment of
peers/environments.py. Sound and videos are made with ffmpeg's encoders.
"""

import itertools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import environments
import media_side
import numpy as np
import playing
import soundfile
from harness import Bench, Figure, endless, private_bytes, served, spread
from numpy.typing import NDArray
from sides import Side
from tables import Measurement

import batchd_client
from batchd.data.media import SAMPLE_BYTES_MAX
from batchd.data.media.frames import VideoFrames, open_frames
from batchd.data.media.opened import SHARED_BYTES_MAX
from batchd.data.pipeline import _sound
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.media.sound_files import open_sound
from batchd.data.pipeline.sound import resample
from batchd.data.pipeline.sound.options import LogMel
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.image_header import PIXELS_MAX
from batchd.data.samples.values import MediaFile

PEERS, SCRIPT, LOG = "media", "media_side.py", environments.BUILD / "logs" / "media.log"
VIDEOS, FRAMES, KEY_FRAME, VIDEO_SIZE = 4, 1500, 250, "320x240"
HOUR_S, FILE_RATES = 3600, (16_000, 44_100)
ROBOTS, ROBOTS_SCRIPT, ROBOTS_BATCH = "lerobot", "lerobot_side.py", 8
CLIP_BATCH, SEGMENT_BATCH, TRAINERS = 16, 32, 4
PATIENCE = 5
"""Four DataLoaders decode eight batches of clips on two cores before the first one is there."""
SOUND_PEERS = "torchaudio", "lhotse"
VALUES = 1_000_000
PASSED_DB, EDGE = 0.1, 2000
ALIASES = (1.001, 1.01, 1.03, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.3, 2.6)
"""Of half of the rate afterwards."""
USE_SHARES_MAX = {
    ("clip.mp4", "whole"): 1.1,
    ("clip.mp4", "first"): 0.05,
    ("clip.mp4", "later"): 0.03,
    **{(f"segment.{kind}", way): most for kind in ("mp3", "aac") for way, most in (("first", 1.1), ("later", 0.02))},
}
"""Of the bytes of a file."""
MEMORY_BATCHES, MEMORY_TARGET_MIB, FLAT_MIB = 96, 60.0, 2.0
MIB = 1 << 20
DAEMON = """
[daemon]
workers = 1
memory = "64MiB"
[streams.media]
batch_size = 4
cache = "off"
"""


def run(bench: Bench) -> None:
    """All parts, those without peers first."""
    data = bench.scratch / "media"
    for rate in FILE_RATES:
        _write_sound(data / str(rate), HOUR_S, rate)
    _write_videos(data / "clips")
    _kernels(bench, data)
    _filters(bench)
    _uses(bench, data)
    _memory(bench, data)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    for peers, parts in {PEERS: (_clips, _sound_beside_peers, _torchaudio_values), ROBOTS: (_lerobot,)}.items():
        if environments.make([peers]):
            print(f"media beside {peers}: not measured")
            continue
        for part in parts:
            try:
                part(bench, data)
            except subprocess.CalledProcessError as error:
                print(f"media: {error}, see {LOG}")


# --- what is measured -----------------------------------------------------------------------------


def _write_sound(folder: Path, seconds: int, rate: int) -> None:
    """Write tones, beats and noise into "hour.flac", and where its segments begin."""
    folder.mkdir(parents=True)
    tones = f"0.1*sin(2*PI*(180+60*sin(t/3))*t)+0.05*sin(2*PI*1200*t)*lt(mod(t\\,0.6)\\,0.3):s={rate}:d={seconds}"
    noise = f"anoisesrc=r={rate}:d={seconds}:c=pink:a=0.05:s=1"
    joined = ["-f", "lavfi", "-i", f"aevalsrc={tones}", "-f", "lavfi", "-i", noise, "-filter_complex", "amix"]
    _ffmpeg(*joined, "-ar", str(rate), "-ac", "1", "-sample_fmt", "s16", "-c:a", "flac", folder / "hour.flac")
    _write_segments(folder, seconds)


def _write_segments(folder: Path, seconds: int) -> None:
    """One segment after the other, of a file that lasts so long."""
    starts = (0.5 + media_side.SECONDS * number for number in range(seconds // media_side.SECONDS - 1))
    lines = (json.dumps({"audio": "hour.flac", "start": start}) for start in starts)
    (folder / "segments.jsonl").write_text("\n".join(lines))


def _write_videos(folder: Path) -> None:
    """H.264 of moving pictures with grain."""
    folder.mkdir()
    for number in range(VIDEOS):
        shown = f"mandelbrot=size={VIDEO_SIZE}:rate=30:start_x={-0.7 - 0.02 * number}:maxiter=200"
        shown = f"{shown},noise=alls=6:allf=t:all_seed={number}"
        coder = ["-c:v", "libx264", "-preset", "fast", "-g", str(KEY_FRAME), "-keyint_min", str(KEY_FRAME)]
        coder += ["-sc_threshold", "0", "-pix_fmt", "yuv420p"]
        _ffmpeg("-f", "lavfi", "-i", shown, "-frames:v", str(FRAMES), *coder, folder / f"{number}.mp4")


def _ffmpeg(*words: str | Path) -> None:
    subprocess.run(["ffmpeg", "-v", "error", "-y", *words], check=True)


# --- clips ----------------------------------------------------------------------------------------


def _clips(bench: Bench, data: Path) -> None:
    """Frames/s, of one trainer and of four."""
    sides = {
        name: Side(name, name, _environment(name), SCRIPT, name)
        for name in ("clips", "blocks", "in order", "torchcodec")
    }
    sides |= {
        f"{name}-{TRAINERS}": side._replace(trainers=TRAINERS)
        for name, side in sides.items()
        if name in ("clips", "torchcodec")
    }
    rounds = _turns(bench, sides, data, CLIP_BATCH)
    for figure, ours, theirs, target in (
        ("media-clips-blocks", "blocks", "torchcodec", 4),
        ("media-clips-blocks-in-order", "blocks", "in order", 0.6),
        ("media-clips-shuffled", "clips", "torchcodec", 1.2),
        ("media-clips-four-trainers", f"clips-{TRAINERS}", f"torchcodec-{TRAINERS}", 3.5),
    ):
        _compare(bench, figure, rounds, ours, theirs, target)


def _environment(name: str) -> str:
    return environments.OURS if name in media_side.OURS else PEERS


def _turns(bench: Bench, sides: Mapping[str, Side], data: Path, batch: int) -> list[dict[str, Measurement]]:
    """Each side, one after the other, in each round; a round lacks a side that failed in it."""
    stage = playing.Stage(bench.scratch, 3.0, 8.0, batch, patience=PATIENCE)
    rounds: list[dict[str, Measurement]] = [{} for _ in range(bench.rounds)]
    for found in rounds:
        for name, side in sides.items():
            try:
                found[name] = playing.measure(side, data, LOG, stage)
            except playing.SideFailed as error:
                print(f"media: {name} failed in a round: {error}, see {LOG}")
    return rounds


def _compare(  # noqa: PLR0913, PLR0917  two sides of a figure
    bench: Bench,
    figure: str,
    rounds: Sequence[Mapping[str, Measurement]],
    ours: str,
    theirs: str,
    target: float,
    *,
    by_cpu: bool = False,
) -> None:
    """Report ours ÷ theirs in rounds that have both: samples/s, or samples for a second of CPU."""
    both = [(one[ours], one[theirs]) for one in rounds if ours in one and theirs in one]
    if not both:
        print(f"{figure}: not measured")
        return
    rates = [our.rate / their.rate for our, their in both]
    cpu = [_cpu_s(their) / _cpu_s(our) for our, their in both]
    print(f"{figure}: {ours} / {theirs}: samples/s {spread(rates)}; samples for a second of CPU {spread(cpu)}")
    bench.report(Figure(figure, statistics.median(cpu if by_cpu else rates), ">=", target))


def _cpu_s(found: Measurement) -> float:
    """For each sample."""
    return found.cpu_s / found.images


def _lerobot(bench: Bench, data: Path) -> None:
    """Samples/s of two workers of each side, and the CPU that a sample takes them."""
    data = data / "robot"
    script = Path(playing.__file__).with_name(ROBOTS_SCRIPT)
    with LOG.open("ab") as said:
        subprocess.run([environments.python(ROBOTS), script, "write", data], check=True, stdout=said, stderr=said)
    where = {"batchd": environments.OURS, ROBOTS: ROBOTS}
    sides = {name: Side(name, name, environment, ROBOTS_SCRIPT, name) for name, environment in where.items()}
    _compare(bench, "media-lerobot", _turns(bench, sides, data, ROBOTS_BATCH), "batchd", ROBOTS, 2)


# --- log-mel --------------------------------------------------------------------------------------


def _sound_beside_peers(bench: Bench, data: Path) -> None:
    """Hours of sound for an hour of CPU, of each whole side."""
    for rate in FILE_RATES:
        ours = ("sound",) if rate == media_side.RATE else ("sound", "fast sound")
        names = (*ours, *SOUND_PEERS)
        sides = {name: Side(name, name, _environment(name), SCRIPT, name) for name in names}
        rounds = _turns(bench, sides, data / str(rate), SEGMENT_BATCH)
        for name in names:
            hours = [media_side.SECONDS / _cpu_s(one[name]) for one in rounds if name in one]
            print(f"hours of sound of {rate} Hz for an hour of CPU, {name}: {spread(hours, 0) if hours else 'none'}")
        for name, peer in itertools.product(ours, SOUND_PEERS):
            figure = f"media-log-mel-{rate}-{'' if name == 'sound' else 'fast-'}{peer}"
            _compare(bench, figure, rounds, name, peer, 1.3, by_cpu=True)


def _segments(folder: Path) -> Iterator[NDArray[np.float32]]:
    """The samples of each segment, of one channel."""
    with soundfile.SoundFile(folder / "hour.flac") as file:
        for start in media_side.starts(folder):
            file.seek(round(start * file.samplerate))
            yield file.read(media_side.SECONDS * file.samplerate, "float32")


def _levels(folder: Path, count: int) -> NDArray[np.float32]:
    """Our log-mel spectrograms of the first segments."""
    step = LogMel(n_fft=media_side.N_FFT, hop=media_side.HOP, bands=media_side.BANDS, floor=media_side.FLOOR)
    pipeline = Pipeline([Column("audio", "array", "float32", (None,))], (step,), 0, has_rows=False)
    waves = zip(_segments(folder), range(count), strict=False)
    return np.stack([np.asarray(pipeline.make({"audio": wave}, 0, number, 0)["audio"]) for wave, number in waves])


def _kernels(bench: Bench, data: Path) -> None:
    """Values that vectors, plain C and numpy make otherwise."""
    folder = data / str(media_side.RATE)
    count = -(-VALUES // ((media_side.RATE * media_side.SECONDS // media_side.HOP + 1) * media_side.BANDS))
    vectors = _levels(folder, count)
    _sound.use_vectors(128)
    plain = _levels(folder, count)
    _sound.use_vectors(512)
    resample.IS_BUILT = False
    by_numpy = _levels(folder, count)
    resample.IS_BUILT = True
    differing = sum(int((vectors.view(np.uint32) != other.view(np.uint32)).sum()) for other in (plain, by_numpy))
    print(f"log-mel by vectors, plain C and numpy: {vectors.size} values")
    bench.report(Figure("media-log-mel-kernels-differing", differing, "<=", 0, 0))
    exact = np.stack([_exact(wave) for wave, _number in zip(_segments(folder), range(count), strict=False)])
    bench.report(Figure("media-log-mel-from-float64", float(np.abs(vectors - exact).max()), "<=", 1e-6, 8))


def _filters(bench: Bench) -> None:
    """Tones at shares of half of the lower rate, from 44.1 to 16 kHz."""
    for quality, damped_db in (("high", 120), ("fast", 80)):
        gains = {share: _gain_db(share, quality) for share in (*np.arange(0.5, 1, 0.005), *ALIASES)}
        passed = max(share for share, gain in gains.items() if abs(gain) < PASSED_DB)
        loudest = max(gains[share] for share in ALIASES)
        print(
            f"resampling, {quality}: within {PASSED_DB} dB up to {passed:.3f}; the loudest alias has {loudest:.0f} dB"
        )
        bench.report(Figure(f"media-alias-{quality}-db", loudest, "<=", -damped_db, 1))


def _gain_db(share: float, quality: str) -> float:
    """The loudness of a tone of one second after it was resampled."""
    from_rate, to_rate = max(FILE_RATES), min(FILE_RATES)
    tone = np.sin(np.pi * share * to_rate / from_rate * np.arange(from_rate)).astype(np.float32)
    made = resample.resample(tone[:, np.newaxis], from_rate, to_rate, 0, 0, to_rate, quality)
    return float(10 * np.log10(2 * np.mean(made[EDGE:-EDGE].astype(np.float64) ** 2) + 1e-30))


def _exact(wave: NDArray[np.float32]) -> NDArray[np.float64]:
    """The same by numpy's FFT and a whole matrix of triangles, in float64."""
    length, hop, bands = media_side.N_FFT, media_side.HOP, media_side.BANDS
    padded = np.pad(wave.astype(np.float64), length // 2, "reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)
    frames = np.lib.stride_tricks.sliding_window_view(padded, length)[::hop] * window
    frequencies = np.arange(length // 2 + 1) * media_side.RATE / length
    mels = np.linspace(0, 2595 * np.log10(1 + media_side.RATE / 2 / 700), bands + 2)
    corners = 700 * (10 ** (mels / 2595) - 1)
    left, middle, right = (corners[place : bands + place, np.newaxis] for place in range(3))
    triangles = np.clip(
        np.minimum((frequencies - left) / (middle - left), (right - frequencies) / (right - middle)), 0, None
    )
    powers = np.abs(np.fft.rfft(frames)) ** 2
    return np.log(np.maximum(powers @ triangles.T, media_side.FLOOR))


def _torchaudio_values(bench: Bench, data: Path) -> None:
    """How far torchaudio's are from ours, in the logarithm."""
    folder = data / str(media_side.RATE)
    words = [*environments.command(PEERS), str(playing.HERE / SCRIPT), "--data", str(folder), "--variant", "levels"]
    subprocess.run(words, check=True)
    theirs = np.load(folder / "levels.npy")
    differences = np.abs(theirs - _levels(folder, len(theirs)))
    far = 1e6 * float((differences > 5e-4).mean())
    print(f"log-mel, torchaudio from ours: {differences.max():.1e}; {far:.0f} of 10**6 values by more than 5e-4")
    bench.report(Figure("media-log-mel-from-torchaudio", float(np.quantile(differences, 0.999)), "<=", 5e-4, 6))


# --- one clip or segment of a long file -----------------------------------------------------------


class _Facts(dict[bytes, bytes]):
    """See ``kept_files.FileFacts``."""

    def find(self, key: bytes) -> memoryview | None:
        """The record of a key."""
        return memoryview(self[key]) if key in self else None

    keep = dict.__setitem__


def _uses(bench: Bench, data: Path) -> None:
    """Megabytes that are read, as a server would send them, and milliseconds of CPU."""
    folder = data / "uses"
    folder.mkdir()
    coder = ["-c:v", "libx264", "-preset", "ultrafast", "-bf", "3", "-g", str(KEY_FRAME), "-b:v", "1200k"]
    _ffmpeg("-f", "lavfi", "-i", "testsrc2=size=640x360:rate=30:duration=600", *coder, folder / "clip.mp4")
    hour = data / str(media_side.RATE) / "hour.flac"
    _ffmpeg("-i", hour, "-b:a", "64k", "-write_xing", "0", "-id3v2_version", "0", folder / "segment.mp3")
    _ffmpeg("-i", hour, "-b:a", "64k", "-f", "adts", folder / "segment.aac")
    for (name, way), most in USE_SHARES_MAX.items():
        size, megabytes, ms = _of_one_use(folder / name, way, bench.rounds)
        print(f"{name} of {size:.0f} MB, {way}: {megabytes:.2f} MB, {spread(ms, 0)} ms of CPU")
        bench.report(Figure(f"media-use-{name}-{way}-share", megabytes / size, "<=", most, 4))


def _of_one_use(path: Path, way: str, rounds: int) -> tuple[float, float, list[float]]:
    """Megabytes of the file, and what it takes in the last round; milliseconds of each."""
    use, read, ms = _use_clip if path.suffix == ".mp4" else _use_segment, list[int](), list[float]()
    with path.open("rb") as opened:

        def read_some(start: int, count: int) -> bytes:
            data = os.pread(opened.fileno(), count, start)
            read.append(len(data))
            return data

        file = MediaFile(path.stat().st_size, read_some, str(path))
        for _round in range(rounds):
            facts = None if way == "whole" else _Facts()
            if way == "later":
                use(file, facts)
            read.clear()
            begun = time.process_time()
            use(file, facts)
            ms.append(1e3 * (time.process_time() - begun))
    return file.size / 1e6, sum(read) / 1e6, ms


def _use_clip(file: MediaFile, facts: _Facts | None) -> None:
    """Frames of the sixth minute; without ``facts``, all packets are read."""
    limits = PIXELS_MAX, SAMPLE_BYTES_MAX
    with closing(
        VideoFrames(file, None, *limits) if facts is None else open_frames(file, None, *limits, facts)
    ) as video:
        for number in range(9630, 9646):
            video.frame(number)


def _use_segment(file: MediaFile, facts: _Facts | None) -> None:
    """Seconds of the middle."""
    with open_sound(file, facts=facts) as sound:
        sound.read(sound.frames // 2, media_side.SECONDS * sound.rate, is_mono=True)


# --- memory ---------------------------------------------------------------------------------------


def _memory(bench: Bench, data: Path) -> None:
    """Of one worker, and of a header that lies."""
    short, long = data / "short", data / "long"
    for folder, seconds in ((short, 360), (long, 36_000)):
        folder.mkdir()
        _ffmpeg("-f", "lavfi", "-i", f"sine=220:4:{media_side.RATE}:{seconds}", "-c:a", "flac", folder / "hour.flac")
        _write_segments(folder, seconds)
    found = {
        name: _worker_mib(bench, stream)
        for name, stream in (
            ("sound", media_side.sound(short)),
            ("ten hours", media_side.sound(long)),
            ("clips", media_side.clips(data, "clips")),
            ("clips in order", media_side.clips(data, "in order")),
        )
    }
    print("MiB of a worker without slots:", {name: round(mib, 1) for name, mib in found.items()})
    bench.report(Figure("media-sound-worker-mib", found["sound"], "<=", MEMORY_TARGET_MIB, 1))
    bench.report(Figure("media-clips-in-order-worker-mib", found["clips in order"], "<=", MEMORY_TARGET_MIB, 1))
    kept = SHARED_BYTES_MAX / MIB  # of frames, for clips to come
    bench.report(Figure("media-clips-worker-mib", found["clips"], "<=", MEMORY_TARGET_MIB + kept, 1))
    bench.report(Figure("media-ten-hours-more-mib", found["ten hours"] - found["sound"], "<=", FLAT_MIB, 1))
    bench.report(Figure("media-lying-headers-refused", _refused(short / "hour.flac"), ">=", 1, 0))


def _worker_mib(bench: Bench, stream: str) -> float:
    """Memory of a worker that has made some batches, without the slots."""
    file = bench.scratch / "batchd.toml"
    file.write_text(DAEMON + stream)
    with _worker_of(file) as worker:
        return private_bytes(worker) / MIB


@contextmanager
def _worker_of(file: Path) -> Iterator[int]:
    """The worker of a daemon that has made some batches."""
    with served(file) as address, batchd_client.connect(address) as daemon:
        batches = endless(daemon.stream("media"))
        for _number in range(MEMORY_BATCHES):
            with next(batches):
                pass
        [worker] = daemon.status()["workers"]
        yield worker["pid"]


def _refused(file: Path) -> int:
    """Whether a FLAC that announces 10**9 samples is refused: 1, or 0."""
    data = bytearray(file.read_bytes()[: 64 << 10])
    data[21] = data[21] & 0xF0 | 0  # the four high bits of the 36 that count samples
    data[22:26] = (10**9).to_bytes(4, "big")
    try:
        with open_sound(memoryview(bytes(data))) as sound:
            sound.read(10**9 - 10, 10, is_mono=True)
    except SampleUndecodable as error:
        print(f"a header that announces 10**9 samples: {error}")
        return 1
    return 0
