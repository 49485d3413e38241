"""From measurements to ratios, figures and Markdown. Pure: nothing here runs or reads anything.

Each round measures all sides in turn, so a ratio is of two measurements of the same round; reported
are medians over the rounds, with the smallest and the largest.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from harness import Figure
from sides import LEAST_TARGETS, LIMIT, OURS_IN, PHOTOGRAPHS, SHARING, TARGETS, LeastTarget, Side, Target

MB = 1e6


class Measurement(NamedTuple):
    """One round of one side; ``images`` are those of one trainer."""

    images: float
    seconds: float
    cpu_s: float
    pss_bytes: int
    first_batch_s: float

    @property
    def rate(self) -> float:
        """Images/s, for each trainer."""
        return self.images / self.seconds


Rounds = dict[int, Measurement]
"""By round; a round in which the side failed is not there."""
Table = dict[str, Rounds]
"""By side."""


def ratios(ours: Rounds, theirs: Rounds) -> list[float]:
    """Our images/s ÷ theirs, of each round that has both."""
    return [ours[number].rate / theirs[number].rate for number in sorted(ours.keys() & theirs.keys())]


def fastest(table: Table, names: Sequence[str]) -> str | None:
    """Which of these has the highest median of images/s; None: none was measured."""
    measured = [name for name in names if table.get(name)]
    return max(measured, key=lambda name: median(one.rate for one in table[name].values()), default=None)


def figures(tables: dict[str, Table]) -> tuple[list[Figure], list[str]]:
    """A figure for each number to reach, and the names of those that could not be measured."""
    found, missing = [], []
    for target in TARGETS:
        ratio = _ratio(tables.get(target.table, {}), target)
        if ratio is None:
            missing.append(target.name)
        else:
            found.append(Figure(target.name, ratio, ">=", target.at_least))
    for least in LEAST_TARGETS:
        ratio = _against_lowest(tables.get(PHOTOGRAPHS, {}), least)
        if ratio is None:
            missing.append(least.name)
        else:
            found.append(Figure(least.name, ratio, "<=", least.at_most))
    return found, missing


def _ratio(table: Table, target: Target) -> float | None:
    ours = fastest(table, target.ours)
    found = ratios(table[ours], table.get(target.side, {})) if ours else []
    return median(found) if found else None


def _against_lowest(table: Table, least: LeastTarget) -> float | None:
    """Our median ÷ the lowest of the peers' medians."""
    medians = {name: median(getattr(one, least.value) for one in table[name].values()) for name in table if table[name]}
    peers = [medians[name] for name in least.sides if name in medians]
    return medians["batchd"] / min(peers) if peers and "batchd" in medians else None


# --- Markdown -------------------------------------------------------------------------------------


def markdown(sides: Sequence[Side], table: Table, ours_in: Sequence[str]) -> str:
    """One row for each side, the fastest first; ratios are of the fastest of ``ours_in``."""
    ours = fastest(table, ours_in)
    against = f"{ours} ÷ it" if ours else "batchd ÷ it"
    lines = [
        f"| | images/s | CPU-s/1k | PSS MB | first batch s | {against} |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(side, table[side.name], table[ours] if ours else {}) for side in in_order(sides, table)]
    return "\n".join(lines)


def in_order(sides: Sequence[Side], table: Table) -> list[Side]:
    """Those that were measured, the fastest first."""
    measured = [side for side in sides if table.get(side.name)]
    return sorted(measured, key=lambda side: -median(one.rate for one in table[side.name].values()))


def _row(side: Side, rounds: Rounds, ours: Rounds) -> str:
    ones = list(rounds.values())
    cells = [
        side.label,
        _spread([one.rate for one in ones], 0),
        f"{median(one.cpu_s / one.images * 1000 for one in ones):.2f}",
        f"{median(one.pss_bytes / MB for one in ones):.0f}",
        "" if side.name == LIMIT else f"{median(one.first_batch_s for one in ones):.2f}",
        "" if ours is rounds else _spread(ratios(ours, rounds), 2),
    ]
    return f"| {' | '.join(cells)} |"


def sharing_markdown(sides: Sequence[Side], table: Table) -> str:
    """Images/s for each trainer: a row for each way to share, a column for each number of them."""
    counts = sorted({side.trainers for side in sides})
    heads = "".join(f" {count} {'trainer' if count == 1 else 'trainers'} |" for count in counts)
    lines = [f"| images/s for each of |{heads} batchd ÷ it, with {counts[-1]} |", "|---|" + "---|" * (len(counts) + 1)]
    for label in dict.fromkeys(side.label for side in sides):
        rows = {side.trainers: table.get(side.name, {}) for side in sides if side.label == label}
        if not any(rows.values()):
            continue
        cells = [_spread([one.rate for one in rows[count].values()], 0) for count in counts]
        found = ratios(table.get(f"batchd-{counts[-1]}", {}), rows[counts[-1]])
        cells.append("" if label == "batchd" else _spread(found, 2))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "not measured"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def report(tables: dict[str, tuple[Sequence[Side], Table]], titles: dict[str, str], notes: Sequence[str]) -> str:
    """The whole page: what was measured, the tables, the figures."""
    found, missing = figures({name: table for name, (_, table) in tables.items()})
    parts = ["# batchd and its peers, measured side by side", "\n".join(notes), "![The tables as bars](peers.png)"]
    for name, (sides, table) in tables.items():
        text = sharing_markdown(sides, table) if name == SHARING else markdown(sides, table, OURS_IN[name])
        parts += [f"## {titles[name]}", text]
    parts += ["## Numbers to reach", "```\n" + "\n".join(figure.line for figure in found) + "\n```"]
    if missing:
        parts.append(f"Not measured: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"
