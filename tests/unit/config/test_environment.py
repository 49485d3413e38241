"""Variables that batchd does not read, though they are called as its own are."""

import re
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner

from batchd.cli.log_lines import log_unknown_variables
from batchd.cli.main import ENVIRONMENT, cli
from batchd.config.environment import CLIENT_VARIABLES, KNOWN_VARIABLES, unknown_variables
from batchd.config.tree import DaemonConfig

ROOT = Path(__file__).parents[3]
LITERAL = re.compile(r'"(BATCHD_[A-Z_]+)"|\$\{?(BATCHD_[A-Z_]+)')


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("BATCHD_WORKER", "BATCHD_WORKERS"),
        ("BATCHD_WORKRES", "BATCHD_WORKERS"),
        ("BATCHD_ADRESS", "BATCHD_ADDRESS"),
        ("BATCHD_CONNECTION", "BATCHD_CONNECTIONS"),
        ("BATCHD_RECONNECT_TIMEOUT_S", "BATCHD_RECONNECT_TIMEOUT"),
        ("BATCHD_MEMORY_BYTES", "BATCHD_MEMORY"),
        ("BATCHD_KEY_DIR", "BATCHD_KEYS_DIR"),
    ],
)
def test_a_mistyped_variable_is_answered_with_the_one_that_was_meant(name, meant) -> None:
    """The prefix does not count: it would make all of them alike."""
    assert unknown_variables({name: "3"}) == {name: f"did you mean {meant}?"}


def test_the_help_has_each_variable_of_the_client() -> None:
    """The advice names the help."""
    assert set(CLIENT_VARIABLES) <= set(ENVIRONMENT)


def test_what_is_like_no_other_is_answered_with_where_they_are() -> None:
    """There are too many for a line."""
    assert unknown_variables({"BATCHD_COCO": "3"}) == {
        "BATCHD_COCO": "`batchd --help` and `batchd config` say which there are"
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "1") for name in KNOWN_VARIABLES),
        ("BATCHD_WORKER", ""),
        ("BATCHDIR", "/x"),
        ("_BATCHD_COMPLETE", "bash_source"),
        ("BATCHD_SERVICE_HOST", "10.0.0.1"),
        ("BATCHD_SERVICE_PORT", "7070"),
        ("BATCHD_SERVICE_PORT_TRAINERS", "7070"),
        ("BATCHD_WORKERS_SERVICE_HOST", "10.0.0.1"),
        ("BATCHD_PORT", "tcp://10.0.0.1:7070"),
        ("BATCHD_PORT_7070_TCP", "tcp://10.0.0.1:7070"),
        ("BATCHD_PORT_7070_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_nothing_is_said_of_others(name, value) -> None:
    """Known ones, empty ones, and what Kubernetes sets for a service called batchd."""
    assert unknown_variables({name: value, "PATH": "/bin"}) == {}


def test_what_the_code_reads_is_known() -> None:
    """Each literal of the code and of the scripts, and each key of [daemon]."""
    files = [file for folder in ("batchd", "client") for file in (ROOT / folder).rglob("*.py")]
    files += [file for file in (ROOT / "deploy").rglob("*") if file.suffix == ".sh"]
    read = {found[1] or found[2] for file in files for found in LITERAL.finditer(file.read_text())}

    assert {f"BATCHD_{key.upper()}" for key in DaemonConfig.model_fields} <= set(KNOWN_VARIABLES)
    assert read - {"BATCHD_", "BATCHD_TEST_"} <= set(KNOWN_VARIABLES)


@pytest.mark.parametrize("line", [["check"], ["bench"], ["init", "nowhere"], ["check", "--format", "json"]])
def test_commands_warn_once_on_standard_error(line, tmp_path, monkeypatch) -> None:
    """Standard output stays what programs read."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner(env={"BATCHD_WORKER": "3"}).invoke(cli, line)

    text = "batchd: BATCHD_WORKER is none of batchd's variables, so it does nothing; did you mean BATCHD_WORKERS?\n"
    assert result.stderr.count(text) == 1
    assert "BATCHD_WORKER" not in result.stdout


def test_daemon_and_worker_host_warn_in_their_log(monkeypatch) -> None:
    """One line for each variable."""
    monkeypatch.setenv("BATCHD_WORKER", "3")
    with structlog.testing.capture_logs() as lines:
        log_unknown_variables()

    assert lines == [
        {
            "event": "unknown variable",
            "variable": "BATCHD_WORKER",
            "advice": "did you mean BATCHD_WORKERS?",
            "log_level": "warning",
        }
    ]
