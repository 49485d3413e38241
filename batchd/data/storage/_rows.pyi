from mmap import mmap

import numpy as np
from numpy.typing import NDArray

def copy_rows(
    mapped: mmap, starts: NDArray[np.int64], places: NDArray[np.int64], rows: memoryview, size: int
) -> tuple[int, int]: ...
def read_file(folder: int, name: bytes, flags: int, memory: memoryview, bytes_max: int, as_of_ns: int) -> int: ...
def read_rows(
    descriptor: int, starts: NDArray[np.int64], places: NDArray[np.int64], rows: memoryview, size: int
) -> int: ...
