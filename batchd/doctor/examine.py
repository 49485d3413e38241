"""All checks, in the order in which people read them. Runs in the user's shell.

    Subject (configuration, address) + Machine --probes, checks--> findings, one after the other

Invariant: whatever is wrong with one thing, the others are looked at.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from time import time

import batchd
from batchd.config.cpus import available_cpus
from batchd.config.tree import Config
from batchd.daemon.memory.held_descriptors import plan_descriptors
from batchd.daemon.memory.rings import RingSize, plan_rings
from batchd.doctor import caches, clock, decoding, kernel, limits, memory, processors, storage, surroundings
from batchd.doctor.finding import Finding, note, ok, problem
from batchd.doctor.machine import NOTHING_RUNS, Machine, Running
from batchd.errors import BatchdError, ConfigInvalid, MemoryTooSmall
from batchd.storage.access import Storage
from batchd_wire.wording import counted


@dataclass(frozen=True, slots=True)
class Patient:
    """What is examined: a machine, and the configuration that it shall serve, if there is one.

    ``why_none`` says why there is no ``config``; ``is_broken``: because it is wrong, and not
    because nobody has one yet. ``running``: what a daemon that runs on it has already.
    """

    machine: Machine
    file: Path
    config: Config | None
    why_none: str = ""
    is_broken: bool = False
    running: Running = NOTHING_RUNS


def examine(patient: Patient) -> Iterator[Finding]:
    """Everything but the daemon, each finding as soon as it is there."""
    machine, config = patient.machine, patient.config
    rings, finding = _rings(patient)
    yield finding
    yield from _about_memory(patient, rings)
    workers = config.daemon.worker_count() if config else available_cpus(machine.root)
    yield from processors.check_count(machine, workers)
    yield processors.check_flags(machine)
    yield processors.check_governor(machine)
    yield from decoding.check_decoding(decoding.measure_decoders())
    yield decoding.check_resampling(is_built=find_spec("batchd.pipeline._pixels") is not None)
    plan = None
    if config is not None and rings:
        plan = replace(plan_descriptors(config, rings), limit=machine.limits["files"])
    yield limits.check_files(machine, plan, len(rings))
    yield limits.check_processes(machine, workers, patient.running)
    yield kernel.check_kernel(machine, kernel.try_features())
    yield clock.check_source(machine)
    yield from clock.check_date(machine, time(), Path(batchd.__file__).stat().st_mtime)
    yield surroundings.check_runtime_directory(config.daemon.runtime_dir if config else None)
    if config is not None:
        yield from _about_storage(machine, config)
        yield from caches.check_caches(
            stream.cache_dir for stream in config.streams.values() if stream.cache_dir is not None
        )
    yield from surroundings.check_libraries(surroundings.installed_versions())


def _rings(patient: Patient) -> tuple[dict[str, RingSize], Finding]:
    """What the rings come to, and what is to be said of the configuration."""
    subject, file = "configuration", patient.file
    if patient.config is None:
        advice = (
            f"batchd check {file}"
            if patient.is_broken
            else "batchd config > batchd.toml, then: batchd doctor -c batchd.toml"
        )
        return {}, (problem if patient.is_broken else note)(subject, patient.why_none, advice)
    try:
        with Storage(patient.config.daemon.storage_limits()) as storage:
            rings = plan_rings(patient.config, storage)
    except (ConfigInvalid, MemoryTooSmall) as error:
        return {}, problem(subject, f"{file} has {counted(len(error.problems), 'problem')}", f"batchd check {file}")
    except BatchdError as error:
        return {}, problem(subject, str(error), f"batchd check {file}")
    return rings, ok(subject, f"{file}: {counted(len(rings), 'stream')}")


def _about_memory(patient: Patient, rings: dict[str, RingSize]) -> Iterator[Finding]:
    machine, config = patient.machine, patient.config
    need_bytes = sum(ring.ring_bytes for ring in rings.values())
    if config is not None and not rings:
        need_bytes = config.daemon.memory
    yield memory.check_memory(machine, need_bytes, patient.running)
    yield memory.check_locked_memory(machine, need_bytes)
    yield from memory.check_huge_pages(machine)
    yield memory.check_swap(machine)
    yield memory.check_nodes(machine)
    yield surroundings.check_shared_memory_mount()


def _about_storage(machine: Machine, config: Config) -> Iterator[Finding]:
    """Each place once, though several streams may read it."""
    streams: dict[Path, list[str]] = {}
    for name, stream in config.streams.items():
        for place in storage.places_of(stream.source):
            streams.setdefault(place, []).append(name)
    for place, names in streams.items():
        yield storage.check_place(machine, ", ".join(names), place, storage.measure_place(place))
