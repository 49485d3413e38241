"""Keys that systemd gives to the daemon: flat copies, which it can read and not change."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchd.cli.main import cli
from batchd.errors import KeysInvalid
from batchd.runtime.directories import SYSTEM_KEYS_DIRECTORY
from batchd.runtime.keys import CredentialKeys, KeyDirectory, missing_keys, open_keys
from batchd_wire.keys import Role

NAMES = ["a", "gpu_7", "x.key"]


@pytest.fixture
def roots(tmp_path: Path) -> KeyDirectory:
    """Root's directory of keys."""
    keys = KeyDirectory(tmp_path / "keys")
    for name in NAMES:
        keys.new(name, frozenset({"photos"}) if name == "a" else None)
    keys.new("pool", frozenset({"photos"}), Role.WORKER)
    return keys


def hand_over(roots: KeyDirectory, given: Path) -> CredentialKeys:
    """Copy the keys as systemd does: names with underscores, readable by the owner alone."""
    given.mkdir(exist_ok=True)
    for file in (file for file in roots.path.rglob("*") if file.is_file()):
        copy = given / "_".join(["keys", *file.relative_to(roots.path).parts])
        shutil.copyfile(file, copy)
        copy.chmod(0o400)
    return CredentialKeys(given)


@pytest.fixture
def credentials(roots: KeyDirectory, tmp_path: Path) -> CredentialKeys:
    """The copies, next to other credentials of the service."""
    keys = hand_over(roots, tmp_path / "given")
    (tmp_path / "given/s3_token.key").write_text("something else")
    return keys


def test_copies_admit_the_same_clients_as_the_keys(roots: KeyDirectory, credentials: CredentialKeys) -> None:
    """Names, streams and keys are the same, and so is the daemon's own key."""
    assert credentials.daemon_key() == roots.daemon_key() is not None
    assert [key.name for key in credentials.trainers.accepted()] == sorted(NAMES)
    assert [key.name for key in credentials.workers.accepted()] == ["pool"]
    for copies, originals in zip(credentials.roles, roots.roles, strict=True):
        assert copies.accepted() == originals.accepted()
        assert copies.damaged() == {}
        for key in originals.accepted():
            assert copies.find(key.public) == key
            assert copies.holds(key.name, key.public)
    assert not credentials.trainers.holds("b", roots.trainers.accepted()[0].public)


@pytest.mark.parametrize(
    "change",
    [lambda keys: keys.new("b"), lambda keys: keys.revoke("a"), lambda keys: keys.make_daemon_key()],
    ids=["new", "revoke", "daemon"],
)
def test_copies_are_not_changed(credentials: CredentialKeys, change: Callable[[KeyDirectory], object]) -> None:
    """The error names the directory of the keys, and the commands to use there."""
    before = sorted(credentials.path.iterdir())
    with pytest.raises(KeysInvalid, match=r"in /etc/batchd/keys and then: systemctl restart batchd"):
        change(credentials)
    assert sorted(credentials.path.iterdir()) == before


def test_a_copy_under_a_wrong_name_admits_no_client(credentials: CredentialKeys) -> None:
    """As in the directory, the file itself has name and role."""
    (credentials.path / "keys_trainers_a.key").rename(credentials.path / "keys_trainers_b.key")
    assert [trainer.name for trainer in credentials.trainers.accepted()] == ["gpu_7", "x.key"]
    assert "which is not that of the file" in credentials.trainers.damaged()[credentials.path / "keys_trainers_b.key"]
    (credentials.path / "keys_workers_pool.key").rename(credentials.path / "keys_trainers_pool.key")
    assert credentials.workers.accepted() == []
    assert [key.name for key in credentials.trainers.accepted()] == ["gpu_7", "x.key"]
    reason = credentials.trainers.damaged()[credentials.path / "keys_trainers_pool.key"]
    assert "is the key of a worker host, but it is among the keys of trainers" in reason


def test_the_group_may_read_and_others_may_not(credentials: CredentialKeys) -> None:
    """Newer versions of systemd grant access by access lists, which appear as the group's bits."""
    secret = credentials.path / "keys_daemon.key"
    secret.chmod(0o440)
    assert credentials.daemon_key() is not None
    secret.chmod(0o444)
    with pytest.raises(KeysInvalid, match="open to others"):
        credentials.daemon_key()


def test_credentials_rank_above_the_users_own_keys_and_below_the_configuration(
    credentials: CredentialKeys, roots: KeyDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are credentials, no other directory is used, even if none of them is a key."""
    monkeypatch.setattr("batchd.runtime.keys.default_keys_dir", lambda: tmp_path / "own")
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert open_keys(None).path == tmp_path / "own"
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials.path))
    assert len(open_keys(None).trainers.accepted()) == len(NAMES)
    assert type(open_keys(roots.path)) is KeyDirectory
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(empty))
    assert open_keys(None).trainers.accepted() == []
    assert open_keys(None).daemon_key() is None


def test_a_service_without_keys_gets_the_command_that_makes_them(tmp_path: Path) -> None:
    """Root makes them, and a restart passes them on."""
    (tmp_path / "given").mkdir()
    lack = missing_keys("10.0.0.5:7070", CredentialKeys(tmp_path / "given").workers)
    assert lack is not None
    assert "as root, `batchd keys new --role worker --name NAME` makes one in /etc/batchd/keys" in lack
    assert "LoadCredential=keys:/etc/batchd/keys" in lack


def test_a_change_of_the_systems_keys_reports_the_needed_restart(
    roots: KeyDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service has copies; in any other directory a change takes effect at once."""
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert Path("/etc/batchd/keys") == SYSTEM_KEYS_DIRECTORY
    elsewhere = CliRunner().invoke(cli, ["keys", "new", "--name", "c", "--keys-dir", str(roots.path)])
    assert elsewhere.exit_code == 0
    assert "systemctl" not in elsewhere.output
    monkeypatch.setattr("batchd.cli.keys.SYSTEM_KEYS_DIRECTORY", roots.path)
    for command in (["new", "--name", "d"], ["revoke", "d"]):
        told = CliRunner().invoke(cli, ["keys", *command, "--keys-dir", str(roots.path)])
        assert told.exit_code == 0
        assert "systemctl restart batchd" in told.output
