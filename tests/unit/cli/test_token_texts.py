"""``batchd peek`` of tokens: the texts that they stand for, and the words that are learned."""

import json
from pathlib import Path

import numpy as np
import pytest

from batchd.cli.contact_sheet import draw
from batchd.cli.peeked import PeekedBatch, steps_of
from batchd.cli.text import without_styles
from batchd.cli.token_texts import LEARNED, draw_texts, text_lines, token_texts
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.text.options import Chat, Tokenize
from batchd.errors import BatchdError

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "chats.json").read_text())
CASE = GOLDEN["cases"][0]
IDS, MASK = CASE["ids"], [int(one) for one in CASE["learned"]]


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    (tmp_path / "tokenizer.json").write_text(json.dumps(GOLDEN["tokenizer"]))
    return Chat(tokenizer=tmp_path / "tokenizer.json", template="chatml", max_length=9)


def batch(steps: list[StepOptions], **arrays: list[object]) -> PeekedBatch:
    made = {name: np.array(values) for name, values in arrays.items()}
    made["loss_mask"] = made["loss_mask"].astype(np.uint8)
    return PeekedBatch(0, 0, (), made, steps=steps)


def test_documents_of_a_packed_row_are_texts_with_marks_around_what_is_learned(chat: Chat) -> None:
    """Each has its sample; line ends and other characters that move a cursor are escaped."""
    count = len(IDS)
    texts = token_texts(
        batch(
            [chat],
            tokens=[IDS + IDS],
            loss_mask=[MASK + [0] * count],
            segment_ids=[[1] * count + [2] * count],
            lengths=[[count, count, 0]],
            index=[[7, 3, -1]],
        )
    )

    first, second = ("".join(run.text for run in text.runs) for text in texts)
    lines = [without_styles(line) for line in text_lines(texts)]
    assert first == second
    assert [text.title for text in texts] == [
        "tokens of row 0, document 0, sample 7",
        "tokens of row 0, document 1, sample 3",
    ]
    assert lines[1].count("«") == len(CASE["learned"].replace("0", " ").split())
    assert "«" not in lines[3]
    assert all(line.isprintable() for line in lines)
    assert lines[1].replace("«", "").replace("»", "") == lines[3]


def test_learned_words_are_green_in_the_picture(chat: Chat) -> None:
    """And only there."""
    learned, plain = (
        draw_texts(token_texts(batch([chat], tokens=[IDS], loss_mask=[mask], index=[0])))
        for mask in (MASK, [0] * len(IDS))
    )

    assert learned.shape == plain.shape
    assert (learned == LEARNED).all(2).sum() > 1000
    assert not (plain == LEARNED).all(2).any()


def test_padding_is_no_text_and_a_tokenizer_that_is_away_makes_none(chat: Chat, tmp_path: Path) -> None:
    """Numbers are shown as before."""
    step = Tokenize(file=chat.tokenizer, max_length=9)
    padded = {"tokens": [IDS[:5] + [0] * 4], "tokens_length": [5], "loss_mask": [[0] * 9], "index": [0]}
    alone = batch([step], tokens=[IDS[:5]], loss_mask=[[0] * 5], index=[0])

    assert text_lines(token_texts(batch([step], **padded))) == text_lines(token_texts(alone))
    assert token_texts(batch([], **padded)) == []
    chat.tokenizer.unlink()
    assert token_texts(batch([step, chat], **padded)) == []
    assert steps_of("", "s") == steps_of(str(tmp_path / "none.toml"), "s") == ()


def test_a_sheet_without_images_has_texts(chat: Chat, tmp_path: Path) -> None:
    """For `batchd replay`, too; a field that is asked for must have images."""
    sheet = tmp_path / "sheet.png"

    draw(batch([chat], tokens=[IDS], loss_mask=[MASK], index=[0]), "s", sheet, None)

    assert sheet.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(BatchdError, match="no images in a field 'tokens'"):
        draw(batch([chat], tokens=[IDS], loss_mask=[MASK], index=[0]), "s", sheet, "tokens")
