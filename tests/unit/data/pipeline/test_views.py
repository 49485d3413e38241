"""Views: numbers, bytes, fields and reasons of the step that makes several of one image."""

from dataclasses import replace

import numpy as np
import pytest

from batchd.data.pipeline.augment.options import Blur
from batchd.data.pipeline.cache_split import cropped_files, cut_of
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.effects import StepInvalid
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.fields.options import Cast
from batchd.data.pipeline.image import jpeg_box
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.image.geometry import TURN_OF_ORIENTATION, Cut
from batchd.data.pipeline.image.jpeg_box import found_points, probe_file
from batchd.data.pipeline.options import step_from_plain, step_to_plain
from batchd.data.pipeline.randomness import SampleRandom, view_number
from batchd.data.pipeline.sample_fields import StepCheck, columns_after, sample_fields
from batchd.data.pipeline.shapes.options import PadBatch
from batchd.data.pipeline.step_files import named_by_content
from batchd.data.pipeline.views import stages
from batchd.data.pipeline.views.options import View, Views
from batchd.data.samples.checks import OptionsInvalid
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.kept_files import KeptFiles
from support.images import encode, jpeg, jpeg_with_exif, photo

FILE = [Column("image", "encoded"), Column("label", dtype="int64")]
GLOBAL = (op.RandomResizedCrop(size=(64, 64), scale=(0.4, 1.0)), op.RandomFlip())
LOCAL = (op.RandomResizedCrop(size=(24, 24), scale=(0.05, 0.4)), op.ColorJitter(brightness=0.4, probability=0.8))
DINO = Views(into={"image": View(count=2, steps=GLOBAL), "local": View(count=4, steps=LOCAL)})
LARGE = jpeg(photo(300, 400, seed=5))


def run_fields(steps, data=LARGE, epoch=0, sample=0, seed=0, columns=FILE, kept=None, draws=None):
    """Run a new pipeline on one file. Return all its fields, from rows full of sentinels."""
    pipeline = Pipeline(columns, steps, seed, kept=kept)
    if draws is not None:
        draws.append(pipeline.note_draws())
    row = {name: np.full(column.fixed_shape, 77, column.dtype) for name, column in pipeline.columns.items()}
    pipeline.run({"image": memoryview(data) if isinstance(data, bytes) else data, "label": 7}, epoch, sample, 0, row)
    return row


def alone(field, place, steps, data=LARGE, **position):
    """One view of ``DINO`` by a step that makes no other; its place in the field stays."""
    return run_fields([op.Decode(), Views(into={field: View(count=place + 1, steps=steps)})], data, **position)[field]


def test_views_become_fields_with_an_axis_and_leave_the_others():
    """The fields have the announced shapes; a count of 1 has no axis; labels are untouched."""
    single = replace(
        DINO, into={**DINO.into, "one": View(steps=(op.CenterCrop(size=(8, 8)), op.Normalize(), op.Layout()))}
    )
    fields = {
        field.name: (field.dtype, field.shape) for field in sample_fields(FILE, [op.Decode(), single], "substitute")
    }

    row = run_fields([op.Decode(), single])

    assert (
        fields.items()
        >= {
            "image": ("uint8", (2, 64, 64, 3)),
            "local": ("uint8", (4, 24, 24, 3)),
            "one": ("float32", (3, 8, 8)),
            "label": ("int64", ()),
        }.items()
    )
    assert row["label"] == 7
    assert len({view.tobytes() for view in (*row["image"], *row["local"])}) == 6
    assert all(len(np.unique(view)) > 20 for view in (*row["image"], *row["local"], row["one"]))


def test_the_source_field_is_gone_unless_it_is_named():
    """A batch has only the fields of ``into``, in the place of the image."""
    steps = [op.Decode(), Views(into={"a": View(steps=GLOBAL), "b": View(steps=LOCAL)})]

    assert list(columns_after(FILE, steps)) == ["a", "b", "label"]


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("make", [jpeg, lambda image: encode(image, ".png")], ids=["jpeg", "png"])
def test_a_view_has_the_same_bytes_whichever_others_there_are(make, orientation):
    """Neither a further field, nor more views, nor a longer list of steps changes a view."""
    data = make(photo(300, 400, seed=5))
    data = jpeg_with_exif(data, orientation) if make is jpeg else data
    more = Views(
        into={
            "tiny": View(count=3, steps=(op.RandomResizedCrop(size=(8, 8), scale=(0.9, 1.0)),)),
            "local": View(count=6, steps=LOCAL),
            "image": View(count=2, steps=(*GLOBAL, Blur(sigma=(0.1, 2.0), probability=0.5))),
        }
    )
    for sample in range(3):
        row, other = (run_fields([op.Decode(), step], data, epoch=1, sample=sample) for step in (DINO, more))

        assert np.array_equal(other["local"][:4], row["local"])
        assert np.array_equal(alone("image", 1, GLOBAL, data, epoch=1, sample=sample), row["image"])
        assert np.array_equal(alone("local", 3, LOCAL, data, epoch=1, sample=sample), row["local"])


def test_crops_decoded_together_alone_or_from_points_have_the_same_bytes(monkeypatch):
    """What the planner chooses, what a cache has, and which decoder there is, is about time."""
    rows = []
    for forced in (True, False, None):
        for has_points in (False, True):
            kept = KeptFiles(["image"])
            points = found_points(memoryview(LARGE), probe_file(memoryview(LARGE)))
            kept.points.begin({"image": points} if has_points else {}, is_kept=not has_points)
            with monkeypatch.context() as patch:
                if forced is not None:
                    patch.setattr(stages.ViewGroup, "is_together", property(lambda _group, is_it=forced: is_it))
                rows.append(run_fields([op.Decode(), DINO], kept=kept))

    monkeypatch.setattr(jpeg_box, "IS_BUILT", False)
    rows.append(run_fields([op.Decode(), DINO]))

    for row in rows[1:]:
        assert all(np.array_equal(row[name], rows[0][name]) for name in ("image", "local"))


def test_a_view_is_what_decode_and_its_steps_make_with_its_numbers(monkeypatch):
    """The steps of one view alone are the reference, in the numbers of that view."""
    monkeypatch.setattr(SampleRandom, "start", _start_of_view("local", 2))
    plain = run_fields([op.Decode(scale="off"), *LOCAL])["image"]
    monkeypatch.undo()

    assert np.array_equal(run_fields([op.Decode(scale="off"), DINO])["local"][2], plain)


def _start_of_view(field, place):
    start = SampleRandom.start

    def started(self, epoch, sample, attempt):
        start(self, epoch, sample, attempt)
        self.start_view(view_number(field, place))

    return started


def test_views_draw_in_blocks_of_their_own():
    """Neither fields nor places share numbers, with each other or with the sample itself."""
    random = SampleRandom(3)
    random.start(1, 2, 0)
    seen = [random.random(4).tolist()]
    for number in (view_number(name, place) for name in ("image", "local") for place in range(4)):
        random.start_view(number)
        seen.append(random.random(4).tolist())
    random.start(1, 2, 1)
    random.start_view(view_number("image", 0))
    seen.append(random.random(4).tolist())

    assert len({tuple(numbers) for numbers in seen}) == len(seen)


def test_later_steps_draw_the_numbers_that_they_had_without_views():
    """A crop of another field behind the step is where it was before the step was there."""
    columns = [*FILE, Column("other", shape=(40, 40, 3))]
    other = photo(40, 40, seed=9)
    crop = op.RandomCrop(field="other", size=(8, 8))

    def made(*views):
        pipeline = Pipeline(columns, [op.Decode(), *views, crop], 0, has_rows=False)
        return pipeline.make({"image": memoryview(LARGE), "label": 7, "other": other}, 0, 0, 0)["other"].copy()

    assert np.array_equal(made(op.CenterCrop(size=(8, 8))), made(DINO))


def test_views_of_pixels_and_behind_other_steps():
    """Without "decode" directly in front, views are of the pixels there, which stay as they are."""
    image = photo(80, 90, seed=2)
    given = image.copy()
    given.flags.writeable = False
    views = Views(into={"image": View(count=2, steps=(op.ColorJitter(brightness=0.9),)), "whole": View(steps=())})
    row = run_fields([views], given, columns=[Column("image", shape=image.shape), FILE[1]])

    assert np.array_equal(row["whole"], image)
    assert not np.array_equal(row["image"][0], row["image"][1])
    behind = run_fields([op.Decode(), op.Resize(size=(80, 90)), views])
    assert np.array_equal(behind["whole"], run_fields([op.Decode(), op.Resize(size=(80, 90))])["image"])


def test_views_of_different_sizes_may_be_padded_later():
    """With a count of 1 a field ends as its steps leave it; overlapping views keep their pixels."""
    views = Views(
        into={"a": View(steps=(op.Gray(),)), "b": View(steps=()), "c": View(steps=(op.Resize(shorter_side=30),))}
    )
    steps = [op.Decode(), views]
    steps += [PadBatch(field=name, max_shape=(300, 400, 3)) for name in "abc"]

    row = run_fields(steps)

    assert np.array_equal(row["b"], run_fields([op.Decode(), op.Resize(size=(300, 400))])["image"])
    assert (row["a"][..., 0] == row["a"][..., 1]).all()
    assert row["c_shape"].tolist() == [30, 40]


def test_steps_behind_views_work_on_their_fields():
    """They see a view, or the array of several."""
    single = Views(into={"a": View(steps=(op.CenterCrop(size=(20, 20)),)), "b": DINO.into["local"]})
    steps = [op.Decode(), single, op.Normalize(field="a"), Cast(field="b", dtype="int32")]

    row, plain = run_fields(steps), run_fields([op.Decode(), single])

    assert (row["a"].dtype, row["b"].dtype, row["b"].shape) == (np.float32, np.int32, (4, 24, 24, 3))
    assert np.array_equal(row["b"], plain["b"])


def test_a_view_may_have_several_stages():
    """Geometry behind a step on pixels works on what that has made, as outside of views."""
    steps = (
        op.CenterCrop(size=(90, 80)),
        op.Gray(),
        op.CenterCrop(size=(70, 60)),
        op.Resize(size=(20, 30)),
        op.Gray(channels=1),
    )

    row = run_fields(
        [
            op.Decode(),
            Views(
                into={"a": View(count=2, steps=steps), "b": View(steps=(*steps, op.Normalize(mean=(0.5,), std=(0.5,))))}
            ),
        ]
    )

    plain = run_fields([op.Decode(), *steps])["image"]
    assert np.array_equal(row["a"], [plain, plain])
    assert np.allclose(row["b"], plain / 127.5 - 1, atol=1e-6)


def darker(sample, rng):
    """Darken the only field of a view."""
    (name,) = sample
    return {name: sample[name] // 2 + rng.integers(0, 2, dtype=np.uint8)}


def test_a_function_gets_the_image_of_one_view_and_numbers_of_its_own():
    """It sees no other field; its generator is that of the view."""
    call = Call(function=f"{__name__}:darker")
    views = Views(into={"image": View(count=2, steps=(op.CenterCrop(size=(20, 20)), call)), "two": View(steps=GLOBAL)})

    row = run_fields([op.Decode(), views])

    assert np.array_equal(row["image"][0] // 2, row["image"][1] // 2) or row["image"][0].max() < 255
    assert np.abs(row["image"][0].astype(int) - row["image"][1]).max() <= 1
    assert np.array_equal(row["two"], alone("two", 0, GLOBAL))


def test_a_failure_names_the_view_and_the_step():
    """A sample that one view cannot use is bad; one that no decoder reads says only that."""
    views = replace(DINO, into={**DINO.into, "local": View(count=2, steps=(op.Rotate(degrees=(1, 9)), *LOCAL))})
    wide = encode(np.zeros((1, 32_767, 3), np.uint8), ".png")

    with pytest.raises(SampleUndecodable, match=r'^"rotate" of view local\[0\]: .* cannot be rotated'):
        run_fields([op.Decode(), views], wide)
    with pytest.raises(SampleUndecodable, match=r"^truncated: "):
        run_fields([op.Decode(), views], LARGE[: len(LARGE) // 2])


def test_draws_are_noted_for_each_view():
    """One note for the step has the random steps of each view, and changes no byte."""
    notes = []
    row = run_fields([op.Decode(), DINO, op.RandomFlip(field="image")][:2], draws=notes)
    ((drawn,),) = notes

    assert list(drawn) == ["image[0]", "image[1]", *(f"local[{place}]" for place in range(4))]
    assert [step["op"] for step in drawn["image[1]"]] == ["random_resized_crop", "random_flip"]
    assert drawn["local[0]"][0]["crop"] != drawn["local[1]"][0]["crop"]
    assert np.array_equal(row["local"], run_fields([op.Decode(), DINO])["local"])


def test_a_cache_keeps_what_is_in_front_of_random_views():
    """Views without chance are kept themselves."""
    certain = Views(into={"a": View(steps=(op.CenterCrop(size=(8, 8)),)), "b": View(steps=(op.Resize(size=(4, 4)),))})

    assert cut_of([op.Decode(), op.Resize(shorter_side=9), DINO]) == 2
    assert cut_of([op.Decode(), certain, op.RandomFlip(field="a")]) == 2
    assert cut_of([op.Decode(), replace(certain, into={"a": View(steps=(op.Normalize(),))})]) == 1
    assert (DINO.is_random, certain.is_random) == (True, False)
    assert cropped_files([op.Decode(), DINO])
    assert not cropped_files([op.Decode(), Views(into={"a": View(steps=(op.Gray(),))})])


def test_a_cache_of_decoded_samples_changes_no_view():
    """The pixels that it keeps are of the whole image; each epoch draws views of its own."""
    steps = [op.Decode(scale="off"), DINO]
    cut = cut_of(steps)
    first = Pipeline(FILE, steps[:cut], 0, has_rows=False)
    columns = list(first.columns.values())
    kept = first.make({"image": memoryview(LARGE), "label": 7}, 0, 0, 0)
    rows = [run_fields(steps[cut:], np.array(kept["image"]), epoch, columns=columns) for epoch in range(2)]

    for epoch, row in enumerate(rows):
        whole = run_fields(steps, epoch=epoch)
        assert all(np.array_equal(row[name], whole[name]) for name in ("image", "local"))
    assert not np.array_equal(rows[0]["image"], rows[1]["image"])


@pytest.mark.parametrize("orientation", range(2, 9))
def test_views_are_of_the_upright_image(orientation):
    """The tag of the camera counts before the crops, decoded together or alone, and once."""
    turn = TURN_OF_ORIENTATION[orientation]
    image = photo(300, 400, seed=5)
    stored = image[:: -1 if turn.vertical else 1, :: -1 if turn.horizontal else 1]
    stored = np.ascontiguousarray(stored.swapaxes(0, 1) if turn.transpose else stored)
    steps = [op.Decode(scale="off"), DINO]

    upright, tagged = run_fields(steps, jpeg(image)), run_fields(steps, jpeg_with_exif(jpeg(stored), orientation))

    for name in ("image", "local"):
        assert np.abs(upright[name].astype(int) - tagged[name]).mean() < 2


def test_pixels_of_a_cache_give_the_same_views():
    """Whole images are decoded once for all views, and kept once."""
    kept = KeptFiles((), ["image"])
    kept.decoded.begin(lambda _size: True)
    first = run_fields([op.Decode(), DINO], kept=kept)
    again = run_fields([op.Decode(), DINO], kept.decoded.found["image"], kept=kept)

    for name in ("image", "local"):
        assert np.array_equal(first[name], again[name])
        assert np.array_equal(first[name], run_fields([op.Decode(), DINO])[name])


def test_plain_forms():
    """Messages carry the step whole; a fingerprint has no option that changes no bytes."""
    assert step_from_plain(step_to_plain(DINO)) == DINO
    named = named_by_content(DINO, {})
    assert "probability" not in named["into"]["image"]["steps"][0]
    assert "probability" in named["into"]["local"]["steps"][1]
    with pytest.raises(ValueError, match="the options"):
        step_from_plain({**step_to_plain(DINO), "into": {"a": {"steps": []}}})


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (DINO, "a view has no views of its own"),
        (op.Decode(), "decodes once for all views"),
        (op.Follow(mask="mask"), "no mask, boxes or points can follow it"),
        (PadBatch(max_shape=(9, 9, 3)), 'behind "views"'),
    ],
)
def test_some_steps_are_refused_inside_of_views(inner, reason):
    """The problem has the key of the step, and the reason."""
    with pytest.raises(OptionsInvalid) as refused:
        Views(into={"a": View(steps=GLOBAL), "b": View(steps=(*GLOBAL, inner))})

    ((key, text),) = refused.value.found
    assert key == ("into", "b", "steps", 2)
    assert reason in text


def problems(*steps, columns=FILE):
    """The keys and texts of the problems of a pipeline."""
    check = StepCheck(columns)
    for place, step in enumerate(steps):
        check.check_step(place, step)
    return [(problem.key, problem.text) for problem in check.finish()]


@pytest.mark.parametrize(
    ("steps", "key", "text"),
    [
        ((op.Resize(shorter_side=96),), (1, "into", "local", "steps", 0, "size"), "uint8[?,?,3]; set size"),
        ((op.RandomCrop(size=(9, 9), probability=0.5),), (1, "into", "local", "steps", 0, "probability"), "set prob"),
        ((op.Gray(),), (1, "into", "local", "steps"), 'add "random_resized_crop"'),
        ((op.Gray(channels=1), op.Normalize()), (1, "into", "local", "steps", 1, "mean"), "1 channel"),
        ((op.RandomFlip(field="pic"),), (1, "into", "local", "steps", 0, "field"), "a sample has 'image'"),
        (
            (Call(function="a:b", outputs={"score": "float32"}),),
            (1, "into", "local", "steps", 0),
            "makes 'score', and a view has its image alone",
        ),
    ],
)
def test_problems_of_views_have_the_key_of_the_option(steps, key, text):
    """What a step inside says is found at its option, and nothing follows from it."""
    (found,) = problems(op.Decode(), Views(into={"local": View(count=8, steps=steps)}), op.Normalize(field="local"))

    assert found[0] == key
    assert text in found[1]


def test_problems_of_the_step_itself():
    """Masks that follow, a name that is there already, and what is no image are named."""
    columns = [*FILE, Column("mask", "encoded")]
    followed, _mask = problems(op.Decode(), op.Follow(mask="mask"), DINO, columns=columns)
    assert followed[0] == (2,)
    assert "each view would need its own" in followed[1]
    (taken,) = problems(op.Decode(), Views(into={"label": View(steps=GLOBAL)}))
    assert "would make a field 'label'" in taken[1]
    (undecoded,) = problems(DINO)
    assert 'must be { op = "decode" }' in undecoded[1]
    with pytest.raises(StepInvalid, match='cannot come after "views"'):
        columns_after(FILE, [op.Decode(), DINO, op.Normalize()])
    with pytest.raises(OptionsInvalid, match="name 1 to"):
        Views(into={})


def planned(*boxes, factor=1):
    """Views whose crops are these, of a photograph of 500 x 400."""
    header = probe_file(memoryview(jpeg(photo(400, 500))))
    pipeline = Pipeline(FILE, [op.Decode(), Views(into={"a": View(count=len(boxes), steps=GLOBAL)})], 0)
    (group,) = pipeline.plan_views({"image": memoryview(jpeg(photo(400, 500)))}, 0, 0)
    return [
        one._replace(plan=one.plan._replace(header=header, decoding=one.plan.decoding._replace(factor=factor, box=box)))
        for one, box in zip(group.views, boxes, strict=True)
    ]


def test_the_planner_takes_what_costs_less():
    """Crops that overlap are decoded once; small ones far apart alone, from their access points."""
    corners = Cut(0, 0, 60, 60), Cut(340, 440, 60, 60)
    large = Cut(0, 0, 300, 400), Cut(90, 90, 300, 400)

    def is_together(boxes, **known):
        (group,) = stages.plan_groups(planned(*boxes), **known)
        return group.is_together

    assert is_together(large, cuts=True, has_points=True)
    assert is_together(large, cuts=True, has_points=False)
    assert not is_together(corners, cuts=True, has_points=True)
    assert is_together(corners, cuts=False, has_points=False)
    (one,) = stages.plan_groups(planned(large[0]), cuts=True, has_points=True)
    assert not one.is_together
