"""The JSON Schema of the configuration, and questions to it: what is this key for, which keys are there? Daemon and CLI.

The schema is made from ``config.tree``; everything that speaks of keys (messages, ``batchd
config``, the manual) asks here.

Invariant: an answer follows the data: which keys a step or a source has depends on its ``op`` or
``type``.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from batchd.errors import KeyPath
from batchd.samples.sizes import format_bytes

Node = dict[str, Any]
"""A JSON Schema, or a part of one."""
_ANYTHING: Node = {"additionalProperties": True}


EXAMPLES = {
    "source": '{ type = "folder", path = "/data/photos" }',
    "batch_size": "256",
    "pipeline": """[
    { op = "decode" },
    { op = "random_resized_crop", size = [224, 224] },
    { op = "random_flip" },
]""",
    "sources": '[{ type = "folder", path = "/data/photos" }, { type = "folder", path = "/data/more" }]',
    "weights": "[3, 1]",
    "name": '"zip"',
    "options": '{ path = "/data/photos.zip" }',
    "of": '{ type = "folder", path = "/data/photos" }',
    "patterns": '["train/**/*.{jpg,png}", "more/*.jpg"]',
    "parquet.fields": '{ image = "image", label = "int64" }',
    "lmdb.fields": '{ image = "image" }',
    "shards": '["train-{0000..0123}.tar"]',
    "csv.fields": '{ age = "float32", label = "int64" }',
    "record": '{ label = "uint8", image = "uint8[3,32,32]" }',
    "tfrecord.fields": '{ image = "image", label = "int64" }',
    "video.files": '["train/**/*.mp4"]',
    "csv.root": "",
    "csv.path": '"/data/table.csv"',
    "npy.root": "",
    "npy.path": '"/data/images.npy"',
    "npz.path": '"/data/mnist.npz"',
    "raw.root": "",
    "raw.path": '"/data/data_batch_1.bin"',
    "runtime_dir": '"/run/batchd"',
    "tcp": '"10.0.0.5:7070"',
    "keys_dir": '"/etc/batchd/keys"',
    "cache_dir": '"/var/cache/batchd"',
    "cache_memory": '"160GiB"',
    "cache_short_side": "256",
    "cache_size": '"160GiB"',
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


def path_places(data: object, node: Node | None = None) -> Iterator[tuple[Any, str | int]]:
    """Where paths of files stand in ``data``: the table or array, and the key or place in it.

    Other text is no path, whatever its key is called. Where the schema knows no keys (options of a
    plugin, or a step or source that does not say of which kind it is), the keys that are paths
    elsewhere count.
    """
    node = resolve(json_schema() if node is None else node, data)
    is_open = "discriminator" in node or node.get("additionalProperties") is True
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, item in items:
        child = _child(node, name)
        if child is not None and not isinstance(item, str):
            yield from path_places(item, child)
        elif child is not None:
            yield from [(data, name)] if _is_path(child) else []
        elif is_open and not isinstance(item, str):
            yield from path_places(item, _ANYTHING)
        elif is_open and name in path_keys():
            yield data, name


def _is_path(node: Node) -> bool:
    return any(option.get("format") == "path" for option in [node, *node.get("anyOf", ())])


def meaning_of(path: KeyPath, data: object) -> str:
    """What the key at ``path`` is for: its documentation on one line, "" where there is no such key."""
    node = json_schema()
    description = ""
    for name in path:
        child = _child(resolve(node, data), name)
        if child is None:
            return "" if isinstance(name, str) else " ".join(description.split())
        node, data = child, _item(data, name)
        if isinstance(name, str):
            description = node.get("description", "")
        elif "discriminator" in node:
            description = resolve(node, data).get("description", description)
    return " ".join(description.split())


def known_keys(path: KeyPath, data: object) -> list[str]:
    """The keys that the table at ``path`` may have, but for the one that says of which kind it is; none if no keys are fixed."""
    node = _node_at(path, data)
    for name in path:
        data = _item(data, name)
    kind = None if node is None else node.get("discriminator", {}).get("propertyName")
    return [] if node is None else [key for key in resolve(node, data).get("properties", ()) if key != kind]


def kinds_at(path: KeyPath, data: object) -> list[str]:
    """The kinds of sources or steps that there are, for a table at ``path`` that is one of them."""
    node = _node_at(path, data)
    return list(node["discriminator"]["mapping"]) if node is not None and "discriminator" in node else []


def default_text(path: KeyPath, data: object) -> str:
    """The default of the key at ``path`` as TOML writes it; "" where it has none, or one that says nothing."""
    node = _node_at(path, data) or {}
    value = node.get("default")
    return "" if value in (None, "", [], {}) else json.dumps(format_bytes(value) if "x-unit" in node else value)


def _node_at(path: KeyPath, data: object) -> Node | None:
    """The schema of what stands at ``path``; None where nothing may."""
    node = json_schema()
    for name in path:
        child = _child(resolve(node, data), name)
        if child is None:
            return None
        node, data = child, _item(data, name)
    return node


def resolve(node: Node, data: object = None) -> Node:
    """Follow a reference, and choose among alternatives by the ``op`` or ``type`` that ``data`` has."""
    if "$ref" in node:
        return _definition(node["$ref"])
    if "discriminator" in node:
        kind = _item(data, node["discriminator"]["propertyName"])
        reference = node["discriminator"]["mapping"].get(kind) if isinstance(kind, str) else None
        return _definition(reference) if reference else node
    return node


def alternatives(node: Node) -> dict[str, Node]:
    """The tables among which a discriminator chooses, by its value, in their order: ``{"decode": …, "resize": …}``."""
    chosen_by = node["discriminator"]["propertyName"]
    tables = [_definition(option["$ref"]) for option in node["oneOf"]]
    return {table["properties"][chosen_by]["const"]: table for table in tables}


def _definition(reference: str) -> Node:
    node: Node = json_schema()["$defs"][reference.rpartition("/")[2]]
    return node


def _child(node: Node, name: str | int) -> Node | None:
    if isinstance(name, int):
        items: list[Node] = node.get("prefixItems", [])
        choices = [option["items"] for option in [node, *node.get("anyOf", ())] if "items" in option]
        return items[name] if name < len(items) else next(iter(choices), None)
    if name in node.get("properties", {}):
        child: Node = node["properties"][name]
        return child
    return next(iter(node.get("patternProperties", {}).values()), None)


def _item(data: object, name: str | int) -> object:
    if isinstance(data, dict):
        return data.get(name)
    if isinstance(data, list) and isinstance(name, int) and name < len(data):
        return data[name]
    return None


def example_of(kind: str, name: str) -> str:
    """What may stand for ``name`` in a source or step of a kind; "" where there is no example."""
    return EXAMPLES.get(f"{kind}.{name}", EXAMPLES.get(name, ""))
