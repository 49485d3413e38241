"""Who a trainer is, by what the kernel or its key proves, and whose share it has. DAEMON process.

    local   SO_PEERCRED, SO_PEERGROUPS -> user, groups --+
    TCP     CURVE key, else its host   -> key or host  --+--> owner, tenant

Nothing that a trainer says of itself counts. Names of users and groups in the configuration are
looked up once, when it is read.
"""

import grp
import pwd
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from batchd.config.tree import DaemonConfig, TenantShare
from batchd.core.tenants import EVERYBODY, Weights
from batchd_wire.record import frozen
from batchd_wire.runtime import unmapped_id
from batchd_wire.wording import counted

PASSWD = Path("/etc/passwd")


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

    def is_one_of(self, names: Iterable[str]) -> bool:
        """True if one of "user:NAME", "group:NAME" and "key:NAME" is this one."""
        return any(self._is(*name.split(":", 1)) for name in names)

    def _is(self, kind: str, name: str) -> bool:
        if kind == "key":
            return self.key == name
        if kind == "user":
            return self.user is not None and self.user == user_number(name)
        return group_number(name) in self.groups


class Tenancy:
    """Finds the tenant of a trainer: of the first share that names its key, its user or a group."""

    def __init__(self, shares: Mapping[str, TenantShare]) -> None:
        self._keys: dict[str, str] = {}
        self._users: dict[int, str] = {}
        self._groups: dict[int, str] = {}
        self._sessions_max = {name: share.sessions_max for name, share in shares.items()}
        for name, share in shares.items():
            for key in share.keys:
                self._keys.setdefault(key, name)
            for user in _known(share.users, user_number):
                self._users.setdefault(user, name)
            for group in _known(share.groups, group_number):
                self._groups.setdefault(group, name)

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


def unknown_names(shares: Mapping[str, TenantShare]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The users and groups that this machine does not have: (key path below shares, sentence)."""
    for name, share in shares.items():
        for kind, names, number in (("users", share.users, user_number), ("groups", share.groups, group_number)):
            for one in names:
                if number(one) is None:
                    yield (name, kind), f"this machine has no {kind[:-1]} {one!r}"


def user_number(name: str) -> int | None:
    """The number of a user, by name or as digits; None if there is none of the name."""
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def group_number(name: str) -> int | None:
    """The number of a group, by name or as digits; None if there is none of the name."""
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def _known(names: tuple[str, ...], number: Callable[[str], int | None]) -> Iterator[int]:
    return (found for name in names if (found := number(name)) is not None)


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
