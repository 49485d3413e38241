"""What the Makefile promises.

Locked versions of all that develops and tests, ARGS that choose tests, and a demo without tools.
"""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

TREE = Path(__file__).resolve().parents[3]
LOCK = (TREE / "constraints.txt").read_text()
PROJECT = tomllib.loads((TREE / "pyproject.toml").read_text())
PINNED = [Requirement(line) for line in LOCK.splitlines() if not line.startswith("#")]
WANTED = [
    requirement
    for group in [
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
        PROJECT["build-system"]["requires"],
    ]
    for requirement in map(Requirement, group)
    if requirement.name != "batchd-client"
]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_each_requirement_is_locked_at_a_version_in_its_range(wanted: Requirement) -> None:
    """`make lock` writes the file again after a change of pyproject.toml."""
    versions = [next(iter(one.specifier)) for one in PINNED if one.name == wanted.name]

    assert versions
    assert all(one.operator == "==" and wanted.specifier.contains(one.version) for one in versions)


def test_the_lock_names_no_index() -> None:
    """Any index of Python packages can serve it; where pip looks is the machine's own setting."""
    assert not re.search("://|^-", LOCK, re.MULTILINE)


@pytest.mark.parametrize(
    ("target", "folder"),
    [
        ("test", "tests/unit"),
        ("test-torch", "tests/with_torch"),
        ("test-page", "tests/with_browser"),
        ("test-ray", "tests/with_ray"),
        ("test-frameworks", "tests/with_jax"),
        ("test-moving", "tests/process/test_moving.py"),
        ("test-ends", "tests/unit"),
        ("test-wheels", "process"),
        ("test-packages", "tests/packages"),
        ("test-systemd", "tests/systemd"),
        ("test-image", "tests/image"),
    ],
)
def test_a_path_in_args_chooses_and_an_option_narrows(target: str, folder: str) -> None:
    """Each target for tests runs its own folders if ARGS names none."""

    def shown(arguments: str) -> str:
        command = ["make", "--dry-run", "--no-print-directory", target, f"ARGS={arguments}"]
        lines = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=True).stdout
        return "\n".join(
            line
            for line in lines.replace("\\\n", "").splitlines()
            if "-m pytest" in line and "--collect-only" not in line
        )

    assert f" {folder} " in shown("-k one").replace(";", " ")
    assert "-k one" in shown("-k one")
    assert f" {folder} " not in shown("tests/chosen/test_one.py -x").replace(";", " ")
    assert "chosen/test_one.py" in shown("tests/chosen/test_one.py -x")


@pytest.mark.parametrize(("target", "has_tools"), [("venv", False), ("demo", False), ("setup", True), ("test", True)])
def test_only_what_tests_installs_the_tools_for_tests(target: str, has_tools: bool) -> None:
    """A newcomer waits for what the demo needs alone."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", target]
    shown = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=True).stdout

    assert "--editable ./client --editable ." in shown
    assert ("--group dev" in shown) == has_tools
