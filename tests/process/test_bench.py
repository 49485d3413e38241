"""`batchd bench`: real daemons, trainers and, where torch is installed, a DataLoader.

Such short measurements give meaningless figures, so the tests check only that there are some.
"""

import io
import json
import platform
import signal
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from support.commands import batchd
from support.daemon_process import clean_environment
from support.images import write_photos
from support.kernel import is_alive
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
        assert found["why_no_dataloader"].startswith("batchd's own environment has no torch")
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
    assert "no stream 'foto'; known here: photos" in batchd("bench", "foto", folder=folder, status=1).stderr
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


TORCH = """
import sys
import numpy
sys.modules.update(dict.fromkeys(("batchd", "batchd_client", "batchd_wire")))  # as if they were not installed
__version__, uint8 = "0 of a test", numpy.uint8
"""
LOADER = """
import numpy
from types import SimpleNamespace

class RandomSampler:
    def __init__(self, dataset, replacement, num_samples):
        self.samples = len(dataset)

def get_worker_info():
    return SimpleNamespace(dataset=dataset)

class DataLoader:
    def __init__(self, samples, batch_size, sampler, worker_init_fn, **options):
        global dataset
        dataset, self.batch_size, self.sampler, self.begin = samples, batch_size, sampler, worker_init_fn

    def __iter__(self):
        self.begin(0)
        while True:
            made = [dataset[numpy.random.randint(self.sampler.samples)] for _ in range(self.batch_size)]
            yield {name: numpy.stack([one[name] for one in made]) for name in made[0]}
"""


@pytest.fixture
def other_python(tmp_path: Path) -> Path:
    """An environment whose interpreter has a stand-in for torch, and nothing of batchd."""
    modules, python = tmp_path / "other" / "modules", tmp_path / "other" / "bin" / "python"
    for file, text in (("torch/__init__.py", TORCH), ("torch/utils/__init__.py", ""), ("torch/utils/data.py", LOADER)):
        (modules / file).parent.mkdir(parents=True, exist_ok=True)
        (modules / file).write_text(text)
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={modules} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return tmp_path / "other"


def bench(folder: Path, python: Path, *arguments: str, status: int = 0) -> "subprocess.CompletedProcess[str]":
    options = ("--seconds", "1", "--workers", "1", "--set", "streams.photos.cache=off")
    return batchd("bench", "--json", "--python", str(python), *options, *arguments, folder=folder, status=status)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("kind", ["folder", "webdataset"])
def test_the_dataloader_runs_in_an_environment_without_batchd(folder: Path, other_python: Path, kind: str) -> None:
    """Files are read where they are; of records there is a copy. Bad files are left out."""
    if kind == "webdataset":
        with tarfile.open(folder / "photos.tar", "w") as shard:
            for file in sorted((folder / "photos").glob("*.jpg")):
                shard.add(file, file.name)
                caption = tarfile.TarInfo(f"{file.stem}.txt")
                caption.size = len(b"a photo")
                shard.addfile(caption, io.BytesIO(b"a photo"))
        fields = 'fields = { image = "image", txt = "text" }, names = { txt = "txt" }'
        source = f'type = "webdataset", root = ".", shards = ["photos.tar"], {fields}'
        text = PHOTOS.replace('type = "folder", path = "photos"', source)
        text = text.replace("pipeline = [", 'pipeline = [{ op = "text_bytes", field = "txt", length = 9 }, ')
        (folder / "batchd.toml").write_text(text)

    found = json.loads(bench(folder, other_python, "--reads", "0.5").stdout)

    assert found["why_no_dataloader"] == ""
    assert found["dataloader"]["tools"].startswith("torch 0 of a test, ")
    assert found["dataloader"]["samples"] > 0 < found["dataloader"]["cpu_ms"]
    slowest, fastest = found["dataloader"]["samples_per_s_range"]
    assert slowest <= found["dataloader"]["samples_per_s"] <= fastest
    assert found["reads"] == 0.5


@pytest.mark.thorough
def test_a_dataloader_that_fails_is_an_error_beside_the_figures(folder: Path, other_python: Path) -> None:
    """What it said last is the reason, and batchd's own figures are there all the same."""
    (other_python / "modules" / "torch" / "utils" / "data.py").write_text("raise OSError('libcudart is away')")

    done = bench(folder, other_python, status=1)

    assert json.loads(done.stdout)["measured"][0]["samples"] > 0
    assert json.loads(done.stdout)["why_no_dataloader"] == "it ended: OSError: libcudart is away"
    assert done.stderr == (
        f"batchd: the DataLoader of {other_python}/bin/python has no figures: it ended: OSError: libcudart is away\n"
    )


def test_an_interpreter_that_cannot_be_used_is_an_error_at_once(folder: Path, other_python: Path) -> None:
    """The message says what it is, or lacks, and the command that helps."""
    python = other_python / "bin" / "python"
    started = python.read_text()
    (folder / "train.py").write_text("import torch")
    (folder / "no-python").write_text("#!/bin/sh\necho 'conda: command not found' >&2\nexit 127\n")
    (folder / "no-python").chmod(0o755)

    def message(path: object) -> str:
        return bench(folder, Path(str(path)), status=2).stderr.removeprefix("batchd: ").rstrip()

    assert message("/nope/python") == (
        "no such file or command: /nope/python; name an interpreter, or the folder of an environment"
    )
    assert message(folder / "othr") == f"no such file or command: {folder}/othr; did you mean {other_python}?"
    assert message(folder / "photos") == (
        f"{folder}/photos has no bin/python, so it is no virtual environment: python3 -m venv makes one"
    )
    assert message(folder / "train.py") == f"{folder}/train.py is no Python interpreter: Permission denied"
    assert message("no-python") == (
        f"{folder}/no-python is no Python interpreter: started as one, it ended with exit status 127: "
        "conda: command not found"
    )
    (other_python / "modules" / "torch").rename(folder / "torch")
    if find_spec("torch") is None:
        assert message(other_python) == (
            f"{python} (Python {platform.python_version()}) has no torch: {python} -m pip install torch"
        )
    python.write_text(
        started.replace('"$@"', """-c 'import sys; sys.version_info = (3, 6, 9); exec(sys.argv[-1])' "$@\"""")
    )
    assert message(python) == f"{python} is Python 3.6.9: the DataLoader's side needs 3.9 or newer"


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_dataloader_ends_with_the_command(folder: Path, other_python: Path, number: signal.Signals) -> None:
    """Ctrl-C while it runs prints the figures, and leaves no files behind."""
    command = [sys.executable, "-m", "batchd", "bench", "--seconds", "4", "--workers", "1", "--json"]
    begun = folder / "begun"
    with (other_python / "modules" / "torch" / "utils" / "data.py").open("a") as file:
        file.write(f"\nimport os\nfrom pathlib import Path\nPath({str(begun)!r}).write_text(f'{{os.getpid()}}\\n')\n")
    with (
        TemporaryDirectory(prefix="b") as runtime,  # a socket's path is short
        subprocess.Popen(
            [*command, "--set", "streams.photos.cache=off", "--python", other_python],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment() | {"XDG_RUNTIME_DIR": runtime, "TMPDIR": runtime},
            cwd=folder,
        ) as process,
    ):
        wait_until(lambda: begun.exists() and begun.read_text().endswith("\n"), "the DataLoader starts")
        process.send_signal(number)
        output, errors = process.communicate(timeout=PATIENCE_S)
        wait_until(lambda: not is_alive(int(begun.read_text())), "the DataLoader has ended")
        left = list(Path(runtime).iterdir())

    if number == signal.SIGKILL:
        return
    found = json.loads(output)
    assert (process.returncode, left) == (130, [])
    assert [one["workers"] for one in found["measured"]] == [1]
    assert (found["interrupted"], found["dataloader"]) == (True, None)
    assert errors.endswith("batchd: interrupted; the figures are those measured so far\n")
