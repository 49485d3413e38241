"""The JSON Schema of the configuration: keys, meanings, defaults, examples. Daemon and CLI.

The schema is made from ``config.tree``; messages, ``batchd config`` and the manual read it here.

Invariant: an answer follows the data: the ``op`` of a step and the ``type`` of a source decide
which keys it has.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypedDict

from batchd.errors import KeyPath, Problem, ProblemKind, path_text
from batchd.samples.sizes import format_bytes


class Discriminator(TypedDict):
    """The key that tells the tables of ``oneOf`` apart, and the reference of each by its value."""

    propertyName: str
    mapping: dict[str, str]


Node = TypedDict(
    "Node",
    {
        "$defs": dict[str, "Node"],
        "$ref": str,
        "additionalProperties": bool,
        "anyOf": list["Node"],
        "const": str,
        "default": object,
        "description": str,
        "discriminator": Discriminator,
        "enum": list[str],
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


EXAMPLES = {
    "source": '{ type = "folder", path = "/data/photos" }',
    "batch_size": "256",
    "pipeline": """[
    { op = "decode" },
    { op = "random_resized_crop", size = [224, 224] },
    { op = "random_flip" },
]""",
    "bucket": '{ field = "tokens", count = 16 }',
    "bounds": "[128, 512]",
    "balance": "8",
    "shuffle": '{ blocks = 64, block_bytes = "8MiB" }',
    "sources": '[{ type = "folder", path = "/data/photos" }, { type = "folder", path = "/data/more" }]',
    "mix.weights": "[3, 1]",
    "weights": '{ by = "class", power = 0.5 }',
    "weights.file": '"/data/weights.npy"',
    "name": '"zip"',
    "options": '{ path = "/data/photos.zip" }',
    "of": '{ type = "folder", path = "/data/photos" }',
    "patterns": '["train/**/*.{jpg,png}", "more/*.jpg"]',
    "parquet.fields": '{ image = "image", label = "int64" }',
    "lmdb.fields": '{ image = "image" }',
    "shards": '["train-{0000..0123}.tar"]',
    "csv.fields": '{ age = "float32", label = "int64" }',
    "jsonl.fields": '{ text = "text" }',
    "jsonl.shards": '["train-*.jsonl"]',
    "record": '{ label = "uint8", image = "uint8[3,32,32]" }',
    "tfrecord.fields": '{ image = "image", label = "int64" }',
    "video.files": '["train/**/*.mp4"]',
    "csv.root": "",
    "csv.path": '"/data/table.csv"',
    "npy.root": "",
    "npy.path": '"/data/images.npy"',
    "npz.path": '"/data/mnist.npz"',
    "tokens.root": "",
    "tokens.path": '"/data/train.bin"',
    "tokens.dtype": '"uint16"',
    "tokens.length": "1025",
    "raw.root": "",
    "raw.path": '"/data/data_batch_1.bin"',
    "runtime_dir": '"/run/batchd"',
    "tcp": '"10.0.0.5:7070"',
    "worker_address": '"10.0.0.5:7072"',
    "keys_dir": '"/etc/batchd/keys"',
    "cache_dir": '"/var/cache/batchd"',
    "cache_memory": '"160GiB"',
    "cache_short_side": "256",
    "cache_size": '"160GiB"',
    "journal": '"64MiB"',
    "memory": '"1GiB"',
    "path": '"/data/photos"',
    "root": '"/data"',
    "size": "[224, 224]",
    "classes": "10",
    "dtype": '"float32"',
    "min": "0.0",
    "max": "255.0",
    "drop.fields": '["caption"]',
    "field": '"fname"',
    "to": '"file"',
    "file": '"/data/tokenizer.json"',
    "max_length": "128",
    "words": '"/data/words.txt"',
    "table": '"/data/vectors.npy"',
    "max_words": "64",
    "pack.field": '"tokens"',
    "pack.length": "4096",
    "patches.size": "14",
    "documents": "64",
    "length": "256",
    "max_shape": "[512, 512, 3]",
    "quarter_turns": "[0, 1, 2, 3]",
    "mask": '"mask"',
    "python_path": '["/srv/training"]',
    "http_names": '["batchd.example.org"]',
    "python.options": '{ split = "train" }',
    "generator.options": "{ level = 3 }",
    "function": '"package.module:name"',
    "fields": '{ image = "uint8[32,32,3]", label = "int64" }',
    "outputs": '{ score = "float32" }',
}
"""In TOML, for keys without a default or with an empty list; "" means no example.

``KIND.KEY`` counts for one kind of source or step, and excludes ``KEY``.
"""


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
        elif _is_path(child) if child is not None else is_open and name in path_keys():
            data[name] = change(item)


def _is_path(node: Node) -> bool:
    return any(option.get("format") == "path" for option in [node, *node.get("anyOf", ())])


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
    return list(node["discriminator"]["mapping"]) if node is not None and "discriminator" in node else []


def default_text(path: KeyPath, data: object) -> str:
    """The default of the key at ``path`` as TOML; "" for none and for an empty one."""
    text = toml_default(_node_at(path, data) or {})
    return "" if text in ('""', "[]", "{}") else text


def toml_default(node: Node) -> str:
    """The default of a key as TOML writes it; "" without one."""
    value = node.get("default")
    if value is None:
        return ""
    return json.dumps(format_bytes(value) if "x-unit" in node and isinstance(value, int) else value)


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
    return next(iter(node.get("patternProperties", {}).values()), None)


def item_at(data: object, name: str | int) -> object:
    """The value of a table's key or of an array's index; None if there is none."""
    if isinstance(data, dict):
        return data.get(name)
    if isinstance(data, list) and isinstance(name, int) and name < len(data):
        return data[name]
    return None


def example_of(kind: str, name: str) -> str:
    """An example value of ``name`` in a source or step of a kind; "" if there is none."""
    return EXAMPLES.get(f"{kind}.{name}", EXAMPLES.get(name, ""))
