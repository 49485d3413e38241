"""Parquet files and LMDB databases for ``source_sides``, from pictures and from tiny samples."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import lmdb
import pyarrow as pa
from pyarrow import parquet

from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.parquet.options import ParquetSource

FILES = 4
ROWS = 1000
"""Rows in a row group: what makes readers of whole row groups slow."""
MAP_BYTES = 1 << 36
FIELDS = {"image": "image", "label": "int64"}
KEY = "{field}-*"


def write_parquet(folder: Path, pictures: Sequence[Path]) -> str:
    """Images without compression, in large row groups."""
    for number in range(FILES):
        _write_rows(folder / f"{number}.parquet", [path.read_bytes() for path in pictures[number::FILES]])
    return (
        f'{{ type = "parquet", root = "{folder}", shards = ["*.parquet"], '
        'fields = { image = "image", label = "int64" } }'
    )


def write_small_parquet(folder: Path, count: int) -> SourceOptions:
    """Images of a few bytes."""
    _write_rows(folder / "0.parquet", [b"%d" % row for row in range(count)])
    return ParquetSource(root=folder, shards=("0.parquet",), fields=FIELDS)


def write_lmdb(folder: Path, pictures: Sequence[Path]) -> str:
    """A record for each image, and one for each label."""
    _write_records(folder, (path.read_bytes() for path in pictures))
    return (
        f'{{ type = "lmdb", path = "{folder}", fields = {{ image = "image", label = "int64" }}, '
        f'key = "{KEY}", format = "text" }}'
    )


def write_small_lmdb(folder: Path, count: int) -> SourceOptions:
    """Images of one byte."""
    _write_records(folder, [b"7"] * count)
    return LmdbSource(path=folder, fields=FIELDS, key=KEY, format="text")


def _write_rows(file: Path, images: list[bytes]) -> None:
    table = pa.table({"image": pa.array(images, pa.binary()), "label": [0] * len(images)})
    parquet.write_table(table, file, row_group_size=ROWS, compression="none")


def _write_records(folder: Path, images: Iterable[bytes]) -> None:
    with lmdb.open(str(folder), map_size=MAP_BYTES) as database, database.begin(write=True) as transaction:
        for row, image in enumerate(images):
            transaction.put(b"image-%09d" % row, image)
            transaction.put(b"label-%09d" % row, b"0")
