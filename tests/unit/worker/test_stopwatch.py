"""The times that a worker reports of its own work."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from batchd.data.pipeline import stages
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.options import CenterCrop, ColorJitter, Decode, Normalize, RandomFlip, RandomResizedCrop
from batchd.data.samples.columns import Column
from batchd.worker import stopwatch
from batchd.worker.messages import SLOW_LISTED_MAX
from batchd.worker.stopwatch import SLOW_FACTOR, RunQueue, Stopwatch
from batchd_wire.wording import BAD_PART
from support.images import jpeg, photo
from support.pipelines import image_row

IMAGE_COLUMNS = (Column("image", "encoded"),)

MILLISECOND = 1_000_000


class Clock:
    """Wall time and CPU time that tests advance."""

    def __init__(self) -> None:
        self.wall_ns = 1
        self.cpu_ns = 1

    def run(self, milliseconds: float) -> None:
        """Let the worker compute."""
        self.pause(milliseconds)
        self.cpu_ns += int(milliseconds * MILLISECOND)

    def pause(self, milliseconds: float) -> None:
        """Let the worker wait, or let another process have the core."""
        self.wall_ns += int(milliseconds * MILLISECOND)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The clock of all stopwatches."""
    made = Clock()
    for module in (stages, stopwatch):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: made.wall_ns)
    monkeypatch.setattr(stopwatch, "thread_time_ns", lambda: made.cpu_ns)
    return made


def sample(watch: Stopwatch, clock: Clock, read: float = 0, decode: float = 1, stolen: float = 0) -> int | None:
    """Take one sample: waits of ``read`` and ``stolen`` ms, and computing for ``decode`` ms."""
    watch.begin_sample()
    clock.pause(read)
    watch.is_read({"image": memoryview(bytes(10)), "label": 3})
    clock.run(decode)
    clock.pause(stolen)
    watch.timings.lap(1)
    return watch.end_sample()


def test_times_are_those_of_the_parts(clock: Clock) -> None:
    """The report has the times for reading, for decoding and between samples."""
    watch = Stopwatch()
    watch.timings.part("decode")
    watch.begin()
    begun_ns = clock.wall_ns
    clock.pause(50)
    watch.waited(begun_ns)
    for _ in range(3):
        sample(watch, clock, read=2, decode=5)
        clock.run(1)
    work = watch.work()

    assert (work.busy_us, work.waited_us, work.cpu_us) == (24_000, 50_000, 18_000)
    assert (watch.parts, work.parts_us) == (["read", "decode", BAD_PART], [6_000, 15_000, 0])
    assert work.read_bytes == 30


def test_what_was_said_is_not_said_again(clock: Clock) -> None:
    """Each chunk has its own times."""
    watch = Stopwatch()
    watch.timings.part("decode")
    watch.begin()
    sample(watch, clock, read=2, decode=5)
    watch.work()
    watch.begin()
    sample(watch, clock, decode=1)

    assert watch.work() == watch.work()._replace(
        busy_us=1000, waited_us=0, cpu_us=1000, parts_us=[0, 1000, 0], read_bytes=10
    )


def test_the_time_of_a_bad_sample_is_neither_reading_nor_decoding(clock: Clock) -> None:
    """It is also no part of the sample that replaces the bad one, which is not slow for it."""
    watch = Stopwatch()
    watch.timings.part("decode")
    watch.begin()
    sample(watch, clock, read=2, decode=5)
    watch.begin_sample()
    clock.pause(3)
    watch.is_read({"image": memoryview(bytes(10))})
    clock.run(90)
    watch.waste_sample()
    slow = sample(watch, clock, read=2, decode=5)
    work = watch.work()

    assert dict(zip(watch.parts, work.parts_us, strict=True)) == {"read": 4_000, "decode": 10_000, BAD_PART: 93_000}
    assert work.busy_us == 107_000
    assert slow is None


def test_a_sample_that_cannot_be_read_is_a_bad_one(clock: Clock) -> None:
    """A slow file server takes long to report that the file is missing."""
    watch = Stopwatch()
    watch.begin()
    watch.begin_sample()
    clock.pause(30)
    watch.waste_sample()

    assert watch.work().parts_us == [0, 30_000]


def test_reading_that_takes_a_cpu_is_told_from_waiting(clock: Clock) -> None:
    """The time between two samples does not count as reading."""
    watch = Stopwatch()
    watch.timings.part("decode")
    watch.begin()
    for _ in range(3):
        clock.run(10)
        watch.begin_sample()
        clock.pause(4)
        clock.run(2)
        watch.is_read({})
        clock.run(5)
        watch.end_sample()

    assert watch.work().read_cpu_us <= 3 * 6_000
    watch.begin()
    sample(watch, clock, read=9)
    assert watch.work().read_cpu_us == 0


def test_decoding_while_reading_is_slow_once(clock: Clock) -> None:
    """The time counts once, not both as reading and as computing."""
    watch = Stopwatch()
    watch.begin()
    for _ in range(20):
        watch.begin_sample()
        clock.run(10)
        watch.is_read({})
        watch.end_sample()

    assert watch.work().usual_us == 10_000


def test_waiting_for_a_cpu_is_what_the_kernel_counts(clock: Clock) -> None:
    """The time is that of the chunk alone, and unknown if the kernel counts nothing."""
    waited_ns = iter([5 * MILLISECOND, 7 * MILLISECOND, 10 * MILLISECOND])
    watch = Stopwatch(lambda: next(waited_ns))
    watch.timings.part("decode")
    watch.begin()
    sample(watch, clock)

    assert watch.work().cpu_wait_us == 3_000
    assert Stopwatch().work().cpu_wait_us is None


def test_the_kernels_count_grows_where_it_has_one(tmp_path: Path) -> None:
    """The time is unknown if the kernel has no count, or writes zeros."""
    queue = RunQueue()
    first_ns = queue.waited_ns()
    if first_ns is not None:
        later_ns = queue.waited_ns()
        assert later_ns is not None
        assert later_ns >= first_ns
    queue.close()
    assert queue.waited_ns() is None
    assert RunQueue(tmp_path / "nothing").waited_ns() is None
    place = tmp_path / "schedstat"
    place.write_text("0 0 0\n")
    assert RunQueue(place).waited_ns() is None
    place.write_text("120048210 244707 21\n")
    queue = RunQueue(place)
    assert queue.waited_ns() == 244_707
    queue.close()


@pytest.mark.parametrize("slow", [{"decode": 9}, {"read": 9}])
def test_a_sample_that_takes_several_times_as_long_is_slow(clock: Clock, slow: dict[str, float]) -> None:
    """Long decoding and long reading both count."""
    watch = Stopwatch()
    watch.timings.part("decode")
    watch.begin()
    found = [sample(watch, clock, **(slow if number % 10 == 9 else {})) for number in range(100)]

    assert sum(taken is not None for taken in found) == 10


def test_a_sample_is_not_slow_because_others_had_the_core(clock: Clock) -> None:
    """On a machine with other work every sample may take long."""
    watch = Stopwatch()
    watch.timings.part("decode")
    watch.begin()

    assert [sample(watch, clock, stolen=100 if number % 10 == 9 else 0) for number in range(100)] == [None] * 100


def test_what_is_usual_is_what_half_of_the_samples_stay_below(clock: Clock) -> None:
    """Four of ten samples are slow, and the usual time is still that of the others."""
    watch = Stopwatch()
    watch.timings.part("decode")
    watch.begin()
    for number in range(2000):
        sample(watch, clock, decode=3 * SLOW_FACTOR if number % 10 >= 6 else 1)

    assert 900 <= watch.work().usual_us <= 1500


def test_the_slowest_of_a_chunk_are_named_and_all_are_counted() -> None:
    """The list is limited, so a chunk's report stays short."""
    watch = Stopwatch()
    watch.begin()
    for number in range(9):
        watch.note_slow(number, f"{number}.jpg", (number % 5) * MILLISECOND)
    work = watch.work()

    assert (work.slow_rows, work.slow_us) == (9, 16_000)
    assert len(work.slow) == SLOW_LISTED_MAX
    assert {taken_us for _sample, _path, taken_us in work.slow} == {4000, 3000, 2000}


def test_the_parts_of_a_pipeline_are_its_steps() -> None:
    """Steps that are executed together share one time."""
    steps = [
        Decode(),
        RandomResizedCrop(size=(32, 32)),
        RandomFlip(),
        ColorJitter(brightness=0.5),
        Normalize(mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2)),
    ]
    watch = Stopwatch()
    Pipeline(IMAGE_COLUMNS, steps, 0, timings=watch.timings)

    names = ["read", "decode", "random_resized_crop+random_flip", "color_jitter", "normalize", "store"]
    assert watch.timings.names == names


def test_every_part_of_a_pipeline_takes_time() -> None:
    """No part is named and then counted for another one."""
    steps = [
        Decode(),
        CenterCrop(size=(32, 32)),
        ColorJitter(brightness=0.5),
        Normalize(mean=(0.5,) * 3, std=(0.2,) * 3),
    ]
    watch = Stopwatch()
    pipeline = Pipeline(IMAGE_COLUMNS, steps, 0, timings=watch.timings)
    row = {"image": image_row(pipeline)}
    watch.begin()
    for number in range(200):
        watch.begin_sample()
        values = {"image": memoryview(jpeg(photo(64, 64)))}
        watch.is_read(values)
        pipeline.run(values, 0, number, 0, row)
        watch.end_sample()

    *spent_us, bad_us = watch.work().parts_us
    assert all(spent > 0 for spent in spent_us)
    assert bad_us == 0
