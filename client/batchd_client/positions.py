"""Positions of a subscription, by the number of batches it has taken. Runs in the trainer.

A subscription starts at (epoch, step) as rank r of W. In each round the W ranks take W steps, one
each:

    first epoch:   step + r, step + W + r, ...     ``first_rounds`` rounds
    later epochs:         r,        W + r, ...     ``rounds`` rounds each

If an epoch's last round has fewer batches than ranks, several ranks share a batch that the daemon
chooses. So a single number, the batches taken, is the whole state, and a restart anywhere is a
seek.

Invariant: a position is normalised: the end of an epoch is step 0 of the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from batchd_client.errors import PositionInvalid, ProtocolError, StateMismatch
from batchd_wire.codec import NUMBER_MAX
from batchd_wire.position import Position


class StreamState(TypedDict):
    """The state for a checkpoint, from ``Stream.state_dict``: JSON-able, about a hundred bytes."""

    stream: str
    fingerprint: str
    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class PositionCounter:
    """Positions by batches taken. ``steps``: batches in a whole epoch, of all ranks."""

    start: Position
    rank: int
    world_size: int
    steps: int
    rounds: int
    first_rounds: int

    def __post_init__(self) -> None:
        if not self._fits(self.rounds, self.steps) or not self._fits(self.first_rounds, self.steps - self.start.step):
            raise ProtocolError(
                f"{self.steps} steps for {self.world_size} ranks from step {self.start.step} on do not make "
                f"{self.first_rounds} rounds at first and {self.rounds} in later epochs"
            )
        if self.rounds == 0:
            raise ProtocolError("the daemon admitted a stream that has no batch for this rank")

    def _fits(self, rounds: int, steps: int) -> bool:
        whole, rest = divmod(steps, self.world_size)
        return steps >= 0 and whole <= rounds <= whole + bool(rest)

    def position(self, taken: int) -> Position:
        """Position of all ranks after ``taken`` batches each."""
        if taken < self.first_rounds:
            return Position(self.start.epoch, self.start.step + taken * self.world_size)
        epochs, rounds = divmod(taken - self.first_rounds, self.rounds)
        return Position(self.start.epoch + 1 + epochs, rounds * self.world_size)

    def left(self, taken: int) -> int:
        """Batches left in the next batch's epoch, after ``taken`` batches."""
        if taken < self.first_rounds:
            return self.first_rounds - taken
        return self.rounds - (taken - self.first_rounds) % self.rounds

    def expects(self, taken: int, epoch: int, step: int) -> bool:
        """True if batch number ``taken``, from 0, may be the one at (``epoch``, ``step``)."""
        here = self.position(taken)
        if epoch != here.epoch:
            return False
        if here.step + self.world_size <= self.steps:
            return step == here.step + self.rank
        return here.step <= step < self.steps


def checked_position(epoch: int, step: int) -> Position:
    """Check a position from the user. Raises ``PositionInvalid``."""
    if type(epoch) is not int or type(step) is not int or not 0 <= epoch <= NUMBER_MAX or not 0 <= step <= NUMBER_MAX:
        raise PositionInvalid(f"epoch {epoch!r}, step {step!r} is not a valid position")
    return Position(epoch, step)


def read_state(state: Mapping[str, object], stream: str) -> tuple[Position, str]:
    """Read a state from ``state_dict``: (position, fingerprint). Raises ``StateMismatch``."""
    match state:
        case {"stream": str(name), "fingerprint": str(fingerprint), "epoch": int(epoch), "step": int(step)}:
            pass
        case _:
            raise StateMismatch(
                f"a saved state has stream, fingerprint, epoch and step, and this is {str(state)[:200]!r}; "
                "pass what state_dict() gave"
            )
    if name != stream:
        raise StateMismatch(f"the saved state is of stream {name!r}, and this is stream {stream!r}")
    return checked_position(epoch, step), fingerprint
