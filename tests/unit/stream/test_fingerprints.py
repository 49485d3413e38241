"""What a saved state tells of the stream it is of: the sketch in it, and what has changed since."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.stream.fingerprints import SKETCH_CHARACTERS, StateChanges, changes_since, fingerprint, sketch_of

CROP = {"op": "random_resized_crop", "size": [224, 224], "scale": [0.08, 1.0]}
CONTENT = {
    "version": 4,
    "source": "aa",
    "columns": [("image", "uint8[?,?,3]"), ("label", "int64[]")],
    "steps": [{"op": "decode"}, CROP, {"op": "random_flip"}, {"op": "normalize"}],
    "batch_size": 256,
    "seed": 7,
    "shuffle": True,
    "drop_last": False,
    "on_error": "substitute",
}
"""A stream without weights, cached steps, and functions of the user."""


def with_steps(*steps):
    return {"steps": [CONTENT["steps"][step] if isinstance(step, int) else step for step in steps]}


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        ({"batch_size": 32}, ["batch_size: 32 became 256"]),
        ({"seed": (1 << 63) - 1}, ["seed: 9223372036854775807 became 7"]),
        ({"drop_last": True}, ["drop_last: true became false"]),
        ({"on_error": "fail"}, ['on_error: "fail" became "substitute"']),
        ({"shuffle": False}, ["shuffle: false became true"]),
        ({"shuffle": "c0ffee"}, ['shuffle: "another value" became true']),
        ({"version": 3}, ["content version 3 became 4: this batchd makes other bytes of the same configuration"]),
        ({"source": "bb"}, ["source: other files, or other options of the source"]),
        ({"weights": "dd"}, ['weights: "another value" became nothing']),
        ({"cut": 2}, ['cached steps: "another value" became nothing']),
        ({"accept": "any"}, ['pool_accept: "another value" became nothing']),
        ({"modules": {"aug": "1"}}, ["module of your functions: the code of your function has changed"]),
        (
            {"columns": [("image", "uint8[?,?,3]")]},
            ['columns: "another value" became {"image": "uint8[?,?,3]", "label": "int64[]"}'],
        ),
        (
            with_steps(0, {**CROP, "scale": [0.2, 1.0]}, 2, 3),
            ['pipeline[1], "random_resized_crop": scale changed to [0.08, 1.0]'],
        ),
        (
            with_steps(0, {**CROP, "probability": 0.5}, 2, 3),
            ['pipeline[1], "random_resized_crop": its options changed'],
        ),
        (with_steps(0, {"op": "gray"}, 2, 3), ['pipeline[1]: another step became "random_resized_crop"']),
        (with_steps(0, 2, 3), ['pipeline[1], "random_resized_crop": it is new']),
        (with_steps(0, 1, 2, {"op": "gray"}, 3), ["pipeline[3]: a step was there that is gone"]),
        (
            {"batch_size": 32, "seed": 8},
            ["batch_size: 32 became 256", "seed: 8 became 7"],
        ),
        ({}, []),
    ],
)
def test_each_key_that_has_changed_is_named(before, lines):
    """Numbers have both values, and what the state has only a digest of has the present one."""
    old = CONTENT | before
    found = changes_since(fingerprint(old), sketch_of(old), CONTENT)
    assert sorted(found.lines) == sorted(lines)
    assert found.batch_size == (old["batch_size"] if before.keys() <= {"batch_size", "drop_last"} else None)


def test_many_changes_are_said_in_one_line():
    """The line stays short: the first four, and how many more there are."""
    old = CONTENT | {"seed": 1, "batch_size": 2, "drop_last": True, "source": "b", "on_error": "fail", "shuffle": False}
    text = changes_since(fingerprint(old), sketch_of(old), CONTENT).text
    assert text.count(";") == 4
    assert text.endswith("; and 2 more")


def test_a_pipeline_of_many_steps_leaves_a_state_below_200_bytes():
    """Then the sketch names steps, and not their options."""
    steps = [{"op": f"step{number}", **{f"option{one}": one for one in range(8)}} for number in range(13)]
    long = CONTENT | {"steps": steps, "seed": (1 << 63) - 1, "batch_size": 1 << 20}
    state = {"stream": "photos", "fingerprint": fingerprint(long), "epoch": 1000, "step": 1_000_000}
    assert len(json.dumps(state | {"parts": sketch_of(long)})) < 200
    now = CONTENT | {"steps": [*steps[:5], steps[5] | {"option3": 0}, *steps[6:]]}
    found = changes_since(fingerprint(long), sketch_of(long), now)
    assert 'pipeline[5], "step5": its options changed' in found.lines
    last = changes_since(fingerprint(long), sketch_of(long), long | {"steps": [*steps[:12], {"op": "gray"}]})
    assert len(last.lines) == 1
    assert last.lines[0].endswith("], or a step behind it, changed")


@given(st.text(st.characters(codec="utf-8"), max_size=2 * SKETCH_CHARACTERS))
def test_a_sketch_that_makes_no_sense_tells_nothing(sketch):
    """A trainer may send anything; what does not fit never makes a state fit."""
    assert changes_since("0" * 32, sketch, CONTENT).batch_size is None


@given(st.integers(0, len(sketch_of(CONTENT)) - 1), st.characters(codec="ascii"))
def test_a_damaged_sketch_never_makes_a_state_fit(place, character):
    """Only the fingerprint does: a sketch with another batch size is not believed."""
    sketch = sketch_of(CONTENT)
    damaged = sketch[:place] + character + sketch[place + 1 :]
    found = changes_since("0" * 32, damaged, CONTENT)
    assert isinstance(found, StateChanges)
    assert found.batch_size is None
