"""The JSON Schema of the configuration: keys, meanings, defaults, examples. Daemon and CLI.

The schema is made from ``config.tree``; messages, ``batchd config`` and the manual read it here.
Values are written as TOML, for them and for the configurations that batchd writes.

Invariant: an answer follows the data: the ``op`` of a step and the ``type`` of a source decide
which keys it has.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypedDict

from batchd.errors import KeyPath, Problem, ProblemKind, path_text
from batchd.runtime.sizes import format_bytes


class Discriminator(TypedDict):
    """The key that tells the tables of ``oneOf`` apart, and the reference of each by its value."""

    propertyName: str
    mapping: dict[str, str]


Node = TypedDict(
    "Node",
    {
        "$defs": dict[str, "Node"],
        "$ref": str,
        "additionalProperties": "bool | Node",
        "anyOf": list["Node"],
        "const": str,
        "default": object,
        "description": str,
        "discriminator": Discriminator,
        "enum": list[str],
        "examples": list[object],
        "format": str,
        "items": "Node",
        "oneOf": list["Node"],
        "patternProperties": dict[str, "Node"],
        "prefixItems": list["Node"],
        "properties": dict[str, "Node"],
        "required": list[str],
        "type": str,
        "x-unit": str,
    },
    total=False,
)
"""A JSON Schema, or a part of one: its keywords, but for the limits of numbers."""
_ANYTHING: Node = {"additionalProperties": True}
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


@cache
def json_schema() -> Node:
    """The JSON Schema of batchd.toml, for editors. Do not change what you get.

    It is made from ``config.tree`` by docs/make_schema.py: to make it takes a tenth of a second,
    and every daemon asks.
    """
    schema: Node = json.loads(Path(__file__).with_name("schema.json").read_bytes())
    return schema


@cache
def path_keys() -> frozenset[str]:
    """The keys whose values are paths of files, such as ``root``."""
    found = set()
    for table in [json_schema(), *json_schema()["$defs"].values()]:
        found |= {name for name, node in table["properties"].items() if _is_path(node)}
    return frozenset(found)


def change_paths(data: object, change: Callable[[str], str], node: Node | None = None) -> None:
    """Replace each path of a file in ``data``, tables and arrays, by ``change(path)``.

    Only the schema decides which text is a path. Where it has no keys (options of a plugin, or a
    step or source of an unknown kind), the keys count that are paths elsewhere.
    """
    node = resolve(json_schema() if node is None else node, data)
    is_open = "discriminator" in node or node.get("additionalProperties") is True
    if not isinstance(data, (dict, list)):
        return
    for name, item in list(data.items() if isinstance(data, dict) else enumerate(data)):
        child = _child(node, name)
        if not isinstance(item, str):
            if child is not None or is_open:
                change_paths(item, change, _ANYTHING if child is None else child)
        elif _is_path(child, item) if child is not None else is_open and name in path_keys():
            data[name] = change(item)


def _is_path(node: Node, text: str = "") -> bool:
    """True for a key whose texts are paths, but for the words that it has besides."""
    choices = [node, *node.get("anyOf", ())]
    return any(one.get("format") == "path" for one in choices) and not any(
        text in one.get("enum", ()) for one in choices
    )


def meaning_of(path: KeyPath, data: object) -> str:
    """The documentation of the key at ``path`` on one line; "" for an unknown key."""
    node = json_schema()
    description = ""
    for name in path:
        child = _child(resolve(node, data), name)
        if child is None:
            return "" if isinstance(name, str) else " ".join(description.split())
        node, data = child, item_at(data, name)
        if isinstance(name, str):
            description = node.get("description", "")
        elif "discriminator" in node:
            description = resolve(node, data).get("description", description)
    return " ".join(description.split())


def problem_at(path: KeyPath, kind: ProblemKind, text: str, data: object = None) -> Problem:
    """A problem with the key at ``path``, and what the key means; it has no line yet."""
    return Problem(path_text(path), kind, text, meaning_of(path, data))


def known_keys(path: KeyPath, data: object) -> list[str]:
    """The keys of the table at ``path`` but ``op`` or ``type``; [] if it may have any keys."""
    node = _node_at(path, data)
    if node is None:
        return []
    for name in path:
        data = item_at(data, name)
    kind = node["discriminator"]["propertyName"] if "discriminator" in node else None
    return [key for key in resolve(node, data).get("properties", ()) if key != kind]


def kinds_at(path: KeyPath, data: object) -> list[str]:
    """The kinds that the table at ``path`` can be: of sources, or of steps."""
    node = _node_at(path, data)
    return sorted(node["discriminator"]["mapping"]) if node is not None and "discriminator" in node else []


def example_text(path: KeyPath, data: object) -> str:
    """The default of the key at ``path`` as TOML, else an example, else ""."""
    *before, name = path or ("",)
    if isinstance(name, int):
        several = _example(_node_at(tuple(before), data) or {})
        return toml_value(several[0]) if isinstance(several, list) and several else ""
    node = _node_at(path, data) or {}
    text = toml_default(node)
    return toml_example(node) if text in ("", '""', "[]", "{}") else text


def toml_example(node: Node) -> str:
    """The example of a key as TOML writes it; "" without one."""
    example = _example(node)
    return "" if example is None else toml_value(example)


def _example(node: Node) -> object:
    return next(iter(node.get("examples", ())), None)


def toml_default(node: Node) -> str:
    """The default of a key as TOML writes it; "" without one."""
    value = node.get("default")
    if value is None:
        return ""
    return json.dumps(format_bytes(value) if "x-unit" in node and isinstance(value, int) else value)


def toml_value(value: object) -> str:
    """A value on one line: a text, number, boolean, list, or table (a mapping)."""
    if isinstance(value, Mapping):
        pairs = [f"{toml_key(str(key))} = {toml_value(item)}" for key, item in value.items()]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(toml_value, value))}]"
    # in JSON, a text may have an unescaped DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """A key, in quotes if it needs them."""
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)


def _node_at(path: KeyPath, data: object) -> Node | None:
    """The schema of the value at ``path``; None for an unknown key."""
    node = json_schema()
    for name in path:
        child = _child(resolve(node, data), name)
        if child is None:
            return None
        node, data = child, item_at(data, name)
    return node


def resolve(node: Node, data: object = None) -> Node:
    """Follow a reference; choose among alternatives by the ``op`` or ``type`` in ``data``."""
    if "$ref" in node:
        return _definition(node["$ref"])
    if "discriminator" in node:
        kind = item_at(data, node["discriminator"]["propertyName"])
        reference = node["discriminator"]["mapping"].get(kind) if isinstance(kind, str) else None
        return _definition(reference) if reference else node
    table = table_of(node) if isinstance(data, dict) else None
    return table or node


def table_of(node: Node) -> Node | None:
    """The table among the alternatives of a value, such as a number or none; None without one."""
    options = [*node.get("oneOf", ()), *node.get("anyOf", ())]
    references = (option["$ref"] for option in options if "$ref" in option)
    return None if "discriminator" in node else next(map(_definition, references), None)


def entries_of(node: Node) -> Node | None:
    """The table that each entry of a value is, whatever its name; None if there is none."""
    entry = node.get("additionalProperties")
    return _definition(entry["$ref"]) if isinstance(entry, dict) and "$ref" in entry else None


def alternatives(node: Node) -> dict[str, Node]:
    """The alternatives of a discriminator by its value: ``{"decode": …, "resize": …}``."""
    chosen_by = node["discriminator"]["propertyName"]
    tables = [_definition(option["$ref"]) for option in node["oneOf"]]
    return {table["properties"][chosen_by]["const"]: table for table in tables}


def _definition(reference: str) -> Node:
    return json_schema()["$defs"][reference.rpartition("/")[2]]


def _child(node: Node, name: str | int) -> Node | None:
    if isinstance(name, int):
        items = node.get("prefixItems", [])
        choices = [option["items"] for option in [node, *node.get("anyOf", ())] if "items" in option]
        return items[name] if name < len(items) else next(iter(choices), None)
    if name in node.get("properties", {}):
        return node["properties"][name]
    others = node.get("additionalProperties")
    return others if isinstance(others, dict) else next(iter(node.get("patternProperties", {}).values()), None)


def item_at(data: object, name: str | int) -> object:
    """The value of a table's key or of an array's index; None if there is none."""
    if isinstance(data, dict):
        return data.get(name)
    if isinstance(data, list) and isinstance(name, int) and name < len(data):
        return data[name]
    return None
