"""Parquet files, written for tests and read as a worker reads them. For tests of sources."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from batchd.data.sources.interface import Reader, kind_of, open_reader
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.survey import Survey
from support.source_files import as_shared, nothing

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""An image as Hugging Face stores it."""


def hugging_face(images: Iterable[bytes | None], paths: Iterable[str | None] | None = None) -> pa.Array:
    images = list(images)
    paths = [None] * len(images) if paths is None else paths
    return pa.array([{"bytes": data, "path": path} for data, path in zip(images, paths, strict=True)], IMAGE)


def class_labels(**names: list[str]) -> dict[bytes, bytes]:
    """Return the metadata that Hugging Face's `datasets` writes for columns that are labels.

    It was compared with the output of version 5.2.
    """
    features = {column: {"names": those, "_type": "ClassLabel"} for column, those in names.items()}
    return {b"huggingface": json.dumps({"info": {"features": {"image": {"_type": "Image"}, **features}}}).encode()}


def write_parquet(
    file: Path, columns: dict[str, Any], metadata: dict[bytes, bytes] | None = None, **options: Any
) -> Path:
    """Write columns; ``options`` are pyarrow's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns, metadata=metadata), file, **options)
    return file


FATAL_BYTES = {
    "column's kind": (b"\x25\x02\x18\x05image", 0, 0x24),
    "column's repetition": (b"\x25\x02\x18\x05image", 1, 0x00),
    "codec": (b"\x05image\x15\x00", 7, 0x10),
    "histogram": (b"\x19\x06\x19\x26", 1, 0x46),
}
"""Bytes of a footer for which pyarrow 26 ends its process: what is before, offset, value."""


def write_fatal_parquet(file: Path, wrong: str) -> Path:
    """Write four rows with one wrong byte of ``FATAL_BYTES``."""
    columns = {"image": pa.array([bytes([number]) * 40 for number in range(4)]), "label": list(range(4))}
    data = bytearray(write_parquet(file, columns, compression="none", row_group_size=2).read_bytes())
    known, offset, value = FATAL_BYTES[wrong]
    place = data.index(known) + offset
    assert data[place] != value
    data[place] = value
    file.write_bytes(data)
    return file


def write_arrow(
    file: Path, columns: dict[str, Any], metadata: dict[bytes, bytes] | None = None, *, rows: int = 7, **options: Any
) -> Path:
    """Write columns as an Arrow stream, like `save_to_disk` of `datasets`, or with a footer."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns, metadata=metadata)
    new = options.pop("new", pa.ipc.new_stream)
    with new(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return file


def scan_parquet(root: Path, fields: dict[str, str], *shards: str, **changes: Any) -> tuple[ParquetSource, SourceIndex]:
    """Return a source of the files below ``root``, and its index as a worker gets it."""
    source = ParquetSource(root=root, shards=shards or ("*.parquet",), fields=fields, **changes)
    return source, as_shared(kind_of(source).scan(source, Survey(nothing)))


def open_parquet(root: Path, fields: dict[str, str], *shards: str, max_bytes: int = 1 << 26, **changes: Any) -> Reader:
    source, index = scan_parquet(root, fields, *shards, **changes)
    return open_reader(source, index, max_bytes, Storage())


def photo_rows(photos: Path, folder: Path, **options: Any) -> dict[str, Any]:
    """Write the photos in Hugging Face's layout, in the order of a folder source, in two files."""
    classes = sorted(path.name for path in photos.iterdir())
    files = [path for name in classes for path in sorted((photos / name).glob("*.jpg"))]
    for number in range(2):
        part = files[number * len(files) // 2 : (number + 1) * len(files) // 2]
        write_parquet(
            folder / f"train-{number}.parquet",
            {
                "image": hugging_face(path.read_bytes() for path in part),
                "class": [classes.index(path.parent.name) for path in part],
            },
            class_labels(**{"class": classes}),
            row_group_size=8,
            **options,
        )
    return {
        "type": "parquet",
        "root": str(folder),
        "shards": ["train-*.parquet"],
        "fields": {"image": "image", "label": "int64"},
        "names": {"label": "class"},
    }
