"""Unmaps the pages of libraries that only loading them needed. DAEMON and FORK SERVER.

Loading a library reads its symbols and relocations, and an import runs code that runs once. For
OpenCV, NumPy and pydantic these pages are up to 20 MB, and count as memory of the process until the
kernel is short of it. What the process needs again, it maps again from the page cache.

Invariant: only pages that are equal to their file are unmapped. A mapping stays if the process may
write to it, or has written to it (relocations, which are made read-only afterwards; breakpoints of
a debugger): there is no other copy of its pages.
"""

import ctypes
import mmap
import re
from pathlib import Path

_READ_ONLY_FILE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ \d+ +/.*\n((?:\w+: .*\n)+)", re.MULTILINE)
"""An entry of proc_pid_smaps(5): a private mapping of a file, and its counts."""
_IS_UNWRITTEN = re.compile(r"^Anonymous: +0 kB$", re.MULTILINE)


def unmap_loaded_pages() -> None:
    """Unmap the unchanged pages of all private, read-only mappings of files.

    They stay if there is no descriptor to look with.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    try:
        mappings = Path("/proc/self/smaps").read_text("utf-8", "replace")
    except OSError:
        return
    for entry in _READ_ONLY_FILE.finditer(mappings):
        first, end = int(entry[1], 16), int(entry[2], 16)
        if _IS_UNWRITTEN.search(entry[3]):
            madvise(first, end - first, mmap.MADV_DONTNEED)
