"""A small configuration to change, and how to load one from text.

For tests of the configuration.
"""

from collections.abc import Mapping
from pathlib import Path

from batchd.config.load import load_config
from batchd.config.tree import Config

STREAM = """
source = { type = "folder", path = "photos" }
batch_size = 4
pipeline = [ { op = "decode" }, { op = "random_resized_crop", size = [8, 8] } ]
"""
WHOLE = f"[daemon]\nworkers = 2\n[streams.photos]{STREAM}"


def load(
    folder: Path, text: str, overrides: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    file = folder / "batchd.toml"
    file.write_text(text)
    return load_config(file, overrides or {}, environment or {})
