"""Keys for TCP: the daemon's own and its peers' public ones, as files. DAEMON process and CLI.

    <keys directory>/             0700
        daemon.key                0600; public, secret
        .lock                     held with flock by a command that changes a key
        trainers/NAME.key         0600; name, streams (absent: every one), public; the trainer alone
                                  has the secret
        workers/NAME.key          0600; the same of a worker host, with role = "worker"

Files are written under another name and renamed, with the directory locked: no reader sees half a
file, and simultaneous commands make no key twice. No symbolic link in the directory is followed.

systemd can hand the keys to the daemon (``LoadCredential=keys:/etc/batchd/keys``, systemd.exec(5)):

    /etc/batchd/keys/        root's  ->  $CREDENTIALS_DIRECTORY/    the service's, read-only memory
        daemon.key                           keys_daemon.key
        trainers/NAME.key                    keys_trainers_NAME.key
        workers/NAME.key                     keys_workers_NAME.key

So the daemon's secret is in no directory that the daemon, or a user's function in a worker, could
write to. They are copies, made when the service starts: changes take effect at the next start.

Each role has an address of its own, which admits only the keys in the folder of this role. A file
tells its role, too: a copy in the wrong folder (the files of a Kubernetes Secret have none) opens
nothing. A name belongs to one key of either role.

Invariant: a damaged file or directory lets no peer in. In a peer's file ``public`` is the last key,
so that a truncated file lets no peer in, instead of opening every stream or another address.
Invariant: with credentials no other place is read, so removed keys are not found elsewhere.
"""

import fcntl
import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time_ns

import structlog
import zmq

from batchd.errors import BatchdError, KeysInvalid
from batchd.runtime.addresses import is_loopback, parse_tcp
from batchd.runtime.directories import SYSTEM_KEYS_DIRECTORY, default_keys_dir
from batchd.runtime.limits import OncePerMinute
from batchd_wire import keys as wire

DIRECTORY_MODE = 0o700
PARENTS_MODE = 0o755
FILE_MODE = 0o600
DAEMON_FILE = "daemon.key"
FILE_ENDING = ".key"
SETTLED_NS = 2_000_000_000
"""Age of a file whose next change shows in its times, however coarse the file system's clock is."""
VARIABLE = "CREDENTIALS_DIRECTORY"
RESTART = "systemctl restart batchd"
ADDRESS_KEYS = {wire.Role.TRAINER: "tcp", wire.Role.WORKER: "worker_address"}
"""The key of [daemon] with the address that admits the role."""
_LOCK_FILE = ".lock"
_TEMPORARY_FILE = ".new"
_STREAM_NAME = re.compile(wire.STREAM_NAME_PATTERN, re.ASCII)
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AcceptedKey:
    """The public key of a trainer or worker host, and the streams that it opens; None is all."""

    name: str
    role: wire.Role
    public: str
    streams: frozenset[str] | None


class RoleKeys:
    """The keys of one role in a directory: all that the address for this role admits.

    Each query looks at the files; an unchanged file is not read again.
    """

    def __init__(self, directory: "KeyDirectory", role: wire.Role) -> None:
        self.directory = directory
        self.role = role
        self._folder, _slash, self._prefix = directory.places.format(role).rpartition("/")
        self._once_per_minute = OncePerMinute()
        self._read_before: dict[str, tuple[tuple[int, ...], AcceptedKey]] = {}

    def accepted(self) -> list[AcceptedKey]:
        """All keys of the role, by name. Raises ``BatchdError`` if they cannot be read."""
        return self._survey()[0]

    def damaged(self) -> dict[Path, str]:
        """Key files of the role that are invalid, each with the reason."""
        return self._survey()[1]

    def find(self, public: str) -> AcceptedKey | None:
        """Return the key with this public part, or None. Raises ``BatchdError``."""
        accepted, damaged = self._survey()
        for path, reason in damaged.items():
            self._complain(path, reason)
        return next((key for key in accepted if key.public == public), None)

    def holds(self, name: str, public: str) -> bool:
        """True if this is still the key of that name. Raises nothing; False if unreadable."""
        file = f"{name}{FILE_ENDING}"
        if not wire.KEY_NAME.fullmatch(name):
            return False
        try:
            with self._opened() as folder:
                return folder is not None and self._key(folder, file).public == public
        except (BatchdError, ValueError) as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                self._complain(self.path_of(file), str(error))
        return False

    def other_role(self, public: str) -> str:
        """Say that this is a key of another role, and what helps; "" if it is none.

        Raises ``BatchdError``.
        """
        for others in self.directory.roles:
            key = others.find(public) if others is not self else None
            if key is not None:
                place = f"{ADDRESS_KEYS[key.role]} of [daemon] admits it"
                need = f"here a {self.role.holder}'s is needed: {self.directory.advice(self.role)}"
                return f"the key {key.name!r} is a {key.role.holder}'s: {place}; {need}"
        return ""

    def path_of(self, file: str) -> Path:
        """Path of one of ``files``."""
        return self.directory.path / self._folder / f"{self._prefix}{file}"

    def files(self, parent: int | None) -> list[str]:
        """Names of the key files in the open directory of keys, without a prefix."""
        with self._opened_in(parent) as folder:
            return [] if folder is None else self._files(folder)

    def write(self, parent: int, file: str, text: str) -> None:
        """Put a file into the locked directory of keys, whole or not at all."""
        with suppress(FileExistsError):
            os.mkdir(self._folder, DIRECTORY_MODE, dir_fd=parent)
            os.chmod(self._folder, DIRECTORY_MODE, dir_fd=parent)
        with self._opened_in(parent) as folder, _naming(self.path_of(file)):
            assert folder is not None
            _write(folder, file, text)

    def remove(self, parent: int, file: str) -> None:
        """Remove one of ``files``."""
        with self._opened_in(parent) as folder, _naming(self.path_of(file)):
            assert folder is not None
            os.unlink(file, dir_fd=folder)
            os.fsync(folder)

    def _survey(self) -> tuple[list[AcceptedKey], dict[Path, str]]:
        """Read every file of the role: the valid keys, and the other files with the reason."""
        found: list[AcceptedKey] = []
        damaged: dict[Path, str] = {}
        with self._opened() as folder:
            files = [] if folder is None else self._files(folder)
            for file in files:
                assert folder is not None
                path = self.path_of(file)
                try:
                    found.append(self._key(folder, file))
                except FileNotFoundError:
                    continue  # revoked since the directory was read
                except OSError as error:
                    damaged[path] = f"{path} cannot be read: {error.strerror}"
                except ValueError as error:
                    damaged[path] = str(error)
        self._read_before = {file: kept for file, kept in self._read_before.items() if file in files}
        return found, damaged

    def _key(self, folder: int, file: str) -> AcceptedKey:
        """Read one key, if its file changed. Raises ``OSError`` or ``ValueError``."""
        path = self.path_of(file)
        before = self._read_before.pop(file, None)
        if before is not None and before[0] == _stamp(os.stat(path.name, dir_fd=folder, follow_symlinks=False)):
            self._read_before[file] = before
            return before[1]
        with _opened(folder, path.name) as descriptor:
            now_ns, about = time_ns(), os.fstat(descriptor)
            table = wire.read_key_table(descriptor, path, wire.WRITE_ACCESS)
        key = _accepted_key(table, path, file, self.role)
        if now_ns - max(about.st_ctime_ns, about.st_mtime_ns) > SETTLED_NS:
            self._read_before[file] = (_stamp(about), key)
        return key

    @contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Open the folder of the role, or None if there is none. Raises ``BatchdError``."""
        path = self.directory.path
        with _naming(path), _opened_directory(path) as parent, self._opened_in(parent) as folder:
            yield folder

    @contextmanager
    def _opened_in(self, parent: int | None) -> Iterator[int | None]:
        if parent is None or not self._folder:
            yield parent
            return
        path = self.directory.path / self._folder
        with _naming(path), _opened_directory(path, parent) as folder:
            yield folder

    def _files(self, folder: int) -> list[str]:
        names = (name.removeprefix(self._prefix) for name in os.listdir(folder) if name.startswith(self._prefix))
        return sorted(name for name in names if name.endswith(FILE_ENDING) and not name.startswith("."))

    def _complain(self, path: Path, reason: str) -> None:
        if self._once_per_minute.allows("invalid key files", str(path)):
            _log.error("key file is invalid", path=str(path), reason=reason)


class KeyDirectory:
    """The keys on disk: the daemon's own, and the accepted ones of either role."""

    places = "{}s/"
    """The folder of a role's files, or the prefix of their names."""
    _daemon_file = DAEMON_FILE
    _refused_mode = wire.ANY_ACCESS

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trainers = RoleKeys(self, wire.Role.TRAINER)
        self.workers = RoleKeys(self, wire.Role.WORKER)
        self.roles = (self.trainers, self.workers)

    def of(self, role: wire.Role) -> RoleKeys:
        """The keys of a role."""
        return self.workers if role is wire.Role.WORKER else self.trainers

    def advice(self, role: wire.Role) -> str:
        """The command that makes a missing key."""
        return f"`{role.command} --keys-dir {shlex.quote(str(self.path))}` makes one"

    def daemon_key(self) -> tuple[str, str] | None:
        """The daemon's public and secret key, or None. Raises ``BatchdError``."""
        with _naming(self.path), _opened_directory(self.path) as folder:
            return None if folder is None else self._daemon_key(folder)

    def make_daemon_key(self) -> tuple[str, str]:
        """Make the daemon's key, unless there is one, which its peers know."""
        with self._changing() as folder:
            return self._daemon_key(folder) or self._make_daemon_key(folder)

    def new(
        self, name: str, streams: frozenset[str] | None = None, role: wire.Role = wire.Role.TRAINER
    ) -> wire.ConnectionKey:
        """Make the key of one peer. Its secret is only in the returned value.

        Raises ``KeysInvalid`` for a wrong name or one that is taken, else ``BatchdError``.
        """
        self._check_changeable()
        if not wire.KEY_NAME.fullmatch(name):
            raise KeysInvalid(f"{name!r} cannot name a key: {wire.KEY_NAME_RULE}")
        if streams is not None and not streams:
            raise KeysInvalid("a key for no stream opens nothing; name a stream, or leave streams out for every one")
        for stream in streams or ():
            if not _is_stream_name(stream):
                rule = "a stream's name is 1 to 64 letters, digits, _, . and -"
                raise KeysInvalid(f"{stream!r} cannot be a stream: {rule}")
        file = f"{name}{FILE_ENDING}"
        with self._changing() as folder:
            for keys in self.roles:
                if file in keys.files(folder):
                    remedy = f"take another name, or revoke it first: batchd keys revoke {name}"
                    raise KeysInvalid(f"there is a key {name} already ({keys.path_of(file)}); {remedy}")
            daemon, _secret = self._daemon_key(folder) or self._make_daemon_key(folder)
            public, secret = (key.decode() for key in zmq.curve_keypair())
            allowed = "" if streams is None else f"streams = {json.dumps(sorted(streams))}\n"
            text = f"name = {json.dumps(name)}\n{wire.role_line(role)}{allowed}public = {json.dumps(public)}\n"
            self.of(role).write(folder, file, text)
        return wire.ConnectionKey(name, daemon, public, secret, role)

    def revoke(self, name: str) -> None:
        """Remove the key of this name. Raises ``KeysInvalid``, with the known names."""
        self._check_changeable()
        file = f"{name}{FILE_ENDING}"
        with _naming(self.path), _opened_directory(self.path) as folder:
            files = [(keys, one) for keys in self.roles for one in keys.files(folder)]
            # Only a person can have given one name to two keys; then both are meant.
            found = [keys for keys, one in files if one == file and wire.KEY_NAME.fullmatch(name)]
            if folder is None or not found:
                known = ", ".join(sorted(one.removesuffix(FILE_ENDING) for _keys, one in files))
                have = f"known here: {known}" if known else f"it has none; `{wire.Role.TRAINER.command}` makes one"
                raise KeysInvalid(f"{self.path} has no key {name!r}; {have}")
            for keys in found:
                keys.remove(folder, file)

    def _daemon_key(self, folder: int) -> tuple[str, str] | None:
        path = self.path / self._daemon_file
        with _naming(path):
            try:
                with _opened(folder, path.name) as descriptor:
                    table = wire.read_key_table(descriptor, path, self._refused_mode)
            except FileNotFoundError:
                return None
            wire.check_names(table, path, ("public", "secret"))
            public, secret = (wire.key_text(table[name], name, path) for name in ("public", "secret"))
            if zmq.curve_public(secret.encode()).decode() != public:
                raise ValueError(f"{path} is damaged: its public key does not belong to its secret one")
        return public, secret

    def _make_daemon_key(self, folder: int) -> tuple[str, str]:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        text = (
            "# The key of a batchd daemon; its peers know it by the public part. Keep it secret.\n"
            f"public = {json.dumps(public)}\nsecret = {json.dumps(secret)}\n"
        )
        with _naming(self.path / DAEMON_FILE):
            _write(folder, DAEMON_FILE, text)
        return public, secret

    def _check_changeable(self) -> None:
        """Raise ``KeysInvalid`` if keys cannot be changed here."""

    @contextmanager
    def _changing(self) -> Iterator[int]:
        """Make a missing directory, and lock out other writers. The directory's descriptor."""
        self._check_changeable()
        with _naming(self.path):
            _make_directory(self.path)
            with _opened_directory(self.path) as folder:
                if folder is None:
                    raise BatchdError(f"{self.path} cannot be used: it leads nowhere")
                with _locked(folder):
                    yield folder


def missing_keys(address: str, keys: RoleKeys) -> str | None:
    """Say which key of the role the daemon lacks to listen on ``address``, beyond loopback."""
    if is_loopback(parse_tcp(address)[0]):
        return None
    directory = keys.directory
    try:
        if directory.daemon_key() is None:
            owner = "the daemon"
        elif not keys.accepted():
            owner = f"a {keys.role.holder}"
        else:
            return None
        reason = f"{directory.path} has no key of {owner}; {directory.advice(keys.role)}"
    except BatchdError as error:
        reason = f"its keys cannot be used: {error}"
    return f"{address} can be reached from other hosts, and {reason}"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn errors inside the block into a ``BatchdError`` that names the file."""
    try:
        yield
    except OSError as error:
        owner = "keys are for the user that the daemon runs as: become that user"
        other = "name another directory (--keys-dir, keys_dir in [daemon], or BATCHD_KEYS_DIR)"
        raise BatchdError(f"{path} cannot be used: {error.strerror}; {owner}, or {other}") from error
    except ValueError as error:
        raise KeysInvalid(str(error)) from None


@contextmanager
def _opened(folder: int, name: str, flags: int = wire.OPEN_FLAGS) -> Iterator[int]:
    descriptor = os.open(name, flags | os.O_NOFOLLOW, FILE_MODE, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _opened_directory(path: Path, parent: int | None = None) -> Iterator[int | None]:
    """Open a directory that only its owner may write to, not by a link in ``parent``; or None."""
    try:
        if parent is None:
            descriptor = os.open(path, _DIRECTORY_FLAGS)
        else:
            descriptor = os.open(path.name, _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        yield None
        return
    try:
        if os.fstat(descriptor).st_mode & wire.WRITE_ACCESS:
            raise KeysInvalid(f"others than its owner may write to {path}, and so add keys; close it: chmod 700 {path}")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: int) -> Iterator[None]:
    """Hold the directory for changes, by a file that is never removed: NFS locks no directories."""
    with _opened(folder, _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) as descriptor:
        with suppress(PermissionError):
            os.fchmod(descriptor, FILE_MODE)  # whatever the umask of its maker
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _make_directory(path: Path) -> None:
    """Make the directory with its mode, whatever the umask; an existing one keeps its mode."""
    for parent in reversed([parent for parent in path.parents if not parent.exists()]):
        with suppress(FileExistsError):
            parent.mkdir(PARENTS_MODE)
    with suppress(FileExistsError):
        path.mkdir(DIRECTORY_MODE)
        path.chmod(DIRECTORY_MODE)


def _write(folder: int, name: str, text: str) -> None:
    """Put a file there whole or not at all; a link of that name would be replaced, not followed."""
    with suppress(FileNotFoundError):
        os.unlink(_TEMPORARY_FILE, dir_fd=folder)  # of a command that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(_TEMPORARY_FILE, flags, FILE_MODE, dir_fd=folder), "w", encoding="ascii") as file:
        os.fchmod(file.fileno(), FILE_MODE)  # whatever the umask
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(_TEMPORARY_FILE, name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def _stamp(about: os.stat_result) -> tuple[int, ...]:
    """Facts of a file that differ after any change, once it had settled."""
    return (about.st_dev, about.st_ino, about.st_mode, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


def _accepted_key(table: dict[str, object], path: Path, file: str, role: wire.Role) -> AcceptedKey:
    wire.check_names(table, path, ("name", "public"), (wire.ROLE, "streams"))
    name = wire.key_name(table["name"], path)
    if f"{name}{FILE_ENDING}" != file:
        raise ValueError(f"{path}: name is {name}, which is not that of the file")
    found = wire.key_role(table, path)
    if found is not role:
        raise ValueError(f"{path} is the key of a {found.holder}, but it is among the keys of {role.holder}s")
    streams = table.get("streams")
    if streams is not None and not (isinstance(streams, list) and all(map(_is_stream_name, streams))):
        raise ValueError(f"{path}: streams is not a list of stream names")
    opened = None if streams is None else frozenset(streams)
    return AcceptedKey(name, role, wire.key_text(table["public"], "public", path), opened)


def _is_stream_name(value: object) -> bool:
    return isinstance(value, str) and bool(_STREAM_NAME.fullmatch(value))


def open_keys(configured: Path | None) -> KeyDirectory:
    """The configured keys, else systemd's, else the user's own. Raises ``ConfigInvalid``."""
    given = os.environ.get(VARIABLE)
    if configured is None and given:
        return CredentialKeys(Path(given))
    return KeyDirectory((configured or default_keys_dir()).absolute())


class CredentialKeys(KeyDirectory):
    """The copies that systemd made. A change is refused, naming the right directory."""

    places = "keys_{}s_"
    _daemon_file = f"keys_{DAEMON_FILE}"
    _refused_mode = wire.ANY_ACCESS & ~wire.GROUP_READS
    """If systemd grants access by an access list, the group bits show the most that it grants."""

    def advice(self, role: wire.Role) -> str:
        """The command that makes a missing key."""
        taken = f"from where the unit takes it (LoadCredential=keys:{SYSTEM_KEYS_DIRECTORY}) at the next `{RESTART}`"
        return f"as root, `{role.command}` makes one in {SYSTEM_KEYS_DIRECTORY}, {taken}"

    def _check_changeable(self) -> None:
        where = f"change the keys in {SYSTEM_KEYS_DIRECTORY} and then: {RESTART}"
        raise KeysInvalid(f"{self.path} has copies that systemd made; as root, {where}")
