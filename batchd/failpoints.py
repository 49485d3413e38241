"""Faults at named steps, for tests. Daemon and worker; inert unless ``BATCHD_FAILPOINTS`` is set.

    BATCHD_FAILPOINTS="worker.sample.begin=kill@3;daemon.handle.sent=hang"

means: the third time that a process passes ``worker.sample.begin``, it is killed with SIGKILL; at ``daemon.handle.sent`` it stops
for ever. Actions: ``kill``, ``hang``, ``segv``. Counts are per process. Refused under a service manager, where nobody wants faults.
"""

import os
import signal
from dataclasses import dataclass

VARIABLE = "BATCHD_FAILPOINTS"
_ACTIONS = ("kill", "hang", "segv")


@dataclass(slots=True)
class _Failpoint:
    action: str
    at: int
    passed: int = 0


def _parse(text: str) -> dict[str, _Failpoint]:
    found = {}
    for part in filter(None, text.split(";")):
        name, equals, rest = part.partition("=")
        action, _at, number = rest.partition("@")
        if not equals or action not in _ACTIONS or not (number or "1").isdecimal():
            raise SystemExit(f"{VARIABLE}: {part!r} is not NAME=ACTION[@N] with one of {', '.join(_ACTIONS)}")
        found[name.strip()] = _Failpoint(action, int(number or "1"))
    return found


def _read_environment() -> dict[str, _Failpoint]:
    text = os.environ.get(VARIABLE, "")
    if text and ("NOTIFY_SOCKET" in os.environ or "INVOCATION_ID" in os.environ):
        raise SystemExit(f"{VARIABLE} is set, and this is a service: faults are for tests. Unset it in the unit")
    return _parse(text)


_armed = _read_environment()


def passing(name: str) -> None:
    """Say that the process is at step ``name``; costs a dictionary's truth value where no faults are asked for."""
    if _armed:
        _pass_armed(name)


def _pass_armed(name: str) -> None:
    failpoint = _armed.get(name)
    if failpoint is None:
        return
    failpoint.passed += 1
    if failpoint.passed != failpoint.at:
        return
    if failpoint.action == "hang":
        while True:
            signal.pause()
    os.kill(os.getpid(), signal.SIGKILL if failpoint.action == "kill" else signal.SIGSEGV)
