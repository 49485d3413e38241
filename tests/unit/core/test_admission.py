"""Which trainers the daemon admits, and the code and numbers of each refusal."""

import pytest

from batchd.config.tree import STREAMS_MAX
from batchd.core import actions as act
from batchd.core import events as ev
from batchd.core.admission import unknown_stream
from batchd.core.subscription import Blocked
from batchd_wire.codec import TEXT_CHARACTERS_MAX
from batchd_wire.codes import ErrorCode
from batchd_wire.messages import TO_TRAINER, Refused
from support.core_invariants import CheckedWorld
from support.core_world import World, make_spec, pick


def world_of(**changes) -> CheckedWorld:
    """A world of one stream and one worker."""
    world = CheckedWorld([make_spec(**changes)])
    world.start_workers()
    return world


def refusal_of(actions) -> tuple[ErrorCode, str]:
    """Return code and text of the refusal, which must be the only action."""
    assert [type(action) for action in actions] == [act.Refuse]
    return ErrorCode(actions[0].error), actions[0].text


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        ({"rank": 2, "world_size": 2}, ErrorCode.RANK_OUT_OF_RANGE, ["rank 2 of world_size 2", "0 to world_size - 1"]),
        ({"rank": 0, "world_size": 0}, ErrorCode.RANK_OUT_OF_RANGE, ["rank 0 of world_size 0"]),
        ({"rank": 0, "world_size": (1 << 20) + 1}, ErrorCode.RANK_OUT_OF_RANGE, ["world_size 1048577"]),
        ({"window": 65}, ErrorCode.WINDOW_OUT_OF_RANGE, ["window = 65", "1 to 64"]),
        ({"step": 5}, ErrorCode.POSITION_OUT_OF_RANGE, ["epoch 0, step 5", "steps 0 to 3", "'stream1'"]),
        ({"epoch": (1 << 40) + 1}, ErrorCode.POSITION_OUT_OF_RANGE, ["epoch 1099511627777"]),
        ({"sample": 41}, ErrorCode.POSITION_OUT_OF_RANGE, ["epoch 0, sample 41", "samples 0 to 1", "'stream1'"]),
        ({"sample": 1 << 62}, ErrorCode.POSITION_OUT_OF_RANGE, ["sample 4611686018427387904"]),
        ({"epoch": 1 << 62, "sample": 0}, ErrorCode.POSITION_OUT_OF_RANGE, ["epoch 4611686018427387904, sample 0"]),
        ({"fingerprint": "a" * 64}, ErrorCode.FINGERPRINT_MISMATCH, ["aaaaaaaaaaaaaaaa, now ffffffffffffffff"]),
        ({"name": "photos"}, ErrorCode.UNKNOWN_STREAM, ["no stream 'photos'", "stream1"]),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_numbers(asked, code, words):
    """The refusal names the requested value and the available one."""
    told, text = refusal_of(world_of().subscribe(**asked))
    assert told is code
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    "asked", ["x" * TEXT_CHARACTERS_MAX, "\U0010ffff" * TEXT_CHARACTERS_MAX, "\0" * TEXT_CHARACTERS_MAX]
)
def test_a_refusal_can_be_read_whatever_was_asked_for(asked):
    """The refusal does not repeat the longest name in full with every character escaped."""
    served = [f"{number:064}" for number in range(STREAMS_MAX)]
    code, text = unknown_stream(asked, served)
    TO_TRAINER.decode(Refused(1, 0, code, text).encode())
    assert f"{0:064}, {1:064}, " in text
    assert text.endswith(f" and {STREAMS_MAX - 32} more")


def test_a_world_larger_than_an_epoch_is_refused_where_batches_are_dropped():
    """Five ranks cannot get a batch each out of four."""
    code, text = refusal_of(world_of(drop_last=True).subscribe(rank=4, world_size=5))
    assert code is ErrorCode.TOO_FEW_BATCHES
    assert "4 batches, fewer than the 5 ranks, and drop_last = true leaves them out" in text


def test_a_world_larger_than_an_epoch_shares_batches_otherwise():
    """Without ``drop_last`` the five ranks read parts of the four batches."""
    assert pick(act.AdmitSubscription, world_of().subscribe(rank=4, world_size=5))


@pytest.mark.parametrize(
    "asked", [{"step": 4}, {"window": 64}, {"epoch": 1 << 40}, {"fingerprint": "f" * 64}, {"end_epoch": 0}]
)
def test_what_is_just_possible_is_admitted(asked):
    """A start at the end of an epoch and values equal to the limits are allowed."""
    assert pick(act.AdmitSubscription, world_of().subscribe(**asked))


def test_the_window_is_the_streams_own_unless_the_trainer_asks_for_another():
    """The reply names the window that the trainer got."""
    world = world_of(window=3)
    windows = [pick(act.AdmitSubscription, world.subscribe(window=window))[0].window for window in (0, 1)]
    assert windows == [3, 1]


def test_each_trainer_needs_two_slots():
    """Four trainers fit into eight slots; the fifth fits only after one of them has left."""
    world = world_of()
    for session in range(1, 5):
        assert pick(act.AdmitSubscription, world.subscribe(session=session))
    code, text = refusal_of(world.subscribe(session=5))
    assert code is ErrorCode.RING_TOO_SMALL
    assert "8 slots and 4 trainers" in text
    world.end_session(2)
    assert pick(act.AdmitSubscription, world.subscribe(session=5))


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("slots_max", [4, 6, 8, 12])
def test_a_trainer_that_reads_on_leaves_room_for_as_many_as_there_can_be(slots_max):
    """This holds for every read-ahead.

    The daemon hands out ready batches only while a new trainer still finds two free slots.
    """
    world = world_of(slots_max=slots_max, window=64, samples=600)
    for session in range(1, slots_max // 2 + 1):
        assert pick(act.AdmitSubscription, world.subscribe(session=session))
        for _ in range(20):
            world.fill_all()
            for number in world.trainers:
                world.pull(number, consume=1, waiting=False)


def test_a_batch_kept_for_a_newcomer_is_given_to_a_trainer_that_waits_for_it():
    """A trainer that holds all its batches gets the next one as soon as it waits."""
    world = world_of(slots_max=4, window=4)
    world.subscribe(session=1)
    world.fill_all()
    assert len(world.trainers[1].leases) == 2
    assert [lease.sequence for lease in pick(act.GrantLease, world.pull(1, release=0))] == [2]


def test_a_batch_kept_for_a_newcomer_is_given_when_others_return_theirs():
    """The daemon sends the batch without another message from its trainer."""
    world = world_of(slots_max=8, window=6)
    world.subscribe(session=1)
    world.fill_all()
    for _ in range(2):
        world.pull(1, release=0)
        world.fill_all()
    assert len(world.trainers[1].leases) == 4
    world.subscribe(session=2, epoch=1)
    for _ in range(4):
        world.fill_all()
        world.pull(2, consume=1, waiting=False)
    world.fill_all()
    assert len(world.trainers[2].leases) == 2
    world.end_session(1)
    world.fill_all()
    assert len(world.trainers[2].leases) == 4


def read_and_stop(world, trainers, batches):
    """Have so many trainers come in turn, take batches, and hold none; return the refused ones."""
    refused = 0
    for session in range(1, trainers + 1):
        number = next((one.subscription for one in pick(act.AdmitSubscription, world.subscribe(session=session))), None)
        refused += number is None
        for _ in range(batches if number is not None else 0):
            world.fill_all()
            world.pull(number, consume=1, waiting=False)
        world.fill_all()
    return refused


@pytest.mark.parametrize(
    ("slots_max", "trainers", "batches"), [(640, 256, 1), (640, 256, 12), (128, 64, 1), (128, 51, 12)]
)
def test_batches_that_nobody_asked_for_refuse_no_trainer(slots_max, trainers, batches):
    """Trainers that read a few batches and stop keep no room from those that come after them.

    Unread batches cannot be taken back, and as many are handed out as is left beside all of them.
    """
    world = World([make_spec(slots_max=slots_max, window=64, samples=60_000)])
    world.start_workers()

    assert read_and_stop(world, trainers, batches) == 0

    assert len(world.trainers) == trainers


def test_a_trainer_that_reads_on_has_its_whole_window():
    """A message then carries many small batches; the first ones come two at a time."""
    world = world_of(slots_max=640, window=64, samples=60_000)
    world.subscribe(session=1)
    depths = []
    for _ in range(200):
        world.fill_all()
        depths.append(len(world.trainers[1].leases))
        world.pull(1, consume=1, waiting=False)

    assert depths[:2] == [2, 2]
    assert depths[-1] == 64


def test_a_free_slot_is_offered_to_those_alone_that_can_get_it(monkeypatch):
    """The daemon does not wake dozens of waiting trainers after one of them got the memory."""
    world = world_of(slots_max=64, window=4, samples=600)
    for session in range(1, 31):
        world.subscribe(session=session, epoch=10 * session)
    world.fill_all()
    delivery = world.state.streams[1].delivery
    assert len(delivery.claims.blocked[Blocked.NO_MEMORY]) >= 20
    advanced, advance = [], delivery._advance
    monkeypatch.setattr(delivery, "_advance", lambda one, actions: (advanced.append(one.number), advance(one, actions)))

    world.end(1)

    assert 1 <= len(advanced) <= 4


def test_batches_that_others_hold_reduce_the_free_slots():
    """A trainer with seven of eight slots leaves too few for another; the refusal counts them."""
    world = world_of(window=1)
    world.subscribe(session=1)
    while len(world.trainers[1].leases) < 7:
        world.pull(1, release=0)
        world.fill_all()
    code, text = refusal_of(world.subscribe(session=2))
    assert code is ErrorCode.RING_BUSY
    assert "7 of the 8 slots" in text
    world.pull(1, release=1, waiting=False)
    assert pick(act.AdmitSubscription, world.subscribe(session=2))


def test_batches_that_an_ended_trainer_still_reads_reduce_the_free_slots_too():
    """Arrays that outlive their subscription still use memory."""
    world = world_of(slots_max=4, window=4)
    world.subscribe(session=1)
    world.fill_all()
    world.pull(1, release=0)
    world.end(1)
    assert len(world.trainers[1].leases) == 3
    assert refusal_of(world.subscribe(session=2))[0] is ErrorCode.RING_BUSY


def test_a_refused_trainer_leaves_nothing_behind():
    """No other trainer lost a claim for room that could not be made."""
    world = world_of(slots_max=4, window=4)
    world.subscribe(session=1)
    world.fill(1)
    world.fill(1)
    world.fill(1)
    world.pull(1, release=0)
    before = world.state.statistics()
    assert refusal_of(world.subscribe(session=2))[0] is ErrorCode.RING_BUSY
    assert world.state.statistics() == before
    world.fill_all()
    assert len(pick(act.GrantLease, world.pull(1, release=0))) == 1


def test_a_stopped_stream_admits_no_trainer():
    """The refusal says why the stream stopped."""
    world = world_of(on_error="fail")
    world.subscribe(session=1)
    world.fill(1, bad=(0,))
    code, text = refusal_of(world.subscribe(session=2))
    assert code is ErrorCode.STREAM_STOPPED
    assert "0.jpg (sample 0) is bad and on_error = fail: is no image" in text


def test_a_daemon_that_shuts_down_admits_no_trainer():
    """The refusal says so for every request."""
    world = world_of()
    world.do(ev.DrainAsked())
    assert refusal_of(world.subscribe())[0] is ErrorCode.DRAINING
