"""Sources of lines of text tables. Daemon, workers and CLI; standard library only."""

import re
from dataclasses import field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from batchd.data.samples.checks import Checks, Example
from batchd.data.samples.columns import check_known, check_types
from batchd.data.sources.options import DeclaredOptions, FilesOptions
from batchd_wire.record import options

LABEL = "label"


@options
class CsvSource(DeclaredOptions, FilesOptions):
    """Tables in CSV format, in UTF-8: titles on the first line, one sample on each further one.

    Without a ``header``, the first line is a sample, too.
    """

    endings: ClassVar[tuple[str, ...]] = (".csv", ".tsv")

    type: Literal["csv"] = "csv"
    """Kind of source."""

    path: Annotated[Path | None, Example("/data/table.csv")] = None
    """The table, if it is one file."""

    root: Path | None = None
    """The folder of the tables, where they are several files."""

    files: tuple[str, ...] = ()
    """The paths of the tables below the root, or patterns of them, such as ["train-{00..11}.csv"].
    All have the same titles."""

    fields: Annotated[dict[str, str], Example({"age": "float32", "label": "int64"})] = field(default_factory=dict)
    """The columns that become fields, with their types, such as { age = "float32", name = "text",
    box = "int32[4]" }. The numbers of a shape are in one cell, separated by spaces. A cell that has
    JSON is a field of type "json", or "text[<=8]" for a list of up to eight strings; one with the
    path of a video or a sound is of type "video" or "audio". Other columns are left out."""

    names: dict[str, str] = field(default_factory=dict)
    """The titles of fields with other names in the table, such as { label = "Class Label" }.
    Several columns of numbers are one field of a shape, such as { x = "pixel{0..783}" } for x =
    "float32[28,28]", or { x = "{width,height}" }."""

    header: bool = True
    """Whether the first line has titles. Without them columns are called 0, 1, 2 and so on, and a
    field that is not in `names` is the column of its place in `fields`."""

    image: str = ""
    """The title of a column of paths of image files, which become the field `image`, to be decoded;
    "" where there is none."""

    image_root: Path | None = None
    """The folder that the paths of images and videos are relative to; when not set, the folder of
    the table."""

    allow_outside_root: bool = False
    """Whether these files may be outside of that folder, and tables outside of the root: absolute
    paths, paths with `..`, and links that lead out of it."""

    delimiter: str = ","
    """The character between two values; "\\t" is the tab."""

    quoting: Literal["double", "none"] = "double"
    """How values are written that have delimiters or line ends in them: "double", in double quotes,
    with each quote in them doubled; "none", not at all: each line is a record, and a quote is a
    character as any other, as in tables of GLUE."""

    classes: tuple[str, ...] = ()
    """The names of the classes, if the cells of the field `label` are such names: each becomes its
    number, from 0. A cell with another text is a bad sample."""

    @property
    def names_files(self) -> bool:
        """Whether cells have paths of files."""
        return bool(self.image) or any(column.is_file for column in self.columns)

    def name_of(self, field: str) -> str:
        """The title of a field: without a header, the number of its column."""
        return self.names.get(field, field if self.header else str(list(self.fields).index(field)))

    def _check(self, checks: Checks) -> None:
        with checks.at():
            self.settle_paths()
            self.check_files()
        if len(self.delimiter) != 1 or not self.delimiter.isascii() or self.delimiter in '\0"\r\n':
            text = f"delimiter must be one ASCII character, no quote and no end of a line: {self.delimiter!r}"
            checks.say(text, "delimiter")
        if not self.fields and not self.image:
            checks.say('name a column: fields = { age = "float32" }, or image = "TITLE" for one of paths of images')
        lacks = {"bytes": "a table in text has no bytes", "images": "a table names one image in a row; jsonl has lists"}
        for column in check_types(checks, "fields", self.fields, lacks):
            if column.kind == "encoded":
                text = f'{column.name}: a table holds no images; image = "TITLE" names a column of their paths'
                checks.say(text, "fields", column.name)
            elif column.shape.count(None) > 1:
                text = f"{column.name}: numbers in a row tell one unknown length, not several"
                checks.say(text, "fields", column.name)
        if self.image and "image" in self.fields:
            checks.say("image stands for two fields: the one in fields, and that of the files which image names")
        check_known(checks, self.fields, names=self.names)
        self.check_joined(checks)
        if self.classes:
            twice = next((name for name in self.classes if self.classes.count(name) > 1 or not name), None)
            if twice is not None:
                checks.say(f"classes has {twice!r} twice" if twice else "classes has an empty name", "classes")
            if not re.fullmatch("u?int[0-9]+", self.fields.get(LABEL, "")):
                checks.say('classes needs a whole number that they become: fields = { label = "int64" }', "classes")
