"""Completions of a shell after Tab: commands, options, streams.

The tests use the shells themselves if they are installed.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from batchd.cli.main import COMMANDS, cli
from batchd_wire.messages import AskStatus, Status
from support.daemon_process import clean_environment
from support.fake_daemon import FakeDaemon
from support.waiting import PATIENCE_S

VARIABLE = "_BATCHD_COMPLETE"
CONFIG = """
[streams.photos]
source = { type = "folder", path = "/nowhere" }
[streams.plants]
batch_size = "wrong"
[streams.birds]
"""
TAB = {
    "bash": """
        source {script}; COMP_WORDS=({words}); COMP_CWORD={last}; _batchd_completion batchd
        printf "%s\\n" "${{COMPREPLY[@]}}"
    """,
    "zsh": """
        compdef() {{ }}
        _describe() {{ eval "print -l -- \\${{$3[@]%%:*}}" }}
        compadd() {{ eval "print -l -- \\${{$argv[-1]}}" }}
        source {script}; words=({words}); CURRENT=$(({last} + 1)); _batchd_completion
    """,
    "fish": "source {script}; complete -C {line} | string split -f 1 \\t",
}
"""The program that replaces the completion key in each shell.

For zsh it prints the arguments of ``_describe`` and ``compadd``.
"""


def offered(*words: str, incomplete: str = "") -> list[str]:
    """Return the completions of the last word of a line."""
    completion = BashComplete(cli, {}, "batchd", VARIABLE)
    return [item.value for item in completion.get_completions(list(words), incomplete)]


@pytest.fixture
def batchd_on_path(tmp_path):
    """An environment in which ``batchd`` is that of this interpreter, for shells' scripts."""
    program = tmp_path / "bin" / "batchd"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom batchd.cli.main import main\nmain()\n")
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return clean_environment() | {"PATH": path, "HOME": str(tmp_path)}


def run(*command: str, environment: dict[str, str]) -> str:
    """Return the output of a command."""
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def press_tab(shell: str, words: list[str], environment: dict[str, str], folder: Path) -> list[str]:
    """Return the completions of a real shell with the script that installations use."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    script = folder / f"completion.{shell}"
    script.write_text(run("batchd", environment=environment | {VARIABLE: f"{shell}_source"}))
    line = TAB[shell].format(
        script=script, words=shlex.join(words), last=len(words) - 1, line=shlex.quote(" ".join(words))
    )
    plain = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    return run(shell, *plain, "-c", line, environment=environment).split()


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("shell", TAB)
def test_a_shell_completes_commands_and_options(shell, batchd_on_path, tmp_path) -> None:
    """The test uses the scripts that `make install` and the package install."""
    assert press_tab(shell, ["batchd", "sta"], batchd_on_path, tmp_path) == ["status"]
    assert press_tab(shell, ["batchd", "peek", "--out"], batchd_on_path, tmp_path) == ["--output"]


def test_every_command_is_offered() -> None:
    """No command is offered that does not exist."""
    assert sorted(offered()) == sorted(COMMANDS)
    assert offered("check", incomplete="--s") == ["--set"]


def test_streams_of_the_running_daemon_are_offered(tmp_path) -> None:
    """They are offered to commands that query a daemon, for the daemon that the line names."""

    def answer(session, message) -> bool:
        if isinstance(message, AskStatus):
            streams = [{"name": name} for name in ("plants", "photos", "birds")]
            fake.send(session, Status(message.request, {"streams": streams}))
        return isinstance(message, AskStatus)

    with FakeDaemon(tmp_path / "run") as fake:
        fake.answer = answer
        at = ("--address", fake.address)
        assert offered("peek", *at) == ["birds", "photos", "plants"]
        assert offered("bad", *at, incomplete="p") == ["photos", "plants"]


def test_without_a_daemon_nothing_is_offered_or_printed(tmp_path, capfd) -> None:
    """A message would disturb the line that the user types."""
    assert offered("peek", "--address", str(tmp_path)) == []
    assert capfd.readouterr() == ("", "")


def test_streams_of_the_configuration_are_offered(tmp_path) -> None:
    """They are offered to commands that need no daemon, even if the streams are invalid."""
    file = tmp_path / "my.toml"
    file.write_text(CONFIG)

    assert offered("prepare", "-c", str(file), incomplete="p") == ["photos", "plants"]


@pytest.mark.parametrize("text", ["streams = 3", "[[", None])
def test_a_file_without_streams_offers_none(tmp_path, text) -> None:
    """A missing file and a file that is not TOML offer none either."""
    file = tmp_path / "my.toml"
    if text is not None:
        file.write_text(text)

    assert offered("prepare", "-c", str(file)) == []
