from typing import Any

from numpy.typing import NDArray

def resample(
    samples: NDArray[Any],
    target: NDArray[Any],
    kernel: NDArray[Any],
    up: int,
    down: int,
    first: int,
    start: int,
    /,
) -> None: ...
def use_avx2(is_used: bool, /) -> bool: ...
