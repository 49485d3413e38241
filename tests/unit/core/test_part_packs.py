"""The packs of a mix whose shares change: each part by itself, its passes, and the way back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchd.core.mixtures import Mixture, Segment
from batchd.core.packs import Cuts, PackLimits, Packs, PartPacks, packed_in, part_seed

ROOM, SEED, RUN = 64, 3, 40
LIMITS = PackLimits(ROOM, 16, 100, "split")
SIZES = st.lists(st.lists(st.integers(0, 150), min_size=1, max_size=30).filter(any), min_size=1, max_size=3)


def planned(lengths: list[list[int]], rows: int, method: str, *, shuffle: bool = True) -> tuple[PartPacks, Mixture]:
    """Equal shares of the first 40 rows; then the first part leaves if there are several."""
    packs: list[Packs | Cuts] = [
        Packs.plan(np.array(own), LIMITS)
        if method == "best-fit"
        else Cuts.plan(np.array(own), ROOM, part_seed(SEED, part), shuffle=shuffle)
        for part, own in enumerate(lengths)
    ]
    shares = [1.0] * len(lengths)
    segments = [Segment(0, shares), Segment(RUN, [0.0 if len(shares) > 1 else 1.0, *shares[1:]])]
    firsts = np.cumsum([0, *map(len, lengths)])
    return PartPacks(packs, firsts), Mixture(list(map(len, packs)), segments, rows, SEED, shuffle=shuffle)


@pytest.mark.parametrize("method", ["best-fit", "concat-split"])
@settings(max_examples=25)
@given(lengths=SIZES, rows=st.sampled_from([8, 20, 40]), shuffle=st.booleans())
def test_documents_share_a_row_with_those_of_their_part_alone(method, lengths, rows, shuffle) -> None:
    """Each pass of a part has each of its elements once, and rows are found by their samples."""
    packs, order = planned(lengths, rows, method, shuffle=shuffle)
    everything = np.concatenate([np.array(own) for own in lengths])
    firsts = np.cumsum([0, *map(len, lengths)])
    read: dict[tuple[int, int], list[int]] = {}
    for epoch in range(RUN // rows):
        places = np.arange(rows)
        parts, passes, _places = order.passes_at(epoch, places)
        found = packs.contents(epoch, places, SEED, shuffle=shuffle, order=order)
        assert (np.diff(found[:, 0]) >= 0).all()
        assert np.array_equal(np.searchsorted(firsts, found[:, 1], "right") - 1, parts[found[:, 0]])
        for row, sample, first, *count in found.tolist():
            length = count[0] if count else min(everything[sample] - first, ROOM)
            read.setdefault((parts[row], passes[row]), []).extend(sample * 1000 + first + np.arange(length))
        samples = np.arange(len(everything))
        back = packs.places(np.full(len(samples), epoch), samples, SEED, shuffle=shuffle, order=order)
        assert sorted(map(tuple, back.tolist())) == sorted((s, row, first) for row, s, first, *_count in found.tolist())
    for part in range(len(lengths)):
        whole = sorted(
            sample * 1000 + element
            for sample in range(*firsts[part : part + 2])
            for element in range(everything[sample])
        )
        of_part = {number: elements for (one, number), elements in read.items() if one == part}
        whole_passes = round(order.share_at(0)[part] * RUN) // order.sizes[part]
        assert all(len(set(elements)) == len(elements) for elements in of_part.values())
        assert all(sorted(of_part[number]) == whole for number in range(whole_passes))


def test_a_row_needs_no_other_row_and_the_index_has_all() -> None:
    """After a way through arrays, whatever rows are asked for together."""
    packs, order = planned([[9, 60, 3, 44, 20], [5] * 40, [33, 31]], 30, "best-fit")
    again = packed_in(packs.to_arrays())

    assert isinstance(again, PartPacks)
    whole = packs.contents(1, np.arange(30), SEED, shuffle=True, order=order)
    for row in range(30):
        one = again.contents(1, np.array([row]), SEED, shuffle=True, order=order)
        assert np.array_equal(one[:, 1:], whole[whole[:, 0] == row][:, 1:])
    assert again.parts_of(np.arange(47), SEED).tolist() == [1] * 47
    assert len(again) == sum(map(len, packs.packs))
