"""Names that were probably meant: typos are found, and names that only look alike are not."""

import shlex
import sys

import pytest

from batchd.cli.main import COMMANDS
from batchd.config.tree import DaemonConfig, StreamConfig
from batchd.data.pipeline.options import STEP_KINDS
from batchd.data.sources.options import SOURCE_KINDS
from batchd.runtime.suggestions import nearest, nearly, own_command

SOURCES, STEPS = list(SOURCE_KINDS), list(STEP_KINDS)
OF_DAEMON, OF_STREAM = list(DaemonConfig.model_fields), list(StreamConfig.model_fields)


@pytest.mark.parametrize(
    ("known", "name", "meant"),
    [
        (SOURCES, "foldr", "folder"),
        (SOURCES, "Folders", "folder"),
        (SOURCES, "webdatset", "webdataset"),
        (SOURCES, "cvs", "csv"),
        (STEPS, "resise", "resize"),
        (STEPS, "randomflip", "random_flip"),
        (STEPS, "normalise", "normalize"),
        (STEPS, "jitter", "color_jitter"),
        (OF_DAEMON, "worker", "workers"),
        (OF_DAEMON, "wrokers", "workers"),
        (OF_DAEMON, "max_sessions", "sessions_max"),
        (OF_DAEMON, "cache_directory", "cache_dir"),
        (OF_DAEMON, "run_dir", "runtime_dir"),
        (["text", "image"], "img", "image"),
        (["txt", "img"], "image", "img"),
        (OF_STREAM, "batchsize", "batch_size"),
        (OF_STREAM, "bath-size", "batch_size"),
        (OF_STREAM, "shufle", "shuffle"),
        (list(COMMANDS), "statsu", "status"),
        (list(COMMANDS), "server", "serve"),
    ],
)
def test_a_slip_is_understood(known, name, meant) -> None:
    """Letters may be wrong, missing, too many or swapped, words short or in another order."""
    assert nearest(name, known) == meant


@pytest.mark.parametrize(
    ("known", "name", "like"),
    [
        (SOURCES, "cats", "concat"),
        (SOURCES, "gcs", "csv"),
        (SOURCES, "mnist", "list"),
        (SOURCES, "tensor", "tokens"),
        (SOURCES, "contrast", "concat"),
        (SOURCES, "audio", "video"),
        (STEPS, "yolo", "follow"),
        (STEPS, "parcel", "pack"),
        (STEPS, "flop", "clip"),
        (OF_DAEMON, "http_address", "http_names"),
        (OF_STREAM, "max_sessions", "max_skew"),
        (list(COMMANDS), "start", "status"),
        (list(COMMANDS), "ls", "logs"),
    ],
)
def test_what_only_looks_alike_is_not_suggested(known, name, like) -> None:
    """A wrong suggestion costs more than a list of the known names."""
    assert like in known
    assert nearest(name, known) is None


def test_among_very_many_names_the_first_letter_counts() -> None:
    """There, another name is always near."""
    assert nearly("cat0l.jpg", ["cat01.jpg", "bat01.jpg"]) == "cat01.jpg"
    assert nearly("rat01.jpg", ["cat01.jpg", "bat01.jpg"]) is None
    assert nearly("cat", ["catalogue"]) is None


def test_the_next_command_is_called_as_a_shell_finds_it(tmp_path, monkeypatch):
    """By its name if it is on the PATH, else by its path, from here if it is below."""
    program = tmp_path / "a clone" / ".venv" / "bin" / "batchd"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(program), "demo"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    monkeypatch.chdir(tmp_path)
    assert own_command() == "'a clone/.venv/bin/batchd'"
    monkeypatch.chdir("/")
    assert own_command() == shlex.quote(str(program.relative_to("/")))
    monkeypatch.chdir(program.parent)  # a shell looks for a name without a slash elsewhere
    assert own_command() == shlex.quote(str(program))
    monkeypatch.setenv("PATH", f"/bin:{program.parent}")
    assert own_command() == "batchd"
    monkeypatch.setattr(sys, "argv", ["/x/batchd/__main__.py"])
    assert own_command() == "batchd"
    monkeypatch.setenv("PATH", "/bin")
    assert own_command() == f"{sys.executable} -m batchd"
