"""The verdicts of `batchd bench` on its figures, and the configuration of its daemons."""

import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchd.commands.bench.advice import BenchResult, disturbances, helps, part_times, verdict
from batchd.commands.bench.measure import Figures, Measurement, OneStream, cpu_times, tree_cpu_s
from batchd.config.load import LoadedConfig, parse_config
from batchd.observe.diagnosis.readings import compare
from support.statuses import two_looks

TEXT = """
[daemon]
tcp = "10.0.0.5:7070"
worker_address = "10.0.0.5:7072"
sample_timeout_s = 7.0
memory = "4GiB"
cache_dir = "/cache"
[streams.photos]
source = { type = "folder", path = "photos" }
batch_size = 64
memory = "1GiB"
pipeline = [{ op = "decode" }, { op = "random_resized_crop", size = [8, 8] }, { op = "normalize" }]
[streams."a.b"]
source = { type = "npy", path = "x.npy" }
batch_size = 4
"""


def read(text: str = TEXT) -> LoadedConfig:
    reading = parse_config(text, Path("/data/batchd.toml"), environment={})
    assert reading.config is not None
    return reading


def measurement(
    samples_per_s: float = 1000.0, cpu_ms: float = 2.0, *, workers: int = 2, epoch: int = 0, **looks: Any
) -> Measurement:
    """Figures of ten seconds of a stream."""
    reading = compare(*two_looks(**looks))
    assert reading is not None
    figures = replace(loader(samples_per_s, cpu_ms), workers=workers)
    return Measurement(figures, reading, reading.streams[0], epoch, 0, ())


def result(*sides: Measurement, loader: Figures | None = None, **changes: Any) -> BenchResult:
    config = read().config
    assert config is not None
    return BenchResult("photos", config.streams["photos"], 1000, 2, list(sides), loader=loader, **changes)


def loader(samples_per_s: float, cpu_ms: float, others_cpus: float = 0.0) -> Figures:
    """Figures of ten seconds, with a first half of 0.9 and a second one of 1.1 times the speed."""
    samples = round(10 * samples_per_s)
    parts = tuple((round(samples * share), 5.0, samples * cpu_ms / 2000) for share in (0.45, 0.55))
    return Figures(2, samples, 10.0, samples * cpu_ms / 1000, others_cpus, parts)


@pytest.mark.parametrize(
    ("beside", "reads", "answer"),
    [
        (loader(500, 4.0), None, """Yes: 2.0 times as fast as a DataLoader with as many workers (1.6 to 2.4): \
1,000 samples/s instead of 500, 2.00 CPU seconds for 1,000 samples instead of 4.00.
It frees 1.0 of the 2.0 cores that a DataLoader takes for 500 samples/s.
If your training reads less than 500 samples/s, a DataLoader keeps up: batchd then frees cores only."""),
        (loader(500, 4.0), 900.0, """Yes: 2.0 times as fast as a DataLoader with as many workers (1.6 to 2.4): \
1,000 samples/s instead of 500, 2.00 CPU seconds for 1,000 samples instead of 4.00.
It frees 1.8 of the 3.6 cores that a DataLoader takes for 900 samples/s."""),
        (loader(500, 4.0), 400.0, """Not for the speed: your training reads 400 samples/s, and a DataLoader keeps up with that.
For the CPUs: 2.0 times as fast as a DataLoader with as many workers (1.6 to 2.4): \
1,000 samples/s instead of 500, 2.00 CPU seconds for 1,000 samples instead of 4.00.
It frees 0.8 of the 1.6 cores that a DataLoader takes for 400 samples/s."""),
        (loader(1000, 2.0), None, """Not for the speed of one trainer: \
1.0 times as fast as a DataLoader with as many workers (0.8 to 1.2): \
1,000 samples/s instead of 1,000, 2.00 CPU seconds for 1,000 samples instead of 2.00."""),
        (loader(2000, 1.0), None, """No, not for one trainer: \
0.5 times as fast as a DataLoader with as many workers (0.4 to 0.6): \
1,000 samples/s instead of 2,000, 2.00 CPU seconds for 1,000 samples instead of 1.00.
It adds 2.0 to the 2.0 cores that a DataLoader takes for 2,000 samples/s."""),
        (loader(1000, 4.0, others_cpus=1.0), None, """Yes: \
2.0 times the samples of a DataLoader with as many workers (1.6 to 2.4) in the same CPU time: \
2.00 CPU seconds for 1,000 samples instead of 4.00.
It frees 2.0 of the 4.0 cores"""),
        (loader(820, 2.5), None, """Probably: \
1.2 times as fast as a DataLoader with as many workers (1.0 to 1.5): \
1,000 samples/s instead of 820, 2.00 CPU seconds for 1,000 samples instead of 2.50.
The range goes below 1, so measure longer (--seconds 60), or while the machine is idle."""),
        (loader(0, 0), None, "Not known beside a DataLoader: it made no sample in its time."),
        (None, None, "Not known beside a DataLoader: torch is away."),
    ],
    ids=["faster", "reads more", "reads less", "as fast", "slower", "busy CPUs: by CPU time", "unclear", "no sample", "no torch"],
)  # fmt: skip
def test_the_verdict_has_its_numbers(beside: Figures | None, reads: float | None, answer: str) -> None:
    """The samples per second decide, unless other programs used the CPUs."""
    found = result(measurement(), loader=beside, reads=reads, why_no_loader="" if beside else "torch is away")

    assert "\n".join(verdict(found)).startswith(answer)
    assert verdict(found)[-1].endswith("if its step takes less than 64.0 ms for 64 samples.")


def test_an_interrupt_is_the_reason_why_nothing_was_measured() -> None:
    """A DataLoader that was not started has not failed."""
    said = verdict(result(measurement(), is_interrupted=True))

    assert said[0] == "Not known beside a DataLoader: Ctrl-C came before it was measured."


def test_later_epochs_count_for_the_verdict() -> None:
    """Most of a training is not its first epoch."""
    found = result(measurement(500), later=measurement(1000, epoch=1), loader=loader(500, 4.0))

    assert "2.0 times as fast" in verdict(found)[0]
    assert disturbances(found) == []


def test_disturbances_of_the_figures_are_reported() -> None:
    """They are other programs, an empty cache, bad samples, and too short a measurement."""
    bad = replace(measurement(0), bad=3, bad_named=("a.jpg: no image",))
    found = result(bad, loader=loader(1, 1.0, others_cpus=1.5), notes=["the cache was in memory"])

    said = disturbances(found)

    assert said[0] == "the cache was in memory"
    assert said[1].startswith("other programs used up to 1.5 of 2 CPUs")
    assert said[2].startswith("no sample was finished")
    assert said[3].startswith("these are the first epoch's figures")
    assert said[4] == "3 of the first 10,000 samples made cannot be used: a.jpg: no image"
    assert verdict(found) == ["Not known: nothing was measured."]


def test_the_cpu_time_of_the_steps_is_that_of_the_workers() -> None:
    """That of reads is measured; the steps share the rest in proportion to their time."""
    looks = two_looks(work={"cpu_s": 10.0, "read_cpu_s": 1.0}, parts={"read": 5.0, "decode": 8.0, "flip": 4.0})
    reading = compare(*looks)
    assert reading is not None
    one = Measurement(Figures(2, 10_000, 10.0, 12.0, 0.0), reading, reading.streams[0], 0, 0, ())

    found = dict(part_times(one))

    assert found == pytest.approx({"read": 0.1, "decode": 0.6, "flip": 0.3, "daemon and trainer": 0.2})


def test_the_advice_starts_with_the_bottleneck() -> None:
    """Unused features, files without access points, and the effect of more workers follow."""
    busy = {"work": {"busy_s": 19.0, "cpu_s": 18.0}, "waits": {"workers_s": 9.5}}
    found = result(measurement(600, workers=1), measurement(1000, **busy), without_points=(3, 8))

    said = helps(found)

    assert said[0].startswith("decode-bound: waits 95% of the time")
    assert said[1].startswith("not done yet: a cache of samples (cache =)")
    assert "normalize on the GPU" in said[1]
    assert said[2].startswith("3 of 8 JPEGs looked at are progressive")
    assert said[3] == "2 workers give 1.7 times the samples of 1, of 2.0 at most"


def test_the_daemon_of_a_measurement_serves_one_stream_to_one_trainer(tmp_path: Path) -> None:
    """It has the stream's own settings and no address, so the running daemon is not disturbed."""
    reading = read()
    assert reading.config is not None
    file = tmp_path / "batchd.toml"

    OneStream("photos", reading.config.streams["photos"], reading.data, 1 << 27).write(file)

    written = tomllib.loads(file.read_text())
    assert written["daemon"] == {
        "http": "off",
        "memory": 1 << 27,
        "sample_timeout_s": 7.0,
        "cache_dir": "/cache",
        "python_path": ["/data"],
    }
    assert list(written["streams"]) == ["photos"]
    assert written["streams"]["photos"]["source"]["path"] == "/data/photos"
    assert "memory" not in written["streams"]["photos"]
    assert parse_config(file.read_text(), file).problems == ()


def test_a_cache_on_disk_is_replaced_by_one_in_memory(tmp_path: Path) -> None:
    """Its file belongs to the running daemon; a part of the source is a subset of it."""
    cache = 'cache = "encoded"\ncache_dir = "/data"\ncache_size = "200GiB"'
    reading = read(TEXT.replace("batch_size = 64", f"batch_size = 64\n{cache}"))
    assert reading.config is not None
    file = tmp_path / "batchd.toml"

    OneStream("photos", reading.config.streams["photos"], reading.data, 1 << 27).write(file, samples=100)

    table = tomllib.loads(file.read_text())["streams"]["photos"]
    assert (table["cache"], table["cache_memory"], "cache_dir" in table) == ("encoded", 1 << 30, False)
    assert (table["source"]["type"], table["source"]["stop"], table["source"]["of"]["type"]) == (
        "subset",
        100,
        "folder",
    )
    assert parse_config(file.read_text(), file).problems == ()


def test_cpu_time_is_that_of_a_process_and_of_the_machine() -> None:
    """The work of this process appears in both."""
    before = cpu_times(os.getpid())
    while tree_cpu_s(os.getpid()) < before.tree_s + 0.03:
        sum(range(10_000))
    after = cpu_times(os.getpid())

    assert after.tree_s > before.tree_s
    assert after.machine_s > before.machine_s
