"""The command line without a daemon.

The overview, `batchd config`, `batchd check`, and the exit of commands that fail.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree

import click
import pytest
from click.testing import CliRunner, Result

from batchd.cli.config import annotated_toml, reference_markdown
from batchd.cli.main import COMMANDS, cli
from batchd.cli.options import ConfigFile, Overrides, as_command
from batchd.config.schema import json_schema
from batchd.errors import EXIT_CODE_MEANINGS, AlreadyRunning
from batchd.stream.rings import SLOTS_MAX
from support.commands import fail
from support.images import write_photos

CONFIG = """
[daemon]
memory = "64MiB"
runtime_dir = "run"

[streams.photos]
source = { type = "folder", path = "photos" }
batch_size = 64
on_error = "mask"
pipeline = [
    { op = "decode" },
    { op = "random_resized_crop", size = [64, 64] },
]

[streams.list]
source = { type = "list", path = "list.txt" }
batch_size = 8
memory = "16MiB"
pipeline = [ { op = "decode" }, { op = "resize", size = [32, 48] }, { op = "normalize" }, { op = "layout" } ]
"""


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration whose sources exist, in the current directory."""
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos", {"": 3})
    write_photos(tmp_path, {"": 1})[0].rename(tmp_path / "a.jpg")
    (tmp_path / "list.txt").write_text("a.jpg 1\n" * 9)
    file = tmp_path / "batchd.toml"
    file.write_text(CONFIG)
    return file


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


# --- the overview ---------------------------------------------------------------------------------


def test_help_has_every_command_and_every_exit_code() -> None:
    """A user who knows only the name of the program can continue from here."""
    text = run("--help").output

    assert all(name in text and help_line in text for name, help_line in COMMANDS.items())
    assert all(
        re.search(rf"^ *{int(code)}  +{meaning}$", text, re.MULTILINE) for code, meaning in EXIT_CODE_MEANINGS.items()
    )
    assert "Start with `batchd init PATH`" in text
    assert run("-h").output == text


def test_help_imports_no_command() -> None:
    """The overview is fast because it does not import pydantic or ZeroMQ."""
    code = (
        "import sys\nfrom batchd.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'pydantic', 'zmq', 'cv2', 'numpy', 'rich', 'structlog'} & sys.modules.keys()))"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert shown.splitlines()[-1] == "[]"


@pytest.mark.thorough
def test_the_daemon_loads_nothing_that_libraries_import_for_other_programs() -> None:
    """It starts in less time. What is used after all is there."""
    code = (
        "import os, sys\nfrom batchd.cli.main import main\n"
        "try:\n    main(['serve', '-c', '/nowhere.toml'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'structlog', 'rich', 'pygments', 'asyncio', 'importlib.metadata'} & sys.modules.keys()))\n"
        "import structlog.stdlib\n"
        "try:\n    structlog.stdlib.asyncio.get_running_loop()\nexcept RuntimeError as error:\n    print(error)\n"
        "import rich, importlib.metadata\n"
        "print(importlib.metadata.version('click'), os.environ.get('PYDANTIC_DISABLE_PLUGINS'))"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert shown.splitlines()[-3:] == ["['structlog']", "no running event loop", f"{version('click')} None"]


def test_a_library_may_use_what_was_left_out_while_it_is_imported() -> None:
    """A plugin's entry point is found while the configuration is read."""
    code = (
        "import sys\nfrom batchd.cli.daemon import imports_for_a_daemon\n"
        "with imports_for_a_daemon():\n"
        "    from importlib.metadata import entry_points\n"
        "    print('batchd' in entry_points(group='console_scripts').names, 'email' in sys.modules)\n"
        "    import importlib.metadata\n"
        "    print(importlib.metadata.entry_points is entry_points)\n"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert shown.split() == ["True", "True", "False"]


def test_version_is_that_of_the_distribution() -> None:
    """The version comes from the metadata only."""
    assert run("--version").output == f"batchd {version('batchd')}\n"


def test_an_unknown_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, as documented."""
    code, text = fail(capsys, "chek")

    assert code == 2
    assert "there is no command 'chek'; did you mean check?" in text


def test_an_error_leaves_with_its_message_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is not a bug prints no traceback."""

    @click.command
    def command() -> None:
        raise AlreadyRunning("a daemon runs there already")

    monkeypatch.setattr(type(cli), "get_command", lambda *_arguments: command)

    assert fail(capsys, "serve") == (4, "batchd: a daemon runs there already\n")


# --- batchd config --------------------------------------------------------------------------------


def test_config_prints_a_file_to_start_from() -> None:
    """The output is the annotated file and nothing else."""
    assert run("config").output == annotated_toml()


def test_config_prints_the_schema_as_json() -> None:
    """An editor uses this schema."""
    assert json.loads(run("config", "--schema").output) == json_schema()


def test_config_prints_the_reference() -> None:
    """The output equals docs/configuration.md."""
    assert run("config", "--reference").output == reference_markdown()


# --- batchd check ---------------------------------------------------------------------------------


def test_check_shows_the_streams_to_serve(config_file: Path) -> None:
    """Each stream has one row: its source, its arrays, the size and the number of its slots."""
    result = run("check", str(config_file), "--set", "daemon.workers=3")

    lines = result.output.splitlines()
    assert result.exit_code == 0, result.output
    assert lines[0] == f"{config_file} is fine: 3 workers, up to 63.6 MiB of 64.0 MiB shared memory"
    assert lines[2].split("  ")[0] == "stream"
    photos = "image uint8[64, 64, 64, 3], label int64[64], index int64[64], valid bool[64]"
    assert [cell.strip() for cell in lines[3].split("  ") if cell] == [
        "photos",
        f"folder {config_file.parent}/photos",
        photos,
        "776.0 KiB",
        "63",
    ]
    assert "image float32[8, 3, 32, 48]" in lines[4]
    assert lines[5:] == [
        "",
        "Not looked at, as only the daemon and its workers do:",
        "  list  the content of its 9 samples, except 8",
    ]


@pytest.mark.thorough
def test_check_says_which_streams_worker_hosts_may_fill(config_file: Path) -> None:
    """It says why other streams stay local; without an address for worker hosts it says nothing."""
    with config_file.open("a") as file:
        file.write('[streams.camera]\nsource = { type = "push", fields = { x = "int64" } }\nbatch_size = 8\n')
    pool = "--set", "daemon.worker_address=127.0.0.1:7072", "--set", "streams.list.decode_at=here"

    output = run("check", *pool, "--set", "daemon.workers=1").output
    without = run("check").output

    said = output.partition("with worker hosts at 127.0.0.1:7072:\n")[2].partition("\n\n")[0].splitlines()
    assert said[1:] == [
        '  list    this host only: decode_at = "here"',
        '  camera  this host only: samples of type "push" arrive on this host',
    ]
    assert said[0].startswith("  photos  worker hosts, too; with one trainer its ring keeps ")
    assert "worker hosts" not in without


@pytest.mark.thorough
@pytest.mark.usefixtures("config_file")
def test_check_names_the_ring_size_that_the_pool_needs() -> None:
    """With the memory that it names the ring is large enough, and with 1 MiB less it is not."""

    def said(*options: str) -> str:
        pool = "--set", "daemon.worker_address=127.0.0.1:7072", "--set", "daemon.workers=1"
        return run("check", *pool, "--set", "daemon.pool_max=120", *options).output

    small = said()
    memory = small.partition('busy: memory = "')[2].partition('" in [streams.photos] is enough')[0]

    options = "--set", "daemon.memory=1GiB", "--set"
    assert "of 120 remote workers (pool_max) busy" in small
    assert "is large enough for 120 remote workers" in said(*options, f"streams.photos.memory={memory}")
    less = int(memory.removesuffix("MiB")) - 1
    assert "photos  worker hosts, too; its ring keeps" in said(*options, f"streams.photos.memory={less}MiB")
    assert f"a ring has {SLOTS_MAX} at most" in said(
        *options, "streams.photos.memory=512MiB", "--set", "daemon.pool_max=30000"
    )


def test_an_address_for_worker_hosts_beyond_loopback_needs_their_keys(config_file: Path) -> None:
    """Keys of trainers do not help here. Both addresses are reported together."""
    result = run(
        "check", *(f"--set=daemon.{key}={value}" for key, value in
        {"tcp": "0.0.0.0:7070", "worker_address": "0.0.0.0:7072", "keys_dir": config_file.parent / "keys"}.items())
    )  # fmt: skip
    told = str(result.exception)
    assert "daemon.tcp: 0.0.0.0:7070 can be reached from other hosts" in told
    assert "daemon.worker_address: 0.0.0.0:7072 can be reached from other hosts" in told
    assert "batchd keys new --role worker --name NAME" in told


def test_check_counts_the_memory_of_caches(config_file: Path) -> None:
    """The total includes rings, caches, and caches that streams share once."""
    cache = ("--set", "streams.photos.cache=encoded", "--set", "streams.photos.cache_memory=1GiB")
    result = run("check", str(config_file), *cache)

    assert result.output.splitlines()[0].endswith("of 64.0 MiB shared memory, and up to 1.0 GiB for caches")
    result = run("check", str(config_file), "--set", "daemon.derive=true", "--set", "daemon.derive_memory=20MiB")
    assert result.output.splitlines()[0].endswith(
        "up to 43.2 MiB of 64.0 MiB shared memory, and 20.0 MiB for derived streams"
    )


def test_check_finds_batchd_toml_without_an_argument(config_file: Path) -> None:
    """The command looks in the current directory.

    The printed file is valid except for its data.
    """
    assert run("check").exit_code == 0
    config_file.write_text(annotated_toml())
    assert run("check", "--set", "streams.photos.source.path=photos", "--set", "daemon.runtime_dir=run").exit_code == 0


def test_check_reports_every_problem_of_a_valid_tree(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run reports sources, steps, memory and the runtime directory, with lines."""
    rmtree(config_file.parent / "photos")
    (config_file.parent / "list.txt").unlink()
    text = CONFIG.replace('{ op = "layout" } ]', '{ op = "layout" }, { op = "random_flip" } ]')
    config_file.write_text(text.replace('"64MiB"', '"17MiB"').replace('"run"', f'"{"x" * 100}"'))

    code, text = fail(capsys, "check", str(config_file))

    assert code == 2
    assert f"{config_file} has 5 problems:" in text
    assert f"{config_file}:4: daemon.runtime_dir: " in text
    assert f"{config_file}:7: streams.photos.source.path: there is no folder {config_file.parent}/photos" in text
    assert f"{config_file}:16: streams.list.source.path: there is no file {config_file.parent}/list.txt" in text
    assert f"{config_file}:19: streams.list.pipeline[4]: " in text
    assert f"{config_file}:6: streams.photos.memory: need 1.6 MiB for 2 slots of 64 samples, have 1.0 MiB" in text
    assert "= note: The folder. Each sub-folder is a class;" in text


def test_check_has_an_exit_code_for_memory_alone(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script can tell a machine that is too small from a file that is wrong."""
    code, text = fail(capsys, "check", str(config_file), "--set", "streams.list.memory=64KiB")

    assert code == 5
    assert "\nstreams.list.memory: need 304.0 KiB for 2 slots of 8 samples, have 64.0 KiB" in text
    assert "(set by --set streams.list.memory)" in text
    assert 'set memory = "1MiB" in [streams.list]' in text


def test_check_of_a_broken_file_names_the_line(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The daemon reports the same errors at its start."""
    config_file.write_text(CONFIG.replace("batch_size = 64", "batch_size = 0"))

    code, text = fail(capsys, "check", str(config_file))

    assert code == 2
    assert f"{config_file}:8: streams.photos.batch_size: must be greater than or equal to 1, not 0" in text
    assert "= note: Samples per batch, per rank." in text


@pytest.mark.parametrize("setting", ["nonsense", "=3", ""])
def test_settings_without_path_or_value_are_wrong_usage(
    config_file: Path, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    """The message shows the right form."""
    code, text = fail(capsys, "check", str(config_file), "--set", setting)

    assert code == 2
    assert "is not PATH=VALUE, such as streams.photos.batch_size=64" in text


def test_options_of_all_commands_that_take_a_configuration() -> None:
    """The file has a default, and a setting keeps everything after its first equals sign."""

    @as_command("any")
    def command(*, config_file: ConfigFile, overrides: Overrides) -> None:
        click.echo(f"{config_file!r} {overrides}")

    runner = CliRunner()
    assert runner.invoke(command, []).output == "PosixPath('batchd.toml') {}\n"
    assert runner.invoke(command, ["-c", "x", "--set", "a.b = {c=1}", "--set", "d="]).output == (
        "PosixPath('x') {'a.b': '{c=1}', 'd': ''}\n"
    )
