"""Each verdict follows from numbers that prove it, and no verdict from other numbers."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from batchd.observe.diagnosis.readings import compare
from batchd.observe.diagnosis.verdicts import OTHER_REMEDIES, Kind, Verdict, judge
from batchd_wire.status import CacheStatistics, DaemonStatus, LinkStatistics, WaitStatistics
from support.statuses import later, link, two_looks, with_pool


def verdict(**changes: object) -> Verdict:
    """The verdict about the only trainer."""
    reading = compare(*two_looks(**changes))  # type: ignore[arg-type]
    assert reading is not None
    (found,) = judge(reading)
    return found


BUSY = {"busy_s": 19.0, "cpu_s": 18.0}
"""Both workers are busy all the time."""
WAITING = {"workers_s": 4.0}
"""The trainer waits for four of the ten seconds."""


def replace_workers(status: DaemonStatus) -> None:
    """Replace all workers by others that have worked for half a second each."""
    for worker in status.workers:
        worker.number, worker.chunks, worker.busy_s = worker.number + 100, 1, 0.5


def test_a_full_ring_is_the_trainers_own_pace() -> None:
    """Four batches are ready at any time, and the workers have nothing to do."""
    found = verdict()

    assert found.kind is Kind.TRAINER_BOUND
    assert "4 of 4 batches ready ahead, workers idle 50%; 250 ms of its own for each batch" in str(found)
    assert str(found).startswith("train-01 on photos: trainer-bound: it waits 0.0% of the time")


def test_a_ring_that_is_full_but_for_the_batch_behind_the_last_one_is_full() -> None:
    """One slot is always being filled, unless the trainer has taken no batch for a while."""
    assert verdict(trainer={"ready_ahead": 3}).kind is Kind.TRAINER_BOUND


def test_a_ring_that_is_shared_is_full_with_each_ones_share() -> None:
    """Four trainers share eight slots, so none of them ever has four batches ready."""
    before, after = two_looks(work=BUSY, trainer={"ready_ahead": 1})
    for status in (before, after):
        (one,) = status.streams[0].subscriptions
        status.streams[0].subscriptions = tuple(replace(one, number=n, session=n) for n in range(1, 5))
        status.trainers = tuple(replace(status.trainers[0], session=n) for n in range(1, 5))
    reading = compare(before, after)
    assert reading is not None

    assert [found.kind for found in judge(reading)] == [Kind.TRAINER_BOUND] * 4


def test_workers_that_idle_could_have_made_more() -> None:
    """One batch is ready, and the trainer does not wait for the next one."""
    assert verdict(work={"busy_s": 5.0, "cpu_s": 5.0}, trainer={"ready_ahead": 1}).kind is Kind.TRAINER_BOUND
    assert verdict(work={"busy_s": 5.0, "cpu_s": 5.0}, trainer={"ready_ahead": 0}).kind is Kind.FED


def test_nothing_is_wrong_where_no_trainer_waits_and_the_ring_is_not_full() -> None:
    """Decoding keeps up, so the verdict blames nothing."""
    found = verdict(work=BUSY, trainer={"ready_ahead": 1})

    assert found.kind is Kind.FED
    assert found.kind.is_healthy
    assert found.remedy == ""


def test_a_slow_step_is_named_with_its_time_and_the_cores_that_it_takes() -> None:
    """The workers made ten thousand samples in ten seconds; the trainer computed in six of them.

    That needs 20/0.6 core seconds.
    """
    found = verdict(work=BUSY, waits=WAITING, parts={"read": 1.0, "decode": 5.0, "color_jitter": 12.0})

    assert found.kind is Kind.DECODE_BOUND
    assert "waits 40% of the time; color_jitter takes 1.20 ms of 1.90 ms a sample" in found.proof
    assert found.remedy == "2 cores more would end the wait; set workers = 4 (6 CPUs are unused)"


def test_a_trainer_that_only_takes_batches_gets_no_number_of_sufficient_cores() -> None:
    """No number of cores would be enough."""
    found = verdict(work=BUSY, waits={"workers_s": 9.9})

    assert found.remedy == (
        "it takes batches as fast as workers make them: each further core adds 526 samples/s; "
        "set workers = 8 (6 CPUs are unused)"
    )


def test_time_for_servers_of_files_is_time_of_a_core_more() -> None:
    """A further core waits for files, too, so it makes no more samples than a present one."""
    work = {"busy_s": 11.0, "cpu_s": 11.0, "waited_s": 8.0}
    found = verdict(work=work, waits={"workers_s": 9.9}, parts={"decode": 11.0})

    assert "each further core adds 526 samples/s" in found.remedy


@pytest.mark.parametrize(
    ("cpus", "remedy"),
    [
        (
            2,
            "2 cores more would end the wait; every CPU of this host has a worker: " + OTHER_REMEDIES,
        ),
        (
            1,
            "2 cores more would end the wait; every CPU of this host has a worker: " + OTHER_REMEDIES,
        ),
        (
            3,
            f"2 cores more would end the wait; set workers = 3 (1 CPU is unused), beyond that {OTHER_REMEDIES}",
        ),
        (4, "2 cores more would end the wait; set workers = 4 (2 CPUs are unused)"),
    ],
)
def test_cores_that_are_not_there_are_not_advised(cpus: int, remedy: str) -> None:
    """More workers than CPUs would only share them."""
    before, after = two_looks(work=BUSY, waits=WAITING)
    after.daemon.cpus = cpus
    reading = compare(before, after)
    assert reading is not None

    assert judge(reading)[0].remedy == remedy


@pytest.mark.parametrize(
    ("wait_s", "remedy"),
    [
        (4.0, "4 cores more would end the wait for all streams together"),
        (
            9.5,
            (
                "train-02 on other takes batches as fast as workers make them: "
                "each further core adds 526 samples/s, shared by 2 streams"
            ),
        ),
    ],
)
def test_the_cores_that_several_streams_want_are_added_up(wait_s: float, remedy: str) -> None:
    """Streams share the workers: another stream takes a part of what would suffice for one."""
    before, after = two_looks(work=BUSY, waits=WAITING, workers=4)
    for status in (before, after):
        (photos,), (trainer,) = status.streams, status.trainers
        waits = WaitStatistics(workers_s=wait_s if status is after else 0.0)
        claim = replace(photos.subscriptions[0], number=2, session=2, waits=waits)
        status.streams = (photos, replace(photos, number=2, name="other", subscriptions=(claim,)))
        status.trainers = (trainer, replace(trainer, session=2, name="train-02"))
    reading = compare(before, after)
    assert reading is not None

    (found,) = [one for one in judge(reading) if one.stream == "photos"]
    assert found.remedy.partition("; ")[0] == remedy


@pytest.mark.parametrize(
    ("work", "parts"),
    [
        ({"busy_s": 19.0, "cpu_s": 5.0, "read_bytes": 10**9}, {"read": 14.0, "decode": 5.0}),
        ({"busy_s": 5.0, "cpu_s": 5.0, "waited_s": 14.0, "read_bytes": 10**9}, {"read": 0.1, "decode": 4.9}),
    ],
    ids=["files", "servers"],
)
def test_slow_storage_is_told_from_slow_decoding(work: dict[str, float], parts: dict[str, float]) -> None:
    """The waits of the workers tell them apart, for a slow file system and a slow file server."""
    found = verdict(work=work, parts=parts, waits=WAITING)

    assert found.kind is Kind.STORAGE_BOUND
    assert "workers wait for files 74% of their time, 1.4" in found.proof
    assert "100.0 MB/s" in found.proof


SLOW_STORAGE: dict[str, Any] = {
    "work": {"busy_s": 19.0, "cpu_s": 2.0, "cpu_wait_s": 0.0},
    "parts": {"read": 16.0, "decode": 3.0},
    "waits": WAITING,
}


def remedy_with_a_cache(before: int, after: int, budget_bytes: int, hits: int = 0, folder: str | None = None) -> str:
    """The remedy for a stream of 100,000 samples of 100 kB, by the samples in its cache."""
    slow = deepcopy(SLOW_STORAGE)
    slow["work"]["cache_hits"] = hits
    slow["work"]["read_bytes"] = (10_000 - hits) * 100_000
    looks = two_looks(**slow)
    for status, held in zip(looks, (before, after), strict=True):
        status.streams[0].cache = CacheStatistics("encoded", held, held * 100_000, budget_bytes, 1, folder)
    reading = compare(*looks)
    assert reading is not None
    (found,) = judge(reading)
    assert found.kind is Kind.STORAGE_BOUND
    return found.remedy


def test_a_wait_for_storage_comes_with_the_size_of_a_cache_against_it() -> None:
    """The size is that of all samples, and a little more."""
    found = verdict(**SLOW_STORAGE)

    assert found.kind is Kind.STORAGE_BOUND
    assert (
        'it has no cache, and cache = "encoded" would read each sample once: it needs some 9.8 GiB (cache_memory =, '
        in found.remedy
    )


def test_no_larger_cache_is_proposed_while_the_cache_fills() -> None:
    """The verdict has the share of samples in the cache, as its future hits are not known."""
    assert remedy_with_a_cache(20_000, 30_000, 20 << 30).endswith(
        'its cache is "encoded" and fills: it has 30% of the samples so far'
    )


def test_a_full_cache_gets_the_size_that_it_would_need() -> None:
    """The size follows from the bytes that it misses; a cache with all samples is not mentioned."""
    full = remedy_with_a_cache(40_000, 40_000, 4 << 30, hits=4_000)
    assert full.endswith(
        'its cache is "encoded" and full, and has 40% of the samples: all of them need some 9.8 GiB (cache_memory =)'
    )

    assert remedy_with_a_cache(40_000, 40_000, 4 << 30, hits=4_000, folder="/ssd").endswith("9.8 GiB (cache_size =)")

    assert "cache" not in remedy_with_a_cache(100_000, 100_000, 20 << 30, hits=9_999)


def test_no_faster_storage_is_proposed_for_a_users_own_source() -> None:
    """Its code decides what it waits for, and generated arrays are read from no storage."""
    found = verdict(
        work={"busy_s": 19.0, "cpu_s": 5.0, "read_bytes": 0},
        parts={"read": 14.0, "decode": 5.0},
        waits=WAITING,
        stream={"own_source": True},
    )

    assert found.kind is Kind.STORAGE_BOUND
    assert found.proof.endswith("workers wait for your source 74% of their time, 1.40 ms a sample")
    assert found.remedy.startswith("check what its code waits for")


def test_reading_that_takes_a_cpu_is_no_slow_storage() -> None:
    """A video is decoded while it is read, and a faster disk would not help."""
    found = verdict(work=BUSY | {"read_cpu_s": 14.5}, parts={"read": 15.0, "resize": 4.0}, waits=WAITING)

    assert found.kind is Kind.DECODE_BOUND
    assert "read takes 1.50 ms of 1.90 ms a sample, workers busy 95%" in found.proof


def test_workers_that_finish_nothing_are_not_idle() -> None:
    """Their storage hangs, or their chunks take longer than the time between two looks."""
    before, _after = two_looks()
    after = later(before)
    for worker in after.workers:
        worker.unreported_s = 10.0
    after.streams[0].subscriptions[0].waits.workers_s = 10.0
    reading = compare(before, after)
    assert reading is not None

    assert reading.utilisation == 1.0
    (found,) = judge(reading)
    assert found.kind is Kind.DECODE_BOUND
    assert "for workers that finished nothing in 10 s" in found.proof
    assert "--seconds 60" in found.remedy


def test_work_counts_where_it_is_done_and_not_where_it_is_reported() -> None:
    """One order ends after the first look, and one begins before the second; both take seconds."""
    before, after = two_looks(work={"busy_s": 14.0})
    before.workers[0].unreported_s = 3.0
    after.workers[1].unreported_s = 5.0
    reading = compare(before, after)
    assert reading is not None

    assert reading.utilisation == pytest.approx((14.0 - 3.0 + 5.0) / 20)


def test_workers_that_die_are_reported_before_anything_else() -> None:
    """The unfinished work of dead workers is not counted, so all numbers of work are too low."""
    before, after = two_looks(waits=WAITING, work={"busy_s": 0.0, "cpu_s": 0.0})
    replace_workers(after)
    after.daemon.worker_deaths = 7
    reading = compare(before, after)
    assert reading is not None

    (found,) = judge(reading)
    assert found.kind is Kind.DYING_WORKERS
    assert found.proof == "waits 40% of the time, and 7 workers died or were killed in 10 s"
    assert "batchd bad photos" in found.remedy
    assert not found.kind.is_healthy


def test_workers_that_die_while_none_takes_orders_are_reported() -> None:
    """At the second look, the new workers are still starting."""
    before, after = two_looks(waits=WAITING)
    after.workers = ()
    after.daemon.worker_deaths = 2
    reading = compare(before, after)
    assert reading is not None

    assert judge(reading)[0].kind is Kind.DYING_WORKERS


def test_workers_that_died_over_their_orders_did_not_idle() -> None:
    """The new workers have other numbers, and have done a little."""
    before, after = two_looks(work={"busy_s": 1.0, "cpu_s": 1.0})
    replace_workers(after)
    after.daemon.worker_deaths = 2
    reading = compare(before, after)
    assert reading is not None

    assert reading.utilisation == pytest.approx((1.0 + 2 * (10.0 - 0.5)) / 20)


def test_workers_that_a_reload_has_replaced_finished_their_orders() -> None:
    """None of the replaced workers died."""
    before, after = two_looks(work={"busy_s": 1.0, "cpu_s": 1.0})
    replace_workers(after)
    reading = compare(before, after)
    assert reading is not None

    assert reading.utilisation == pytest.approx(1.0 / 20)


def test_a_ring_that_is_too_small_leaves_workers_idle_while_a_trainer_waits() -> None:
    """The trainer takes four batches at once, and the ring has two slots."""
    found = verdict(
        waits=WAITING, trainer={"short_of_memory_s": 9.0}, stream={"slots_max": 2}, work={"busy_s": 5.0, "cpu_s": 5.0}
    )

    assert found.kind is Kind.MEMORY_BOUND
    assert "while workers idle 75%: a ring of 2 slots for a window of 4" in found.proof
    assert found.remedy == "raise memory = in [streams.photos], or in [daemon]"


def test_who_waits_for_a_slot_waits_for_memory_however_busy_another_stream_keeps_the_workers() -> None:
    """The wait was counted by its cause, so the verdict need not infer it from idle workers."""
    found = verdict(waits={"memory_s": 4.0}, stream={"slots_max": 2}, work=BUSY)

    assert found.kind is Kind.MEMORY_BOUND
    assert "waits 40% of the time, 100% of that for a free slot: a ring of 2 slots for a window of 4" in found.proof
    assert found.remedy == "raise memory = in [streams.photos], or in [daemon]"


def test_a_window_that_is_too_small_is_told_from_a_ring_that_is() -> None:
    """There is memory for more batches, and no trainer asks for them."""
    found = verdict(waits=WAITING, work={"busy_s": 5.0, "cpu_s": 5.0})

    assert found.kind is Kind.MEMORY_BOUND
    assert "it takes batches in bursts, which a window of 4 does not bridge" in found.proof
    assert found.remedy.startswith("a larger window = in [streams.photos]")


def test_a_slow_link_is_not_the_workers_fault() -> None:
    """The batches are ready, and in transit."""
    found = verdict(waits={"network_s": 5.0, "workers_s": 1.0}, work=BUSY, sent_bytes_per_s=12e6)

    assert found.kind is Kind.NETWORK_BOUND
    assert "waits 60% of the time, 83% of that for batches in transit, 12 MB/s" in found.proof


def test_a_few_slow_samples_are_named() -> None:
    """Two of a hundred samples take half of the time."""
    found = verdict(
        work={"busy_s": 19.0, "cpu_s": 18.0, "slow_rows": 200, "slow_s": 9.0, "usual_sample_s": 0.0009},
        slowest={"/data/huge.png": 0.2, "/data/big.png": 0.1},
        waits=WAITING,
    )

    assert found.kind is Kind.SLOW_SAMPLES
    assert (
        "2.0% of the samples take 47% of the time, 50 x as long as usual: huge.png 200 ms, big.png 100 ms"
        in found.proof
    )


def test_a_function_that_waits_makes_no_sample_slow() -> None:
    """Beside its sleep of all samples, the milliseconds of a few count for nothing."""
    found = verdict(
        work={
            "busy_s": 19.0,
            "cpu_s": 1.0,
            "cpu_wait_s": 0.0,
            "slow_rows": 200,
            "slow_s": 0.5,
            "usual_sample_s": 0.0009,
        },
        waits=WAITING,
    )

    assert found.kind is Kind.DECODE_BOUND


def test_slow_samples_of_former_times_are_not_named() -> None:
    """The list covers the stream's whole life, and the two looks cover a part of it."""
    before, after = two_looks(
        work={"busy_s": 19.0, "cpu_s": 18.0, "slow_rows": 200, "slow_s": 9.0, "usual_sample_s": 0.0009},
        slowest={"/data/before.png": 0.9, "/data/huge.png": 0.2},
        waits=WAITING,
    )
    before.streams[0].work.slow_rows = 1
    reading = compare(before, after)
    assert reading is not None

    (found,) = judge(reading)
    assert found.kind is Kind.SLOW_SAMPLES
    assert found.proof.endswith(" x as long as usual: huge.png 200 ms")


def test_bad_samples_that_take_much_of_the_workers_time_are_reported() -> None:
    """Each bad sample was read and decoded in vain."""
    found = verdict(
        work=BUSY, parts={"read": 1.0, "decode": 8.0, "bad samples": 9.5}, waits=WAITING, stream={"bad_rows": 2000}
    )

    assert found.kind is Kind.BAD_DATA
    assert "20% of the samples are bad, 2,000 rows, and take 50% of the workers' time" in found.proof
    assert "batchd bad photos" in found.remedy


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ({"work": BUSY}, Kind.DECODE_BOUND),
        ({"work": {"busy_s": 5.0, "cpu_s": 5.0}}, Kind.MEMORY_BOUND),
        ({"work": BUSY | {"cpu_s": 5.0}, "parts": {"read": 14.0, "decode": 5.0}}, Kind.STORAGE_BOUND),
    ],
)
def test_bad_samples_that_cost_little_are_reported_beside_the_main_cause(numbers: dict[str, Any], kind: Kind) -> None:
    """Without the bad samples the trainer would wait as long."""
    found = verdict(**numbers, waits=WAITING, stream={"bad_rows": 2000})

    assert found.kind is kind
    assert found.proof.endswith(", and 20% of the samples are bad (batchd bad photos)")


@pytest.mark.parametrize("cpu_wait_s", [12.0, None], ids=["the kernel counts", "it does not"])
def test_workers_without_a_cpu_are_not_slow(cpu_wait_s: float | None) -> None:
    """Another process has the cores."""
    work = {"busy_s": 19.0, "cpu_s": 6.0, "cpu_wait_s": cpu_wait_s}
    found, of_one = (
        verdict(work=work, parts={"read": 1.0, "decode": 17.0}, waits=WAITING, workers=workers) for workers in (2, 1)
    )

    assert found.kind is Kind.CPU_STARVED
    assert "workers were ready to run and had no CPU for 63% of their time" in found.proof
    assert found.remedy.endswith(": 2 workers share the rest (batchd doctor)")
    assert of_one.remedy.endswith(": 1 worker shares the rest (batchd doctor)")


def test_reading_without_a_cpu_is_no_slow_storage() -> None:
    """Reading takes long because other processes have the cores."""
    work = {"busy_s": 19.0, "cpu_s": 6.0, "read_cpu_s": 3.0, "cpu_wait_s": 12.0}
    found = verdict(work=work, parts={"read": 14.0, "decode": 5.0}, waits=WAITING)

    assert found.kind is Kind.CPU_STARVED


@pytest.mark.parametrize("cpu_wait_s", [0.1, None], ids=["the kernel counts", "it does not"])
@pytest.mark.parametrize(
    "parts", [{"read": 0.1, "call": 15.0, "decode": 3.9}, {"read": 0.1, "call": 9.0, "decode": 9.9}]
)
def test_a_function_that_waits_is_not_taken_for_a_missing_cpu(
    cpu_wait_s: float | None, parts: dict[str, float]
) -> None:
    """A ``call`` may wait for a server, whether it takes the longest part of the time or not."""
    cpu_s = 19.0 - parts["call"]
    found = verdict(work={"busy_s": 19.0, "cpu_s": cpu_s, "cpu_wait_s": cpu_wait_s}, parts=parts, waits=WAITING)

    assert found.kind is Kind.DECODE_BOUND


def test_a_function_that_waits_is_not_taken_for_slow_storage() -> None:
    """Files are decoded while they are read, and that takes a CPU."""
    work = {"busy_s": 19.0, "cpu_s": 10.0, "read_cpu_s": 9.8}
    found = verdict(work=work, parts={"read": 10.0, "call": 9.0}, waits=WAITING)

    assert found.kind is Kind.DECODE_BOUND


def test_waiting_for_others_in_lockstep_is_said() -> None:
    """More cores would not help such a wait."""
    found = verdict(waits={"trainers_s": 6.0}, work=BUSY)

    assert found.kind is Kind.LOCKSTEP
    assert 'lag = "independent"' in found.remedy


def test_waiting_for_samples_that_no_producer_pushes_is_said() -> None:
    """A live stream is as fast as its producers."""
    assert verdict(waits={"producers_s": 6.0}).kind is Kind.PRODUCER_BOUND


def test_a_stream_that_has_stopped_says_why() -> None:
    """The reason comes first, whatever the numbers are."""
    found = verdict(stream={"stopped": "6 % of its samples are bad"})

    assert (found.kind, found.proof) == (Kind.STOPPED, "the stream has stopped: 6 % of its samples are bad")


def test_a_stream_that_waits_for_its_storage_says_so() -> None:
    """The reason comes before the numbers: workers idle, and trainers wait for them."""
    found = verdict(waits=WAITING, stream={"away": "/data/photos is empty", "away_s": 12.0})

    assert found.kind is Kind.STORAGE_AWAY
    assert found.proof == "the storage of the stream has been away for 12 s: /data/photos is empty"
    assert not found.kind.is_healthy


def test_a_daemon_without_workers_says_so() -> None:
    """The workers do not start, or end at once."""
    assert verdict(waits=WAITING, workers=0, work={"busy_s": 0.0}).kind is Kind.NO_WORKERS


@pytest.mark.parametrize(("epoch", "kind"), [(0, Kind.STANDS_STILL), (None, Kind.AT_END)])
def test_a_trainer_that_takes_nothing_is_not_blamed_on_anything(epoch: int | None, kind: Kind) -> None:
    """The trainer is in a debugger, or has all the batches that it asked for."""
    found = verdict(trainer={"consumed_batches": 0, "epoch": epoch})

    assert found.kind is kind
    assert found.kind.is_healthy


def test_who_waits_most_comes_first() -> None:
    """A trainer that does not wait comes after one that does."""
    before, after = two_looks(work=BUSY, waits=WAITING)
    for status in (before, after):
        stream = status.streams[0]
        (claim,), (trainer,) = stream.subscriptions, status.trainers
        stream.subscriptions = (replace(claim, number=2, session=2, waits=WaitStatistics()), claim)
        status.trainers = (trainer, replace(trainer, session=2, name="train-02"))
    reading = compare(before, after)
    assert reading is not None

    verdicts = judge(reading)
    assert [one.trainer for one in verdicts] == ["train-01", "train-02"]


def test_numbers_of_another_daemon_are_not_compared() -> None:
    """The daemon restarted between the two looks."""
    before, after = two_looks()
    after.daemon.pid += 1

    assert compare(before, after) is None
    assert compare(before, before) is None


def test_a_trainer_that_came_in_between_is_left_out() -> None:
    """Its totals are of less time than the two looks are apart."""
    before, after = two_looks()
    before.streams[0].subscriptions = ()
    reading = compare(before, after)
    assert reading is not None

    assert judge(reading) == []


def test_a_stream_that_a_reload_has_replaced_is_another_one_and_its_work_is_work() -> None:
    """The counters of the new stream of that name start again.

    The workers were busy with the old stream all the same.
    """
    before, after = two_looks(work=BUSY, waits=WAITING)
    (photos,) = before.streams
    replaced = replace(photos, number=2, name="other", subscriptions=(), work=replace(photos.work, busy_s=500.0))
    before.streams = (photos, replaced)
    after.streams = (*after.streams, replace(replaced, number=3, work=replace(photos.work, busy_s=12.0)))
    after.streams[0].work.busy_s = 7.0
    reading = compare(before, after)
    assert reading is not None

    assert [stream.name for stream in reading.streams] == ["photos"]
    assert reading.work_s == 19.0


def test_a_quiet_daemon_divides_by_nothing() -> None:
    """The numbers of both looks are equal."""
    _before, after = two_looks(waits=WAITING)
    reading = compare(after, later(after))
    assert reading is not None

    assert judge(reading)[0].kind is Kind.STANDS_STILL


def test_a_wait_for_decoding_comes_with_the_size_of_a_cache_of_pixels_against_it() -> None:
    """The photographs have files of 100 KiB, and six times as many bytes of pixels."""
    work = {**BUSY, "read_bytes": 1000 * 102_400}
    found = verdict(work=work, parts={"read": 1.0, "decode": 18.0}, waits=WAITING, stream={"samples": 100_000})

    assert found.kind is Kind.DECODE_BOUND
    text = ", and with cache_memory each image is decoded once, and batches keep their bytes: photographs need some "
    assert f"; it has no cache{text}" in found.proof


@pytest.mark.parametrize(
    ("cache", "hits", "text"),
    [
        (
            CacheStatistics("points", 9_000, 1 << 20, 1 << 30, 1),
            0,
            '; its cache is "points", and with cache_memory each',
        ),
        (
            CacheStatistics("encoded", 9_000, 1 << 20, 1 << 30, 1),
            900,
            '; its cache is "encoded", and with cache = "pixels" each image is decoded once',
        ),
        (
            CacheStatistics("pixels", 100_000, 1 << 30, 1 << 30, 1),
            1_500,
            '; its cache is "pixels" and full, and has 15% of the samples: all of them need some 7.0 GiB (cache_memory =)',
        ),
        (CacheStatistics("pixels", 100_000, 1 << 30, 8 << 30, 1), 10_000, '; its cache is "pixels"'),
        (CacheStatistics("decoded", 100_000, 1 << 30, 8 << 30, 1), 10_000, '; its cache is "decoded"'),
    ],
)
def test_a_wait_for_decoding_names_the_cache(cache: CacheStatistics, hits: int, text: str) -> None:
    """``cache = "auto"`` has chosen it; of pixels, what was found counts, not records of points."""
    before, after = two_looks(
        work={**BUSY, "read_bytes": 1000 * 102_400, "cache_hits": hits},
        parts={"read": 1.0, "decode": 18.0},
        waits=WAITING,
    )
    for status in (before, after):
        status.streams[0].cache = cache
    reading = compare(before, after)
    assert reading is not None
    (found,) = judge(reading)

    assert found.kind is Kind.DECODE_BOUND
    assert text in found.proof
    assert found.proof.endswith(text) or cache.kind not in {"pixels", "decoded"}


PIXELS = CacheStatistics("pixels", 0, 0, 1 << 20, 2)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({}, "; again has the same batches: one stream for all their trainers would save up to 50% of this work"),
        (
            {"fingerprint": "e"},
            "; again reads the same samples: decoding them for each stream takes 95% of the workers' time, which the same ",
        ),
        ({"fingerprint": "e", "source": "5" * 32}, ""),
        ({"fingerprint": "e", "cache": PIXELS}, ""),
        ({"fingerprint": "e", "decoded_samples": 0}, ""),
    ],
    ids=["the same batches", "another order", "other samples", "with a cache of pixels", "read by no trainer"],
)
def test_samples_that_two_streams_decode_are_reported(other: dict[str, Any], text: str) -> None:
    """The verdict has the share of the work that one stream for both would save."""
    work, parts = {"busy_s": 9.5, "cpu_s": 9.0}, {"read": 0.5, "decode": 9.0}
    before, after = two_looks(work=work, parts=parts, waits=WAITING, stream={"source": "4" * 32})
    for status in (before, after):
        one = status.streams[0]
        more = {"number": 2, "name": "again", "subscriptions": (), **(other if status is after else {})}
        status.streams = (one, replace(one, **more))
    reading = compare(before, after)
    assert reading is not None
    (found,) = judge(reading)
    assert found.kind is Kind.DECODE_BOUND
    assert text in found.proof
    assert ("; again" in found.proof) == bool(text)


def proof_beside_a_slow_trainer(slow: dict[str, Any], decoded_samples: int, stream: dict[str, Any]) -> str:
    """What is said of a trainer that read 30 batches of 250, to step 4,000, beside a slow one."""
    looks = two_looks(
        work=BUSY, parts={"pad": 18.0}, waits=WAITING, stream={"decoded_samples": decoded_samples, **stream}
    )
    for status, taken in zip(looks, (0, 30), strict=True):
        (fast,) = status.streams[0].subscriptions
        fast = replace(fast, consumed_batches=taken, epoch=10, step=0, ready_ahead=0)
        behind = replace(fast, number=2, session=2, epoch=0, step=40, waits=WaitStatistics(), window=4)
        if taken:
            behind = replace(behind, **{"consumed_batches": 10, "kept_slots": 8, **slow})
        status.streams[0].subscriptions = (
            fast,
            replace(behind, consumed_batches=behind.consumed_batches if taken else 0),
        )
        status.trainers = (status.trainers[0], replace(status.trainers[0], session=2, name="slow"))
    reading = compare(*looks)
    assert reading is not None
    return next(found.proof for found in judge(reading) if found.trainer == "train-01")


@pytest.mark.parametrize(
    ("slow", "decoded_samples", "text"),
    [
        ({}, 10_000, "decoded again (25% of the samples), and 8 slots are kept for it"),
        ({"kept_slots": 0}, 10_000, "decoded again (25% of the samples)"),
        ({"kept_slots": 1}, 7_500, "1 slot is kept for it"),
        ({"kept_slots": 0}, 7_500, ""),
        ({"epoch": 9, "step": 390}, 10_000, ""),
        ({"is_spectator": True}, 10_000, ""),
        ({"world_size": 2}, 10_000, ""),
        ({"epoch": None}, 10_000, ""),
    ],
    ids=["both", "work", "memory", "nothing", "near", "a spectator", "a rank", "at its end"],
)
def test_the_cost_of_a_trainer_that_is_far_behind_is_said(
    slow: dict[str, Any], decoded_samples: int, text: str
) -> None:
    """The others wait for workers that decode for it, and for slots that are kept for it."""
    proof = proof_beside_a_slow_trainer(slow, decoded_samples, {})

    again = "what it reads is " if text.startswith("decoded") else ""
    assert proof.endswith(f"; slow is 3,960 batches behind: {again}{text}" if text else "workers busy 95%")


def test_slots_for_a_trainer_behind_are_said_of_a_ring_that_is_too_small() -> None:
    """The trainer waits for memory that is kept for another one."""
    proof = proof_beside_a_slow_trainer({}, 7_500, {"slots_max": 4})

    assert proof.endswith("; slow is 3,960 batches behind: 8 slots are kept for it")


# --- worker hosts ---------------------------------------------------------------------------------


def verdict_with_pool(*links: LinkStatistics, facts: dict[str, Any] | None = None, **changes: Any) -> Verdict:
    """The verdict about the only trainer, which waits, with a pool of these worker hosts."""
    looks = two_looks(**({"work": BUSY, "waits": WAITING} | changes))
    with_pool(looks, *links, **(facts or {}))
    reading = compare(*looks)
    assert reading is not None
    (found,) = judge(reading)
    return found


def test_a_network_that_is_full_is_told_from_missing_cores() -> None:
    """A gigabyte in ten seconds is 84% of it; idle workers are no sign of too little memory."""
    facts = {"interface": "eth0", "interface_bytes_per_s": 1.19e8}
    found = verdict_with_pool(link(received_bytes=10**9), facts=facts)

    assert found.kind is Kind.POOL_NETWORK_BOUND
    assert "worker hosts send 0.10 GB/s, 84% of what eth0 can carry: the NIC, not the cores" in found.proof
    assert "a faster NIC" in found.remedy


@pytest.mark.parametrize("speed", [1e9, None])
def test_a_network_with_room_is_not_blamed(speed: float | None) -> None:
    """A network of unknown speed is not blamed either."""
    facts = {"interface": "eth0", "interface_bytes_per_s": speed}

    assert verdict_with_pool(link(received_bytes=10**9), facts=facts).kind is not Kind.POOL_NETWORK_BOUND


def test_remote_workers_count_where_workers_idle() -> None:
    """Two local and eight remote workers were busy for 19 of 100 seconds in total."""
    found = verdict_with_pool(link())

    assert found.kind is Kind.MEMORY_BOUND
    assert "while workers idle 81%" in found.proof


def test_a_ring_that_caps_the_pool_is_named() -> None:
    """The verdict has the daemon's reason."""
    found = verdict_with_pool(link(), facts={"capped_by": "ring", "cap": "the ring, not the cores: so it is"})

    assert found.kind is Kind.MEMORY_BOUND
    assert found.proof.endswith("while workers idle 81%: the ring, not the cores: so it is")
    assert found.remedy == "raise memory = in [streams.photos], or in [daemon]"


GONE = {"ended_links": 3, "last_end": "node1: it does not answer", "wanted": 6}


def test_a_pool_whose_hosts_are_all_gone_is_reported() -> None:
    """The daemon continues with its own workers, but slower."""
    found = verdict_with_pool(facts=GONE)

    assert found.kind is Kind.NO_WORKER_HOSTS
    assert "all worker hosts are gone, the last one: node1: it does not answer; 2 workers of this host" in found.proof
    assert found.remedy == "start them again: batchd worker tcp://gpu1:7072 --key FILE (6 remote workers wanted)"


def test_a_pool_whose_last_host_left_is_not_reported_as_a_failure() -> None:
    """Some program has ended it on purpose, so nothing is to be repaired."""
    left = {"last_end": "node1: it was told to end; its orders are done", "last_left": True}
    found = verdict_with_pool(facts=GONE | left)

    assert found.kind is Kind.NO_WORKER_HOSTS
    assert "the last one: node1: it was told to end; its orders are done; 2 workers of this host" in found.proof
    command = "batchd worker tcp://gpu1:7072 --key FILE"
    assert found.remedy == f"it did not fail; for more speed start others: {command} (6 remote workers wanted)"


def test_a_pool_that_no_host_has_joined_yet_misses_no_host() -> None:
    """The remedy is the nearest one: CPUs of this host without a worker."""
    found = verdict_with_pool(facts={"wanted": 6})

    assert found.kind is Kind.DECODE_BOUND
    assert found.remedy.endswith("set workers = 4 (6 CPUs are unused)")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"streams": (), "refused": ("photos: /data is missing",), "state": "serving"}, "node1: /data is missing"),
        ({"streams": (), "state": "opening", "since_s": 60.0}, "node1: is opening for 60 s"),
        ({"streams": (), "state": "proving", "since_s": 60.0}, "node1: is proving itself for 60 s"),
        ({"streams": ("masks",), "refused": ("photos: no index",)}, "node1: no index"),
    ],
)
def test_hosts_that_cannot_fill_a_stream_are_named_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    """The hosts are connected, and the trainer waits."""
    looks = two_looks(work={"busy_s": 100.0, "cpu_s": 100.0}, waits=WAITING)
    with_pool(looks, link(**changes))
    reading = compare(*looks)
    assert reading is not None
    (found,) = judge(reading)

    assert found.kind is Kind.UNUSED_WORKER_HOSTS
    assert f"no worker host fills its stream: {reason}" in found.proof


@pytest.mark.parametrize(
    "changes", [{"since_s": 2.0, "state": "opening"}, {"state": "serving", "streams": ("masks",), "since_s": 60.0}]
)
def test_hosts_that_open_just_now_or_serve_another_stream_are_no_problem(changes: dict[str, Any]) -> None:
    """The opening host will fill the stream soon, and the other host need not fill it."""
    found = verdict_with_pool(link(**({"streams": ()} | changes)), work={"busy_s": 100.0, "cpu_s": 100.0})

    assert found.kind is Kind.DECODE_BOUND


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        ({"wanted": 24}, "start worker hosts (batchd worker tcp://gpu1:7072 --key FILE) with 16 workers more"),
        (
            {"wanted": 10, "cap": "daemon.pool_max = 10"},
            "start worker hosts (batchd worker tcp://gpu1:7072 --key FILE) with 2 workers more; limited by daemon.pool_max = 10",
        ),
        ({"wanted": 8, "cap": "the NIC"}, "more worker hosts would not help: limited by the NIC"),
        ({"wanted": 8}, "start more worker hosts (batchd worker)"),
    ],
)
def test_with_a_pool_the_remedy_names_worker_hosts(facts: dict[str, Any], remedy: str) -> None:
    """More local workers would not help, because every CPU of this host has one."""
    looks = two_looks(work={"busy_s": 100.0, "cpu_s": 100.0}, waits=WAITING)
    with_pool(looks, link(), **facts)
    looks[1].daemon.cpus = 2
    reading = compare(*looks)
    assert reading is not None
    (found,) = judge(reading)

    assert found.kind is Kind.DECODE_BOUND
    assert found.remedy.endswith(f"every CPU of this host has a worker: {remedy}")


def test_a_host_that_came_in_between_has_not_idled_before() -> None:
    """Its workers do not count if it was not connected for the whole time."""
    looks = two_looks(work=BUSY, waits=WAITING)
    with_pool(looks, link())
    looks[0].pool = replace(looks[0].pool, links=())
    reading = compare(*looks)

    assert reading is not None
    assert (reading.workers, reading.utilisation) == (2, 0.95)
