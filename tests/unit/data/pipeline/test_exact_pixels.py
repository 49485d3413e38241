"""Integer pixels: the extension equals numpy bit for bit, and stays within its memory."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchd.data.pipeline.augment.warp import AffineMotion, matrix_about_middle
from batchd.data.pipeline.image import recolor, resample
from batchd.data.pipeline.image.geometry import Orientation, Warp
from batchd.data.pipeline.image.opencv import Scratch, cv2
from batchd.data.pipeline.image.resample import sine_and_cosine, warp
from batchd.data.samples.values import Canvas

METHODS = ("nearest", "linear", "area", "cubic", "lanczos")
RANDOM = np.random.default_rng(11)
if resample.IS_BUILT:
    from batchd.data.pipeline import _pixels
needs_extension = pytest.mark.skipif(not resample.IS_BUILT, reason="the extension was not built")


def image(*shape):
    """Noise, or black and white, which gives the largest sums."""
    return (
        RANDOM.integers(0, 256, shape, np.uint8)
        if RANDOM.random() < 0.5
        else RANDOM.choice([0, 255], shape).astype(np.uint8)
    )


def both(monkeypatch, make):
    """Return the result of the extension, and that of numpy."""
    made = []
    for is_built in (True, False):
        monkeypatch.setattr(resample, "IS_BUILT", is_built)
        made.append(make())
    return made


SIDES = st.integers(1, 90)
KINDS = ("AVX2", "no AVX2", "numpy")
FLIPS = [Orientation(False, *flips) for flips in ((True, False), (False, True), (True, True))]


def of_each_kind(make):
    """Results of the extension with AVX2 (if the processor has it) and without, and of numpy."""
    made = []
    try:
        for kind in KINDS:
            resample.IS_BUILT = kind != "numpy"
            _pixels.use_avx2(kind == "AVX2")
            made.append(make())
    finally:
        resample.IS_BUILT = True
        _pixels.use_avx2(True)
    return made


@pytest.mark.thorough
@needs_extension
@settings(max_examples=400, deadline=None)
@given(
    source=st.tuples(SIDES, st.one_of(SIDES, st.integers(1, 700))),
    target=st.tuples(SIDES, st.one_of(SIDES, st.integers(1, 300))),
    channels=st.integers(1, 4),
    method=st.sampled_from(METHODS),
    flips=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    place=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
    is_reversed=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_extension_resamples_as_numpy_does(source, target, channels, method, flips, place, is_reversed, seed):
    """Boxes of any size, place and number of channels, flipped, into part of a larger array."""
    random = np.random.default_rng(seed)
    levels = np.arange(256) if seed % 2 else np.array([0, 255])
    top, left, above, before = place
    (height, width), (rows, columns) = source, target
    whole = random.choice(levels, (height + top, width + left, channels)).astype(np.uint8)
    pixels = whole[top:, left:][:, :: -1 if is_reversed else 1]
    mirrored, turn = flips[:2], Orientation(False, *flips[2:])

    def make():
        around = np.full((rows + above + 1, columns + before + 1, channels), 7, np.uint8)
        into = around[above : above + rows, before : before + columns]
        resample.resample(pixels, into, method, mirrored, turn)
        made = into.copy()
        into[...] = 7
        assert (around == 7).all(), "the extension wrote beside the target"
        return made

    with_avx2, without, by_numpy = of_each_kind(make)
    assert np.array_equal(by_numpy, with_avx2)
    assert np.array_equal(by_numpy, without)


@needs_extension
@pytest.mark.parametrize("method", METHODS)
def test_a_flip_while_resampling_is_a_flip_afterwards(method) -> None:
    """This also holds for an image that already has the new size."""
    for size in ((30, 40), (20, 50)):
        pixels = image(*size, 3)
        upright = np.zeros((30, 40, 3), np.uint8)
        resample.resample(pixels, upright, method)
        for turn in FLIPS:

            def make(pixels=pixels, turn=turn):
                into = np.zeros((30, 40, 3), np.uint8)
                resample.resample(pixels, into, method, turn=turn)
                return into

            flipped = np.flip(upright, [axis for axis, is_flipped in enumerate(turn[1:]) if is_flipped])
            for made in of_each_kind(make):
                assert np.array_equal(made, flipped)


@pytest.mark.thorough(after_first=True)
@needs_extension
@pytest.mark.parametrize("sides", [(5000, 1), (5000, 3), (9, 4000), (70_000, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_sums_stay_within_their_bits(method, sides) -> None:
    """White stays white for any number of pixels that become one."""
    source, target = sides
    for shape, new in (((source, 2), (target, 2)), ((2, source), (2, target))):

        def make(shape=shape, new=new):
            into = np.zeros((*new, 3), np.uint8)
            resample.resample(np.full((*shape, 3), 255, np.uint8), into, method)
            return into

        for made in of_each_kind(make):
            assert (made == 255).all()


@pytest.mark.parametrize("method", METHODS)
def test_weights_add_up(method) -> None:
    """They add up to the power of two by which sums are divided, within the source."""
    for source in (1, 2, 3, 5, 64, 333, 5000):
        for target in (1, 2, 3, 7, 64, 331, 700):
            first, weights, shift = resample.taps(source, target, method)

            assert (weights.sum(axis=1, dtype=np.int64) == 1 << shift).all()
            assert first.min() >= 0
            assert first.max() + weights.shape[1] <= source


@needs_extension
@pytest.mark.parametrize("method", ["nearest", "linear"])
def test_the_extension_warps_as_numpy_does(monkeypatch, method) -> None:
    """Angles are arbitrary, or such that places are on pixels or between them."""
    for number in range(80):
        height, width, channels = (int(number) for number in RANDOM.integers(1, (50, 50, 5)))
        pixels = image(height, width, channels)
        degrees = float(RANDOM.choice([-180, -90, -45, 0, 90, 180]) if number % 3 == 0 else RANDOM.uniform(-180, 180))
        fill = tuple(int(level) for level in RANDOM.integers(0, 256, channels))
        move = Warp(height, width, degrees, method, fill, (number % 2 == 0, number % 5 == 0))

        def make(pixels=pixels, move=move):
            into = np.full_like(pixels, 7)
            warp(pixels, move, into)
            return into

        assert np.array_equal(*both(monkeypatch, make))


@needs_extension
@pytest.mark.parametrize("is_linear", [False, True])
def test_the_extension_remaps_as_numpy_does(monkeypatch, is_linear) -> None:
    """Places are anywhere, also far outside, and the target has a size of its own."""
    for number in range(60):
        height, width, channels, rows, columns = (int(one) for one in RANDOM.integers(1, (40, 40, 5, 30, 30)))
        pixels = image(height, width, channels)
        reach = (50, 2**20)[number % 2] << 11 - number % 2 * 2
        places = RANDOM.integers(-reach, reach, (rows, columns, 2)).astype(np.int32)

        def make(pixels=pixels, places=places):
            into = np.full((*places.shape[:2], pixels.shape[2]), 7, np.uint8)
            resample.remap(pixels, into, places, (9,), is_linear=is_linear)
            return into

        assert np.array_equal(*both(monkeypatch, make))


NUMBERS = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 0.5, 1e-9, 1 / 3, -1e-9, -0.5]), st.floats(-0.5, 11))
CHANGES = st.lists(st.tuples(st.sampled_from(range(5)), NUMBERS), max_size=5)


@needs_extension
@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 5), st.one_of(st.integers(1, 40), st.integers(500, 1100))),
    changes=CHANGES,
    is_bgr=st.booleans(),
    is_part=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_extension_recolors_as_numpy_does(size, changes, is_bgr, is_part, seed):
    """Any changes, of an image or of a part of one; nothing beside it changes."""
    random = np.random.default_rng(seed)
    changes = [(kind, number if kind == recolor.HUE else abs(number)) for kind, number in changes]
    around = random.integers(0, 256, (size[0] + 2, size[1] + 2 * is_part, 3)).astype(np.uint8)
    around[:2] //= np.uint8(random.choice([1, 64, 255]))  # many hues alike, and grey
    colors = recolor.Colors(Scratch(), is_bgr=is_bgr)

    def make():
        made = around.copy()
        colors.change(made[1:-1, is_part : is_part + size[1]], changes)
        return made

    with_avx2, without, by_numpy = of_each_kind(make)
    assert np.array_equal(by_numpy, with_avx2)
    assert np.array_equal(by_numpy, without)
    by_numpy[1:-1, is_part : is_part + size[1]] = around[1:-1, is_part : is_part + size[1]]
    assert np.array_equal(by_numpy, around)


@pytest.mark.thorough
@needs_extension
def test_every_color_has_its_hue_shifted_as_numpy_does() -> None:
    """All 2**24, each by one of sixteen shifts."""
    colors = recolor.Colors(Scratch(), is_bgr=False)
    sides = np.arange(256, dtype=np.uint8)
    for first in range(0, 256, 16):
        cube = np.stack(np.meshgrid(sides[first : first + 16], sides, sides, indexing="ij"), axis=-1).reshape(16, -1, 3)
        turns = RANDOM.choice([0.0, 0.5, 1 / 6, RANDOM.uniform(-0.5, 0.5)])
        with_avx2, without, by_numpy = of_each_kind(
            lambda cube=cube, turns=turns: colors.change(cube.copy(), [(recolor.HUE, turns)])
        )
        assert np.array_equal(by_numpy, with_avx2)
        assert np.array_equal(by_numpy, without)


CV_CPU_FMA3 = 12


@pytest.mark.skipif(not cv2.checkHardwareSupport(CV_CPU_FMA3), reason="this OpenCV rounds products and sums")
def test_saturation_is_that_of_opencv() -> None:
    """Every level beside every grey level that has one, bit by bit."""
    levels, others = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    pixels = np.stack([levels, others, others], axis=-1)
    grey = cv2.cvtColor(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    colors = recolor.Colors(Scratch(), is_bgr=False)
    for factor in (0.0, 1.0, 2.0, 1e-9, 1 - 1e-12, *RANDOM.uniform(0, 2, 20), *RANDOM.uniform(2, 11, 10)):
        expected = cv2.addWeighted(pixels, factor, grey, 1 - factor, 0)
        assert np.array_equal(colors.change(pixels.copy(), [(recolor.SATURATION, factor)]), expected)


def test_sines_are_exact_to_the_last_bits() -> None:
    """They are made of sums and products alone; whole numbers are exact."""
    for degrees in [*np.linspace(-180, 180, 5001).tolist(), 1e-9, -1e-300]:
        sine, cosine = sine_and_cosine(degrees)
        assert abs(sine - math.sin(math.radians(degrees))) < 2**-50
        assert abs(cosine - math.cos(math.radians(degrees))) < 2**-50
    assert [sine_and_cosine(degrees) for degrees in (-90.0, 0.0, 90.0)] == [(-1, 0), (0, 1), (1, 0)]


@needs_extension
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("resample", lambda: (np.zeros((4, 4), np.uint8), PIXELS, TAPS, TAPS, 7)),
        ("resample", lambda: (np.zeros((4, 4, 5), np.uint8), np.zeros((4, 4, 5), np.uint8), TAPS, TAPS, 7)),
        ("resample", lambda: (PIXELS.astype(np.int16), PIXELS, TAPS, TAPS, 7)),
        ("resample", lambda: (PIXELS[:, ::2], PIXELS, TAPS, TAPS, 7)),
        ("resample", lambda: (PIXELS[:0], PIXELS, TAPS, TAPS, 7)),
        ("resample", lambda: (PIXELS, np.zeros((4, 4, 1), np.uint8), TAPS, TAPS, 7)),
        ("resample", lambda: (PIXELS, np.zeros((5, 4, 3), np.uint8), TAPS, TAPS, 7)),
        ("resample", lambda: (PIXELS, PIXELS.copy(), (TAPS[0] + 1, *TAPS[1:]), TAPS, 7)),
        ("resample", lambda: (PIXELS, PIXELS.copy(), TAPS, (TAPS[0] - 1, *TAPS[1:]), 7)),
        ("resample", lambda: (PIXELS, PIXELS.copy(), TAPS, (TAPS[0] + 2**30, *TAPS[1:]), 7)),
        ("resample", lambda: (PIXELS, PIXELS.copy(), TAPS, (TAPS[0], TAPS[1][:, :0], 14), 7)),
        ("resample", lambda: (PIXELS, PIXELS.copy(), TAPS, (TAPS[0], TAPS[1].astype(np.int32), 14), 7)),
        ("resample", lambda: (PIXELS, PIXELS.copy(), TAPS, (*TAPS[:2], 40), 7)),
        ("resample", lambda: (PIXELS, PIXELS.copy(), TAPS, TAPS, 8)),
        ("resample", lambda: (PIXELS, PIXELS.copy(), TAPS, TAPS, -1)),
        ("scale", lambda: (PIXELS, np.zeros((5, 4, 1), np.uint8), False)),
        ("scale", lambda: (PIXELS[:, ::2], np.zeros((5, 4, 3), np.uint8), True)),
        ("warp", lambda: (PIXELS, np.zeros((4, 4, 1), np.uint8), (1, 0, 0), (0, 1, 0), True, b"1234")),
        ("warp", lambda: (PIXELS, PIXELS.copy(), (1, 0, 0), (0, 1, 0), True, b"123")),
        ("warp_parts", lambda: (((PIXELS, 0, 0),), (9, 9), b"1234", PIXELS[..., :1].copy(), *UPRIGHT, b"1234")),
        ("warp_parts", lambda: (((PIXELS, 1 << 40, 0),), (9, 9), b"1234", PIXELS.copy(), *UPRIGHT, b"1234")),
        ("warp_parts", lambda: (((PIXELS, 0, 0),) * 65, (9, 9), b"1234", PIXELS.copy(), *UPRIGHT, b"1234")),
        ("warp_parts", lambda: (((PIXELS, 0, 0),), (0, 9), b"1234", PIXELS.copy(), *UPRIGHT, b"1234")),
        ("warp_parts", lambda: (((PIXELS, 0, 0),), (9, 9), b"123", PIXELS.copy(), *UPRIGHT, b"1234")),
        ("count_levels", lambda: (PIXELS, np.zeros((3, 255), np.uint32))),
        ("count_levels", lambda: (PIXELS, np.zeros((1, 256), np.uint32))),
        ("count_levels", lambda: (PIXELS, np.zeros((3, 256), np.uint16))),
        ("count_levels", lambda: (PIXELS, np.zeros(768, np.uint32))),
        ("count_levels", lambda: (PIXELS[:, ::2], np.zeros((3, 256), np.uint32))),
        ("remap", lambda: (PIXELS, np.zeros((4, 4, 1), np.uint8), PLACES, True, b"1234")),
        ("remap", lambda: (PIXELS, PIXELS.copy(), PLACES, True, b"123")),
        ("remap", lambda: (PIXELS, PIXELS.copy(), PLACES[:3], True, b"1234")),
        ("remap", lambda: (PIXELS, PIXELS.copy(), PLACES[..., :1].copy(), True, b"1234")),
        ("remap", lambda: (PIXELS, PIXELS.copy(), PLACES.astype(np.int64), True, b"1234")),
        ("recolor", lambda: (np.zeros((4, 4, 4), np.uint8), ((3, 5.0),), False)),
        ("recolor", lambda: (PIXELS[:, ::2], ((3, 5.0),), False)),
        ("recolor", lambda: (PIXELS.copy(), ((0, 1.0),) * 9, False)),
        ("recolor", lambda: (PIXELS.copy(), ((-1, 1.0),), False)),
        ("recolor", lambda: (PIXELS.copy(), ((5, 1.0),), False)),
        *(
            ("recolor", lambda kind=kind, number=number: (PIXELS.copy(), ((kind, number),), False))
            for kind, most in enumerate((11, 11, 11, 6 * 2**16, 11 << 14))
            for number in (-0.1, math.nan, math.inf, most + 0.1)
        ),
        ("sharpen", lambda: (PIXELS, np.zeros((4, 5, 3), np.uint8), 5)),
        ("sharpen", lambda: (PIXELS, np.zeros((4, 4, 1), np.uint8), 5)),
        ("sharpen", lambda: (PIXELS[:0], PIXELS[:0].copy(), 5)),
        ("sharpen", lambda: (PIXELS, PIXELS.copy(), -1)),
        ("sharpen", lambda: (PIXELS, PIXELS.copy(), (10 << 14) + 1)),
    ],
)
def test_invalid_arguments_are_refused(name, arguments) -> None:
    """No byte is read or written before."""
    with pytest.raises(ValueError, match=r"image|taps|fill|channels|counts"):
        getattr(_pixels, name)(*arguments())


PIXELS = np.zeros((4, 4, 3), np.uint8)
UPRIGHT = (1 << 31, 0, 0), (0, 1 << 31, 0)
PLACES = np.zeros((4, 4, 2), np.int32)
TAPS = resample.taps(4, 4, "linear")


@needs_extension
def test_places_far_outside_are_fill() -> None:
    """This holds for any distance: nothing else is read."""
    for place in (2**60, -(2**60)):
        for is_linear in (True, False):
            into = PIXELS.copy()
            _pixels.warp(PIXELS, into, (2**32, 0, place), (0, 2**32, -place), is_linear, b"\7\7\7\7")
            assert (into == 7).all()
            for end in (np.iinfo(np.int32).min, np.iinfo(np.int32).max):
                into = PIXELS.copy()
                _pixels.remap(PIXELS, into, np.full((4, 4, 2), end, np.int32), is_linear, b"\7\7\7\7")
                assert (into == 7).all()


@needs_extension
def test_read_only_memory_is_refused() -> None:
    """It is a target, or pixels that change in place."""
    frozen = PIXELS.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        _pixels.resample(PIXELS, frozen, TAPS, TAPS, 7)
    with pytest.raises(ValueError, match="read-only"):
        _pixels.recolor(frozen, (), False)
    with pytest.raises(ValueError, match="read-only"):
        _pixels.sharpen(PIXELS, frozen, 1)


def canvas_of(random: np.random.Generator, channels: int) -> Canvas:
    """A canvas with up to four images, some of which lie on others or outside."""
    height, width = (int(side) for side in random.integers(1, 90, 2))
    ground = tuple(int(level) for level in random.integers(0, 256, channels))
    canvas = Canvas((height, width, channels), ground, lambda shape: np.empty(shape, np.uint8))
    for _ in range(random.integers(0, 5)):
        shape = *random.integers(1, 60, 2), channels
        top, left = (int(side) for side in random.integers(-70, 90, 2))
        canvas.parts.append((random.integers(0, 256, shape, np.uint8), top, left))
    return canvas


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("method", ["linear", "nearest"])
def test_a_canvas_is_warped_as_if_it_had_been_made(channels, method) -> None:
    """Bit by bit, wherever its images are, and where it is scaled, moved or turned."""
    for seed in range(40):
        random = np.random.default_rng(seed)
        canvas = canvas_of(random, channels)
        size = tuple(int(side) for side in random.integers(1, 70, 2))
        matrix = matrix_about_middle(
            canvas.shape,
            scale=random.choice([1.0, random.uniform(0.3, 3)]),
            translate=tuple(int(side) for side in random.integers(-30, 30, 2)),
            degrees=random.choice([0.0, 0.0, 0.0, 5.0]),
        )
        motion = AffineMotion(canvas.shape, matrix, size)
        made, expected = (np.zeros((*size, channels), np.uint8) for _ in range(2))
        motion.move(canvas, made, (9,), is_linear=method == "linear")
        motion.move(canvas.whole(), expected, (9,), is_linear=method == "linear")
        assert np.array_equal(made, expected), seed
