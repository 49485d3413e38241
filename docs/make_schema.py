"""Writes the JSON Schema of batchd.toml, batchd/config/schema.json, to standard output."""

import json
import sys

from batchd.pipeline.options import StepOptions
from batchd.samples import kinds
from batchd.sources.options import SourceOptions

kinds.IS_WHOLE = True
for options in (SourceOptions, StepOptions):
    options.__pydantic_config__["use_attribute_docstrings"] = True


def main() -> None:
    """Print the schema."""
    from batchd.config.tree import Config  # noqa: PLC0415  what it is made of is decided above

    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Config.model_json_schema(),
        "title": "batchd.toml",
    }
    sys.stdout.write(json.dumps(schema, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
