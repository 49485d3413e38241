"""Writes the JSON Schema of batchd.toml, batchd/config/schema.json, to standard output."""

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from itertools import pairwise

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from batchd.data.pipeline.options import STEP_KINDS, StepOptions
from batchd.data.samples import kinds
from batchd.data.sources.options import SourceOptions

kinds.IS_WHOLE = True
for options in (SourceOptions, StepOptions):
    options.__pydantic_config__["use_attribute_docstrings"] = True


def meanings(table: type) -> Iterator[tuple[str, str]]:
    """Each key that a class declares, with the text under it: pydantic reads no base's."""
    (tree,) = ast.parse(inspect.getsource(table)).body
    assert isinstance(tree, ast.ClassDef)
    for key, text in pairwise(tree.body):
        match key, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                yield name, inspect.cleandoc(meaning)


class InOrder(GenerateJsonSchema):
    """Keeps the order of the code, so that an example has the key that tells its kind in front."""

    def sort(self, value: JsonSchemaValue, _parent_key: str | None = None) -> JsonSchemaValue:
        """Return the schema as it is."""
        return value


def main() -> None:
    """Print the schema."""
    from batchd.config.tree import Config  # noqa: PLC0415  what it is made of is decided above

    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Config.model_json_schema(schema_generator=InOrder),
        "title": "batchd.toml",
    }
    for kind in STEP_KINDS.values():
        properties = schema["$defs"][kind.__name__]["properties"]
        inherited = dict(pair for base in reversed(kind.__mro__[1:-1]) for pair in meanings(base))
        for name, node in properties.items():
            if "description" not in node:
                properties[name] = {**node, "description": inherited[name]}
    sys.stdout.write(json.dumps(schema, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
