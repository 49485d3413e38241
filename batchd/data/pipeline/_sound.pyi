from typing import Any, TypeAlias

from numpy.typing import NDArray

_Bands: TypeAlias = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]

def combine(numbers: NDArray[Any], weights: NDArray[Any], sums: NDArray[Any], /) -> None: ...
def convolve(
    samples: NDArray[Any],
    response: NDArray[Any],
    target: NDArray[Any],
    roots: NDArray[Any],
    part: int,
    first: int,
    /,
) -> None: ...
def logarithms(numbers: NDArray[Any], floor: float, factor: float, /) -> None: ...
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
def spectra(
    samples: NDArray[Any],
    levels: NDArray[Any],
    window: NDArray[Any],
    roots: NDArray[Any],
    hop: int,
    is_magnitude: bool,
    is_centered: bool,
    emphasis: float,
    bands: _Bands | None,
    /,
) -> None: ...
def use_vectors(bits: int, /) -> int: ...
