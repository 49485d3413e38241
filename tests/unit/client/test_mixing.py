"""Mixing in the trainer: images and soft targets by the numbers of a batch."""

import numpy as np
import pytest

from batchd_client.errors import TensorsInvalid
from batchd_client.mixing import MIX_FIELDS, Mixing, classes_of, fields_read, mixed

ROWS, HEIGHT, WIDTH = 4, 6, 8


def batch(dtype=np.float32, **others):
    random = np.random.default_rng(1)
    fields = {
        "image": (random.random((ROWS, HEIGHT, WIDTH, 3)) * 255).astype(dtype),
        "label": np.array([0, 2, 1, 2]),
        "mix_row": np.array([1, 2, 3, 0], np.int32),
        "mix_lambda": np.array([0.25, 0.75, 1.0, 0.5], np.float32),
        "mix_box": np.array([[0] * 4, [2, 1, 5, 5], [0] * 4, [0] * 4], np.int32),
    }
    return fields | others


def by_hand(fields):
    """The same in float64, a row at a time."""
    images = fields["image"].astype(np.float64)
    for row, (partner, share, box) in enumerate(
        zip(fields["mix_row"], fields["mix_lambda"], fields["mix_box"], strict=True)
    ):
        left, top, right, bottom = box
        mine, other = fields["image"][row].astype(np.float64), fields["image"][partner].astype(np.float64)
        if right > left:
            images[row, top:bottom, left:right] = other[top:bottom, left:right]
        else:
            images[row] = share * mine + (1 - share) * other
    return images


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("dtype", "most"), [(np.float32, 1e-4), (np.float16, 0.2), (np.uint8, 0.501)])
def test_images_are_mixed_as_by_hand(dtype, most, in_place):
    """Their dtype stays; what cutmix takes, and what it leaves, has the very bytes."""
    fields = batch(dtype)
    given = fields["image"].copy()
    images, _targets = mixed(fields | {"image": given}, 3, in_place=in_place)
    assert (images is given) == in_place
    assert in_place or (given == fields["image"]).all()
    assert images.dtype == dtype
    assert np.abs(images.astype(np.float64) - by_hand(fields)).max() <= most
    assert (images[1, 1:5, 2:5] == fields["image"][2, 1:5, 2:5]).all()
    assert (images[1, 5:] == fields["image"][1, 5:]).all()


def test_the_order_of_channels_makes_no_difference():
    """Channels first, as torch has them, and last."""
    fields = batch()
    turned = batch(image=np.ascontiguousarray(fields["image"].transpose(0, 3, 1, 2)))
    assert (mixed(turned, 3)[0] == mixed(fields, 3)[0].transpose(0, 3, 1, 2)).all()


@pytest.mark.parametrize(
    "partners", [[1, 2, 3, 0], [3, 0, 1, 2], [2, 3, 0, 1], [1, 0, 3, 2], [0, 1, 2, 3], [1, 1, 0, 0]]
)
def test_a_row_that_gives_pixels_is_read_before_it_is_written(partners):
    """In place, whatever cycles the partners make, or if one gives to several rows."""
    fields = batch(mix_row=np.array(partners, np.int32))
    images, _targets = mixed(fields | {"image": fields["image"].copy()}, 3, in_place=True)
    assert np.abs(images - by_hand(fields)).max() < 1e-4


def test_targets_are_shares_of_classes():
    """Without smoothing they are those of one-hot labels."""
    _images, targets = mixed(batch(), 3)
    assert targets.dtype == np.float32
    assert targets.tolist() == [[0.25, 0, 0.75], [0, 0.25, 0.75], [0, 1, 0], [0.5, 0, 0.5]]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_smoothed_targets_are_those_of_timm(smoothing):
    """Its ``mixup_target``, written out: each one-hot row is smoothed, and then they are mixed."""
    fields, classes = batch(), 5
    on, off = 1 - smoothing + smoothing / classes, smoothing / classes
    one_hot = np.where(fields["label"][:, None] == np.arange(classes), on, off)
    share = fields["mix_lambda"][:, None].astype(np.float64)
    wanted = one_hot * share + one_hot[fields["mix_row"]] * (1 - share)
    soft = np.eye(classes, dtype=np.float32)[fields["label"]]
    for given in (fields, fields | {"label": soft}):  # one-hot by a step already
        targets = mixed(given, classes, Mixing(smoothing=smoothing))[1]
        assert targets.dtype == np.float32
        assert np.allclose(targets, wanted, atol=1e-6)
        assert np.allclose(targets.sum(1), 1)


def test_a_row_whose_partner_is_bad_stays_as_it_is():
    """Its target is its own label; a masked partner has no pixels to give."""
    fields = batch(valid=np.array([True, True, False, True]))
    images, targets = mixed(fields, 3)
    assert (images[1] == fields["image"][1]).all()
    assert targets[1].tolist() == [0, 0, 1]
    assert (images[0] != fields["image"][0]).any()


def test_a_part_of_a_batch_is_mixed_among_its_rows():
    """In the last round of an epoch, ranks share a batch: a partner may be with another rank."""
    part = {name: array[1:3] for name, array in batch().items()}
    images, targets = mixed(part, 3)
    assert images.shape[0] == 2
    assert targets.sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("missing", ["image", "label", "mix_row", "mix_lambda", "mix_box"])
def test_a_missing_field_is_named(missing):
    """The error says what to set in batchd.toml."""
    fields = {name: array for name, array in batch().items() if name != missing}
    with pytest.raises(TensorsInvalid, match=f"no field '{missing}'.*batchd.toml"):
        mixed(fields, 3)
    with pytest.raises(TensorsInvalid, match=f"no field '{missing}'"):
        fields_read(fields, ("index",), Mixing())


def test_fields_of_another_shape_are_refused():
    """Views have another axis; labels of pixels are no classes of rows."""
    for wrong in ({"image": np.zeros((ROWS, 2, HEIGHT, WIDTH, 3))}, {"label": np.zeros((ROWS, 2), int)}):
        with pytest.raises(TensorsInvalid, match="are mixed, with labels"):
            mixed(batch(**wrong), 3)


def test_a_loader_reads_what_the_mix_needs_once():
    """The loop gets what it asked for."""
    assert fields_read(batch(), ("image", "label"), Mixing()) == (("image", "label"), MIX_FIELDS)
    read, numbers = fields_read(batch(valid=0), ("index",), Mixing())
    assert (read, numbers) == (("index", "image", "label"), (*MIX_FIELDS, "valid"))
    assert classes_of(Mixing(), ["cat", "dog"]) == 2
    assert classes_of(Mixing(classes=7), ["cat", "dog"]) == 7
    assert classes_of(Mixing(), [], (5,)) == 5
    with pytest.raises(TensorsInvalid, match=r"mix=Mixing\(classes=1000\)"):
        classes_of(Mixing(), [])
