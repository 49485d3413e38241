"""Where the observer answers HTTP. Daemon and CLI; standard library only.

Invariant: nobody answers beyond loopback unless somebody wrote that into the configuration.
"""

import re

from batchd.config.tcp import parse_place

OFF = "off"
DEFAULT = "127.0.0.1:7071"


_HOST_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*", re.ASCII)


def host_name(text: str) -> str:
    """A name that a Host header may have, without a port, in small letters. Raises ``ValueError`` where it is none."""
    name = text.lower().removesuffix(".")
    if not _HOST_NAME.fullmatch(name):
        raise ValueError('is not the name of a host, such as "batchd.example.org" (without http:// and without a port)')
    return name


def parse_http(text: str) -> tuple[str, int] | None:
    """Read "host:port", whose port may be 0 for any that is free; None for "off". Raises ``ValueError`` saying how."""
    if text == OFF:
        return None
    return parse_place(text, f'write for example "{DEFAULT}", or "{OFF}"', port_min=0)
