"""Shards in tar format, made for tests."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_shard(file: Path, members: Iterable[tuple[str, bytes]], **options: object) -> Path:
    """Write a tar file with these members, in this order."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w", **options) as shard:  # type: ignore[call-overload]
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))
    return file


def photo_shards(photos: Path, folder: Path, count: int = 3) -> dict[str, Any]:
    """Write the photographs to shards, in the order of a folder source.

    Return the source that reads them.
    """
    classes = sorted(path.name for path in photos.iterdir())
    files = [path for name in classes for path in sorted((photos / name).glob("*.jpg"))]
    for number in range(count):
        part = files[number * len(files) // count : (number + 1) * len(files) // count]
        write_shard(
            folder / f"train-{number:02}.tar",
            [
                member
                for path in part
                for member in (
                    (f"{path.parent.name}/{path.name}", path.read_bytes()),
                    (f"{path.parent.name}/{path.stem}.cls", str(classes.index(path.parent.name)).encode()),
                )
            ],
        )
    return {"type": "webdataset", "root": str(folder), "shards": [f"train-{{00..{count - 1:02}}}.tar"]}
