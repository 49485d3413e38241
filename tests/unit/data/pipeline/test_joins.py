"""Samples that join one: where their pixels and objects go, and which random numbers they draw."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from batchd.data.pipeline.augment.options import Affine, Choose
from batchd.data.pipeline.effects import StepInvalid, effect
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.options import CenterCrop, Follow, RandomFlip, RandomResizedCrop, Resize
from batchd.data.pipeline.join.options import SAMPLES_MAX, CopyPaste, MixUp, Mosaic
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.randomness import EPOCH_BITS
from batchd.data.pipeline.shapes.options import Pack
from batchd.data.pipeline.views.options import View, Views
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.values import Value
from support.steps import check_steps

SIZE = 40, 60
COLUMNS = (
    Column("image", shape=(None, None, 3)),
    Column("boxes", dtype="float32", shape=(None, 4)),
    Column("classes", dtype="int64", shape=(None,)),
    Column("masks", shape=(None, None, None)),
    Column("keypoints", dtype="float32", shape=(None, 1, 3)),
    Column("mask", shape=(None, None)),
    Column("points", dtype="float32", shape=(None, 2)),
    Column("id", dtype="int64"),
)
FOLLOW = Follow(boxes="boxes", labels=("classes",), masks="masks", keypoints="keypoints", mask="mask", points="points")
SAMPLES = 9


def sample_of(number: int, random: np.random.Generator) -> dict[str, Value]:
    """An image of one colour, whose objects are boxes, and know of which sample they are."""
    height, width = random.integers(12, 70, 2)
    count = int(random.integers(0, 5))
    low = (random.integers(0, [width - 6, height - 6], (count, 2))).astype(np.float32)
    high = low + random.integers(3, 6, (count, 2))
    masks = np.zeros((count, height, width), np.uint8)
    for mask, (left, top, right, bottom) in zip(masks, np.hstack([low, high]).astype(int), strict=True):
        mask[top:bottom, left:right] = 1
    middles = (low + high) / 2
    return {
        "image": np.full((height, width, 3), number + 1, np.uint8),
        "boxes": np.hstack([low, high]),
        "classes": 100 * number + np.arange(count),
        "masks": masks,
        "keypoints": np.hstack([middles, np.full((count, 1), 2, np.float32)])[:, None].astype(np.float32),
        "mask": np.full((height, width), number + 1, np.uint8),
        "points": middles,
        "id": np.int64(number),
    }


class Given:
    """Samples in memory; those in ``bad`` cannot be read, and the next one stands in."""

    def __init__(self, seed: int = 0, bad: Sequence[int] = ()) -> None:
        random = np.random.default_rng(seed)
        self.samples = [sample_of(number, random) for number in range(SAMPLES)]
        self.bad, self.told, self.picked = bad, list[int](), list[int]()

    def others_of(self, _epoch: int, _whose: int, pick: int, _near: int | None) -> Iterator[int]:
        self.picked.append(pick)
        yield from ((pick + attempt) % SAMPLES for attempt in range(3))

    def read_other(self, _epoch: int, sample: int) -> Mapping[str, Value]:
        if sample in self.bad:
            raise SampleUnreadable("gone")
        return self.samples[sample]

    def other_is_bad(self, sample: int, _error: SampleUndecodable | SampleUnreadable) -> None:
        self.told.append(sample)

    def values_stay(self) -> bool:
        return False

    def others_end(self) -> None:
        pass

    def shown_name(self, sample: int) -> str:
        return f"{sample}.jpg"


def made(
    steps: Sequence[StepOptions], sample: int = 0, given: Given | None = None, epoch: int = 0
) -> tuple[dict[str, np.ndarray], list[dict[str, object]]]:
    """The values of a sample after the steps, and what its random steps drew."""
    given = given or Given()
    pipeline = Pipeline(COLUMNS, steps, 3, has_rows=False, others=given)
    drew = pipeline.note_draws()
    values = pipeline.make(given.samples[sample], epoch, sample, 0)
    given.picked.clear()
    return {name: np.array(value) for name, value in values.items()}, list(drew)


def joined(drew: Mapping[str, object]) -> list[int]:
    """The other samples that a step has noted."""
    return [sample for sample, _name in drew["with"]]


def by_ultralytics(parts: Sequence[Mapping[str, Value]], size: tuple[int, int], centre: Sequence[int]):
    """Canvas, boxes and classes by the corners that ultralytics' Mosaic computes for each place."""
    (height, width), (xc, yc) = size, centre
    canvas, boxes, classes = np.full((2 * height, 2 * width, 3), 114, np.uint8), [], []
    for place, part in enumerate(parts):
        image = part["image"]
        h, w = image.shape[:2]
        x1a, x2a = (max(xc - w, 0), xc) if place in (0, 2) else (xc, min(xc + w, 2 * width))
        y1a, y2a = (max(yc - h, 0), yc) if place in (0, 1) else (yc, min(yc + h, 2 * height))
        x1b = w - (x2a - x1a) if place in (0, 2) else 0
        y1b = h - (y2a - y1a) if place in (0, 1) else 0
        canvas[y1a:y2a, x1a:x2a] = image[y1b : y1b + y2a - y1a, x1b : x1b + x2a - x1a]
        moved = part["boxes"] + [x1a - x1b, y1a - y1b] * 2
        boxes.append(moved.clip(0, [2 * width, 2 * height] * 2))
        classes.append(part["classes"])
    boxes, classes = np.concatenate(boxes), np.concatenate(classes)
    has_area = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    return canvas, boxes[has_area], classes[has_area]


@pytest.mark.parametrize("seed", range(12))
def test_a_mosaic_is_that_of_ultralytics(seed):
    """The same pixels, boxes and classes for the same four samples and the same point."""
    given = Given(seed)
    values, (drew,) = made([FOLLOW, Mosaic(size=SIZE)], seed % SAMPLES, given)

    parts = [given.samples[number] for number in (seed % SAMPLES, *joined(drew))]
    canvas, boxes, classes = by_ultralytics(parts, SIZE, drew["centre"])
    assert np.array_equal(values["image"], canvas)
    assert np.array_equal(values["boxes"], boxes)
    assert np.array_equal(values["classes"], classes)
    across, down = drew["centre"]
    assert SIZE[1] / 2 <= across < 3 * SIZE[1] / 2
    assert SIZE[0] / 2 <= down < 3 * SIZE[0] / 2


@pytest.mark.parametrize("how", [{}, {"min_visible": 0.5}, {"min_area": 9.0}, {"labels": ()}])
@pytest.mark.parametrize("probability", [1.0, 0.0])
def test_boxes_alone_move_as_beside_other_followers(how, probability):
    """Those of all images at once, bit by bit."""
    step = Mosaic(size=SIZE, probability=probability)
    for sample in range(SAMPLES):
        alone, _drew = made([Follow(boxes="boxes", **{"labels": ("classes",), **how}), step], sample)
        beside, _drew = made([Follow(boxes="boxes", points="points", **{"labels": ("classes",), **how}), step], sample)
        for name in ("boxes", "classes"):
            assert (alone[name].dtype, alone[name].shape) == (beside[name].dtype, beside[name].shape)
            assert alone[name].tobytes() == beside[name].tobytes()


MOVED = Affine(scale=(0.5, 1.5), translate=(0.1, 0.1), size=SIZE, fill=(114,), interpolation="nearest")


@pytest.mark.parametrize("behind", [[], [MOVED, RandomFlip()]])
def test_all_that_follows_the_images_is_joined(behind):
    """A row of each field is of the same object, and lies on the pixels of its sample."""
    for sample in range(SAMPLES):
        values, _drew = made([FOLLOW, Mosaic(size=SIZE), *behind], sample)
        count = len(values["boxes"])
        assert {len(values[name]) for name in ("classes", "masks", "keypoints")} == {count}
        assert values["id"] == sample
        assert np.array_equal(values["mask"] > 0, values["image"][..., 0] != 114)
        for number in range(count):
            colour = values["classes"][number] // 100 + 1
            x, y, seen = values["keypoints"][number, 0]
            left, top, right, bottom = values["boxes"][number]
            if not behind:
                assert (values["image"][values["masks"][number] > 0] == colour).all()
                rows, columns = np.nonzero(values["masks"][number])
                assert [left, top, right, bottom] == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert not seen or (left <= x <= right and top <= y <= bottom)


@pytest.mark.parametrize("step", [Mosaic(size=SIZE, probability=0.0), Mosaic(size=SIZE, until_epoch=2)])
def test_a_sample_that_none_joins_is_alone_in_the_middle(step):
    """Where the step does not act by chance, and from an epoch on, for every copy of a sample."""
    given = Given()
    for sample, copy in [(0, 0), (1, 3)]:
        values, drew = made([FOLLOW, step], sample, given, copy << EPOCH_BITS | 2)
        whole = given.samples[sample]
        height, width = whole["image"].shape[:2]
        top, left = SIZE[0] - height // 2, SIZE[1] - width // 2
        assert drew == ([{"acts": False}] if step.is_random else [])
        assert values["image"].shape == (80, 120, 3)
        assert np.array_equal(values["image"][top : top + height, left : left + width], whole["image"])
        assert np.array_equal(values["boxes"], whole["boxes"] + np.float32([left, top, left, top]))
    _values, (drew,) = made([FOLLOW, Mosaic(size=SIZE, until_epoch=2)], 0, given, 1)
    assert len(joined(drew)) == 3


def test_a_row_is_the_same_whatever_was_made_before():
    """Numbers follow from seed, epoch and sample; other steps keep theirs."""
    steps = [FOLLOW, RandomResizedCrop(size=(30, 30)), Mosaic(size=SIZE), RandomFlip()]
    given = Given()
    pipeline = Pipeline(COLUMNS, steps, 3, has_rows=False, others=given)
    first = [pipeline.make(given.samples[sample], 5, sample, 0)["image"].copy() for sample in range(4)]
    for sample in reversed(range(4)):
        assert np.array_equal(pipeline.make(given.samples[sample], 5, sample, 0)["image"], first[sample])
    assert not np.array_equal(first[0], pipeline.make(given.samples[0], 6, 0, 0)["image"])
    with_join, without = (made([FOLLOW, *joins, RandomFlip()])[1][-1] for joins in ([Mosaic(size=SIZE)], []))
    assert with_join == without


def test_what_joins_is_known_before_any_pixel():
    """So that a worker can ask servers for it."""
    given = Given()
    pipeline = Pipeline(COLUMNS, [FOLLOW, Mosaic(size=SIZE)], 3, has_rows=False, others=given)
    for sample in range(SAMPLES):
        pipeline.make(given.samples[sample], 1, sample, 0)
        assert pipeline.picks(1, sample) == [(pick, None) for pick in given.picked]
        given.picked.clear()


def test_a_bad_sample_is_told_and_another_joins():
    """The stand-in is the next one, and the rest of the row is as it was."""
    good, (drew,) = made([FOLLOW, Mosaic(size=SIZE)])
    bad = joined(drew)[1]
    given = Given(bad=[bad])
    values, (again,) = made([FOLLOW, Mosaic(size=SIZE)], given=given)

    assert set(given.told) == {bad}
    assert joined(again) == [(one + 1) % SAMPLES if one == bad else one for one in joined(drew)]
    assert again["centre"] == drew["centre"]
    height, width = drew["centre"][1], drew["centre"][0]
    assert np.array_equal(values["image"][:height, :width], good["image"][:height, :width])


def test_a_place_without_a_good_sample_stays_empty():
    """All of the stand-ins are bad."""
    given = Given(bad=range(SAMPLES))
    values, (drew,) = made([FOLLOW, Mosaic(size=SIZE)], given=given)

    assert drew["with"] == []
    assert set(np.unique(values["image"])) == {1, 114}
    assert len(given.told) == 9


def test_an_affine_of_a_size_makes_what_a_crop_behind_it_keeps():
    """Bit by bit, with all that follows."""
    whole = Affine(degrees=(-20, 20), scale=(0.5, 1.5), translate=(0.2, 0.1), shear_x=(-5, 5), fill=(9,))
    image = np.random.default_rng(0).integers(0, 256, (61, 50, 3), np.uint8)
    for size in [(30, 30), (31, 21), (61, 50)]:
        for method in ("linear", "nearest"):
            steps = replace(whole, interpolation=method), replace(whole, interpolation=method, size=size)
            given = Given()
            given.samples[1] |= {"image": image, "mask": image[..., 0], "masks": np.ones((2, 61, 50), np.uint8)}
            given.samples[1] |= {"boxes": np.float32([[3, 4, 20, 30], [5, 30, 45, 60]]), "classes": np.arange(2)}
            given.samples[1] |= {"keypoints": np.ones((2, 1, 3), np.float32)}
            cropped, _ = made([FOLLOW, steps[0], CenterCrop(size=size)], 1, given)
            at_once, _ = made([FOLLOW, steps[1]], 1, given)
            for name, value in cropped.items():
                if name in ("boxes", "keypoints", "points"):
                    np.testing.assert_allclose(at_once[name], value, atol=1e-4)
                else:
                    assert np.array_equal(at_once[name], value), name


def test_joined_fields_have_as_many_rows_as_there_are_objects():
    """A step that joins samples says so on paper."""
    columns = effect(FOLLOW, {column.name: column for column in COLUMNS})
    after = effect(Mosaic(size=SIZE), columns)

    assert after["image"].shape == (80, 120, 3)
    assert after["masks"].shape == (None, 80, 120)
    assert (after["boxes"].shape, after["classes"].shape, after["points"].shape) == ((None, 4), (None,), (None, 2))


def test_what_cannot_be_joined_is_refused():
    """Files that are read later, rows of packs, views, and too many samples."""
    file = {**{column.name: column for column in COLUMNS}, "other": Column("other", "encoded")}
    with pytest.raises(StepInvalid, match=r"the file of 'other' is gone: put its \"decode\" in front"):
        effect(Mosaic(size=SIZE), file)
    three = [Mosaic(size=(8, 8))] * 3
    problem = check_steps(COLUMNS, [*three, CenterCrop(size=(8, 8))])[0]
    assert f"made of 64 samples by then, and {SAMPLES_MAX} are the most" in problem
    packed = [Mosaic(size=SIZE), Pack(field="classes", length=9)]
    assert any('"mosaic" joins several to one' in one for one in check_steps(COLUMNS, packed))
    with pytest.raises(ValueError, match='choose cannot have "mosaic"'):
        Choose(of=(Mosaic(size=SIZE),))
    with pytest.raises(ValueError, match='"mosaic" cannot be inside of "views"'):
        Views(into={"a": View(steps=(Mosaic(size=SIZE),))})
    with pytest.raises(ValueError, match="affine with size acts on every image"):
        Affine(size=SIZE, probability=0.5)
    image = [Resize(size=(8, 8)), Mosaic(size=(8, 8)), Affine(size=(8, 8))]
    assert check_steps(COLUMNS[:1], image) == []


# --- mixup and copy_paste -------------------------------------------------------------------------

SAME = [FOLLOW, CenterCrop(size=SIZE)]
"""Images of one size, with all that follows."""


@pytest.mark.parametrize("sample", range(SAMPLES))
def test_mixup_blends_as_ultralytics_and_keeps_the_objects_of_both(sample):
    """Levels are rounded down; the mask is that of the larger share."""
    given = Given()
    values, (drew,) = made([*SAME, MixUp(alpha=2)], sample, given)
    (other,) = joined(drew)
    own, its = (made(SAME, one, given)[0] for one in (sample, other))

    share = drew["share"]
    assert share * 256 == int(share * 256)
    assert np.array_equal(values["image"], (own["image"] * share + its["image"] * (1 - share)).astype(np.uint8))
    for name in ("boxes", "classes", "masks", "keypoints", "points"):
        assert np.array_equal(values[name], np.concatenate([own[name], its[name]])), name
    assert np.array_equal(values["mask"], (own if share >= 0.5 else its)["mask"])
    assert values["id"] == sample


@pytest.mark.thorough
def test_the_shares_of_mixup_are_those_of_a_beta_distribution():
    """Beta(alpha, alpha) has the mean 1/2 and the variance 1 / (8 alpha + 4)."""
    for alpha in (1, 8, 32):
        given = Given()
        pipeline = Pipeline(COLUMNS, [*SAME, MixUp(alpha=alpha)], 3, has_rows=False, others=given)
        drew = pipeline.note_draws()
        shares = []
        for sample in range(800):
            pipeline.make(given.samples[sample % SAMPLES], 0, sample, 0)
            shares.append(drew[0]["share"])
        assert abs(np.mean(shares) - 0.5) < 0.04
        assert 0.85 < np.var(shares) * (8 * alpha + 4) < 1.15


def by_ultralytics_pasting(own, its, fraction):
    """Which objects are pasted: those that cover less than 0.3 of each box, the least first."""
    if not len(its["boxes"]):
        return []
    covers = np.zeros((len(its["boxes"]), max(1, len(own["boxes"]))))
    for number, one in enumerate(its["boxes"]):
        for below, box in enumerate(own["boxes"]):
            wide = min(one[2], box[2]) - max(one[0], box[0])
            high = min(one[3], box[3]) - max(one[1], box[1])
            area = (box[2] - box[0]) * (box[3] - box[1])
            covers[number, below] = max(wide, 0) * max(high, 0) / area
    may = np.nonzero((covers < 0.3).all(1))[0]
    may = may[np.argsort(covers.max(1)[may], kind="stable")]
    return may[: round(fraction * len(may))]


@pytest.mark.parametrize("paste", ["other", "mirrored"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_objects_are_pasted_as_by_ultralytics_and_cover_what_is_below(paste, fraction):
    """Masks and boxes below lose what is covered, and none is left without one."""
    pasted = lost = 0
    for sample in range(SAMPLES):
        for seed in range(4):
            given = Given(seed)
            step = CopyPaste(paste=paste, fraction=fraction)
            values, (*_others, drew) = made([*SAME, step], sample, given)
            own = made(SAME, sample, given)[0]
            mirror = [*SAME, RandomFlip(probability=1.0)]
            its = made(SAME, joined(drew)[0], given)[0] if paste == "other" else made(mirror, sample, given)[0]
            chosen = by_ultralytics_pasting(own, its, fraction)

            assert drew["pasted"] == len(chosen)
            covered = its["masks"][chosen].any(axis=0) if len(chosen) else np.zeros(SIZE, bool)
            assert np.array_equal(values["image"], np.where(covered[..., None], its["image"], own["image"]))
            assert np.array_equal(values["mask"], np.where(covered, its["mask"], own["mask"]))
            below = own["masks"] * ~covered
            is_left = (below > 0).any(axis=(1, 2)) | ~(own["masks"] > 0).any(axis=(1, 2))
            assert np.array_equal(values["masks"], np.concatenate([below[is_left], its["masks"][chosen]]))
            assert np.array_equal(values["classes"], np.concatenate([own["classes"][is_left], its["classes"][chosen]]))
            for box, mask in zip(values["boxes"], values["masks"], strict=True):
                rows, columns = np.nonzero(mask)
                assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            pasted += len(chosen)
            lost += (below.sum() < own["masks"].sum()).item()
    assert pasted > 20
    assert lost or (paste, fraction) != ("other", 1.0)


def test_a_visible_point_below_what_is_pasted_becomes_a_hidden_one():
    """COCO's visibility 1; its place stays."""
    given = Given()
    own, its = given.samples[:2]
    for one, low in ((own, 4), (its, 5)):
        masks = np.zeros((1, 20, 20), np.uint8)
        masks[0, low : low + 9, low : low + 9] = 1
        one |= {"image": np.full((20, 20, 3), low, np.uint8), "mask": masks[0], "masks": masks, "classes": np.arange(1)}
        one |= {"boxes": np.float32([[low, low, low + 9, low + 9]]), "keypoints": np.float32([[[7, 7, 2]]])}
    columns = [replace(one, shape=(20, 20, 3)) if one.name == "image" else one for one in COLUMNS]
    pipeline = Pipeline(
        columns, [FOLLOW, CopyPaste(fraction=1, max_overlap=1.0)], 3, has_rows=False, others=_Second(given)
    )
    values = pipeline.make(own, 0, 0, 0)

    assert values["keypoints"].tolist() == [[[7, 7, 1]], [[7, 7, 2]]]
    assert values["boxes"].tolist() == [[4, 4, 13, 13], [5, 5, 14, 14]]
    assert values["masks"].sum(axis=(1, 2)).tolist() == [81 - 64, 81]


class _Second(Given):
    """The second sample joins every one."""

    def __init__(self, given: Given) -> None:
        super().__init__()
        self.samples = given.samples

    def others_of(self, _epoch: int, _whose: int, _pick: int, _near: int | None) -> Iterator[int]:
        yield 1


def test_mixup_of_mosaics_names_all_that_joined():
    """The other one is a mosaic, too, of others by numbers of its own."""
    steps = [FOLLOW, Mosaic(size=SIZE), CenterCrop(size=SIZE), MixUp()]
    given = Given()
    _values, (mosaic, mixup) = made(steps, 0, given)
    pipeline = Pipeline(COLUMNS, steps, 3, has_rows=False, others=given)

    assert (len(joined(mosaic)), len(joined(mixup))) == (3, 4)
    assert sorted(pick % SAMPLES for pick, _near in pipeline.picks(0, 0)) == sorted(joined(mosaic) + joined(mixup))
    pipeline.make(given.samples[0], 0, 0, 0)
    assert sorted(given.picked) == sorted(pick for pick, _near in pipeline.picks(0, 0))


@pytest.mark.parametrize("step", [MixUp(), CopyPaste()])
def test_where_none_joins_the_sample_stays(step):
    """Because it does not act, or because no other one is good."""
    before, _none = made(SAME)
    for one, given in [(replace(step, probability=0.0), Given()), (step, Given(bad=range(SAMPLES)))]:
        values, _drew = made([*SAME, one], given=given)
        assert all(np.array_equal(values[name], before[name]) for name in before)


def test_images_of_several_sizes_are_not_laid_on_each_other():
    """And no object is pasted without a mask."""
    columns = effect(FOLLOW, {column.name: column for column in COLUMNS})
    for step in (MixUp(), CopyPaste()):
        with pytest.raises(StepInvalid, match="lays images on each other"):
            effect(step, columns)
    assert effect(CopyPaste(paste="mirrored"), columns)["boxes"].shape == (None, 4)
    boxes = effect(Follow(boxes="boxes"), {column.name: column for column in COLUMNS})
    with pytest.raises(StepInvalid, match="pastes objects by their masks, and none follow 'image'"):
        effect(CopyPaste(paste="mirrored"), boxes)
