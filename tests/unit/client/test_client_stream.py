"""Epochs, positions, ranks and states of a stream, as a training loop uses them."""

import gc
import json
from itertools import pairwise

import numpy as np
import pytest

import batchd_client
from batchd_client import errors, subscription
from batchd_wire.messages import Pull, Subscribe, Unsubscribe
from support.fake_daemon import FakeDaemon
from support.fake_stream import FakeStream


def positions(stream) -> list[tuple[int, int]]:
    """The rest of an epoch; the content of each batch is checked against its position."""
    found = []
    for batch in stream:
        np.testing.assert_array_equal(batch["label"], FakeStream().label(batch.epoch, batch.step))
        found.append((batch.epoch, batch.step))
    return found


def test_stream_describes_itself_before_the_first_batch(daemon) -> None:
    """A model and a progress bar need these values."""
    stream = daemon.stream("photos", rank=1, world_size=2)

    assert len(stream) == 3
    assert (stream.samples, stream.batch_size, stream.steps, stream.window) == (20, 4, 5, 2)
    assert stream.classes == ("cat", "dog")
    assert dict(stream.schema) == {"image": (np.uint8, (2, 2, 3), None), "label": (np.int64, (), None)}
    assert (stream.name, stream.rank, stream.world_size) == ("photos", 1, 2)


def test_each_for_is_one_epoch(daemon) -> None:
    """The loop works as with a DataLoader, and the epochs follow each other."""
    stream = daemon.stream("photos")

    assert [positions(stream) for _ in range(3)] == [[(epoch, step) for step in range(5)] for epoch in range(3)]


def test_progress_counts_the_batches_that_the_loop_got(daemon) -> None:
    """The last batch of an epoch completes it, until the next epoch begins."""
    stream = daemon.stream("photos")
    found = [stream.progress()]
    for _epoch in range(2):
        found += [stream.progress() for _batch in stream]

    assert [(one.epoch, one.step) for one in found] == [(0, 0), *[(e, s) for e in (0, 1) for s in range(1, 6)]]
    assert {one.steps for one in found} == {5}
    assert (found[0].samples_per_s, found[0].wait_share, found[0].seconds) == (0, 0, 0)
    assert found[-1].samples == 40
    stream.seek(1)
    assert (stream.progress().epoch, stream.progress().step) == (1, 0)


def test_rates_of_a_progress_are_relative_to_another_progress(daemon) -> None:
    """By default they are relative to the first request for a batch."""
    stream = daemon.stream("photos")
    batches = iter(stream)
    next(batches)
    first = stream.progress()
    next(batches)
    second = stream.progress(first)

    assert first.samples_per_s == pytest.approx(4 / first.seconds)
    assert first.wait_share == pytest.approx(first.wait_s / first.seconds)
    assert second.seconds == second.measured_s - first.measured_s > 0
    assert second.samples_per_s == pytest.approx(4 / second.seconds)
    assert second.wait_share == pytest.approx((second.wait_s - first.wait_s) / second.seconds)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (5005, "epoch 2, step 1,200 of 5,005, 3,121 samples/s, 4% waiting"),
        (1 << 40, "epoch 2, step 1,200, 3,121 samples/s, 4% waiting"),
    ],
)
def test_progress_is_one_line(steps, text) -> None:
    """A live stream's number of steps is left out."""
    assert str(batchd_client.StreamProgress(2, 1200, steps, 3120.7, 0.041, 10.0, 0, 0.0, 0.0)) == text


def test_prefetch_runs_across_the_end_of_an_epoch(daemon, fake) -> None:
    """The client requests the next epoch's first batches while it uses this epoch's last ones."""
    batches = iter(daemon.stream("photos"))
    for _ in range(5):
        next(batches)
    daemon.status()

    assert max(fake.held_sequences()) >= 5


def test_many_ready_batches_are_reported_in_groups(daemon, fake) -> None:
    """The daemon knows of three quarters of the taken batches, and of all at an epoch's end."""
    fake.stream = FakeStream(slots=60)
    stream = daemon.stream("photos", window=40)
    fake.wait_until(lambda: len(fake.held_sequences()) == 40)
    before = len(fake.heard_of(Pull))
    for epoch in range(6):
        assert len(positions(stream)) == 5
        assert epoch == stream.epoch - 1
    daemon.status()
    pulls = fake.heard_of(Pull)[before:]

    assert len(pulls) < 20
    told = [pull.consumed for pull in pulls]
    assert told == sorted(told)
    assert max(after - before for before, after in zip([0, *told], told, strict=False)) <= 10
    assert pulls[-1].consumed == 30


@pytest.fixture
def reported(daemon, fake, monkeypatch):
    """Take some of the ready batches at once; return how many were taken at each report."""

    def take(count: int, *, ready: int, in_lockstep: bool = False) -> list[int]:
        monkeypatch.setattr(subscription, "REPORT_EVERY_S", 3600.0)
        fake.stream = FakeStream(steps=100, slots=ready, in_lockstep=in_lockstep)
        stream = daemon.stream("photos", window=40)
        fake.wait_until(lambda: len(fake.held_sequences()) == ready)
        daemon.status()  # its answer is behind all handles
        before = len(fake.heard_of(Pull))
        kept = [stream.take(0) for _ in range(count)]
        daemon.status()
        assert len(kept) == count
        return [pull.consumed for pull in fake.heard_of(Pull)[before:]]

    return take


def test_batches_that_are_taken_quickly_are_reported_by_quarters_of_the_window(reported) -> None:
    """Where few of them are ready, a message for each would cost more than the batches."""
    told = reported(35, ready=40)

    assert [after - before for before, after in pairwise(told)] == [10, 10]


def test_the_last_batch_that_is_here_is_reported_however_quickly_it_was_taken(reported) -> None:
    """The daemon then knows that this trainer has none left."""
    assert reported(4, ready=4)[-1] == 4


def test_in_lockstep_each_batch_is_reported_however_quickly_it_was_taken(reported) -> None:
    """Others wait for each, and they may be read by the same thread, which does not come back."""
    assert reported(5, ready=40, in_lockstep=True) == [1, 2, 3, 4, 5]


def test_few_batches_are_reported_one_by_one(daemon, fake) -> None:
    """Each is a large part of the window: the client reports it, or counts it on arrival."""
    stream = daemon.stream("photos", window=3)
    fake.wait_until(lambda: len(fake.held_sequences()) == 3)
    for _ in range(3):
        heard = len(fake.heard_of(Pull))
        stream.take(0)
        fake.wait_until(lambda heard=heard: len(fake.heard_of(Pull)) > heard)


def test_for_loop_that_was_left_continues_where_it_stopped(daemon) -> None:
    """A break loses no batch and repeats none."""
    stream = daemon.stream("photos")
    for batch in stream:
        if batch.step == 1:
            break

    assert positions(stream) == [(0, 2), (0, 3), (0, 4)]


def test_for_loop_that_was_left_at_its_last_batch_is_followed_by_the_next_epoch(daemon) -> None:
    """An epoch without remaining batches gives no empty loop."""
    stream = daemon.stream("photos")
    for batch in stream:
        if batch.step == 4:
            break

    assert positions(stream)[0] == (1, 0)


def test_iterator_stays_at_its_end(daemon) -> None:
    """The protocol of iterators holds although the stream continues."""
    stream = daemon.stream("photos")
    batches = iter(stream)
    assert len(list(batches)) == 5
    next(iter(stream))

    assert list(batches) == []


def test_epochs_bound_iteration_and_prefetch(daemon, fake) -> None:
    """The daemon decodes no batch beyond the limit; a longer loop is just empty."""
    stream = daemon.stream("photos", epochs=2)

    assert [len(positions(stream)) for _ in range(4)] == [5, 5, 0, 0]
    daemon.status()
    assert [one.granted for session in fake.sessions for one in session.subscriptions.values()] == [10]


def test_the_end_of_a_loop_is_the_last_report_to_the_daemon(daemon, fake) -> None:
    """The client returns the last batch and reports its waiting time.

    It reports this once, however often the loop is tried again.
    """
    stream = daemon.stream("photos", epochs=1)
    for _ in range(3):
        positions(stream)
    daemon.status()

    assert fake.held_sequences() == []
    *_others, last = fake.heard_of(Pull)
    assert last.wait_us == pytest.approx(stream.statistics().wait_s * 1e6, abs=5)
    assert (last.consumed, last.waiting, len(last.released)) == (5, False, 1)


def test_epochs_count_from_the_beginning_of_the_training(daemon) -> None:
    """A resumed script gives the same number and reads the rest."""
    state = {"stream": "photos", "fingerprint": FakeStream().fingerprint, "epoch": 1, "step": 3}

    stream = daemon.stream("photos", epochs=2, state=state)

    assert positions(stream) == [(1, 3), (1, 4)]
    assert positions(stream) == []


def test_stream_resumed_past_its_epochs_is_empty(daemon) -> None:
    """A finished training can be started again and ends at once."""
    state = {"stream": "photos", "fingerprint": FakeStream().fingerprint, "epoch": 4, "step": 1}

    assert positions(daemon.stream("photos", epochs=2, state=state)) == []


def test_position_in_the_loop_is_that_of_the_next_batch(daemon) -> None:
    """A checkpoint that is written in the loop's body counts the current batch as done."""
    stream = daemon.stream("photos")
    seen = [(stream.epoch, stream.step) for _ in stream]

    assert seen == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]


@pytest.mark.parametrize("stop", range(12))
def test_state_resumes_at_the_exact_position(daemon, stop: int) -> None:
    """The test resumes at every position through JSON, in another stream object."""
    first = daemon.stream("photos", epochs=3)
    taken = []
    while len(taken) < stop:
        for batch in first:
            taken.append((batch.epoch, batch.step))
            if len(taken) == stop:
                break
    state = json.loads(json.dumps(first.state_dict()))

    second = daemon.stream("photos", epochs=3, state=state)
    rest = [position for _ in range(3) for position in positions(second)]

    assert taken + rest == [(epoch, step) for epoch in range(3) for step in range(5)]


def test_ranks_share_an_epoch_and_resume_as_another_number_of_ranks(daemon) -> None:
    """Two ranks do two rounds, three ranks do the rest; every step occurs once."""
    pair = [daemon.stream("photos", rank, 2) for rank in range(2)]
    done = []
    for stream in pair:
        batches = iter(stream)
        done += [next(batches).step for _ in range(1)]
    state = pair[0].state_dict()
    assert state == pair[1].state_dict()

    rest = [
        batch.step for rank in range(3) for batch in daemon.stream("photos", rank, 3, state=state) if batch.epoch == 0
    ]

    assert sorted(done + rest) == [0, 1, 2, 3, 4]


def test_seek_continues_at_any_position(daemon) -> None:
    """The test seeks forwards, backwards, and in the middle of a loop."""
    stream = daemon.stream("photos")
    next(iter(stream))
    stream.seek(7, 3)
    assert positions(stream) == [(7, 3), (7, 4)]
    stream.seek(0)
    assert positions(stream)[:2] == [(0, 0), (0, 1)]

    stream.seek(0)
    found = []
    for batch in stream:
        found.append(batch.step)
        if found == [0, 1]:
            stream.seek(0, 4)

    assert found == [0, 1, 4]


def test_seek_to_the_end_of_an_epoch_is_the_next_epoch(daemon) -> None:
    """A position that was counted up to the end gives the same result."""
    stream = daemon.stream("photos")
    stream.seek(2, 5)

    assert (stream.epoch, stream.step) == (3, 0)


def test_seek_keeps_held_batches_and_returns_them_later(daemon, fake) -> None:
    """Leases outlive their subscription."""
    stream = daemon.stream("photos")
    batches = iter(stream)
    kept, other = next(batches), next(batches)
    stream.seek(5)
    daemon.status()
    assert {0, 1} <= {sequence for sequence, _, number in leases(fake) if number == 1}
    np.testing.assert_array_equal(kept["label"], FakeStream().label(0, 0))

    del other
    next(iter(stream))
    daemon.status()
    assert [sequence for sequence, _, number in leases(fake) if number == 1] == [0]


def leases(fake: FakeDaemon) -> list[tuple[int, int, int]]:
    return [
        (sequence, slot.number, number)
        for session in fake.sessions
        for number, subscription in session.subscriptions.items()
        for sequence, (slot, _) in subscription.leases.items()
    ]


def test_seek_outside_leaves_the_position_unchanged(daemon) -> None:
    """The error has the number of steps."""
    stream = daemon.stream("photos")
    next(iter(stream))

    with pytest.raises(errors.PositionInvalid, match="steps 0 to 4"):
        stream.seek(0, 6)
    with pytest.raises(errors.PositionInvalid):
        stream.seek(-1)

    assert positions(stream)[0] == (0, 1)


def test_load_state_dict_goes_back(daemon) -> None:
    """It is the inverse of ``state_dict``."""
    stream = daemon.stream("photos")
    batches = iter(stream)
    next(batches)
    state = stream.state_dict()
    next(batches)

    stream.load_state_dict(state)

    assert positions(stream)[0] == (0, 1)


def test_state_of_other_data_is_refused_and_changes_nothing(daemon) -> None:
    """This holds at the start and later."""
    stream = daemon.stream("photos")
    next(iter(stream))
    state = {**stream.state_dict(), "fingerprint": "00" * 32}

    with pytest.raises(errors.StateMismatch, match=r"fingerprint 0000"):
        stream.load_state_dict(state)
    with pytest.raises(errors.StateMismatch, match="fingerprint"):
        daemon.stream("photos", state=state)

    assert positions(stream)[0] == (0, 1)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 1), (0, 0)])
def test_impossible_rank_is_refused(daemon, rank: int, world_size: int) -> None:
    """The client refuses it before it sends a request."""
    with pytest.raises(errors.RankInvalid, match=f"rank {rank} of world_size {world_size}"):
        daemon.stream("photos", rank, world_size)


def test_window_is_passed_on_and_checked(daemon, fake) -> None:
    """None means the stream's own window."""
    daemon.stream("photos")
    daemon.stream("photos", window=7)

    assert [asked.window for asked in fake.heard_of(Subscribe)] == [0, 7]
    with pytest.raises(errors.WindowInvalid):
        daemon.stream("photos", window=0)


def test_two_streams_share_a_connection(daemon) -> None:
    """Training and validation alternate."""
    train, validation = daemon.stream("photos"), daemon.stream("photos", rank=1, world_size=2)

    found = [(one.step, other.step) for one, other in zip(train, validation, strict=False)]

    assert found[:2] == [(0, 1), (1, 3)]


def test_statistics_count_the_loop(daemon) -> None:
    """Metrics can be made from this frozen value."""
    stream = daemon.stream("photos")
    kept = [batch for batch in stream if batch.step < 2]

    statistics = stream.statistics()

    assert (statistics.batches, statistics.samples, statistics.resubscribed) == (5, 20, 0)
    assert statistics.batches_held == 2
    assert statistics.wait_s >= sum(batch.wait_s for batch in kept) > 0


def test_waiting_time_is_reported_to_the_daemon(daemon, fake) -> None:
    """The report is a total in microseconds that never decreases."""
    positions(daemon.stream("photos"))
    waits = [pull.wait_us for pull in fake.heard_of(Pull)]

    assert waits == sorted(waits)
    assert waits[-1] > 0


def test_closed_stream_ends_its_subscription_and_refuses_use(daemon, fake) -> None:
    """Its position stays available, and its batches stay readable."""
    with daemon.stream("photos") as stream:
        batch = next(iter(stream))
    daemon.status()

    assert [message.consumed for message in fake.heard_of(Unsubscribe)] == [1]
    assert fake.held_sequences() == [0]
    assert batch["label"][0] == 0
    assert stream.state_dict()["step"] == 1
    with pytest.raises(errors.StreamClosed, match="photos"):
        iter(stream)
    stream.close()


def test_stream_without_references_ends_its_subscription_at_the_next_message(daemon, fake) -> None:
    """A program that drops a stream without a close does not keep its memory reserved."""
    batch = next(iter(daemon.stream("photos")))
    gc.collect()
    daemon.status()

    assert fake.held_sequences() == [0]
    del batch
    daemon.status()
    daemon.status()
    assert fake.held_sequences() == []


def test_closed_daemon_refuses_use_by_name(daemon) -> None:
    """Its streams refuse use as well; a second close is allowed."""
    stream = daemon.stream("photos")
    batches = iter(stream)
    daemon.close()
    daemon.close()

    with pytest.raises(errors.DaemonClosed):
        next(batches)
    with pytest.raises(errors.DaemonClosed):
        daemon.status()
    stream.close()
    assert "[closed]" in repr(daemon)
    assert "[closed]" in repr(stream)


def test_daemon_answers_questions(daemon, fake) -> None:
    """They are status and bad samples, as the command line prints them."""
    assert daemon.status() == {"version": "fake"}
    assert daemon.bad("photos").samples[0]._asdict() == {
        "sample": 7,
        "path": "cat/7.jpg",
        "reason": "empty file",
        "times": 2,
    }
    assert daemon.address == fake.address


def test_an_older_daemon_is_refused_what_it_cannot_do(fake) -> None:
    """It would begin with a whole batch, and silently: the stream stays where it was."""
    with batchd_client.connect(fake.address) as daemon, daemon.stream("photos") as stream:
        state = stream.state_dict()
        assert "parts" not in state
        for ask in (
            lambda: stream.seek(0, sample=3),
            lambda: stream.load_state_dict(state, convert=True),
            lambda: daemon.stream("photos", batch_size=2),
            lambda: daemon.stream("photos", set={"seed": 1}),
        ):
            with pytest.raises(errors.VersionMismatch, match="too old"):
                ask()
        assert next(iter(stream)).step == 0


def test_settings_are_sent_as_one_text_and_kept_in_states(fake, daemon) -> None:
    """Equal settings are equal texts; a state with them is enough to go on."""
    with pytest.raises(errors.VersionMismatch):
        daemon.stream("photos", set={"seed": np.int64(3), "pipeline.1.scale": (0.2, 1)})
    with pytest.raises(errors.VersionMismatch):
        daemon.stream(
            "photos", state={**daemon.stream("photos").state_dict(), "set": {"pipeline.1.scale": [0.2, 1], "seed": 3}}
        )
    texts = [message.settings for message in fake.heard_of(Subscribe)]
    assert texts == ['{"pipeline.1.scale":[0.2,1],"seed":3}', "", '{"pipeline.1.scale":[0.2,1],"seed":3}']
    for settings in ({"seed": float("nan")}, {"seed": object()}, {1: 2}, {"pipeline": "x" * 20_000}):
        with pytest.raises(errors.SettingsInvalid, match="set: "):
            daemon.stream("photos", set=settings)
