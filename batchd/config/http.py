"""Where the observer answers HTTP. Daemon and CLI; standard library only.

Invariant: nobody answers beyond loopback unless somebody wrote that into the configuration.
"""

from batchd.config.tcp import parse_place

OFF = "off"
DEFAULT = "127.0.0.1:7071"


def parse_http(text: str) -> tuple[str, int] | None:
    """Read "host:port", whose port may be 0 for any that is free; None for "off". Raises ``ValueError`` saying how."""
    if text == OFF:
        return None
    return parse_place(text, f'write for example "{DEFAULT}", or "{OFF}"', port_min=0)
