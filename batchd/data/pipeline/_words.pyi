from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

def encode(
    text: str, letters: bytes | bytearray, program: bytes, memo: Mapping[str, bytes], table: bytearray
) -> tuple[bytes, bytes]: ...
def letters(text: str, table: NDArray[np.uint8]) -> tuple[bytearray, int]: ...
def place(ends: NDArray[np.int32] | bytes, character: int) -> tuple[int, int, int, int]: ...
