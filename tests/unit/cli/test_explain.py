"""`batchd check --explain`.

The output has the decoded box and the steps, for a few samples of each stream.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from batchd.cli import decoding_plans
from batchd.cli.main import cli
from batchd.data.pipeline.image import jpeg_box
from batchd.errors import ConfigInvalid
from support.images import encode, jpeg, jpeg_of, jpeg_with_exif, photo, ycck_jpeg
from support.megatron import write_megatron

pytestmark = pytest.mark.usefixtures("forked_children")
STREAM = "[streams.s]\nsource = {source}\nbatch_size = 8\n{shuffle}pipeline = [ {steps} ]\n"
FOLDER = '{ type = "folder", path = "photos" }'
CROP = '{ op = "decode" }, { op = "center_crop", size = [100, 60] }'


shown_after_steps = decoding_plans.rows_after_steps


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder to be in; no process makes a sample, which tests here ask for."""
    monkeypatch.setattr(decoding_plans, "rows_after_steps", lambda *_args: iter(()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def explain(
    folder: Path,
    steps: str = CROP,
    source: str = FOLDER,
    keys: str = "",
    shuffle: str = "shuffle = false\n",
) -> list[str]:
    """Return the output after the table of streams, with single blanks, less the kind of cache."""
    return [
        line for line in explain_all(folder, steps, source, keys, shuffle) if not line.startswith('s: cache = "auto"')
    ]


def explain_all(folder: Path, steps: str, source: str, keys: str, shuffle: str = "shuffle = false\n") -> list[str]:
    file = folder / "batchd.toml"
    file.write_text(
        f'[daemon]\nruntime_dir = "run"\n{STREAM.format(source=source, steps=steps, shuffle=shuffle)}{keys}'
    )
    result = CliRunner().invoke(cli, ["check", "--explain", str(file)])
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    parts = [
        place for place, line in enumerate(lines) if line.startswith(("stream source", "Not looked at", "Keys of"))
    ]
    return lines[lines.index("", parts[-1]) + 1 :]


def put(folder: Path, **files: bytes) -> None:
    (folder / "photos").mkdir()
    for name, data in files.items():
        (folder / "photos" / name.replace("_", ".")).write_bytes(data)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(("is_built", "how"), [(True, "alone"), (False, "cut from 200 x 160")])
def test_each_sample_has_its_box_and_its_steps(folder, is_built, how, monkeypatch) -> None:
    """The header alone gives the decoder of a JPEG's crop, and the reasons to decode it whole."""
    monkeypatch.setattr(jpeg_box, "IS_BUILT", is_built)
    image = photo(160, 200)
    inks = np.dstack([image, image[..., 0]])
    put(folder, a_jpg=jpeg(image), b_png=encode(image, ".png"), c_jpg=ycck_jpeg(inks), d_jpg=jpeg(image)[:2000])

    *before, title, _head, first, second, third, fourth = explain(folder)
    points = [line for line in before if "access points" in line]
    rows = [first, second, third, fourth]

    assert len(points) == is_built
    assert before[-1].startswith(
        "s: with cache_memory each image is decoded once, and batches stay the same; all 4 samples"
    )
    assert all("access points" in line and "(1 of these 3 files); all 4 samples need some" in line for line in points)
    assert title == "s: the first 4 samples of epoch 0"
    assert [row.partition("JPEG ")[2] or row.partition("PNG ")[2] for row in rows[:3]] == [
        f"200 x 160 60 x 100 from 70, 30, {how} unchanged",
        "200 x 160 60 x 100 from 70, 30, cut from 200 x 160 unchanged",
        "200 x 160 60 x 100 from 70, 30, cut from 200 x 160 unchanged",
    ]
    assert "a bad sample truncated: a JPEG of 2000 bytes" in rows[3]


def test_scales_and_turns_are_shown_for_the_stored_image(folder) -> None:
    """A photograph is stored on its side: the box is the stored one, and the turn is last."""
    put(folder, a_jpg=jpeg_with_exif(jpeg(photo(300, 400)), 6))

    *_, row = explain(
        folder, '{ op = "decode" }, { op = "center_crop", size = [400, 280] }, { op = "resize", size = [50, 40] }'
    )

    assert "JPEG 400 x 300, EXIF 6 100 x 70 at 1/4 from 0, 2," in row
    assert row.endswith("scaled to 50 x 40 (auto), transposed, flipped left to right")


@pytest.mark.skipif(not jpeg_box.IS_BUILT, reason="the extension was not built")
def test_views_say_how_their_crops_are_decoded_and_why(folder) -> None:
    """Those of one scale are decoded once; the estimates of both ways are beside it."""
    put(folder, a_jpg=jpeg(photo(300, 400)))
    crops = '[ { op = "center_crop", size = [60, 50] }, { op = "random_flip" } ]'
    call = '[ { op = "center_crop", size = [60, 50] }, { op = "call", function = "no.such:module", random = false } ]'
    views = f"{{ image = {{ count = 2, steps = {crops} }}, other = {{ steps = {call} }} }}"
    (folder / "no").mkdir()
    (folder / "no" / "such.py").write_text("def module(sample, rng):\n    return {}\n")

    *_before, sample, title, _head, first, second, third = explain(
        folder, f'{{ op = "decode" }}, {{ op = "views", into = {views} }}'
    )

    assert "JPEG 400 x 300 once for 3 views: 50 x 60 from 175, 120 some " in sample
    assert sample.endswith(" ms one by one")
    assert title == "s: the views of sample 0"
    assert first.startswith("image[0] 50 x 60 from 175, 120 ")
    assert second.startswith("image[1] 50 x 60 from 175, 120 ")
    assert third == "other 50 x 60 from 175, 120 unchanged"


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("steps", "done"),
    [
        ('{ op = "decode" }, { op = "resize", size = [40, 50] }', "all at 1/2: 60 x 40 scaled to 50 x 40 (auto)"),
        ('{ op = "decode" }, { op = "pad", size = [200, 200] }', "all: 120 x 80 padded to 200 x 200"),
        (
            '{ op = "decode" }, { op = "resize", size = [100, 100] }, { op = "center_crop", size = [60, 50] }',
            "all: 120 x 80 scaled to 100 x 100 (auto), cut to 50 x 60 from 25, 20",
        ),
        (
            '{ op = "decode" }, { op = "rotate", degrees = [5, 5] }, { op = "resize", size = [9, 9] }',
            "rotated by 5.0 degrees",
        ),
    ],
)
def test_moves_are_listed_in_their_order(folder, steps, done) -> None:
    """They are all moves after the decoder, up to the first step on pixels."""
    put(folder, a_jpg=jpeg(photo(80, 120)))

    assert done in explain(folder, steps)[-1]


def test_streams_without_such_a_plan_say_why(folder) -> None:
    """Their samples are pushed later, or their pixels are not decoded."""
    np.save(folder / "x.npy", np.zeros((4, 8, 8, 3), np.uint8))
    push = '{ type = "push", fields = { image = "uint8[8,8,3]" } }'

    assert explain(folder, "", '{ type = "npy", path = "x.npy" }') == ["s: no image is decoded"]
    assert explain(folder, "", push) == ["s: its samples are not there yet"]


@pytest.mark.thorough
def test_lists_of_images_have_no_plan_of_one_file(folder) -> None:
    """They are decoded one by one; what else there is to say of the stream is said."""
    put(folder, **{"1_png": encode(photo(), ".png")})
    (folder / "rows.jsonl").write_text('{"images": ["1.png", "1.png"]}\n{"images": []}\n')
    source = '{ type = "jsonl", root = ".", shards = ["rows.jsonl"], image_root = "photos", fields = { images = "image[<=4]" } }'
    steps = '{ op = "decode", field = "images" }, { op = "resize", field = "images", size = [8, 8] }'
    ragged = '{ op = "ragged", field = "images", max_shape = [4, 8, 8, 3] }'
    assert explain(folder, f"{steps}, {ragged}", source) == []


def test_file_names_cannot_control_a_terminal(folder) -> None:
    """Unusual characters are escaped."""
    (folder / "photos").mkdir()
    (folder / "photos" / "a\x1b[2J.jpg").write_bytes(jpeg(photo(160, 200)))

    assert "a\\x1b[2J.jpg" in explain(folder)[-1]


@pytest.mark.skipif(not jpeg_box.IS_BUILT, reason="the extension is not built: apt install gcc libjpeg62-turbo-dev")
def test_decoded_tiles_are_counted(folder) -> None:
    """The file has restart markers: three of the five in each row of blocks, in 14 rows of 20."""
    put(folder, a_jpg=jpeg_of(photo(160, 200), "444", restart=5))

    *_, row = explain(folder)

    assert "60 x 100 from 70, 30, cut from 42 of 100 tiles" in row


def test_the_cut_for_a_cache_of_decoded_samples_is_shown(folder) -> None:
    """The output has the kept steps, the steps of each epoch, and the memory for all samples."""
    put(folder, a_jpg=jpeg(photo(160, 200)), b_jpg=jpeg(photo(160, 200)))
    keys = "cache = 'decoded'\ncache_memory = '8MiB'\ncache_short_side = 80\n"

    lines = explain(folder, '{ op = "decode" }, { op = "random_resized_crop", size = [64, 64] }', keys=keys)

    assert lines[0] == "s: the cache keeps what decode, resize make; in each epoch random_resized_crop"
    assert lines[1] == "s: the first 2 samples of epoch 0"
    assert [line.partition("JPEG ")[2] for line in lines[3:5]] == [
        "200 x 160 all at 1/2: 100 x 80 scaled to 100 x 80 (auto)"
    ] * 2
    assert lines[-1] == "s: all 2 samples need some 57.3 KiB, if they are like these; there is room for all of them"


FILES = '{ type = "folder", path = "photos" }'
ONE_CROP = '{ op = "decode" }, { op = "random_resized_crop", size = [160, 160] }'
OTHERS = "the others are decoded"
ALL_PIXELS = "all 3 samples need some 414.1 KiB, if they are like these"
BUILT = pytest.mark.skipif(
    not jpeg_box.IS_BUILT, reason="the extension is not built: apt install gcc libjpeg62-turbo-dev"
)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("steps", "keys", "first", "last"),
    [
        pytest.param(
            ONE_CROP,
            "",
            'cache = "auto" is "points": a crop follows decode, and there is no budget for more',
            "with cache_memory each image is decoded once, and batches stay the same; all 3 samples need some ",
            marks=BUILT,
        ),
        (
            ONE_CROP,
            'cache_memory = "64KiB"\n',
            'cache = "auto" is "pixels": images are decoded from files, and there is cache_memory',
            f'{ALL_PIXELS}; there is room for about 14% of them: {OTHERS} in each epoch; cache_memory = "1MiB" keeps all',
        ),
        (
            ONE_CROP,
            'cache_memory = "1MiB"\n',
            'cache = "auto" is "pixels": images are decoded from files, and there is cache_memory',
            f"{ALL_PIXELS}; there is room for all of them",
        ),
        (
            '{ op = "decode" }, { op = "resize", size = [64, 64] }',
            "",
            'cache = "auto" keeps nothing: no crop follows decode directly',
            "with cache_memory each image is decoded once",
        ),
    ],
    ids=["points", "a part of the pixels", "all pixels", "nothing"],
)
def test_the_choice_of_auto_comes_with_its_reason_and_the_part_that_has_room(
    folder, steps: str, keys: str, first: str, last: str
) -> None:
    """It says what all samples take, what the budget keeps of them, and what more would give."""
    put(folder, **{f"{name}_jpg": jpeg(photo(200, 220)) for name in "abc"})

    lines = explain_all(folder, steps, FILES, keys)

    assert lines[0] == f"s: {first}"
    assert any(line.startswith(f"s: {last}") for line in lines[1:])


def test_a_cache_of_source_values_says_which_part_has_room(folder) -> None:
    """Nothing is decoded, and the size is that of the records of the first samples."""
    np.save(folder / "x.npy", np.zeros((64, 4096), np.float32))
    keys = 'cache = "encoded"\ncache_memory = "512KiB"\n'

    lines = explain(folder, "", '{ type = "npy", path = "x.npy" }', keys)

    assert lines[0].startswith(
        "s: all 64 samples need some 1.1 MiB, if they are like these; there is room for about 47%"
    )
    assert lines[0].endswith('of them: the others are read in each epoch; cache_memory = "2MiB" keeps all')
    assert lines[1:] == ["s: no image is decoded"]


def test_a_pipeline_that_cannot_be_cut_is_refused(folder) -> None:
    """The problem has a remedy, at its own key."""
    put(folder, a_jpg=jpeg(photo(160, 200)))
    file = folder / "batchd.toml"
    steps = '{ op = "call", function = "numpy:array", outputs = { image = "uint8[8,8,3]" } }'
    text = STREAM.format(source='{ type = "folder", path = "photos" }', steps=steps, shuffle="")
    file.write_text(f'[daemon]\nruntime_dir = "run"\n{text}cache = "decoded"\ncache_memory = "8MiB"\n')

    result = CliRunner().invoke(cli, ["check", str(file)])

    assert isinstance(result.exception, ConfigInvalid)
    assert [problem.path for problem in result.exception.problems] == ["streams.s.cache"]
    assert "no step decodes" in result.exception.problems[0].message


def test_a_shuffle_of_blocks_says_what_it_mixes(folder) -> None:
    """The blocks, the samples that are mixed, and how far neighbours get apart."""
    put(folder, **{f"{number}_jpg": jpeg(photo(16, 16)) for number in range(10)})

    first, *_others = explain(folder, keys="shuffle = { blocks = 2, block_samples = 4 }\n", shuffle="")

    assert first == (
        "s: 3 blocks of neighbours, 3.3 samples each; 2 are open at a time, so 5 samples are shuffled together: neighbours in "
        "one block get 2 places apart on average, and 4 with shuffle = true; a batch takes 100% of the samples of the open "
        "blocks"
    )


def test_a_shuffle_of_blocks_is_explained_where_no_image_is_decoded(folder) -> None:
    """The size of the open blocks is shown where blocks have one."""
    np.save("x.npy", np.zeros((64, 4096), np.float32))
    source = '{ type = "npy", path = "x.npy" }'

    first, last = explain(folder, "", source, 'shuffle = { blocks = 2, block_bytes = "64KiB" }\n', shuffle="")

    assert first.startswith(
        "s: 16 blocks of neighbours, 4.0 samples each; 2 are open at a time, so 8 samples, some 128"
    )
    assert last == "s: no image is decoded"


def texts_of(folder: Path) -> str:
    """The source of 640 documents with lengths of 1 to 40 tokens."""
    write_megatron(folder / "a.bin", [[[7] * (1 + place % 40)] for place in range(640)], "uint16")
    return '{ type = "tokens", path = "a.bin", format = "megatron", dtype = "uint16" }'


@pytest.mark.thorough
def test_buckets_say_what_is_filling_and_that_ranks_wait(folder) -> None:
    """Both are compared with the same stream without the key."""
    pad = '{ op = "pad_batch", field = "tokens", max_shape = [64] }'
    keys = 'bucket = { field = "tokens", bounds = [10, 20, 30] }\n'

    alone, slot = explain(folder, pad, texts_of(folder), keys, shuffle="")
    balanced, _slot = explain(folder, pad, texts_of(folder), f"{keys}balance = 4\n", shuffle="")

    assert alone == (
        "s: 80 batches an epoch, each of one of 4 buckets of 'tokens': to 10, to 20, to 30, to 40 elements, from 1; padded to "
        "the largest of its bucket, 18% of a batch is filling, and without buckets 47%; the ranks of a step have batches of "
        "different buckets; balance = 8 has 8 ranks read those of one"
    )
    assert balanced.endswith("the ranks of a step have batches of the same bucket, for up to 4 ranks")
    assert slot == "s: a slot takes 8.0 KiB, for 8 rows"


def test_crops_to_the_bucket_say_which_sizes_there_are_and_what_is_cut_off(folder) -> None:
    """Of all images, and of those of each size; the slot has room for the largest."""
    shapes = [(40, 40)] * 9 + [(30, 45)] * 9 + [(40, 50)] * 8
    put(folder, **{f"{place:02}_jpg": jpeg(photo(*shape)) for place, shape in enumerate(shapes)})
    crop = '{ op = "decode" }, { op = "crop_to_bucket", sizes = [[24, 24], [24, 32], [20, 40]] }'

    batches, slot, *_others = explain(folder, crop)

    assert batches == (
        "s: 4 batches an epoch, each of images of one height x width: 24 x 24 (8, 0.0% cut off), 24 x 32 (18, 9.7% cut off); "
        "6.7% of all pixels are cut off; the ranks of a step have batches of different buckets; balance = 8 has 8 ranks read "
        "those of one"
    )
    assert slot == "s: a slot takes 24.0 KiB, for 8 rows of the largest size"


@pytest.mark.parametrize(
    ("step", "keys", "text", "size"),
    [
        (
            '"letterbox", sizes = [[24, 24], [24, 32]] }',
            "balance = 2\n",
            (
                "height x width: 24 x 24, 24 x 32; batch 0 of epoch 0 has 24 x 32; the ranks of a step draw the same, "
                "for up to 2 ranks"
            ),
            "24 x 24",
        ),
        (
            '"resize", shorter_sides = [20, 30] }, { op = "pad_batch", max_shape = [40, 40, 3] }',
            "",
            (
                "shorter sides: 20, 30; batch 0 of epoch 0 has 30; the ranks of a step draw each its own; balance = 8 has "
                "8 ranks draw one"
            ),
            "30 x 30",
        ),
    ],
    ids=["sizes", "sides"],
)
def test_sizes_that_batches_draw_are_said_with_the_room_and_what_the_first_batch_draws(
    folder, step, keys, text, size
) -> None:
    put(folder, a_jpg=jpeg(photo(40, 40)))

    sizes, slot, *_others, sample = explain(folder, f'{{ op = "decode" }}, {{ op = {step}', keys=keys)

    assert sizes == f"s: each batch draws one of 2 sizes for its images in 'image', {text}"
    assert slot.startswith("s: a slot takes ")
    assert f"scaled to {size} (auto)" in sample


@pytest.mark.thorough
def test_a_budget_says_how_many_samples_a_batch_has(folder) -> None:
    """The slot has room for that, or for the most of the largest, which is said, too."""
    pad = '{ op = "pad_batch", field = "tokens", max_shape = [64] }'
    keys = 'bucket = { field = "tokens", bounds = [10, 20, 30], budget = 60 }\n'

    batches, slot = explain(folder, pad, texts_of(folder), keys, shuffle="")

    assert batches.startswith(
        "s: 321 batches an epoch, each of one of 4 buckets of 'tokens': to 10, to 20, to 30, to 40"
    )
    assert batches.endswith(
        "; a batch has up to 6 samples of the smallest bucket and 1 of the largest, 2 on average, so that it has at most 60 of "
        "the largest size in its bucket"
    )
    assert slot == (
        "s: a slot takes 8.0 KiB, for 8 rows at most: as much as a batch of any bucket needs; rows with room for the largest "
        "sample would take 8.0 KiB"
    )
    keys = 'bucket = { field = "tokens", by = "bytes", bounds = [20, 40, 60], budget = 120 }\n'
    assert explain(folder, pad, texts_of(folder), keys, shuffle="")[1] == (
        "s: a slot takes 8.0 KiB, for 8 rows of the largest sample: batch_size = 6 is enough for this budget"
    )


def test_large_sizes_of_buckets_have_all_their_digits(folder) -> None:
    """Pixels of images would have exponents otherwise."""
    write_megatron(folder / "a.bin", [[[7] * length] for length in [12_345] * 8 + [123_456] * 2], "uint16")
    source = '{ type = "tokens", path = "a.bin", format = "megatron", dtype = "uint16" }'
    pad = '{ op = "pad_batch", field = "tokens", max_shape = [200000] }'
    keys = 'bucket = { field = "tokens", bounds = [20000], budget = 250000 }\n'

    batches, _slot = explain(folder, pad, source, keys, shuffle="")

    assert "of 2 buckets of 'tokens': to 12,345, to 123,456 elements, from 12,345;" in batches


def test_documents_that_are_cut_say_how_many_a_row_has(folder) -> None:
    pack = '{ op = "pack", field = "tokens", length = 40, documents = 20, method = "concat-split" }'

    rows, *_others = explain(folder, pack, texts_of(folder), shuffle="")

    assert rows == (
        "s: 13,120 elements of 'tokens' as one sequence, cut into 328 rows of 40 (41 batches an epoch), with 1 to 6 documents "
        "in each; no room is empty but in the last row"
    )


def test_packed_rows_say_what_they_cost_the_ranks_of_a_step(folder) -> None:
    """Only if they are balanced is the cost of each row known."""
    pack = '{ op = "pack", field = "tokens", length = 40 }'

    *_rows, cost, _slot = explain(folder, pack, texts_of(folder), "balance = 8\n", shuffle="")

    assert cost == (
        "s: in a step, attention over a row costs the most expensive of 8 ranks at most 8.9 % more than their mean, on "
        "average; without balance some 47 % more"
    )


def test_a_step_on_pixels_before_a_crop_is_said_to_need_the_whole_image(folder) -> None:
    """Its statistics are of all that it gets, so the crop decides nothing about decoding."""
    put(folder, a_jpg=jpeg(photo(160, 200)))
    early = '{ op = "decode" }, { op = "equalize" }, { op = "center_crop", size = [100, 60] }'

    *before, row = explain(folder, early)
    *late, _row = explain(folder, f'{CROP}, {{ op = "equalize" }}')

    assert any(line.startswith('s: "equalize" is before "center_crop" and so of the whole image') for line in before)
    assert "all: 200 x 160" in row
    assert not any("equalize" in line for line in late)


def after_steps(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: str, source: str, bad: float = 0.5) -> list[str]:
    """Return the title, and the rows, of the fields after each step."""
    monkeypatch.setattr(decoding_plans, "rows_after_steps", shown_after_steps)
    lines = explain(folder, steps, source, f"max_bad_fraction = {bad}\n")
    return lines[next(place for place, line in enumerate(lines) if "after each step" in line) :]


def test_the_fields_of_the_first_good_sample_are_shown_after_each_step(folder, monkeypatch) -> None:
    """A box that a crop cuts off is gone from its row; images of one batch have the drawn size."""
    objects = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    put(folder, a_jpg=b"no image", b_jpg=jpeg(photo(60, 80)))
    for number, name in enumerate(("a.jpg", "b.jpg")):
        objects["images"].append({"id": number, "file_name": name, "height": 60, "width": 80})
        for place, left in enumerate((2, 30, 60)):
            box = {"image_id": number, "category_id": 1, "bbox": [left, 20, 12, 12], "iscrowd": 0}
            objects["annotations"].append({"id": 3 * number + place, **box})
    (folder / "a.json").write_text(json.dumps(objects))
    steps = """
        { op = "decode" }, { op = "follow", boxes = "boxes", labels = ["classes"] }, { op = "center_crop", size = [40, 40] },
        { op = "letterbox", sizes = [[24, 24], [32, 32]] }, { op = "rename", field = "classes", to = "labels" },
        { op = "pad_batch", field = "boxes", max_shape = [9, 4] }, { op = "pad_batch", field = "labels", max_shape = [9] }
    """

    title, *rows = after_steps(folder, monkeypatch, steps, '{ type = "coco", path = "a.json", images = "photos" }')

    assert title == "s: the fields of sample 1 of epoch 0 after each step"
    assert [row.split() for row in rows[:4]] == [
        ["step", "field", "type", "this", "sample"],
        ["source", "image", "image", f"{len(jpeg(photo(60, 80))):,}", "bytes"],
        ["boxes", "float32[?,4]", "float32[3,", "4]"],
        ["classes", "int64[?]", "int64[3]"],
    ]
    assert rows[4:] == [
        "decode image uint8[?,?,3] uint8[60, 80, 3]",
        "follow image uint8[?,?,3] uint8[60, 80, 3]",
        "boxes float32[?,4] float32[3, 4]",
        "classes int64[?] int64[3]",
        "center_crop image uint8[40,40,3] uint8[40, 40, 3]",
        "boxes float32[?,4] float32[1, 4]",
        "classes int64[?] int64[1]",
        "letterbox image uint8[?,?,3] uint8[32, 32, 3]",
        "rename labels int64[?] int64[1]",
        "classes gone",
        "pad_batch boxes float32[<=9,4] padded float32[1, 4]",
        "boxes_length int32",
        "pad_batch labels int64[<=9] padded int64[1]",
        "labels_length int32",
    ]


def test_values_of_all_kinds_are_shown_and_a_stream_without_a_good_sample_says_why(folder, monkeypatch) -> None:
    (folder / "a.jsonl").write_text(json.dumps({"t": "cats", "m": {"a": 1}, "n": 3, "b": "AAA="}) + "\n")
    source = '{ type = "jsonl", root = ".", shards = ["a.jsonl"], fields = { t = "text", m = "json", n = "int64" } }'
    steps = '{ op = "drop", fields = ["m"] }, { op = "text_bytes", field = "t", length = 8 }'

    _title, _head, *rows = after_steps(folder, monkeypatch, steps, source)

    assert rows[:4] == ["source t text 4 characters", "m json 1 item", "n int64 3", "drop m gone"]
    assert rows[4].startswith("text_bytes t uint8[8] uint8[8]")
    put(folder, a_jpg=b"no image")
    (line,) = after_steps(folder, monkeypatch, CROP, FOLDER, 1.0)
    assert line.startswith("s: no sample can be shown after each step: none of the first can be made, for example /")
    assert "a.jpg: not a JPEG" in line
