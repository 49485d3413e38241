"""Recognise TFRecord files, by the features of the first examples. CLI."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from batchd.data.sources import recognise
from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.sources.tfrecord.frames import FOOTER, HEADER
from batchd.data.sources.tfrecord.options import TFRecordSource
from batchd.data.sources.tfrecord.reader import Example, Feature
from batchd.data.sources.tfrecord.scan import records_in
from batchd.data.storage.paths import size_of
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid


def _recognise(files: FoundFiles, survey: Survey) -> Recognised:
    _names, _others, path = recognise.training_files(files, TFRecordSource)
    with survey.open(path) as stream:
        examples = list(islice(_examples(path, stream), recognise.LOOKED_AT))
    values = recognise.values_by_name(features.items() for features in examples)
    found = recognise.common_fields({name: _alike(those) for name, those in sorted(values.items())}, len(examples))
    if not found.types:
        raise SourceInvalid(f"{path}: the first records have no feature in common; batchd reads `tf.train.Example`")
    return recognise.recognise_records(TFRecordSource, files, found, "feature")


def _examples(path: Path, stream: BinaryIO) -> Iterator[dict[str, object]]:
    """The features of each example of a file, by name: bytes, or a list of numbers."""
    size = size_of(stream)
    for start, _checksum in records_in(path, stream, size, lambda: None):
        place = stream.tell()
        stream.seek(start)
        (length, _crc) = HEADER.unpack(stream.read(HEADER.size))
        data = stream.read(length + FOOTER.size)[:length]
        stream.seek(place)
        try:
            features = Example.FromString(data).features.feature
        except DecodeError:
            raise SourceInvalid(f"{path}: the record at byte {start} is not a `tf.train.Example`") from None
        yield {name: _value(feature) for name, feature in features.items()}


def _value(feature: Feature) -> object:
    kind = feature.WhichOneof("kind")
    values = list(getattr(feature, kind).value) if kind else []
    return values[0] if kind == "bytes_list" and len(values) == 1 else values


def _alike(values: list[object]) -> list[object]:
    """The values, with each list replaced by its number if every list has exactly one."""
    return (
        [value[0] if isinstance(value, list) else value for value in values]
        if all(not isinstance(value, list) or len(value) == 1 for value in values)
        else values
    )


RECOGNISE = {TFRecordSource: _recognise}
