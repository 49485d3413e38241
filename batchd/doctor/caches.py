"""What the caches of samples on disk take, and which of them nobody uses. Runs in the user's shell."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from batchd.daemon.memory.cache_folder import CacheFile, cache_files, folder_problem
from batchd.doctor.finding import Finding, note, ok, problem
from batchd.samples.sizes import round_bytes
from batchd_wire.wording import counted

NAMED_MAX = 8


def check_caches(folders: Iterable[Path]) -> list[Finding]:
    """A finding for each folder. Which of its files a daemon would want that does not run, nobody can tell without its scans."""
    return [_check_folder(folder) for folder in sorted(set(folders))]


def _check_folder(folder: Path) -> Finding:
    subject = f"caches in {folder}"
    wrong = folder_problem(folder)
    if wrong is not None:
        return problem(subject, wrong, "cache_dir = says where caches are; `batchd check` says which stream's it is")
    try:
        files = list(cache_files(folder))
    except OSError as error:
        return problem(subject, str(error), "cache_dir = says where caches are")
    idle = [file for file in files if not file.in_use]
    found = f"{counted(len(files), 'file')}, {round_bytes(_size(files))}"
    if not idle:
        return ok(subject, found)
    names = " ".join(str(file.path) for file in idle[:NAMED_MAX]) + (" ..." if len(idle) > NAMED_MAX else "")
    return note(
        subject,
        f"{found}; no daemon that runs uses {len(idle)} of them, {round_bytes(_size(idle))}",
        f"what a daemon wants, its log says at its start; to remove these: rm {names}",
    )


def _size(files: Sequence[CacheFile]) -> int:
    return sum(file.disk_bytes for file in files)
