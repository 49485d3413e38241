"""Text for terminals: tables, lengths of time, escapes. Standard library only."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row; each column is as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def duration(seconds: float) -> str:
    """A length of time in one or two units: 0.4 s, 12 s, 3 min 20 s, 5 h 2 min."""
    if seconds < 10:  # noqa: PLR2004  below it tenths tell something
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def escaped(text: str) -> str:
    r"""The text with each character that is not printable written as an escape: \n, \x1b."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
