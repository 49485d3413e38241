"""The texts of tokens as lines and as a picture. Runs in the user's shell.

On a terminal and in a picture learned words are green; «these marks» are around them in any text.
"""

import re
from collections.abc import Sequence

import click
import numpy as np

from batchd.cli.peeked import PeekedBatch
from batchd.cli.text import escaped
from batchd_client.token_texts import CHARACTERS_MAX, TokenText, token_texts
from batchd_wire.fields import Overlay

WIDTH_PIXELS, LINE_PIXELS, MARGIN_PIXELS, SPACE_PIXELS = 1000, 20, 10, 5
FONT_SCALE = 0.45
BACKGROUND, INK, LEARNED, LEARNED_INK = (250, 250, 250), (40, 40, 40), (205, 240, 205), (20, 95, 20)
_PIECES = re.compile(r"\n|[^\S\n]+|\S{1,60}")
"""A line end, white space, or a word, or a part of one that has no room on a line."""


def texts_of(batch: PeekedBatch) -> list[TokenText]:
    """The first texts of a batch: see ``batchd_client.token_texts``."""
    return token_texts(list(map(Overlay._make, batch.overlays)), batch.arrays, batch.samples)


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
