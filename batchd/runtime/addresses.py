"""Addresses on which the daemon listens: TCP for trainers, and HTTP. Standard library only.

Invariant: a host for which ``is_loopback`` is True is bound to loopback and to nothing else; in
doubt a host is not loopback.
"""

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address

EVERYWHERE = "*"
HTTP_DEFAULT = "127.0.0.1:7071"
HTTP_OFF = "off"
PORT_MAX = 65_535
_LOCALHOST = "localhost"
_LOOPBACK = IPv4Network("127.0.0.0/8")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", re.ASCII)
_NUMERIC = re.compile(r"[0-9.]+", re.ASCII)
"""Digits and dots alone are no name."""
_PORT = re.compile(r"0|[1-9][0-9]{0,4}", re.ASCII)
_HOST_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*", re.ASCII)


def parse_tcp(text: str) -> tuple[str, int]:
    """Read "host:port" or "[IPv6]:port" into host and port. Raises ``ValueError``."""
    return _parse(text, 'write for example "10.0.0.5:7070" or "[::1]:7070"', port_min=1)


def parse_http(text: str) -> tuple[str, int] | None:
    """Read "host:port", where port 0 means any free one; None for "off". Raises ``ValueError``."""
    if text == HTTP_OFF:
        return None
    return _parse(text, f'write for example "{HTTP_DEFAULT}", or "{HTTP_OFF}"', port_min=0)


def host_name(text: str) -> str:
    """Check and normalise the name in a Host header, without a port. Raises ``ValueError``."""
    name = text.lower().removesuffix(".")
    if not _HOST_NAME.fullmatch(name):
        raise ValueError('is not the name of a host, such as "batchd.example.org" (without http:// and without a port)')
    return name


def is_loopback(host: str) -> bool:
    """True if only this machine can reach ``host``: 127.0.0.0/8, ::1 and the name localhost."""
    address = _address(host)
    if isinstance(address, IPv4Address):
        return address in _LOOPBACK
    return host.lower() == _LOCALHOST or address == IPv6Address("::1")


def tcp_endpoint(text: str, further: int = 0) -> str:
    """ZeroMQ's endpoint ``tcp://host:port``; it binds no names, so localhost becomes an address.

    ``further`` is added to the port.
    """
    host, port = parse_tcp(text)
    if host.lower() == _LOCALHOST:
        host = "127.0.0.1"
    return f"tcp://[{host}]:{port + further}" if ":" in host else f"tcp://{host}:{port + further}"


def _parse(text: str, example: str, port_min: int) -> tuple[str, int]:
    """Read a host and a port. Raises ``ValueError`` with ``example``."""
    if "://" in text:
        raise ValueError(f"is written without {text.partition('://')[0]}://; {example}")
    host, colon, port = text.rpartition(":")
    if not colon:
        raise ValueError(f"must have a host and a port; {example}")
    if not _PORT.fullmatch(port) or not port_min <= int(port) <= PORT_MAX:
        raise ValueError(f"must end with a port from {port_min} to {PORT_MAX}; {example}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not isinstance(_address(host), IPv6Address):
            raise ValueError(f"has no IPv6 address in its brackets; {example}")
    elif ":" in host:
        raise ValueError(f"must have an IPv6 address in brackets; {example}")
    elif not (host == EVERYWHERE or _address(host) or (_NAME.fullmatch(host) and not _NUMERIC.fullmatch(host))):
        raise ValueError(f"has no host that can be an address or a name; {example}")
    return host, int(port)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
