"""One subscription in the trainer: its terms, positions, handles and progress. Runs in the trainer.

    sequence   0 ........... taken ........... leased ........... leased + len(handles)
               | handed to the | at most one:   | received, not
               | user's loop   | leased, not    | checked yet
               |               | handed over    |

A subscription starts at (epoch, step) as rank r of W. In each round the W ranks take W steps, one
each:

    first epoch:   step + r, step + W + r, ...     ``first_rounds`` rounds
    later epochs:         r,        W + r, ...     ``rounds`` rounds each

If an epoch's last round has fewer batches than ranks, several ranks share a batch that the daemon
chooses. So a single number, the batches taken, is the whole state, and a restart anywhere is a
seek.

Invariants: ``taken`` alone is the position; it grows in the same instant in which the loop gets its
batch. A position is normalised: the end of an epoch is step 0 of the next.
"""

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import PurePath
from typing import NamedTuple, NotRequired, TypedDict
from weakref import ref

import numpy as np

from batchd_client.batch import FieldView, Lease, LeaseToken, field_views
from batchd_client.errors import DefinitionRefused, PositionInvalid, ProtocolError, SettingsInvalid, StateMismatch
from batchd_client.memory import Arrivals, ReceiveBuffer
from batchd_client.reports import Reports
from batchd_wire.codec import DEFINITION_BYTES_MAX, NUMBER_MAX, TEXT_CHARACTERS_MAX
from batchd_wire.fields import SlotLayout, layout_from_wire
from batchd_wire.messages import Handle, Parcel, Pull, Refused, Subscribe, Subscribed
from batchd_wire.position import Position
from batchd_wire.reports import ReportedRows
from batchd_wire.slot import RowChecksums

RELEASED_MAX = 1024
"""Most ended leases in one message, well below the daemon's limit on its length."""
UNREPORTED_PART = 4
"""Batches taken since the last report: at most this part of the window."""
REPORT_EVERY_S = 0.005
"""After this time, at most that part of the batches that are here: the ring may be smaller."""
HANDLES_MAX = 1024
"""Limit on unread handles, above any window; a daemon that sends more is broken."""
_TERMS = attrgetter("fingerprint", "samples", "batch_size", "steps", "rounds", "classes")
"""Not the layout: its fields follow from the fingerprint, and checksums may be switched."""


class StreamState(TypedDict):
    """The state for a checkpoint, from ``Stream.state_dict``: JSON-able, below 200 bytes.

    ``parts``: by which the daemon tells later what has changed in the stream. ``sample``: the
    samples of the epoch before the next batch, if it begins within the batch of ``step``.
    ``card``: what `batchd card` writes, some kilobytes, if it was asked for. ``set``: of a derived
    stream, the settings that make it. ``define``: of a defined stream, its table.
    """

    stream: str
    fingerprint: str
    epoch: int
    step: int
    parts: NotRequired[str]
    sample: NotRequired[int]
    card: NotRequired[dict[str, object]]
    set: NotRequired[dict[str, object]]
    define: NotRequired[dict[str, object]]


class Beginning(NamedTuple):
    """Where a subscription is to begin.

    ``sample``: with this one of the epoch, in place of the step. ``fingerprint`` and ``parts`` are
    those of a saved state; with ``converts`` one of other batches of the same samples will do.
    """

    position: Position
    sample: int | None = None
    fingerprint: str | None = None
    parts: str = ""
    converts: bool = False


BEGINNING = Beginning(Position(0, 0))


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


def checked_sample(epoch: int, sample: object) -> Beginning:
    """Check the sample of an epoch from the user. Raises ``PositionInvalid``."""
    if type(sample) is not int or not 0 <= sample <= NUMBER_MAX:
        raise PositionInvalid(f"sample {sample!r} is not a number of samples")
    return Beginning(checked_position(epoch, 0), sample)


def read_state(state: Mapping[str, object], stream: str, *, converts: bool = False) -> Beginning:
    """Read a state from ``state_dict``. Raises ``StateMismatch`` and ``PositionInvalid``."""
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
    begin = Beginning(checked_position(epoch, step), None, fingerprint, str(state.get("parts", "")), converts)
    return begin if "sample" not in state else begin._replace(sample=checked_sample(epoch, state["sample"]).sample)


def settings_text(settings: Mapping[str, object] | None) -> str:
    """Settings as the daemon takes them, equal if they are; "" for none.

    Raises ``SettingsInvalid``.
    """
    if not settings:
        return ""
    try:
        text = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsInvalid(f"set: {error}") from None
    if not all(type(key) is str for key in settings) or len(text) > TEXT_CHARACTERS_MAX:
        raise SettingsInvalid(f"set: its keys are texts, and it has at most {TEXT_CHARACTERS_MAX} characters as JSON")
    return text


def definition_bytes(table: Mapping[str, object]) -> bytes:
    """A table of a stream as the daemon takes it, equal if it is. Raises ``DefinitionRefused``."""
    try:
        text = json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)
        data = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DefinitionRefused(f"the table cannot be sent: {error}") from None
    if not table or len(data) > DEFINITION_BYTES_MAX:
        raise DefinitionRefused(f"the table has 1 to {DEFINITION_BYTES_MAX} bytes as JSON, not {len(data)}")
    return data


def _plain(value: object) -> object:
    """A path, or a number or an array of numpy, as JSON has it."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no value of batchd.toml")


@dataclass(frozen=True, slots=True)
class SubscriptionRequest:
    """The user's claim. ``window`` 0: the stream's. Others as of ``Subscribe``."""

    stream: str
    rank: int
    world_size: int
    window: int
    end_epoch: int | None
    is_spectator: bool = False
    settings: str = ""
    defines: bytes = b""
    keep_s: int | None = 0

    def subscribe(self, request: int, begin: Beginning) -> Subscribe:
        """Make the message that claims the stream from there on."""
        position = begin.position
        end_epoch = None if self.end_epoch is None else max(self.end_epoch, position.epoch)
        return Subscribe.filled_from(
            self,
            request=request,
            epoch=position.epoch,
            step=position.step,
            end_epoch=end_epoch,
            fingerprint=begin.fingerprint,
            knows_buckets=True,
            takes_several=True,
            sample=begin.sample,
            parts=begin.parts,
            converts=begin.converts,
        )


class OwnerToken(ref[object]):
    """The trace of a subscription whose owner is gone: its number."""

    __slots__ = ("number",)
    number: int


class BatchView:
    """The fields of batches with one ``layout``, and their checksums."""

    __slots__ = ("checksums", "fields", "layout")

    def __init__(self, layout: SlotLayout) -> None:
        self.layout = layout
        self.fields: dict[str, FieldView] = field_views(layout)
        self.checksums = RowChecksums(layout)


class Subscription:
    """See the module. Made from ``Subscribed``; raises ``ProtocolError`` if that makes no sense."""

    def __init__(self, claim: SubscriptionRequest, asked: Beginning, admitted: Subscribed) -> None:
        start = Position(admitted.epoch, admitted.step)
        if start < asked.position and not asked.converts:
            raise ProtocolError(f"the daemon begins at {start}, before {asked.position} that was asked for")
        self.number = admitted.subscription
        self.window = admitted.window
        self.admitted = admitted
        try:
            self.layout = layout_from_wire(admitted.layout)
        except ValueError as error:
            raise ProtocolError(f"the daemon describes its slots wrongly: {error}") from None
        self.counter = PositionCounter(
            start, claim.rank, claim.world_size, admitted.steps, admitted.rounds, admitted.first_rounds
        )
        self._views = [BatchView(one) for one in self.layout.buckets or (self.layout,)]
        """By the number of a bucket; one without buckets."""
        self.handles: deque[Handle | Parcel] = deque()
        self.arrivals = Arrivals(self.layout.slot_bytes)
        self.received: deque[ReceiveBuffer] = deque()
        """Buffers of the parcels among ``handles``, in order."""
        self.lent: dict[int, ReceiveBuffer] = {}
        """By sequence: buffers of living batches that were received as bytes."""
        self.owner: OwnerToken | None = None
        self.refusal: Refused | None = None
        self.taken = 0
        self._stands = 0, self.counter.position(0)
        """Batches taken, and the position after them: it is asked for several times for each."""
        self.leased = 0
        self.reported = 0
        """The part of ``leased`` that the daemon knows."""
        self.reported_s = 0.0
        """When it was told, by ``time.monotonic``."""
        self.outstanding: dict[int, LeaseToken] = {}
        """By sequence: leases whose end has not been reported."""
        self.ended: deque[LeaseToken] = deque()
        """Ended leases; appended to in any thread, at any time, and sometimes twice."""
        self.wait_us = 0
        self.wait_reported_us = 0
        """The part of ``wait_us`` that the daemon knows."""
        self.announced_s = 0.0
        """Time of the last report that the trainer waits; 0 if there was none."""
        self.reports: Reports | None = None
        """Those of the stream, until this subscription ends."""

    def view(self, handle: Handle | Parcel) -> "BatchView":
        """How the batch of a handle is laid out. Raises ``ProtocolError``."""
        if handle.bucket >= len(self._views):
            raise ProtocolError(f"a batch of bucket {handle.bucket} of a stream that has {len(self._views)}")
        view = self._views[handle.bucket]
        if handle.first + handle.count > view.layout.rows:
            raise ProtocolError(f"rows {handle.first}+{handle.count} of a batch that has {view.layout.rows}")
        return view

    @property
    def position(self) -> Position:
        """Position of the next batch that the user's loop gets."""
        taken, position = self._stands
        if taken != self.taken:
            taken = self.taken
            position = self.counter.position(taken)
            self._stands = taken, position
        return position

    @property
    def is_report_due(self) -> bool:
        """Whether the daemon must know how far the loop is, to keep its window filled.

        Where many batches are small, a message for each would cost more than the batches. The last
        one that is here is always reported, and in lockstep each: this thread may wait for a batch
        that another trainer gets only then.
        """
        unreported = UNREPORTED_PART * (self.leased - self.reported)
        if self.admitted.in_lockstep or not self.handles:
            return unreported > 0
        if unreported <= len(self.handles):
            return False
        return unreported >= self.window or time.monotonic() >= self.reported_s + REPORT_EVERY_S

    @property
    def held(self) -> int:
        """Number of batches that are alive, or have arrays that are."""
        ended = {token.sequence for token in self.ended.copy()}
        return sum(sequence not in ended for sequence in self.outstanding)

    @property
    def begin(self) -> Beginning:
        """Where another subscription goes on in place of this one."""
        sample = None if self.taken else self.admitted.sample
        return Beginning(self.position, sample, self.admitted.fingerprint, self.admitted.parts)

    def is_same_stream(self, other: "Subscription") -> bool:
        """True if both were admitted on the same terms; otherwise the stream has changed."""
        return _TERMS(self.admitted) == _TERMS(other.admitted)

    def watch(self, owner: object, forgotten: deque[OwnerToken]) -> None:
        """Have a token appended to ``forgotten`` once ``owner`` is garbage."""
        self.owner = OwnerToken(owner, forgotten.append)
        self.owner.number = self.number

    def add_part(self, parcel: Parcel) -> None:
        """Note a received part; keep batches that are complete now."""
        for whole, buffer in self.arrivals.note(parcel):
            self.received.append(buffer)
            self.add_handle(whole)

    def add_handle(self, handle: Handle | Parcel) -> None:
        """Keep a received handle for the user's loop. Raises ``ProtocolError`` beyond a limit."""
        if len(self.handles) >= HANDLES_MAX:
            raise ProtocolError(f"more than {HANDLES_MAX} batches that were never asked for")
        self.handles.append(handle)

    def add_lease(self, lease: Lease) -> None:
        """Note the next batch's lease, which ``forget_released`` forgets after its end."""
        self.outstanding[self.leased] = lease.token
        self.leased += 1

    def pull(self, waited_us: int, *, waiting: bool, reports: list[ReportedRows] | None = None) -> Pull:
        """Make a ``Pull`` with the position and the ended leases. Then call ``forget_released``."""
        ended = self.ended  # other threads append at its end meanwhile, so it is read by index
        tokens = [ended[index] for index in range(min(len(ended), RELEASED_MAX))]
        released = [(token.sequence, token.generation) for token in tokens]
        return Pull(self.number, self.leased, waiting, self.wait_us + waited_us, released, reports)

    def let_go(self) -> None:
        """Drop everything received: the session is over. Living batches keep their memory."""
        self.handles.clear()
        self.received.clear()
        self.lent.clear()
        self.arrivals = Arrivals(self.layout.slot_bytes)

    def forget_released(self, pull: Pull) -> None:
        """Forget the leases whose end a pull reported."""
        for sequence, _generation in pull.released:
            self.outstanding.pop(sequence, None)
            buffer = self.lent.pop(sequence, None)
            if buffer is not None:
                self.arrivals.give_back(buffer)
            self.ended.popleft()
