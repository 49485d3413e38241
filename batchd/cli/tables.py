"""Tables and paragraphs as wide as the terminal, for `status`, `why`, `check` and `top`. Pure.

Runs in the user's shell.

    columns --narrower than from_width--> left out
            --still too wide--> the one of the largest from_width is left out, and again
            --only those of from_width 0 left--> the widest text is cut, with an ellipsis

Invariant: nothing is wider than the terminal, and a column with ``from_width`` 0 is always there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, Literal, NamedTuple, TypeVar

from rich.table import Table
from rich.text import Text

from batchd.cli.terminal import PIPED_COLUMNS
from batchd.cli.text import aligned, escaped, width_of, wrapped
from batchd.observe.columns import BAD, GOOD, MIDDLE, NAME, NUMBER, PLAIN, STREAM, WIDE, Bar, Cell, StatusColumn

NAME_CHARACTERS_MAX = 24
GAP = 2
TEXT_COLUMNS_MIN = 20
"""Of a narrower column no one can read a text."""
RING_CELLS = 24
LEASED, READY, FILLING, FREE = ("█", "bright_blue"), ("▓", "cyan"), ("░", "yellow"), ("·", "bright_black")
LOOKS = {"": "", GOOD: "green", BAD: "bold yellow", PLAIN: "dim"}

Row = TypeVar("Row")


class TableColumn(NamedTuple, Generic[Row]):
    """A column of a table, left out if the terminal is narrower than ``from_width``."""

    title: str
    from_width: int
    cell: Callable[[Row], Text | str]
    is_text: bool = False
    """Text is on the left of its column, numbers on the right."""


def table(columns: Sequence[TableColumn[Row]], rows: Sequence[Row], width: int) -> Table:
    """A table without lines, of the columns that have room."""
    shown = [(column, [_text(column.cell(row)) for row in rows]) for column in columns if width >= column.from_width]
    while _width(shown) > width and any(column.from_width for column, _cells in shown):
        least = max(range(len(shown)), key=lambda at: (shown[at][0].from_width, at))
        del shown[least]
    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    excess = _width(shown) - width
    widest = max((one for one in shown if one[0].is_text), key=lambda one: _width([one]), default=None)
    for one in shown:
        room = max(len(one[0].title), _width([one]) - excess) if one is widest and excess > 0 else None
        justify: Literal["left", "right"] = "left" if one[0].is_text else "right"
        made.add_column(one[0].title, justify=justify, no_wrap=True, max_width=room)
    for cells in zip(*(cells for _column, cells in shown), strict=True):
        made.add_row(*cells)
    return made


def observed(
    columns: Sequence[StatusColumn[Row]], where: Literal["status", "top"], rows: Sequence[Row], width: int
) -> Table:
    """A table of the columns that `batchd status` or `batchd top` has."""
    return table(
        [
            TableColumn(column.title, from_width, partial(_drawn, column, width), is_text=column.kind != NUMBER)
            for column in columns
            if (from_width := getattr(column, where)) is not None
        ],
        rows,
        width,
    )


def _drawn(column: StatusColumn[Row], width: int, row: Row) -> Text:
    cell = column.cell(row)
    if isinstance(cell, Bar):
        is_wide, is_middle = width >= WIDE and not cell.is_short, width >= MIDDLE
        cells = RING_CELLS if is_wide else RING_CELLS // 2 if is_middle else RING_CELLS // 3
        looks = zip(cell.amounts, (LEASED, READY, FILLING), strict=False)
        return bar([(amount, *look) for amount, look in looks], cell.total, cells)
    cell = Cell(cell) if isinstance(cell, str) else cell
    return Text(name(cell.text, width) if column.kind in {NAME, STREAM} else escaped(cell.text), LOOKS[cell.look])


def bar(parts: Iterable[tuple[float, str, str]], total: float, cells: int) -> Text:
    """A bar of ``cells`` for ``total``; parts are (amount, character, style)."""
    text, drawn, passed = Text(no_wrap=True), 0, 0.0
    for amount, character, style in parts:
        if amount <= 0 or total <= 0:
            continue
        passed += amount
        end = min(cells, max(drawn + 1, round(cells * passed / total)))
        text.append(character * (end - drawn), style)
        drawn = end
    text.append(FREE[0] * (cells - drawn), FREE[1])
    return text


def _text(cell: Text | str) -> Text:
    return Text(cell) if isinstance(cell, str) else cell


def _width(shown: Sequence[tuple[TableColumn[Row], list[Text]]]) -> int:
    widths = [max([len(column.title), *(cell.cell_len for cell in cells)]) for column, cells in shown]
    return sum(widths) + GAP * (len(widths) - 1)


def name(text: str, width: int = MIDDLE) -> str:
    """A foreign name, for a terminal of this width: it is cut, but not where nothing is."""
    plain = escaped(text)
    is_cut = len(plain) > NAME_CHARACTERS_MAX and width < PIPED_COLUMNS
    return f"{plain[: NAME_CHARACTERS_MAX - 1]}…" if is_cut else plain


def facts(rows: Sequence[tuple[str, str]], width: int, indent: int = 2) -> Iterator[str]:
    """Lines of names and texts; a long text continues below its beginning."""
    room = max(TEXT_COLUMNS_MIN, width - indent - GAP - max((len(head) for head, _text in rows), default=0))
    broken = [(head if at == 0 else "", part) for head, text in rows for at, part in enumerate(wrapped(text, room))]
    return (" " * indent + line for line in aligned(broken))


def fitted(rows: Sequence[Sequence[str]], width: int, indent: int = 2) -> list[str]:
    """Rows below their titles, or, where that is wider than ``width``, a paragraph for each."""
    lines = aligned(rows)
    if max(map(width_of, lines)) <= width:
        return lines
    titles, *others = rows
    paragraphs = [
        [f"{titles[0]} {row[0]}".strip(), *facts(list(zip(titles[1:], row[1:], strict=True)), width, indent)]
        for row in others
    ]
    return [line for lines in paragraphs for line in lines]


def paragraph(text: str, width: int, first: str = "", indent: int = 2) -> str:
    """A text in lines of at most ``width``, indented, the first one behind ``first``."""
    blank = " " * indent
    return "\n".join(wrapped(text, width, blank + first, blank + " " * width_of(first)))
