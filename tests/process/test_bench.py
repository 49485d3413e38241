"""`batchd bench`: real daemons, trainers and, where torch is installed, a DataLoader.

Such short measurements give meaningless figures, so the tests check only that there are some.
"""

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from batchd.commands.bench.dataloader import changes_of
from batchd.data.pipeline.image.options import (
    CenterCrop,
    Decode,
    Gray,
    ImageStep,
    Layout,
    Normalize,
    RandomCrop,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    To,
)
from support.commands import batchd
from support.daemon_process import clean_environment
from support.images import jpeg, photo, write_photos
from support.waiting import PATIENCE_S, wait_until

PHOTOS = """
[streams.photos]
source = { type = "folder", path = "photos" }
batch_size = 8
pipeline = [{ op = "decode" }, { op = "random_resized_crop", size = [32, 32] }, { op = "random_flip" }]
"""
LIVE = """
[streams.live]
source = { type = "push", fields = { x = "int64" } }
batch_size = 8
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder of images with two broken files, and a configuration."""
    write_photos(tmp_path / "photos", {"": 64})
    for number in range(2):
        (tmp_path / "photos" / f"bad{number}.jpg").write_bytes(b"no image")
    (tmp_path / "batchd.toml").write_text(PHOTOS)
    return tmp_path


@pytest.mark.thorough
def test_a_stream_is_measured_with_each_number_of_workers(folder: Path) -> None:
    """The report covers later epochs, a DataLoader if torch is installed, and the bad files."""
    found = json.loads(batchd("bench", "--json", "--seconds", "2", "--workers", "2", folder=folder).stdout)

    assert (found["stream"], found["samples"], found["batch_size"]) == ("photos", 66, 8)
    assert [one["workers"] for one in found["measured"]] == [1, 2]
    assert all(one["samples"] > 0 < one["cpu_ms"] for one in found["measured"])
    assert {"read", "decode", "daemon and trainer"} <= found["cpu_ms"].keys()
    assert found["bad_samples"] == 2
    assert "bad0.jpg: " in str(found["to_know"])
    assert len(found["worth_it"]) >= 2
    if find_spec("torch") is None:
        assert found["why_no_dataloader"].startswith("torch is not installed for ")
    else:
        assert found["why_no_dataloader"] == ""
        assert found["dataloader"]["samples"] > 0
        assert found["dataloader"]["tools"].startswith("torch ")


@pytest.mark.thorough
def test_the_report_is_for_people(folder: Path) -> None:
    """The report has a row with a bar for each measurement, the steps, sentences and numbers."""
    np.save(folder / "x.npy", np.zeros((500, 4), np.float32))
    with (folder / "batchd.toml").open("a") as file:
        file.write('[streams.rows]\nsource = { type = "npy", path = "x.npy" }\nbatch_size = 100\n')

    said = batchd("bench", "rows", "--seconds", "2", "--workers", "1", folder=folder).stdout

    assert said.startswith(f"stream rows: npy {folder / 'x.npy'}, 500 samples, batches of 100, ")
    assert "\n1 worker " in said
    assert "█" in said
    for title in ("CPU of a sample", "Is it worth it?", "What would help"):
        assert title in said


def test_a_stream_that_cannot_be_measured_is_an_error(folder: Path) -> None:
    """The command rejects a missing configuration, several streams, an unknown and a live one."""
    (folder / "two.toml").write_text(PHOTOS + LIVE)

    assert "`batchd init PATH` writes one" in batchd("bench", "-c", "none.toml", folder=folder, status=2).stderr
    assert "name one of the streams: photos, live" in batchd("bench", "-c", "two.toml", folder=folder, status=1).stderr
    assert "no stream 'foto'; there are photos" in batchd("bench", "foto", folder=folder, status=1).stderr
    assert (
        "your own programs push its samples"
        in batchd("bench", "live", "-c", "two.toml", folder=folder, status=1).stderr
    )


@pytest.mark.thorough
def test_a_stream_of_bad_files_stops_the_measurement(folder: Path) -> None:
    """The message gives the number of bad files and some of the reasons."""
    for number in range(40):
        (folder / "photos" / f"{number:05}.jpg").write_bytes(b"no image")

    said = batchd("bench", "--seconds", "2", "--workers", "1", folder=folder, status=1).stderr

    assert "stream photos has stopped: " in said
    assert ".jpg: " in said


@pytest.mark.thorough
def test_an_interrupt_prints_what_there_is(folder: Path) -> None:
    """An interrupt after the first measurement prints its figures and leaves no files behind."""
    command = [sys.executable, "-m", "batchd", "bench", "--seconds", "6", "--workers", "2"]
    daemons: set[Path] = set()
    with (
        TemporaryDirectory(prefix="b") as runtime,  # a socket's path is short
        subprocess.Popen(
            [*command, "--set", "streams.photos.cache=off", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment() | {"XDG_RUNTIME_DIR": runtime},
            cwd=folder,
        ) as process,
    ):

        def has_second() -> bool:
            daemons.update(Path(runtime).glob("batchd-*"))
            return len(daemons) > 1 or process.poll() is not None

        wait_until(has_second, "the second daemon starts")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert not list(Path(runtime).iterdir())

    found = json.loads(output)
    assert process.returncode == 1
    assert [one["workers"] for one in found["measured"]] == [1]
    assert found["interrupted"] is True
    assert errors.endswith("batchd: interrupted; the figures are those measured so far\n")


STEPS: list[tuple[list[ImageStep], tuple[int, ...], str]] = [
    ([Resize(size=(6, 8))], (6, 8, 3), "uint8"),
    ([Resize(shorter_side=24), CenterCrop(size=(20, 20))], (20, 20, 3), "uint8"),
    ([RandomCrop(size=(40, 70), padding=2)], (40, 70, 3), "uint8"),
    ([CenterCrop(size=(90, 200))], (90, 200, 3), "uint8"),
    ([RandomResizedCrop(size=(16, 16)), RandomFlip(direction="both"), Gray(channels=1)], (16, 16, 1), "uint8"),
    ([Resize(size=(8, 8)), Normalize(), Layout()], (3, 8, 8), "float32"),
    ([Resize(size=(8, 8)), To()], (3, 8, 8), "float32"),
]


@pytest.mark.parametrize("with_pil", [False, True], ids=["OpenCV", "PIL"])
@pytest.mark.parametrize(("steps", "shape", "dtype"), STEPS, ids=[str(number) for number in range(len(STEPS))])
def test_the_dataloader_makes_arrays_of_the_same_shape(
    steps: list[ImageStep], shape: tuple[int, ...], dtype: str, *, with_pil: bool
) -> None:
    """The library decides whether the channels come last or first."""
    if with_pil:
        pytest.importorskip("PIL")
        pytest.importorskip("torchvision.transforms", exc_type=(ImportError, RuntimeError))
    made = np.asarray(changes_of([Decode(), *steps], with_pil=with_pil)(jpeg(photo(48, 64))))

    # PIL's grey images have no channels
    assert sorted(np.squeeze(made).shape) == sorted(side for side in shape if side > 1)
    assert made.dtype == dtype
    assert made.std() > 0
