"""All tests, in two lanes at once: ``make test``. With arguments, pytest with these, in one.

    lane 1   faults, unit        waits for processes to die and for clocks, and then computes
    lane 2   process             starts daemons and trainers; shown when it is done

Each lane is a pytest of its own, and what its tests start carries its mark, so neither sees the other's leftovers.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

LANES = (("tests/faults", "tests/unit"), ("tests/process",))
ROOT = Path(__file__).parents[1]


def main(arguments: list[str]) -> int:
    """The exit status of pytest; of the first lane that failed, where there are two."""
    if arguments:
        return subprocess.run(_pytest(*arguments), cwd=ROOT, check=False).returncode
    with tempfile.TemporaryFile("w+") as told:
        shown = subprocess.Popen(_pytest(*LANES[0]), cwd=ROOT)
        kept = subprocess.Popen(
            _pytest("-o", "cache_dir=.pytest_cache/second", *LANES[1]), cwd=ROOT, stdout=told, stderr=subprocess.STDOUT
        )
        try:
            statuses = [shown.wait(), kept.wait()]
        except KeyboardInterrupt:  # both have it too, and clean up
            statuses = [shown.wait(), kept.wait()]
        told.seek(0)
        sys.stdout.write(told.read())
    return next(filter(None, statuses), 0)


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "not slow", *arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
