"""Settings that a trainer sends for a stream of its own: how they are set, checked and bounded."""

import json
from pathlib import Path

import pytest

from batchd.config.derive import SET_KEYS_MAX, Settings
from batchd.errors import ConfigInvalid

DECODE, CROP, CALL = (
    {"op": "decode", "max_pixels": 1_000},
    {"op": "random_resized_crop", "size": [8, 8]},
    {"op": "call", "function": "own:darker"},
)


def whole(**changes: object) -> dict[str, object]:
    """Return the configuration of a stream, as the card of one in service has it."""
    stream = {
        "source": {"type": "folder", "path": "/data/photos"},
        "batch_size": 4,
        "pipeline": [DECODE, CROP, CALL],
        **changes,
    }
    return {"daemon": {}, "streams": {"a.b": stream}}


def derived(settings: object, **changes: object):
    """Return the stream with these settings."""
    return Settings("a.b", json.dumps(settings)).config(whole(**changes)).streams["a.b"]


def problems(settings: object, **changes: object) -> list[tuple[str, str]]:
    """Return where each problem of the settings is, and what it is."""
    with pytest.raises(ConfigInvalid) as raised:
        derived(settings, **changes)
    return [(problem.path, problem.message) for problem in raised.value.problems]


def test_values_are_set_by_dotted_paths_with_the_index_of_a_step() -> None:
    """Tables that are not there are made, null unsets, and nothing else changes."""
    stream = derived({"pipeline.1.scale": [0.2, 1], "pipeline[0].field": "image", "seed": 7, "mix.mixup": 0.8})

    assert (stream.pipeline[1].scale, stream.seed, stream.mix.mixup, stream.batch_size) == ((0.2, 1), 7, 0.8, 4)
    assert derived({"mix": None}, mix={"mixup": 0.8}).mix is None
    assert [step.op for step in derived({"pipeline": [DECODE, CROP]}).pipeline] == ["decode", "random_resized_crop"]


@pytest.mark.parametrize(
    ("settings", "path", "words"),
    [
        ({"pipeline.1.sise": [8, 8]}, 'set["pipeline.1.sise"]', "did you mean size?"),
        ({"pipeline.1": {"op": "random_resized_crop", "sise": 1}}, 'set["pipeline.1"].sise', "did you mean size?"),
        ({"pipeline.1.size": [8, -8]}, 'set["pipeline.1.size"][1]', "greater than or equal to 1, not -8"),
        ({"pipelin.1.size": [8, 8]}, 'set["pipelin.1.size"]', "did you mean pipeline?"),
        ({"pipeline.7.size": [8, 8]}, 'set["pipeline.7.size"]', "has 3 items, numbers 0 to 2, and there is no 7"),
        ({"batch_size": "many"}, 'set["batch_size"]', 'must be an integer, such as 256, not "many"'),
        ({"bat ch": 1}, 'set["bat ch"]', "is not a path of keys"),
        ({"seed = 1\nbatch_size": 1}, 'set["seed = 1\\nbatch_size"]', "is not a path of keys"),
        ({"max_skew": 3}, 'set["max_skew"]', 'counts only with lag = "lockstep"'),
    ],
)
def test_a_mistake_is_named_by_its_key(settings, path, words) -> None:
    """The words are those of `batchd check`, with a suggestion where one helps."""
    ((found, message),) = problems(settings)

    assert found == path
    assert words in message


@pytest.mark.parametrize("key", ["source.path", "source", "cache_dir", "cache_memory", "journal", "storage_away_s"])
def test_what_is_the_operators_cannot_be_set(key) -> None:
    """The answer names the keys that can."""
    ((path, message),) = problems({key: "/etc"})

    assert path == f'set["{key}"]'
    assert "for the operator" in message
    assert "pipeline, batch_size, seed" in message


def test_no_function_file_or_limit_is_there_that_the_file_does_not_have() -> None:
    """Those of the file may be moved."""
    foreign = {"op": "call", "function": "os:system"}

    assert "'os:system'" in problems({"pipeline": [DECODE, CROP, foreign]})[0][1]
    assert problems({"pipeline.0.max_pixels": 1_001}) == [
        ('set["pipeline.0.max_pixels"]', "may be 1000 at most, as in the file")
    ]
    large = {"op": "resize", "size": [8, 5_000]}
    assert problems({"pipeline": [DECODE, large, CROP]})[0][1].startswith("may be 4096 pixels at most")
    assert derived({"pipeline": [DECODE, large, CROP]}, pipeline=[DECODE, large]).pipeline[1].size == (8, 5_000)
    assert problems({"weights": {"file": "/etc/shadow"}})[0][1].startswith("names /etc/shadow")
    assert problems({"weights": {"file": "/data/w.npy/../x.npy"}}, weights={"file": "/data/w.npy"})
    assert derived({"weights.samples": 3}, weights={"file": "/data/w.npy"}).weights.file == Path("/data/w.npy")
    assert [step.op for step in derived({"pipeline": [DECODE, CALL, CROP]}).pipeline][1] == "call"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "7",
        '{"seed": NaN}',
        json.dumps({f"k{number}": 1 for number in range(SET_KEYS_MAX + 1)}),
    ],
)
def test_what_is_no_table_of_settings_is_refused(text) -> None:
    """One problem, about all of them."""
    with pytest.raises(ConfigInvalid) as raised:
        Settings("a.b", text)
    assert [problem.path for problem in raised.value.problems] == ["set"]
