"""The printed descriptions of the configuration: annotated file, schema and manual."""

import json
import re
from pathlib import Path

from batchd.cli.config import annotated_toml, reference_markdown
from batchd.config.schema import json_schema, toml_default, toml_example
from batchd.config.tree import DaemonConfig, StreamConfig
from batchd.data.pipeline.options import STEP_KINDS
from batchd.data.sources.options import SOURCE_KINDS
from batchd.data.storage.access import Storage
from batchd.stream.rings import plan_rings
from support.configs import WHOLE, load

TABLES = ("DaemonConfig", "StreamConfig")
"""The tables whose keys `batchd config` prints each on a line, with a default or an example."""


def test_the_annotated_file_loads_and_is_made_of_defaults(tmp_path: Path) -> None:
    """`batchd config > batchd.toml` gives a valid file, and all its statements are true."""
    config = load(tmp_path, annotated_toml())

    assert config.daemon == DaemonConfig(python_path=(tmp_path,))
    photos = config.streams["photos"]
    examples = {"source", "pipeline", "batch_size"}
    defaults = {name: field.default for name, field in StreamConfig.model_fields.items() if name not in examples}
    assert {name: getattr(photos, name) for name in defaults} == defaults
    assert plan_rings(config, Storage())["photos"].slots_max > 2


def test_the_annotated_file_has_every_key_and_every_kind(tmp_path: Path) -> None:
    """Each step and source is shown as one line that works when it is copied."""
    text = annotated_toml()
    for key in [*DaemonConfig.model_fields, *StreamConfig.model_fields]:
        assert re.search(rf"^(# )?{key} = ", text, re.MULTILINE), key
    steps = re.findall(r"^# (\{ op = .*\})$", text, re.MULTILINE)
    sources = re.findall(r"^# (\{ type = .*\})$", text, re.MULTILINE)

    changed = {"streams.photos.pipeline": f"[{', '.join(steps)}]"}
    assert [step.op for step in load(tmp_path, WHOLE, changed).streams["photos"].pipeline] == list(STEP_KINDS)
    assert [
        load(tmp_path, WHOLE, {"streams.photos.source": text}).streams["photos"].source.type for text in sources
    ] == list(SOURCE_KINDS)


def test_the_schema_names_every_key_with_its_meaning() -> None:
    """An editor can complete and explain every key."""
    schema = json.loads(json.dumps(json_schema()))
    kinds = {kind.__name__ for kind in [*SOURCE_KINDS.values(), *STEP_KINDS.values()]}
    tables = {
        "DaemonConfig",
        "StreamConfig",
        "DefineConfig",
        "BlockShuffle",
        "Bucket",
        "Erasing",
        "Mix",
        "TenantShare",
        "View",
        "Weights",
    } | kinds

    assert schema["$defs"].keys() == tables
    for table in schema["$defs"].values():
        assert table["additionalProperties"] is False
        assert table["description"]
        for key, node in table["properties"].items():
            assert node.get("description"), key
    assert schema["$defs"]["StreamConfig"]["properties"].keys() == StreamConfig.model_fields.keys()


def test_a_key_without_a_default_has_an_example() -> None:
    """`batchd config` and problems show it; `Example` states it beside the field."""
    without = [
        f"{name}.{key}"
        for name, table in json_schema()["$defs"].items()
        for key, node in table["properties"].items()
        if "const" not in node
        if key in table.get("required", ()) or (name in TABLES and toml_default(node) in ("", "[]"))
        if not toml_example(node)
    ]

    assert without == [], "add an `Example` to these fields, and run `make docs`"


def test_the_manual_is_up_to_date() -> None:
    """Run `batchd config --reference > docs/configuration.md` if this fails."""
    manual = Path(__file__).parents[3] / "docs" / "configuration.md"

    assert manual.read_text() == reference_markdown()
