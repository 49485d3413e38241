"""Key files: writing, reading back, and no access through anything unusual on disk."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from zmq.utils import z85

from batchd.errors import BatchdError, ConfigInvalid, ExitCode, KeysInvalid
from batchd.runtime.addresses import is_loopback, parse_tcp, tcp_endpoint
from batchd.runtime.directories import default_keys_dir
from batchd.runtime.keys import AcceptedKey, KeyDirectory, missing_keys
from batchd_wire.keys import (
    KEY_FILE_BYTES_MAX,
    ConnectionKey,
    Role,
    connection_file_text,
    is_key_text,
    read_connection_key,
    read_key_table,
)
from support.forked import Forked

STRANGER = 54_321
PUBLIC, SECRET = (key.decode() for key in zmq.curve_keypair())
KEY = ConnectionKey("gpu-7", PUBLIC, PUBLIC, SECRET)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def keys(tmp_path: Path) -> KeyDirectory:
    """Name a directory that does not exist yet, two levels deep."""
    return KeyDirectory(tmp_path / "batchd" / "keys")


@pytest.fixture
def connection_file(tmp_path: Path) -> Path:
    """Make a valid connection file."""
    file = tmp_path / "conn.key"
    file.write_text(connection_file_text(KEY))
    file.chmod(0o600)
    return file


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return path.lstat().st_mode & 0o777


def settle(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an hour pass for the reader of ``path``, so that it may cache the file."""
    later = path.stat().st_ctime_ns + 3600 * 10**9
    monkeypatch.setattr("batchd.runtime.keys.time_ns", lambda: later)


# --- the text of a key ----------------------------------------------------------------------------


@given(st.binary(min_size=32, max_size=32))
def test_every_32_bytes_are_a_key(content: bytes) -> None:
    """Every key that ZeroMQ writes is valid for batchd."""
    assert is_key_text(z85.encode(content).decode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        PUBLIC[:-1],
        PUBLIC + "0",
        PUBLIC[:-1] + '"',
        PUBLIC[:-1] + "\n",
        PUBLIC[:-1] + "٣",
        "#" * 40,
        PUBLIC[:-5] + "%nSc1",
    ],
    ids=[
        "nothing",
        "too short",
        "too long",
        "no digit",
        "a line",
        "a foreign digit",
        "no key of 32 bytes",
        "too large",
    ],
)
def test_other_texts_are_no_keys(text: str) -> None:
    """A wrong length, characters outside Z85 and groups above four bytes are rejected."""
    assert not is_key_text(text)


def test_the_largest_group_is_the_last_one_taken() -> None:
    """The largest group is four bytes of ones; the next text would wrap round to zero."""
    assert is_key_text(z85.encode(b"\xff" * 32).decode())
    assert z85.encode(b"\xff" * 4) == b"%nSc0"


# --- the connection file --------------------------------------------------------------------------


def test_a_connection_file_is_read_as_it_was_written(connection_file: Path) -> None:
    """The connection file is read back unchanged, and no repr shows the secret."""
    assert read_connection_key(connection_file) == KEY
    assert SECRET not in repr(KEY)
    assert connection_file.read_text().startswith("# ")


def test_a_connection_file_of_another_role_is_refused_with_the_command_that_helps(connection_file: Path) -> None:
    """A trainer's file names no role, and a worker host's does; the error has the right command."""
    assert "role" not in connection_file.read_text()
    with pytest.raises(
        ValueError, match=r"key of a trainer; a worker host needs .*`batchd keys new --role worker --name"
    ):
        read_connection_key(connection_file, Role.WORKER)
    pool = replace(KEY, role=Role.WORKER)
    connection_file.write_text(connection_file_text(pool))
    assert read_connection_key(connection_file, Role.WORKER) == pool
    with pytest.raises(ValueError, match=r"key of a worker host; a trainer needs .*`batchd keys new --name NAME`"):
        read_connection_key(connection_file)


@pytest.mark.parametrize("role", Role)
def test_a_connection_file_cut_anywhere_is_refused(connection_file: Path, role: Role) -> None:
    """Only the end of the last line may be missing."""
    connection_file.write_text(connection_file_text(replace(KEY, role=role)))
    whole = connection_file.read_bytes()
    for length in range(len(whole) - 1):
        connection_file.write_bytes(whole[:length])
        for expected in Role:
            with pytest.raises(ValueError, match=str(connection_file)):
                read_connection_key(connection_file, expected)
    connection_file.write_bytes(whole[:-1])
    assert read_connection_key(connection_file, role) == replace(KEY, role=role)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("daemon =", "deamon ="), "lacks daemon"),
        (lambda text: text + "more = 1\n", "1 unknown keys; known here: name, daemon, public, secret, role"),
        (lambda text: text + 'role = "trainers"\n', "role is none of trainer, worker"),
        (lambda text: text + "role = []\n", "role is none of trainer, worker"),
        (lambda text: text.replace(SECRET, SECRET[:-1]), "secret is not a key of 40 Z85 characters"),
        (lambda text: text.replace(f'"{SECRET}"', "40"), "secret is not a key of 40 Z85 characters"),
        (lambda text: text.replace("gpu-7", "../x"), "name is wrong"),
        (lambda text: text.replace('"gpu-7"', "7"), "name is wrong"),
        (lambda text: text.replace("secret = ", f"{SECRET} "), "is not TOML"),
        (lambda _text: "a = " + "[" * 20_000, "is not TOML"),
        (lambda text: text + "\udcff", "is not UTF-8"),
        (lambda text: text + "#" * KEY_FILE_BYTES_MAX, "is longer than 65536 bytes"),
    ],
)
def test_a_wrong_connection_file_is_named_but_not_quoted(
    connection_file: Path, change: Callable[[str], str], message: str
) -> None:
    """The message names the file and the problem, and shows no secret."""
    connection_file.write_bytes(change(connection_file.read_text()).encode(errors="surrogateescape"))

    with pytest.raises(ValueError, match=message) as caught:
        read_connection_key(connection_file)
    assert str(connection_file) in str(caught.value)
    assert SECRET[:-1] not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o601, 0o644, 0o666])
def test_a_connection_file_that_others_can_open_is_refused(connection_file: Path, mode: int) -> None:
    """The error contains the command that closes the file."""
    connection_file.chmod(mode)

    with pytest.raises(ValueError, match=f"mode 0{mode:o}.*chmod 600 {connection_file}"):
        read_connection_key(connection_file)


@as_root
@pytest.mark.parametrize(
    ("mode", "is_read"), [(0o440, True), (0o640, True), (0o600, True), (0o644, False), (0o660, False)]
)
def test_a_file_of_roots_may_be_open_to_a_group(connection_file: Path, monkeypatch, mode: int, is_read: bool) -> None:
    """Kubernetes mounts secrets like this for a container's user; a user's file must be closed."""
    connection_file.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    if is_read:
        assert read_connection_key(connection_file) == KEY
        os.chown(connection_file, 1000, -1)
    if not is_read or mode != 0o600:
        with pytest.raises(ValueError, match=f"mode 0{mode:o}"):
            read_connection_key(connection_file)


def test_what_is_no_plain_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """A pipe, a directory and an endless device are rejected; a missing file is an OSError."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match=f"{path} is not a regular file"):
            read_connection_key(path)
    with pytest.raises(FileNotFoundError):
        read_connection_key(tmp_path / "none")


def test_a_connection_file_may_be_a_link(connection_file: Path) -> None:
    """Containers mount secrets as links; the mode of the target counts."""
    link = connection_file.with_name("link")
    link.symlink_to(connection_file)

    assert read_connection_key(link) == KEY
    connection_file.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        read_connection_key(link)


# --- the directory --------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_files_and_directories_have_their_modes_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    """No other user can read a secret at any moment, and no parent is writable for all."""
    keys = KeyDirectory(tmp_path / "batchd" / "keys")
    with umask(mask):
        keys.new("a", None)
        keys.new("pool", role=Role.WORKER)

    assert {mode_of(keys.path / folder) for folder in ("", "trainers", "workers")} == {0o700}
    assert {mode_of(keys.path / file) for file in ("daemon.key", "trainers/a.key", "workers/pool.key")} == {0o600}
    assert mode_of(keys.path.parent) == 0o755 & ~mask


def test_a_file_has_its_mode_even_where_the_umask_takes_the_owners(keys: KeyDirectory) -> None:
    """The new file can be read even if the umask removes the owner's permissions."""
    keys.path.mkdir(parents=True, mode=0o700)
    with umask(0o777):
        keys.new("a")

    assert {mode_of(path) for path in keys.path.rglob("*") if path.is_file()} == {0o600}


@pytest.mark.parametrize("role", Role)
def test_a_new_key_is_found_and_fits_its_connection_file(keys: KeyDirectory, role: Role) -> None:
    """The new key matches its connection file, and the holder's secret is not on disk."""
    key = keys.new("gpu-7", frozenset({"photos", "val"}), role)

    assert zmq.curve_public(key.secret.encode()).decode() == key.public
    assert keys.daemon_key() is not None
    assert key.daemon == keys.daemon_key()[0]
    assert key.role is role
    assert keys.of(role).find(key.public) == AcceptedKey("gpu-7", role, key.public, frozenset({"photos", "val"}))
    assert keys.of(role).holds("gpu-7", key.public)
    assert all(key.secret not in path.read_text() for path in keys.path.rglob("*") if path.is_file())


def test_a_key_of_one_role_is_none_of_the_other(keys: KeyDirectory) -> None:
    """The error for a key of the other role names that role and the command that helps."""
    trainer, worker = keys.new("gpu-7"), keys.new("pool", role=Role.WORKER)

    for mine, its, other, others in (
        (keys.trainers, trainer, worker, "pool"),
        (keys.workers, worker, trainer, "gpu-7"),
    ):
        assert [key.public for key in mine.accepted()] == [its.public]
        assert mine.find(other.public) is None
        assert not mine.holds(others, other.public)
        assert mine.other_role(its.public) == mine.other_role(PUBLIC) == ""
    assert keys.trainers.other_role(worker.public) == (
        "the key 'pool' is a worker host's: worker_address of [daemon] admits it; "
        f"here a trainer's is needed: `batchd keys new --name NAME --keys-dir {keys.path}` makes one"
    )
    assert keys.workers.other_role(trainer.public) == (
        "the key 'gpu-7' is a trainer's: tcp of [daemon] admits it; "
        f"here a worker host's is needed: `batchd keys new --role worker --name NAME --keys-dir {keys.path}` makes one"
    )


@pytest.mark.parametrize(("role", "folder"), [(Role.TRAINER, "workers"), (Role.WORKER, "trainers")])
@pytest.mark.parametrize("way", ["moved", "copied"])
def test_a_file_in_the_folder_of_the_other_role_admits_no_peer(
    keys: KeyDirectory, role: Role, folder: str, way: str
) -> None:
    """A person or another tool can put it there; the file names its role, so it is rejected."""
    keys.new("t")
    keys.new("w", role=Role.WORKER)
    key = keys.new("a", role=role)
    file = keys.path / f"{role}s/a.key"
    copy = keys.path / folder / "a.key"
    copy.write_bytes(file.read_bytes())
    copy.chmod(0o600)
    if way == "moved":
        file.unlink()

    other = keys.trainers if role is Role.WORKER else keys.workers
    assert other.find(key.public) is None
    assert not other.holds("a", key.public)
    assert f"is the key of a {role.holder}, but it is among the keys of" in other.damaged()[copy]
    assert keys.of(role).holds("a", key.public) is (way == "copied")
    keys.revoke("a")
    assert not file.exists()
    assert not copy.exists()


@pytest.mark.parametrize("folder", ["trainers", "workers"])
def test_a_folder_that_cannot_be_used_does_not_block_the_other_role(keys: KeyDirectory, folder: str) -> None:
    """Keys in the unreadable folder admit no peer, and no key is made or revoked meanwhile.

    The name of a new key might exist in that folder.
    """
    made = {role: keys.new(role.value, role=role) for role in Role}
    (keys.path / folder).chmod(0o777)

    for role, key in made.items():
        is_there = folder != f"{role}s"
        assert keys.of(role).holds(role.value, key.public) is is_there
        if is_there:
            assert keys.of(role).find(key.public) is not None
        else:
            with pytest.raises(KeysInvalid, match="chmod 700"):
                keys.of(role).find(key.public)
        for change in (partial(keys.new, "b", role=role), partial(keys.revoke, role.value)):
            with pytest.raises(KeysInvalid, match="chmod 700"):
                change()


def test_the_daemons_key_stays_when_trainers_come(keys: KeyDirectory) -> None:
    """A new key for the daemon would invalidate every connection file."""
    made = keys.make_daemon_key()

    first, second = keys.new("a"), keys.new("b")
    assert keys.make_daemon_key() == keys.daemon_key() == made
    assert first.daemon == second.daemon == made[0]
    assert keys.trainers.accepted() == [
        AcceptedKey("a", Role.TRAINER, first.public, None),
        AcceptedKey("b", Role.TRAINER, second.public, None),
    ]


def test_a_directory_that_is_not_there_has_no_keys(keys: KeyDirectory) -> None:
    """Reading the keys of a missing directory does not create it."""
    assert keys.daemon_key() is None
    assert keys.trainers.accepted() == []
    assert keys.trainers.find(PUBLIC) is None
    assert not keys.trainers.holds("a", PUBLIC)
    assert not keys.path.exists()


@pytest.mark.parametrize("first", Role)
@pytest.mark.parametrize("second", Role)
def test_a_name_is_given_once(keys: KeyDirectory, first: Role, second: Role) -> None:
    """A name is unique across the roles, and a second use leaves the first key unchanged."""
    key = keys.new("a", role=first)

    with pytest.raises(KeysInvalid, match=rf"there is a key a already.*{first}s/a\.key") as caught:
        keys.new("a", frozenset({"photos"}), second)
    assert caught.value.exit_code == ExitCode.USAGE
    assert [one for keys_of in keys.roles for one in keys_of.accepted()] == [AcceptedKey("a", first, key.public, None)]


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "-a", "_a", ".a", "a\n", "a b", "ä", "a" * 65, "a\0"])
def test_what_cannot_be_a_name_makes_revokes_and_finds_nothing(keys: KeyDirectory, name: str) -> None:
    """A path in a name never leads out of the directory of the keys."""
    with pytest.raises(KeysInvalid, match="cannot name a key"):
        keys.new(name)
    assert not keys.path.exists()
    keys.make_daemon_key()
    with pytest.raises(KeysInvalid, match="has no key"):
        keys.revoke(name)
    assert not keys.trainers.holds(name, PUBLIC)
    assert (keys.path / "daemon.key").exists()


@pytest.mark.parametrize(
    "streams", [frozenset(), frozenset({""}), frozenset({"a b"}), frozenset({"a\n"}), frozenset({"a" * 65})]
)
def test_a_key_is_for_streams_that_can_be(keys: KeyDirectory, streams: frozenset[str]) -> None:
    """A stream name that is not valid is rejected when the key is made."""
    with pytest.raises(KeysInvalid, match="stream"):
        keys.new("a", streams)


@pytest.mark.parametrize("role", Role)
def test_a_revoked_key_is_gone_at_once_and_its_name_is_free(
    keys: KeyDirectory, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    """Revoking takes effect at once, also for a reader that cached the key long ago."""
    reader = KeyDirectory(keys.path).of(role)
    old, other = keys.new("a", role=role), keys.new("b", role=role)
    settle(keys.path / f"{role}s/a.key", monkeypatch)
    assert reader.find(old.public) == reader.find(old.public) == AcceptedKey("a", role, old.public, None)

    keys.revoke("a")
    assert reader.find(old.public) is None
    assert not reader.holds("a", old.public)
    new = keys.new("a", role=role)
    assert reader.find(old.public) is None
    assert reader.find(new.public) == AcceptedKey("a", role, new.public, None)
    assert reader.holds("b", other.public)


def test_an_unknown_name_is_not_revoked_and_the_known_ones_are_told(keys: KeyDirectory) -> None:
    """The error lists the known names, so the user can correct a mistyped one."""
    keys.new("b")
    keys.new("a", role=Role.WORKER)

    with pytest.raises(KeysInvalid, match="has no key 'c'; known here: a, b"):
        keys.revoke("c")
    keys.revoke("a")
    keys.revoke("b")
    with pytest.raises(KeysInvalid, match="it has none"):
        keys.revoke("a")


def test_a_file_is_read_once_while_it_stays_the_same(keys: KeyDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many handshakes do not read all files again, but a file that changed just now is read."""
    reads: list[Path] = []
    real = read_key_table

    def counting(descriptor: int, path: Path, refused_mode: int) -> object:
        reads.append(path)
        return real(descriptor, path, refused_mode)

    monkeypatch.setattr("batchd_wire.keys.read_key_table", counting)
    key = keys.new("a")
    reads.clear()
    file = keys.path / "trainers/a.key"

    keys.trainers.find(key.public)
    keys.trainers.find(key.public)
    assert reads == [file, file]
    settle(file, monkeypatch)
    keys.trainers.find(key.public)
    keys.trainers.find(key.public)
    assert keys.trainers.holds("a", key.public)
    assert reads == [file] * 3


def test_a_change_in_place_is_seen(keys: KeyDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change is seen even with the same name, inode, size and modification time."""
    key = keys.new("a")
    file = keys.path / "trainers/a.key"
    settle(file, monkeypatch)
    assert keys.trainers.find(key.public) is not None
    about = file.stat()

    changed = file.read_text().replace(key.public, PUBLIC)
    while file.stat().st_ctime_ns == about.st_ctime_ns:
        file.write_text(changed)
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))

    assert file.stat().st_mtime_ns == about.st_mtime_ns
    assert keys.trainers.find(key.public) is None
    assert keys.trainers.find(PUBLIC) == AcceptedKey("a", Role.TRAINER, PUBLIC, None)


# --- damage ---------------------------------------------------------------------------------------


def test_a_daemons_key_cut_anywhere_is_refused(keys: KeyDirectory) -> None:
    """A truncated key of the daemon is an error, and it is never replaced by a new key."""
    made = keys.make_daemon_key()
    file = keys.path / "daemon.key"
    whole = file.read_bytes()
    for length in range(len(whole) - 1):
        file.write_bytes(whole[:length])
        for ask in (keys.daemon_key, keys.make_daemon_key, lambda: keys.new("a")):
            with pytest.raises(KeysInvalid, match=str(file)):
                ask()
    file.write_bytes(whole[:-1])
    assert keys.daemon_key() == made
    assert keys.trainers.accepted() == []


def test_a_daemons_key_that_does_not_fit_itself_is_refused(keys: KeyDirectory) -> None:
    """A file with halves of two keys is rejected with an error, because no peer could connect."""
    public, _secret = keys.make_daemon_key()
    file = keys.path / "daemon.key"
    file.write_text(file.read_text().replace(public, PUBLIC))

    with pytest.raises(KeysInvalid, match="does not belong"):
        keys.daemon_key()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_daemons_key_that_others_can_open_is_refused(keys: KeyDirectory, mode: int) -> None:
    """The key is rejected, because another user may have read it."""
    keys.make_daemon_key()
    (keys.path / "daemon.key").chmod(mode)

    with pytest.raises(KeysInvalid, match="chmod 600"):
        keys.daemon_key()


@pytest.mark.parametrize("role", Role)
def test_a_peers_file_cut_anywhere_admits_no_peer(keys: KeyDirectory, role: Role) -> None:
    """A truncated file admits no peer; it must not grant more streams or another role."""
    key = keys.new("a", frozenset({"photos"}), role)
    mine, file = keys.of(role), keys.path / f"{role}s/a.key"
    whole = file.read_bytes()
    for length in range(len(whole) - 1):
        file.write_bytes(whole[:length])
        assert [one.find(key.public) for one in keys.roles] == [None, None]
        assert not any(one.holds("a", key.public) for one in keys.roles)
        assert list(mine.damaged()) == [file]
    file.write_bytes(whole[:-1])
    assert mine.find(key.public) == AcceptedKey("a", role, key.public, frozenset({"photos"}))


def _as_other_name(file: Path) -> None:
    file.rename(file.with_name("other.key"))


def _as_link(file: Path) -> None:
    file.rename(file.with_suffix(".real"))
    file.symlink_to(file.with_suffix(".real"))


def _as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def _as_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _with(old: str, new: str) -> Callable[[Path], None]:
    return lambda file: (file.write_text(file.read_text().replace(old, new)), None)[1]


@pytest.mark.parametrize(
    "damage",
    [
        _as_other_name,
        _as_link,
        _as_pipe,
        _as_directory,
        lambda file: file.chmod(0o620),
        lambda file: file.chmod(0o602),
        lambda file: file.write_bytes(bytes(file.stat().st_size)),
        lambda file: file.write_text(file.read_text() + "#" * KEY_FILE_BYTES_MAX),
        _with("streams", "strems"),
        _with('["photos"]', '"photos"'),
        _with('["photos"]', "[1]"),
        _with('["photos"]', '["a b"]'),
        _with('name = "a"', 'name = "b"'),
        _with('name = "a"', 'name = ["a"]'),
        _with('name = "a"', 'name = "a"\nrole = "daemon"'),
    ],
)
@pytest.mark.parametrize("role", Role)
def test_a_damaged_file_admits_no_peer_and_is_logged_once(
    keys: KeyDirectory, damage: Callable[[Path], None], role: Role
) -> None:
    """The log has one line however often a peer tries it, and other peers still connect."""
    key, other = keys.new("a", frozenset({"photos"}), role), keys.new("z", role=role)
    damage(keys.path / f"{role}s/a.key")
    mine = keys.of(role)

    with capture_logs() as lines:
        assert [mine.find(key.public) for _ in range(3)] == [None] * 3
        assert not mine.holds("a", key.public)
    assert [line["event"] for line in lines if line["path"].endswith(("a.key", "other.key"))][:1] == [
        "key file is invalid"
    ]
    assert len({line["path"] for line in lines}) == len(lines)
    assert mine.find(other.public) == AcceptedKey("z", role, other.public, None)
    assert len(mine.damaged()) == 1


def test_other_files_in_the_folder_are_not_keys(keys: KeyDirectory) -> None:
    """Files left by an editor or by a killed command are not keys."""
    key = keys.new("a")
    text = (keys.path / "trainers/a.key").read_text()
    for name in (".new", ".a.key", "a.key~", "a.key.bak"):
        (keys.path / "trainers" / name).write_text(text)

    assert keys.trainers.accepted() == [AcceptedKey("a", Role.TRAINER, key.public, None)]
    assert keys.trainers.damaged() == {}
    keys.new("b")
    assert not (keys.path / "trainers/.new").exists()


# --- links and strangers --------------------------------------------------------------------------


@pytest.fixture
def folders(keys: KeyDirectory) -> KeyDirectory:
    """List the directories of each role, without any key."""
    for folder in (keys.path, keys.path / "trainers"):
        folder.mkdir(mode=0o700, parents=True)
    return keys


@pytest.mark.parametrize("target", ["victim", "nothing"])
@pytest.mark.parametrize("name", ["daemon.key", "trainers/a.key", ".lock"])
def test_a_link_in_place_of_a_file_is_refused(folders: KeyDirectory, tmp_path: Path, name: str, target: str) -> None:
    """No file is written to the target of the link, and the error names the directory."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folders.path / name).symlink_to(tmp_path / target)

    with pytest.raises(BatchdError, match=str(folders.path)):
        folders.new("a")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()
    assert (folders.path / name).is_symlink()


@pytest.mark.parametrize("target", ["victim", "nothing"])
@pytest.mark.parametrize("name", [".new", "trainers/.new"])
def test_a_link_in_place_of_a_file_that_is_being_written_is_removed(
    folders: KeyDirectory, tmp_path: Path, name: str, target: str
) -> None:
    """The target of the link stays unchanged."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folders.path / name).symlink_to(tmp_path / target)

    key = folders.new("a")
    assert folders.trainers.holds("a", key.public)
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batchd", "victim"]
    assert not any(path.is_symlink() for path in folders.path.rglob("*"))


@pytest.mark.parametrize("role", Role)
def test_a_link_in_place_of_a_roles_folder_is_refused(keys: KeyDirectory, tmp_path: Path, role: Role) -> None:
    """The folder behind the link is neither written to nor read."""
    elsewhere = KeyDirectory(tmp_path / "elsewhere")
    key = elsewhere.new("a", role=role)
    keys.path.mkdir(mode=0o700, parents=True)
    (keys.path / f"{role}s").symlink_to(elsewhere.path / f"{role}s")

    for ask in (lambda: keys.of(role).find(key.public), lambda: keys.new("b", role=role), lambda: keys.revoke("a")):
        with pytest.raises(BatchdError, match=f"{keys.path}/{role}s cannot be used: Not a directory"):
            ask()
    assert not keys.of(role).holds("a", key.public)
    assert elsewhere.of(role).accepted() == [AcceptedKey("a", role, key.public, None)]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
@pytest.mark.parametrize("folder", ["", "trainers"])
def test_a_directory_that_others_may_write_to_is_refused(keys: KeyDirectory, folder: str, mode: int) -> None:
    """Other users could add a key to such a directory, so it is rejected."""
    key = keys.new("a")
    (keys.path / folder).chmod(mode)

    for ask in (
        keys.trainers.accepted,
        lambda: keys.trainers.find(key.public),
        lambda: keys.new("b"),
        lambda: keys.revoke("a"),
    ):
        with pytest.raises(KeysInvalid, match="chmod 700"):
            ask()
    assert not keys.trainers.holds("a", key.public)


def test_a_directory_that_is_none_is_an_error_that_names_it(tmp_path: Path) -> None:
    """A file or a broken link in place of the directory gives an error that names it."""
    (tmp_path / "file").write_text("")
    keys = KeyDirectory(tmp_path / "file")
    for ask in (
        keys.trainers.accepted,
        keys.daemon_key,
        keys.make_daemon_key,
        lambda: keys.trainers.find(PUBLIC),
        lambda: keys.revoke("a"),
    ):
        with pytest.raises(BatchdError, match=f"{tmp_path}/file cannot be used: Not a directory"):
            ask()
    (tmp_path / "link").symlink_to(tmp_path / "none")
    with pytest.raises(BatchdError, match="leads nowhere"):
        KeyDirectory(tmp_path / "link").new("a")
    assert not (tmp_path / "none").exists()


@as_root
def test_a_directory_of_another_user_cannot_be_used(keys: KeyDirectory) -> None:
    """The message names the user that can use the directory."""
    key = keys.new("a")
    os.seteuid(STRANGER)
    try:
        for ask in (
            keys.trainers.accepted,
            keys.daemon_key,
            lambda: keys.trainers.find(key.public),
            lambda: keys.new("b"),
        ):
            with pytest.raises(
                BatchdError, match=r"cannot be used: Permission denied; .*the user that the daemon runs as"
            ):
                ask()
        assert not keys.trainers.holds("a", key.public)
    finally:
        os.seteuid(0)


@as_root
def test_a_file_of_another_user_is_skipped() -> None:
    """The file is skipped, and the keys of the other files still work."""
    with TemporaryDirectory() as folder:
        keys = KeyDirectory(Path(folder))
        locked, other = keys.new("a"), keys.new("b")
        for path in (keys.path, keys.path / "trainers", keys.path / "trainers/b.key"):
            os.chown(path, STRANGER, -1)
        os.seteuid(STRANGER)
        try:
            assert keys.trainers.find(locked.public) is None
            assert keys.trainers.find(other.public) is not None
            assert "Permission denied" in keys.trainers.damaged()[keys.path / "trainers/a.key"]
        finally:
            os.seteuid(0)


def test_many_commands_at_once_make_each_key_once(keys: KeyDirectory) -> None:
    """Four processes make each of two names: one of them succeeds, and all share one daemon key."""

    def make(name: str) -> int:
        try:
            key = KeyDirectory(keys.path).new(name)
        except BatchdError as error:
            sys.stdout.write(f"refused: {error}")
        else:
            sys.stdout.write(f"{key.daemon} {key.public}")
        return 0

    processes = [Forked(partial(make, name), [], b"") for name in "aabbaabb"]
    told = []
    for process in processes:
        with process.stdout as output:
            told.append(output.read().decode())
        assert process.wait() == 0

    made = sorted(text.split() for text in told if not text.startswith("refused"))
    daemon = keys.daemon_key()
    assert daemon is not None
    assert made == sorted([daemon[0], trainer.public] for trainer in keys.trainers.accepted())
    assert len(made) == 2
    assert sum("there is a key" in text for text in told) == 6


# --- the configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts", "endpoint", "loopback"),
    [
        ("10.0.0.5:7070", ("10.0.0.5", 7070), "tcp://10.0.0.5:7070", False),
        ("127.0.0.1:1", ("127.0.0.1", 1), "tcp://127.0.0.1:1", True),
        ("127.9.8.7:65535", ("127.9.8.7", 65535), "tcp://127.9.8.7:65535", True),
        ("128.0.0.1:7070", ("128.0.0.1", 7070), "tcp://128.0.0.1:7070", False),
        ("0.0.0.0:7070", ("0.0.0.0", 7070), "tcp://0.0.0.0:7070", False),
        ("*:7070", ("*", 7070), "tcp://*:7070", False),
        ("[::1]:7070", ("::1", 7070), "tcp://[::1]:7070", True),
        ("[0:0:0:0:0:0:0:1]:7070", ("0:0:0:0:0:0:0:1", 7070), "tcp://[0:0:0:0:0:0:0:1]:7070", True),
        ("[::]:7070", ("::", 7070), "tcp://[::]:7070", False),
        ("[::ffff:127.0.0.1]:7070", ("::ffff:127.0.0.1", 7070), "tcp://[::ffff:127.0.0.1]:7070", False),
        ("localhost:7070", ("localhost", 7070), "tcp://127.0.0.1:7070", True),
        ("LocalHost:7070", ("LocalHost", 7070), "tcp://127.0.0.1:7070", True),
        ("localhost.example:7070", ("localhost.example", 7070), "tcp://localhost.example:7070", False),
        ("eth0:7070", ("eth0", 7070), "tcp://eth0:7070", False),
    ],
)
def test_hosts_and_ports_are_read(text: str, parts: tuple[str, int], endpoint: str, loopback: bool) -> None:
    """An address has host and port, is loopback or not, and has an endpoint for ZeroMQ."""
    assert parse_tcp(text) == parts
    assert tcp_endpoint(text) == endpoint
    assert is_loopback(parts[0]) is loopback


@pytest.mark.parametrize("text", ["127.0.0.1:0", "localhost:0", "", ":7070", "host", "host:", "host:70000", "host:-1"])
@pytest.mark.parametrize("read", [parse_tcp, tcp_endpoint])
def test_what_is_no_host_and_port_is_refused(text: str, read: Callable[[str], object]) -> None:
    """The error shows an example of a valid address."""
    with pytest.raises(ValueError, match=r"write for example .10\.0\.0\.5:7070"):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "tcp://h:1",
            "::1:1",
            "[::1]",
            "[::1",
            "[h]:1",
            "[1.2.3.4]:1",
            "1.2.3:1",
            "127.1:1",
            "1.2.3.400:1",
            "01.2.3.4:1",
        ),
        *("a b:1", "h:1\n", "h:٣", "h:+1", "h:0x1", "h:01", "h/x:1", "h;i:1", "-h:1", "h:1:2", "[::1]x:1", "**:1"),
    ],
)
def test_odd_hosts_and_ports_are_refused(text: str) -> None:
    """Text that could have another meaning for ZeroMQ is rejected."""
    with pytest.raises(ValueError, match="write for example"):
        parse_tcp(text)


@pytest.mark.parametrize("text", ["127.0.0.1", "localhost", "[::1]"])
def test_zeromq_binds_the_endpoints_that_are_made(text: str) -> None:
    """The endpoints are numeric, because ZeroMQ would not bind the name localhost."""
    family = socket.AF_INET6 if text.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((text.strip("[]"), 0))
            port = probe.getsockname()[1]
    except OSError as error:
        pytest.skip(f"this machine has no {text}: {error}")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.ipv6 = family == socket.AF_INET6
        router.bind(tcp_endpoint(f"{text}:{port}"))
        assert router.last_endpoint.decode().endswith(f":{port}")


def test_the_usual_directory_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root uses the system's directory; a relative $XDG_CONFIG_HOME is ignored, as specified."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_keys_dir() == Path("/etc/batchd/keys")
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/config")
    assert default_keys_dir() == Path("/config/batchd/keys")
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    assert default_keys_dir() == Path("/home/x/.config/batchd/keys")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "none")
    with pytest.raises(ConfigInvalid, match="set keys_dir"):
        default_keys_dir()


@pytest.mark.parametrize(
    ("role", "holder", "command"),
    [
        (Role.TRAINER, "a trainer", "batchd keys new --name NAME"),
        (Role.WORKER, "a worker host", "batchd keys new --role worker --name NAME"),
    ],
)
def test_beyond_loopback_an_address_needs_the_daemons_key_and_one_of_its_role(
    keys: KeyDirectory, role: Role, holder: str, command: str
) -> None:
    """Each missing key gives an error with its command; keys of the other role do not help."""
    mine = keys.of(role)
    without_daemon = missing_keys("10.0.0.5:7070", mine)
    keys.make_daemon_key()
    for other in (one for one in Role if one is not role):
        keys.new("other", role=other)
    without_holder = missing_keys("10.0.0.5:7070", mine)
    keys.new("a", role=role)

    for lack, whose in ((without_daemon, "the daemon"), (without_holder, holder)):
        assert lack == (
            "10.0.0.5:7070 can be reached from other hosts, and "
            f"{keys.path} has no key of {whose}; `{command} --keys-dir {keys.path}` makes one"
        )
    assert missing_keys("10.0.0.5:7070", mine) is None


def test_keys_that_cannot_be_used_are_as_good_as_none(keys: KeyDirectory) -> None:
    """A damaged trainer key counts as missing, and an invalid daemon key is reported."""
    keys.new("a")
    file = keys.path / "trainers/a.key"
    file.write_text("")
    assert "no key of a trainer" in str(missing_keys("eth0:7070", keys.trainers))
    (keys.path / "daemon.key").chmod(0o644)
    assert "chmod 600" in str(missing_keys("eth0:7070", keys.trainers))


def test_loopback_needs_no_keys(keys: KeyDirectory) -> None:
    """Loopback needs no keys, because local processes can connect anyway."""
    for address in ("127.0.0.1:7070", "localhost:7070", "[::1]:7070"):
        assert missing_keys(address, keys.trainers) is None
