"""The core under random trainers, workers, failures and time.

All invariants are checked after every step, and at the end all trainers must progress.
"""

import dataclasses
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from batchd.core import events as ev
from batchd.core.actions import OrderChunk
from support.core_invariants import CheckedWorld, is_too_far_ahead
from support.core_world import SAMPLE_TIMEOUT_S, WORKERS, Trainer, make_spec

FIRST_REMOTE_SESSION = 5
GOAL_BATCHES = 3
"""Every trainer must get this many further batches at the end."""
DRAIN_TURNS = 150
STREAMS_MAX = 4
ORDERS_A_TURN = 4
NO_SAMPLE = 1 << 20
MANY_EXAMPLES = settings(max_examples=max(75, settings.default.max_examples))
"""They are cheap, and the core is central."""

specs = st.fixed_dictionaries(
    {
        "samples": st.integers(1, 24),
        "batch_size": st.integers(1, 6),
        "shuffle": st.booleans(),
        "groups_neighbours": st.booleans(),
        "open_blocks": st.sampled_from([None, None, 1, 3]),
        "siblings": st.sampled_from(["", "", "one", "one", "other"]),
        "joins_near": st.booleans(),
        "drop_last": st.booleans(),
        "budget": st.sampled_from([None, None, 6]),
        "repeats": st.sampled_from([1, 1, 2]),
        "equal_epochs": st.booleans(),
        "window": st.integers(1, 5),
        "max_skew": st.sampled_from([None, None, 1, 2, 5]),
        "kept_ahead": st.sampled_from([None, None, 0, 2]),
        "slots_max": st.sampled_from([2, 3, 4, 4, 5, 6, 8, 12]),
        "on_error": st.sampled_from(["substitute", "substitute", "mask", "fail"]),
        "bad_fraction_max": st.sampled_from([1.0, 1.0, 1.0, 0.3]),
        "storage_away_s": st.sampled_from([5.0, 3600.0]),
    }
)


class WorldMachine(RuleBasedStateMachine):
    """What happens in every world: trainers leave, time passes, and memory runs out."""

    @precondition(lambda self: len(self.world.trainers) > 1)
    @rule(who=st.integers(0, 9), how=st.sampled_from(["ends", "ends", "dies", "is cut off"]))
    def leave(self, who, how):
        """A trainer leaves in one of three ways."""
        self.world.leave(self._trainer(who), how)

    @precondition(lambda self: self.world.trainers)
    @rule(who=st.integers(0, 9), back=st.integers(1, 4))
    def find_mismatch(self, who, back):
        """A trainer finds other bytes in one of its last batches than the worker wrote."""
        trainer = self._trainer(who)
        if trainer.granted >= back:
            self.world.mismatch(trainer.number, trainer.granted - back)

    @rule(pause_s=st.sampled_from([0.1, 0.6, 6.0, 100.0]))
    def time_passes(self, pause_s):
        """Killed workers die, and new ones start."""
        self.world.now += pause_s
        self.world.do(ev.Ticked())
        self._replace_workers()

    @rule(slots=st.integers(0, 9))
    def memory_gets_short(self, slots):
        self.world.slots_left = slots

    @precondition(lambda self: self.world.losses)
    @rule()
    def slot_is_lost(self):
        self.world.lose_next()

    def _trainer(self, who: int) -> Trainer:
        return list(self.world.trainers.values())[who % len(self.world.trainers)]

    def _replace_workers(self) -> None:
        self.world.replace_workers()

    def _at_work(self) -> list[int]:
        return [number for number, worker in self.world.workers.items() if worker.orders]


class CoreMachine(WorldMachine):
    """Trainers pull, hoard, subscribe and leave.

    Workers fill, die and hang; memory runs out; samples are bad or deadly.
    """

    stream_settings: ClassVar[dict[str, object]] = {}
    """Settings of all streams."""

    @initialize(
        chosen=st.lists(specs, min_size=1, max_size=3),
        workers=st.integers(1, 3),
        chunk_rows_max=st.sampled_from([1, 2, 5, 100]),
        deadly=st.lists(st.sets(st.integers(0, 23), max_size=1), min_size=3, max_size=3),
        small_orders_max=st.sampled_from([0, 0, 3, 8]),
        nodes=st.sampled_from([(), (0, 1)]),
    )
    def begin(self, chosen, workers, chunk_rows_max, deadly, small_orders_max, nodes):
        made = [make_spec(number, **spec, **self.stream_settings) for number, spec in enumerate(chosen, 1)]
        kind = dataclasses.replace(WORKERS, small_orders_max=small_orders_max)
        self.world = CheckedWorld(made, workers, chunk_rows_max, kind, nodes)
        self.world.state.tenants.weigh((("tenant1", 3.0), ("tenant2", 0.25)))
        self.deadly = {(number, sample) for number, samples in enumerate(deadly, 1) for sample in samples}
        self.deaths: dict[tuple[int, int], int] = {}
        self.world.start_workers()
        self.world.subscribe(1, 1)

    # --- trainers and workers ---------------------------------------------------------------------

    @rule(moves=st.lists(st.integers(0, 1 << 12), min_size=15, max_size=60))
    def go_on(self, moves):
        """Many small steps in a random order: each number selects an actor and its action."""
        for move in moves:
            who, what = divmod(move, 12)
            if what < 5 and (busy := self._at_work()):
                self._work(busy[who % len(busy)], busy_us=(1, 2_000, 50_000)[who % 3], with_note=what > 0)
            elif self.world.trainers:
                self._pull(self._trainer(who), what, waiting=who % 3 == 0)

    def _pull(self, trainer: Trainer, what: int, *, waiting: bool) -> None:
        """The trainer mostly releases and pulls as a good one does.

        Sometimes it does not wait, hoards, or takes batches one at a time.
        """
        if what == 5:
            self.world.pull(trainer.number, consume=1, release=1, waiting=waiting)
        elif what == 6:
            self.world.pull(trainer.number, release=0)
        elif what == 7:
            self.world.pull(trainer.number)
        else:
            self.world.pull(trainer.number, release=max(0, len(trainer.leases) - 1))

    @rule(
        stream=st.integers(1, 3),
        session=st.integers(1, 6),
        place=st.sampled_from([(0, 1), (0, 1), (0, 1), (0, 2), (1, 2), (2, 3)]),
        window=st.sampled_from([0, 0, 1, 3, 20]),
        course=st.sampled_from([(0, 0, None), (0, 0, None), (0, 1, None), (1, 0, 1), (0, 0, 1), (1, 1 << 20, 4)]),
    )
    def subscribe(self, stream, session, place, window, course):
        """A trainer subscribes; ``course`` has its first epoch and step, and its end epoch."""
        spec = self.world.specs[self.world.serving[(stream - 1) % len(self.world.serving)]]
        rank, world_size = place
        epoch, step, end_epoch = course
        at = {"epoch": epoch, "step": min(step, spec.plan.steps), "end_epoch": end_epoch}
        remote = session >= FIRST_REMOTE_SESSION
        self.world.subscribe(
            spec.number,
            session,
            rank=rank,
            world_size=world_size,
            window=window,
            is_remote=remote,
            owner=f"user:{session}",
            tenant=f"tenant{session % 3}",
            node=session % 2 or None,
            **at,
        )

    @rule()
    def reserve(self):
        """The daemon reserves a slot in advance."""
        self.world.do(ev.SlotWanted())

    @precondition(lambda self: self._sending())
    @rule(who=st.integers(0, 9))
    def send(self, who):
        """The daemon has sent a remote trainer's batch."""
        sending = self._sending()
        self.world.send(sending[who % len(sending)].number)

    @precondition(lambda self: self.world.trainers)
    @rule(who=st.integers(0, 9), epoch=st.integers(3, 9), number=st.integers(1, 3))
    def start_elsewhere(self, who, epoch, number):
        """A trainer leaves while its batches are filled, and others want different batches."""
        trainer = self._trainer(who)
        if not trainer.ended:
            self.world.end(trainer.number)
        for _ in range(number):
            self.world.subscribe(trainer.spec.number, trainer.session, epoch=epoch, is_remote=trainer.is_remote)

    @precondition(lambda self: self.world.trainers)
    @rule(who=st.integers(0, 9), generation=st.integers(0, 3), sequence=st.integers(0, 9), foreign=st.booleans())
    def talk_nonsense(self, who, generation, sequence, foreign):
        """Unknown leases and subscriptions of other sessions change nothing."""
        trainer = self._trainer(who)
        if sequence in trainer.leases and not foreign:
            generation = trainer.leases[sequence][1] + 1
        session = trainer.session + 100 * foreign
        trainer.waiting &= foreign
        self.world.do(ev.Pulled(session, trainer.number, 0, False, 0, [(sequence, generation)]))

    def _sending(self) -> list[Trainer]:
        return [one for one in self.world.trainers.values() if one.is_remote and one.leases]

    # --- reload of the configuration --------------------------------------------------------------

    @rule(
        number=st.integers(0, 9),
        new=st.lists(specs, max_size=2),
        how=st.sampled_from(["added", "removed", "replaced", "other workers", "all at once"]),
        workers=st.integers(1, 4),
        renews=st.booleans(),
    )
    def reload(self, number, new, how, workers, renews):
        """Streams are added, removed and changed, and workers too, during any other work."""
        serving, replaced, removed = self.world.serving, (), ()
        victim = serving[number % len(serving)]
        first = max(self.world.specs) + 1
        added = [make_spec(first + place, **spec) for place, spec in enumerate(new)]
        if how in {"replaced", "all at once"} and added:
            added[0] = dataclasses.replace(added[0], name=self.world.specs[victim].name)
            replaced = (victim,)
        elif how == "removed" and len(serving) > 1:
            removed, added = (victim,), []
        elif how == "other workers":
            added = []
        everything = how == "all at once"
        if everything and len(serving) > 1:
            removed = tuple(one for one in serving if one not in replaced)[:1]
        self.world.reconfigure(
            tuple(added) if len(serving) + len(added) <= STREAMS_MAX else (),
            removed,
            replaced if len(serving) + len(added) <= STREAMS_MAX else (),
            workers if how == "other workers" or everything else None,
            renews_workers=renews and everything,
        )

    # --- failures ---------------------------------------------------------------------------------

    @precondition(lambda self: self._at_work())
    @rule(who=st.integers(0, 9), sample=st.integers(0, 23))
    def find_bad_sample(self, who, sample):
        busy = self._at_work()
        self._work(busy[who % len(busy)], with_note=True, bad=(sample,))

    @precondition(lambda self: self._at_work())
    @rule(who=st.integers(0, 9))
    def find_storage_away(self, who):
        """A worker finds the storage of its oldest order away; the next one may find it back."""
        number = self._at_work()[who % len(self._at_work())]
        before = self._bad_rows()
        if not self.world.workers[number].link:
            self.world.find_away(number)
            assert self._bad_rows() == before

    def _bad_rows(self) -> int:
        return sum(one.bad_rows for one in self.world.state.statistics().streams)

    @precondition(lambda self: self.world.workers)
    @rule(
        who=st.integers(0, 9),
        row=st.integers(0, 5),
        note=st.sampled_from(["none", "in hand", "done before", "nonsense"]),
        from_outside=st.booleans(),
    )
    def kill_worker(self, who, row, note, from_outside):
        """A worker crashes, or another process kills it."""
        number = self._worker(who)
        orders = self.world.workers[number].orders
        if note == "in hand" and orders:
            self.world.kill_at(number, orders[0].rows[row % len(orders[0].rows)], from_outside=from_outside)
        elif note == "nonsense" and orders:
            self.world.kill(number, ev.Note(orders[0].order, NO_SAMPLE, NO_SAMPLE), from_outside=from_outside)
        else:
            nothing_in_hand = ev.Note(0, 0, 0) if note == "done before" else None
            self.world.kill(number, nothing_in_hand, from_outside=from_outside)

    @precondition(lambda self: self.world.workers)
    @rule(who=st.integers(0, 9), hangs=st.booleans())
    def observe(self, who, hangs):
        """The daemon reads a worker's note, perhaps for the second time after a long pause."""
        number = self._worker(who)
        if self.world.workers[number].link:
            return  # its worker host observes it
        orders = self.world.workers[number].orders
        note = ev.Note(orders[0].order, orders[0].rows[0], self.world.samples(orders[0])[0]) if orders else None
        self.world.do(ev.WorkerObserved(number, note))
        if hangs:
            before = list(self.world.state.fleet.workers[number].orders)
            self.world.now += SAMPLE_TIMEOUT_S + 1.0
            self.world.do(ev.WorkerObserved(number, note))
            assert self.world.workers[number].killed or not before

    @precondition(lambda self: any(self.world.specs[one].live is None for one in self.world.serving))
    @rule(who=st.integers(0, 9), slots_max=st.sampled_from([0, 2, 3, 5, 12]))
    def size_ring(self, who, slots_max):
        """A ring may have fewer slots from now on, or more."""
        serving = [one for one in self.world.serving if self.world.specs[one].live is None]
        self.world.size_ring(serving[who % len(serving)], slots_max)

    def _worker(self, who: int) -> int:
        return list(self.world.workers)[who % len(self.world.workers)]

    def _work(self, number: int, *, with_note: bool, busy_us: int = 1000, bad: tuple[int, ...] = ()) -> None:
        """Carry out the oldest order of a worker, or all its orders of that stream.

        A deadly sample kills the worker, unless the sample is in quarantine.
        """
        orders = self.world.workers[number].orders
        order, together = orders[0], len(orders) if with_note else 1
        for row, sample in zip(order.rows, self.world.samples(order), strict=True):
            key = (order.stream, sample)
            if key in self.deadly - self.world.quarantined:
                if with_note:
                    self.deaths[key] = self.deaths.get(key, 0) + 1
                    assert self.deaths[key] <= 2, "a deadly sample ended a third worker that named it"
                    self.world.kill_at(number, row)
                else:
                    self.world.kill(number)
                return
        together = together if all(self._is_harmless(one) for one in orders[1:]) else 1
        self.world.fill(number, busy_us, bad, together)

    def _is_harmless(self, order: OrderChunk) -> bool:
        return not any((order.stream, sample) in self.deadly for sample in self.world.samples(order))

    # --- the end: trainers that want batches get them ---------------------------------------------

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.world.state.statistics()
        trainers = [one for one in self.world.trainers.values() if not one.ended]
        live = [one for one in trainers if one.number % 2 or one.spec.max_skew is not None]
        goals = {one: one.granted + GOAL_BATCHES for one in live}
        for turn in range(DRAIN_TURNS):
            behind = [one for one, goal in goals.items() if not self._is_content(one, goal)]
            if not behind:
                break
            self._all_take_a_turn(live, turn)
        else:
            pytest.fail(f"{behind} get no batches, though they release those that they read")
        self._all_leave()

    def _is_content(self, trainer: Trainer, goal: int) -> bool:
        if trainer.granted >= goal or trainer.upcoming is None:
            return True
        if trainer.spec.number in self.world.stopped or trainer.spec.number not in self.world.serving:
            return True
        delivery = self.world.state.streams[trainer.spec.number].delivery
        return is_too_far_ahead(delivery, delivery.subscriptions[trainer.number])

    def _all_take_a_turn(self, live: list[Trainer], turn: int) -> None:
        """Live trainers hold one batch and wait for the next.

        The others keep their batches and send nothing.
        """
        self.world.now += 0.6
        self.world.do(ev.Ticked())
        while self.world.losses:
            self.world.lose_next()
        self._replace_workers()
        for _ in range(ORDERS_A_TURN):
            for number in self._at_work():
                self._work(number, with_note=turn % 4 > 0)
        for trainer in live:
            while trainer.is_remote and trainer.leases:
                self.world.send(trainer.number)
            self.world.pull(trainer.number, release=max(0, len(trainer.leases) - 1))

    def _all_leave(self) -> None:
        """After the last trainer has left, no slot is promised or held."""
        for session in {one.session for one in self.world.trainers.values()}:
            self.world.end_session(session)
        while sending := self._sending():
            self.world.send(sending[0].number)
        for number, stream in self.world.state.streams.items():
            assert number in self.world.serving or any(slot.fill for slot in stream.delivery.ring.slots.values())
            assert not stream.delivery.subscriptions
            assert all(
                slot.is_ready or slot.is_idle or slot.fill.under_way for slot in stream.delivery.ring.slots.values()
            )


TestCore = CoreMachine.TestCase


@pytest.mark.thorough
class TestCoreLong(TestCore):
    """The same with more examples."""

    settings = MANY_EXAMPLES
