"""The digest of an epoch's delivered rows: the same for any order and any division of the rows."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.commands.history.cards import RunCard, joined_card, read_card
from batchd.commands.history.differ import difference
from batchd.core import digests as module
from batchd.core.digests import EpochDigests, RowsDigest, digest_text, joined, rows_lanes
from batchd.core.plan import Plan
from batchd.errors import BatchdError, ConfigInvalid
from batchd_wire.position import Position
from support.configs import load

PLAN = Plan(23, 5, 0, shuffle=True, drop_last=False)
SUMS = np.random.default_rng(1).integers(0, 1 << 32, PLAN.samples, dtype=np.uint32)


def _whole(sums=SUMS):
    return digest_text(rows_lanes(np.arange(len(sums)), sums))


def _add(digests, epoch, step, first, end, sums=SUMS):
    digests.add(epoch, step, first, sums[step * 5 + first : step * 5 + end])


@given(st.integers(0, 1 << 32))
def test_any_order_and_division_of_the_rows_gives_the_digest_of_the_whole(seed):
    """Whole batches and parts of them, some twice; the epoch is complete at its last row."""
    digests, delivered, chance = EpochDigests(PLAN), set(), Random(seed)
    while len(delivered) < PLAN.samples:
        step = chance.randrange(PLAN.steps)
        first = chance.randrange(PLAN.rows(Position(0, step)))
        end = chance.randint(first + 1, PLAN.rows(Position(0, step)))
        rows = {step * 5 + row for row in range(first, end)}
        assert digests.lacks(3, step, first, end - first) == bool(rows - delivered)
        _add(digests, 3, step, first, end)
        delivered |= rows
        chosen = np.array(sorted(delivered))
        assert list(digests) == [
            RowsDigest(3, len(delivered), PLAN.samples, digest_text(rows_lanes(chosen, SUMS[chosen])))
        ]
    (found,) = digests
    assert found.digest == _whole()
    assert not digests.lacks(3, 0, 0, 5)


@given(st.integers(0, 22), st.integers(0, 22), st.integers(1, (1 << 32) - 1))
def test_another_row_or_rows_in_other_places_give_another_digest(one, other, change):
    """One bit of one row is enough, and so is an exchange of two."""
    changed, exchanged = SUMS.copy(), SUMS.copy()
    changed[one] ^= np.uint32(change)
    exchanged[[one, other]] = exchanged[[other, one]]

    assert _whole(changed) != _whole()
    assert (_whole(exchanged) != _whole()) == (one != other)


def test_an_epoch_without_its_dropped_rows_is_complete():
    """drop_last leaves three of 23 rows out of every epoch."""
    digests = EpochDigests(replace(PLAN, drop_last=True))
    for step in range(4):
        _add(digests, 0, step, 0, 5)

    assert [(one.rows, one.rows_max) for one in digests] == [(20, 20)]


def test_the_digest_of_known_rows_never_changes():
    """Saved cards have it."""
    lanes = rows_lanes(np.array([0, 1, 10**9]), np.array([0, 1, 0xFFFFFFFF], np.uint32))
    assert digest_text(lanes) == "35c70978936f5d04754944313d4cac844d91656bbf3c7701cde31a23e2c74b2e"


def test_digests_are_forgotten_where_there_are_too_many(monkeypatch):
    """Those to which no row was added for longest go first; the steps of epochs are limited."""
    monkeypatch.setattr(module, "EPOCHS_MAX", 4)
    digests = EpochDigests(PLAN)
    for epoch in (0, 1, 2, 3):
        for step in range(PLAN.steps):
            _add(digests, epoch, step, 0, PLAN.rows(Position(0, step)))
    _add(digests, 9, 0, 0, 5)
    assert [one.epoch for one in digests] == [1, 2, 3, 9]
    monkeypatch.setattr(module, "STEPS_BYTES_MAX", 2)
    _add(digests, 8, 0, 0, 5)
    _add(digests, 9, 1, 0, 5)
    _add(digests, 7, 0, 0, 5)
    assert [one.epoch for one in digests] == [2, 3, 7, 9]


def _card(*digests, fingerprint="5" * 32):
    return RunCard("photos", fingerprint, 23, {"seed": 0}, {}, {}, 0.0, None, digests)


def _digest(epoch, rows):
    return RowsDigest(epoch, len(rows), 23, digest_text(rows_lanes(np.array(rows), SUMS[rows])))


def test_the_digests_of_hosts_that_shared_the_ranks_add_up(tmp_path):
    """Rows that both delivered, or another run, are refused by the file's name."""
    odd, even = [*range(1, 23, 2)], [*range(0, 23, 2)]
    file = tmp_path / "b.json"
    card = joined_card(_card(_digest(0, odd), _digest(1, even)), [(file, _card(_digest(0, even), _digest(2, odd)))])

    assert [(one.epoch, one.rows) for one in card.digests] == [(0, 23), (1, 12), (2, 11)]
    assert card.digests[0].digest == _whole()
    assert joined(_digest(0, odd), _digest(0, even)) == joined(_digest(0, even), _digest(0, odd)) == card.digests[0]
    with pytest.raises(BatchdError, match=r"b\.json: epoch 0 has 23 rows, and both cards together 24"):
        joined_card(_card(_digest(0, even)), [(file, _card(_digest(0, even)))])
    with pytest.raises(BatchdError, match=r"b\.json is the card of stream 'photos' with the fingerprint 66"):
        joined_card(_card(), [(file, _card(fingerprint="6" * 32))])


def test_a_card_keeps_its_digests_in_its_file(tmp_path):
    """A damaged digest is refused; a card without any is one of an older batchd."""
    file = tmp_path / "card.json"
    card = _card(_digest(0, [1, 2]), _digest(1, [3]))
    file.write_text(card.to_json())
    assert read_card(file).digests == card.digests
    file.write_text(card.to_json().replace(card.digests[0].digest, "zz"))
    with pytest.raises(BatchdError, match=r"card\.json is a damaged card: its digests cannot be read"):
        read_card(file)
    plain = card.to_json().replace('"digests"', '"other"')
    file.write_text(plain)
    assert read_card(file).digests == ()


def test_a_comparison_of_cards_says_whether_the_same_rows_were_delivered():
    """Epochs that one card has in part cannot be compared."""
    whole, other = _digest(0, [*range(23)]), RowsDigest(1, 23, 23, "0" * 64)
    part = _digest(2, [1, 2])
    before = _card(whole, _digest(1, [*range(23)]), part)

    same, differs = difference(before, before), difference(before, _card(whole, other, _digest(2, [1, 2, 3])))

    assert (same.delivered, same.has_other_rows) == (["the same 48 rows delivered in 3 epochs"], False)
    assert differs.has_other_rows
    heads = [line.partition(":")[0] for line in differs.delivered]
    assert heads == ["epoch 1", "epoch 2", "the same 23 rows delivered in 1 epoch"]
    assert differs.delivered[1].endswith("2 of 23 and 3 of 23 rows were delivered, which cannot be compared")
    assert difference(before, _card()).delivered == []


def test_a_live_stream_has_no_epoch_to_digest(tmp_path):
    """The problem is at the key."""
    source = '{ type = "push", fields = { x = "float32" }, capacity = 8 }'
    with pytest.raises(ConfigInvalid, match=r"streams\.live\.digest: samples of type \"push\" have no epochs"):
        load(tmp_path, f"[streams.live]\nbatch_size = 2\ndigest = true\nsource = {source}\n")
