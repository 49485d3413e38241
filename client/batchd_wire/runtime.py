"""The runtime directory and the addresses in it. Every process; standard library only.

    <runtime directory>/          0750; members of its group may connect
        batchd.sock               ZeroMQ (ZMTP 3, NULL), as a ROUTER
        lifeline.sock             AF_UNIX SOCK_SEQPACKET: credentials, descriptors, end of file
        lock                      held with flock by the living daemon; never removed

An address is that directory, ``ipc:///run/batchd`` or the plain path, or a network address,
``tcp://bigbox:7070``, also without ``tcp://``.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Literal

from batchd_wire.record import frozen

SYSTEM_DIRECTORY = Path("/run/batchd")
ADDRESS_VARIABLE = "BATCHD_ADDRESS"
CONNECTIONS_VARIABLE = "BATCHD_CONNECTIONS"
NAME_VARIABLE = "BATCHD_NAME"
RECONNECT_VARIABLE = "BATCHD_RECONNECT_TIMEOUT"
PORTS = 1 << 16
SOCKET_PATH_BYTES_MAX = 107
"""``sun_path`` of unix(7) holds 108 bytes with the closing zero."""
_HOST_AND_PORT = re.compile(r"(\[[^]/]+\]|[^:/]+):\d+")
"""A directory of such a name must be written with a slash, ``./host:7070``."""
_IDENTITY_MAP = ["0", "0", "4294967295"]
"""The map of a user namespace that maps each id to itself; see user_namespaces(7)."""


@frozen
class RuntimeDirectory:
    """The names in a runtime directory. Creates and opens nothing."""

    path: Path

    @property
    def lifeline_path(self) -> Path:
        """The lifeline's socket."""
        return self.path / "lifeline.sock"

    @property
    def zmq_path(self) -> Path:
        """The ROUTER's socket file."""
        return self.path / "batchd.sock"

    @property
    def zmq_endpoint(self) -> str:
        """The ROUTER's endpoint, as ZeroMQ writes it."""
        return f"ipc://{self.zmq_path}"

    @property
    def lock_path(self) -> Path:
        """The file that the living daemon holds locked."""
        return self.path / "lock"

    @property
    def log_path(self) -> Path:
        """A link to the file with the log of the last daemon here, if it wrote one."""
        return self.path / "log"

    @property
    def one_script_path(self) -> Path:
        """The file that marks a daemon of one script, which nobody starts again."""
        return self.path / "of-one-script"

    @property
    def address(self) -> str:
        """The value for ``BATCHD_ADDRESS``."""
        return f"ipc://{self.path}"


@frozen
class TcpAddress:
    """A daemon on another host."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        """The address in ZeroMQ's form."""
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def address(self) -> str:
        """The value for ``BATCHD_ADDRESS``."""
        return self.endpoint


def runtime_directory(path: Path) -> RuntimeDirectory:
    """Name the directory at ``path``. Raises ``ValueError`` if its sockets' paths are too long."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100  resolve() would follow links, and /run/batchd may be one
    longest = os.fsencode(absolute / "lifeline.sock")
    if len(longest) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(
            f"the runtime directory {absolute} makes socket paths of {len(longest)} bytes, and the kernel takes "
            f"{SOCKET_PATH_BYTES_MAX}; choose a shorter one"
        )
    return RuntimeDirectory(absolute)


def parse_address(address: str) -> RuntimeDirectory | TcpAddress:
    """Read ``ipc:///run/batchd``, ``tcp://host:7070``, or without scheme. Raises ``ValueError``."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        scheme, rest = "tcp" if _HOST_AND_PORT.fullmatch(address) else "ipc", address
        if scheme == "ipc" and address and "/" not in address:
            _check_bare(address)
    if scheme == "tcp":
        host, colon, port = rest.rpartition(":")
        if not host or not colon or not port.isdecimal() or not 0 < int(port) < PORTS:
            raise ValueError(f"the address {address!r} is not of the form tcp://host:7070 (nor ipc:///run/batchd)")
        return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))
    if scheme != "ipc":
        raise ValueError(f"the address {address!r} is not of the form ipc:///run/batchd or tcp://host:7070")
    if not rest:
        raise ValueError(f"the address {address!r} names no directory; write for example ipc:///run/batchd")
    return runtime_directory(Path(rest))


def _check_bare(name: str) -> None:
    """Refuse a name without a slash that is hardly a directory: ``connect`` would wait for it."""
    host = name.strip("[]")
    if host.count(":") > 1:
        body, _, port = host.rpartition(":")
        # as in ::1:7070
        is_port = len(port) >= len("7070") and port.isdecimal() and not body.endswith(":")
        meant = f"tcp://[{body}]:{port}" if is_port else f"tcp://[{host}]:7070"
    elif ":" in name or not os.path.isdir(name):  # noqa: PTH112  "." and ".." are directories, too
        meant = f"tcp://{host.partition(':')[0]}:7070"
    else:
        return
    raise ValueError(
        f"the address {name!r} is neither a host with its port, as in {meant}, nor a directory, as in ./{name} "
        "or ipc:///run/batchd"
    )


def host_id() -> str:
    """Id of this machine and its containers until its next boot; empty if the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@cache
def unmapped_id(kind: Literal["uid", "gid"], proc: Path = Path("/proc")) -> int | None:
    """Return the overflow id, usually 65534, of this process's user namespace.

    None if all ids are mapped. In the user namespace of a container, the kernel shows every
    unmapped user as this one id. So two equal overflow ids may be two users. On a host it is an
    ordinary user.
    """
    try:
        if (proc / "self" / f"{kind}_map").read_text().split() == _IDENTITY_MAP:
            return None
        return int((proc / "sys/kernel" / f"overflow{kind}").read_text())
    except OSError:  # a kernel without user namespaces
        return None


def user_directory() -> Path | None:
    """The runtime directory of the user's own daemon; None without ``$XDG_RUNTIME_DIR``."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "batchd" if base else None


def candidate_directories() -> list[Path]:
    """List the default runtime directories, the system's first."""
    user = user_directory()
    return [SYSTEM_DIRECTORY] + ([user] if user else [])
