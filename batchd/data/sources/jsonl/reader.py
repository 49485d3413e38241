"""Read lines of JSON, and the images that they name; ``values`` finds keys. Workers only.

Invariant: ``read`` returns what one line says, or says why the line is a bad sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value, default_value, items_of
from batchd.data.sources.csv.values import shown
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.jsonl.values import json_object, kind_of_json, value_at, value_in_json
from batchd.data.sources.records import NamedFile, NamedFiles, RecordsReader, image_folders
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.runtime.suggestions import NAMES_MAX, nearest

_TOO_LONG = "put long values into files of their own, or into parquet"
_KEYS_SHOWN = 12
_FLOATS = frozenset({"float16", "float32", "float64"})


class _Line(NamedTuple):
    """A line: the number of its file, its text, and the object in it."""

    file: int
    text: str
    found: Mapping[str, object]


class _Field(NamedTuple):
    """A field: its column, its key, and the value without it, of an image a path."""

    column: Column
    name: str
    default: Value | None
    names: tuple[str, ...]
    """The keys of its numbers; the same key alone for a field that is not several."""


class JsonlReader(RecordsReader):
    """Reads the fields of any line. Lines are counted from 1, without blank ones."""

    def __init__(self, source: JsonlSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        super().__init__(index, max_bytes, storage)
        self._fields = [_field(source, column) for column in source.columns]
        self._pictures = [field for field in self._fields if field.column.is_file or field.column.kind == "images"]
        folders, outside = image_folders(self.files, index.place["image_root"]), source.allow_outside_root
        self._images = NamedFiles(folders, max_bytes, storage, allow_outside_root=outside, count=len(self._pictures))
        self._to_close += self._images.readers

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        line = self._line(sample)
        values = {field.column.name: self._value(field, line) for field in self._fields}
        for number, field in enumerate(self._pictures):
            name, given = field.column.name, values[field.column.name]
            if isinstance(given, list):
                files = [NamedFile(line.file, str(path), f"{field.name}[{at}]") for at, path in enumerate(given)]
                values[name] = [self._images.copied(file, sample, number) for file in files]
            else:
                named = NamedFile(line.file, str(given), field.name)
                values[name] = self._images.read(named, sample, field.column.kind, number)
        return values

    def prefetch(self, samples: Sequence[int]) -> None:
        """Request all these lines from servers at once, and then the images that they name."""
        super().prefetch(samples)
        if self._pictures:
            self._images.prefetch(self._named(samples))

    def _named(self, samples: Sequence[int]) -> Iterator[tuple[int, str]]:
        """The images that lines name; a line that names none fails when it is read."""
        for sample in samples:
            with suppress(SampleUnreadable):
                line = self._line(sample)
                for field in self._pictures:
                    named = self._value(field, line)
                    for path in named if isinstance(named, list) else [named]:
                        yield line.file, str(path)

    def _line(self, sample: int) -> _Line:
        """Parse a line. Raises ``SampleUnreadable``."""
        record = self.record(sample)
        line = self.read_line(record, _TOO_LONG)
        try:
            text = str(line, "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            what = f"byte 0x{line[error.start]:02x} at byte {error.start} of the line"
            raise SampleUnreadable(f"is not UTF-8: {what}") from None
        return _Line(record.file, text, json_object(text))

    def _joined(self, field: _Field, line: _Line) -> list[object] | None:
        """The numbers under several keys; None where all are missing.

        Raises ``SampleUnreadable``.
        """
        found = [value_at(line.found, name) for name in field.names]
        missing = [name for name, value in zip(field.names, found, strict=True) if value is None]
        if len(missing) == len(found):
            return None
        if missing:
            raise _missing(field._replace(name=missing[0]), line.found)
        wrong = next(
            (name for name, one in zip(field.names, found, strict=True) if isinstance(one, (list, str, dict))), None
        )
        if wrong is not None:
            raise SampleUnreadable(f"{wrong!r} is {kind_of_json(value_at(line.found, wrong))} in JSON, not one number")
        return found

    def _value(self, field: _Field, line: _Line) -> Value:
        """The value of a field, of images their paths. Raises ``SampleUnreadable``."""
        found = value_at(line.found, field.name)
        if found is None and len(field.names) > 1:
            found = self._joined(field, line)
        if found is None:
            if field.default is None:
                raise _missing(field, line.found)
            return field.default
        if field.column.is_file:
            if not isinstance(found, str):
                what = "an image" if field.column.kind == "encoded" else "a file"
                raise SampleUnreadable(f"{field.name!r} is {kind_of_json(found)} in JSON, not the path of {what}")
            return found
        if field.column.kind == "images":
            return _paths(field, found)
        try:
            value = value_in_json(field.column, found)
        except SampleUnreadable as error:
            raise SampleUnreadable(f"{field.name!r}: {error}") from None
        if field.column.dtype in _FLOATS and np.isinf(np.asarray(value)).any() and "Infinity" not in line.text:
            raise SampleUnreadable(f"{field.name!r} has a number that is too large for float64")
        return value


def _field(source: JsonlSource, column: Column) -> _Field:
    default = source.defaults.get(column.name)
    value = None if default is None else default_value(column, default)
    return _Field(column, source.name_of(column.name), value, source.names_of(column))


def _paths(field: _Field, found: object) -> list[object]:
    """The paths of a list of images; one alone is a list of it. Raises ``SampleUnreadable``."""
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list):
        raise SampleUnreadable(f"{field.name!r} is {kind_of_json(found)} in JSON, not a list of paths of images")
    for place, path in enumerate(items_of(field.column, found)):
        if not isinstance(path, str):
            raise SampleUnreadable(f"{field.name!r}[{place}] is {kind_of_json(path)} in JSON, not the path of an image")
    return found


def _missing(field: _Field, found: Mapping[str, object]) -> SampleUnreadable:
    """The error for a line without a value for a field: with the keys that it has."""
    meant = nearest(field.name, list(found)[:NAMES_MAX])
    keys = ", ".join(map(shown, list(found)[:_KEYS_SHOWN])) or "no keys"
    is_null = field.name in found
    what = f"{field.name!r} is null" if is_null else f"has no {field.name!r}, only {keys}"
    advice = f"; did you mean {meant}?" if meant and not is_null else ""
    return SampleUnreadable(f"{what}, and the field {field.column.name} has no default{advice}")


READERS = {JsonlSource: JsonlReader}
