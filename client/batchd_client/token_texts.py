"""The texts that tokens stand for, with the words that are learned. Runs in the user's program.

    tokens  17 4 9 9   decoded by the tokenizer of the step that made them
    mask     0 0 1 1   a text is runs of words that are learned, or not

Used by `batchd peek` and notebooks. The daemon names the tokenizer's file with its digest. Where
this machine has no such file, or no library ``tokenizers``, a text is the numbers of its tokens.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from batchd_wire.fields import Overlay
from batchd_wire.views import Array

TEXTS_MAX = 8
"""Of one field."""
CHARACTERS_MAX = 600
"""Of one text that is shown."""
REPEATS_MAX = 8
"""More of one token in a row, such as those of an image, are counted."""
_TOKENIZER_BYTES_MAX = 1 << 28


class TokenRun(NamedTuple):
    """A part of a text, all of which is learned, or nothing."""

    text: str
    is_learned: bool


class TokenText(NamedTuple):
    """The text of a document. ``title``: its field and place. ``row``: of the batch."""

    title: str
    runs: Sequence[TokenRun]
    row: int


def token_texts(
    overlays: Sequence[Overlay], names: Collection[str], samples: Callable[[str], Sequence[Array]]
) -> list[TokenText]:
    """The first texts of each field of tokens that a step has made, row by row.

    ``names``: of the fields of the batch. ``samples``: gives the values of one, an array for each
    row, of tokens int32 ``[tokens]``.
    """
    found: list[TokenText] = []
    for one in overlays:
        if one.role == "tokens" and one.image in names:
            found += _texts(one, names, samples)
    return sorted(found, key=lambda text: text.row)


def _texts(one: Overlay, names: Collection[str], samples: Callable[[str], Sequence[Array]]) -> list[TokenText]:
    tokens = samples(one.image)
    masks = samples(one.field) if one.field in names else None
    indices, decode = samples("index"), _decoder(one.form)
    texts: list[TokenText] = []
    for row, numbers in enumerate(tokens):
        is_packed = indices[row].ndim > 0
        learned = [0] * len(numbers) if masks is None else masks[row].tolist()
        end = 0
        for document, length in enumerate(_lengths(one.image, row, len(numbers), names, samples)):
            start, end = end, end + length
            if start < end and len(texts) < TEXTS_MAX:
                sample = indices[row][document] if is_packed else indices[row]
                place = f"row {row}, document {document}" if is_packed else f"row {row}"
                pairs = zip(numbers[start:end].tolist(), learned[start:end], strict=True)
                runs = [
                    TokenRun("".join(_words([token for token, _one in run], decode)), bool(is_learned))
                    for is_learned, run in groupby(pairs, key=lambda pair: pair[1])
                ]
                texts.append(TokenText(f"{one.image} of {place}, sample {sample}", runs, row))
    return texts


def _lengths(
    field: str, row: int, room: int, names: Collection[str], samples: Callable[[str], Sequence[Array]]
) -> list[int]:
    """The tokens of each document of a row, or of the row without its padding."""
    if samples("index")[row].ndim:
        return list(map(int, samples("lengths")[row]))
    return [int(samples(f"{field}_length")[row])] if f"{field}_length" in names else [room]


def _words(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The text of tokens, in which a token that is repeated is counted."""
    waiting: list[int] = []
    for token, run in groupby(tokens):
        count = len(list(run))
        if count <= REPEATS_MAX:
            waiting += [token] * count
            continue
        yield decode(waiting) if waiting else ""
        yield f"{decode([token])} (x {count}) "
        waiting = []
    yield decode(waiting) if waiting else ""


def _decoder(form: str) -> Callable[[list[int]], str]:
    """How tokens become text: ``form`` has the digest and the path of a tokenizer."""
    digest, _space, path = form.partition(" ")
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  needed here alone, and not by the client

        with Path(path).open("rb") as file:
            content = file.read(_TOKENIZER_BYTES_MAX)
        if sha256(content).hexdigest() != digest:
            return _numbers
        tokenizer = Tokenizer.from_str(content.decode())
    except (ImportError, OSError):
        return _numbers
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)


def _numbers(tokens: list[int]) -> str:
    return "".join(f"{token} " for token in tokens)
