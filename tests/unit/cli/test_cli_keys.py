"""`batchd keys` and the messages of `batchd check` about keys, as a user sees them."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchd.cli.main import cli
from batchd.runtime.keys import AcceptedKey, KeyDirectory
from batchd_wire.keys import Role, read_connection_key
from support.commands import fail
from support.configs import WHOLE
from support.images import write_photos
from support.network import free_port


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory; no file of the real user can be reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BATCHD_KEYS_DIR", raising=False)
    monkeypatch.setattr("batchd.runtime.keys.default_keys_dir", lambda: tmp_path / "usual")
    return tmp_path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["keys", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_a_new_key_is_printed_and_its_use_is_explained(folder: Path) -> None:
    """Standard output is the file and nothing else.

    The hint is on standard error and does not include the secret.
    """
    result = run("new", "--name", "gpu-7", "--keys-dir", "keys", "--stream", "photos", "--stream", "val")

    file = folder / "conn.key"
    file.touch(0o600)
    file.write_text(result.stdout)
    key = read_connection_key(file)
    assert KeyDirectory(folder / "keys").trainers.accepted() == [
        AcceptedKey("gpu-7", Role.TRAINER, key.public, frozenset({"photos", "val"}))
    ]
    assert "BATCHD_ADDRESS=tcp://HOST:7070 BATCHD_KEY=conn.key python train.py" in result.stderr
    assert key.secret not in result.stderr


def test_a_new_key_of_a_worker_host_is_explained_for_the_worker_host(folder: Path) -> None:
    """The file names its role to people and programs, and a trainer cannot use it."""
    result = run("new", "--role", "worker", "--name", "pool", "--keys-dir", "keys", "-o", "pool.key")

    key = read_connection_key(folder / "pool.key", Role.WORKER)
    assert [one.public for one in KeyDirectory(folder / "keys").workers.accepted()] == [key.public]
    assert "Copy pool.key to the worker host, and there:" in result.stderr
    assert "    batchd worker tcp://HOST:7072 --key pool.key\n" in result.stderr
    assert "BATCHD_KEY" not in result.stderr + (folder / "pool.key").read_text()
    assert (folder / "pool.key").read_text().startswith("# Lets worker hosts in")


def test_a_new_key_is_written_for_its_owner_alone(folder: Path) -> None:
    """The umask does not matter; afterwards the file can be read without changes."""
    before = os.umask(0)
    try:
        result = run("new", "--name", "a", "--keys-dir", "keys", "-o", "a.key")
    finally:
        os.umask(before)

    assert result.stdout == ""
    assert (folder / "a.key").stat().st_mode & 0o777 == 0o600
    assert KeyDirectory(folder / "keys").trainers.holds("a", read_connection_key(folder / "a.key").public)
    assert "BATCHD_KEY=a.key" in result.stderr


@pytest.mark.parametrize("target", ["a file", "a link", "a link to nothing"])
def test_nothing_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    """The command makes no key in that case."""
    (folder / "precious").write_text("precious")
    if target != "a file":
        (folder / "link").symlink_to("precious" if target == "a link" else "nothing")
    output = "precious" if target == "a file" else "link"

    code, text = fail(capsys, "keys", "new", "--name", "a", "--keys-dir", "keys", "-o", output)
    assert code == 2
    assert f"{output} exists and is not overwritten" in text
    assert (folder / "precious").read_text() == "precious"
    assert not (folder / "nothing").exists()
    assert KeyDirectory(folder / "keys").trainers.accepted() == []


def test_a_key_that_cannot_be_made_leaves_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name is taken, or the folder for the output does not exist."""
    run("new", "--name", "a", "--keys-dir", "keys")

    code, text = fail(capsys, "keys", "new", "--role", "worker", "--name", "a", "--keys-dir", "keys", "-o", "a.key")
    assert (code, "there is a key a already" in text) == (2, True)
    assert not (folder / "a.key").exists()
    code, text = fail(capsys, "keys", "new", "--name", "b", "--keys-dir", "keys", "-o", "none/b.key")
    assert (code, text) == (
        1,
        "batchd: none/b.key cannot be written: there is no folder none; make it, or name another place\n",
    )
    assert [trainer.name for trainer in KeyDirectory(folder / "keys").trainers.accepted()] == ["a"]


def test_a_key_that_cannot_be_written_is_revoked(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No user has its secret, so the key would stay there unused."""
    file = folder / "full.key"

    def full(descriptor: int) -> None:
        if file.exists() and file.stat().st_ino == os.fstat(descriptor).st_ino:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, text = fail(capsys, "keys", "new", "--name", "a", "--keys-dir", "keys", "-o", "full.key")

    told = (
        "full.key cannot be written: No space left on device; make room there, or name another place; no key was made"
    )
    assert (code, text) == (1, f"batchd: {told}\n")
    assert not file.exists()
    assert KeyDirectory(folder / "keys").trainers.accepted() == []


def test_keys_are_listed_for_people_and_for_programs(folder: Path) -> None:
    """The list has names, roles, public keys and streams; the daemon does not keep secrets."""
    assert "no keys in" in run("list", "--keys-dir", "keys").stdout
    keys = KeyDirectory(folder / "keys")
    one, other = keys.new("gpu-7", frozenset({"val", "photos"})), keys.new("b", role=Role.WORKER)

    assert run("list", "--keys-dir", "keys").stdout == (
        f"b      worker   {other.public}  every stream\ngpu-7  trainer  {one.public}  photos, val\n"
    )
    assert json.loads(run("list", "--json", "--keys-dir", "keys").stdout) == [
        {"name": "b", "role": "worker", "public": other.public, "streams": None},
        {"name": "gpu-7", "role": "trainer", "public": one.public, "streams": ["photos", "val"]},
    ]


@pytest.mark.parametrize("role", Role)
def test_a_damaged_file_is_reported_next_to_the_list(folder: Path, role: Role) -> None:
    """Programs can still read the list; the damaged key can be revoked."""
    KeyDirectory(folder / "keys").new("a", role=role)
    (folder / f"keys/{role}s/a.key").write_text("")

    result = run("list", "--json", "--keys-dir", "keys")
    assert json.loads(result.stdout) == []
    assert "this key is invalid" in result.stderr
    assert "a.key lacks name, public" in result.stderr
    run("revoke", "a", "--keys-dir", "keys")
    assert run("list", "--json", "--keys-dir", "keys").stderr == ""


@pytest.mark.parametrize("role", Role)
def test_a_key_is_revoked_by_its_name(folder: Path, capsys: pytest.CaptureFixture[str], role: Role) -> None:
    """Its role does not matter. The error for an unknown name lists the known ones."""
    keys = KeyDirectory(folder / "keys")
    key = keys.new("a", role=role)
    keys.new("b")

    assert fail(capsys, "keys", "revoke", "c", "--keys-dir", "keys") == (
        2,
        f"batchd: {keys.path} has no key 'c'; known here: a, b\n",
    )
    assert run("revoke", "a", "--keys-dir", "keys").stdout == f"revoked a in {keys.path}\n"
    assert keys.of(role).find(key.public) is None
    assert [key.name for key in keys.trainers.accepted()] == ["b"]


def test_the_directory_comes_from_the_most_specific_setting(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is option, environment, configuration (batchd.toml by default), default path.

    Two options at once are an error.
    """

    def place(*arguments: str) -> str:
        return run("list", *arguments).stdout.split()[3].rstrip(";")

    assert place() == str(folder / "usual")
    other = folder / "other.toml"
    other.write_text(WHOLE.replace("[daemon]", '[daemon]\nkeys_dir = "from-other"'))
    (folder / "batchd.toml").write_text(WHOLE.replace("[daemon]", '[daemon]\nkeys_dir = "from-file"'))
    assert place() == str(folder / "from-file")
    assert place("--config", "other.toml") == str(folder / "from-other")
    monkeypatch.setenv("BATCHD_KEYS_DIR", "from-environment")
    assert place() == place("-c", "other.toml") == str(folder / "from-environment")
    (folder / "batchd.toml").unlink()
    assert place() == str(folder / "from-environment")
    assert place("--keys-dir", "from-option") == str(folder / "from-option")
    code, text = fail(capsys, "keys", "list", "--keys-dir", "x", "--config", "other.toml")
    assert (code, "give one of them" in text) == (2, True)


def test_a_directory_that_cannot_be_used_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the remedy."""
    (folder / "file").write_text("")

    code, text = fail(capsys, "keys", "new", "--name", "a", "--keys-dir", "file")
    assert code == 1
    assert text.startswith(f"batchd: {folder}/file cannot be used: Not a directory; keys are for the user")


def test_check_says_that_tcp_needs_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The problem has line and command; with keys, or on loopback, the file is valid."""
    write_photos(folder / "photos", {".": 32})
    (folder / "run").mkdir()
    tcp = f"0.0.0.0:{free_port()}"
    text = WHOLE.replace("[daemon]", f'[daemon]\nruntime_dir = "run"\ntcp = "{tcp}"\nkeys_dir = "keys"')
    (folder / "batchd.toml").write_text(text)

    code, said = fail(capsys, "check")
    assert code == 2
    assert f"batchd.toml:3: daemon.tcp: {tcp} can be reached from other hosts" in said
    assert f"`batchd keys new --name NAME --keys-dir {folder}/keys` makes one" in said
    assert CliRunner().invoke(cli, ["check", "--set", f"daemon.tcp=localhost:{free_port()}"]).exit_code == 0
    run("new", "--name", "a")
    assert CliRunner().invoke(cli, ["check"]).exit_code == 0
