"""What is around batchd: its directory, a daemon, Python and the libraries. Runs in the user's shell; pure checks."""

import os
import platform
import stat
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from batchd.config.directories import choose_runtime_directory
from batchd.doctor.finding import Finding, note, ok, problem, warning
from batchd.errors import ConfigInvalid
from batchd_wire.status import DaemonFacts

LIBRARIES = ("batchd", "batchd-client", "numpy", "pyzmq", "msgpack", "pydantic", "opencv-python-headless", "simplejpeg")
EXTRAS = ("pyarrow", "obstore", "lmdb", "tokenizers", "google-crc32c", "protobuf", "av")


def check_runtime_directory(configured: Path | None) -> Finding:
    """Who may write it is who the daemon may be; its group is who may connect."""
    subject = "runtime directory"
    try:
        path = choose_runtime_directory(configured).path
    except ConfigInvalid as error:
        return problem(
            subject, error.problems[0].message, "set runtime_dir in [daemon], or RuntimeDirectory=batchd in the unit"
        )
    if not path.exists():
        parent = next(one for one in path.parents if one.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return ok(subject, f"{path}, which the daemon will make")
        return problem(
            subject, f"{path} is not there, and {parent} is not writable", f"install -d -m 750 {path}, as root"
        )
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    found = f"{path}, mode {mode:03o}, user {status.st_uid}, group {status.st_gid}"
    if not stat.S_ISDIR(status.st_mode):
        return problem(subject, f"{path} is no directory", "remove it, or set runtime_dir in [daemon]")
    if not os.access(path, os.W_OK | os.X_OK):
        return problem(
            subject, f"{found}: not writable for user {os.geteuid()}", f"chown {os.geteuid()} {path}, as root"
        )
    if mode & stat.S_IWOTH:
        return warning(subject, f"{found}: everybody may put sockets there", f"chmod o-w {path}")
    return ok(subject, found)


def check_shared_memory_mount() -> Finding:
    """Asked for again and again, as other loaders need it."""
    return note("shared memory", "batchd does not use /dev/shm: its size, and --shm-size of docker, do not matter")


def check_libraries(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    """``versions``: of each distribution, None where it is not installed."""
    missing = [name for name in LIBRARIES if versions.get(name) is None and name != "simplejpeg"]
    there = [f"{name} {versions[name]}" for name in LIBRARIES if versions.get(name)]
    if missing:
        yield problem("libraries", f"{', '.join(missing)} missing", "pip install --force-reinstall batchd")
    else:
        yield ok("libraries", f"Python {platform.python_version()}, {', '.join(there)}")
    ours, theirs = versions.get("batchd"), versions.get("batchd-client")
    if ours and theirs and ours != theirs:
        yield problem("libraries", f"batchd {ours} with batchd-client {theirs}", f"pip install batchd-client=={ours}")
    extras = [f"{name} {versions[name]}" for name in EXTRAS if versions.get(name)]
    yield ok("extras", ", ".join(extras) or "none; `batchd check` says which one a source needs")


def installed_versions() -> dict[str, str | None]:
    """What this Python has."""
    return {name: _version(name) for name in (*LIBRARIES, *EXTRAS)}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_daemon(answer: DaemonFacts | None, why_not: str, ours: str) -> Finding:
    """``answer``: None where no daemon answers, for the reason ``why_not``."""
    if answer is None:
        return note("daemon", why_not)
    found = f"version {answer.version} runs, pid {answer.pid}"
    if answer.version != ours:
        return warning("daemon", f"{found}; this is version {ours}", "restart it: systemctl restart batchd")
    return ok("daemon", found)
