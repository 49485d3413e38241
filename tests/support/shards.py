"""Shards in tar format, made for tests."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path


def write_shard(file: Path, members: Iterable[tuple[str, bytes]], **options: object) -> Path:
    """Write a tar file with these members, in this order."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w", **options) as shard:  # type: ignore[call-overload]
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))
    return file
