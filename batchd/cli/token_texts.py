"""The texts that tokens stand for, with the words that are learned. Runs in the user's shell.

    tokens  17 4 9 9   decoded by the tokenizer of the step that made them
    mask     0 0 1 1   a text is runs of words that are learned, or not

On a terminal and in a picture learned words are green; «these marks» are around them in any text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple

import click
import numpy as np

from batchd.cli.peeked import ROWS_MAX, PeekedBatch, is_packed
from batchd.cli.text import escaped
from batchd.data.pipeline.step_files import StepFileInvalid
from batchd.data.pipeline.text.files import read_tokenizer
from batchd.data.pipeline.text.options import Chat, Tokenize

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHARACTERS_MAX = 600
"""Of one text."""
WIDTH_PIXELS, LINE_PIXELS, MARGIN_PIXELS, SPACE_PIXELS = 1000, 20, 10, 5
FONT_SCALE = 0.45
BACKGROUND, INK, LEARNED, LEARNED_INK = (250, 250, 250), (40, 40, 40), (205, 240, 205), (20, 95, 20)
_PIECES = re.compile(r"\n|[^\S\n]+|\S{1,60}")
"""A line end, white space, or a word, or a part of one that has no room on a line."""


class TokenRun(NamedTuple):
    """A part of a text, all of which is learned, or nothing."""

    text: str
    is_learned: bool


class TokenText(NamedTuple):
    """The text of a document. ``title``: its field and place."""

    title: str
    runs: Sequence[TokenRun]


def token_texts(batch: PeekedBatch) -> list[TokenText]:
    """The first texts of each field of tokens that a step has made.

    Empty where their tokenizer is not here, or is none any more.
    """
    found: list[TokenText] = []
    for step in batch.steps:
        if not isinstance(step, (Chat, Tokenize)) or step.to not in batch.arrays:
            continue
        with suppress(StepFileInvalid, ModuleNotFoundError):
            tokenizer = read_tokenizer(step.tokenizer if isinstance(step, Chat) else step.file)
            mask = step.mask if isinstance(step, Chat) and step.mask in batch.arrays else ""
            found += islice(_texts(batch, step.to, mask, tokenizer), ROWS_MAX)
    return found


def _texts(batch: PeekedBatch, field: str, mask: str, tokenizer: "Tokenizer") -> Iterator[TokenText]:
    tokens = batch.samples(field)
    masks = batch.samples(mask) if mask else [np.zeros(len(row), np.uint8) for row in tokens]
    index: Mapping[int, object] | np.ndarray = batch.arrays.get("index", {})
    for row, (numbers, learned) in enumerate(zip(tokens, masks, strict=True)):
        lengths = batch.arrays["lengths"][row] if is_packed(batch) else [_length(batch, field, row, len(numbers))]
        end = 0
        for document, length in enumerate(lengths):
            start, end = end, end + int(length)
            if start == end:
                continue
            place = f"row {row}, document {document}" if is_packed(batch) else f"row {row}"
            sample = index[row, document] if is_packed(batch) else index[row] if len(index) else "?"  # type: ignore[index]
            runs = [
                TokenRun(tokenizer.decode([token for token, _one in run], skip_special_tokens=False), bool(is_learned))
                for is_learned, run in groupby(
                    zip(numbers[start:end].tolist(), learned[start:end].tolist(), strict=True), key=lambda pair: pair[1]
                )
            ]
            yield TokenText(f"{field} of {place}, sample {sample}", runs)


def _length(batch: PeekedBatch, field: str, row: int, room: int) -> int:
    """The tokens of a row without their padding."""
    lengths = batch.arrays.get(f"{field}_length")
    return room if lengths is None else int(lengths[row])


def text_lines(texts: Sequence[TokenText]) -> list[str]:
    """Two lines for each text: its title, and its beginning, escaped."""
    lines = []
    for text in texts:
        shown, left = "", CHARACTERS_MAX
        for run in text.runs:
            part = escaped(run.text[: max(0, left)])
            left -= len(run.text)
            shown += click.style(f"«{part}»", fg="green") if run.is_learned and part else part
        lines += [f"{text.title}:", f"  {shown}{' …' if left < 0 else ''}"]
    return lines


def draw_texts(texts: Sequence[TokenText]) -> np.ndarray:
    """The texts as a BGR image, uint8 [height, width, 3]; learned words are green.

    Characters beyond ASCII are question marks.
    """
    import cv2  # noqa: PLC0415  it takes longer to load than the rest together

    font, bottom = cv2.FONT_HERSHEY_SIMPLEX, MARGIN_PIXELS
    placed: list[tuple[str, int, int, int, bool | None]] = []
    for text in texts:
        bottom += LINE_PIXELS
        placed.append((text.title, MARGIN_PIXELS, bottom, 0, None))
        left, left_over = MARGIN_PIXELS, CHARACTERS_MAX
        bottom += LINE_PIXELS
        for run in text.runs:
            plain = run.text[: max(0, left_over)].replace("\t", "    ").encode("ascii", "replace").decode()
            left_over -= len(run.text)
            for piece in _PIECES.findall(plain):
                width = (
                    cv2.getTextSize(piece, font, FONT_SCALE, 1)[0][0] if piece.strip() else SPACE_PIXELS * len(piece)
                )
                if piece == "\n" or left + width > WIDTH_PIXELS - MARGIN_PIXELS:
                    left, bottom = MARGIN_PIXELS, bottom + LINE_PIXELS
                if piece != "\n":
                    placed.append((piece, left, bottom, width, run.is_learned))
                    left += width
        bottom += LINE_PIXELS // 2
    sheet = np.full((bottom + MARGIN_PIXELS, WIDTH_PIXELS, 3), BACKGROUND, np.uint8)
    for piece, left, base, width, is_learned in placed:
        if is_learned:
            sheet[base - LINE_PIXELS + 5 : base + 5, left : left + width] = LEARNED
        ink = (160, 90, 20) if is_learned is None else LEARNED_INK if is_learned else INK
        cv2.putText(sheet, piece, (left, base), font, FONT_SCALE, ink, 1, cv2.LINE_AA)
    right = max((left + width for _piece, left, _base, width, _learned in placed), default=0)
    return sheet[:, : max(WIDTH_PIXELS // 2, right + MARGIN_PIXELS)]
