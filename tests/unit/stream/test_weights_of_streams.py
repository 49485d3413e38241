"""What weights of a stream and of a mix mean for its source: by class, by file, by moment."""

from pathlib import Path

import numpy as np
import pytest

from batchd.config.tree import Weights
from batchd.core.mixtures import Segment
from batchd.core.plan import Plan
from batchd.data.samples.checks import OptionsInvalid
from batchd.data.sources.arrays.options import NpySource
from batchd.data.sources.composed.options import ConcatSource, MixSource, SubsetSource
from batchd.data.sources.composed.scan import shares_of
from batchd.data.sources.files.options import FolderSource
from batchd.data.sources.interface import kind_of
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import quick_look
from batchd.errors import SourceInvalid
from batchd.stream.plan import segments_of, weights_of
from support.images import write_photos

BOTH = (FolderSource(path=Path("/a")), FolderSource(path=Path("/b")))


def scan(source):
    return kind_of(source).scan(source, quick_look(Storage()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight photographs of one class and two of another."""
    root = tmp_path_factory.mktemp("classes")
    write_photos(root, {"many": 8, "few": 2})
    return FolderSource(path=root)


def by_class(source, power):
    return weights_of(Weights(by="class", power=power), source, scan(source))


@pytest.mark.parametrize(("power", "share"), [(0.0, 0.5), (0.5, 1 / 3), (1.0, 0.2)])
def test_the_share_of_a_class_is_its_size_to_a_power(folder, power, share):
    weights, labels = by_class(folder, power), scan(folder).arrays["labels"]

    assert weights[labels == 0].sum() / weights.sum() == pytest.approx(share)
    assert len(set(weights[labels == 1].tolist())) == 1


def test_labels_of_composed_sources_are_those_of_their_parts(folder):
    few = SubsetSource(of=folder, start=0, stop=4)
    for source, labels in (
        (few, [0, 0, 1, 1]),
        (ConcatSource(sources=(few, folder)), [0, 0, 1, 1, 0, 0, *[1] * 8]),
        (MixSource(sources=(few, few), weights=(1, 1)), [0, 0, 0, 0, 1, 1, 1, 1]),
        (MixSource(sources=(few, few), weights={"0": (1, 2)}), [0, 0, 1, 1, 0, 0, 1, 1]),
    ):
        found = kind_of(source).labels(source, scan(source))
        assert found is not None
        assert found.tolist() == labels


def test_a_source_without_labels_in_its_index_needs_a_file(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 2), np.uint8))

    with pytest.raises(SourceInvalid, match="has none: they are read with each sample; name a file of weights"):
        by_class(NpySource(path=tmp_path / "a.npy"), 0.0)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(9), r"float64\[9\], and the source has 10 samples: save a number for each"),
        (np.ones((10, 1)), r"float64\[10, 1\]"),
        (np.ones(10, bool), "holds bool"),
        (np.asarray([1.0] * 9 + [-1]), "w.npy:9: -1 is no weight; weights are 0 or more"),
        (np.asarray([np.nan] + [1.0] * 9), "w.npy:0: nan is no weight"),
        (np.asarray([np.inf] + [1.0] * 9), "w.npy:0: inf is no weight"),
        (np.zeros(10), "all weights are 0"),
    ],
)
def test_a_file_that_holds_no_weights_is_refused_by_its_name(folder, tmp_path, weights, message):
    np.save(tmp_path / "w.npy", weights)

    with pytest.raises(SourceInvalid, match=message):
        weights_of(Weights(file=tmp_path / "w.npy"), folder, scan(folder))


def test_files_that_cannot_be_read_are_refused_by_their_name(folder, tmp_path):
    (tmp_path / "text.npy").write_text("1 2 3")
    np.save(tmp_path / "whole.npy", np.ones(10))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:-8])

    for name, message in (("none", "No such file"), ("text", "is not a .npy file"), ("cut", "is cut")):
        with pytest.raises(SourceInvalid, match=f"{name}.npy.*{message}"):
            weights_of(Weights(file=tmp_path / f"{name}.npy"), folder, scan(folder))


def test_more_samples_than_there_are_cannot_be_drawn_once(folder, tmp_path):
    np.save(tmp_path / "w.npy", np.asarray([1.0] * 3 + [0.0] * 7))
    wanted = Weights(file=tmp_path / "w.npy", replacement=False, samples=4)

    with pytest.raises(
        SourceInvalid, match="samples = 4 cannot be drawn without replacement from 3 samples with a weight"
    ):
        weights_of(wanted, folder, scan(folder))


def test_whole_numbers_are_weights_as_well(folder, tmp_path):
    np.save(tmp_path / "w.npy", np.arange(10, dtype=">u2"))

    assert weights_of(Weights(file=tmp_path / "w.npy"), folder, scan(folder)).tolist() == list(range(10))


@pytest.mark.parametrize(
    ("drop_last", "moments", "rows"),
    [(False, ["0", "2", "3", "4", "epoch 3"], [0, 8, 10, 14, 30]), (True, ["0", "1", "3", "epoch 3"], [0, 4, 14, 30])],
)
def test_moments_are_batches_of_the_run_or_epochs(drop_last, moments, rows):
    """An epoch of ten rows has batches of four, four and two rows, or two of four."""
    source = MixSource(sources=BOTH, weights={moment: (1.0, number) for number, moment in enumerate(moments)})

    found = segments_of(source, Plan(10, 4, 0, shuffle=True, drop_last=drop_last))

    assert found == [Segment(row, (1.0, number)) for number, row in enumerate(rows)]


def test_with_repeats_a_moment_is_the_first_copy_of_a_batch():
    """An epoch of ten rows has batches of four, four and two rows, twice each."""
    plan = Plan(10, 4, 0, shuffle=True, drop_last=False, repeats=2)
    weights = {"0": (1.0, 0.0), "4": (1.0, 1.0), "8": (1.0, 2.0), "epoch 2": (1.0, 3.0)}

    found = segments_of(MixSource(sources=BOTH, weights=weights), plan)

    assert [segment.first for segment in found] == [0, 8, 14, 20]
    with pytest.raises(
        SourceInvalid, match=r"repeats = 2, batches 8 to 9 have the same samples, so .* batch 9; use 8 or 10"
    ):
        segments_of(MixSource(sources=BOTH, weights={"0": (1.0, 0.0), "9": (1.0, 1.0)}), plan)


def test_two_weights_for_one_moment_are_refused():
    source = MixSource(sources=BOTH, weights={"0": (1.0, 0.0), "6": (1.0, 1.0), "epoch 2": (2.0, 1.0)})

    with pytest.raises(
        SourceInvalid, match="'6' and 'epoch 2' are the same moment, batch 0 of epoch 2: an epoch has 3 batches"
    ):
        segments_of(source, Plan(10, 4, 0, shuffle=True, drop_last=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"0": (1.0,)}}, "2 sources and 1 weight; give each source one"),
        ({"weights": {"0": (0.0, 0.0)}}, "one of these weights must be more than 0"),
        ({"weights": {"0": (1.0, -1.0)}}, "weights must be 0 or more, not -1"),
        ({"weights": {"5": (1.0, 1.0)}}, 'no weights for the beginning; give some for "0"'),
        ({"weights": {"0": (1.0, 1.0), "epoch x": (1.0, 1.0)}}, "'epoch x' is no moment: use the number of a batch"),
        (
            {"weights": {"0": (1.0, 1.0)}, "until": "first"},
            "until counts only while weights do not change; use samples",
        ),
        ({"weights": (1.0, 1.0), "samples": 9}, "samples counts only with weights that change"),
        ({"weights": {"0": (1.0, 1.0)}, "samples": 0}, "samples must be 1 or more"),
        ({"weights": (1.0, 1.0), "temperature": 2.0}, "give weights or a temperature, and not both"),
        ({"temperature": 0.0}, "the temperature must be more than 0, not 0"),
        ({"weights": (1.0, 1.0, 1.0)}, "2 sources and 3 weights; give each source one"),
    ],
)
def test_weights_of_a_mix_that_cannot_be_are_refused(options, message):
    with pytest.raises(OptionsInvalid, match=message):
        MixSource(sources=BOTH, **options)


def test_a_temperature_gives_small_sources_more():
    assert shares_of([100, 10_000], 1) == pytest.approx((0.01, 1))
    assert shares_of([100, 10_000], 2) == pytest.approx((0.1, 1))
    assert shares_of([100, 10_000], 1e9) == pytest.approx((1, 1))
    assert shares_of([100, 10_000], None) == (1, 1)
