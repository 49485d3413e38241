"""Why a trainer waits: each verdict from numbers that prove it, and none from numbers that do not."""

from copy import deepcopy

import pytest

from batchd.diagnosis.readings import compare
from batchd.diagnosis.verdicts import Kind, Verdict, judge, worst
from support.statuses import later, two_looks


def verdict(**changes: object) -> Verdict:
    """The verdict about the one trainer."""
    reading = compare(*two_looks(**changes))  # type: ignore[arg-type]
    assert reading is not None
    (found,) = judge(reading)
    return found


BUSY = {"busy_s": 19.0, "cpu_s": 18.0}
"""Both workers all the time."""
WAITING = {"workers_s": 4.0}
"""Four of the ten seconds."""


def test_a_full_ring_is_the_trainers_own_pace() -> None:
    """Four batches are ready at any time, and the workers have nothing to do."""
    found = verdict()

    assert found.kind is Kind.TRAINER_BOUND
    assert "4 of 4 batches ready ahead, workers idle 50%; 250 ms of its own for each batch" in str(found)
    assert str(found).startswith("train-01 on photos: trainer-bound: it waits 0.0% of the time")


def test_a_ring_that_is_full_but_for_the_batch_behind_the_last_one_is_full() -> None:
    """At each moment one is being filled, unless nobody has taken any for a while."""
    assert verdict(trainer={"ready_ahead": 3}).kind is Kind.TRAINER_BOUND


def test_nothing_is_wrong_where_nobody_waits_and_the_ring_is_not_full() -> None:
    """Decoding keeps up: no verdict blames anything."""
    found = verdict(work=BUSY, trainer={"ready_ahead": 1})

    assert found.kind is Kind.FED
    assert found.kind.is_healthy
    assert found.remedy == ""


def test_a_slow_step_is_named_with_its_time_and_the_cores_that_it_takes() -> None:
    """Ten thousand samples in ten seconds, and six seconds in which the trainer computed: that needs 20/0.6 core seconds."""
    found = verdict(work=BUSY, waits=WAITING, parts={"read": 1.0, "decode": 5.0, "color_jitter": 12.0})

    assert found.kind is Kind.DECODE_BOUND
    assert "waits 40% of the time; color_jitter takes 1.20 ms of 1.90 ms a sample" in found.proof
    assert found.remedy == "2 cores more would end it (workers =)"


def test_a_trainer_that_only_takes_batches_is_not_told_how_many_cores_are_enough() -> None:
    """None are."""
    found = verdict(work=BUSY, waits={"workers_s": 9.9})

    assert found.remedy == "it takes batches as fast as they come: each core more is 526 samples/s more"


@pytest.mark.parametrize(
    ("work", "parts"),
    [
        ({"busy_s": 19.0, "cpu_s": 5.0, "read_bytes": 10**9}, {"read": 14.0, "decode": 5.0}),
        ({"busy_s": 5.0, "cpu_s": 5.0, "waited_s": 14.0, "read_bytes": 10**9}, {"read": 0.1, "decode": 4.9}),
    ],
    ids=["files", "servers"],
)
def test_slow_storage_is_told_from_slow_decoding(work: dict[str, float], parts: dict[str, float]) -> None:
    """By what the workers wait for, whether a file system or a server of files is slow."""
    found = verdict(work=work, parts=parts, waits=WAITING)

    assert found.kind is Kind.STORAGE_BOUND
    assert "workers wait for files 74% of their time, 1.4" in found.proof
    assert "100.0 MB/s" in found.proof


def test_reading_that_takes_a_cpu_is_no_slow_storage() -> None:
    """A video is decoded while it is read, and a faster disk would not help."""
    found = verdict(work=BUSY, parts={"read": 15.0, "resize": 4.0}, waits=WAITING)

    assert found.kind is Kind.DECODE_BOUND
    assert "read takes 1.50 ms of 1.90 ms a sample, workers busy 95%" in found.proof


def test_workers_that_finish_nothing_are_not_idle() -> None:
    """Their storage hangs, or their chunks take longer than anybody looks: what is in hand is not counted yet."""
    before, _after = two_looks()
    after = later(before)
    after["streams"][0]["subscriptions"][0]["waits"]["workers_s"] = 10.0
    reading = compare(before, after)
    assert reading is not None

    assert reading.utilisation == 1.0
    (found,) = judge(reading)
    assert found.kind is Kind.DECODE_BOUND
    assert "for workers that finished nothing in 10 s" in found.proof
    assert "--seconds 60" in found.remedy


def test_a_ring_that_is_too_small_leaves_workers_idle_while_somebody_waits() -> None:
    """The trainer takes four batches at once, and the ring has two slots."""
    found = verdict(
        waits=WAITING, trainer={"short_of_memory_s": 9.0}, stream={"slots_max": 2}, work={"busy_s": 5.0, "cpu_s": 5.0}
    )

    assert found.kind is Kind.MEMORY_BOUND
    assert "while workers idle 75%: a ring of 2 slots for a window of 4" in found.proof
    assert found.remedy == "give it more: memory = in [streams.photos], or in [daemon]"


def test_a_window_that_is_too_small_is_told_from_a_ring_that_is() -> None:
    """There is memory for more, and nobody asks for it."""
    found = verdict(waits=WAITING, work={"busy_s": 5.0, "cpu_s": 5.0})

    assert found.kind is Kind.MEMORY_BOUND
    assert "it takes batches in bursts, and 4 ahead do not bridge them" in found.proof
    assert found.remedy.startswith("a larger window = in [streams.photos]")


def test_a_slow_link_is_not_the_workers_fault() -> None:
    """Batches are ready, and on their way."""
    found = verdict(waits={"network_s": 5.0, "workers_s": 1.0}, work=BUSY, sent_bytes_per_s=12e6)

    assert found.kind is Kind.NETWORK_BOUND
    assert "waits 60% of the time, 83% of that for batches on their way, 12 MB/s" in found.proof


def test_a_few_slow_samples_are_named() -> None:
    """Two in a hundred take half of the time."""
    found = verdict(
        work={"busy_s": 19.0, "cpu_s": 18.0, "slow_rows": 200, "slow_s": 9.0, "usual_sample_s": 0.0009},
        slowest={"/data/huge.png": 0.2, "/data/big.png": 0.1},
        waits=WAITING,
    )

    assert found.kind is Kind.SLOW_SAMPLES
    assert "2.0% of the samples take 49% of the time, 50 x as usual: huge.png 200 ms, big.png 100 ms" in found.proof


def test_many_bad_samples_are_told_of() -> None:
    """Each is read in vain."""
    found = verdict(work=BUSY, waits=WAITING, stream={"bad_rows": 2000})

    assert found.kind is Kind.BAD_DATA
    assert "20% of the samples are bad, 2,000 rows" in found.proof
    assert "batchd bad photos" in found.remedy


def test_workers_without_a_cpu_are_not_slow() -> None:
    """Somebody else has the cores."""
    found = verdict(work={"busy_s": 19.0, "cpu_s": 6.0}, waits=WAITING)

    assert found.kind is Kind.CPU_STARVED
    assert "workers had a CPU for 32% of the time" in found.proof


def test_a_function_that_waits_is_not_taken_for_a_missing_cpu() -> None:
    """A ``call`` may ask a server of its own."""
    found = verdict(work={"busy_s": 19.0, "cpu_s": 6.0}, parts={"read": 0.1, "call": 15.0}, waits=WAITING)

    assert found.kind is Kind.DECODE_BOUND
    assert "call takes 1.50 ms" in found.proof


def test_waiting_for_others_in_lockstep_is_said() -> None:
    """The remedy is not more cores."""
    found = verdict(waits={"trainers_s": 6.0}, work=BUSY)

    assert found.kind is Kind.LOCKSTEP
    assert 'lag = "independent"' in found.remedy


def test_waiting_for_samples_that_nobody_pushes_is_said() -> None:
    """A live stream is as fast as its producers."""
    assert verdict(waits={"producers_s": 6.0}).kind is Kind.PRODUCER_BOUND


def test_a_stream_that_has_stopped_says_why() -> None:
    """Whatever the numbers are."""
    found = verdict(stream={"stopped": "6 % of its samples are bad"})

    assert (found.kind, found.proof) == (Kind.STOPPED, "the stream has stopped: 6 % of its samples are bad")


def test_a_daemon_without_workers_says_so() -> None:
    """They do not start, or end at once."""
    assert verdict(waits=WAITING, workers=0, work={"busy_s": 0.0}).kind is Kind.NO_WORKERS


@pytest.mark.parametrize(("epoch", "kind"), [(0, Kind.STANDS_STILL), (None, Kind.AT_END)])
def test_a_trainer_that_takes_nothing_is_not_blamed_on_anything(epoch: int | None, kind: Kind) -> None:
    """It is in a debugger, or has all that it asked for."""
    found = verdict(trainer={"consumed_batches": 0, "epoch": epoch})

    assert found.kind is kind
    assert found.kind.is_healthy


def test_who_waits_most_comes_first() -> None:
    """And the first that is wrong is the worst."""
    before, after = two_looks(work=BUSY, waits=WAITING)
    for status in (before, after):
        stream = status["streams"][0]
        other = dict(stream["subscriptions"][0], number=2, session=2)
        if status is after:
            other["waits"] = dict(other["waits"], workers_s=0.0)
        stream["subscriptions"] = [other, *stream["subscriptions"]]
        status["trainers"].append(dict(status["trainers"][0], session=2, name="train-02"))
    reading = compare(before, after)
    assert reading is not None

    verdicts = judge(reading)
    assert [one.trainer for one in verdicts] == ["train-01", "train-02"]
    assert worst(verdicts) == verdicts[0]


def test_numbers_of_another_daemon_are_not_compared() -> None:
    """It was started anew in between."""
    before, after = two_looks()
    after["daemon"]["pid"] += 1

    assert compare(before, after) is None
    assert compare(before, before) is None


def test_a_trainer_that_came_in_between_is_left_out() -> None:
    """Its totals are of less time than the two looks are apart."""
    before, after = two_looks()
    before["streams"][0]["subscriptions"] = []
    reading = compare(before, after)
    assert reading is not None

    assert judge(reading) == []


def test_a_stream_that_a_reload_has_replaced_is_another_one_and_its_work_is_work() -> None:
    """What it counts began anew, under the same name; the workers were busy with it all the same."""
    before, after = two_looks(work=BUSY, waits=WAITING)
    replaced = deepcopy(before["streams"][0]) | {"number": 2, "name": "other", "subscriptions": []}
    replaced["work"]["busy_s"] = 500.0
    before["streams"].append(replaced)
    after["streams"].append(deepcopy(replaced) | {"number": 3})
    after["streams"][1]["work"]["busy_s"] = 12.0
    after["streams"][0]["work"]["busy_s"] = 7.0
    reading = compare(before, after)
    assert reading is not None

    assert [stream.name for stream in reading.streams] == ["photos"]
    assert reading.work_s == 19.0


def test_a_quiet_daemon_divides_by_nothing() -> None:
    """Two looks at the same numbers."""
    _before, after = two_looks(waits=WAITING)
    reading = compare(after, later(after))
    assert reading is not None

    assert judge(reading)[0].kind is Kind.STANDS_STILL
