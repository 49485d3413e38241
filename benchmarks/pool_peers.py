"""Measure batchd's worker hosts beside tf.data service, Ray Data and Ray's object store.

``make bench-pool-peers DATA=/path/to/photographs ROUNDS=3 ONLY=workers``

Three comparisons on this host, over loopback:

    workers  two workers that are apart from the consumer, the same work, one consumer that reads a
             byte of every page of each batch: images/s
    link     rows from one worker host, or from an actor on another node of a Ray cluster, into
             memory of this host, 64 of them in an order or object, or a whole batch: GB/s
    orders   the same with 16 rows, as many as a worker host sends at once where it decodes

Sides play in turn, each in a process that is started for its round and ended after it, with all
that it started; see ``peers/``. Ratios are of measurements of the same round.
"""

import argparse
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import common
import environments
import pictures
import playing
from environments import OURS
from harness import Bench, Figure, benchmark, processor, spread
from sides import Side
from tables import Rounds, Table, ratios

CORES = 2
ROW_BYTES = common.SIDE * common.SIDE * 3


class Comparison(NamedTuple):
    """Sides with a table of their own; the others are compared with the first one, which is ours.

    ``unit_rows``: how many rows make a ``unit``. ``targets``: the ratio to reach, by side.
    """

    name: str
    title: str
    sides: tuple[Side, ...]
    batch: int
    unit: str
    unit_rows: float
    targets: dict[str, float]


COMPARISONS = (
    Comparison(
        "workers",
        "Two workers apart from the consumer, batches of 64 photographs",
        (
            Side("batchd", "batchd, worker host of two workers", OURS, "batchd_pool_side.py", "decode"),
            Side("tf-service", "tf.data service, two workers", "tensorflow", "tf_service_side.py", "apart"),
            Side("ray-data", "Ray Data, two CPUs, cv2", "ray", "ray_side.py"),
        ),
        64,
        "1,000 images",
        1000,
        {"tf-service": 1.3, "ray-data": 1.6},
    ),
    Comparison(
        "link",
        "Rows of zeros into memory of this host, batches of 256",
        (
            Side("batchd-curve", "batchd, one link, encrypted, 64 rows", OURS, "batchd_pool_side.py", "curve-64"),
            Side("batchd-plain", "batchd, one link, plain, 64 rows", OURS, "batchd_pool_side.py", "plain-64"),
            Side("ray-batches", "Ray's object store, plain, whole batches", "ray", "ray_link_side.py", "256"),
            Side("ray-chunks", "Ray's object store, plain, 64 rows", "ray", "ray_link_side.py", "64"),
        ),
        256,
        "GB",
        1e9 / ROW_BYTES,
        {"ray-batches": 1.3, "ray-chunks": 2.5},
    ),
    Comparison(
        "orders",
        "The same, 16 rows in an order or object",
        (
            Side("batchd-curve", "batchd, one link, encrypted, 16 rows", OURS, "batchd_pool_side.py", "curve-16"),
            Side("batchd-plain", "batchd, one link, plain, 16 rows", OURS, "batchd_pool_side.py", "plain-16"),
            Side("ray-chunks", "Ray's object store, plain, 16 rows", "ray", "ray_link_side.py", "16"),
        ),
        256,
        "GB",
        1e9 / ROW_BYTES,
        {"ray-chunks": 2.5},
    ),
)


def main() -> int:
    """Environments, photographs, rounds, tables, figures."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends sides, too
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    wanted = [one for one in COMPARISONS if options.only in {"", one.name}]
    print(f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} CPUs, {processor()}; load {os.getloadavg()[0]:.1f}")
    print(f"batchd: {environments.ours()}")
    failures = environments.make({side.environment for one in wanted for side in one.sides})
    data = options.data.resolve() if options.data else None
    with benchmark(data, options.rounds) as bench:
        folder = bench.scratch / "photographs"
        pictures.link_photographs(bench.photos, folder, options.photographs)
        for comparison in wanted:
            stage = playing.Stage(bench.scratch, options.warm_up, options.seconds, comparison.batch)
            sides = [side for side in comparison.sides if side.environment not in failures]
            table = _measure(comparison.name, sides, folder, stage, options.rounds)
            _report(bench, comparison, table)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of photographs, JPEG (default: 512 generated ones)")
    parser.add_argument("--only", choices=["", *(one.name for one in COMPARISONS)], default="", help="run one")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--photographs", type=int, default=1000, help="repeat the files up to so many (default: 1000)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a side's measurement in a round (default: 4)")
    parser.add_argument("--warm-up", type=float, default=1.5, help="seconds before that (default: 1.5)")
    parser.add_argument("--cores", type=int, default=CORES, help=f"CPUs that all sides may use (default: {CORES})")
    return parser.parse_args()


def _measure(name: str, sides: list[Side], data: Path, stage: playing.Stage, rounds: int) -> Table:
    """Each side once in each round, which begins with another side than the one before."""
    logs = environments.BUILD / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    table: Table = {side.name: {} for side in sides}
    for number in range(rounds):
        first = number % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            log = logs / f"{name}-{side.name}.log"
            try:
                table[side.name][number] = playing.measure(side, data, log, stage)
            except playing.SideFailed as error:
                print(f"round {number + 1}, {name}, {side.name}: {error}; see {log}", flush=True)
            else:
                rows_s = table[side.name][number].rate
                load = os.getloadavg()[0]
                print(f"round {number + 1}, {name}, {side.name}: {rows_s:.0f} rows/s (load {load:.1f})", flush=True)
    return table


def _report(bench: Bench, comparison: Comparison, table: Table) -> None:
    """The table as Markdown, and a figure for each number to reach."""
    ours, *others = comparison.sides
    lines = [
        f"{comparison.title}; medians, with the smallest and the largest:\n",
        f"| | {comparison.unit}/s | CPU s for each | {ours.name} ÷ it | by CPU time |\n|---|---|---|---|---|",
    ]
    for side in comparison.sides:
        cells = _cells(comparison, table.get(side.name, {}), {} if side is ours else table.get(ours.name, {}))
        lines.append(f"| {side.label} | {' | '.join(cells)} |")
    print("\n" + "\n".join(lines) + "\n")
    for side in others:
        found = ratios(table.get(ours.name, {}), table.get(side.name, {}))
        if side.name in comparison.targets and found:
            at_least = comparison.targets[side.name]
            bench.report(Figure(f"pool-{comparison.name}-vs-{side.name}", statistics.median(found), ">=", at_least))
        elif side.name in comparison.targets:
            print(f"pool-{comparison.name}-vs-{side.name}: not measured")


def _cells(comparison: Comparison, rounds: Rounds, ours: Rounds) -> list[str]:
    """Rate, CPU time, and ours ÷ it by both."""
    if not rounds:
        return ["not measured", "", "", ""]
    rates = [one.rate / comparison.unit_rows for one in rounds.values()]
    each_s = {number: one.cpu_s / one.images * comparison.unit_rows for number, one in rounds.items()}
    by_cpu = [
        each_s[number] / (ours[number].cpu_s / ours[number].images * comparison.unit_rows)
        for number in sorted(ours.keys() & each_s.keys())
    ]
    compared = [spread(values) if values else "" for values in (ratios(ours, rounds), by_cpu)]
    return [spread(rates), spread(list(each_s.values())), *compared]


if __name__ == "__main__":
    sys.exit(main())
