"""Take the batches of one stream in order, across restarts of the daemon. Runs in the trainer.

    take:  is a handle here?
        yes --> check, lease, tell the daemon (one Pull) --> Batch
        no  --> tell the daemon that the loop waits (one Pull);
                wait for a handle, end of file, or the deadline, and look again

Invariant: ``Subscription.taken`` and ``_ready`` change in the same instant, after everything that
can fail or be interrupted. So no exception loses or repeats a position.
"""

import logging
import random
import time
from contextlib import suppress
from functools import partial

from batchd_client import errors
from batchd_client.batch import Batch, Lease, Shown
from batchd_client.connection import Connection
from batchd_client.hints import log_once, missing_samples_hint, shared_batches_hint
from batchd_client.memory import BATCHES_HELD_MAX, BatchMemory, ReceiveBuffer
from batchd_client.reports import Reports
from batchd_client.session import Session
from batchd_client.subscription import BEGINNING, Beginning, Subscription, SubscriptionRequest
from batchd_wire.codes import ErrorCode
from batchd_wire.messages import AskBad, AskStatus, BadSamples, Handle, Mismatched, Parcel, Refused, Status, Subscribed
from batchd_wire.position import Position
from batchd_wire.slot import UNFINISHED, holds_generation
from batchd_wire.status import read_status
from batchd_wire.wording import counted

ANNOUNCE_AGAIN_S = 1.0
"""Interval of a waiting trainer's pulls: they detect a daemon that lost the session."""
SILENCE_MAX_S = 1.0
"""Wait for the first batch before the reason is logged."""
DEFINED_WITHIN_S = 60.0
"""For a stream that is defined: its source is scanned, after those of others."""
BUSY_PAUSE_S = 0.1
"""Pause before a retry of ``Subscribe`` when other trainers hold the memory."""

CLOSE_S = 1.0
"""Most time that ``close`` waits until the daemon has the last reports."""

ENDLESS_STEPS = 1 << 30
"""A live stream has more steps than this, which have no meaning; other epochs have fewer."""

MISMATCHES_MAX = 5
"""Mismatches of one batch before the trainer gets an error."""
MISMATCH_PAUSE_S = 0.1
"""Pause before the next try; doubled each time, so that the daemon decodes the batch again."""

_log = logging.getLogger("batchd_client")


class StreamReader:
    """See the module. Reads ``claim`` from ``begin`` on."""

    def __init__(
        self, connection: Connection, claim: SubscriptionRequest, begin: Beginning, *, notes_rows: bool = True
    ) -> None:
        """Subscribe. Waits for memory that others hold. Raises the daemon's refusal.

        ``notes_rows``: the batches are those that a loop reports about.
        """
        self._notes_rows = notes_rows
        self.claim = claim
        self.batches = 0
        self.samples = 0
        self.wait_s = 0.0
        self.first_take_s: float | None = None
        """When the first batch was asked for, by ``time.monotonic``."""
        self.moves = 0
        self.mismatches = 0
        self._mismatched_at: Position | None = None
        self._mismatches_here = 0
        self._pause_s = 0.0
        self._is_hint_logged = False
        """True once the reason of the first wait has been looked for."""
        self._missing: str | None = None
        """The hint about missing samples at that time."""
        self.connection = connection
        self.reports = Reports(claim.stream)
        self._ready: Batch | None = None
        self._began_s = 0.0
        self._reconnects_before = 0
        self._has_waited = False
        self._within: tuple[Position, int] | None = None
        """Where the stream was last moved into the middle of a batch, and to which sample."""
        self.subscription: Subscription
        connection.run(partial(self._begin, begin=begin))

    @property
    def position(self) -> Position:
        """The position of the next batch that ``take`` gives."""
        return self.subscription.position

    def take(self, epoch: int, *, wait: bool = True) -> Batch | None:
        """Next batch if in ``epoch`` and the claim (without ``wait``: and arrived), else None."""
        started_s = time.perf_counter()
        end_epoch = self.claim.end_epoch
        if self.subscription.position.epoch != epoch or (end_epoch is not None and epoch >= end_epoch):
            self.report_end()
            return None
        if self.first_take_s is None:
            self.first_take_s = time.monotonic()
        if self._ready is None:
            if wait:
                self._fetch()
            else:
                self.connection.run_if_usable(self._look)
        batch, subscription = self._ready, self.subscription
        if batch is None:
            return None
        wait_s = time.perf_counter() - started_s
        wait_us = int(wait_s * 1e6)
        if self._notes_rows:
            self.reports.note(batch.span)
        # From here on nothing is called, so neither a signal handler nor another thread can come in
        # between.
        batch.wait_s = wait_s
        subscription.wait_us += wait_us
        self.batches += 1
        self.samples += batch.samples
        self.wait_s += wait_s
        subscription.taken += 1
        self._ready = None
        return batch

    @property
    def served_as(self) -> str:
        """The stream's name in the daemon."""
        return self.subscription.admitted.stream or self.claim.stream

    @property
    def batch_size(self) -> int:
        """Samples in a full batch."""
        return self.subscription.admitted.batch_size

    @property
    def steps(self) -> int:
        """Batches in an epoch, of all ranks together."""
        return self.subscription.admitted.steps

    @property
    def rounds(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self.subscription.admitted.rounds

    @property
    def left(self) -> int:
        """Batches of this rank in the rest of the epoch."""
        return self.subscription.counter.left(self.subscription.taken)

    @property
    def held(self) -> int:
        """Number of batches that are alive, or have arrays that are."""
        return self.subscription.held

    @property
    def buffers(self) -> list[ReceiveBuffer]:
        """Memory of batches that arrive as bytes."""
        return self.subscription.arrivals.buffers

    def in_stream(self, position: Position) -> tuple[Position, int | None]:
        """A position where this stream was, and the samples before it if it is within a batch."""
        return position, self._within[1] if self._within is not None and self._within[0] == position else None

    def begin_at(self, position: Position) -> Beginning:
        """Where to begin for a position."""
        return Beginning(position)

    def begin_again(self, position: Position) -> Beginning:
        """Where to begin for a position where this stream was."""
        return Beginning(*self.in_stream(position))

    def report_end(self) -> None:
        """The loop is over: release its last batch, and send the total wait and the reports."""
        self.connection.run_if_usable(self._report_end)

    def move(self, begin: Beginning) -> None:
        """Continue elsewhere. A refusal changes nothing."""
        self.connection.run(partial(self._move, begin=begin))

    def close(self) -> None:
        """End the claim, once its reports are sent."""
        self._ready = None
        self.reports.wait()
        self.connection.run_if_usable(self._unsubscribe)

    # --- subscribing; each of these has the session to itself -------------------------------------

    def _begin(self, session: Session, begin: Beginning) -> None:
        self.subscription = self._subscribe(session, begin)
        self._note_within()
        # Last: after an earlier interrupt, the stream subscribes again.
        session.adopt(self.subscription, self)

    def _note_within(self) -> None:
        start, sample = self.subscription.counter.start, self.subscription.admitted.sample
        self._within = (start, sample) if sample is not None else None

    def _subscribe(self, session: Session, begin: Beginning) -> Subscription:
        within_s = DEFINED_WITHIN_S if self.claim.defines else 0.0
        deadline = max(self.connection.deadlines.request_deadline(), time.monotonic() + within_s)
        message = partial(self.claim.subscribe, begin=begin)
        busy: errors.RingBusy | None = None
        while True:
            try:
                admitted = session.request(message, Subscribed, deadline)
                lacks_samples = (begin.sample is not None or begin.converts) and not admitted.parts
                lacks_streams = self.claim.defines and not admitted.owner
                if lacks_samples or lacks_streams or (self.claim.settings and not admitted.stream):
                    session.unsubscribe(admitted.subscription)
                    what = f"for {'define' if lacks_streams else 'set='}; upgrade it"
                    what = "to begin at a sample; upgrade it, or seek a step" if lacks_samples else what
                    raise errors.VersionMismatch(f"the daemon is too old {what}")
                subscription = Subscription(self.claim, begin, admitted)
                subscription.reports = self.reports
                self.reports.is_kept = subscription.admitted.keeps_reports
            except errors.RingBusy as error:
                if time.monotonic() + BUSY_PAUSE_S >= deadline:
                    raise
                busy = error.with_traceback(None)  # which would keep the session alive
            except errors.ConnectTimeout:
                if busy is not None:
                    # A request that the deadline cut off has the less helpful error.
                    raise busy from None
                raise
            else:
                steps, samples = subscription.admitted.steps, subscription.admitted.samples
                text = shared_batches_hint(self.claim.stream, self.claim.world_size, steps, samples)
                if text is not None:
                    log_once(text, logging.WARNING)
                if steps >= ENDLESS_STEPS and subscription.counter.start != begin.position != BEGINNING.position:
                    _log.info(
                        "stream %r is live: it goes on at %s, not %s",
                        self.claim.stream,
                        subscription.position,
                        begin.position,
                    )
                return subscription
            time.sleep(random.uniform(BUSY_PAUSE_S / 2, BUSY_PAUSE_S))  # noqa: S311  trainers that come together ask apart

    def _go_on(self, session: Session) -> None:
        """Subscribe again where the stream stands."""
        within = self._within
        self._move(session, self.subscription.begin)
        self._within = within

    def _move(self, session: Session, begin: Beginning) -> None:
        former = self.subscription
        if session.has(former):
            session.unsubscribe(former.number)
        try:
            subscription = self._subscribe(session, begin)
        except errors.StateMismatch as error:
            if begin.fingerprint != former.admitted.fingerprint:
                raise  # it is the user's
            raise errors.StreamChanged(str(error).partition("\n")[0]) from None
        if not subscription.is_same_stream(former):
            session.settle()
            raise errors.StreamChanged
        self.subscription, self._ready = subscription, None
        self._note_within()
        self.moves += 1
        session.adopt(subscription, self)

    def _unsubscribe(self, session: Session) -> None:
        if session.has(self.subscription):
            session.unsubscribe(self.subscription.number)
            session.settle()
            if self.reports.is_unconfirmed:
                # Its answer comes after the daemon has read all that was sent before.
                with suppress(errors.BatchdClientError):
                    session.request(partial(AskBad, stream=self.served_as), BadSamples, time.monotonic() + CLOSE_S)

    # --- waiting ----------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Make the next batch ready, or raise the reason."""
        connection, deadlines = self.connection, self.connection.deadlines
        self._began_s = time.monotonic()
        self._reconnects_before = reconnects = connection.reconnects
        self._has_waited = False
        self._pause_s = 0.0
        if len(self.subscription.lent) >= BATCHES_HELD_MAX and self.subscription.held >= BATCHES_HELD_MAX:
            raise errors.RingExhausted(
                f"this trainer holds {self.subscription.held} batches of stream {self.claim.stream!r}"
            )
        self.subscription.announced_s = 0.0
        give_up = self._began_s + deadlines.batch_timeout_s
        while not connection.run(self._attempt):
            # The daemon's absence has a deadline of its own.
            if connection.reconnects != reconnects:
                reconnects = connection.reconnects
                give_up = time.monotonic() + deadlines.batch_timeout_s
            seconds = give_up - time.monotonic()
            if seconds <= 0:
                if not connection.run(partial(self._waits_for_storage, deadline=deadlines.request_deadline())):
                    raise self._timeout()
                give_up = time.monotonic() + deadlines.batch_timeout_s
                continue
            if not self._is_hint_logged and not self.batches and time.monotonic() - self._began_s >= SILENCE_MAX_S:
                self._is_hint_logged = True
                connection.run(partial(self._log_hint, deadline=min(give_up, deadlines.request_deadline())))
            if self._pause_s:
                seconds, self._pause_s = min(self._pause_s, seconds), 0.0
                time.sleep(seconds)
            else:
                connection.wait(seconds)
                self._has_waited = True

    def _log_hint(self, session: Session, deadline: float) -> None:
        """Log if the first batch waits for samples that no producer has pushed."""
        # A daemon that does not answer is reported once the batch is overdue.
        with suppress(errors.DaemonUnavailable):
            status = read_status(session.request(AskStatus, Status, deadline).status)
            self._missing = missing_samples_hint(status, self.served_as)
            if self._missing is not None:
                _log.warning("waiting for samples: %s", self._missing)

    def _waits_for_storage(self, session: Session, deadline: float) -> bool:
        """Whether the daemon waits for the storage of the stream, which has a limit of its own."""
        with suppress(errors.DaemonUnavailable):
            status = read_status(session.request(AskStatus, Status, deadline).status)
            away = next((one.away for one in status.streams if one.name == self.served_as), None)
            if away is not None:
                _log.warning("stream %s waits for its storage: %s", self.claim.stream, away)
            return away is not None
        return False

    def _look(self, session: Session) -> None:
        """Make the next batch ready if it has arrived. Does not wait, nor report a wait."""
        subscription = self.subscription
        if not session.has(subscription) or len(subscription.lent) >= BATCHES_HELD_MAX:
            return
        subscription.announced_s = 0.0
        if not self._accept(session) and session.has(subscription) and subscription.ended:
            session.give_back(subscription)

    def _report_end(self, session: Session) -> None:
        """End of the loop: release its last batch, and send the total wait and the reports."""
        subscription = self.subscription
        is_worse = subscription.wait_us > subscription.wait_reported_us
        if session.has(subscription) and (subscription.ended or is_worse or self.reports.has_news):
            session.give_back(subscription)

    def _attempt(self, session: Session) -> bool:
        """Make a batch ready if its handle is here; else tell the daemon that the loop waits."""
        if self._ready is not None:
            return True
        if not session.has(self.subscription):
            self._go_on(session)
        if self._accept(session):
            return True
        if not session.has(self.subscription):
            if self._pause_s:
                # Retry after a pause, in which other threads may use the connection.
                return False
            self._go_on(session)
        if self._has_waited:
            session.check_link()
        return self._announce(session) and self._accept(session)

    def _accept(self, session: Session) -> bool:
        subscription = self.subscription
        handles = subscription.handles
        if not handles:
            session.receive_handles(subscription)
            if not handles:
                if subscription.refusal is not None and subscription.announced_s:
                    self._take_refusal(session, subscription.refusal)
                return False
        # Until the batch is stored: an interrupt in between would lose the handle.
        session.is_interrupted = True
        handle = handles.popleft()
        memory = self._memory(session, handle)
        view = subscription.view(handle)
        wrong = view.checksums.wrong_rows(memory.page, handle.first, handle.count)
        if wrong:
            self._report_mismatch(session, handle, len(wrong))
            return False
        lease = Lease(memory, None if type(handle) is Parcel else session.link, subscription.ended, handle)
        subscription.add_lease(lease)
        self._ready = Batch(self.claim.stream, view.fields, lease, handle, Shown.of(subscription.admitted))
        session.is_interrupted = False
        self._mismatches_here = 0
        # Otherwise the daemon counted it as consumed when it granted it.
        if not subscription.announced_s and subscription.is_report_due:
            session.give_back(subscription)
        if session.has_left_overs:
            session.settle()
        return True

    def _announce(self, session: Session) -> bool:
        """Report that the loop waits, where that is new; True if something was sent."""
        subscription, now_s = self.subscription, time.monotonic()
        if not subscription.announced_s:
            subscription.refusal = None  # of an earlier call
        elif not subscription.ended and now_s - subscription.announced_s < ANNOUNCE_AGAIN_S:
            return False
        waited_us = int((now_s - self._began_s) * 1e6)
        if session.give_back(subscription, waited_us, waiting=True):
            subscription.announced_s = now_s
        if session.has_left_overs:
            session.settle()
        return True

    # --- one batch --------------------------------------------------------------------------------

    def _memory(self, session: Session, handle: Handle | Parcel) -> BatchMemory:
        """Find the memory of a handle, and check that it holds the batch."""
        subscription = self.subscription
        due, layout = subscription.leased, subscription.layout
        if handle.sequence != due or not subscription.counter.expects(due, handle.epoch, handle.step):
            raise errors.ProtocolError(
                f"batch number {handle.sequence} (epoch {handle.epoch}, step {handle.step}) of stream {self.claim.stream!r} "
                f"came where number {due}, from {subscription.counter.position(due)} on, was due"
            )
        if type(handle) is Parcel:
            buffer = subscription.lent[due] = subscription.received.popleft()
            return buffer
        assert type(handle) is Handle
        memory = session.slot(handle.slot)
        if memory.slot_bytes != layout.slot_bytes:
            raise errors.ProtocolError(
                f"slot {handle.slot} has {memory.slot_bytes} bytes instead of {layout.slot_bytes}"
            )
        if handle.generation == UNFINISHED or not holds_generation(memory.page, handle.generation):
            raise errors.ProtocolError(
                f"slot {handle.slot} does not hold generation {handle.generation} that its handle names"
            )
        return memory

    def _report_mismatch(self, session: Session, handle: Handle | Parcel, wrong: int) -> None:
        """Report a mismatch and unsubscribe, to resubscribe. Raises ``BatchCorrupt`` in the end."""
        subscription = self.subscription
        if subscription.position != self._mismatched_at:
            self._mismatched_at, self._mismatches_here = subscription.position, 0
        self.mismatches += 1
        self._mismatches_here += 1
        where = f"batch (epoch {handle.epoch}, step {handle.step}) of stream {self.claim.stream!r}"
        text = f"{where}: {wrong} of {counted(handle.count, 'row')} with checksums that do not match"
        session.send(Mismatched(subscription.number, handle.sequence, handle.generation))
        session.unsubscribe(subscription.number)
        # Not earlier: a subscription without this handle must not be read on.
        session.is_interrupted = False
        if self._mismatches_here >= MISMATCHES_MAX:
            self._mismatches_here = 0
            raise errors.BatchCorrupt(f"{text}, the {MISMATCHES_MAX}th time")
        self._pause_s = MISMATCH_PAUSE_S * 2 ** (self._mismatches_here - 1)
        _log.warning("%s; asking for it again", text)

    # --- why there is none ------------------------------------------------------------------------

    def _take_refusal(self, session: Session, refused: Refused) -> None:
        """Raise the refusal; a stream with new settings is only unsubscribed, to resubscribe."""
        if refused.error == ErrorCode.STREAM_REPLACED:
            session.unsubscribe(self.subscription.number)
        elif refused.error == ErrorCode.RING_EXHAUSTED:
            raise errors.RingExhausted(
                f"{refused.text} ({self.subscription.held} of its batches are alive in this program)"
            )
        else:
            raise errors.error_for_code(refused.error, refused.text)

    def _timeout(self) -> errors.BatchTimeout:
        connection, position = self.connection, self.position
        silent_s = time.monotonic() - connection.session.last_message_s if connection.session else 0.0
        lost = connection.reconnects - self._reconnects_before
        again = f", but the connection was lost and restored {counted(lost, 'time')} meanwhile" if lost else ""
        return errors.BatchTimeout(
            f"no batch of stream {self.claim.stream!r} at epoch {position.epoch}, step {position.step} within "
            f"{connection.deadlines.batch_timeout_s:g} s: the daemon at {connection.place.address} is alive (its lifeline is "
            f"open){again}, its last word came {silent_s:.0f} s ago, and this program "
            f"holds {counted(self.subscription.held, 'batch')} of the stream"
            + (f"; {self._missing}" if self._missing is not None and not self.batches else "")
        )
