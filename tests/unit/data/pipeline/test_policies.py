"""The steps that draw other changes, beside their tables, and beside timm and torchvision."""

import json
import math
from collections import Counter

import numpy as np
import pytest

from batchd.data.pipeline.augment import exact, policies
from batchd.data.pipeline.augment import options as augment
from batchd.data.pipeline.augment.policies import (
    AUGMIX,
    AUTO_AUGMENT,
    POLICIES,
    RAND_AUGMENT,
    SIGNED,
    TRIVIAL_AUGMENT,
    PolicyChanges,
)
from batchd.data.pipeline.effects import StepInvalid
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.image.opencv import Scratch
from batchd.data.pipeline.options import step_from_plain, step_to_plain
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.sample_fields import columns_after
from batchd.data.samples.columns import Column
from support.images import encode, photo
from support.pipelines import image_pipeline, run, run_fields, run_on_pixels

PHOTO = photo(48, 64)
FILE = encode(PHOTO, ".png")
SIZE = (48, 64)


def notes_of(step, samples=400):
    """Return what a step draws for each of many samples."""
    pipeline = image_pipeline([op.Decode(), op.Resize(size=SIZE), step])
    draws, seen = pipeline.note_draws(), []
    for sample in range(samples):
        run(pipeline, FILE, sample=sample)
        seen.append(dict(draws[0]))
    return seen


def changed(name, number, image=PHOTO, **options):
    """Return what one change makes of an image."""
    changes = PolicyChanges(augment.RandAugment(**options), Scratch(), is_bgr=False)
    return changes.of(name, number, image.shape).make(image.copy(), None)


# --- numbers --------------------------------------------------------------------------------------


def test_logarithms_need_no_library():
    """They are within the last bits, from the smallest number that is drawn."""
    for number in [2.0**-53, *np.geomspace(1e-12, 1e4, 500).tolist(), 0.5, 1.0]:
        assert exact.logarithm(number) == pytest.approx(math.log(number), rel=1e-14, abs=1e-15)


def test_normal_numbers_are_normal():
    """Mean, deviation, and how many lie beyond two deviations."""
    random = SampleRandom(0)
    random.start(0, 0, 0)
    drawn = np.array([exact.normal(random.random) for _ in range(20_000)])

    assert abs(drawn.mean()) < 0.03
    assert drawn.std() == pytest.approx(1, abs=0.02)
    assert (np.abs(drawn) > 2).mean() == pytest.approx(0.0455, abs=0.006)
    assert abs((drawn**3).mean()) < 0.1


def test_rand_augment_draws_each_change_equally_often():
    """Each acts half of the time; the strength is normal, and signed in both directions."""
    seen = [one for note in notes_of(augment.RandAugment(), 1500) for one in note["operations"]]

    assert len(seen) == pytest.approx(1500, rel=0.08)
    counts = Counter(name for name, _number in seen)
    assert counts.keys() == RAND_AUGMENT.keys()
    assert min(counts.values()) > 60
    assert max(counts.values()) < 145
    angles = np.array([number for name, number in seen if name == "rotate"])
    assert 0.3 < (angles > 0).mean() < 0.7
    assert np.abs(angles).mean() == pytest.approx(27, abs=0.5)
    assert np.abs(angles).std() == pytest.approx(1.5, abs=0.4)


def test_rand_augment_without_deviation_has_one_strength():
    """The options of the step reach the changes."""
    step = augment.RandAugment(count=3, magnitude=5, deviation=0, operation_probability=1)

    for note in notes_of(step, 100):
        assert len(note["operations"]) == 3
        for name, number in note["operations"]:
            share = {"rotate": 15, "shear_x": 0.15, "translate_x": 14.4, "translate_y": 10.8}.get(name)
            assert share is None or abs(number) == pytest.approx(share)
            assert {"posterize": 2, "solarize": 128, "solarize_add": 55}.get(name, number) == number
            assert name != "color" or number in (0.55, 1.45)


def test_trivial_augment_draws_one_change_of_any_strength():
    """All 14 are drawn, and their strengths are those of 31 steps."""
    seen = [note["operations"] for note in notes_of(augment.TrivialAugment(), 1200)]

    assert {len(one) for one in seen} == {1}
    counts = Counter(name for ((name, _number),) in seen)
    assert counts.keys() == TRIVIAL_AUGMENT.keys() - {"invert"}
    assert min(counts.values()) > 50
    angles = {abs(number) for ((name, number),) in seen if name == "rotate"}
    assert angles <= {4.5 * strength for strength in range(31)}
    assert len(angles) > 20


@pytest.mark.parametrize("policy", POLICIES)
def test_auto_augment_makes_the_changes_of_one_policy(policy):
    """Every policy is drawn, its changes act as often as the table says, both ways."""
    table, acted = POLICIES[policy], Counter()
    for note in notes_of(augment.AutoAugment(policy=policy), 1000):
        names = [name for name, _number in note["operations"]]
        fitting = [
            place
            for place, pair in enumerate(table)
            if names in ([], [pair[0][0]], [pair[1][0]], [pair[0][0], pair[1][0]])
        ]
        assert fitting
        acted.update(names)
    expected = Counter()
    for pair in table:
        for name, chance, _strength in pair:
            expected[name] += chance * 1000 / len(table)
    for name, count in expected.items():
        assert acted[name] == pytest.approx(count, abs=4 * math.sqrt(count) + 1), name


def test_strengths_are_those_of_the_papers():
    """Ends of each scale, for an image of 331 x 662 pixels."""
    shape = (331, 662, 3)
    trivial, auto, mix = (
        {name: number(1.0, shape) for name, number in space.items()}
        for space in (TRIVIAL_AUGMENT, AUTO_AUGMENT, AUGMIX)
    )

    assert (trivial["shear_x"], trivial["translate_x"], trivial["rotate"], trivial["color"]) == (0.99, 32, 135, 1.99)
    assert (trivial["posterize"], trivial["solarize"]) == (2, 0)
    assert (auto["shear_y"], auto["translate_x"], auto["translate_y"], auto["rotate"]) == (0.3, 300, 150, 30)
    assert (auto["posterize"], auto["brightness"], mix["posterize"], mix["translate_y"]) == (4, 1.9, 0, 110)
    assert [round(AUTO_AUGMENT["posterize"](strength / 9, shape)) for strength in range(10)] == [
        8, 8, 7, 7, 6, 6, 5, 5, 4, 4,
    ]  # fmt: skip


# --- pixels ---------------------------------------------------------------------------------------


def test_changes_are_about_the_corner_or_the_middle():
    """A shear leaves the first row, a translation moves whole pixels, to the right and down."""
    assert np.array_equal(changed("shear_x", 0.3, interpolation="nearest")[0], PHOTO[0])
    assert np.array_equal(changed("shear_y", 0.3, interpolation="nearest")[:, 0], PHOTO[:, 0])
    assert np.array_equal(changed("translate_x", 5)[:, 5:], PHOTO[:, :-5])
    assert (changed("translate_x", 5)[:, :5] == 128).all()
    assert np.array_equal(changed("translate_y", -5)[:-5], PHOTO[5:])
    assert np.array_equal(changed("rotate", 180), PHOTO[::-1, ::-1])
    assert np.array_equal(changed("identity", 0), PHOTO)


def test_solarize_add_brightens_the_dark_levels():
    """Levels from 128 on stay."""
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)

    expected = [min(255, level + 110) if level < 128 else level for level in range(256)]
    assert changed("solarize_add", 110, levels).ravel().tolist() == expected
    assert changed("posterize", 0, levels).max() == 0


def test_followers_are_moved_by_drawn_changes():
    """A bright dot and its point stay together, whatever is drawn."""
    image = np.zeros((48, 64, 3), np.uint8)
    image[20:25, 30:35] = 255
    columns = [Column("image", shape=image.shape), Column("points", dtype="float32", shape=(1, 2))]
    values = {"image": image, "points": np.array([[32.5, 22.5]], np.float32)}
    step, moved = augment.RandAugment(operation_probability=1, magnitude=5, fill=(0,)), 0
    for sample in range(60):
        fields = run_fields(columns, [op.Follow(points="points"), step], values, sample)
        bright = fields["image"][..., 0] > (fields["image"][..., 0].min() // 2 + fields["image"][..., 0].max() // 2)
        if bright.mean() > 0.1 or not bright.any():  # inverted, or gone
            continue
        middle = np.array([axis.mean() for axis in np.nonzero(bright)[::-1]]) + 0.5
        assert np.abs(fields["points"][0] - middle).max() < 1
        moved += np.abs(middle - (32.5, 22.5)).max() > 2
    assert moved > 15


def test_images_of_other_channels_are_refused():
    """A policy needs colours, or grey."""
    for step in (augment.RandAugment(), augment.AutoAugment(), augment.TrivialAugment(), augment.AugMix()):
        with pytest.raises(StepInvalid, match="is for images of 1 or 3 channels"):
            columns_after_one(step, (4, 4, 4))
        assert columns_after_one(step, (4, 5, 1)).shape == (4, 5, 1)
        for sample in range(30):
            run_on_pixels([step], PHOTO[..., :1], sample=sample)


def columns_after_one(step, shape):
    """Return the column of an image after a step; without it, the first problem."""
    from batchd.data.pipeline.effects import effect  # noqa: PLC0415  it shadows no other here

    return effect(step, {"image": Column("image", shape=shape)})["image"]


def test_augmix_is_a_mixture():
    """Weights are even numbers' gaps times an even number, and the mixture is rounded once."""
    shares, gaps = [], []
    for note in notes_of(augment.AugMix(), 400):
        assert len(note["chains"]) == len(note["weights"]) == 3
        assert all(1 <= len(chain) <= 3 for chain in note["chains"])
        shares.append(sum(note["weights"]))
        gaps.append(note["weights"][0] / max(shares[-1], 1e-9))
    assert np.mean(shares) == pytest.approx(0.5, abs=0.06)
    assert np.mean(gaps) == pytest.approx(1 / 3, abs=0.05)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (4, 9, 9, 3), np.uint8)
    weights = [0.2, 0.05, 0.3]
    exact = 0.45 * images[0] + sum(weight * image for weight, image in zip(weights, images[1:], strict=True))

    result = policies.mixed(images[0].copy(), images[1:], weights)

    assert np.abs(result - exact).max() <= 0.51


def test_augmix_draws_weak_changes_only():
    """Of ten strengths, those up to the severity."""
    angles = {
        abs(number)
        for note in notes_of(augment.AugMix(severity=2, depth=3, width=5), 60)
        for chain in note["chains"]
        for name, number in chain
        if name == "rotate"
    }

    assert angles == {0, 3.3333}


# --- choose ---------------------------------------------------------------------------------------


def test_a_step_is_chosen_by_its_weight():
    """Weights need not add up to 1; one of 0 is never chosen."""
    step = augment.Choose(of=(augment.Invert(), augment.Solarize(), augment.Blur()), weights=(3, 0, 1))

    counts = Counter(note["chosen"] for note in notes_of(step))

    assert counts.keys() == {"invert", "blur"}
    assert counts["invert"] == pytest.approx(300, abs=30)
    evenly = Counter(
        note["chosen"] for note in notes_of(augment.Choose(of=(augment.Invert(), augment.Solarize(), augment.Blur())))
    )
    assert min(evenly.values()) > 100


def test_what_is_chosen_is_made_as_the_step_itself():
    """That holds for steps that move pixels, and for their fields; numbers are noted."""
    columns = [Column("image", shape=PHOTO.shape), Column("boxes", dtype="float32", shape=(1, 4))]
    values = {"image": PHOTO, "boxes": np.array([[3, 4, 30, 40]], np.float32)}
    choices = (op.RandomFlip(probability=1), op.Rotate(quarter_turns=(2,)), augment.Invert())
    made = [run_fields(columns, [op.Follow(boxes="boxes"), choice], values) for choice in choices]
    seen = set()
    for sample in range(30):
        fields = run_fields(columns, [op.Follow(boxes="boxes"), augment.Choose(of=choices)], values, sample)
        (which,) = [place for place, one in enumerate(made) if np.array_equal(fields["image"], one["image"])]
        assert np.array_equal(fields["boxes"], made[which]["boxes"])
        seen.add(which)
    assert seen == {0, 1, 2}


def test_sizes_of_a_choice_are_known_if_they_are_equal():
    """Crops and resizes to one size give it; else a later step does."""
    same = augment.Choose(of=(op.CenterCrop(size=(20, 30)), op.RandomCrop(size=(20, 30)), op.Resize(size=(20, 30))))
    other = augment.Choose(of=(op.CenterCrop(size=(20, 30)), op.CenterCrop(size=(10, 30))))

    assert columns_after_one(same, (40, 40, 3)).shape == (20, 30, 3)
    assert columns_after_one(other, (40, 40, 3)).shape == (None, 30, 3)
    assert columns_after_one(
        augment.Choose(of=(op.CenterCrop(size=(20, 30)),), probability=0.5), (40, 30, 3)
    ).shape == (
        None,
        30,
        3,
    )
    seen = {run_on_pixels([other, op.Resize(size=(9, 9))], PHOTO, sample=sample).tobytes() for sample in range(20)}
    assert len(seen) == 2
    for sample in range(10):
        image = run_on_pixels([augment.Blur(), same, augment.Invert()], PHOTO, sample=sample)
        assert image.shape == (20, 30, 3)


def test_a_mask_of_a_choice_has_its_size():
    """The column of what follows is worked out with the image."""
    columns = [Column("image", shape=(40, 40, 3)), Column("mask", shape=(40, 40))]
    made = columns_after(
        columns,
        [op.Follow(mask="mask"), augment.Choose(of=(op.CenterCrop(size=(20, 30)), op.CenterCrop(size=(10, 30))))],
    )

    assert made["mask"].shape == (None, 30)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"of": ()}, "choose needs 1 to 100 steps"),
        ({"of": (op.Decode(), augment.Invert())}, 'choose cannot have "decode"'),
        ({"of": (op.Normalize(),)}, 'choose cannot have "normalize"'),
        ({"of": (augment.Invert(field="other"),)}, 'choose has field = "image", and "invert" in it another one'),
        ({"of": (augment.Invert(),), "weights": (1, 2)}, "a weight for each step"),
        ({"of": (augment.Invert(),), "weights": (0,)}, "one above 0"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(options, problem):
    """The message names the step."""
    with pytest.raises(ValueError, match=problem):
        augment.Choose(**options)


def test_a_choice_is_refused_for_what_its_steps_cannot_do():
    """The problem is at the place of the step."""
    with pytest.raises(StepInvalid, match='"gray" is for images') as refused:
        columns_after_one(augment.Choose(of=(augment.Invert(), op.Gray())), (4, 4, 4))
    assert refused.value.key == ("of", 1)
    with pytest.raises(StepInvalid, match="different channels by one of gray, invert"):
        columns_after_one(augment.Choose(of=(op.Gray(channels=1), augment.Invert())), (4, 4, 3))


def test_a_choice_is_of_its_own_field():
    """Steps in it need not name it again, and survive the way to a worker."""
    step = augment.Choose(field="photo", of=(augment.Invert(), augment.Blur(sigma=(1, 2))), weights=(1, 2))

    assert [one.field for one in step.steps] == ["photo", "photo"]
    assert step_from_plain(json.loads(json.dumps(step_to_plain(step)))) == step
    assert step.is_random
    assert not augment.Choose(of=(augment.Invert(),)).is_random
    assert augment.Choose(of=(augment.Blur(),)).is_random


# --- the libraries --------------------------------------------------------------------------------


def torchvision_changes():
    """Return torchvision's function that makes one change, or skip the test."""
    torch = pytest.importorskip("torch")
    v2 = pytest.importorskip("torchvision.transforms.v2", exc_type=(ImportError, RuntimeError))

    def make(name, number, image, mode):
        maker = v2.AutoAugment(interpolation=mode, fill=128)
        given = torch.from_numpy(image).permute(2, 0, 1)
        made = maker._apply_image_or_video_transform(given, name, number, maker.interpolation, maker._fill)
        return made.permute(1, 2, 0).numpy().astype(int)

    return v2, make


NAMES = {"Color": "color", "AutoContrast": "autocontrast"}


def test_changes_are_those_of_torchvision():
    """Within 1 where all is inside; of contrast within 1, as its mean is of rounded grey levels."""
    v2, make = torchvision_changes()
    spaces = {
        "trivial": (v2.TrivialAugmentWide._AUGMENTATION_SPACE, TRIVIAL_AUGMENT, 31),
        "auto": (v2.AutoAugment._AUGMENTATION_SPACE, AUTO_AUGMENT, 10),
        "augmix": (v2.AugMix._AUGMENTATION_SPACE, AUGMIX, 10),
    }
    white = np.full_like(PHOTO, 255)
    for theirs, mine, strengths in spaces.values():
        for their_name, (numbers, is_signed) in theirs.items():
            name = NAMES.get(their_name) or their_name.replace("X", "_x").replace("Y", "_y").lower()
            assert is_signed == (name in SIGNED)
            found = numbers(strengths, *PHOTO.shape[:2])
            for strength in range(0, strengths, 3):
                number = 0.0 if found is None else float(found[strength])
                value = mine[name](strength / (strengths - 1), PHOTO.shape)
                is_factor = name in ("brightness", "color", "contrast", "sharpness")
                expected = 1 + number if is_factor else int(number) if "translate" in name else number
                close = 1 if "translate" in name else 1e-4  # their numbers are float32, cut off
                assert value == pytest.approx(255 * number if name == "solarize" else expected, abs=close), name
                threshold = float(np.float32(255 * number))  # as torch compares
                value = {"solarize": threshold, "translate_x": int(number), "translate_y": int(number)}.get(name, value)
                for is_linear in (False, True):
                    how = "linear" if is_linear else "nearest"
                    made = changed(name, value, interpolation=how).astype(int)
                    inside = (
                        changed(name, value, white, fill=(0,), interpolation=how) == 255 if name in MOVES else white > 0
                    )
                    difference = np.abs(made - make(their_name, number, PHOTO, "bilinear" if is_linear else "nearest"))[
                        inside
                    ]
                    if is_linear or name not in MOVES:
                        assert difference.max(initial=0) <= 1, name
                    else:
                        # rows of places between two pixels
                        assert (difference > 0).mean() < 0.25, name


MOVES = {"shear_x", "shear_y", "translate_x", "translate_y", "rotate"}


def test_policies_are_those_of_torchvision():
    """All 75, with their chances and strengths."""
    v2, _make = torchvision_changes()
    for policy in POLICIES:
        theirs = v2.AutoAugment(v2.AutoAugmentPolicy(policy))._policies
        found = tuple(
            tuple(
                (NAMES.get(name) or name.replace("X", "_x").replace("Y", "_y").lower(), chance, strength or 0)
                for name, chance, strength in pair
            )
            for pair in theirs
        )
        assert found == POLICIES[policy]


def test_changes_of_rand_augment_are_those_of_timm():
    """Within 1, given the magnitude and the direction, where all is inside."""
    image = pytest.importorskip("PIL.Image")
    timm = pytest.importorskip("timm.data.auto_augment", exc_type=(ImportError, RuntimeError))
    names = {
        "autocontrast": "AutoContrast",
        "color": "ColorIncreasing",
        "contrast": "ContrastIncreasing",
        "brightness": "BrightnessIncreasing",
        "sharpness": "SharpnessIncreasing",
        "posterize": "PosterizeIncreasing",
        "solarize": "SolarizeIncreasing",
        "solarize_add": "SolarizeAdd",
        "translate_x": "TranslateXRel",
        "translate_y": "TranslateYRel",
        "shear_x": "ShearX",
        "shear_y": "ShearY",
    }
    white = np.full_like(PHOTO, 255)
    assert {names.get(name, name.title()) for name in RAND_AUGMENT} == set(timm._RAND_INCREASING_TRANSFORMS)
    for name, number in RAND_AUGMENT.items():
        their_name = names.get(name, name.title())
        for magnitude in (0.0, 3.3, 9.0, 10.0):
            for sign in (1, -1) if name in SIGNED else (1,):
                timm._randomly_negate = lambda value, sign=sign: sign * value
                level = timm.LEVEL_TO_ARG[their_name]
                arguments = level(magnitude, {}) if level is not None else ()
                options = {"resample": image.Resampling.BILINEAR, "fillcolor": (128,) * 3}
                theirs = np.array(timm.NAME_TO_OP[their_name](image.fromarray(PHOTO), *arguments, **options)).astype(
                    int
                )
                # timm's translation says where pixels come from
                value = number((-sign if "translate" in name else sign) * magnitude / 10, PHOTO.shape)
                made = changed(name, value).astype(int)
                inside = changed(name, value, white, fill=(0,)) == 255 if name in MOVES else white > 0
                assert np.abs(made - theirs)[inside].max(initial=0) <= 1, (name, magnitude)
