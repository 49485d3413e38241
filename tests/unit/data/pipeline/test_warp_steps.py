"""The steps that move pixels, beside float64 references, and beside torchvision."""

import math

import numpy as np
import pytest

from batchd.data.pipeline.augment import exact, warp
from batchd.data.pipeline.augment.options import Affine, Elastic, Perspective
from batchd.data.pipeline.image.options import Decode, Follow, Resize
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from support.images import encode, photo
from support.pipelines import image_pipeline, run, run_fields, run_on_pixels

NOISE = np.random.default_rng(0).integers(0, 256, (31, 44, 3), np.uint8)
PHOTO = photo(60, 80)
FILL = (50, 100, 200)
ROUNDED = 0.5
PLACE_TOLERANCE = 0.13
"""Places are rounded to 1/2048 of a pixel in each direction."""


def taken(image, x, y, is_linear, fill=FILL):
    """Take pixels from places of centres, in float64: x and y of [height, width]."""

    def pixel(row, column):
        inside = (row >= 0) & (row < image.shape[0]) & (column >= 0) & (column < image.shape[1])
        found = image[np.clip(row, 0, image.shape[0] - 1), np.clip(column, 0, image.shape[1] - 1)].astype(float)
        return np.where(inside[..., np.newaxis], found, np.array(fill, float))

    x, y = x - 0.5, y - 0.5
    if not is_linear:
        return pixel(np.floor(y + 0.5).astype(int), np.floor(x + 0.5).astype(int))
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    lower, right = (y - top)[..., np.newaxis], (x - left)[..., np.newaxis]
    upper_row = pixel(top, left) * (1 - right) + pixel(top, left + 1) * right
    lower_row = pixel(top + 1, left) * (1 - right) + pixel(top + 1, left + 1) * right
    return upper_row * (1 - lower) + lower_row * lower


def centres(shape):
    """Return x and y of the centres of an image's pixels."""
    y, x = np.mgrid[: shape[0], : shape[1]] + 0.5
    return x, y


def about_middle(shape, degrees, translate, scale, shear_x, shear_y):
    """Return the matrix [3, 3] of an affine step, as a product of its parts."""
    turn, slant_x, slant_y = (math.radians(angle) for angle in (-degrees, shear_x, shear_y))
    parts = [
        [[1, 0, shape[1] / 2 + translate[0]], [0, 1, shape[0] / 2 + translate[1]], [0, 0, 1]],
        [[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0], [0, 0, 1]],
        [[scale, 0, 0], [0, scale, 0], [0, 0, 1]],
        [[1, 0, 0], [-math.tan(slant_y), 1, 0], [0, 0, 1]],
        [[1, -math.tan(slant_x), 0], [0, 1, 0], [0, 0, 1]],
        [[1, 0, -shape[1] / 2], [0, 1, -shape[0] / 2], [0, 0, 1]],
    ]
    return np.linalg.multi_dot([np.array(part, float) for part in parts])


def projected(matrix, x, y):
    """Return where a matrix moves places."""
    across, down, depth = (row[0] * x + row[1] * y + row[2] for row in matrix)
    return across / depth, down / depth


WAYS = [
    {"degrees": 33.0, "translate": (0, 0), "scale": 1.0, "shear_x": 0.0, "shear_y": 0.0},
    {"degrees": 0.0, "translate": (5, -7), "scale": 1.0, "shear_x": 0.0, "shear_y": 0.0},
    {"degrees": 0.0, "translate": (0, 0), "scale": 1.0, "shear_x": -40.0, "shear_y": 0.0},
    {"degrees": 0.0, "translate": (0, 0), "scale": 1.7, "shear_x": 20.0, "shear_y": 0.0},
    {"degrees": 0.0, "translate": (0, 0), "scale": 0.4, "shear_x": 0.0, "shear_y": -35.0},
    {"degrees": -77.0, "translate": (-3, 2), "scale": 0.8, "shear_x": 13.0, "shear_y": 25.0},
]


@pytest.mark.parametrize("is_linear", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_an_affine_step_is_the_product_of_its_parts(way, is_linear):
    """The image is sheared first, then scaled, rotated and moved."""
    fixed = {name: (value, value) for name, value in way.items() if name != "translate"}
    motion = warp.AffineMotion(NOISE.shape, warp.matrix_about_middle(NOISE.shape, **way))
    x, y = projected(np.linalg.inv(about_middle(NOISE.shape, **way)), *centres(NOISE.shape))

    result = motion.move(NOISE, np.empty_like(NOISE), FILL, is_linear=is_linear)

    expected = taken(NOISE, x, y, is_linear)
    if is_linear:
        assert np.abs(result - expected).max() <= ROUNDED + PLACE_TOLERANCE
    else:
        assert (result != expected).any(axis=2).mean() < 0.01  # where a place is between two pixels
    if way["translate"] == (0, 0):
        step = Affine(**fixed, interpolation="linear" if is_linear else "nearest", fill=FILL)
        assert np.array_equal(run_on_pixels([step], NOISE), result)


def notes_of(steps, sample, size=(60, 80)):
    """Return what the steps draw for a sample."""
    pipeline = image_pipeline([Decode(), Resize(size=size), *steps])
    draws = pipeline.note_draws()
    run(pipeline, encode(NOISE, ".png"), sample=sample)
    return list(draws)


def test_affine_numbers_are_drawn_evenly_from_their_ranges():
    """Distances are whole pixels, up to the fraction of the side in both directions."""
    step = Affine(degrees=(-10, 20), translate=(0.1, 0.2), scale=(0.5, 1.5), shear_x=(1, 5), shear_y=(-3, 3))

    seen = [notes_of([step], sample)[0] for sample in range(300)]

    for name, low, high in (("degrees", -10, 20), ("scale", 0.5, 1.5), ("shear_x", 1, 5), ("shear_y", -3, 3)):
        values = [draw[name] for draw in seen]
        assert low <= min(values) < low + 0.03 * (high - low)
        assert high - 0.03 * (high - low) < max(values) <= high
    across, down = zip(*(draw["moved"] for draw in seen), strict=True)
    assert (min(across), max(across)) == (-8, 8)
    assert (min(down), max(down)) == (-12, 12)


@pytest.mark.parametrize("is_linear", [True, False])
def test_perspective_moves_the_corners(is_linear):
    """The centres of the four outermost pixels go where they were drawn to."""
    corners = [(3, 2), (40, 0), (36, 28), (0, 25)]
    motion = warp.perspective_motion(NOISE.shape, corners)
    start = np.array([(0, 0), (43, 0), (43, 30), (0, 30)], float)

    assert motion.moved(start) == pytest.approx(np.array(corners, float))
    rows = []
    for (x, y), (to_x, to_y) in zip(start, corners, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -to_x * x, -to_x * y], [0, 0, 0, x, y, 1, -to_y * x, -to_y * y]]
    forward = np.append(np.linalg.solve(np.array(rows), np.ravel(corners)), 1).reshape(3, 3)
    x, y = projected(np.linalg.inv(forward), *centres(NOISE.shape))

    result = motion.move(NOISE, np.empty_like(NOISE), FILL, is_linear=is_linear)

    expected = taken(NOISE, x, y, is_linear)
    if is_linear:
        assert np.abs(result - expected).max() <= ROUNDED + PLACE_TOLERANCE
    else:
        assert (result != expected).any(axis=2).mean() < 0.01


def test_corners_are_drawn_inwards_and_stay_convex():
    """Each moves up to the fraction of the way to the middle, across and down by itself."""
    seen = np.array([notes_of([Perspective(distortion=0.5)], sample)[0]["corners"] for sample in range(300)])

    assert seen[:, 0].min(axis=0).tolist() == [0, 0]
    assert seen[:, 0].max(axis=0).tolist() == [20, 15]
    assert seen[:, 2].min(axis=0).tolist() == [79 - 20, 59 - 15]
    assert seen[:, 2].max(axis=0).tolist() == [79, 59]
    most = np.array([notes_of([Perspective(distortion=0.65)], sample)[0]["corners"] for sample in range(300)])
    sides = np.roll(most, -1, axis=1) - most
    following = np.roll(sides, -1, axis=1)
    assert (sides[..., 0] * following[..., 1] - sides[..., 1] * following[..., 0] > 0).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize(
    "step", [Perspective(), Elastic(), Affine(degrees=(-90, 90), scale=(0.1, 10))], ids=lambda step: step.op
)
def test_the_smallest_images_are_moved_too(step, size):
    """There may be nothing to move: then the image stays, or is all fill."""
    for sample in range(20):
        assert run_on_pixels([step], NOISE[: size[0], : size[1]], sample=sample).shape == (*size, 3)


def test_elastic_distances_are_smooth_noise():
    """The step moves each pixel by its distance; both directions have noise of their own."""
    distance = 40 * warp.smooth_noise(77, PHOTO.shape, 3.0)
    x, y = centres(PHOTO.shape)

    result = warp.elastic_motion(PHOTO.shape, lambda: distance).move(PHOTO, np.empty_like(PHOTO), FILL, is_linear=True)

    expected = taken(PHOTO, x + distance[0], y + distance[1], is_linear=True)
    assert np.abs(result - expected).max() <= ROUNDED + PLACE_TOLERANCE
    assert distance.std() == pytest.approx(40 * math.sqrt(1 / 3) / (2 * 3.0 * math.sqrt(math.pi)), rel=0.25)
    assert abs(np.corrcoef(distance[0].ravel(), distance[1].ravel())[0, 1]) < 0.2
    assert np.abs(np.diff(distance, axis=2)).max() < 4


def test_noise_is_smoothed_by_a_gaussian():
    """The ends are reflected, also of images that are smaller than the Gaussian."""
    for shape in ((20, 30), (3, 50), (1, 1)):
        words = exact.random_words(5, 0, 0, *shape)
        made = np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)]).astype(float) / (1 << 31) - 1
        weights = np.exp(-(np.arange(-8, 9) ** 2) / (2 * 2.0**2))
        for axis in (1, 2):
            padding = [(8, 8) if side == axis else (0, 0) for side in range(3)]
            wide = np.pad(made, padding, mode="reflect" if made.shape[axis] > 1 else "edge")
            parts = (np.take(wide, range(place, place + made.shape[axis]), axis) for place in range(17))
            made = sum(weight * part for weight, part in zip(weights / weights.sum(), parts, strict=True))

        assert warp.smooth_noise(5, shape, 2.0) == pytest.approx(made, abs=1e-12)


STEPS = [
    Affine(degrees=(-40, 40), translate=(0.1, 0.1), scale=(0.8, 1.2), shear_x=(-20, 20), shear_y=(-20, 20)),
    Perspective(distortion=0.6),
    Elastic(alpha=35, sigma=5),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.op)
def test_followers_go_where_the_image_goes(step):
    """A bright dot of the image, its point, its box and its number of the mask stay together."""
    image, mask = np.zeros((60, 80, 3), np.uint8), np.zeros((60, 80), np.uint8)
    image[28:33, 38:43] = 255
    mask[28:33, 38:43] = 9
    columns = [
        Column("image", shape=image.shape),
        Column("mask", shape=mask.shape),
        Column("boxes", dtype="float32", shape=(1, 4)),
        Column("points", dtype="float32", shape=(1, 2)),
    ]
    values = {
        "image": image,
        "mask": mask,
        "boxes": np.array([[38, 28, 43, 33]], np.float32),
        "points": np.array([[40.5, 30.5]], np.float32),
    }
    moved = []
    for sample in range(20):
        fields = run_fields(columns, [Follow(mask="mask", boxes="boxes", points="points"), step], values, sample)
        rows, columns_of_dot = np.nonzero(fields["image"][..., 0] > 127)
        middle = np.array([columns_of_dot.mean(), rows.mean()]) + 0.5
        assert np.abs(fields["points"][0] - middle).max() < (0.9 if step.op == "elastic" else 0.6)
        left, top, right, bottom = fields["boxes"][0]
        assert left - 0.6 <= columns_of_dot.min() <= columns_of_dot.max() + 1 <= right + 0.6
        assert top - 0.6 <= rows.min() <= rows.max() + 1 <= bottom + 0.6
        assert set(np.unique(fields["mask"])) == {0, 9}
        assert ((fields["mask"] == 9) == (fields["image"][..., 0] > 127)).mean() > 0.99
        moved.append(middle)
    assert np.std(moved, axis=0).min() > 0.3


def test_an_image_too_wide_to_be_moved_is_a_bad_sample():
    """Places of its pixels would need more bits."""
    strip = np.zeros((1, 40_000, 3), np.uint8)
    for step in (*STEPS, Perspective()):
        with pytest.raises(SampleUndecodable, match="40000 x 1 pixels cannot be moved"):
            run_on_pixels([step], strip)


def test_a_large_image_is_too_large_for_elastic_noise():
    """Its noise would take a gigabyte and more; a perspective is made some rows at a time."""
    with pytest.raises(SampleUndecodable, match="5000 x 4000 pixels cannot be moved one by one: 16777216 at most"):
        warp.elastic_motion((4000, 5000, 3), lambda: pytest.fail("no noise is made"))
    tall = np.arange(3000 * 20 * 3, dtype=np.uint32).astype(np.uint8).reshape(3000, 20, 3)
    motion = warp.perspective_motion(tall.shape, [(0, 0), (19, 0), (19, 2999), (0, 2999)])
    assert np.array_equal(motion.move(tall, np.empty_like(tall), (0,), is_linear=True), tall)


def test_steps_of_torchvision_make_the_same_pixels():
    """Given the same numbers, within 1 where all is inside: torchvision mixes fill in twice."""
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("torchvision.transforms.v2.functional", exc_type=(ImportError, RuntimeError))
    corners = [(7, 5), (70, 2), (77, 50), (3, 57)]
    start = [[0, 0], [79, 0], [79, 59], [0, 59]]
    distance = 20 * warp.smooth_noise(3, PHOTO.shape, 4.0)
    displacement = torch.from_numpy(np.stack([distance[0] / 40, distance[1] / 30], -1)[np.newaxis].astype(np.float32))
    way = WAYS[-1]
    motions = [
        (
            warp.AffineMotion(PHOTO.shape, warp.matrix_about_middle(PHOTO.shape, **way)),
            lambda image, how: functional.affine(
                image, -way["degrees"], list(way["translate"]), way["scale"], [way["shear_x"], way["shear_y"]], how
            ),
        ),
        (
            warp.perspective_motion(PHOTO.shape, corners),
            lambda image, how: functional.perspective(image, start, [list(corner) for corner in corners], how),
        ),
        (
            warp.elastic_motion(PHOTO.shape, lambda: distance),
            lambda image, how: functional.elastic(image, displacement, how),
        ),
    ]
    modes = pytest.importorskip("torchvision.transforms").InterpolationMode
    white = np.full_like(PHOTO, 255)
    for motion, theirs in motions:
        inside = motion.move(white, np.empty_like(PHOTO), (0,), is_linear=True) == 255
        assert inside.mean() > 0.3
        for is_linear, mode in ((True, modes.BILINEAR), (False, modes.NEAREST)):
            made = theirs(torch.from_numpy(PHOTO).permute(2, 0, 1), mode).permute(1, 2, 0).numpy()
            mine = motion.move(PHOTO, np.empty_like(PHOTO), (0,), is_linear=is_linear)
            difference = np.abs(mine.astype(int) - made)[inside]
            assert difference.max() <= 1 if is_linear else (difference > 0).mean() < 0.002
