"""Descriptions of streams for people: no secrets, limited length, no control codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchd.config.tree import StreamConfig
from batchd.stream.served import DESCRIBED_CHARACTERS_MAX, TEXT_CHARACTERS_MAX, describe
from batchd_wire.fields import SlotLayout

LAYOUT = SlotLayout((), 4, 4096)


def described(source: dict[str, Any], *steps: dict[str, Any]):
    """The description of a stream with this source and these steps."""
    plain = {"source": source, "pipeline": [{"op": "decode"}, *steps], "batch_size": 4}
    return describe(StreamConfig.model_validate_json(json.dumps(plain)), LAYOUT)


def test_a_step_has_the_options_that_are_not_its_defaults() -> None:
    """Options have the form of TOML; names that users chose are left out."""
    found = described(
        {"type": "folder", "path": "/data/photos"},
        {"op": "random_resized_crop", "size": [224, 224]},
        {"op": "random_flip"},
        {"op": "call", "function": "mine:f", "outputs": {"hunter2": "float32"}},
    )

    assert found.source == "folder /data/photos"
    assert found.pipeline[:3] == ("decode", "random_resized_crop(size=[224, 224])", "random_flip")
    assert "function=" in found.pipeline[3]
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(
    ("root", "shards", "shown"),
    [
        ("https://host/data", "a.tar?X-Amz-Signature=secret", "https://host/data: a.tar?…"),
        ("s3://bucket", "shards/{00..99}.tar", "s3://bucket: shards/{00..99}.tar"),
        ("/data", "shard-?.tar", "/data: shard-?.tar"),
    ],
)
def test_secrets_of_urls_are_not_shown(root, shards, shown) -> None:
    """A signature may follow the path; a pattern on a disk is shown. URLs cannot have passwords."""
    found = described({"type": "webdataset", "root": root, "shards": [shards]})

    assert found.source == f"webdataset {shown}"


def test_a_long_pipeline_is_cut() -> None:
    """A status has the descriptions of all streams, and must fit into a message."""
    found = described({"type": "folder", "path": "/data"}, *[{"op": "random_crop", "size": [20, 20]}] * 63)

    assert found.pipeline[0] == "decode"
    assert found.pipeline[-1] == "…"
    assert sum(map(len, found.pipeline)) <= DESCRIBED_CHARACTERS_MAX + 1


def test_a_path_is_short_and_printable() -> None:
    """This holds for every name."""
    found = described({"type": "folder", "path": str(Path("/") / ("\x1b[2J" + "x" * 999))})

    assert len(found.source) == TEXT_CHARACTERS_MAX
    assert found.source.isprintable()
