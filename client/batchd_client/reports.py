"""Numbers that a loop reports of its batches, on their way to the daemon. Runs in the trainer.

    report(values) --> waiting (here, or in a device's memory) --next pull--> unsent --> sent
                                                            ^                   | a new session
                                                            +-------------------+

A report costs the loop a conversion: it rides on the message that asks for a further batch. A
tensor of a GPU is read when its copy has arrived, so the loop never waits for the device. Another
thread may take the batches (of tf.data, of Keras): reports meet it in ``_waiting``.

The daemon replaces what it knows of the same rows by the last report. So a new session gets the
last ``SENT_BYTES`` again: what the old one lost on its way arrives, and nothing counts twice.

Invariant: a report is in exactly one of the three places.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from batchd_client.batch import Batch, BatchRows
from batchd_client.errors import ReportInvalid
from batchd_client.extensions import Extension
from batchd_client.hints import log_once
from batchd_wire.position import EpochRows
from batchd_wire.reports import PULL_BYTES, PULL_REPORTS, ROWS_AT_ONCE, VALUE_BYTES, ReportedRows


class OwnRows(BatchRows):
    """The rows of a batch of a trainer's own size.

    ``cuts``: the size of its own batches, and how the stream cuts the rows of an epoch.
    """

    cuts: tuple[int, EpochRows]

    @property
    def pieces(self) -> Iterator[BatchRows]:
        """The same rows, of the stream's batches."""
        own, cut = self.cuts
        first = self.step * own + self.first
        end = first + self.rows
        while first < end:
            step, row = cut.find(first)
            count = min(cut.before(step + 1), end) - first
            yield BatchRows(self.epoch, step, row, count)
            first += count


BATCHES_KNOWN = 1024
"""Received batches that a loop may still report about by their position."""
WAITING_MAX = 1024
"""Reports whose values are on their way from a device; at one more, the first is waited for."""
SENT_BYTES = 1 << 20
"""Values, and ``REPORT_BYTES`` for each report, that a new session gets again."""
REPORT_BYTES = 32

Values = NDArray[np.float32]
Late = Callable[[bool], Values | None]
"""Values of a device, ``[values]``; None: not here yet. True: wait for them."""
values_of_tensor: Extension[[Any], Late] = Extension("batchd_client.torch.reports")


class Reports:
    """See the module. Reports of one stream, whatever its subscriptions."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._received: deque[BatchRows] = deque(maxlen=BATCHES_KNOWN)
        self._waiting: deque[tuple[BatchRows, Late]] = deque()
        self._unsent: OrderedDict[BatchRows, bytes] = OrderedDict()
        self._sent: OrderedDict[BatchRows, bytes] = OrderedDict()
        self._sent_bytes = 0
        self._session: Callable[[], object] = lambda: None
        self._lock = Lock()
        self.is_kept = True
        """Whether the daemon keeps reports."""
        self.is_unconfirmed = False
        """Whether reports were sent that the daemon may not have read yet."""

    @property
    def last(self) -> BatchRows | None:
        """The batch that was taken last."""
        return self._received[-1] if self._received else None

    def note(self, taken: BatchRows) -> None:
        """A batch has been taken."""
        self._received.append(taken)

    def add(self, values: object, rows: BatchRows | None) -> None:
        """Keep what was reported of ``rows`` until the next pull. Raises ``ReportInvalid``."""
        if rows is None:
            raise ReportInvalid(
                f"no batch of stream {self._stream!r} has been received, so there is nothing to report about"
            )
        late = _late(values, rows)
        if not self.is_kept:
            log_once(
                f"the daemon keeps no report about stream {self._stream!r}, as it is older than this client: upgrade batchd on "
                "its host, or log the numbers with their positions",
                logging.WARNING,
            )
            return
        self._waiting.append((rows, late))
        if len(self._waiting) > WAITING_MAX:
            with self._lock:
                self._collect(at_least=len(self._waiting) - WAITING_MAX)

    def rows_at(self, at: Batch | tuple[int, int]) -> BatchRows:
        """The rows of a batch that was received. Raises ``ReportInvalid`` if it was not."""
        try:
            epoch, step = (at.epoch, at.step) if isinstance(at, Batch) else at
        except (TypeError, ValueError):
            raise ReportInvalid(f"at = {at!r} is neither a batch nor (epoch, step)") from None
        known = next((one for one in reversed(self._received) if one[:2] == (epoch, step)), None)
        if known is None or (isinstance(at, Batch) and at.span != known):
            raise ReportInvalid(
                f"epoch {epoch}, step {step} of stream {self._stream!r} is not among the last {len(self._received)} batches that "
                "this loop received"
            )
        return known

    @property
    def has_unsent(self) -> bool:
        """Whether some reports can be sent now."""
        return self.is_kept and bool(self._unsent)

    @property
    def has_news(self) -> bool:
        """Whether some reports can be sent now, or soon."""
        return self.is_kept and bool(self._unsent or self._waiting)

    def next_part(self, session: object) -> list[ReportedRows] | None:
        """Reports for one message, or None; ``session``: the one that gets it."""
        if not self.is_kept:
            return None
        if self._session() is not session:
            self._unsent = OrderedDict([*self._sent.items(), *self._unsent.items()])
            self._sent, self._sent_bytes, self._session = OrderedDict(), 0, ref(session)
        part: list[ReportedRows] = []
        left = PULL_BYTES
        with self._lock:
            self._collect()
            for rows, values in self._unsent.items():
                left -= len(values)
                if part and (left < 0 or len(part) == PULL_REPORTS):
                    break
                part.append((*rows, values))
        return part or None

    def sent(self, part: list[ReportedRows]) -> None:
        """The session has taken these reports."""
        self.is_unconfirmed = True
        for *rows, values in part:
            key = BatchRows(*rows)
            with self._lock:
                if self._unsent.get(key) is values:  # else a later report replaces it
                    del self._unsent[key]
            self._sent_bytes -= self._cost(self._sent.pop(key, None))
            self._sent[key] = values
            self._sent_bytes += self._cost(values)
        while self._sent_bytes > SENT_BYTES:
            self._sent_bytes -= self._cost(self._sent.popitem(last=False)[1])

    def wait(self) -> None:
        """Wait for the values of devices: the stream is about to be closed."""
        with self._lock:
            self._collect(at_least=len(self._waiting))

    def _cost(self, values: bytes | None) -> int:
        return 0 if values is None else REPORT_BYTES + len(values)

    def _collect(self, at_least: int = 0) -> None:
        """Read the values that have arrived, in order; wait for the first ``at_least``."""
        while self._waiting:
            rows, read = self._waiting[0]
            try:
                values = read(at_least > 0)
                if values is None:
                    return
                self._add(rows, values)
            except (RuntimeError, TypeError, ValueError) as error:  # of torch, JAX or numpy
                log_once(f"a report about stream {self._stream!r} was lost: {error}", logging.WARNING)
            at_least -= 1
            self._waiting.popleft()

    def _add(self, rows: BatchRows, values: Values) -> None:
        if isinstance(rows, OwnRows):
            first = 0
            for piece in rows.pieces:
                self._add(piece, values if len(values) == 1 else values[first : first + piece.rows])
                first += piece.rows
            return
        for start in range(0, len(values), ROWS_AT_ONCE):
            part = values[start : start + ROWS_AT_ONCE]
            count = rows.rows if len(values) == 1 else len(part)
            self._unsent.pop(key := BatchRows(rows.epoch, rows.step, rows.first + start, count), None)
            self._unsent[key] = part.tobytes()


def _check_size(size: int, rows: BatchRows) -> None:
    """Raise ``ReportInvalid`` unless there is one value for the batch, or one for each row."""
    if size not in {1, rows.rows}:
        raise ReportInvalid(f"{size} values for the {rows.rows} rows of epoch {rows.epoch}, step {rows.step}")


def _array(values: object) -> Values:
    """Numbers as a new array float32 ``[values]``. Raises ``ReportInvalid``."""
    try:
        found = np.asarray(values)
        if found.dtype.kind in "OSU":  # None would be a NaN, and a text may look like a number
            raise TypeError(f"{found.reshape(-1)[:1].tolist()} is no number")
        with np.errstate(over="ignore"):  # a number too large for float32 is an infinity
            return np.array(found, "<f4").reshape(-1)
    except (TypeError, ValueError, NotImplementedError) as error:  # the last: of TensorFlow
        raise ReportInvalid(f"{type(values).__name__} is not a number, nor an array of numbers ({error})") from None


def _late(values: Any, rows: BatchRows) -> Late:
    """A reader of values, which a device may still compute.

    Raises ``ReportInvalid`` if they are no numbers, or too few or too many.
    """
    if type(values).__module__.partition(".")[0] == "torch":
        _check_size(values.numel(), rows)
        return values_of_tensor(values)
    if hasattr(values, "copy_to_host_async") and hasattr(values, "is_ready"):  # an array of JAX
        _check_size(values.size, rows)
        values.copy_to_host_async()
        return lambda wait: _array(values) if wait or values.is_ready() else None
    here = _array(values)
    _check_size(here.size, rows)
    return lambda _wait: here


assert PULL_BYTES >= ROWS_AT_ONCE * VALUE_BYTES, "a report fits into a message"
