"""The folders of caches on disk, and the files in them. DAEMON process, and the user's shell.

Invariant: it opens no cache for use, and changes nothing.
"""

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from batchd.config.schema import meaning_of
from batchd.config.tree import Config, StreamConfig
from batchd.errors import Problem, path_text
from batchd.pipeline.cache_split import crop_problem, cut_problem, plan_pipeline
from batchd.pipeline.kinds import step_to_plain
from batchd.sources.kinds import source_to_plain
from batchd.storage.paths import unreachable

SUFFIX = ".cache"
PREFIX = "batchd-"
BLOCK_BYTES = 512
"""Unit in which the kernel counts a file's size on disk."""


class CacheFile(NamedTuple):
    """A cache file. ``in_use``: a daemon fills it; None if it cannot be opened to find out."""

    path: Path
    disk_bytes: int
    in_use: bool | None


def identity(config: StreamConfig) -> str:
    """Text that differs for two streams whose cached samples differ, known before any scan."""
    plan = plan_pipeline(config.pipeline, config.cache, config.cache_short_side)
    facts: list[Any] = [config.cache, source_to_plain(config.source), plan.record_bytes_max]
    if config.cache == "seekable":
        facts.append(plan.rewritten)
    if config.cache == "decoded":
        facts.append([step_to_plain(step) for step in plan.steps[: plan.cut]])
    return json.dumps(facts, sort_keys=True, default=str)


def folder_problem(folder: Path) -> str | None:
    """Say why this user cannot have caches in a folder; None if possible."""
    if (problem := unreachable(folder)) is not None:
        return problem
    if not folder.exists():
        return f"there is no {folder}: make it, on a local disk (mkdir -p {folder})"
    if not folder.is_dir():
        return f"{folder} is no folder"
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return f"uid {os.geteuid()} may not write into {folder}: chown it, or choose another folder"
    return None


def cache_problems(config: Config) -> list[Problem]:
    """Problems of a configuration's caches (pipelines, folders, sizes), without opening any."""
    problems = []
    sizes: dict[tuple[str, Path], tuple[str, int | None]] = {}
    for name, stream in config.streams.items():
        misfit = _misfit(stream)
        if misfit is not None:
            problems.append(_problem(name, "cache", misfit))
        if stream.cache_dir is None:
            continue
        found = folder_problem(stream.cache_dir)
        if found is not None:
            problems.append(_problem(name, "cache_dir", found))
        other, size = sizes.setdefault((identity(stream), stream.cache_dir), (name, stream.cache_size))
        if size != stream.cache_size:
            text = f"{name} and {other} share one file, so both have to say the same cache_size"
            problems.append(_problem(name, "cache_size", text))
    return problems


def _misfit(stream: StreamConfig) -> str | None:
    """Why a pipeline has no use for the kind of cache."""
    if stream.cache == "decoded":
        return cut_problem(stream.pipeline)
    if stream.cache == "seekable":
        return crop_problem(stream.pipeline) or _extension_problem()
    return None


def _extension_problem() -> str | None:
    try:
        import_module("batchd.pipeline._jpeg")
    except ImportError:
        return (
            "restart markers are written by the extension that decodes crops, which is not there: install a compiler and the "
            'headers of libjpeg-turbo, and batchd again, or take cache = "encoded"'
        )
    return None


def _problem(stream: str, key: str, text: str) -> Problem:
    path = ("streams", stream, key)
    return Problem(path_text(path), text, meaning_of(path, {}))


def cache_files(folder: Path) -> Iterator[CacheFile]:
    """All cache files in a folder, by name. Raises ``OSError`` if the folder cannot be read."""
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}")):
        with suppress(FileNotFoundError):
            taken = path.lstat()
            if stat.S_ISREG(taken.st_mode):
                yield CacheFile(path, taken.st_blocks * BLOCK_BYTES, is_locked(path))


def is_locked(path: Path) -> bool | None:
    """Whether a daemon fills the file of a cache; None where it cannot be opened to see that."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
