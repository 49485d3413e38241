"""Random erasing in the trainer: what the numbers of a batch cover, and with what."""

from math import erf

import numpy as np
import pytest

from batchd_client.erasing import check_erasable, erase_fields, erased, hashed, quantiles
from batchd_client.errors import TensorsInvalid

ROWS, HEIGHT, WIDTH = 4, 6, 8


def batch(dtype=np.float32, **others):
    random = np.random.default_rng(1)
    boxes = np.zeros((ROWS, 2, 4), np.int32)
    boxes[0, 0], boxes[2] = [2, 1, 5, 5], [[0, 0, 3, 3], [2, 2, 8, 6]]
    images = random.random((ROWS, HEIGHT, WIDTH, 3)).astype(dtype)
    return {"image": images, "erase_box": boxes} | others


def noise_of(key, row, column, channel):
    """The formula of the module, for one number, in whole numbers of any size."""
    factors, most = (0x7FEB352D, 0x846CA68B), (1 << 32) - 1
    word = (row << 16) + column + key & most
    word = (word ^ word >> 16) * factors[0] & most
    word = ((word ^ word >> 15) + key) * factors[1] & most
    word ^= word >> 16
    return quantiles()[(word * pow(0x9E3779B1, channel, 1 << 32) & most) >> 20]


NOISE = {"erase_key": np.array([5, 6, -7, 8], np.int32)}
COLOR = {"erase_key": np.arange(-4, 4, dtype=np.int32).reshape(ROWS, 2)}


def by_hand(fields):
    """The same, a rectangle at a time: torchvision's ``functional.erase`` with such values."""
    images, keys = fields["image"].copy(), fields.get("erase_key")
    for row, number in np.ndindex(ROWS, 2):
        left, top, right, bottom = fields["erase_box"][row, number]
        values = np.zeros((bottom - top, right - left, 3))
        for down, across, channel in np.ndindex(*values.shape) if keys is not None else ():
            place = (top + down, left + across) if keys.ndim == 1 else (0, 0)
            key = keys[row] if keys.ndim == 1 else keys[row, number]
            values[down, across, channel] = noise_of(int(key), *map(int, place), channel)
        images[row, top:bottom, left:right] = values
    return images


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("keys", [{}, NOISE, COLOR], ids=["mean", "noise", "color"])
def test_rectangles_are_covered_as_by_hand(keys, dtype, in_place):
    """The rest has the very bytes, and an image that is not the caller's is not written."""
    fields = batch(dtype, **keys)
    given = fields["image"].copy()
    found = erased(fields | {"image": given}, in_place=in_place)
    assert found.dtype == dtype
    assert (found == by_hand(fields)).all()
    assert (found is given) == in_place
    assert in_place or (given == fields["image"]).all()


@pytest.mark.parametrize("keys", [{}, NOISE, COLOR], ids=["mean", "noise", "color"])
def test_the_order_of_channels_makes_no_difference(keys):
    """Channels first, as torch has them, and last."""
    fields = batch(**keys)
    turned = fields | {"image": np.ascontiguousarray(fields["image"].transpose(0, 3, 1, 2))}
    assert (erased(turned) == erased(fields).transpose(0, 3, 1, 2)).all()


def test_the_noise_is_normal():
    """Mean, deviation, and fourth power; no number says anything of its neighbours."""
    side = 200
    boxes = np.broadcast_to(np.array([0, 0, side, side], np.int32), (2, 1, 4))
    fields = {"image": np.zeros((2, side, side, 3), np.float32), "erase_box": boxes}
    made = erased(fields | {"erase_key": np.array([1, 2], np.int32)}).astype(np.float64)
    assert abs(made.mean()) < 0.01
    assert abs(made.std() - 1) < 0.01
    assert abs((made**4).mean() - 3) < 0.1
    for one, other in [
        (made[0], made[1]),
        (made[:, :-1], made[:, 1:]),
        (made[:, :, :-1], made[:, :, 1:]),
        (made[..., 0], made[..., 1]),
        (made[..., 0], made[..., 2]),
    ]:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.015


def test_keys_that_are_near_each_other_do_not_shift_the_noise():
    """Else two rows would show the same noise, some columns apart."""
    places = np.arange(1000, dtype=np.int32)
    one, other = (hashed(places, np.int32(key)) for key in (100, 101))
    assert not (one[1:] == other[:-1]).any()


def test_the_quantiles_are_those_of_the_normal_distribution():
    """In order, the same on both sides."""
    table = quantiles().astype(np.float64)
    assert (table == -table[::-1]).all()
    below = [(1 + erf(number / 2**0.5)) / 2 for number in table]
    assert np.abs(np.array(below) - (np.arange(4096) + 0.5) / 4096).max() < 1e-4


def test_what_cannot_be_erased_is_refused():
    """The error says what to set, in batchd.toml or in the loader."""
    for missing in ("image", "erase_box"):
        fields = {name: array for name, array in batch().items() if name != missing}
        with pytest.raises(TensorsInvalid, match=f"no field '{missing}'.*batchd.toml"):
            erased(fields)
    assert erase_fields(batch(**NOISE), "image") == ("erase_box", "erase_key")
    assert erase_fields(batch(), "image") == ("erase_box",)
    with pytest.raises(TensorsInvalid, match=r"images are uint8.*normalize=\(mean, std\)"):
        erased(batch(np.uint8))
    with pytest.raises(TensorsInvalid, match="are erased, not"):
        erased(batch(image=np.zeros((ROWS, 2, HEIGHT, WIDTH, 3), np.float32)))
    check_erasable(np.dtype("float16"))
