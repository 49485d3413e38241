"""The numbers of mixup and cutmix: a function of seed, position and rows, on any machine."""

from itertools import pairwise

import numpy as np
import pytest

from batchd.core.mixing import BITS, QUANTILE_BITS, WHOLE, RowMixing, beta_quantiles
from batchd_wire.position import Position

HEIGHT, WIDTH = 32, 24
BOTH = RowMixing(0.8, 1.0, 1.0, 0.5, by_row=True, height=HEIGHT, width=WIDTH)
MIXUP, CUTMIX = (RowMixing(*alphas, 1.0, 0.5, True, HEIGHT, WIDTH) for alphas in [(0.4, 0.0), (0.0, 1.0)])


def with_keys(mixing, **keys):
    return RowMixing(**{name: getattr(mixing, name) for name in RowMixing.__slots__} | keys)


def many(mixing, batches=400, rows=64):
    """The numbers of many batches together."""
    found = [mixing.numbers(7, Position(1, step), rows) for step in range(batches)]
    return [np.concatenate(part) for part in zip(*found, strict=True)]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.8, 1.0, 2.5, 32.0])
def test_the_quantiles_are_those_of_the_distribution(alpha):
    """They are compared with the density, summed up between the midpoints of a fine grid."""
    table = beta_quantiles(alpha)
    assert table[0] == 0
    assert table[-1] == WHOLE // 2
    assert all(one <= other for one, other in pairwise(table.tolist()))
    edges = np.linspace(0, 1, 2_000_001) ** 8 / 2  # dense where the density has no limit
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    below = np.append(0, np.cumsum((middle * (1 - middle)) ** (alpha - 1) * width))
    there = np.interp(np.arange(len(table)) / (2 << QUANTILE_BITS), below / below[-1] / 2, edges)
    assert np.abs(table / WHOLE - there).max() < 2e-4


def test_a_table_of_quantiles_has_these_bytes_on_every_machine():
    """The numbers are made in decimals; another table would change the bytes of all streams."""
    assert beta_quantiles(0.8)[[1, 100, 256, 511]].tolist() == [3689, 1157486, 3679155, 8369772]


def test_the_numbers_depend_on_seed_and_position_alone():
    """Each batch has others, whichever was asked for before."""
    one = BOTH.numbers(7, Position(3, 4), 16)
    BOTH.numbers(7, Position(9, 9), 16)
    for same, other in zip(one, BOTH.numbers(7, Position(3, 4), 16), strict=True):
        assert same.tolist() == other.tolist()
    for seed, position in [(8, Position(3, 4)), (7, Position(4, 4)), (7, Position(3, 5))]:
        assert BOTH.numbers(seed, position, 16).mix_lambda.tolist() != one.mix_lambda.tolist()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64])
def test_each_row_has_another_row_as_its_partner(rows):
    """Each is a partner once; a batch of one row is left as it is."""
    seen = set()
    for step in range(40):
        partners, lambdas, boxes = BOTH.numbers(7, Position(0, step), rows)
        assert sorted(partners.tolist()) == list(range(rows))
        assert (partners != np.arange(rows)).all() == (rows > 1)
        assert (lambdas.dtype, boxes.shape, boxes.dtype) == (np.float32, (rows, 4), np.int32)
        if rows == 1:
            assert (lambdas.tolist(), boxes.tolist()) == ([1.0], [[0] * 4])
        seen.add(int(partners[0]))
    assert len(seen) == min(rows, 40) - (rows > 1) or len(seen) > 20


def test_shares_are_drawn_from_the_distribution():
    """Mean and spread of Beta(alpha, alpha) are 1/2 and 1/sqrt(4 (2 alpha + 1))."""
    lambdas = many(MIXUP)[1]
    assert abs(lambdas.mean() - 0.5) < 0.01
    assert abs(lambdas.std() - 1 / np.sqrt(4 * 1.8)) < 0.005
    assert set(np.unique(many(with_keys(MIXUP, by_row=False), 4, 8)[1]).tolist()).__len__() == 4


def test_a_box_is_the_one_of_torchvision():
    """Its formula, with the centre and the share that were drawn: the share follows the pixels."""
    _partners, lambdas, boxes = many(CUTMIX)
    left, top, right, bottom = boxes.T.astype(int)
    assert ((left >= 0) & (left <= right) & (right <= WIDTH) & (top <= bottom) & (bottom <= HEIGHT)).all()
    area = (right - left) * (bottom - top)
    assert (lambdas == np.float32(1 - area / (HEIGHT * WIDTH))).all()
    inside = (left > 0) & (right < WIDTH) & (top > 0) & (bottom < HEIGHT)
    half = (right - left)[inside] // 2
    # of the share of the partner
    low, high = (half / WIDTH * 2) ** 2, ((half + 1) / WIDTH * 2) ** 2
    tall = (bottom - top)[inside] // 2
    assert ((tall + 1) / HEIGHT * 2 > np.sqrt(low)).all()
    assert (tall / HEIGHT * 2 < np.sqrt(high)).all()
    centres = (left + right)[inside] / 2
    assert centres.min() < WIDTH * 0.2
    assert centres.max() > WIDTH * 0.8


def test_probability_and_switch_are_chances():
    """Rows that are left alone have a share of 1 and no box."""
    _partners, lambdas, boxes = many(with_keys(BOTH, probability=0.3, switch=0.25))
    acts, cuts = lambdas < 1, boxes.any(1)
    assert abs(acts.mean() - 0.3) < 0.02
    assert abs(cuts.sum() / acts.sum() - 0.25) < 0.03
    assert not boxes[~acts].any()


def test_a_share_is_a_multiple_of_the_smallest_one():
    """So it is the same number of 32 bits wherever it is made."""
    lambdas = many(MIXUP, 20)[1].astype(np.float64) * (1 << BITS)
    assert (lambdas == np.round(lambdas)).all()
