"""All checks in the order of the report, and those of the installation. Runs in the user's shell.

    DoctorTarget (configuration, address) + Machine --probes, checks--> findings, one by one

Invariant: a problem of one subject does not keep the others from being checked.
"""

import os
import platform
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import time

import batchd
from batchd.commands.doctor import checks, decoding, storage
from batchd.commands.doctor.machine import NOTHING_RUNS, Finding, Machine, Running, note, ok, problem, warning
from batchd.config.directories import choose_runtime_directory
from batchd.config.tree import Config
from batchd.data.storage.access import Storage
from batchd.errors import BatchdError, ConfigInvalid, MemoryTooSmall
from batchd.runtime.cpus import available_cpus
from batchd.stream.rings import RingSize, plan_descriptors, plan_rings
from batchd_wire.status import DaemonFacts
from batchd_wire.wording import counted


@dataclass(frozen=True, slots=True)
class DoctorTarget:
    """The machine to check, and the configuration that it will serve, if there is one."""

    machine: Machine
    file: Path
    config: Config | None
    why_none: str = ""
    """Why there is no ``config``."""
    is_broken: bool = False
    """It is invalid, not missing."""
    running: Running = NOTHING_RUNS


def examine(target: DoctorTarget) -> Iterator[Finding]:
    """Yield the findings on everything but the daemon, each at once."""
    machine, config = target.machine, target.config
    rings, finding = _rings(target)
    yield finding
    yield from _about_memory(target, rings)
    workers = config.daemon.worker_count() if config else available_cpus(machine.root)
    yield from checks.check_count(machine, workers)
    if config is not None and rings:
        yield from checks.check_pool(config, rings, available_cpus(machine.root))
    yield checks.check_flags(machine)
    yield checks.check_governor(machine)
    yield from decoding.check_decoding(decoding.measure_decoders())
    yield decoding.check_resampling(is_built=find_spec("batchd.data.pipeline._pixels") is not None)
    plan = None
    if config is not None and rings:
        plan = replace(plan_descriptors(config, rings), limit=machine.limits["files"])
    yield checks.check_files(machine, plan, len(rings))
    yield checks.check_file_size(machine, rings)
    yield checks.check_processes(machine, workers, target.running)
    yield checks.check_kernel(machine, checks.try_features())
    yield checks.check_source(machine)
    yield from checks.check_date(machine, time(), Path(batchd.__file__).stat().st_mtime)
    yield check_runtime_directory(config.daemon.runtime_dir if config else None)
    if config is not None:
        yield from _about_storage(machine, config)
        caches = {stream.cache_dir for stream in config.streams.values() if stream.cache_dir is not None}
        yield from map(storage.check_cache, sorted(caches))
    yield from check_libraries(installed_versions())


def _rings(target: DoctorTarget) -> tuple[dict[str, RingSize], Finding]:
    """Sizes of the rings by stream, and the finding on the configuration."""
    subject, file = "configuration", target.file
    if target.is_broken:
        return {}, problem(subject, target.why_none, f"batchd check {file}")
    if target.config is None:
        advice = "batchd init /path/to/data, then: batchd doctor"
        return {}, note(subject, target.why_none, advice)
    try:
        with Storage(target.config.daemon.storage_limits()) as storage:
            rings = plan_rings(target.config, storage)
    except (ConfigInvalid, MemoryTooSmall) as error:
        return {}, problem(subject, f"{file} has {counted(len(error.problems), 'problem')}", f"batchd check {file}")
    except BatchdError as error:
        return {}, problem(subject, str(error), f"batchd check {file}")
    return rings, ok(subject, f"{file}: {counted(len(rings), 'stream')}")


def _about_memory(target: DoctorTarget, rings: dict[str, RingSize]) -> Iterator[Finding]:
    machine, config = target.machine, target.config
    need_bytes = sum(ring.ring_bytes for ring in rings.values())
    if config is not None:
        need_bytes = need_bytes + config.daemon.derived_bytes if rings else config.daemon.memory
    yield checks.check_memory(machine, need_bytes, target.running)
    yield checks.check_locked_memory(machine, need_bytes)
    yield from checks.check_huge_pages(machine)
    yield checks.check_swap(machine)
    yield checks.check_nodes(machine)
    # users ask for it, because other loaders need it
    yield note("shared memory", "batchd does not use /dev/shm: its size, and --shm-size of docker, do not matter")


def _about_storage(machine: Machine, config: Config) -> Iterator[Finding]:
    """Findings on each place once, even if several streams read it."""
    streams: dict[Path, list[str]] = {}
    for name, stream in config.streams.items():
        for place in storage.places_of(stream.source):
            streams.setdefault(place, []).append(name)
    for place, names in streams.items():
        yield storage.check_place(machine, ", ".join(names), place, storage.measure_place(place))


LIBRARIES = ("batchd", "batchd-client", "numpy", "pyzmq", "msgpack", "pydantic", "opencv-python-headless", "simplejpeg")
EXTRAS = ("pyarrow", "obstore", "lmdb", "tokenizers", "google-crc32c", "protobuf", "av")


def check_runtime_directory(configured: Path | None) -> Finding:
    """The daemon has to be able to write to it; members of its group may connect."""
    subject = "runtime directory"
    try:
        path = choose_runtime_directory(configured).path
    except ConfigInvalid as error:
        advice = "set runtime_dir in [daemon], or RuntimeDirectory=batchd in the unit"
        return problem(subject, error.problems[0].message, advice)
    if not path.exists():
        parent = next(one for one in path.parents if one.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return ok(subject, f"{path}: the daemon will create it")
        found = f"{path} does not exist, and {parent} is not writable"
        return problem(subject, found, f"install -d -m 750 {path}, as root")
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    found = f"{path}, mode {mode:03o}, user {status.st_uid}, group {status.st_gid}"
    if not stat.S_ISDIR(status.st_mode):
        return problem(subject, f"{path} is not a directory", "remove it, or set runtime_dir in [daemon]")
    if not os.access(path, os.W_OK | os.X_OK):
        user = os.geteuid()
        return problem(subject, f"{found}: not writable for user {user}", f"chown {user} {path}, as root")
    if mode & stat.S_IWOTH:
        return warning(subject, f"{found}: all users may create sockets there", f"chmod o-w {path}")
    return ok(subject, found)


def check_libraries(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    """``versions``: of each distribution, None if it is not installed."""
    missing = [name for name in LIBRARIES if versions.get(name) is None and name != "simplejpeg"]
    there = [f"{name} {versions[name]}" for name in LIBRARIES if versions.get(name)]
    if missing:
        yield problem("libraries", f"{', '.join(missing)} missing", f"run: pip install {' '.join(missing)}")
    else:
        yield ok("libraries", f"Python {platform.python_version()}, {', '.join(there)}")
    ours, theirs = versions.get("batchd"), versions.get("batchd-client")
    if ours and theirs and ours != theirs:
        yield problem("libraries", f"batchd {ours} with batchd-client {theirs}", f"install both of version {ours}")
    extras = [f"{name} {versions[name]}" for name in EXTRAS if versions.get(name)]
    yield ok("extras", ", ".join(extras) or "none; `batchd check` names the one that a source needs")


def installed_versions() -> dict[str, str | None]:
    """Versions of the libraries and extras in this Python; None for missing ones."""
    versions: dict[str, str | None] = dict.fromkeys((*LIBRARIES, *EXTRAS))
    for name in versions:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def check_daemon(answer: DaemonFacts | None, why_not: str, ours: str) -> Finding:
    """``answer``: None if no daemon answers, for the reason ``why_not``; ``ours``: this version."""
    if answer is None:
        return note("daemon", why_not)
    found = f"version {answer.version} runs, pid {answer.pid}"
    if answer.version != ours:
        return warning("daemon", f"{found}; this is version {ours}", "restart it: systemctl restart batchd")
    return ok("daemon", found)
