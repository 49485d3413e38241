"""What a trainer reported of its batches: from the daemon's pages, or from a file of lines.

    {"epoch": 0, "step": 117, "loss": 0.71}                            one number for a batch
    {"epoch": 0, "step": 118, "loss": [0.5, 0.9, ...], "rank": 1, "world_size": 8}   for each row

``first`` and ``rows`` are the rows of the position; without them a line is about all of them.

Invariant: of the same rows, the last report counts.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import Plan
from batchd.data.storage.paths import why_unreadable
from batchd.errors import BatchdError
from batchd_wire.position import Position
from batchd_wire.reports import HEAD
from batchd_wire.status import ReportPage
from batchd_wire.wording import counted

HEAD_DTYPE = np.dtype([
    *((name, "<i8") for name in ("epoch", "step", "number")),
    *((name, "<i4") for name in ("first", "rows", "values", "run")),
    *((name, "<i8") for name in ("rank", "world_size")),
])  # fmt: skip
assert HEAD_DTYPE.itemsize == HEAD.size, "as batchd_wire.reports has it"
LINE_CHARACTERS_MAX = 1 << 24
NUMBER_MAX = (1 << 31) - 1
OWN_RUN = ""
EXAMPLE = 'each line is a JSON object such as {"epoch": 0, "step": 117, "loss": 0.71}'
"""The run of a file."""


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """Reports of one run in the order of their positions.

    ``heads``: structured ``[reports]``, of ``HEAD_DTYPE``. ``values``: float64 ``[values]``, those
    of all reports one after the other; ``starts``: int64 ``[reports + 1]``, where each begins.
    """

    run: str
    heads: NDArray[np.void]
    values: NDArray[np.float64]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def means(self) -> NDArray[np.float64]:
        """The mean of each report, ``[reports]``; NaN or infinite if one of its values is."""
        with np.errstate(invalid="ignore"):
            sums = np.add.reduceat(self.values, self.starts[:-1]) if len(self) else self.values
            means: NDArray[np.float64] = sums / np.diff(self.starts)
        return means

    def position(self, report: int) -> Position:
        """The position of a report."""
        return Position(int(self.heads["epoch"][report]), int(self.heads["step"][report]))

    def of(self, report: int) -> NDArray[np.float64]:
        """The values of a report: one, or one for each row; float64 ``[values]``."""
        return self.values[self.starts[report] : self.starts[report + 1]]


def from_pages(pages: Iterable[ReportPage]) -> dict[str, Losses]:
    """The reports of each run, by its name. Raises ``BatchdError`` for pages that are none."""
    names: dict[int, str] = {}
    all_heads, all_values = [np.empty(0, HEAD_DTYPE)], [np.empty(0)]
    for page in pages:
        names |= dict(zip(page.run_numbers, page.runs, strict=False))
        if len(page.heads) % HEAD.size or len(page.values) % 4:
            raise BatchdError("the daemon sent reports of another form; use the same version of batchd as the daemon")
        all_heads.append(np.frombuffer(page.heads, HEAD_DTYPE))
        all_values.append(np.frombuffer(page.values, "<f4").astype(np.float64))
    heads, values = np.concatenate(all_heads), np.concatenate(all_values)
    if (heads["values"] < 1).any() or heads["values"].sum() != len(values):
        raise BatchdError("the daemon sent reports without their values; use the same version of batchd as the daemon")
    return {
        names.get(number, str(number)): _ordered(names.get(number, str(number)), heads, values, heads["run"] == number)
        for number in np.unique(heads["run"]).tolist()
    }


def from_lines(file: Path, plan: Plan) -> Losses:
    """Read a file of JSON lines. Raises ``BatchdError`` with the number of a line that is none."""
    heads, values = [], []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    head, here = _read_line(f"{file}, line {number}", line, plan)
                    heads.append((*head[:2], number, *head[2:]))
                    values.append(here)
    except OSError as error:
        raise BatchdError(f"{why_unreadable(file, error)}; {EXAMPLE}") from None
    except UnicodeDecodeError as error:
        raise BatchdError(f"{file} is not UTF-8: {error}") from None
    if not heads:
        raise BatchdError(f"{file} is empty; {EXAMPLE}")
    table = np.array(heads, HEAD_DTYPE)
    return _ordered(OWN_RUN, table, np.concatenate(values), np.ones(len(table), np.bool_))


def _read_line(where: str, line: str, plan: Plan) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        raise BatchdError(f"{where}: not JSON; {EXAMPLE}") from None
    if not isinstance(facts, Mapping):
        raise BatchdError(f"{where}: not an object; {EXAMPLE}")
    epoch, step, first, rank = (_number(where, facts, name) for name in ("epoch", "step", "first", "rank"))
    there = plan.rows(Position(epoch, step)) if step < plan.steps else 0
    rows = _number(where, facts, "rows", there - first)
    if not 0 < rows <= there - first:
        raise BatchdError(
            f"{where}: the stream has no rows {first} to {first + rows} at epoch {epoch}, step {step}; give the configuration of "
            "the run, such as its --card"
        )
    try:
        values = np.array(facts["loss"], np.float64).reshape(-1)
    except KeyError:
        raise BatchdError(f'{where}: has no "loss"; {EXAMPLE}') from None
    except (TypeError, ValueError):
        raise BatchdError(f'{where}: "loss" is a number, or a list with a number for each row') from None
    if values.size not in {1, rows}:
        raise BatchdError(f"{where}: {counted(values.size, 'value')} for {counted(rows, 'row')}")
    world_size = _number(where, facts, "world_size", rank + 1)
    return (epoch, step, first, rows, values.size, 0, rank, world_size), values


def _number(where: str, facts: Mapping[str, object], name: str, otherwise: int = 0) -> int:
    if name not in facts and name in {"epoch", "step"}:
        raise BatchdError(f'{where}: has no "{name}"; {EXAMPLE}')
    value = facts.get(name, otherwise)
    if type(value) is not int or not 0 <= value <= NUMBER_MAX:
        raise BatchdError(f'{where}: "{name}" is a whole number from 0, not {json.dumps(value)[:40]}')
    return value


def _ordered(run: str, heads: NDArray[np.void], values: NDArray[np.float64], mine: NDArray[np.bool_]) -> Losses:
    """The reports of a run by position, the last one of the same rows."""
    starts = np.cumsum([0, *heads["values"]])
    chosen = np.flatnonzero(mine)
    order = np.lexsort([heads[name][chosen] for name in ("number", "first", "step", "epoch")])
    chosen = chosen[order]
    places = np.stack([heads[name][chosen] for name in ("epoch", "step", "first")])
    is_last = np.append((places[:, 1:] != places[:, :-1]).any(axis=0), True)
    chosen = chosen[is_last]
    counts = heads["values"][chosen].astype(np.int64)
    ends = np.cumsum([0, *counts])
    taken = np.repeat(starts[chosen] - ends[:-1], counts) + np.arange(ends[-1])
    return Losses(run, heads[chosen], values[taken], ends.astype(np.int64))
