"""Tables of plain text, and a batch as one. Runs in the user's shell."""

from collections.abc import Sequence

import numpy as np

from batchd.cli.peephole import PeekedBatch

ROWS_MAX = 8
VALUES_MAX = 6
"""Numbers that are shown of one field of one sample."""
TEXT_CHARACTERS_MAX = 40


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row, columns as wide as they need to be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def batch_table(batch: PeekedBatch) -> list[str]:
    """The fields of a batch with their types, and the values of its first samples."""
    columns = [
        [name, batch.type_text(name), *(_cell(value) for value in batch.samples(name)[:ROWS_MAX])]
        for name in batch.arrays
    ]
    return aligned(list(zip(*columns, strict=True)))


def _cell(value: np.ndarray) -> str:
    """A sample's value in some forty characters: a number, a text, or the first numbers of an array."""
    if value.ndim == 0:
        return _number(value)
    if (text := _text(value)) is not None:
        short = text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 2] + ".."
        return f'"{short}"'
    shape = f"{list(value.shape)} " if value.ndim > 1 else ""
    more = f" .. ({value.size})" if value.size > VALUES_MAX else ""
    return f"{shape}{' '.join(_number(one) for one in value.reshape(-1)[:VALUES_MAX])}{more}" or "(empty)"


def _text(value: np.ndarray) -> str | None:
    """What a field of bytes says, with its zeros at the end left out; None where that is no text."""
    if value.dtype != np.uint8 or value.ndim != 1:
        return None
    try:
        text = value.tobytes().rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return None
    return text if text and text.isprintable() else None


def _number(value: np.ndarray) -> str:
    return f"{value:.6g}" if value.dtype.kind == "f" else str(value)
