"""The batches that trainers of a chaos run should read, and the check. No process; pure.

A job is one training: W ranks that start at one state and continue from it. In round k the ranks
take W steps, one each; if an epoch has fewer left, they share those. This module computes that from
the words of the documentation, not with batchd's code.

Invariant: every reported batch is compared with its position and with all its rows before anything
else is done with it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

Row = tuple[int, str]
State = Mapping[str, Any]


class Job:
    """One training. ``heard`` takes a rank's report of a batch, and returns the error in it.

    ``steps``: batches in an epoch of the stream; ``rows`` knows the rows of each by epoch and step.
    """

    def __init__(self, name: str, stream: str, steps: int, rows: Callable[[int, int], list[Row]]) -> None:
        self.name = name
        self.stream = stream
        self._steps = steps
        self._rows_of = rows
        self.begin(1, None)

    def begin(self, world_size: int, state: State | None) -> None:
        """Start so many ranks at ``state``."""
        self.world_size = world_size
        self._starts = [(state["epoch"], state["step"]) if state is not None else (0, 0)]
        self._states: dict[int, State | None] = {0: state}
        self._taken = [0] * world_size
        self._shares: dict[int, dict[int, tuple[int, list[Row]]]] = defaultdict(dict)

    def state_of(self, rank: int) -> State | None:
        """Return where one rank continues alone: after the last batch that it has reported."""
        return self._states[self._taken[rank]]

    def checkpoint(self) -> State | None:
        """Return where all ranks can continue: after the last round that each has finished."""
        return self._states[min(self._taken)]

    def heard(self, rank: int, told: Mapping[str, Any]) -> list[str]:
        """Return the error in a batch: its position, its rows, or the state after it."""
        turn = self._taken[rank]
        self._taken[rank] += 1
        place, rows = (told["epoch"], told["step"]), [(sample, digest) for sample, digest in told["rows"]]
        problems = self._misplaced(turn, rank, place, rows)
        state = told["state"]
        if (state["epoch"], state["step"]) != self._start(turn + 1):
            problems.append(f"its state is {state['epoch']}:{state['step']}, not {self._start(turn + 1)}")
        self._states.setdefault(turn + 1, state)
        for known in [known for known in self._states if known < min(self._taken)]:
            del self._states[known]
        return [f"{self.name}, rank {rank} of {self.world_size}, batch {turn} at {place}: {one}" for one in problems]

    def _misplaced(self, turn: int, rank: int, place: tuple[int, int], rows: list[Row]) -> list[str]:
        epoch, first = self._start(turn)
        left = self._steps - first
        if left >= self.world_size:
            if place != (epoch, first + rank):
                return [f"it should be the one at {(epoch, first + rank)}"]
            return self._compare(rows, self._rows_of(*place))
        if place[0] != epoch or not first <= place[1] < self._steps:
            return [f"it should be one of the last {left} of epoch {epoch}"]
        shares = self._shares[turn]
        shares[rank] = place[1], rows
        if len(shares) < self.world_size:
            return []
        del self._shares[turn]
        together = [row for _rank, (_step, part) in sorted(shares.items()) for row in part]
        wanted = [row for step in range(first, self._steps) for row in self._rows_of(epoch, step)]
        problems = self._compare(together, wanted)
        whole = {step: self._rows_of(epoch, step) for step in range(first, self._steps)}
        if any(row not in whole[step] for step, part in shares.values() for row in part):
            problems.append("a rank's rows are of another step than it says")
        return problems

    def _compare(self, rows: list[Row], wanted: list[Row]) -> list[str]:
        if rows == wanted:
            return []
        wrong = [place for place, pair in enumerate(zip(rows, wanted, strict=False)) if pair[0] != pair[1]]
        return [f"{len(rows)} rows, of which these are wrong: {wrong}; samples {[sample for sample, _ in rows]}"]

    def _start(self, turn: int) -> tuple[int, int]:
        """Return epoch and step of all ranks before round ``turn``."""
        while len(self._starts) <= turn:
            epoch, first = self._starts[-1]
            last = first + self.world_size >= self._steps
            self._starts.append((epoch + 1, 0) if last else (epoch, first + self.world_size))
        return self._starts[turn]
