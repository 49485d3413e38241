"""``batchd peek`` of streams without images, against a fake daemon."""

import click
import cv2
import numpy as np
import pytest
from click.testing import CliRunner

from batchd.cli.main import cli
from batchd.cli.peeked import ROWS_MAX, PeekedBatch, batch_table, drawn_rows, is_packed, joined_patches
from batchd.cli.text import aligned
from batchd_client.batch import WholeField
from batchd_client.showing import label_text
from batchd_wire.fields import Field, Varying
from batchd_wire.views import slot_arrays
from support.fake_daemon import FakeDaemon
from support.fake_stream import FakeStream

FIELDS = (
    Field("words", "int32", (6,), Varying("padded", (0,))),
    Field("words_length", "int32", ()),
    Field("digit", "uint8", (4, 4)),
    Field("index", "int64", ()),
)


class WordStream(FakeStream):
    """Words of different lengths, with or without a small image."""

    def page(self, _epoch: int, _step: int) -> bytearray:
        page = bytearray(self.layout.slot_bytes)
        arrays = slot_arrays(page, self.layout)
        arrays["words"][:] = np.arange(24).reshape(4, 6)
        arrays["words_length"][:] = [2, 0, 6, 1]
        return page


def peek(tmp_path, stream, *options):
    """Run the command; return its exit status and its output."""
    with FakeDaemon(tmp_path / "run", stream) as fake:
        return CliRunner().invoke(cli, ["peek", "photos", "--address", fake.address, *options])


def test_a_stream_without_images_is_printed(tmp_path) -> None:
    """It prints the fields with their types and the values of the first samples, but no file."""
    result = peek(tmp_path, WordStream(fields=FIELDS[:2]), "-o", str(tmp_path / "sheet.png"))

    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "stream 'photos' has no field with images, so no picture is drawn: epoch 0, step 0, 4 samples",
        "words              words_length",
        "int32[<=6]         int32",
        "0 1                2",
        "(empty)            0",
        "12 13 14 15 16 17  6",
        "18                 1",
    ]
    assert not (tmp_path / "sheet.png").exists()


def test_a_stream_with_an_image_of_another_name_is_drawn(tmp_path) -> None:
    """Labels are optional; the error for a field without images lists the fields with images."""
    sheet = tmp_path / "sheet.png"
    drawn = peek(tmp_path, WordStream(fields=FIELDS), "-o", str(sheet))
    refused = peek(tmp_path, WordStream(fields=FIELDS), "--field", "words")

    assert drawn.output == f"{sheet}: epoch 0, step 0, 4 samples\n"
    assert sheet.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert refused.exit_code == 1
    assert "no images in a field 'words', and no sound; known here: digit" in str(refused.exception)


def test_the_daemon_says_which_images_are_bgr(tmp_path) -> None:
    """Images of a pipeline that makes BGR have the right colours without an option."""

    class RedStream(FakeStream):
        def page(self, _epoch: int, _step: int) -> bytearray:
            page = bytearray(self.layout.slot_bytes)
            slot_arrays(page, self.layout)["image"][..., 2] = 255
            return page

    sheets = [tmp_path / "plain.png", tmp_path / "bgr.png", tmp_path / "told.png"]
    peek(tmp_path, RedStream(), "-o", str(sheets[0]))
    peek(tmp_path, RedStream(bgr_fields=("image",)), "-o", str(sheets[1]))
    peek(tmp_path, RedStream(), "-o", str(sheets[2]), "--bgr")
    plain, known, told = (cv2.imread(str(sheet))[80, 80].tolist() for sheet in sheets)

    assert plain == [255, 0, 0]
    assert known == told == [0, 0, 255]


def test_the_batch_at_a_position_is_drawn(tmp_path) -> None:
    """The command draws any requested batch, and refuses an invalid position."""
    sheet = str(tmp_path / "sheet.png")

    for number, position in enumerate((["2:3"], ["--at", "2:3"], ["2:3", "--at", "2:3"])):
        result = peek(tmp_path / str(number), WordStream(fields=FIELDS), "-o", sheet, *position)
        assert result.output.endswith(": epoch 2, step 3, 4 samples\n")
    for nonsense in ("3", "0:", "-1:0", "0:1:2", "a:b", "0:99999999999999999999"):
        for command in (["peek", "photos", "--at"], ["peek", "photos", "--"], ["replay", "photos", "--"]):
            refused = CliRunner().invoke(cli, [*command, nonsense])
            assert refused.exit_code == 2
            assert "EPOCH:STEP" in refused.output


def test_two_positions_are_refused() -> None:
    """The argument and the option may say the same, and not two things."""
    refused = CliRunner().invoke(cli, ["peek", "photos", "2:3", "--at", "2:4"])

    assert refused.exit_code == 2
    assert "EPOCH:STEP and --at are two positions; leave one out" in refused.output


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.array([3]), "3"),
        (np.array([0.123456789], np.float32), "0.123457"),
        (np.array([[1, 2, 3]]), "1 2 3"),
        (np.arange(9)[None], "0 1 2 3 4 5 .. (9)"),
        (np.ones((1, 2, 2)), "[2, 2] 1 1 1 1"),
        (np.array([list(b"a/b.jpg\0\0")], np.uint8), '"a/b.jpg"'),
        (np.array([list(b"x" * 50)], np.uint8), f'"{"x" * 38}.."'),
        (np.array([list(b"\x1b[2J")], np.uint8), "27 91 50 74"),
        (np.array([[200, 1]], np.uint8), "200 1"),
        (np.array([[0, 0]], np.uint8), "0 0"),
        (np.array([True]), "True"),
    ],
)
def test_values_are_shortened(value, text) -> None:
    """The table has numbers, the starts of arrays, and bytes as text if all can be printed."""
    assert batch_table(PeekedBatch(0, 0, [], {"x": value}), 80)[2] == text


def test_a_table_has_only_the_first_samples() -> None:
    """Each sample has its own shape."""
    array, sizes = np.arange(54).reshape(18, 3), np.array([1, 3] * 9, np.int32)
    room = WholeField(array, sizes.reshape(18, 1).astype(np.int64), Varying("ragged", (0,)))
    batch = PeekedBatch(0, 0, [], {"x": array, "x_length": sizes}, {"x": room})

    lines = batch_table(batch, 80)

    assert len(lines) == 2 + ROWS_MAX
    assert [line.split() for line in lines[:4]] == [
        ["x", "x_length"],
        ["int64[<=3]", "int32"],
        ["0", "1"],
        ["3", "4", "5", "3"],
    ]


def test_columns_are_as_wide_as_they_need_to_be() -> None:
    """Lines have no blanks at their end."""
    assert aligned([["a", "bb"], ["ccc", "d"]]) == ["a    bb", "ccc  d"]


def test_packed_rows_are_drawn_with_a_letter_for_each_document():
    """The bars are as wide as the terminal allows."""
    segments, lengths = np.zeros((2, 20), np.int32), np.asarray([[10, 5, 4], [20, 0, 0]], np.int32)
    batch = PeekedBatch(0, 0, [], {"tokens": segments, "segment_ids": segments, "lengths": lengths})

    title, *rows = drawn_rows(batch, 49)

    assert is_packed(batch)
    assert title.startswith("the rows, 20 elements each")
    assert [click.unstyle(row) for row in rows] == [
        "  0 aaaaaaaaaabbbbbcccc. 3 documents, 5.0% empty",
        "  1 aaaaaaaaaaaaaaaaaaaa 1 document, 0.0% empty",
    ]
    assert click.style("bbbbb", fg="yellow") in rows[0]
    assert not is_packed(PeekedBatch(0, 0, [], {"lengths": lengths}))


def test_images_between_texts_are_drawn_as_they_were():
    """Those of each row in order, whatever the order of their patches is; text alone has none."""
    chance = np.random.default_rng(0)
    first, second = (chance.integers(0, 255, (*size, 3), np.uint8) for size in ((4, 6), (2, 4)))
    tiles = [
        (image[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].ravel(), (row, column), number)
        for number, (image, places) in enumerate(
            ((first, ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))), (second, ((0, 0), (0, 1)))), 1
        )
        for row, column in places
    ]
    patches, positions, segments = np.zeros((2, 9, 12), np.uint8), np.zeros((2, 9, 2), int), np.zeros((2, 9), int)
    for place, (patch, position, number) in enumerate(tiles):
        patches[0, place], positions[0, place], segments[0, place] = patch, position, number
    packed = {"images": patches, "images_positions": positions, "images_segments": segments}
    rows = {"segment_ids": np.ones((2, 5), int), "lengths": np.full((2, 3), 2)}

    batch = joined_patches(PeekedBatch(0, 0, [], packed | rows))
    texts = joined_patches(PeekedBatch(0, 0, [], {**packed, "images_segments": segments * 0} | rows))

    assert all(np.array_equal(*pair) for pair in zip(batch.samples("images"), (first, second), strict=True))
    assert [label_text(batch.arrays, (), row) for row in range(2)] == ["row 0, image 0", "row 0, image 1"]
    assert "segment_ids" in texts.arrays


@pytest.mark.parametrize("channels", [1, 3])
def test_packed_patches_are_drawn_as_the_images_that_they_were(channels):
    """Two images in one row and one in another; each keeps its label."""
    chance, side = np.random.default_rng(0), 4
    grids = np.zeros((2, 3, 2), np.int32)
    images, patches = [], np.zeros((2, 10, side * side * channels), np.uint8)
    for row, document, first, grid in ((0, 0, 0, (2, 3)), (0, 1, 6, (1, 2)), (1, 0, 0, (5, 1))):
        image = chance.integers(0, 255, (grid[0] * side, grid[1] * side, channels), np.uint8)
        tiles = image.reshape(grid[0], side, grid[1], side, channels).swapaxes(1, 2)
        patches[row, first : first + grid[0] * grid[1]] = tiles.reshape(-1, side * side * channels)
        grids[row, document] = grid
        images.append(image)
    lengths, labels = np.asarray([[6, 2, 0], [5, 0, 0]], np.int32), np.asarray([[7, 8, -1], [9, -1, -1]])
    packed = {"image": patches, "image_grid": grids, "label": labels, "lengths": lengths}

    batch = joined_patches(PeekedBatch(0, 0, [], packed))

    assert batch.rows == 3
    assert batch.arrays["label"].tolist() == [7, 8, 9]
    assert all(np.array_equal(one, image) for one, image in zip(batch.samples("image"), images, strict=True))
