"""The configuration is a command's first argument, or that of --config, by one rule for all."""

import shlex

import click
import pytest
from click.testing import CliRunner, Result

from batchd.cli.main import cli, main
from batchd.cli.options import CONFIG_OPTION, is_config_file
from batchd_wire.messages import AskStatus, Status
from support.fake_daemon import FakeDaemon


def all_commands(group: click.Group = cli, before: str = "") -> list[tuple[str, click.Command]]:
    """List every command with its name, those of groups as `keys new`."""
    found = []
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        found.append((f"{before}{name}", command))
        if isinstance(command, click.Group):
            found += all_commands(command, f"{name} ")
    return found


WITH_CONFIG = {name: one for name, one in all_commands() if any(given.name == CONFIG_OPTION for given in one.params)}


def typed(name: str, line: str, monkeypatch) -> dict[str, object]:
    """Return what a command's function gets from a line; it does not run."""
    got: dict[str, object] = {}
    monkeypatch.setattr(WITH_CONFIG[name], "callback", lambda *_context, **given: got.update(given))
    result = run(f"{name} {line}")
    assert result.exit_code == 0, result.output
    return got


def run(line: str) -> Result:
    """Run a line of the command line in this process."""
    return CliRunner().invoke(cli, shlex.split(line))


def test_these_commands_take_a_configuration() -> None:
    """Every command with --config takes CONFIG, too."""
    assert {name.split()[0] for name in WITH_CONFIG} == {
        *("bench", "serve", "check", "doctor", "replay", "seen", "blame", "card", "prepare", "keys", "ray")
    }
    for name, command in WITH_CONFIG.items():
        usage = command.collect_usage_pieces(click.Context(command))
        assert usage[:2] == ["[OPTIONS]", "[CONFIG]"], name


@pytest.mark.parametrize(
    ("word", "is_file"),
    [
        ("batchd.toml", True),
        ("./photos", True),
        ("/etc/batchd/my.conf", True),
        ("photos", False),
        ("photos.v2", False),
        ("toml", False),
        ("tcp://gpu1:7072", False),
        ("gpu1:7072", False),
        ("0:3", False),
    ],
)
def test_a_word_is_a_file_by_its_end_or_a_slash(word, is_file) -> None:
    """What a stream, a position or an address may be called is none."""
    assert is_config_file(word) is is_file


@pytest.mark.parametrize(
    ("name", "arguments", "others"),
    [
        ("serve", "{}", {}),
        ("check", "{}", {}),
        ("doctor", "{}", {}),
        ("bench", "{}", {"stream": None}),
        ("bench", "{} photos", {"stream": "photos"}),
        ("prepare", "{} photos --to shards", {"stream": "photos"}),
        ("card", "{} photos", {"stream": "photos"}),
        ("replay", "{} photos 0:3", {"stream": "photos", "position": (0, 3)}),
        ("replay", "--json {} photos", {"stream": "photos", "position": None, "as_json": True}),
        ("seen", "{} photos a/b.jpg", {"stream": "photos", "file": "a/b.jpg"}),
        ("blame", "{} photos --losses l.json", {"stream": "photos"}),
        ("keys new", "{} --name gpu1", {"name": "gpu1"}),
        ("keys list", "{}", {}),
        ("keys revoke", "{} gpu1", {"name": "gpu1"}),
        ("ray up", "{} tcp://gpu1:7072 -- --workers 3", {"words": ("tcp://gpu1:7072", "--workers", "3")}),
        ("ray down", "{} tcp://gpu1:7072", {"address": "tcp://gpu1:7072"}),
    ],
)
def test_the_argument_is_the_file_of_the_option(name, arguments, others, monkeypatch) -> None:
    """Both forms give the function the same, and without a file its own arguments stay."""
    rest = " ".join(arguments.replace("{}", "").split())
    by_argument = typed(name, arguments.format("some/my.toml"), monkeypatch)

    assert by_argument == typed(name, f"--config some/my.toml {rest}", monkeypatch)
    assert str(by_argument["config_file"]) == "some/my.toml"
    without = typed(name, rest, monkeypatch)
    assert str(without["config_file"]) in ("batchd.toml", "None")
    assert {key: without[key] for key in others} == {key: by_argument[key] for key in others} == others


@pytest.mark.parametrize("name", WITH_CONFIG)
def test_two_files_are_refused_with_both_names(name) -> None:
    """The error names the argument and the option, whatever else is missing."""
    more = {"keys new": "--name x", "keys revoke": "x", "prepare": "photos --to d"}.get(name, "")
    more = more or ("photos" if name in ("card", "replay", "seen", "blame") else "")
    result = run(f"{name} --config b.toml a.toml {more}")

    assert result.exit_code == 2
    assert "two configurations: a.toml and --config b.toml; name one of them" in result.output


def test_the_same_file_twice_is_one() -> None:
    """Nothing contradicts itself there."""
    assert "two configurations" not in run("check nothing.toml --config nothing.toml").output


def test_a_command_alone_with_its_file_takes_any_name(monkeypatch) -> None:
    """Nothing else could be meant, as by `batchd check my.conf`."""
    assert str(typed("check", "my.conf", monkeypatch)["config_file"]) == "my.conf"


def test_the_help_has_the_rule() -> None:
    """It stands at --config, where there is another argument."""
    rule = "the first argument, if it ends in .toml or is a path with a slash"
    for name, command in WITH_CONFIG.items():
        text = next(one.help for one in command.params if isinstance(one, click.Option) and one.name == CONFIG_OPTION)
        has_others = len([one for one in command.params if isinstance(one, click.Argument)]) > 1
        assert ("CONFIG is the same" in text, rule in text) == (True, has_others), name


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """A daemon that uses a file elsewhere, in a folder without batchd.toml."""
    monkeypatch.chdir(tmp_path)

    def answer(session, message) -> bool:
        if isinstance(message, AskStatus):
            fake.send(session, Status(message.request, {"daemon": {"config_file": "/etc/batchd/batchd.toml"}}))
        return isinstance(message, AskStatus)

    with FakeDaemon(tmp_path / "run") as fake:
        fake.answer = answer
        monkeypatch.setenv("BATCHD_ADDRESS", fake.address)
        yield fake


@pytest.mark.parametrize("line", ["check", "bench photos --seconds 3", "replay photos 0:3"])
def test_without_a_file_here_the_error_names_that_of_the_running_daemon(line, daemon, capsys) -> None:
    """It has the whole command, to be copied."""
    with pytest.raises(SystemExit) as ended:
        main(line.split())

    name, *words = line.split()
    command = " ".join(["batchd", name, "/etc/batchd/batchd.toml", *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"the daemon at {daemon.address} uses /etc/batchd/batchd.toml: `{command}`; `batchd init PATH`" in said


@pytest.mark.usefixtures("daemon")
def test_a_named_file_is_the_one_that_is_missed(capsys) -> None:
    """The daemon's is no help then."""
    with pytest.raises(SystemExit):
        main(["check", "mine.toml"])

    assert "uses" not in capsys.readouterr().err


def test_without_a_daemon_the_error_is_about_the_file(tmp_path, monkeypatch, capsys) -> None:
    """Nothing is said of daemons."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHD_ADDRESS", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["check"])

    said = capsys.readouterr().err
    assert "`batchd init PATH` writes one for your data" in said
    assert "daemon" not in said
