"""Find the daemon, or report precisely why there is none. Runs in the trainer.

Tried in this order: the address that the program gave, else ``$BATCHD_ADDRESS``, else the first
runtime directory of ``batchd_wire.runtime.candidate_directories`` whose lifeline socket accepts a
connection.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from batchd_client import errors
from batchd_client.connection import PAUSE_S, patiently_open
from batchd_client.hints import Absence
from batchd_client.lifeline import DaemonBusy
from batchd_client.opening import Place, Target, first_line, reason_of
from batchd_client.session import Session
from batchd_wire import runtime
from batchd_wire.keys import KEY_VARIABLE, ConnectionKey, read_connection_key
from batchd_wire.tcp import PARTS_MAX

CONNECTIONS = 1
RECONNECT_S = 4 * 3600.0
"""Usual wait for a daemon that went away: its operator repairs it within a working day's half."""
RECONNECT_TO_CHILD_S = 10.0
"""The same for a daemon of one script, which nobody starts again."""
NAME_CHARACTERS_MAX = 64
"""The daemon cuts longer names (``batchd.runtime.limits``)."""


def find_daemon(
    target_at: Callable[[Place], Target],
    address: str | None,
    connect_timeout_s: float,
    *,
    is_patient: bool = True,
    not_local: type[errors.Misused] | None = None,
) -> tuple[Target, Session]:
    """Open a session with the daemon at ``address``, or with the first one that answers.

    ``target_at`` makes the target of a place. A daemon with a given address may be starting, so
    this waits for it if ``is_patient``. Without an address, there may be no daemon to wait for.

    Raises ``not_local``, if given, for a network address, and ``AddressInvalid``,
    ``DaemonNotFound``, ``PermissionDenied``, ``ConnectTimeout``, ``VersionMismatch`` or
    ``ProtocolError``.
    """
    began_s = time.monotonic()
    give_up = began_s + connect_timeout_s
    reasons: list[str] = []  # not the errors, which would keep sockets alive
    is_denied = False
    places, is_named = _places(address, not_local)
    for place in places:
        try:
            target = target_at(place)
            may_pass = partial(_may_pass, place, is_patient and is_named)
            with Absence(place.address, began_s, give_up, f"connect_timeout_s={connect_timeout_s:g}") as absence:
                return target, patiently_open(target, give_up, connect_timeout_s, absence, may_pass)
        except DaemonBusy as error:
            raise errors.ConnectTimeout(f"after {connect_timeout_s:g} s: {first_line(error)}") from error
        except OSError as error:
            where = place.address if isinstance(place, runtime.TcpAddress) else place.path
            reasons.append(f"{where}: {reason_of(place, error)}")
            is_denied |= isinstance(error, PermissionError)
    waited_s = connect_timeout_s - (give_up - time.monotonic())
    waited = f" within {waited_s:.1f} s" if waited_s > PAUSE_S else ""
    tried = f"no batchd daemon could be reached{waited}; tried " + "; ".join(reasons)
    raise errors.PermissionDenied(tried) if is_denied else errors.DaemonNotFound(tried)


def find_key(path: str | None) -> ConnectionKey | None:
    """Read the connection file from ``path`` or ``$BATCHD_KEY``. Raises ``KeyInvalid``."""
    origin, given = "connect(key=)", path
    if given is None:
        origin, given = f"${KEY_VARIABLE}", os.environ.get(KEY_VARIABLE) or None
    if given is None:
        return None
    try:
        return read_connection_key(Path(given))
    except OSError as error:
        raise errors.KeyInvalid(f"{origin}: {given} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise errors.KeyInvalid(f"{origin}: {error}") from None


def find_connections(given: int | None) -> int:
    """Number of TCP connections, ``given`` or of the variable. Raises ``ConnectionsInvalid``."""
    origin, text = "connect(connections=)", str(given)
    if given is None:
        origin, text = (
            f"${runtime.CONNECTIONS_VARIABLE}",
            os.environ.get(runtime.CONNECTIONS_VARIABLE) or str(CONNECTIONS),
        )
    if not text.isdecimal() or not 1 <= int(text) <= PARTS_MAX:
        raise errors.ConnectionsInvalid(f"{origin} is {text!r}, and has to be a number from 1 to {PARTS_MAX}")
    return int(text)


def find_reconnect_timeout(given: float | None, place: Place) -> float:
    """Seconds that loops wait for a daemon that went away: ``given``, or of the variable, or usual.

    Raises ``TimeoutInvalid``.
    """
    origin, text = "connect(reconnect_timeout_s=)", str(given)
    if given is None:
        origin, text = f"${runtime.RECONNECT_VARIABLE}", os.environ.get(runtime.RECONNECT_VARIABLE) or ""
    if not text:
        is_of_one_script = isinstance(place, runtime.RuntimeDirectory) and place.one_script_path.exists()
        return RECONNECT_TO_CHILD_S if is_of_one_script else RECONNECT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0.0:
        raise errors.TimeoutInvalid(f"{origin} is {text!r}, and has to be a number of seconds, 0 or more")
    return seconds


def find_name(given: str | None, environment: Mapping[str, str]) -> str:
    """Name of this run for status, log and metrics: ``given``, else the first of these.

        BATCHD_NAME
        SLURM_JOB_NAME-SLURM_JOB_ID     in an array the array's number, _ and the task's
        PROGRAM-TORCHELASTIC_RUN_ID     torchrun --rdzv-id=NUMBER; "none" if it has none
        HOSTNAME                        in Kubernetes: the name of the pod
        PROGRAM-PID

    Raises ``NameInvalid`` if the name that the user chose is empty, long or not printable.
    """
    chosen = given if given is not None else environment.get(runtime.NAME_VARIABLE) or None
    if chosen is not None:
        if not 0 < len(chosen) <= NAME_CHARACTERS_MAX or not chosen.isprintable():
            origin = f"${runtime.NAME_VARIABLE}" if given is None else "connect(name=)"
            shown = chosen if len(chosen) <= NAME_CHARACTERS_MAX else chosen[:NAME_CHARACTERS_MAX] + "..."
            raise errors.NameInvalid(
                f"{origin} is {shown!r}, of {len(chosen)} characters, and has to be 1 to {NAME_CHARACTERS_MAX} printable ones"
            )
        return chosen
    return _fitted(*_job(environment))


def _job(environment: Mapping[str, str]) -> tuple[str, str]:
    """Name and number of the job, as ``find_name`` has them; the program's without a job."""
    known = environment.get
    if number := known("SLURM_JOB_ID"):
        array, task = known("SLURM_ARRAY_JOB_ID"), known("SLURM_ARRAY_TASK_ID")
        return known("SLURM_JOB_NAME") or "slurm", f"{array}_{task}" if array and task else number
    run = known("TORCHELASTIC_RUN_ID")
    if run and run != "none":
        return program(), run
    if known("KUBERNETES_SERVICE_HOST") and (pod := known("HOSTNAME")):
        return pod, ""
    return program(), str(os.getpid())


def _fitted(name: str, number: str) -> str:
    """NAME-NUMBER within the limits: the beginning of a long name, "?" for control characters."""
    end = f"-{number}"[:NAME_CHARACTERS_MAX] if number else ""
    fitted = name[: NAME_CHARACTERS_MAX - len(end)] + end
    return "".join(one if one.isprintable() else "?" for one in fitted)


def program() -> str:
    """Name of this program: its script, or the package run by `python -m`."""
    script = Path(sys.argv[0] if sys.argv else "")
    name = script.parent.name if script.name == "__main__.py" else script.name
    return name[:NAME_CHARACTERS_MAX] or "python"


def _places(address: str | None, not_local: type[errors.Misused] | None) -> tuple[Sequence[Place], bool]:
    """List the places to try, and tell whether an address names one."""
    origin, given = "connect()", address
    if given is None:
        origin, given = f"${runtime.ADDRESS_VARIABLE}", os.environ.get(runtime.ADDRESS_VARIABLE) or None
    try:
        if given is None:
            return [runtime.runtime_directory(path) for path in runtime.candidate_directories()], False
        place = runtime.parse_address(given)
    except ValueError as error:
        raise errors.AddressInvalid(f"{origin}: {error}") from None
    if not_local is not None and isinstance(place, runtime.TcpAddress):
        raise not_local(f"{place.address} is an address in the network, and this works on the daemon's host alone")
    return [place], True


def _may_pass(place: Place, is_named: bool, error: Exception) -> bool:
    """True if a retry may help: not for a closed directory, or a file that is not a socket."""
    if isinstance(error, DaemonBusy) or isinstance(place, runtime.TcpAddress):
        return isinstance(error, (DaemonBusy, OSError))
    if not is_named or not isinstance(error, OSError):
        return False
    # A new socket is opened to its group a moment later.
    if isinstance(error, PermissionError):
        return os.access(place.path, os.X_OK)
    return isinstance(error, FileNotFoundError) or (
        isinstance(error, ConnectionRefusedError) and place.lifeline_path.is_socket()
    )
