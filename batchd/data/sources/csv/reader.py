"""Read the records of tables. Workers only.

Invariant: ``read`` returns what the cells of one record say. A record with more or fewer cells than
the header, or with a cell that does not fit its column, is a bad sample as a whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value, shaped
from batchd.data.sources.csv.options import LABEL, CsvSource
from batchd.data.sources.csv.values import (
    IMAGE,
    TOO_LONG,
    ReadCell,
    cell_reader,
    class_reader,
    plain_numbers,
    split_record,
)
from batchd.data.sources.records import NamedFile, NamedFiles, RecordsReader, image_folders
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd_wire.wording import counted


class CsvReader(RecordsReader):
    """Reads the chosen columns of any record. Records are counted from 1, behind the header."""

    def __init__(self, source: CsvSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        super().__init__(index, max_bytes, storage)
        facts, folders = index.facts, image_folders(self.files, index.place["image_root"])
        self._titles: list[str] = facts["titles"]
        places = facts["cells"]
        self._cells = [
            (column.name, places[column.name], _reader_of(column, source.classes))
            for column in source.columns
            if isinstance(places[column.name], int) and not column.is_file
        ]
        self._joined = [
            (column, places[column.name], cell_reader(replace(column, shape=())))
            for column in source.columns
            if not isinstance(places[column.name], int)
        ]
        self._named = [] if facts["image"] is None else [(IMAGE, "encoded", facts["image"])]
        self._named += [(column.name, column.kind, places[column.name]) for column in source.columns if column.is_file]
        self._has_header = source.header
        self._form = source.delimiter, source.quoting
        outside = source.allow_outside_root
        self._files = NamedFiles(folders, max_bytes, storage, allow_outside_root=outside, count=len(self._named))
        self._to_close += self._files.readers

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        file, row = self._row(sample)
        values: dict[str, Value] = {}
        for number, (name, kind, cell) in enumerate(self._named):
            values[name] = self._files.read(NamedFile(file, row[cell], self._titles[cell]), sample, kind, number)
        for name, cell, read in self._cells:
            try:
                values[name] = read(row[cell])
            except SampleUnreadable as error:
                raise SampleUnreadable(f"{self._titles[cell]!r}: {error}") from None
            except ValueError as error:
                raise SampleUnreadable(f"{self._titles[cell]!r} {error}") from None
        for column, cells, read in self._joined:
            values[column.name] = self._numbers(column, [row[cell] for cell in cells], cells, read)
        return values

    def _numbers(self, column: Column, texts: Sequence[str], cells: Sequence[int], read: ReadCell) -> Value:
        """The array of several cells, one number in each. Raises ``SampleUnreadable``."""
        plain = plain_numbers(texts, np.dtype(column.dtype))
        if plain is not None:
            return shaped(column, plain)
        numbers = np.empty(len(cells), column.dtype)
        at = 0
        try:
            for at, text in enumerate(texts):
                numbers[at] = read(text)
        except ValueError as error:
            raise SampleUnreadable(f"{self._titles[cells[at]]!r} {error}") from None
        return shaped(column, numbers)

    def prefetch(self, samples: Sequence[int]) -> None:
        """Request all these records from servers at once, and then the files that they name."""
        super().prefetch(samples)
        if self._named:
            self._files.prefetch(self._names(samples))

    def _row(self, sample: int) -> tuple[int, list[str]]:
        """The number of the file, and the cells. Raises ``SampleUnreadable``."""
        record = self.record(sample)
        try:
            row = split_record(self.read_line(record, TOO_LONG), *self._form)
        except ValueError as error:
            raise SampleUnreadable(str(error)) from None
        if len(row) != len(self._titles):
            missing = self._titles[len(row) :]
            what = f", so there is no {missing[0]!r}" if missing else ""
            first = "header" if self._has_header else "first record"
            raise SampleUnreadable(f"has {counted(len(row), 'cell')}, and the {first} {len(self._titles)}{what}")
        return record.file, row

    def _names(self, samples: Sequence[int]) -> Iterator[tuple[int, str]]:
        """The files that records name; a record that names none fails when it is read."""
        for sample in samples:
            with suppress(ValueError):
                file, row = self._row(sample)
                for _name, _kind, cell in self._named:
                    yield file, row[cell]


def _reader_of(column: Column, classes: Sequence[str]) -> ReadCell:
    return class_reader(column, classes) if classes and column.name == LABEL else cell_reader(column)


READERS = {CsvSource: CsvReader}
