"""Where the daemon hears trainers on other hosts, and where the keys are by which it knows them. Daemon and CLI.

Invariant: what ``is_loopback`` calls loopback is bound to loopback and to nothing else; in doubt a
host is not loopback.
"""

import os
import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path

from batchd.errors import ConfigInvalid, Problem

SYSTEM_KEYS_DIRECTORY = Path("/etc/batchd/keys")
PORT_MAX = 65_535
EVERYWHERE = "*"
_LOCALHOST = "localhost"
_LOOPBACK = IPv4Network("127.0.0.0/8")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", re.ASCII)
_NUMERIC = re.compile(r"[0-9.]+", re.ASCII)
_PORT = re.compile(r"0|[1-9][0-9]{0,4}", re.ASCII)


def parse_tcp(text: str) -> tuple[str, int]:
    """Read "host:port" or "[IPv6]:port"; the host comes without brackets. Raises ``ValueError`` saying how to write one."""
    return parse_place(text, 'write for example "10.0.0.5:7070" or "[::1]:7070"', port_min=1)


def parse_place(text: str, example: str, port_min: int) -> tuple[str, int]:
    """Read a host and a port. Raises ``ValueError`` that ends with ``example``, which says how to write them."""
    if "://" in text:
        raise ValueError(f"is written without {text.partition('://')[0]}://; {example}")
    host, colon, port = text.rpartition(":")
    if not colon:
        raise ValueError(f"must have a host and a port; {example}")
    if not _PORT.fullmatch(port) or not port_min <= int(port) <= PORT_MAX:
        raise ValueError(f"must end with a port from {port_min} to {PORT_MAX}; {example}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not _is_version_6(host):
            raise ValueError(f"has no IPv6 address in its brackets; {example}")
    elif ":" in host:
        raise ValueError(f"must have an IPv6 address in brackets; {example}")
    elif not _is_host(host):
        raise ValueError(f"has no host that can be an address or a name; {example}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Can this host be reached from this machine alone? True for 127.0.0.0/8, ::1 and the name localhost."""
    if host.lower() == _LOCALHOST:
        return True
    if ":" in host:
        return _is_version_6(host) and IPv6Address(host) == IPv6Address("::1")
    return _is_version_4(host) and IPv4Address(host) in _LOOPBACK


def tcp_endpoint(text: str) -> str:
    """Name the endpoint for ZeroMQ: ``tcp://host:port``. It binds no host names, so localhost becomes its address."""
    host, port = parse_tcp(text)
    if host.lower() == _LOCALHOST:
        host = "127.0.0.1"
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def default_keys_dir() -> Path:
    """The directory of the keys where none is configured. Raises ``ConfigInvalid`` for a user without a home."""
    if os.geteuid() == 0:
        return SYSTEM_KEYS_DIRECTORY
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser("~/.config"))  # noqa: PTH111  Path's raises for unknown users
    if not base.is_absolute():
        text = (
            f"no directory for the keys: uid {os.geteuid()} has no home; set keys_dir in [daemon] (or BATCHD_KEYS_DIR)"
        )
        raise ConfigInvalid([Problem("daemon.keys_dir", text)])
    return base / "batchd" / "keys"


def _is_host(host: str) -> bool:
    """An IPv4 address, the star, or what can be a name; digits and dots alone are no name."""
    if host == EVERYWHERE or _is_version_4(host):
        return True
    return bool(_NAME.fullmatch(host)) and not _NUMERIC.fullmatch(host)


def _is_version_4(host: str) -> bool:
    try:
        IPv4Address(host)
    except ValueError:
        return False
    return True


def _is_version_6(host: str) -> bool:
    try:
        IPv6Address(host)
    except ValueError:
        return False
    return True
