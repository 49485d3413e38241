"""The name of a run: set by the user, or found in the environment of its job."""

import os
import sys

import pytest

from batchd.runtime.limits import SHOWN_CHARACTERS_MAX
from batchd_client import connect, push
from batchd_client.discovery import NAME_CHARACTERS_MAX, find_name
from batchd_client.errors import NameInvalid

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "resnet-0"}
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "resnet"}
ARRAY = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "11"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "sweep-3"}


@pytest.fixture(autouse=True)
def program(monkeypatch) -> None:
    """Make this program a script."""
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", "--fast"])


@pytest.mark.parametrize(
    ("given", "environment", "name"),
    [
        ("mine", {"BATCHD_NAME": "theirs", **SLURM}, "mine"),
        (None, {"BATCHD_NAME": "theirs", **SLURM}, "theirs"),
        (None, {"BATCHD_NAME": "", **SLURM}, "resnet-4711"),
        (None, {"SLURM_JOB_ID": "4711"}, "slurm-4711"),
        (None, {**SLURM, **ARRAY, **TORCHRUN, **POD}, "resnet-4700_11"),
        (None, {**TORCHRUN, **POD}, "train.py-sweep-3"),
        (None, {"TORCHELASTIC_RUN_ID": "none", **POD}, "resnet-0"),
        (None, {"HOSTNAME": "bigbox"}, "train.py-PID"),
    ],
)
def test_the_first_name_that_there_is_names_a_run(given, environment, name) -> None:
    """The order is: program's name, user's, job's, then that of the program and process."""
    assert find_name(given, environment) == name.replace("PID", str(os.getpid()))


@pytest.mark.parametrize("given", ["", "x" * (NAME_CHARACTERS_MAX + 1), "a\nb", "\x1b[2J"])
def test_a_chosen_name_that_cannot_be_shown_is_refused(given, monkeypatch) -> None:
    """The message names the argument or the variable, before the client looks for a daemon."""
    for make in (lambda: connect(name=given), lambda: push("frames", name=given)):
        with pytest.raises(NameInvalid, match=r"^connect\(name=\) is .* 1 to 64 printable"):
            make()
    if given:
        monkeypatch.setenv("BATCHD_NAME", given)
        with pytest.raises(NameInvalid, match=rf"^\$BATCHD_NAME is .*, of {len(given)} characters"):
            connect()


def test_a_found_name_is_made_to_fit() -> None:
    """The job's number is kept whole, a long name is cut, and control characters are removed."""
    name = find_name(None, {**SLURM, "SLURM_JOB_NAME": "\x1b]" + "long" * 40})

    assert name.startswith("?]longlong")
    assert name.endswith("-4711")
    assert len(name) == NAME_CHARACTERS_MAX == SHOWN_CHARACTERS_MAX


def test_a_package_that_python_runs_is_named_by_its_folder(monkeypatch) -> None:
    """The file of a package is always called __main__.py."""
    monkeypatch.setattr(sys, "argv", ["/opt/trainers/vision/__main__.py"])

    assert find_name(None, {}) == f"vision-{os.getpid()}"
