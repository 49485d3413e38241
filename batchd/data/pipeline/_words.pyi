from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

def encode(
    text: str, letters: bytes | NDArray[np.uint8], program: bytes, memo: Mapping[str, bytes], table: bytearray
) -> tuple[bytes, bytes]: ...
