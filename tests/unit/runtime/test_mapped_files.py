"""Library pages that only loading needed are unmapped, and nothing else changes."""

import ctypes
import mmap
import re
import subprocess
import sys
from pathlib import Path

from batchd.runtime.mapped_files import unmap_loaded_pages

PAGE = mmap.PAGESIZE


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def resident_pages(address: int) -> int:
    entry = re.search(
        rf"^{address:x}-.*\n(?:\w+: .*\n)*?Rss: +(\d+)", Path("/proc/self/smaps").read_text(), re.MULTILINE
    )
    assert entry is not None
    return int(entry[1]) * 1024 // PAGE


def test_unchanged_pages_go_and_changed_ones_stay(tmp_path) -> None:
    """A process that reads the unchanged pages again gets the bytes of the file."""
    path = tmp_path / "library"
    path.write_bytes(b"as in the file".ljust(PAGE) * 3)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with path.open("rb") as file:
        clean, relocated = (mmap.mmap(file.fileno(), 3 * PAGE, access=mmap.ACCESS_COPY) for _ in range(2))
    assert clean[: 2 * PAGE : PAGE] == b"aa"
    relocated[PAGE : PAGE + 7] = b"changed"
    for memory in (clean, relocated):
        assert protect(address_of(memory), 3 * PAGE, mmap.PROT_READ) == 0
    assert resident_pages(address_of(clean)) > 0

    unmap_loaded_pages()

    assert resident_pages(address_of(clean)) == 0
    assert clean[PAGE : PAGE + 14] == b"as in the file"
    assert relocated[PAGE : PAGE + 7] == b"changed"
    assert resident_pages(address_of(relocated)) > 0


def test_a_process_with_all_of_a_workers_libraries_goes_on() -> None:
    """The process has less library memory resident, and the libraries compute the same results."""
    program = """if True:
        import batchd.worker.loop, cv2, numpy as np
        from batchd.runtime.mapped_files import unmap_loaded_pages
        files = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if "RssFile" in line)
        compute = lambda: cv2.resize(np.arange(75, dtype=np.uint8).reshape(5, 5, 3), (3, 2)).sum()
        expected, before = compute(), files()
        unmap_loaded_pages()
        after = files()
        print(after < before / 2, compute() == expected)
    """
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == ["True", "True"]
