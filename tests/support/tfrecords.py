"""Files of TFRecords, made for tests."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import google_crc32c

from batchd.data.sources.tfrecord.reader import Example, SequenceExample

Values: TypeAlias = bytes | Sequence[int] | Sequence[float] | Sequence[bytes]
"""The value of one feature; bytes are a list of one."""


def write_records(file: Path, records: Iterable[bytes]) -> Path:
    """Write a file of records, in this order."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(map(framed, records)))
    return file


def framed(data: bytes) -> bytes:
    """Return a record in the framing of a file."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def example(**features: Values) -> bytes:
    """Make a ``tf.train.Example``; a name may have ``__`` for a slash.

    The type of the first value decides whether the values are floats.
    """
    message = Example()
    _fill(message.features, features)
    return bytes(message.SerializeToString(deterministic=True))


def sequence_example(context: Mapping[str, Values], lists: Mapping[str, Sequence[Values]]) -> bytes:
    """Make a ``tf.train.SequenceExample``."""
    message = SequenceExample()
    _fill(message.context, context)
    for name, steps in lists.items():
        of_list = message.feature_lists.feature_list[name]
        for step in steps:
            _set(of_list.feature.add(), step)
    return bytes(message.SerializeToString(deterministic=True))


def _fill(features: Any, values: Mapping[str, Values]) -> None:
    for name, those in values.items():
        _set(features.feature[name.replace("__", "/")], those)


def _set(feature: Any, values: Values) -> None:
    values = [values] if isinstance(values, bytes) else list(values)
    first = values[0] if values else 0
    kind = "bytes_list" if isinstance(first, bytes) else "float_list" if isinstance(first, float) else "int64_list"
    getattr(feature, kind).SetInParent()
    getattr(feature, kind).value.extend(values)


def _checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % (1 << 32))


def photo_records(photos: Path, folder: Path, count: int = 3) -> dict[str, Any]:
    """Write the photographs as records, in the order of a folder source.

    Return the source that reads them.
    """
    classes = sorted(path.name for path in photos.iterdir())
    files = [path for name in classes for path in sorted((photos / name).glob("*.jpg"))]
    records = [
        example(image__encoded=path.read_bytes(), image__class__label=[classes.index(path.parent.name)])
        for path in files
    ]
    for number in range(count):
        part = records[number * len(files) // count : (number + 1) * len(files) // count]
        write_records(folder / f"train-{number:05}-of-{count:05}", part)
    return {
        "type": "tfrecord",
        "root": str(folder),
        "shards": [f"train-{{00000..{count - 1:05}}}-of-{count:05}"],
        "fields": {"image": "image", "label": "int64"},
        "names": {"image": "image/encoded", "label": "image/class/label"},
    }
