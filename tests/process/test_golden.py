"""Every position keeps its bytes: each stream gives those of ``golden/digests.json``."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from batchd.data.pipeline.options import STEP_KINDS
from batchd.data.sources.options import SOURCE_KINDS
from golden.data import write_data
from golden.digests import FILE, digests
from golden.streams import MEMORY, golden_streams

LOCKED = Path(__file__).parents[2] / "constraints.txt"
DIFFER_EACH_TIME = {"push", "generator"}
NOT_OURS = {"plugin"}


def changed(found):
    """Name the streams that give other bytes than before, or have another fingerprint.

    The footer of a Parquet file names the pyarrow that wrote it: with another than the locked one
    only the bytes are compared.
    """
    known = json.loads(FILE.read_text())
    if f"pyarrow=={pa.__version__}" not in LOCKED.read_text():
        found["parquet"][0] = known["parquet"][0]
    return {name for name in found if found[name] != known.get(name)}


def test_each_golden_stream_gives_the_bytes_that_it_always_gave(start_daemon, tmp_path):
    """Each stream's fingerprint is unchanged as well, so the daemon accepts saved states."""
    data = tmp_path / "data"
    write_data(data)
    streams = golden_streams(data)
    daemon = start_daemon(streams, python_path=[str(data)], memory=MEMORY)

    found = digests(daemon, list(streams))

    assert changed(found) == set()
    assert found.keys() == json.loads(FILE.read_text()).keys()


@pytest.mark.thorough
def test_a_cache_of_pixels_changes_no_golden_stream(start_daemon, tmp_path):
    """Each image is decoded once; later epochs take it from the cache, whatever steps follow."""
    data = tmp_path / "data"
    write_data(data)
    streams = {name: stream for name, stream in golden_streams(data).items() if "cache" not in stream}
    streams = {name: {**stream, "cache_memory": "8MiB"} for name, stream in streams.items() if _decodes(stream)}
    daemon = start_daemon(streams, python_path=[str(data)], memory=MEMORY)

    found = digests(daemon, list(streams))

    assert changed(found) == set()
    kept = [stream for stream in daemon.status()["streams"] if stream["cache"] and stream["cache"]["kind"] == "pixels"]
    assert len(kept) > len(streams) // 2
    assert sum(stream["work"]["cache_hits"] for stream in kept) > sum(stream["work"]["cache_misses"] for stream in kept)


def _decodes(stream):
    return any(step["op"] == "decode" for step in stream.get("pipeline", ()))


def test_every_source_and_every_step_is_in_a_golden_stream(tmp_path):
    """A new source or step without a golden stream fails this test."""
    streams = golden_streams(tmp_path).values()
    assert {stream["source"]["type"] for stream in streams} == SOURCE_KINDS.keys() - DIFFER_EACH_TIME - NOT_OURS
    steps = {step["op"] for stream in streams for step in stream.get("pipeline", ())}
    assert steps == STEP_KINDS.keys()
