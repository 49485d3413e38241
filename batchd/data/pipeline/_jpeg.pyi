from typing_extensions import Buffer

from batchd.data.pipeline.image.jpeg_box import FileTask

COLUMNS_BESIDE_MAX: int
LIBJPEG_TURBO_VERSION: str

class JpegError(ValueError): ...

def decode(
    data: Buffer,
    pixels: Buffer,
    color: str,
    eighths: int,
    size: tuple[int, int],
    box: tuple[int, int, int, int],
    points: Buffer | None = None,
    is_part: bool = False,
    target: Buffer | None = None,
    is_area: bool = False,
    is_upside_down: bool = False,
    is_mirrored: bool = False,
    /,
) -> tuple[int, int, bool, int] | None: ...
def make_rows(
    tasks: list[FileTask], color: str, file: Buffer, pixels: Buffer, note: Buffer, results: Buffer, /
) -> None: ...
def part(
    header: Buffer, eighths: int, size: tuple[int, int], box: tuple[int, int, int, int], points: Buffer, /
) -> tuple[int, int] | None: ...
def probe(data: Buffer, /) -> tuple[str, int, int, int, int, int, int, int] | None: ...
def access_points(data: Buffer, size: tuple[int, int], step_pixels: int, /) -> bytes | None: ...
def tiles(
    data: Buffer, eighths: int, size: tuple[int, int], box: tuple[int, int, int, int], /
) -> tuple[int, int] | None: ...
def transcode(data: Buffer, size: tuple[int, int], /) -> bytes | None: ...
