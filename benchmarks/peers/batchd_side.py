"""batchd: a daemon and its client.

The variants are "files" (the unchanged folder), "off" (the same without a cache of access points),
"shards", which ``batchd prepare`` made beforehand, and a stream of docs/cookbook.md, whose pipeline
it is. The configuration is the shortest possible one: all else is batchd's default. Several
trainers mirror one stream.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common

import batchd
import batchd_client

DAEMON = """
[daemon]
workers = {workers}
"""
STREAM = """
[streams.photos]
source = {source}
batch_size = {batch}
pipeline = {pipeline}
"""
CROP = """[
    { op = "decode" },
    { op = "random_resized_crop", size = [224, 224] },
    { op = "random_flip" },
]"""
COOKBOOK = Path(__file__).parents[2] / "docs" / "cookbook.md"
WITHOUT_RECIPE = {"files", "off", "shards"}


def source(data: Path, variant: str) -> str:
    """Where the stream's photographs are; shards lie beside the folder."""
    if variant != "shards":
        return f'{{ type = "folder", path = "{data}", allow_outside_root = true }}'
    return f'{{ type = "webdataset", root = "{data}-{variant}", shards = ["*.tar"], label = "" }}'


def stream(options: common.Options) -> str:
    """The part of the configuration about the photographs."""
    pipeline = CROP if options.variant in WITHOUT_RECIPE else recipe(options.variant)
    text = STREAM.format(source=source(options.data, options.variant), batch=options.batch, pipeline=pipeline)
    return text + 'cache = "off"\n' if options.variant == "off" else text


def configuration(options: common.Options, folder: Path) -> Path:
    """Write the daemon's configuration into a folder."""
    file = folder / "batchd.toml"
    file.write_text(DAEMON.format(workers=options.workers) + stream(options))
    return file


def recipe(name: str) -> str:
    """The pipeline of a stream of the cookbook."""
    found = re.search(
        rf"^\[streams\.{name}\]\n.*?^pipeline = (\[\n.*?^\])", COOKBOOK.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None, f"there is no stream {name}"
    return found[1]


@contextmanager
def serve(options: common.Options) -> Iterator[str]:
    """A daemon; gives its address."""
    with (
        tempfile.TemporaryDirectory(prefix="batchd-peers-") as scratch,
        batchd.serve(configuration(options, Path(scratch))) as address,
    ):
        yield address


def batches(options: common.Options) -> Iterator[Any]:
    """Arrays [batch, 224, 224, 3] uint8, or those of a recipe, until the next one is taken."""
    with batchd_client.connect(options.address) as daemon:
        stream = daemon.stream("photos")
        while True:
            for batch in stream:
                with batch:
                    yield (
                        batch["image"]
                        if options.variant in WITHOUT_RECIPE
                        else [pixels for pixels in batch.values() if pixels.ndim > 3]
                    )


if __name__ == "__main__":
    common.play(batches, serve)
