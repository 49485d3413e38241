"""Live streams with random producers, trainers, workers and failures.

Invariants are checked after every step, and at the end all participants make progress.

Some of the trainers are spectators, whose looks consume no samples.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchd.core import events as ev
from support.core_live import LiveWorld, live_spec
from support.core_world import Trainer
from unit.core.test_core_model import WorldMachine

PRODUCERS = 1000
"""Sessions from this number on belong to producers."""
GOAL_BATCHES = 3
DRAIN_TURNS = 200

specs = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 4),
        "extra_places": st.integers(0, 12),
        "when_full": st.sampled_from(["block", "block", "drop_oldest", "drop_newest"]),
        "window": st.integers(1, 5),
        "max_skew": st.sampled_from([1, 2, 5, 8]),
        "slots_max": st.sampled_from([4, 4, 5, 6, 8, 12]),
    }
)


class LiveMachine(WorldMachine):
    """A machine whose producers push, wait, give up and die.

    Its trainers pull, connect late and disconnect; workers die; memory runs out.
    """

    @initialize(spec=specs, workers=st.integers(1, 3), chunk_rows_max=st.sampled_from([1, 2, 100]))
    def begin(self, spec, workers, chunk_rows_max):
        extra = spec.pop("extra_places")
        made = live_spec(capacity=spec["batch_size"] + extra, **spec)
        self.world = LiveWorld([made], workers, chunk_rows_max)
        self.world.start_workers()
        for session in (PRODUCERS, PRODUCERS + 1):
            self.world.produce(session)
        self.world.subscribe(1, 1)

    @rule(moves=st.lists(st.integers(0, 1 << 12), min_size=15, max_size=60))
    def go_on(self, moves):
        """Run many small steps in a random order: each number selects an actor and an action."""
        for move in moves:
            who, what = divmod(move, 12)
            busy = self._at_work()
            if what < 4 and busy:
                self.world.fill(busy[who % len(busy)], busy_us=(1, 2_000, 50_000)[who % 3])
            elif what < 9 and self.world.producers:
                self.world.put(self._producer(who))
            elif self.world.trainers:
                self._pull(self._trainer(who), what, waiting=who % 3 == 0)

    def _pull(self, trainer: Trainer, what: int, *, waiting: bool) -> None:
        if what == 9:
            self.world.pull(trainer.number, release=0)
        else:
            self.world.pull(trainer.number, release=max(0, len(trainer.leases) - 1), waiting=waiting)

    # --- connects and disconnects ---------------------------------------------------------------

    @rule(
        session=st.integers(1, 6),
        place=st.sampled_from([(0, 1), (0, 1), (0, 2), (1, 2), (2, 3)]),
        window=st.sampled_from([0, 1, 3, 20]),
        step=st.sampled_from([0, 0, 0, 1, 7, 40]),
        is_spectator=st.booleans(),
    )
    def subscribe(self, session, place, window, step, is_spectator):
        rank, world_size = place
        self.world.subscribe(
            1, session, rank=rank, world_size=world_size, window=window, step=step, is_spectator=is_spectator
        )

    @rule(who=st.integers(0, 4))
    def a_producer_comes(self, who):
        self.world.produce(PRODUCERS + who)

    @precondition(lambda self: self.world.producers)
    @rule(who=st.integers(0, 9), how=st.sampled_from(["dies", "gives up", "asks again", "asks and writes nothing"]))
    def a_producer_does_not_push(self, who, how):
        """Stop one producer in some way; no other producer loses its place."""
        session = self._producer(who)
        if how == "dies":
            self.world.end_producer(session)
        elif how == "gives up":
            self.world.withdraw(session)
        else:
            self.world.ask(session)

    @precondition(lambda self: self.world.producers)
    @rule(who=st.integers(0, 9), place=st.integers(0, 40), is_stranger=st.booleans())
    def talk_nonsense(self, who, place, is_stranger):
        """Send samples in places that were not lent, or from a session that is no producer.

        Neither changes any state.
        """
        session = self._producer(who)
        if self.world.producers[session].place == place:
            place += 100
        session += 5000 * is_stranger
        before = self.world.state.statistics().streams[0].live
        for event in (ev.SamplePushed(session, 1 << 40, 1, place), ev.SamplePushed(session, 1 << 40, 7, place)):
            refused = self.world.state.handle(event, self.world.now)
            assert [action.request for action in refused] == [1 << 40]
        after = self.world.state.statistics().streams[0].live
        assert (before.pushed_samples, before.lent_places) == (after.pushed_samples, after.lent_places)

    # --- failures -------------------------------------------------------------------------------

    @precondition(lambda self: self.world.workers)
    @rule(who=st.integers(0, 9), at_work=st.booleans(), from_outside=st.booleans())
    def kill_worker(self, who, at_work, from_outside):
        number = list(self.world.workers)[who % len(self.world.workers)]
        orders = self.world.workers[number].orders
        if at_work and orders:
            self.world.kill_at(number, orders[0].rows[0], from_outside=from_outside)
        else:
            self.world.kill(number, ev.Note(0, 0, 0), from_outside=from_outside)

    def _producer(self, who: int) -> int:
        return list(self.world.producers)[who % len(self.world.producers)]

    # --- the end: every participant that wants to continue makes progress -----------------------

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for session in list(self.world.producers):
            if self.world.producers[session].place is not None:
                # A producer that never writes keeps one place, and none can be spared.
                self.world.withdraw(session)
        self.world.produce(PRODUCERS)
        trainers = [one for one in self.world.trainers.values() if not one.ended and not one.is_spectator]
        goals = {one: one.granted + GOAL_BATCHES for one in trainers}
        for _ in range(DRAIN_TURNS):
            behind = [one for one, goal in goals.items() if one.granted < goal and not self.world.stopped]
            if not behind:
                break
            self._all_take_a_turn(trainers)
        else:
            pytest.fail(f"{behind} make no progress, though they release every batch")
        self._all_leave()

    def _all_take_a_turn(self, trainers: list[Trainer]) -> None:
        """Let every trainer hold one batch and wait for the next.

        The producers push as long as there are free places.
        """
        self.world.now += 0.6
        self.world.do(ev.Ticked())
        while self.world.losses:
            self.world.lose_next()
        self.world.replace_workers()
        for session, producer in self.world.producers.items():
            if producer.place is not None:
                self.world.push(session)  # the trainer had waited
        self.world.put(PRODUCERS)
        for _ in range(4):
            for number in self._at_work():
                self.world.fill(number)
        for trainer in trainers:
            self.world.pull(trainer.number, release=max(0, len(trainer.leases) - 1))

    def _all_leave(self) -> None:
        """Disconnect every trainer: after the last one, no sample is bound to a batch.

        Every sample that no trainer received waits for the next one.
        """
        for session in {one.session for one in self.world.trainers.values()}:
            self.world.end_session(session)
        for session in list(self.world.producers):
            self.world.end_producer(session)
        while self.world.losses or self._at_work():
            while self.world.losses:
                self.world.lose_next()
            self.world.fill_all()
        live = self.world.state.statistics().streams[0].live
        assert (live.bound_samples, live.lent_places, live.producers, live.waiting_producers) == (0, 0, 0, 0)


TestLive = LiveMachine.TestCase


@pytest.mark.thorough
class TestLiveLong(TestLive):
    """The same with more examples."""

    settings = settings(max_examples=max(40, settings.default.max_examples))
