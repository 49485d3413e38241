"""Faults at named steps, for tests. Daemon and worker; inert unless ``BATCHD_FAILPOINTS`` is set.

    BATCHD_FAILPOINTS="worker.sample.begin=kill@3;daemon.handle.sent=hang"

The third time that a process passes ``worker.sample.begin``, it is killed with SIGKILL; at
``daemon.handle.sent`` a process hangs. ``worker.sample.begin:17`` is that step with sample 17.
Actions: ``kill``, ``segv``, ``hang``, ``stop`` (SIGSTOP, until a SIGCONT), ``eat`` (use 1 GiB of
memory, for a process with a limit). Counts are per process. With ``BATCHD_FAILPOINTS_LEDGER`` set
to a directory, each fault happens once in all processes together: in the first one that creates the
file of its name there, with its pid.

Refused under a service manager.
"""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "BATCHD_FAILPOINTS"
LEDGER_VARIABLE = "BATCHD_FAILPOINTS_LEDGER"
_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
_ACTIONS = (*_SIGNALS, "hang", "eat")
_EATEN_BYTES = 1 << 30


@dataclass(slots=True)
class _Failpoint:
    action: str
    at: int
    passed: int = 0


def _parse(text: str) -> dict[str, _Failpoint]:
    found = {}
    for part in filter(None, text.split(";")):
        name, equals, rest = part.partition("=")
        action, at, number = rest.partition("@")
        if not equals or action not in _ACTIONS or (at and not (number.isdecimal() and int(number))):
            raise SystemExit(f"{VARIABLE}: {part!r} is not NAME[:SAMPLE]=ACTION[@N] with one of {', '.join(_ACTIONS)}")
        found[name.strip()] = _Failpoint(action, int(number or "1"))
    return found


def _read_environment() -> dict[str, _Failpoint]:
    text = os.environ.get(VARIABLE, "")
    if text and ("NOTIFY_SOCKET" in os.environ or "INVOCATION_ID" in os.environ):
        raise SystemExit(f"{VARIABLE} is set, and this is a service: faults are for tests. Unset it in the unit")
    return _parse(text)


def arm() -> None:
    """Follow the environment as it is now: a fork may have another one than its parent."""
    global _armed  # noqa: PLW0603  one for the process, as its environment
    _armed = _read_environment()


_armed: dict[str, _Failpoint]
arm()


def passing(name: str, sample: int | None = None) -> None:
    """Pass the step ``name``, with ``sample`` if any. Costs next to nothing without faults."""
    if _armed:
        _pass_armed(name)
        if sample is not None:
            _pass_armed(f"{name}:{sample}")


def _pass_armed(name: str) -> None:
    failpoint = _armed.get(name)
    if failpoint is None:
        return
    failpoint.passed += 1
    if failpoint.passed != failpoint.at or not _is_ours(name):
        return
    if failpoint.action == "hang":
        while True:
            signal.pause()
    if failpoint.action == "eat":
        b"\1" * _EATEN_BYTES
        return
    os.kill(os.getpid(), _SIGNALS[failpoint.action])


def _is_ours(name: str) -> bool:
    """Tell whether the fault may still happen, and make it ours: a file has one creator."""
    ledger = os.environ.get(LEDGER_VARIABLE)
    if not ledger:
        return True
    try:
        with (Path(ledger) / name).open("x") as entry:
            entry.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True
