"""Amounts of memory as users write them: ``4GiB``, ``100 MB`` or a number of bytes. Daemon and CLI.

Invariant: ``parse_bytes(format_bytes(n)) == n`` for every whole n from 0 on.
"""

import re
from collections.abc import Callable

_UNITS = {
    "TiB": 1 << 40,
    "GiB": 1 << 30,
    "MiB": 1 << 20,
    "KiB": 1 << 10,
    "TB": 1_000_000_000_000,
    "GB": 1_000_000_000,
    "MB": 1_000_000,
    "KB": 1_000,
    "B": 1,
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
AMOUNT_PATTERN = r"^\s*\d+(\.\d+)?\s*([KMGTkmgt]?[iI]?[bB])?\s*$"
"""The pattern that JSON Schema gives to editors."""


def parse_bytes(text: str) -> int:
    """Read an amount of memory. Raises ``ValueError`` saying how to write one."""
    match = _AMOUNT.fullmatch(text)
    units = {name.upper(): factor for name, factor in _UNITS.items()}
    factor = units.get((match[2] or "B").upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f'{text!r} is no amount of memory; write for example "4GiB", "512MiB" or a number of bytes')
    whole, _, fraction = match[1].partition(".")
    denominator: int = 10 ** len(fraction)
    count, rest = divmod(int(whole + fraction) * factor, denominator)
    if rest:
        raise ValueError(f"{text!r} is no whole number of bytes")
    return count


def format_bytes(count: int) -> str:
    """Write an amount exactly, in the largest unit that divides it: ``4GiB``, ``1000B``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]}{unit}"
    return f"{count}B"


def round_bytes(count: int, rounding: Callable[[float], int] = round) -> str:
    """Write an amount for users: ``38.5 MiB``. It is not parsed again.

    ``rounding``: ``ceil`` for a need, ``floor`` for a supply, so that the two never look the same.
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= _UNITS[unit]:
            return f"{rounding(count * 10 / _UNITS[unit]) / 10:.1f} {unit}"
    return f"{count} B"
