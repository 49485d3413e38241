"""Every position keeps its bytes: each stream gives those of ``golden/digests.json``."""

import json

from batchd.pipeline.kinds import STEP_KINDS
from batchd.sources.kinds import SOURCE_KINDS
from golden.data import write_data
from golden.digests import FILE, digests
from golden.streams import golden_streams

DIFFER_EACH_TIME = {"push", "generator"}
NOT_OURS = {"plugin"}


def test_each_golden_stream_gives_the_bytes_that_it_always_gave(start_daemon, tmp_path):
    """And has the fingerprint that it had, so that saved states are accepted."""
    data = tmp_path / "data"
    write_data(data)
    streams = golden_streams(data)
    daemon = start_daemon(streams, python_path=[str(data)])

    found = digests(daemon, list(streams))

    known = json.loads(FILE.read_text())
    assert {name for name in found if found[name] != known.get(name)} == set()
    assert found.keys() == known.keys()


def test_every_source_and_every_step_is_in_a_golden_stream(tmp_path):
    """So that none is forgotten when it is added."""
    streams = golden_streams(tmp_path).values()
    assert {stream["source"]["type"] for stream in streams} == SOURCE_KINDS.keys() - DIFFER_EACH_TIME - NOT_OURS
    steps = {step["op"] for stream in streams for step in stream.get("pipeline", ())}
    assert steps == STEP_KINDS.keys()
