"""The data sets, made once in a scratch folder.

Photographs, smaller copies, and the files that FFCV and batchd make of them.
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy as np
from environments import ROOT, python
from sides import PHOTOGRAPHS, RESIZED, Side

LONGER_SIDE = 400
QUALITY = 90
SUFFIXES = {".jpg", ".jpeg"}


def make_pictures(given: Path, scratch: Path, count: int) -> dict[str, Path]:
    """``count`` photographs as links, repeated if there are fewer, and copies of 400 pixels.

    The result: folders by table.
    """
    folders = {name: scratch / name for name in (PHOTOGRAPHS, RESIZED)}
    files = link_photographs(given, folders[PHOTOGRAPHS], count)
    folders[RESIZED].mkdir()
    for number in range(count):
        name = f"{number:05}.jpg"
        if number < files:
            _write_smaller((folders[PHOTOGRAPHS] / name).resolve(), folders[RESIZED] / name)
        else:
            (folders[RESIZED] / name).hardlink_to(folders[RESIZED] / f"{number % files:05}.jpg")
    return folders


def link_photographs(given: Path, folder: Path, count: int) -> int:
    """Make a folder of ``count`` links to photographs; give the number until they repeat."""
    files = sorted(path for path in given.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise SystemExit(f"there is no JPEG in {given}")
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:05}.jpg").symlink_to(files[number % len(files)].resolve())
    return len(files)


def _write_smaller(file: Path, to: Path) -> None:
    """Scale a photograph so that its longer side has 400 pixels, as FFCV's ``max_resolution`` does.

    Smaller ones stay.
    """
    image = cv2.imdecode(np.fromfile(file, np.uint8), cv2.IMREAD_COLOR)
    factor = LONGER_SIDE / max(image.shape[:2])
    if factor < 1:
        image = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)
    cv2.imwrite(str(to), image, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])


def prepare(folder: Path, sides: Iterable[Side]) -> None:
    """Write what sides read besides the folder itself, before anything is measured."""
    sides = list(sides)
    if any(side.is_ours and side.variant == "shards" for side in sides):
        _batchd_prepare(folder)
    for side in sides:
        if side.script == "ffcv_side.py":
            script = Path(__file__).with_name(side.script)
            _run([python(side.environment), str(script), "write", "--data", str(folder), "--variant", side.variant])


def _batchd_prepare(folder: Path) -> None:
    """Shards of the files' own bytes, with access points."""
    config = folder.with_name(f"{folder.name}-shards.toml")
    config.write_text(
        f'[streams.photos]\nsource = {{ type = "folder", path = "{folder}", allow_outside_root = true }}\n'
        f"batch_size = 1\npipeline = []\n"
    )
    to = folder.with_name(f"{folder.name}-shards")
    _run([python("batchd"), "-m", "batchd", "prepare", "photos", "--config", str(config), "--to", str(to)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
