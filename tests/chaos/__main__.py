"""``make chaos``: inject random faults while trainers read, and check all their batches.

The exit status is 1 if any check failed. The same seed gives the same faults in the same order;
their effects depend on the machine.
"""

import argparse
import os
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path

from chaos.faults import Faults
from chaos.run import Run
from support.keeper import cleared_by, keep
from support.kernel import RUN_VARIABLE, carriers, descriptors_of
from support.waiting import wait_until

RESTS_EVERY = 25
"""So many faults are injected, and then all trainers must progress."""
PROGRESS_EVERY = 100


def main() -> int:
    """Do the run that the options describe; return 1 if any check failed."""
    options = _options()
    os.environ[RUN_VARIABLE] = f"{os.getpid()}-{secrets.token_hex(4)}"
    keep(os.environ[RUN_VARIABLE])
    folder = Path(tempfile.mkdtemp(prefix="batchd-chaos-"))
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(cleared_by("rm", "-rf", "--", str(folder)))
        stack.callback(shutil.rmtree, folder)
        stack.enter_context(redirect_stdout(StringIO()))  # a daemon's end prints its log
        held = set(descriptors_of("self"))
        with ExitStack() as inner:
            run = Run(folder, inner, options.seed)
            run.begin()
            _do_faults(run, options, began)
            run.finish()
        _check_ourselves(run, held)
    return _report(run, options.seed, time.monotonic() - began)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults go on")
    parser.add_argument("--faults", type=int, default=1 << 30, help="how many there are at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.75, help="seconds between two of them, on average")
    return parser.parse_args()


def _do_faults(run: Run, options: argparse.Namespace, began: float) -> None:
    """Inject one fault after the other, without waiting for the end of any; rest now and then."""
    faults = Faults(run)
    while time.monotonic() < began + options.seconds and run.faults.total() < options.faults:
        run.watch(run.chance.uniform(0, 2 * options.pause))
        faults.one()
        count = run.faults.total()
        if count % RESTS_EVERY == 0:
            run.rest()
        if count % PROGRESS_EVERY == 0:
            _say(f"{count} faults in {time.monotonic() - began:.0f} s, {len(run.errors)} errors")


def _check_ourselves(run: Run, held: set[int]) -> None:
    """Check that no process or descriptor of the run is left."""
    marker = f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]}"
    try:
        wait_until(lambda: not carriers(marker), "no process is left")
    except AssertionError:
        run.wrong(f"processes are left: {sorted(carriers(marker))}")
    left = {number: name for number, name in descriptors_of("self").items() if number not in held}
    if set(left) - {number for number, name in left.items() if name.startswith("/proc/")}:
        run.wrong(f"descriptors of the run itself are left: {left}")


def _report(run: Run, seed: int, took_s: float) -> int:
    """Print the faults, the length of the gaps, and the errors."""
    _say(f"\nseed {seed}: {run.faults.total()} faults in {took_s:.0f} s, load {os.getloadavg()[0]:.1f}")
    for kind, count in sorted(run.faults.items(), key=lambda item: -item[1]):
        _say(f"  {count:6}  {kind}")
    _say("besides")
    checked = {"batches checked": run.batches, "rows checked": run.rows}
    for name, count in {**checked, **run.counts}.items():
        _say(f"  {count:6}  {name}")
    _say(f"{'seconds':48} {'p50':>9} {'p99':>9} {'most':>9} {'times':>6}")
    gaps = run.first_from_new, run.from_new_daemon, run.past_dead_worker, run.past_dead_host, run.slots_free
    for one in gaps:
        _say(one.row())
    _say(f"{len(run.errors)} errors" + "".join(f"\n- {error}" for error in run.errors))
    return 1 if run.errors else 0


def _say(text: str) -> None:
    sys.__stdout__.write(text + "\n")
    sys.__stdout__.flush()


if __name__ == "__main__":
    sys.exit(main())
