"""The connection file, with a key for TCP. Every process; standard library only.

    name = "gpu-7"          the holder's name in the daemon's log and status
    role = "worker"         of a worker host; absent: of a trainer
    daemon = "40 x Z85"     the daemon's public key: the holder connects to no other
    public = "40 x Z85"     the holder's public key
    secret = "40 x Z85"     the holder's secret key

``batchd keys new`` writes connection files. The functions here also read the daemon's own key
files.

Invariant: a truncated file is refused, wherever it was cut, because the required keys are last. No
message and no ``repr`` shows the content of a file.
"""

import json
import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from pathlib import Path

KEY_VARIABLE = "BATCHD_KEY"
"""Environment variable with the path of the connection file."""
KEY_CHARACTERS = 40
KEY_FILE_BYTES_MAX = 64 << 10
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
KEY_NAME_RULE = 'a key\'s name is 1 to 64 letters, digits, ".", "_" and "-", and begins with a letter or a digit'
STREAM_NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
"""Of a configuration's streams, which a key file may name."""
DERIVED_MARK = "+"
"""In the name of a derived stream, behind that of the stream of the configuration: "photos+1"."""
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Flags to open a key file: a pipe must not block before it is refused."""
ANY_ACCESS = 0o077
"""The mode bits that a file with a secret must not have."""
GROUP_READS = 0o040
"""The bit of these that root's files may have: containers get their secrets so."""
WRITE_ACCESS = 0o022
"""The mode bits that a file of public keys must not have."""

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_GROUP_CHARACTERS = 5
_GROUP_LIMIT = 1 << 32
ROLE = "role"
"""Name of the role in a key file; a file without it is a trainer's."""
_NAMES = ("name", "daemon", "public", "secret")


class Role(StrEnum):
    """The kind of a key's holder. Each role has its own address at a daemon."""

    TRAINER = "trainer"
    WORKER = "worker"

    @property
    def holder(self) -> str:
        """The holder's name in texts."""
        return "worker host" if self is Role.WORKER else "trainer"

    @property
    def command(self) -> str:
        """The command that makes a key of this role."""
        option = "" if self is Role.TRAINER else f"--role {self} "
        return f"batchd keys new {option}--name NAME"


@dataclass(frozen=True, slots=True)
class ConnectionKey:
    """Content of a connection file; keys are Z85 text, as ZeroMQ takes them."""

    name: str
    daemon: str
    public: str
    secret: str = field(repr=False)
    role: Role = Role.TRAINER


def connection_file_text(key: ConnectionKey) -> str:
    """Write a connection file."""
    if key.role is Role.WORKER:
        use = "Lets worker hosts in at a batchd daemon over TCP. Keep it secret (chmod 600): batchd worker ADDRESS --key FILE"
    else:
        use = f"Lets one trainer in at a batchd daemon over TCP. Keep it secret (chmod 600) and name it in {KEY_VARIABLE}."
    return (
        f"# {use}\n"
        f"name = {json.dumps(key.name)}\n"
        f"{role_line(key.role)}"
        f"daemon = {json.dumps(key.daemon)}\n"
        f"public = {json.dumps(key.public)}\n"
        f"secret = {json.dumps(key.secret)}\n"
    )


def role_line(role: Role) -> str:
    """The line of a key file that tells the role: none of a trainer's, as in all older files."""
    return "" if role is Role.TRAINER else f"role = {json.dumps(role)}\n"


def read_connection_key(path: Path, role: Role = Role.TRAINER) -> ConnectionKey:
    """Read the connection file of a holder with this role.

    Raises ``ValueError`` for a wrong file, one of another role, or one that other users may read,
    and ``OSError`` where it cannot be opened. If root owns the file and this process is not root, a
    group may read it.
    """
    descriptor = os.open(path, OPEN_FLAGS)
    try:
        is_given = os.fstat(descriptor).st_uid == 0 != os.geteuid()
        table = read_key_table(descriptor, path, ANY_ACCESS & ~GROUP_READS if is_given else ANY_ACCESS)
    finally:
        os.close(descriptor)
    check_names(table, path, _NAMES, (ROLE,))
    found = key_role(table, path)
    if found is not role:
        makes = f"`{role.command}` on the daemon's host makes one"
        raise ValueError(f"{path} is the key of a {found.holder}; a {role.holder} needs a key of its own: {makes}")
    daemon, public, secret = (key_text(table[name], name, path) for name in ("daemon", "public", "secret"))
    return ConnectionKey(key_name(table["name"], path), daemon, public, secret, role)


def read_key_table(descriptor: int, path: Path, refused_mode: int) -> dict[str, object]:
    """Read the open key file ``path``.

    Raises ``ValueError`` if it has a mode bit of ``refused_mode``, is too long, or is not TOML.
    """
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path} is not a regular file")
    if about.st_mode & refused_mode:
        raise ValueError(
            f"{path} is open to others than its owner (mode {stat.S_IMODE(about.st_mode):04o}); close it: chmod 600 {path}"
        )
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        content = file.read(KEY_FILE_BYTES_MAX + 1)
    if len(content) > KEY_FILE_BYTES_MAX:
        raise ValueError(f"{path} is longer than {KEY_FILE_BYTES_MAX} bytes, so it is not a key file")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8, so it is not a key file") from None
    except (ValueError, RecursionError):
        # tomllib's message may quote the file.
        raise ValueError(f"{path} is not TOML: it is damaged, or no key file") from None


def check_names(
    table: dict[str, object], path: Path, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    """Raise ``ValueError`` unless the table of ``path`` has these names and no others."""
    missing = [name for name in required if name not in table]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: it is damaged, or no key file")
    unknown = len(table.keys() - {*required, *optional})
    if unknown:
        known = ", ".join((*required, *optional))
        raise ValueError(f"{path} has {unknown} unknown keys; known here: {known}")


def key_name(value: object, path: Path) -> str:
    """Check the name in ``path``. Raises ``ValueError``."""
    if not isinstance(value, str) or not KEY_NAME.fullmatch(value):
        raise ValueError(f"{path}: name is wrong: {KEY_NAME_RULE}")
    return value


def key_role(table: dict[str, object], path: Path) -> Role:
    """Return the role that the table of ``path`` tells. Raises ``ValueError``."""
    try:
        return Role(str(table.get(ROLE, Role.TRAINER)))
    except ValueError:
        raise ValueError(f"{path}: role is none of {', '.join(Role)}") from None


def key_text(value: object, name: str, path: Path) -> str:
    """Check the key called ``name`` in ``path``. Raises ``ValueError``."""
    if not isinstance(value, str) or not is_key_text(value):
        raise ValueError(f"{path}: {name} is not a key of {KEY_CHARACTERS} Z85 characters")
    return value


def is_key_text(text: str) -> bool:
    """True if the text is the Z85 encoding of 32 bytes, which is unique."""
    values = [_Z85.find(character) for character in text]
    if len(values) != KEY_CHARACTERS or min(values) < 0:
        return False
    groups = (values[at : at + _GROUP_CHARACTERS] for at in range(0, KEY_CHARACTERS, _GROUP_CHARACTERS))
    return all(reduce(lambda number, value: number * len(_Z85) + value, group) < _GROUP_LIMIT for group in groups)
