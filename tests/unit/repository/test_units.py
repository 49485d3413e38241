"""The units in deploy/: reasons for every directive, accepted by systemd, sandboxed as stated."""

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from batchd.config.tree import DaemonConfig
from batchd.daemon.serve import WORKERS_END_S
from batchd.errors import ExitCode
from batchd.worker.supervisor import KILL_TIMEOUT_S

DEPLOY = Path(__file__).parents[3] / "deploy"
UNIT = DEPLOY / "batchd.service"
TEMPLATE = DEPLOY / "batchd@.service"
EXAMPLES = sorted((DEPLOY / "examples").glob("*.conf"))
EXPOSURE_MAX = 1.5
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt-get install systemd"
)

Directive = tuple[str, str]


def directives(text: str) -> list[Directive]:
    """Names and values in order; a section is a name without a value."""
    lines = (line.strip() for line in text.splitlines())
    return [(name, value) for name, _, value in (line.partition("=") for line in lines if line and line[0] not in "#;")]


def value_of(name: str) -> str:
    return next(value for key, value in directives(UNIT.read_text()) if key == name)


def test_every_directive_has_its_reason() -> None:
    """A comment is above the directive, or above the few lines that it belongs to.

    No directive follows an empty line.
    """
    lines = UNIT.read_text().partition("[Service]")[2].partition("[Install]")[0].strip().splitlines()
    for before, line in pairwise(["", *lines]):
        assert not line or line.startswith("#") or before, f"{line} has no reason"
    reasons = sum(line.startswith("#") for line in lines)
    assert reasons > sum("=" in line and not line.startswith("#") for line in lines) / 2


def test_the_template_is_the_unit_for_one_of_several() -> None:
    """All directives that do not depend on the name are equal."""

    def general(text: str) -> list[Directive]:
        text = text.replace(" BATCHD_RUNTIME_DIR=/run/batchd-%i", "").replace(" (%i)", "")
        return directives(text.replace("batchd-%i", "batchd").replace("/etc/batchd/%i.toml", "/etc/batchd/batchd.toml"))

    assert "%i" in TEMPLATE.read_text()
    assert general(TEMPLATE.read_text()) == directives(UNIT.read_text())


def test_the_unit_waits_longer_than_the_daemon_takes_to_end() -> None:
    """The workers finish their work in progress for as long as the configuration allows."""
    drain_max_s = next(rule.lt for rule in DaemonConfig.model_fields["drain_timeout_s"].metadata if hasattr(rule, "lt"))
    assert int(value_of("TimeoutStopSec")) > 2 * (drain_max_s + WORKERS_END_S + KILL_TIMEOUT_S)


def test_what_is_as_wrong_the_next_time_is_not_tried_again() -> None:
    """The exit codes are those of the command line."""
    never = {ExitCode.USAGE, ExitCode.ALREADY_RUNNING}
    assert {int(code) for code in value_of("RestartPreventExitStatus").split()} == never


def test_what_was_learned_the_hard_way_is_there() -> None:
    """An OOM kill must not stop the service, and SIGTERM must not kill workers within a sample."""
    assert value_of("OOMPolicy") == "continue"
    assert value_of("KillMode") == "mixed"
    assert "/tmp" not in value_of("Environment")


@needs_systemd
@pytest.mark.parametrize("unit", [UNIT, TEMPLATE], ids=lambda path: path.name)
def test_a_unit_is_as_closed_as_it_can_be(unit: Path) -> None:
    """The measure is that of systemd, which need not run."""
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={int(EXPOSURE_MAX * 10)}", str(unit)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "SYSTEMD_COLORS": "0"}
    )
    level = re.search(r"Overall exposure level for .*: ([0-9.]+)", done.stdout)
    assert level is not None, done.stderr
    assert done.returncode == 0, done.stdout
    assert float(level[1]) <= EXPOSURE_MAX


@pytest.mark.thorough(after_first=True)
@needs_systemd
@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda path: path.name if path else "alone")
def test_systemd_takes_the_units_and_their_drop_ins(example: Path | None, tmp_path: Path) -> None:
    """The check is silent: systemd would ignore an unknown directive or value with a warning."""
    for unit in (UNIT, TEMPLATE):
        text = re.sub(r"/usr/bin/batchd\b", sys.executable, unit.read_text())
        (tmp_path / unit.name).write_text(text)
        if example is not None:
            folder = tmp_path / f"{unit.name}.d"
            folder.mkdir()
            shutil.copyfile(example, folder / example.name)
    command = ["systemd-analyze", "verify", "--man=no", "batchd.service", "batchd@one.service"]
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    ours = [line for line in done.stderr.splitlines() if "batchd" in line or str(tmp_path) in line]
    assert not ours
    assert done.returncode == 0, done.stderr
