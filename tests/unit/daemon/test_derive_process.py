"""The process that derives streams: over the index of one in service, what a file would have."""

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as of_hypothesis
from hypothesis import strategies as st

from batchd.config.load import load_config
from batchd.daemon.derive.messages import DeriveRequest
from batchd.daemon.derive.process import derive
from batchd.data.pipeline.options import STEP_KINDS
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import BatchdError, ConfigInvalid
from batchd.stream.rings import plan_rings
from batchd.stream.served import ServedStream, StreamFacts, open_stream
from batchd_wire.position import Position
from support.settings import PIPELINE, STILL_PIPELINE, folder_stream, write_settings

BLOCKS = {"blocks": 2, "block_samples": 5}
BUCKET = {"field": "image", "by": "aspect", "count": 2}
DECODED = {"cache": "decoded", "cache_memory": "4MiB"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a crop": ({}, {"pipeline.1.scale": [0.5, 1]}),
    "all steps": ({}, {"pipeline": STILL_PIPELINE, "shuffle": False}),
    "an order beside blocks": ({"shuffle": BLOCKS}, {"shuffle": True}),
    "other blocks": ({"shuffle": BLOCKS}, {"shuffle.blocks": 3}),
    "no weights": ({"weights": {"by": "class"}}, {"weights": None, "drop_last": True}),
    "weights": ({}, {"weights": {"by": "class", "power": 0.5}, "batch_size": 5}),
    "another seed of buckets": ({"bucket": BUCKET}, {"seed": 9}),
    "mixes and repeats": ({}, {"mix": {"mixup": 0.5}, "repeats": 2}),
    "a cut pipeline": (DECODED, {"seed": 3}),
    "another cut": (DECODED, {"pipeline": [*PIPELINE[:2], {"op": "gray"}]}),
}


def opened(folder: Path, **stream: Any) -> tuple[ServedStream, dict[str, Any]]:
    """Open a stream of a file, and return [daemon] as it is in force."""
    file = write_settings(folder / "batchd.toml", {"photos": stream}, {"memory": "64MiB", "derive": True})
    config, storage = load_config(file, {}), Storage()
    ring, cache = plan_rings(config, storage)["photos"], IndexCache(folder / "index")
    stream = open_stream(1, "photos", config, ring, storage, cache, lambda _found: None)
    return stream, config.daemon.model_dump(mode="json")


def derived(base: ServedStream, daemon: dict[str, Any], settings: dict[str, Any]) -> ServedStream:
    """Derive a stream as the daemon has it done."""
    configuration = json.loads("".join(base.facts.card.configuration))["streams"]["photos"]
    request = DeriveRequest(daemon, "photos", configuration, {}, json.dumps(settings))
    return derive(request, SourceIndex.from_descriptor(base.index_descriptor))


def order_of(stream: ServedStream) -> list[list[int]]:
    """The samples of three batches, by the index that the daemon gets."""
    index = SourceIndex.from_descriptor(stream.index_descriptor)
    plan = StreamFacts.from_wire(stream.facts.to_wire(), 2, index).spec.plan
    return [plan.indices(Position(1, step), 0, 4).tolist() for step in range(3)]


@pytest.mark.parametrize(("stream", "settings"), CASES.values(), ids=CASES)
def test_a_derived_stream_has_fingerprint_plan_and_recipe_of_one_in_the_file(photos, tmp_path, stream, settings):
    """No file of the source is read again: only its index counts."""
    base, daemon = opened(tmp_path, **folder_stream(photos, **stream))
    found = derived(base, daemon, settings)
    tables = {key.partition(".")[0]: value for key, value in settings.items()}
    if "pipeline.1.scale" in settings:
        tables["pipeline"] = [PIPELINE[0], {**PIPELINE[1], "scale": settings["pipeline.1.scale"]}, PIPELINE[2]]
    if "shuffle.blocks" in settings:
        tables["shuffle"] = {**BLOCKS, "blocks": 3}
    whole = {key: value for key, value in {**stream, **tables}.items() if value is not None}
    wanted, _daemon = opened(tmp_path, **folder_stream(photos, **whole))
    try:
        assert found.spec.fingerprint == wanted.spec.fingerprint != base.spec.fingerprint
        assert order_of(found) == order_of(wanted)
        assert found.message.recipe == wanted.message.recipe
        assert (found.facts.message.cache, found.facts.cache) == ("off", None)
    finally:
        for one in (base, found, wanted):
            one.close()


@pytest.mark.parametrize(
    ("stream", "settings", "words"),
    [
        ({"bucket": BUCKET}, {"bucket": None}, "bucket needs the sizes of all samples"),
        ({"bucket": BUCKET}, {"pipeline": STILL_PIPELINE}, "bucket needs the sizes of all samples"),
        ({}, {"batch_size": 41, "drop_last": True}, "makes no batch of 41"),
        ({}, {"memory": "17MiB"}, "all derived streams together have 16.0 MiB"),
        ({}, {"batch_size": 60_000}, "for 2 slots of 60,000 samples"),
    ],
)
def test_what_takes_a_scan_or_too_much_memory_is_refused(photos, tmp_path, stream, settings, words):
    base, daemon = opened(tmp_path, **folder_stream(photos, **stream))
    with pytest.raises(ConfigInvalid, match=words):
        derived(base, daemon, settings)
    base.close()


OPTIONS = sorted({option.name for kind in STEP_KINDS.values() for option in fields(kind)})
KEYS = [
    "pipeline",
    "pipeline.1",
    "pipeline.1.size",
    "pipeline.9",
    "batch_size",
    "shuffle",
    "weights.by",
    "mix",
    "memory",
]
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    PLAIN | st.sampled_from(["", "image", "decode", "/etc/passwd", "8GiB"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(OPTIONS), inner, max_size=3),
    max_leaves=6,
)
STEPS = st.builds(
    lambda op, options: {**options, "op": op},
    st.sampled_from(sorted(STEP_KINDS)),
    st.dictionaries(st.sampled_from(OPTIONS), VALUES, max_size=3),
)
BEHIND = st.lists(STEPS, max_size=3).map(lambda steps: [*PIPELINE, *steps])
SETTINGS = st.dictionaries(st.sampled_from(KEYS), VALUES | STEPS | BEHIND, min_size=1, max_size=3)


@pytest.fixture(scope="module")
def served(photos, tmp_path_factory):
    """Open a stream of a file."""
    base, daemon = opened(tmp_path_factory.mktemp("served"), **folder_stream(photos))
    yield base, daemon
    base.close()


@given(sent=SETTINGS)
@of_hypothesis(max_examples=100, deadline=None)
def test_whatever_a_trainer_sends_is_a_stream_or_refused_in_words(served, sent):
    """Any other exception would end the process, and say nothing to the trainer."""
    with suppress(BatchdError):
        derived(*served, sent).close()
