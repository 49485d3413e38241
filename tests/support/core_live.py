"""A world with producers around ``DaemonState``, in which every pushed sample has a number.

Tests only.

    producer --PlaceAsked, SamplePushed--> DaemonState --LendPlace--> World: sample of each place
                                                       --OrderChunk-> World: samples of each slot

This world adds checks: a place is lent to one producer at a time, and to none while its sample is
unread; no sample is in two batches, or reaches a trainer twice; with ``when_full = "block"`` no
sample is ever lost. A batch that a spectator has seen is still unread.
"""

from dataclasses import dataclass, field

from batchd.core import actions as act
from batchd.core import events as ev
from batchd.core.events import StreamSpec
from batchd.core.mailbox import LiveSpec, WhenFull
from batchd_wire.codes import ErrorCode
from batchd_wire.position import Position
from support.core_invariants import CheckedWorld
from support.core_world import make_spec

Key = tuple[int, Position]
"""A position of a stream."""


def live_spec(number: int = 1, *, capacity: int = 12, when_full: WhenFull = "block", **changes: object) -> StreamSpec:
    """A small live stream: batches of 3, 40 of them in an epoch, in lockstep.

    ``changes`` are those of ``make_spec``.
    """
    batch_size = changes.get("batch_size", 3)
    assert isinstance(batch_size, int)
    values = {"samples": 40 * batch_size, "max_skew": 8, "on_error": "mask", **changes}
    return make_spec(number, live=LiveSpec(capacity, when_full, has_journal=True), **values)


@dataclass(eq=False)
class ModelProducer:
    """One producer of one stream: the place that it may write to, and whether it waits for one."""

    session: int
    stream: int
    place: int | None = None
    request: int | None = None
    dropped: int = 0
    told: list[ErrorCode] = field(default_factory=list)


class LiveWorld(CheckedWorld):
    """The world of the module docstring. Sessions of producers are 1000 and above."""

    def __init__(self, specs: list[StreamSpec], workers: int = 1, chunk_rows_max: int = 256) -> None:
        super().__init__(specs, workers, chunk_rows_max)
        self.producers: dict[int, ModelProducer] = {}
        self.places: dict[tuple[int, int], int | None] = {}
        """By (stream, place): its unread sample, or None."""
        self.pushed: dict[int, list[int]] = {spec.number: [] for spec in specs}
        self._recorded = 0
        self.dropped: dict[int, set[int]] = {spec.number: set() for spec in specs}
        self.handed_out: dict[int, dict[int, Position]] = {spec.number: {} for spec in specs}
        """By stream and sample: its batch."""
        self.seen: dict[int, set[int]] = {}
        """By subscription: the samples that its trainer got."""
        self._in_slot: dict[int, dict[int, int]] = {}
        """By slot: the sample in each row."""
        self._read: dict[int, dict[int, tuple[int, int]]] = {}
        """By order: for each row its place, and the sample in it."""
        self._positions: dict[int, Position] = {}
        self._handed_slots: set[tuple[int, int]] = set()
        """(slot, generation) of the granted batches."""
        self._sample = 0
        self._request = 0

    # --- events -----------------------------------------------------------------------------------

    def produce(self, session: int, stream: int = 1) -> list[act.Action]:
        """A session becomes a producer."""
        self._request += 1
        return self.do(ev.ProducerAsked(session, self._request, self.specs[stream].name))

    def ask(self, session: int) -> list[act.Action]:
        """A producer requests a place."""
        producer = self.producers[session]
        self._request += 1
        producer.request = self._request
        return self.do(ev.PlaceAsked(session, self._request, producer.stream))

    def push(self, session: int) -> list[act.Action]:
        """A producer writes a sample into its place, and reports it."""
        producer = self.producers[session]
        assert producer.place is not None
        place, producer.place = producer.place, None
        self._sample += 1
        assert self.places.get((producer.stream, place)) is None, "a producer overwrites an unread sample"
        self.places[producer.stream, place] = self._sample
        self.pushed[producer.stream].append(self._sample)
        self._request += 1
        producer.request = self._request
        return self.do(ev.SamplePushed(session, self._request, producer.stream, place))

    def put(self, session: int) -> bool:
        """A good producer's next step: it pushes a sample if there is room for one."""
        if self.producers[session].place is None:
            self.ask(session)
        if self.producers[session].place is None:
            return False
        self.push(session)
        return True

    def push_all(self, session: int = 1000, count: int = 1 << 30) -> int:
        """Push until there is no room, or ``count`` samples; return their number."""
        if session not in self.producers:
            self.produce(session)
        pushed = 0
        while pushed < count and self.put(session):
            pushed += 1
        return pushed

    def mismatch(self, number: int, sequence: int) -> list[act.Action]:
        """A trainer reports a mismatched batch.

        No trainer loses the batch for that.
        """
        trainer = self.trainers[number]
        _slot, generation = trainer.grants[sequence]
        return self.do(ev.BatchMismatched(trainer.session, number, sequence, generation))

    def withdraw(self, session: int) -> list[act.Action]:
        """A producer stops waiting."""
        producer = self.producers[session]
        producer.place = producer.request = None
        return self.do(ev.PlaceWithdrawn(session, producer.stream))

    def end_producer(self, session: int) -> list[act.Action]:
        """A producer dies or disconnects."""
        del self.producers[session]
        return self.do(ev.SessionEnded(session))

    def fill(self, number: int, busy_us: int = 1000, bad: tuple[int, ...] = ()) -> list[act.Action]:
        """A worker carries out its oldest order.

        Its samples must have stayed in their places until now.
        """
        order = self.workers[number].orders[0]
        for row, (place, sample) in self._read.get(order.order, {}).items():
            assert self.places[order.stream, place] == sample, "a place was lent while a worker reads it"
            self._in_slot[order.slot][row] = sample
        return super().fill(number, busy_us, bad)

    def do(self, event: ev.Event) -> list[act.Action]:
        """Handle one event; then check all samples."""
        actions = super().do(event)
        for number, stream in self.state.streams.items():
            counted, spec = stream.delivery.supply.statistics(), self.specs[number]
            if counted is None or spec.live is None:
                continue
            lent = sum(one.place is not None for one in self.producers.values() if one.stream == number)
            waiting = sum(one.request is not None for one in self.producers.values() if one.stream == number)
            unread = sum(one == number and sample is not None for (one, _), sample in self.places.items())
            assert (counted.lent_places, counted.queued_samples + counted.bound_samples) == (lent, unread)
            if number not in self.stopped:
                assert counted.waiting_producers == waiting
                assert not waiting or lent + unread == spec.live.capacity, "a producer waits although a place is free"
            assert counted.pushed_samples == len(self.pushed[number])
            assert counted.dropped_oldest == len(self.dropped[number])
            if self.slots_max[number] == spec.slots_max:
                assert counted.lost_batches == 0, "a wanted batch is lost"
            accounted = len(self.handed_out[number]) + len(self.dropped[number]) + unread
            assert accounted == len(self.pushed[number]), "a sample is lost"
        assert self._recorded == sum(map(len, self.handed_out.values())), "a batch is not recorded"
        return actions

    # --- actions, checked -------------------------------------------------------------------------

    def _perform_AdmitProducer(self, action: act.AdmitProducer) -> None:  # noqa: N802
        assert action.request == self._request
        self.producers.setdefault(action.session, ModelProducer(action.session, action.stream))

    def _perform_LendPlace(self, action: act.LendPlace) -> None:  # noqa: N802
        producer = self.producers[action.session]
        live = self.specs[producer.stream].live
        assert live is not None
        assert producer.request == action.request, "an answer without a request"
        producer.request = None
        if action.place is None:
            assert live.when_full != "block", "a sample is dropped though producers wait"
            producer.dropped += 1
            return
        self._lend(producer, action.place)

    def _perform_TakeSample(self, action: act.TakeSample) -> None:  # noqa: N802
        producer = self.producers[action.session]
        assert producer.request == action.request
        producer.request = None
        if action.next_place is not None:
            self._lend(producer, action.next_place)

    def _lend(self, producer: ModelProducer, place: int) -> None:
        spec = self.specs[producer.stream]
        assert spec.live is not None
        assert 0 <= place < spec.live.capacity
        if producer.place == place:
            return  # the answer is repeated
        assert producer.place is None, "a producer has two places"
        lent = {one.place for one in self.producers.values() if one.stream == producer.stream}
        assert place not in lent, "two producers have one place"
        sample = self.places.get((producer.stream, place))
        if sample is not None:
            assert spec.live.when_full == "drop_oldest", "a sample is dropped without permission"
            unread = [one for (stream, _), one in self.places.items() if stream == producer.stream and one is not None]
            assert len(unread) + len(lent - {None}) == spec.live.capacity, (
                "a sample is dropped although a place is free"
            )
            self.dropped[producer.stream].add(sample)
            self.places[producer.stream, place] = None
        producer.place = place

    def _perform_ReserveSlot(self, action: act.ReserveSlot) -> None:  # noqa: N802
        super()._perform_ReserveSlot(action)
        self._in_slot[action.slot] = {}

    def _perform_OrderChunk(self, order: act.OrderChunk) -> None:  # noqa: N802
        super()._perform_OrderChunk(order)
        if self.specs[order.stream].live is None:
            assert not order.places
            return
        assert len(order.places) == len(order.rows)
        samples = [self.places.get((order.stream, place)) for place in order.places]
        assert None not in samples, "a worker is ordered to read an empty place"
        assert not set(samples) & set(self._in_slot[order.slot].values()), "a sample is in two rows"
        rows = order.rows
        self._read[order.order] = {
            row: (place, sample)
            for row, place, sample in zip(rows, order.places, samples, strict=True)
            if sample is not None
        }
        self._positions[order.slot] = order.position

    def _perform_RecordBatch(self, action: act.RecordBatch) -> None:  # noqa: N802
        samples, pushed = self._in_slot[action.slot], self.pushed[action.stream]
        assert [pushed[number] for number in action.pushed] == [samples[row] for row in range(len(samples))]
        assert not set(samples.values()) & set(self.handed_out[action.stream]), "a batch is recorded too late, or twice"
        self._recorded += len(samples)

    def _perform_GrantLease(self, lease: act.GrantLease) -> None:  # noqa: N802
        super()._perform_GrantLease(lease)
        if self.specs[lease.stream].live is None:
            return
        if self.trainers[lease.subscription].is_spectator:
            return  # a spectator takes no batch from a trainer
        samples = self._in_slot[lease.slot]
        position = Position(lease.epoch, lease.step)
        if (lease.slot, lease.generation) not in self._handed_slots:
            self._handed_slots.add((lease.slot, lease.generation))
            for sample in samples.values():
                assert sample not in self.handed_out[lease.stream], "a sample is in two batches"
                assert sample not in self.dropped[lease.stream], "a sample that was dropped is handed out"
                self.handed_out[lease.stream][sample] = position
            for key, sample in self.places.items():
                if key[0] == lease.stream and sample in self.handed_out[lease.stream]:
                    self.places[key] = None
        seen = self.seen.setdefault(lease.subscription, set())
        mine = {samples[row] for row in range(lease.first, lease.first + lease.count)}
        assert not mine & seen, "a trainer gets a sample twice"
        seen |= mine

    def _perform_Refuse(self, action: act.Refuse) -> None:  # noqa: N802
        producer = self.producers.get(action.session)
        if producer is None:
            super()._perform_Refuse(action)
        elif producer.request == action.request:
            producer.request = None
            producer.told.append(ErrorCode(action.error))

    def _start(self, asked: ev.SubscriptionAsked, action: act.AdmitSubscription) -> Position:
        """The start after all lost batches, in the same rounds as its fellow ranks."""
        start, wanted = Position(action.course.epoch, action.course.base), super()._start(asked, action)
        if self.specs[action.stream].live is None:
            return wanted
        assert start >= wanted
        if start.epoch == wanted.epoch:
            assert (start.step - wanted.step) % asked.world_size == 0
        there = {slot.committed for slot in self.slots.values() if slot.stream == action.stream and not slot.spoilt}
        gone = [position for position in self.handed_out[action.stream].values() if position not in there]
        assert all(position < start for position in gone), "a trainer begins before lost batches"
        return start
