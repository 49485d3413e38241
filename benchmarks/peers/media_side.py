"""Clips of videos, and log-mel spectrograms of segments of sound: batchd, or other libraries.

``--data`` has "clips", videos of one size and length, or sound in "hour.flac". Each side has two
workers, decodes with one thread in each, and yields 16 frames of 112 x 112, or 80 bands of ten
seconds at 16 kHz.

    clips, in order, blocks   batchd, shuffled, as they come, and in blocks
    torchcodec                ``VideoDecoder`` in a DataLoader, which scales while it decodes;
                              decoders of all files stay open
    sound, fast sound         batchd, resampling with either filter
    torchaudio                ``MelSpectrogram`` in a DataLoader, of segments that soundfile reads:
                              torchcodec, by which it loads itself, takes far longer for a FLAC
    lhotse                    cuts of a recording, and its features computed in the DataLoader

Several trainers mirror one stream of batchd; otherwise each has a loader of its own.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import common
import numpy as np

FRAMES, SIZE, WORKERS = 16, 112, 2
RATE, SECONDS, SEGMENTS = 16_000, 10, 359
BANDS, N_FFT, HOP, FLOOR = 80, 400, 160, 1e-10
EPOCHS = 10
"""Of a sampler, so that it ends seldom."""
OURS = {"clips", "in order", "blocks", "sound", "fast sound"}
DAEMON = """
[daemon]
workers = {workers}
memory = "256MiB"
[streams.media]
batch_size = {batch}
cache = "off"
"""
SHUFFLES = {"clips": "true", "in order": "false", "blocks": "{ blocks = 2, block_samples = 64 }"}
CLIPS = """
source = {{ type = "video", root = "{data}/clips", files = ["*.mp4"], frames = {frames}, size = [{size}, {size}] }}
shuffle = {shuffle}
"""
SOUND = """
source = {{ type = "jsonl", root = "{data}", shards = ["segments.jsonl"], fields = {{ audio = "audio", start = "float64" }} }}
pipeline = [
    {{ op = "decode_audio", rate = {rate}, seconds = {seconds}, start = "start", formats = ["flac"], quality = "{quality}" }},
    {{ op = "log_mel", n_fft = {n_fft}, hop = {hop}, bands = {bands} }},
]
"""


def without_cuda() -> None:
    """Let torchaudio, whose wheel is for CUDA, do without the compiled part, which aligns texts."""
    import torch  # noqa: PLC0415  not in batchd's environment

    if not torch.version.cuda:
        aside = ModuleType("torchaudio._extension")
        vars(aside).update(_IS_TORCHAUDIO_EXT_AVAILABLE=False, fail_if_no_align=lambda function: function)
        sys.modules[aside.__name__] = aside


def starts(data: Path) -> list[float]:
    """Where the segments of a sound begin, in seconds."""
    return [json.loads(line)["start"] for line in (data / "segments.jsonl").read_text().splitlines()]


# --- batchd ---------------------------------------------------------------------------------------


def sound(data: Path, quality: str = "high") -> str:
    """The stream of spectrograms."""
    numbers = {"rate": RATE, "seconds": SECONDS, "n_fft": N_FFT, "hop": HOP, "bands": BANDS}
    return SOUND.format(data=data, quality=quality, **numbers)


def clips(data: Path, variant: str) -> str:
    """The stream of clips."""
    return CLIPS.format(data=data, frames=FRAMES, size=SIZE, shuffle=SHUFFLES[variant])


def serve(options: common.Options) -> AbstractContextManager[str]:
    """A daemon; gives its address. Other sides share nothing."""
    if options.variant not in OURS:
        return nullcontext("none")
    if options.variant.endswith("sound"):
        quality = "fast" if options.variant == "fast sound" else "high"
        stream = sound(options.data, quality)
    else:
        stream = clips(options.data, options.variant)
    return common.served(DAEMON.format(workers=WORKERS, batch=options.batch) + stream)


def by_batchd(options: common.Options) -> Iterator[Any]:
    """Batches of the daemon."""
    return common.read(options.address, "media", "audio" if options.variant.endswith("sound") else "image")


# --- peers: a DataLoader with a data set each -----------------------------------------------------


class Clips:
    """Each clip of each video."""

    def __init__(self, data: Path) -> None:
        self._paths = common.photographs(data / "clips")
        words = [
            "ffprobe",
            "-v",
            "error",
            "-count_packets",
            "-show_entries",
            "stream=nb_read_packets",
            "-of",
            "csv=p=0",
        ]
        found = subprocess.run([*words, self._paths[0]], capture_output=True, text=True, check=True).stdout
        self._of_each = int(found) // FRAMES
        self._decoders: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._paths) * self._of_each

    def __getitem__(self, number: int) -> Any:
        from torchcodec.decoders import VideoDecoder  # noqa: PLC0415  not in batchd's environment
        from torchcodec.transforms import Resize  # noqa: PLC0415

        file, clip = divmod(number, self._of_each)
        path = self._paths[file]
        if path not in self._decoders:
            self._decoders[path] = VideoDecoder(
                path, dimension_order="NHWC", num_ffmpeg_threads=1, transforms=[Resize((SIZE, SIZE))]
            )
        return self._decoders[path].get_frames_in_range(clip * FRAMES, (clip + 1) * FRAMES).data


class Segments:
    """Each segment of a sound, by torchaudio."""

    def __init__(self, data: Path) -> None:
        self._path, self._starts = str(data / "hour.flac"), starts(data)
        self._made: Any = None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Any:
        if self._made is None:
            self._made = self._levels()
        wave, rate = self._segment(self._starts[number])
        return self._made(wave, rate)

    def _segment(self, start: float) -> tuple[Any, int]:
        import soundfile  # noqa: PLC0415  not in every environment
        import torch  # noqa: PLC0415

        with soundfile.SoundFile(self._path) as file:
            file.seek(round(start * file.samplerate))
            wave = file.read(SECONDS * file.samplerate, "float32", always_2d=True)
            return torch.from_numpy(wave.T), file.samplerate

    @staticmethod
    def _levels() -> Any:
        """What makes the spectrogram of samples at some rate."""
        import torch  # noqa: PLC0415

        without_cuda()
        from torchaudio import transforms  # noqa: PLC0415

        mel = transforms.MelSpectrogram(RATE, n_fft=N_FFT, hop_length=HOP, n_mels=BANDS)
        resample: dict[int, Any] = {}

        def made(wave: Any, rate: int) -> Any:
            if rate != RATE:
                resample.setdefault(rate, transforms.Resample(rate, RATE))
                wave = resample[rate](wave)
            return torch.log(mel(wave[0]).clamp(min=FLOOR)).T

        return made


def data_loader(data: Any, options: common.Options) -> Iterator[Any]:
    """Batches in random order, again and again."""
    from torch.utils.data import DataLoader, RandomSampler  # noqa: PLC0415  not in batchd's environment

    loader = DataLoader(
        data,
        batch_size=options.batch,
        sampler=RandomSampler(data, replacement=True, num_samples=common.ENDLESS),
        num_workers=WORKERS,
        persistent_workers=True,
    )
    for batch in loader:
        yield [batch.contiguous().numpy().view(np.uint8)]


def by_lhotse(options: common.Options) -> Iterator[Any]:
    """Cuts of one recording, shuffled by its sampler."""
    without_cuda()
    from lhotse import CutSet, Fbank, FbankConfig, MonoCut, Recording  # noqa: PLC0415  not in batchd's environment
    from lhotse.dataset import OnTheFlyFeatures, SimpleCutSampler  # noqa: PLC0415
    from torch.utils.data import DataLoader, Dataset  # noqa: PLC0415

    recording = Recording.from_file(options.data / "hour.flac")
    cuts = [
        MonoCut(f"{epoch}-{start}", start, SECONDS, channel=0, recording=recording)
        for epoch in range(EPOCHS)
        for start in starts(options.data)
    ]
    if recording.sampling_rate != RATE:
        cuts = [cut.resample(RATE) for cut in cuts]

    class Levels(Dataset[Any]):
        def __init__(self) -> None:
            self._features = OnTheFlyFeatures(Fbank(FbankConfig(sampling_rate=RATE, num_filters=BANDS)))

        def __getitem__(self, cuts: Any) -> Any:
            return self._features(cuts)[0]

    sampler = SimpleCutSampler(CutSet.from_cuts(cuts), max_cuts=options.batch, shuffle=True)
    loader = DataLoader(Levels(), sampler=sampler, batch_size=None, num_workers=WORKERS, persistent_workers=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch := epoch + 1)
        for batch in loader:
            yield [batch.contiguous().numpy().view(np.uint8)]


def batches(options: common.Options) -> Iterator[Any]:
    """One of these."""
    options = options._replace(workers=WORKERS)
    random.seed(options.trainer)
    if options.variant in OURS:
        return by_batchd(options)
    if options.variant == "lhotse":
        return by_lhotse(options)
    return data_loader(Clips(options.data) if options.variant == "torchcodec" else Segments(options.data), options)


def write_levels(options: common.Options) -> None:
    """Write torchaudio's spectrograms of all segments into "levels.npy"."""
    segments = Segments(options.data)
    np.save(options.data / "levels.npy", np.stack([segments[number].numpy() for number in range(len(segments))]))


if __name__ == "__main__":
    if common.told().variant == "levels":
        write_levels(common.told())
    else:
        common.play(batches, serve)
