"""The manual of the problems of a configuration, its examples, and that of the log."""

import json
import shlex
from pathlib import Path

import pytest

from batchd.config.manual import MANUAL
from batchd.errors import ProblemKind
from batchd.stream.rings import DescriptorPlan
from support.commands import batchd
from support.images import write_photos

STREAM = {
    "source": 'source = { type = "folder", path = "photos" }',
    "batch_size": "batch_size = 4",
    "pipeline": 'pipeline = [{ op = "decode" }, { op = "resize", size = [224, 224] }]',
}
WITH_EXAMPLES = [kind for kind, entry in MANUAL.items() if entry.wrong]


def whole(lines: str) -> str:
    """A configuration with these lines, which replace the keys of the stream that they name."""
    given = {line.split()[0] for line in lines.splitlines()}
    kept = [line for key, line in STREAM.items() if key not in given]
    daemon, stream = ([lines], []) if lines.startswith("[daemon]") else (["[daemon]"], [lines])
    runtime = [] if "runtime_dir" in given else ['runtime_dir = "run"']
    return "\n".join([*daemon, *runtime, "[streams.photos]", *kept, *stream])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files that the examples name: photographs, a function, and a valid configuration."""
    write_photos(tmp_path / "photos", {"": 4})
    (tmp_path / "augment.py").write_text("def brighten(sample, rng):\n    return sample\n")
    (tmp_path / "batchd.toml").write_text(whole(""))
    return tmp_path


def names(example: str, folder: Path, status: int) -> list[str]:
    """The names of the problems of an example."""
    words = ["check", "example.toml"]
    if example.startswith("batchd "):
        words = shlex.split(example)[1:]
    else:
        (folder / "example.toml").write_text(whole(example))
    done = batchd(*words, "--format", "json", folder=folder, status=status)
    return [problem["name"] for problem in json.loads(done.stdout)["problems"]]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("kind", WITH_EXAMPLES)
def test_each_example_has_its_problem_and_the_right_one_none(kind: ProblemKind, folder: Path) -> None:
    """`batchd check` reports the problems."""
    status = 5 if kind is ProblemKind.MEMORY_TOO_SMALL else 2

    assert names(MANUAL[kind].wrong, folder, status) == [kind]
    assert names(MANUAL[kind].right, folder, 0) == []


def test_kinds_without_an_example_do_not_concern_a_file() -> None:
    """One concerns limits of the process, the other a command."""
    assert set(ProblemKind) - set(WITH_EXAMPLES) == {
        ProblemKind.TOO_FEW_DESCRIPTORS,
        ProblemKind.FILES_TOO_SMALL,
        ProblemKind.NOT_TO_PREPARE,
    }
    refusal = DescriptorPlan(limit=10, own=20, slots=4, connections=4).refusal(1)
    assert refusal is not None
    assert refusal.kind is ProblemKind.TOO_FEW_DESCRIPTORS


def test_check_prints_the_name_and_explain_its_manual(folder: Path) -> None:
    """The text of a problem names the command, which accepts the printed name."""
    (folder / "batchd.toml").write_text(whole("batch_size = 0"))

    said = batchd("check", folder=folder, status=2).stderr
    manual = batchd("explain", "[wrong-value]").stdout

    assert "must be greater than or equal to 1, not 0 [wrong-value]\n" in said
    assert "`batchd explain wrong-value`" in said
    assert manual.startswith("The value has the right type")
    assert "Wrong:\n\n    batch_size = 0\n\nRight:\n\n    batch_size = 1\n" in manual


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    """Without a name, the command lists all kinds, and then all events."""
    assert "did you mean unknown-key?" in batchd("explain", "unknown-keys", status=2).stderr
    names = batchd("explain").stdout.splitlines()
    assert names[: len(ProblemKind)] == list(ProblemKind)
    assert names[len(ProblemKind)] == "serving"


def test_an_event_of_the_log_is_explained_by_its_text() -> None:
    """Level, meaning and remedy; links of the page become their words."""
    assert batchd("explain", "storage away").stdout.startswith("warning: the storage of a stream's source is gone;")
    assert batchd("explain", "storage away").stdout.endswith(
        "What to do: bring it back: the stream goes on by itself\n"
    )
    assert batchd("explain", "observing").stdout == "info: the observer answers HTTP at `http` (metrics.md)\n"
