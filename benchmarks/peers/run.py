"""Measure batchd beside its peers.

``make bench-peers DATA=/path/to/photographs ONLY=tf-data,dali ROUNDS=3``

Makes an environment for each peer that can be installed here, then measures all sides in turn, each
in a process that is started for its round and ended after it, so that nothing else is on the
machine. Writes ``results/peers.md`` and ``results/peers.png``, and prints a line BENCH for each
number to reach.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import environments
import pictures
import playing
from harness import processor
from plot import draw
from sides import PHOTOGRAPHS, RESIZED, SHARING, TABLES, Side
from tables import Rounds, Table, figures, report

from batchd.runtime.cpus import available_cpus

CORES = 2
RESULTS = Path(__file__).parents[1] / "results"
TITLES = {
    PHOTOGRAPHS: "Photographs as they are",
    RESIZED: "The same photographs resized to 400 pixels beforehand",
    SHARING: "Several trainers that each want every picture",
}


def main() -> int:
    """Environments, pictures, rounds, results."""
    options = _options()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    begun_s = time.monotonic()
    wanted = {name: _wanted(sides, options.only) for name, sides in TABLES.items()}
    failures = environments.make({side.environment for sides in wanted.values() for side in sides})
    tables = {
        name: ([side for side in sides if side.environment not in failures], _empty()) for name, sides in wanted.items()
    }
    with tempfile.TemporaryDirectory(prefix="batchd-peers-", dir=options.scratch) as scratch:
        folders = pictures.make_pictures(options.data.resolve(), Path(scratch), options.photographs)
        for name, folder in folders.items():
            pictures.prepare(folder, tables[name][0])
        folders[SHARING] = folders[PHOTOGRAPHS]
        _warm(Path(scratch))
        print(f"ready after {time.monotonic() - begun_s:.0f} s", flush=True)
        stage = playing.Stage(Path(scratch), options.warm_up, options.seconds)
        _measure(options.rounds, tables, folders, stage)
    _write(options, tables, failures)
    print(f"{time.monotonic() - begun_s:.0f} s in all")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of photographs, JPEG")
    parser.add_argument("--only", default="", help="sides to measure beside batchd, with commas (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--photographs", type=int, default=1000, help="repeat the files up to so many (default: 1000)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a side's measurement in a round (default: 4)")
    parser.add_argument("--warm-up", type=float, default=1.5, help="seconds before that (default: 1.5)")
    parser.add_argument(
        "--scratch", type=Path, help="where the pictures are made (default: the folder for temporary files)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where peers.md and peers.png are written")
    return parser.parse_args()


def _wanted(sides: Sequence[Side], only: str) -> list[Side]:
    """Those asked for, by their names, the part in front of the number of trainers being enough.

    Batchd always.
    """
    names = set(filter(None, only.split(",")))
    return [side for side in sides if not names or side.is_ours or names & {side.name, side.name.rpartition("-")[0]}]


def _empty() -> Table:
    return {}


def _warm(folder: Path) -> None:
    """Read every file once, so that all rounds have them in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()


def _measure(
    rounds: int, tables: dict[str, tuple[list[Side], Table]], folders: dict[str, Path], stage: playing.Stage
) -> None:
    """Round by round, each side of each table once; each round begins with another side."""
    logs = environments.BUILD / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for number in range(rounds):
        for name, (sides, table) in tables.items():
            first = number * len(sides) // rounds
            for side in [*sides[first:], *sides[:first]]:
                measured = _measured_already(side, tables[PHOTOGRAPHS][1]) if name == SHARING else {}
                found = table.setdefault(side.name, {})
                log = logs / f"{name}-{side.name}.log"
                try:
                    found[number] = measured.get(number) or playing.measure(side, folders[name], log, stage)
                except playing.SideFailed as error:
                    print(f"round {number + 1}, {name}, {side.name}: {error}; see {log}", flush=True)
                else:
                    print(f"round {number + 1}, {name}, {side.name}: {found[number].rate:.0f} images/s", flush=True)


def _measured_already(side: Side, photographs: Table) -> Rounds:
    """The rounds of a side with one trainer, from the first table; {} for several trainers."""
    return photographs.get(side.name.rpartition("-")[0], {}) if side.trainers == 1 else {}


def _write(options: argparse.Namespace, tables: dict[str, tuple[list[Side], Table]], failures: dict[str, str]) -> None:
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "peers.md").write_text(report(tables, TITLES, _notes(options, failures)))
    draw(tables, TITLES, options.results / "peers.png")
    found, missing = figures({name: table for name, (_, table) in tables.items()})
    for figure in found:
        print(figure.line)
    for name in missing:
        print(f"{name}: not measured")


def _notes(options: argparse.Namespace, failures: dict[str, str]) -> list[str]:
    """What was measured where, with which versions, and what could not be."""
    machine = f"{available_cpus()} CPUs, {processor()}, {platform.system()} {platform.release()}"
    notes = [
        f"{machine}, Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}.",
        f"{options.photographs} photographs, random_resized_crop 224, random flip, batches of 256, uint8 NHWC, two workers or",
        "threads, files in the page cache. Each side plays in turn, in a new process for each round; CPU",
        "and PSS are of all processes of a side, the trainer's too.",
        f"Medians over the rounds ({options.rounds}, of {options.seconds:g} s each), with the smallest and the largest.",
        "",
        f"* batchd, limit, queue: {environments.ours()}",
    ]
    for name, environment in environments.ENVIRONMENTS.items():
        packages = ", ".join(environment.packages + environment.alone)
        notes.append(f"* {name}: {f'not measured, {failures[name]}' if name in failures else packages}")
    return notes


if __name__ == "__main__":
    sys.exit(main())
