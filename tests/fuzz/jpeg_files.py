"""Write JPEGs of all kinds into a folder: `make fuzz-jpeg` starts from them, and breaks them."""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from support.images import (
    arithmetic_jpeg,
    jpeg_by_component,
    jpeg_of,
    jpeg_with_exif,
    jpeg_with_scans,
    photo,
    ycck_jpeg,
)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        f"{subsampling}-{restart}-{progressive:d}": jpeg_of(
            photo(90, 121), subsampling, restart, is_progressive=progressive
        )
        for subsampling in ("444", "422", "420", "440", "411")
        for restart in (0, 3, 4)
        for progressive in (False, True)
    }
    grey = photo(61, 50)[..., 0]
    files |= {
        "grey": jpeg_of(grey),
        "grey-progressive": jpeg_of(grey, is_progressive=True),
        "by-component": jpeg_by_component(grey),
        "many-scans": jpeg_by_component(grey, 190),
        "too-many-scans": jpeg_by_component(photo(16, 16)[..., 0], 300),
        "repeated-scan": jpeg_with_scans(photo(40, 40), 20),
        "arithmetic": arithmetic_jpeg(),
        "inks": ycck_jpeg(np.dstack([photo(40, 50), grey[:40]])),
        "exif": jpeg_with_exif(jpeg_of(photo(40, 50)), 6),
        "small": jpeg_of(photo(1, 3)),
    }
    for name, data in files.items():
        (folder / f"{name}.jpg").write_bytes(data)
