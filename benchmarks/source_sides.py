"""The kinds of sources that `sources` compares with a folder, from pictures and from tiny samples.

Another kind is one more line in ``SIDES``.
"""

import io
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stored_sides import write_lmdb, write_parquet, write_small_lmdb, write_small_parquet

from batchd.data.sources.options import SourceOptions
from batchd.data.sources.tfrecord.frames import FOOTER, HEADER, LENGTH_BYTES, masked_crc
from batchd.data.sources.tfrecord.options import TFRecordSource
from batchd.data.sources.tfrecord.reader import Example
from batchd.data.sources.webdataset.options import WebDatasetSource

SHARDS = 4
"""Files that the pictures are spread over."""


@dataclass(frozen=True, slots=True)
class Side:
    """One kind of source."""

    write: Callable[[Path, Sequence[Path]], str]
    """Writes pictures into an empty folder; gives the source as batchd.toml has it.

    Its image is called ``image``.
    """
    write_small: Callable[[Path, int], SourceOptions]
    """Writes so many samples of a few bytes into an empty folder, for a scan."""
    scan_us_max: float
    """How long the scan may take for each of those, in microseconds."""


def _tar(folder: Path, pictures: Sequence[Path]) -> str:
    for number in range(SHARDS):
        rows = range(number, len(pictures), SHARDS)
        _write_tar(
            folder / f"{number}.tar",
            ((f"{row:06}{pictures[row].suffix.lower()}", pictures[row].read_bytes()) for row in rows),
        )
    return f'{{ type = "webdataset", root = "{folder}", shards = ["*.tar"], label = "" }}'


def _small_tar(folder: Path, count: int) -> SourceOptions:
    _write_tar(folder / "0.tar", ((f"{row:06}{end}", b"7") for row in range(count) for end in (".jpg", ".cls")))
    return WebDatasetSource(root=folder, shards=("0.tar",))


def _write_tar(file: Path, members: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(file, "w") as shard:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))


def _tfrecord(folder: Path, pictures: Sequence[Path]) -> str:
    for number in range(SHARDS):
        _write_records(
            folder / f"train-{number:05}-of-{SHARDS:05}", (path.read_bytes() for path in pictures[number::SHARDS])
        )
    return (
        f'{{ type = "tfrecord", root = "{folder}", shards = ["train-*"], fields = {{ image = "image", label = "int64" }}, '
        'names = { image = "image/encoded", label = "image/class/label" } }'
    )


def _small_tfrecord(folder: Path, count: int) -> SourceOptions:
    _write_records(folder / "0", [b"7"] * count)
    return TFRecordSource(root=folder, shards=("0",), fields={"image": "image", "label": "int64"})


def _write_records(file: Path, images: Iterable[bytes]) -> None:
    with file.open("wb") as stream:
        for image in images:
            example = Example()
            example.features.feature["image/encoded"].bytes_list.value.append(image)
            example.features.feature["image/class/label"].int64_list.value.append(0)
            data = example.SerializeToString()
            length = len(data).to_bytes(LENGTH_BYTES, "little")
            stream.write(HEADER.pack(len(data), masked_crc(length)) + data + FOOTER.pack(masked_crc(data)))


SIDES = {
    "tar": Side(_tar, _small_tar, 200),
    "tfrecord": Side(_tfrecord, _small_tfrecord, 50),
    "parquet": Side(write_parquet, write_small_parquet, 50),
    "lmdb": Side(write_lmdb, write_small_lmdb, 100),
}
