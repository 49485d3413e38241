"""The rectangles of random erasing: a function of seed, position and row, on any machine."""

import math

import numpy as np
import pytest

from batchd.core.erasing import ATTEMPTS, RowErasing, aspect_quantiles, erase_fields
from batchd_wire.position import Position

HEIGHT, WIDTH = 40, 60
ERASE = RowErasing(1.0, (0.02, 0.33), (0.3, 3.3), 2, "noise", HEIGHT, WIDTH)


def with_keys(**keys):
    return RowErasing(**{name: getattr(ERASE, name) for name in RowErasing.__slots__} | keys)


def boxes_of(erasing, batches=100, rows=64):
    """The boxes of many rows: whole ``[rows, 4]``."""
    found = [erasing.numbers(7, Position(1, step), rows).erase_box for step in range(batches)]
    return np.concatenate(found).reshape(-1, 4).astype(int)


def test_the_numbers_depend_on_seed_position_and_row_alone():
    """Each row has the same ones in a batch of any size."""
    one = ERASE.numbers(7, Position(3, 4), 16)
    for same, other in zip(one, ERASE.numbers(7, Position(3, 4), 40), strict=True):
        assert same.tolist() == other[:16].tolist()
    for seed, position in [(8, Position(3, 4)), (7, Position(4, 4)), (7, Position(3, 5))]:
        other = ERASE.numbers(seed, position, 16)
        assert other.erase_box.tolist() != one.erase_box.tolist()
        assert not set(other.erase_key) & set(one.erase_key)


def test_these_numbers_are_the_same_on_every_machine():
    """Others would change the bytes of all streams."""
    boxes, keys = with_keys(count=1).numbers(7, Position(3, 4), 3)
    assert boxes.tolist() == [[[14, 25, 31, 32]], [[20, 7, 31, 36]], [[7, 17, 29, 26]]]
    assert keys.tolist() == [-593842184, 276934478, -613022474]


def test_rectangles_have_the_areas_and_proportions_that_were_asked_for():
    """They lie inside; area is even, the logarithm of the proportions, too, and so is the place."""
    left, top, right, bottom = boxes_of(ERASE).T
    width, height = right - left, bottom - top
    assert ((left >= 0) & (top >= 0) & (right <= WIDTH) & (bottom <= HEIGHT)).all()
    area, aspect = width * height / (HEIGHT * WIDTH), width / height
    assert area.min() > 0.015
    assert area.max() < 0.35
    assert abs(area.mean() - 0.17) < 0.01
    assert aspect.min() > 0.25
    assert aspect.max() < 3.8
    narrow = boxes_of(with_keys(area=(0.04, 0.04), aspect=(0.5, 2.0)))
    aspect = (narrow[:, 2] - narrow[:, 0]) / (narrow[:, 3] - narrow[:, 1])
    assert abs(np.log(aspect).std() - math.log(4) / math.sqrt(12)) < 0.03
    where = narrow[:, 0] / (WIDTH - narrow[:, 2] + narrow[:, 0])
    assert abs(where.mean() - 0.5) < 0.01
    assert abs(where.std() - 1 / math.sqrt(12)) < 0.01


def test_where_no_rectangle_fits_a_row_is_left_alone():
    """After so many attempts, as in torchvision."""
    assert not boxes_of(with_keys(area=(0.9, 1.0), aspect=(0.01, 0.02))).any()
    some = boxes_of(with_keys(area=(0.3, 0.3), aspect=(0.1, 1.0))).any(1)
    fits = np.log(1 / (0.3 * WIDTH / HEIGHT)) / np.log(10)  # wide enough to be lower than the image
    assert abs(some.mean() - (1 - (1 - fits) ** ATTEMPTS)) < 0.01


def test_probability_is_a_chance_of_each_row():
    """A row that is left alone has no box."""
    rows = boxes_of(with_keys(probability=0.25)).reshape(-1, 2, 4)
    assert abs(rows.any((1, 2)).mean() - 0.25) < 0.02
    assert (rows.any(2).all(1) == rows.any((1, 2))).all()


@pytest.mark.parametrize(("fill", "shape"), [("noise", (5,)), ("color", (5, 2)), ("mean", (5,))])
def test_keys_are_for_rows_or_for_colours(fill, shape):
    """A batch has them as fields, but for the mean, which needs none."""
    numbers = with_keys(fill=fill).numbers(1, Position(0, 0), 5)
    fields = {field.name: (5, *field.shape) for field in erase_fields(2, fill)}
    assert fields == {"erase_box": (5, 2, 4)} | ({} if fill == "mean" else {"erase_key": shape})
    assert numbers.erase_key.shape == shape
    assert len(set(numbers.erase_key.ravel().tolist())) == numbers.erase_key.size


def test_proportions_are_even_in_their_logarithm():
    """The table has them at equal steps."""
    table = aspect_quantiles(0.3, 3.3)
    assert np.allclose(np.log(table), np.linspace(math.log(0.3), math.log(3.3), len(table)), atol=1e-12)
