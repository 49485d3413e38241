"""What docs/when-not.md says of data that no source reads yet: its lines, and `batchd init`."""

import json
import re
import tomllib
from pathlib import Path

import av
import numpy as np
import pytest

import batchd_client
from batchd.embedded import serve
from support.commands import batchd
from support.parquet_files import write_parquet
from support.videos import write_video

pytestmark = pytest.mark.usefixtures("own_cache")

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "when-not.md").read_text()
RATE = 16_000
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def lines_of(section: str, language: str, data: Path | None = None) -> str:
    """Return the lines of a section of the page; its data is in a folder of the test."""
    (text,) = re.findall(rf"^### {section}\n(?:(?!^###).)*?^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return text.replace('"/data/', f'"{data}/') if data else text


def write_sound(path: Path, codec: str, seconds: float) -> Path:
    """Write a tone of 440 Hz in the form that the ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(int(RATE * seconds)) / RATE)).astype(np.float32)
    with av.open(path, "w") as file:
        stream = file.add_stream(codec, rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(tone[None], "fltp", "mono")
        frame.sample_rate = RATE
        resampler = av.AudioResampler(
            stream.codec_context.format, "mono", RATE, stream.codec_context.frame_size or None
        )
        for part in [*resampler.resample(frame), *resampler.resample(None), None]:
            file.mux(stream.encode(part))
    return path


def test_a_folder_of_sounds_of_every_form_is_recognised_and_served(tmp_path: Path) -> None:
    """Two seconds of each: what is longer is cut, and zeros are behind what is shorter."""
    write_sound(tmp_path / "sounds" / "bird" / "0.wav", "pcm_s16le", 3)
    write_sound(tmp_path / "sounds" / "bird" / "1.flac", "flac", 1)
    write_sound(tmp_path / "sounds" / "frog" / "2.mp3", "mp3", 1)
    write_sound(tmp_path / "sounds" / "frog" / "3.m4a", "aac", 1)
    config = batchd("init", tmp_path / "sounds", "-n").stdout
    assert f"audio: {RATE:,} Hz, 1.0 to 3.0 s" in config
    for old, new in (
        ("batch_size = 4", "batch_size = 4\nshuffle = false"),
        ("seconds = 3.0", "seconds = 2, start = 0.0"),
    ):
        assert old in config
        config = config.replace(old, new)
    (tmp_path / "batchd.toml").write_text(config)

    with serve(tmp_path / "batchd.toml") as address, batchd_client.connect(address) as daemon:
        batch = next(iter(daemon.stream("sounds")))
        sounds, lengths, labels = np.array(batch["audio"]), batch["audio_length"].tolist(), batch["label"].tolist()

    assert labels == [0, 0, 1, 1]
    assert lengths[:2] == [2 * RATE, RATE]
    assert sounds.shape == (4, 2 * RATE)
    for sound in sounds:
        spectrum = np.abs(np.fft.rfft(sound[:RATE]))
        assert abs(int(spectrum.argmax()) - 440) <= 2
    assert np.abs(sounds[0, RATE:]).max() > 0.4
    assert np.abs(sounds[1, RATE:]).max() == 0


# --- batchd init ----------------------------------------------------------------------------------

SOUND = 'frames without their sound, which a field of type "audio" and the step "decode_audio" read'
CHATS = 'chats need the tokenizer of a model; docs/cookbook.md ("Chats") has lines that serve them'
LISTS = 'lists of texts, which are of type "text[<=8]": docs/sources.md ("Types")'


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda folder: (folder / "a.jsonl").write_text(json.dumps({"messages": CHAT})), CHATS),
        (lambda folder: write_parquet(folder / "a.parquet", {"captions": [["a", "b"]] * 2}), LISTS),
    ],
)
def test_init_says_in_one_line_what_no_source_reads(tmp_path: Path, write, told: str) -> None:
    """The line names the page, and nothing that does not help."""
    write(tmp_path)

    (line,) = batchd("init", tmp_path, "-n", status=2).stderr.splitlines()

    assert line.startswith(f"batchd: {tmp_path}")
    assert told in line
    section = told.split('("')[1].partition('"')[0]
    assert f"## {section}\n" in TEXT + "".join((DOCS / page).read_text() for page in ("cookbook.md", "sources.md"))


@pytest.mark.thorough(after_first=True)
@pytest.mark.usefixtures("forked_scans")
@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda folder: write_video(folder / "a.mp4", 4), SOUND),
        (lambda folder: (folder / "b.jsonl").write_text(json.dumps({"id": 1, "messages": CHAT})), f"{CHATS}: messages"),
        (
            lambda folder: write_parquet(folder / "b.parquet", {"captions": [["a", "b"]], "id": [1]}),
            f"{LISTS}: captions",
        ),
    ],
)
def test_what_is_left_out_of_a_stream_comes_with_the_page(tmp_path: Path, write, told: str) -> None:
    """It is a comment of the configuration."""
    write(tmp_path)

    text = batchd("init", tmp_path, "-n").stdout

    assert told in text.replace("\n#   ", " ")
    assert len(tomllib.loads(text)["streams"]) == 1
