"""Who a trainer is, by what the kernel or its key proves, and whose share it has. DAEMON process.

    local   SO_PEERCRED, SO_PEERGROUPS -> user, groups --+
    TCP     CURVE key, else its host   -> key or host  --+--> owner, tenant

Nothing that a trainer says of itself counts. Names of users and groups in the configuration are
looked up when it is read, before the loop or in another process: a directory may take seconds.
"""

import grp
import pwd
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from batchd.config.tree import DaemonConfig, TenantShare
from batchd.core.tenants import EVERYBODY, Weights
from batchd.errors import KeyPath
from batchd_wire.record import frozen
from batchd_wire.runtime import unmapped_id
from batchd_wire.wording import counted

PASSWD = Path("/etc/passwd")
Numbers: TypeAlias = Mapping[str, int]
"""Of users and groups, by "user:NAME" and "group:NAME"; those that this machine knows."""


@frozen
class Identity:
    """``user`` and ``groups``: numbers, of a local trainer; its primary group is the first.

    ``key``: its name, over TCP; ``public``: the key itself. ``is_operator``: root, or the daemon's
    own user.
    """

    user: int | None = None
    groups: tuple[int, ...] = ()
    key: str = ""
    host: str = ""
    public: str = ""
    is_operator: bool = False

    @property
    def owner(self) -> str:
        """What it has is counted under this name: "user:anna", "key:team-a" or "host:10.0.0.3"."""
        if self.user is not None:
            return f"user:{_user_name(self.user)}"
        return f"key:{self.key}" if self.key else f"host:{self.host}"

    def is_same(self, other: "Identity") -> bool:
        """True for the same user, or the same name of a key."""
        return (self.user, self.key) == (other.user, other.key)

    @property
    def is_proved(self) -> bool:
        """False for a host, and for a user that is not mapped here: several may look like one."""
        return bool(self.key) or (self.user is not None and self.user != unmapped_id("uid"))

    @property
    def reader(self) -> list[int]:
        """User and groups whose rights decide what is read; none: those of the daemon do."""
        return [] if self.user is None or self.is_operator else [self.user, self.groups[0], *self.groups]

    def is_one_of(self, names: Iterable[str], numbers: Numbers) -> bool:
        """True if one of "user:NAME", "group:NAME" and "key:NAME" is this one."""
        own = {f"key:{self.key}"} if self.key else set()
        return any(
            name in own
            or (name in numbers and numbers[name] in ((self.user,) if name.startswith("user:") else self.groups))
            for name in names
        )


class Tenancy:
    """Finds the tenant of a trainer: of the first share that names its key, its user or a group."""

    def __init__(self, shares: Mapping[str, TenantShare], numbers: Numbers) -> None:
        self._keys: dict[str, str] = {}
        self._users: dict[int, str] = {}
        self._groups: dict[int, str] = {}
        self._sessions_max = {name: share.sessions_max for name, share in shares.items()}
        for name, share in shares.items():
            for key in share.keys:
                self._keys.setdefault(key, name)
            for users, found in (("user", self._users), ("group", self._groups)):
                for one in share.users if users == "user" else share.groups:
                    if f"{users}:{one}" in numbers:
                        found.setdefault(numbers[f"{users}:{one}"], name)

    def tenant(self, identity: Identity) -> str:
        """The name of the tenant."""
        if identity.user is None:
            return self._keys.get(identity.key, EVERYBODY) if identity.key else EVERYBODY
        if identity.user in self._users:
            return self._users[identity.user]
        return next((name for group, name in self._groups.items() if group in identity.groups), EVERYBODY)

    def limit_reached(self, tenant: str, others: Collection[str]) -> str:
        """Why a share admits no other trainer, beside those of ``others``' shares; or ""."""
        most = self._sessions_max.get(tenant)
        if most is None or sum(other == tenant for other in others) < most:
            return ""
        return f"{counted(most, 'trainer')} of the share {tenant!r} are connected already; raise its sessions_max"


def weights_of(daemon: DaemonConfig) -> Weights:
    """The weights of the tenants, for the core."""
    return tuple((name, share.weight) for name, share in daemon.shares.items())


def look_up(names: Iterable[str]) -> dict[str, int]:
    """The numbers of users and groups, which may be numbers already. May wait for a directory."""
    found = {}
    for name in names:
        kind, _colon, text = name.partition(":")
        with suppress(KeyError):
            if kind != "key":
                number = int(text) if text.isdecimal() else None
                known = pwd.getpwnam(text).pw_uid if kind == "user" and number is None else number
                found[name] = grp.getgrnam(text).gr_gid if known is None else known
    return found


def named_in(daemon: DaemonConfig) -> Iterator[tuple[KeyPath, str]]:
    """All users, groups and keys that [daemon] names, each with its kind, and where."""
    for number, name in enumerate(daemon.define.who if daemon.define is not None else ()):
        yield ("define", "who", number), name
    for share, table in daemon.shares.items():
        for key in ("users", "groups", "keys"):
            for number, name in enumerate(getattr(table, key)):
                yield ("shares", share, key, number), f"{key[:-1]}:{name}"


def unknown_names(daemon: DaemonConfig, keys: Collection[str] | None) -> Iterator[tuple[KeyPath, str]]:
    """The users, groups and keys that there are not, where they are named: (key path, sentence).

    ``keys``: the names of all keys of trainers; None if they are unknown.
    """
    named = list(named_in(daemon))
    numbers = look_up(name for _key, name in named)
    for path, name in named:
        kind, _colon, text = name.partition(":")
        if kind != "key" and name not in numbers:
            yield path, f"this machine has no {kind} {text!r}"
        elif kind == "key" and keys is not None and text not in keys:
            yield (
                path,
                f"there is no key {text!r} of a trainer: `batchd keys new {text}` makes it, `batchd keys list` shows all",
            )


def _user_name(number: int) -> str:
    """The name in /etc/passwd, or the number: a directory may take seconds, and the loop waits."""
    try:
        return _local_users(PASSWD.stat().st_mtime_ns).get(number, str(number))
    except OSError:
        return str(number)


@lru_cache(maxsize=1)
def _local_users(_changed_ns: int) -> dict[int, str]:
    """Users of this machine alone, by number; of two names the first."""
    users: dict[int, str] = {}
    for line in PASSWD.read_text(errors="replace").splitlines():
        name, _password, number, *_rest = [*line.split(":"), "", ""]
        if name and number.isdecimal():
            users.setdefault(int(number), name)
    return users
