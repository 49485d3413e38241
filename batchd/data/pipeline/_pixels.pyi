from typing import Any, TypeAlias

from numpy.typing import NDArray

_Taps: TypeAlias = tuple[NDArray[Any], NDArray[Any], int]
_Place: TypeAlias = tuple[int, int, int]

def count_levels(pixels: NDArray[Any], counts: NDArray[Any], /) -> None: ...
def fill_polygon(corners: NDArray[Any], mask: NDArray[Any], height: int, width: int, /) -> None: ...
def fill_runs(ends: NDArray[Any], mask: NDArray[Any], height: int, width: int, /) -> None: ...
def recolor(pixels: NDArray[Any], changes: tuple[tuple[int, float], ...], is_bgr: bool, /) -> None: ...
def remap(
    source: NDArray[Any], target: NDArray[Any], places: NDArray[Any], is_linear: bool, fill: bytes, /
) -> None: ...
def resample(
    source: NDArray[Any],
    target: NDArray[Any],
    rows: _Taps,
    columns: _Taps,
    kept_bits: int,
    is_upside_down: bool = False,
    is_mirrored: bool = False,
    /,
) -> None: ...
def scale(
    source: NDArray[Any],
    target: NDArray[Any],
    is_area: bool,
    is_upside_down: bool = False,
    is_mirrored: bool = False,
    /,
) -> None: ...
def sharpen(source: NDArray[Any], target: NDArray[Any], factor: int, /) -> None: ...
def use_avx2(is_used: bool, /) -> bool: ...
def warp_parts(
    parts: tuple[tuple[NDArray[Any], int, int], ...],
    size: tuple[int, int],
    ground: bytes,
    target: NDArray[Any],
    across: _Place,
    down: _Place,
    fill: bytes,
    /,
) -> bool: ...
def warp(
    source: NDArray[Any], target: NDArray[Any], across: _Place, down: _Place, is_linear: bool, fill: bytes, /
) -> None: ...
