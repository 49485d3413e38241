"""All tests, in several lanes at once: ``make test``. With arguments, pytest with these, in one.

    lane 1   faults                     waits for processes to die and for clocks
    lane 2   unit, process from a to c  computes, and starts daemons and trainers
    lane 3   process from d on          the same
    lane 4   with_torch                 the same, where PyTorch is installed

Each lane is a pytest of its own, and what its tests start carries its mark, so none sees the others' leftovers. The first one is
shown as it goes, the others when they are done.
"""

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
SEAM = "test_d"
"""Where the tests of processes are cut in two, so that all lanes have about as much to do."""


def main(arguments: list[str]) -> int:
    """The exit status of pytest; of the first lane that failed, where there are several."""
    if arguments:
        return subprocess.run(_pytest(*arguments), cwd=ROOT, check=False).returncode
    shown, *kept = _lanes()
    with ExitStack() as stack:
        told = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in kept]
        lanes = [subprocess.Popen(_pytest(*shown), cwd=ROOT)]
        lanes += [_start(number, lane, output) for number, (lane, output) in enumerate(zip(kept, told, strict=True), 2)]
        try:
            statuses = [lane.wait() for lane in lanes]
        except KeyboardInterrupt:  # all have it too, and clean up
            statuses = [lane.wait() for lane in lanes]
        for output in told:
            output.seek(0)
            sys.stdout.write(output.read())
    return next(filter(None, statuses), 0)


def _lanes() -> list[list[str]]:
    processes = sorted(str(file) for file in (ROOT / "tests/process").glob("test_*.py"))
    early = [file for file in processes if Path(file).name < SEAM]
    lanes = [["tests/faults"], ["tests/unit", *early], processes[len(early) :]]
    return [*lanes, ["tests/with_torch"]] if find_spec("torch") else lanes


def _start(number: int, lane: list[str], output: IO[str]) -> "subprocess.Popen[bytes]":
    cache = f"cache_dir=.pytest_cache/{number}"
    return subprocess.Popen(_pytest("-o", cache, *lane), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "not slow", *arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
