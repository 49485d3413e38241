"""Sources whose samples are lines of text tables. Daemon, workers and CLI; standard library only.

The string under a field is its documentation everywhere: in error messages, ``batchd config``, the
JSON Schema and the manual.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from batchd.samples.checks import Checks
from batchd.samples.columns import Column, check_known, check_types, parse_column
from batchd.sources.options import SourceOptions, check_files, place_of_files


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvSource(SourceOptions):
    """Tables in CSV format: one sample on each line, the titles of the columns on the first. UTF-8."""

    type: Literal["csv"] = "csv"
    """Kind of source."""

    path: Path | None = None
    """The table, if it is one file."""

    root: Path | None = None
    """The folder of the tables, where they are several files."""

    files: tuple[str, ...] = ()
    """The paths of the tables below the root, or patterns of them, such as ["train-{00..11}.csv"]. All have the same titles."""

    fields: dict[str, str] = field(default_factory=dict)
    """The columns that become fields, with their types, such as { age = "float32", name = "text",
    box = "int32[4]" }. The numbers of a shape are in one cell, separated by spaces. Other columns
    are left out."""

    names: dict[str, str] = field(default_factory=dict)
    """The titles of fields that are called something else in the table, such as { label = "Class Label" }."""

    image: str = ""
    """The title of a column of paths of image files, which become the field `image`, to be decoded; "" where there is none."""

    image_root: Path | None = None
    """The folder that the paths of images are relative to; when not set, the folder of the
    table."""

    allow_outside_root: bool = False
    """Whether images may lie outside of that folder, and tables outside of the root: absolute paths, paths with `..` in them, and
    links that lead out of it."""

    delimiter: str = ","
    """The character between two values; "\\t" is the tab."""

    def __post_init__(self) -> None:
        checks = Checks()
        with checks.at():
            self.settle_paths()
            check_files(self.path, self.root, self.files)
        if len(self.delimiter) != 1 or not self.delimiter.isascii() or self.delimiter in '\0"\r\n':
            text = f"delimiter must be one ASCII character, no quote and no end of a line: {self.delimiter!r}"
            checks.say(text, "delimiter")
        if not self.fields and not self.image:
            checks.say('name a column: fields = { age = "float32" }, or image = "TITLE" for one of paths of images')
        for column in check_types(checks, "fields", self.fields):
            if column.kind == "encoded":
                text = f'{column.name}: a table holds no images; image = "TITLE" names a column of their paths'
                checks.say(text, "fields", column.name)
            elif column.shape.count(None) > 1:
                text = f"{column.name}: numbers in a row tell one unknown length, not several"
                checks.say(text, "fields", column.name)
        if self.image and "image" in self.fields:
            checks.say("image stands for two fields: the one in fields, and that of the files which image names")
        check_known(checks, self.fields, names=self.names)
        checks.done()

    def parsed_fields(self) -> tuple[Column, ...]:
        """``fields``, as columns. Raises ``ValueError``."""
        return tuple(parse_column(name, text) for name, text in self.fields.items())

    def title(self, name: str) -> str:
        """The title of the column that a field comes from."""
        return self.names.get(name, name)

    @property
    def place(self) -> str:
        """Where the samples come from, for people."""
        return place_of_files(self.path, self.root, self.files)
