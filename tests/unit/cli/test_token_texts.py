"""``batchd peek`` of tokens: the texts that they stand for, and the words that are learned."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import cv2
import numpy as np
import pytest

from batchd.cli.contact_sheet import draw
from batchd.cli.peeked import PeekedBatch
from batchd.cli.text import without_styles
from batchd.cli.token_texts import LEARNED, draw_texts, text_lines, texts_of
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.sample_fields import overlays_of
from batchd.data.pipeline.text.options import Chat, Tokenize
from batchd.data.samples.columns import Column
from batchd.errors import BatchdError

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "chats.json").read_text())
CASE = GOLDEN["cases"][0]
TOKENIZER = json.dumps(GOLDEN["tokenizer"])
DIGEST = sha256(TOKENIZER.encode()).hexdigest()
IDS, MASK = CASE["ids"], [int(one) for one in CASE["learned"]]


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    return Chat(tokenizer=tmp_path / "tokenizer.json", template="chatml", max_length=9)


def batch(steps: list[StepOptions], **arrays: object) -> PeekedBatch:
    made = {name: np.array(values) for name, values in arrays.items()}
    made["loss_mask"] = made["loss_mask"].astype(np.uint8)
    columns = [Column("messages", "json"), Column("others", "json"), Column("text", "text")]
    digests = {step.files[key]: DIGEST for step in steps for key in step.files}
    return PeekedBatch(0, 0, (), made, overlays=overlays_of(columns, steps, digests))


def test_documents_of_a_packed_row_are_texts_with_marks_around_what_is_learned(chat: Chat) -> None:
    """Each has its sample; line ends and other characters that move a cursor are escaped."""
    count = len(IDS)
    texts = texts_of(
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
        draw_texts(texts_of(batch([chat], tokens=[IDS], loss_mask=[mask], index=[0])))
        for mask in (MASK, [0] * len(IDS))
    )

    assert learned.shape == plain.shape
    assert (learned == LEARNED).all(2).sum() > 1000
    assert not (plain == LEARNED).all(2).any()


def test_padding_is_no_text(chat: Chat) -> None:
    """Of a row that is padded, the first tokens are shown."""
    step = Tokenize(file=chat.tokenizer, max_length=9)
    padded = {"tokens": [IDS[:5] + [0] * 4], "tokens_length": [5], "loss_mask": [[0] * 9], "index": [0]}
    alone = batch([step], tokens=[IDS[:5]], loss_mask=[[0] * 5], index=[0])

    assert text_lines(texts_of(batch([step], **padded))) == text_lines(texts_of(alone))
    assert texts_of(batch([], **padded)) == []


def test_without_the_same_tokenizer_a_text_is_its_numbers(chat: Chat) -> None:
    """A file of the same path on another machine may be another one."""
    given = batch([chat], tokens=[[5, 6, 7]], loss_mask=[[0, 1, 1]], index=[0])
    for change in (lambda: chat.tokenizer.write_text(TOKENIZER + " "), chat.tokenizer.unlink):
        change()
        ((_title, runs, row),) = texts_of(given)
        assert (runs, row) == ([("5 ", False), ("6 7 ", True)], 0)


def test_tokens_of_an_image_are_counted(chat: Chat) -> None:
    """Hundreds of the same token hide no word."""
    runs = texts_of(batch([chat], tokens=[[5, *[6] * 200, 7]], loss_mask=[[0] * 202], index=[0]))[0].runs

    assert len(runs) == 1
    assert " (x 200) " in runs[0].text
    assert len(runs[0].text) < 60


def test_texts_of_a_row_stand_together_and_beside_its_image(chat: Chat, tmp_path: Path) -> None:
    """Preference pairs follow each other; the picture of a row has its texts on the right."""
    other = replace(chat, field="others", to="rejected", mask="rejected_mask")
    arrays = {"tokens": [IDS] * 2, "loss_mask": [MASK] * 2, "rejected": [IDS] * 2, "index": [4, 9]}
    images = np.zeros((2, 8, 8, 3), np.uint8)
    pairs, pictured = batch([chat, other], **arrays), batch([chat, other], **arrays, image=images)

    assert [text.title.split(",")[0] for text in texts_of(pairs)] == [
        "tokens of row 0",
        "rejected of row 0",
        "tokens of row 1",
        "rejected of row 1",
    ]
    sizes = []
    for shown in (pairs, pictured):
        draw(shown, "s", tmp_path / "sheet.png", None)
        sizes.append(cv2.imread(str(tmp_path / "sheet.png")).shape[:2])
    assert sizes[1][1] > sizes[0][1] + 100


def test_a_sheet_without_images_has_texts(chat: Chat, tmp_path: Path) -> None:
    """For `batchd replay`, too; a field that is asked for must have images."""
    sheet = tmp_path / "sheet.png"

    draw(batch([chat], tokens=[IDS], loss_mask=[MASK], index=[0]), "s", sheet, None)

    assert sheet.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(BatchdError, match="no images in a field 'tokens'"):
        draw(batch([chat], tokens=[IDS], loss_mask=[MASK], index=[0]), "s", sheet, "tokens")
