"""Cards of runs: their parts, what differs between two of them, and from which position on."""

import json
from dataclasses import replace

import numpy as np
import pytest

from batchd.cli.main import main
from batchd.commands.history.batches import card_of, open_alone
from batchd.commands.history.cards import (
    RunCard,
    TrainerState,
    read_card,
    read_run,
    version_differences,
)
from batchd.commands.history.differ import RowOrder, difference
from batchd.config.load import load_config
from batchd.config.tree import Config
from batchd.errors import BatchdError
from batchd.stream.fingerprints import content_from, fingerprint, part_differences
from batchd_wire.codec import TEXT_CHARACTERS_MAX
from batchd_wire.position import Position
from support.settings import STILL_PIPELINE, folder_stream, write_settings

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture
def card(photos, tmp_path):
    """Make the card of a stream of forty photographs in batches of eight, with changes."""

    def make(**changes) -> RunCard:
        config = write_settings(tmp_path / "batchd.toml", {"photos": folder_stream(photos, **changes)}, {})
        opened = open_alone(load_config(config), "photos")
        try:
            return card_of(opened, "OpenCV 9")
        finally:
            opened.close()

    return make


def test_a_card_has_every_part_of_the_fingerprint_and_the_configuration_that_makes_it(card, tmp_path):
    """Its configuration makes the same card, also after it was written to a file and read."""
    made = card(seed=7)
    file = tmp_path / "card.json"
    file.write_text(made.to_json())

    kept = read_card(file)

    assert kept == made
    assert {"content version", "source", "columns", "pipeline[0]", "seed", "batch_size"} <= made.parts.keys()
    assert (made.parts["seed"], made.parts["pipeline[1]"]["size"], made.samples) == (7, [32, 32], 40)
    opened = open_alone(kept.config(), "photos")
    again = card_of(opened, "OpenCV 9")
    opened.close()
    assert replace(again, time_s=made.time_s) == made


def test_a_long_configuration_travels_in_pieces(photos, tmp_path):
    """A text of a message has a limit; a source of many parts is longer."""
    parts = [{"type": "folder", "path": str(photos)}] * 200
    stream = {"source": {"type": "concat", "sources": parts}, "batch_size": 4, "pipeline": STILL_PIPELINE}
    config = load_config(write_settings(tmp_path / "batchd.toml", {"many": stream}, {}))
    opened = open_alone(config, "many")
    opened.close()

    assert len(opened.facts.card.configuration) > 1
    assert max(map(len, opened.facts.card.configuration)) <= TEXT_CHARACTERS_MAX
    assert card_of(opened, "").config().streams["many"] == config.streams["many"]


def test_the_card_of_an_unknown_key_says_which_batchd_wrote_it(card):
    """A newer batchd may have keys that this one does not know."""
    configuration = {"streams": {"photos": {**card().configuration["streams"]["photos"], "novel": 1}}}
    newer = replace(card(), configuration=configuration, versions={"batchd": "9.9"})
    with pytest.raises(BatchdError, match=r"cannot use the configuration of the card, which batchd 9\.9 wrote"):
        newer.config()


def test_parts_that_differ_are_named_with_their_values():
    """Steps by their options, code and files without digests, and parts that only one has."""
    step = {"op": "random_flip", "probability": 0.5, "direction": "both"}
    before = {
        "content version": 3,
        "source": "aa",
        "pipeline[0]": step,
        "pipeline[1]": {"op": "to"},
        "module aug": "1",
        "seed": 1,
    }
    after = {
        "content version": 4,
        "source": "bb",
        "pipeline[0]": {**step, "probability": 0.75},
        "pipeline[1]": {"op": "gray"},
        "module aug": "2",
        "seed": 1,
        "pool_accept": "any",
    }

    assert part_differences(before, after) == [
        "content version 3 became 4: this batchd makes other bytes of the same configuration",
        "source: other files, or other options of the source",
        'pipeline[0], "random_flip": probability 0.5 became 0.75',
        'pipeline[1]: "to" became "gray"',
        "module aug: the code of your function has changed",
        'pool_accept: nothing became "any"',
    ]
    assert part_differences(before, before) == []


def test_what_changed_in_a_step_of_a_view_is_named():
    """Not the whole table, which is long."""
    crop = {"op": "random_crop", "size": [9, 9]}

    def parts(*steps, count=2):
        return {"pipeline[0]": {"op": "views", "into": {"a": {"count": count, "steps": list(steps)}}}}

    name = 'pipeline[0], "views": into.a'
    assert part_differences(parts(crop), parts({**crop, "size": [8, 9]})) == [
        f"{name}.steps[0].size [9, 9] became [8, 9]"
    ]
    assert part_differences(parts(crop), parts({"op": "gray"}, count=3)) == [
        f"{name}.count 2 became 3",
        f'{name}.steps[0].op "random_crop" became "gray"',
    ]
    assert part_differences(parts(crop), parts(crop, crop))[0].startswith(f"{name}.steps [")


def test_the_parts_of_a_card_make_its_fingerprint(card):
    """No part is lost, nor changed, on the way to a card."""
    made = card(cache="decoded", cache_memory="4MiB")

    assert fingerprint(content_from(made.parts)) == made.fingerprint
    assert (
        fingerprint(content_from({**made.parts, "seed": 1}))
        == card(cache="decoded", cache_memory="4MiB", seed=1).fingerprint
    )


def test_versions_that_differ_are_named():
    """Only those that both know: a daemon's card has fewer."""
    assert version_differences({"batchd": "1", "decoders": "a", "x": "1"}, {"batchd": "1", "decoders": "b"}) == [
        "decoders: a became b"
    ]


@pytest.mark.parametrize(
    ("before", "after", "position", "note"),
    [
        ({}, {}, None, ""),
        ({}, {"seed": 1}, (0, 0), ""),
        ({}, {"batch_size": 4}, (0, 0), ""),
        ({}, {"pipeline": STILL_PIPELINE}, (0, 0), ""),
        ({"batch_size": 7}, {"batch_size": 7, "drop_last": True}, (0, 5), ""),
        ({}, {"drop_last": True}, None, "only ranks that share its last round differ"),
        ({}, {"on_error": "mask"}, (0, 0), ""),
        ({}, {"on_error": "fail"}, None, "a batch with a bad sample may differ earlier"),
        (
            {"batch_size": 7},
            {"batch_size": 7, "drop_last": True, "on_error": "fail"},
            (0, 5),
            "a bad sample may differ",
        ),
        (
            {"pipeline": STILL_PIPELINE, "shuffle": False},
            {"pipeline": STILL_PIPELINE, "shuffle": False, "seed": 3},
            None,
            "a batch with a bad sample may differ earlier",
        ),
        ({"shuffle": False, "batch_size": 40}, {"shuffle": False, "batch_size": 39}, (0, 0), ""),
    ],
)
def test_the_first_position_that_differs_follows_from_two_cards(card, before, after, position, note):
    """Nothing is decoded: the plans are compared, and what random steps draw."""
    found = difference(card(**before), card(**after))

    assert found.position == (None if position is None else Position(*position))
    assert note in found.note
    assert bool(found.parts) == (before != after)


def _row_orders(cards):
    return tuple(map(RowOrder.scan, cards))


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("stream", "change", "position"),
    [
        ("blocks", {"seed": 1}, (0, 0)),
        ("blocks", {"batch_size": 7}, (0, 0)),
        ("blocks", {"drop_last": True, "batch_size": 7}, (0, 0)),
        ("weights", {"seed": 1}, (0, 0)),
        ("weights", {"drop_last": True}, (0, 5)),
        ("packs", {"seed": 1}, None),
        ("packs", {"shuffle": True}, (0, 0)),
        ("packs", {"drop_last": True}, (0, 2)),
        ("cuts", {"seed": 1}, (0, 0)),
        ("cuts", {"drop_last": True}, (0, 2)),
    ],
)
def test_rows_that_follow_from_the_data_are_compared_where_their_indexes_are_read(tmp_path, stream, change, position):
    """With equal data and seed a card suffices; else it says what would help."""
    (tmp_path / "lines.jsonl").write_text("".join(f'{{"x": {[1.5] * (1 + n % 3)}}}\n' for n in range(23)))
    np.save(tmp_path / "w.npy", np.arange(23.0))
    source = {"type": "jsonl", "root": str(tmp_path), "shards": ["lines.jsonl"], "fields": {"x": "float32[?]"}}
    pad = [{"op": "pad_batch", "field": "x", "max_shape": [3]}]
    known = {
        "blocks": {"shuffle": {"blocks": 2, "block_samples": 3}, "pipeline": pad},
        "weights": {"weights": {"file": str(tmp_path / "w.npy")}, "pipeline": pad},
        "packs": {
            "pipeline": [{"op": "pack", "field": "x", "length": 4, "documents": 4}],
            "shuffle": False,
            "batch_size": 5,
        },
        "cuts": {
            "pipeline": [{"op": "pack", "field": "x", "length": 4, "documents": 4, "method": "concat-split"}],
            "batch_size": 5,
        },
    }[stream]
    cards = []
    for changes in ({}, change):
        keys = {"source": source, "batch_size": 4, **known, **changes}
        config = write_settings(tmp_path / "batchd.toml", {"lines": keys}, {})
        opened = open_alone(load_config(config), "lines")
        cards.append(card_of(opened, ""))
        opened.close()

    without, scanned = difference(*cards), difference(*cards, _row_orders(cards))

    assert scanned.position == (None if position is None else Position(*position))
    follows = bool({"seed", "shuffle"} & change.keys())
    assert ("--scan reads the indexes" in without.note) == follows
    assert follows or without.position == scanned.position


def test_diff_reads_the_indexes_of_both_runs_if_asked_to(card, tmp_path, capsys):
    """Without, it says how; an index that is not that of the card any more is refused."""
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    blocks = {"shuffle": {"blocks": 2, "block_samples": 5}, "pipeline": STILL_PIPELINE}
    cards = [card(**blocks), card(**blocks, seed=1)]
    for file, made in zip(files, cards, strict=True):
        file.write_text(made.to_json())

    assert "--scan reads the indexes" in _diff(capsys, *files)[1]
    assert _diff(capsys, *files, "--scan") == (1, "seed: 0 became 1\nfirst other batch: 0:0\n")
    files[1].write_text(replace(cards[1], fingerprint="5" * 32, parts={**cards[1].parts, "source": "6"}).to_json())
    with pytest.raises(SystemExit):
        main(["diff", *map(str, files), "--scan"])
    assert "makes other batches than when the card was written:\n  source: other files" in capsys.readouterr().err


def test_changed_files_alone_differ_where_a_changed_sample_is(card):
    """Which file has changed, a card does not know."""
    one = card()
    other = replace(one, fingerprint="5" * 32, parts={**one.parts, "source": "5" * 64})

    found = difference(one, other)

    assert found.position is None
    assert found.note == "the first batch with a sample that has changed differs; 0:0 is the first that may"


def _diff(capsys, *files):
    with pytest.raises(SystemExit) as ended:
        main(["diff", *map(str, files)])
    return ended.value.code, capsys.readouterr().out


def test_diff_prints_where_and_why_two_runs_differ(card, tmp_path, capsys):
    """Exit status 1 if they do; positions of states are named."""
    one, two, three = (tmp_path / f"{name}.json" for name in ("one", "two", "three"))
    made = card()
    state = TrainerState("photos", made.fingerprint, Position(3, 2))
    one.write_text(replace(made, state=state).to_json())
    two.write_text(card(seed=1).to_json())
    three.write_text(json.dumps(state.to_plain()))

    assert _diff(capsys, one, one) == (0, 2 * f"{one}: next batch at 3:2\n" + "the same batch at each position\n")
    assert _diff(capsys, one, two) == (
        1,
        f"{one}: next batch at 3:2\nseed: 0 became 1\nfirst other batch: 0:0\n",
    )
    assert _diff(capsys, three, one)[1].endswith("the same batch at each position\n")
    status, text = _diff(capsys, three, two)
    assert status == 1
    assert "a state does not say why: compare two cards" in text
    newer = tmp_path / "newer.json"
    newer.write_text(replace(made, versions={**made.versions, "numpy": "99"}).to_json())
    status, text = _diff(capsys, two, two)
    assert (status, text) == (0, "the same batch at each position\n")
    status, text = _diff(capsys, one, newer)
    assert status == 0
    assert "became 99\nthe same batch at each position\npixels may differ everywhere" in text


def test_a_state_of_another_run_is_not_saved_with_a_card(card, tmp_path, photos):
    """It would name another batch."""
    state = tmp_path / "state.json"
    state.write_text(json.dumps(TrainerState("photos", "5" * 32, Position(0, 0)).to_plain()))
    config = write_settings(tmp_path / "batchd.toml", {"photos": folder_stream(photos)}, {})
    with pytest.raises(SystemExit) as ended:
        main(["card", "photos", "--config", str(config), "--state", str(state)])
    assert ended.value.code == 1
    assert isinstance(card().config(), Config)


@pytest.mark.parametrize("state", [{"epoch": 0}, {"stream": "a", "fingerprint": "b", "epoch": -1, "step": 0}, []])
def test_a_file_that_is_no_state_is_refused_by_its_name(tmp_path, state):
    """The error says what ``state_dict`` gives."""
    file = tmp_path / "x.json"
    file.write_text(json.dumps(state))
    with pytest.raises(BatchdError, match=r"x\.json is n.* state"):
        read_run(file)
