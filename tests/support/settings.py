"""Configurations for tests of processes: small streams over small photographs, as TOML."""

import json
from pathlib import Path
from typing import Any

SIDE_PIXELS = 32
PIPELINE = [
    {"op": "decode"},
    {"op": "random_resized_crop", "size": [SIDE_PIXELS, SIDE_PIXELS]},
    {"op": "random_flip"},
]
STILL_PIPELINE = [{"op": "decode"}, {"op": "resize", "size": [SIDE_PIXELS, SIDE_PIXELS]}]
"""A pipeline that gives the same bytes in every epoch."""
STREAM = {"batch_size": 8, "pipeline": PIPELINE, "window": 4}
"""Few batches ahead: by default, all small ones would be ready before the first is read."""
MEMORY = "64MiB"
SLOT_BYTES = 32 * 1024
"""The size of a slot of eight samples."""


def folder_stream(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a stream of random crops of a folder; ``changes`` are keys of ``[streams.NAME]``."""
    return {"source": {"type": "folder", "path": str(folder)}, **STREAM, **changes}


def list_stream(file: Path, root: Path, **changes: Any) -> dict[str, Any]:
    """Return a stream of the files that a list names, relative to ``root``."""
    return {"source": {"type": "list", "path": str(file), "root": str(root)}, **STREAM, **changes}


def write_settings(file: Path, streams: dict[str, dict[str, Any]], daemon: dict[str, Any]) -> Path:
    """Write a batchd.toml."""
    lines = ["[daemon]"] + [f"{key} = {_toml(value)}" for key, value in daemon.items()]
    for name, stream in streams.items():
        lines += [f"[streams.{name}]"] + [f"{key} = {_toml(value)}" for key, value in stream.items()]
    file.write_text("\n".join(lines) + "\n")
    return file


def _toml(value: Any) -> str:
    """Write a value as TOML; its tables are inline."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
