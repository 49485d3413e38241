"""Blocks of neighbours: where they begin in each kind of source, and why some have none."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.core.epochs import FACT, STARTS
from batchd.data.sources.interface import kind_of
from batchd.data.sources.neighbours import Neighbours, blocks_of_bytes, blocks_of_samples, joined, selected
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import SourceInvalid
from batchd.stream.fingerprints import fingerprint
from batchd.stream.plan import epoch_plan, planned_index
from batchd.stream.served import content_of
from golden.data import write_data
from golden.streams import golden_streams
from support.configs import load
from support.settings import _toml as _text
from support.shards import write_shard
from support.source_files import nothing
from unit.stream.test_daemon_fingerprint import plan_of

KIB = 1 << 10


def starts(folder: Path, source: str, shuffle: str) -> list[int]:
    """Return the first sample of each block of a stream, and the number of its samples."""
    text = f"[streams.a]\nsource = {source}\nbatch_size = 2\nshuffle = {shuffle}\n"
    config = load(folder, text).streams["a"]
    found: list[int] = planned_index(plan_of(config), scan(config.source)).arrays[STARTS].tolist()
    return found


def scan(source: SourceOptions) -> SourceIndex:
    return scan_source(source, nothing, IndexCache(None), Storage())


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Write two shards, with seven and four samples of some 40 KiB, each with two members."""
    for shard, count in enumerate((7, 4)):
        members = [(f"{n}.{end}", b"x" * size) for n in range(count) for end, size in (("jpg", 40 * KIB), ("cls", 1))]
        write_shard(tmp_path / f"{shard}.tar", [(name, b"1" if size == b"x" else size) for name, size in members])
    return tmp_path


WEBDATASET = '{ type = "webdataset", root = ".", shards = ["*.tar"] }'
WITH_FIELDS = WEBDATASET.replace(" }", ', fields = { image = "image" } }')


@pytest.mark.parametrize("source", [WEBDATASET, WITH_FIELDS])
def test_blocks_of_shards_end_with_their_shard(shards, source):
    """Blocks of samples, and of bytes: a sample counts where it begins in its shard."""
    assert starts(shards, source, "{ blocks = 2, block_samples = 3 }") == [0, 3, 6, 7, 10, 11]
    assert starts(shards, source, '{ blocks = 2, block_bytes = "128KiB" }') == [0, 4, 7, 11]
    assert starts(shards, source, '{ blocks = 2, block_bytes = "64KiB" }') == [0, 2, 4, 5, 7, 9, 11]


def test_a_concatenation_keeps_the_blocks_of_its_parts(shards):
    """The blocks of the second part follow those of the first."""
    whole = f'{{ type = "concat", sources = [{WEBDATASET}, {WEBDATASET}] }}'

    assert starts(shards, whole, "{ blocks = 2, block_samples = 4 }") == [0, 4, 7, 11, 15, 18, 22]
    assert starts(shards, whole, '{ blocks = 2, block_bytes = "128KiB" }') == [0, 4, 7, 11, 15, 18, 22]


def test_a_range_keeps_the_borders_that_are_within_it(shards):
    """Samples 5 to 9: two of the first shard and two of the second."""
    part = f'{{ type = "subset", start = 5, stop = 9, of = {WEBDATASET} }}'

    assert starts(shards, part, "{ blocks = 2, block_samples = 4 }") == [0, 2, 4]
    assert starts(shards, part, '{ blocks = 2, block_bytes = "256KiB" }') == [0, 2, 4]


@pytest.mark.parametrize(
    ("source", "shuffle", "reason"),
    [
        (
            f'{{ type = "subset", shuffle_seed = 1, of = {WEBDATASET} }}',
            "{ blocks = 2, block_samples = 4 }",
            "streams.a.shuffle: the source has no blocks of neighbours: few of its samples are next to each other",
        ),
        (
            f'{{ type = "mix", weights = [1, 1], sources = [{WEBDATASET}, {WEBDATASET}] }}',
            '{ blocks = 2, block_bytes = "1MiB" }',
            "streams.a.shuffle.block_bytes: a mix takes its samples from several sources in turn; use block_samples",
        ),
    ],
)
def test_a_source_that_cannot_have_the_blocks_is_refused_with_the_reason(shards, source, shuffle, reason):
    """The message names the key and what to do."""
    with pytest.raises(SourceInvalid) as caught:
        starts(shards, source, shuffle)
    assert str(caught.value).startswith(reason)


def test_files_of_their_own_have_blocks_of_samples_alone(tmp_path):
    """Neighbours follow each other in the listing, and the index has no sizes of files."""
    for number in range(5):
        (tmp_path / "x" / "c").mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / "c" / f"{number}.jpg").write_bytes(b"x")
    folder = '{ type = "folder", path = "x" }'

    assert starts(tmp_path, folder, "{ blocks = 2, block_samples = 3 }") == [0, 3, 5]
    with pytest.raises(SourceInvalid, match="the index has no sizes of files; use block_samples"):
        starts(tmp_path, folder, '{ blocks = 2, block_bytes = "1MiB" }')


@pytest.mark.thorough
def test_every_kind_of_golden_source_has_blocks_that_cover_it(tmp_path):
    """Of all sources on disk; the blocks by bytes exist where sizes are known."""
    data = tmp_path / "data"
    write_data(data)
    sized = set()
    for name, stream in golden_streams(data).items():
        kind = stream["source"]["type"]
        if kind in {"python", "plugin"}:
            continue
        config = load(tmp_path, _toml(stream)).streams["a"]
        index = scan(config.source)
        neighbours = kind_of(config.source).neighbours(config.source, index)
        is_sized = not neighbours.why_no_bytes and not neighbours.why_none
        for blocks in (
            blocks_of_samples(neighbours, len(index), 2),
            *([blocks_of_bytes(neighbours, len(index), 64 * KIB)] if is_sized else []),
        ):
            assert blocks[0] == 0, name
            assert blocks[-1] == len(index), name
            assert (np.diff(blocks) > 0).all(), name
            assert np.isin(neighbours.firsts, blocks).all(), name
        if is_sized:
            sized.add(kind)

    assert sized == {"webdataset", "tfrecord", "parquet", "npy", "npz", "raw", "csv", "jsonl", "tokens"}


def _toml(stream: dict) -> str:
    keys = "\n".join(f"{key} = {_text(value)}" for key, value in stream.items())
    return f"[streams.a]\n{keys}\n"


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9), block=st.integers(1, 12))
def test_blocks_of_samples_cut_each_stretch_by_itself(lengths, block):
    """All blocks of a stretch but the last are whole."""
    firsts = np.cumsum([0, *lengths])[:-1]
    found = blocks_of_samples(Neighbours(firsts), sum(lengths), block)

    expected = [first + n for first, length in zip(firsts, lengths, strict=True) for n in range(0, length, block)]
    assert found.tolist() == [*expected, sum(lengths)]


def test_samples_of_one_size_fill_blocks_of_bytes():
    """A block has as many as fit, and at least one."""
    alike = Neighbours(np.array([0, 10]), sample_bytes=np.array([100.0, 5000.0]))

    assert blocks_of_bytes(alike, 14, 350).tolist() == [0, 3, 6, 9, 10, 11, 12, 13, 14]
    begins = joined([(14, alike), (3, Neighbours(np.array([0]), begins=np.array([0, 10, 900])))]).begins
    assert begins is not None
    assert begins.tolist() == [*range(0, 1000, 100), 0, 5000, 10000, 15000, 0, 10, 900]


def test_a_selection_ends_a_stretch_where_numbers_fall():
    """Ascending numbers of one file are neighbours, with or without gaps."""
    whole = Neighbours(np.array([0, 6]), begins=np.arange(12) * 10)

    found = selected(whole, 12, np.array([1, 3, 5, 7, 8, 2, 3]))
    assert found.firsts.tolist() == [0, 3, 5]
    assert found.begins is not None
    assert found.begins.tolist() == [10, 30, 50, 70, 80, 20, 30]
    assert selected(whole, 12, np.array([5, 4, 3, 2])).why_none


def test_the_blocks_change_the_fingerprint_and_not_the_options_that_made_them(shards):
    """The index's own digest stays, so caches of samples stay valid."""

    def facts(shuffle: str) -> tuple[str, str]:
        text = f"[streams.a]\nsource = {WEBDATASET}\nbatch_size = 2\n{shuffle}\n"
        config = load(shards, text).streams["a"]
        index = planned_index(plan_of(config), scan(config.source))
        content = content_of(plan_of(config), index.digest, epoch_plan(plan_of(config), index))
        return fingerprint(content), index.digest

    found = [
        facts(one)
        for one in (
            "",
            "shuffle = false",
            "shuffle = { blocks = 2, block_samples = 4 }",
            "shuffle = { blocks = 3, block_samples = 4 }",
            "shuffle = { blocks = 2, block_samples = 3 }",
            'shuffle = { blocks = 2, block_bytes = "128KiB" }',
        )
    ]

    assert len({digest for _found, digest in found}) == 1
    assert len({one for one, _digest in found}) == 5
    assert found[2] == found[5]


def test_the_facts_of_the_order_are_in_the_index_of_workers_alone(shards):
    """A stream without blocks has the index of its source as it is."""
    text = f"[streams.a]\nsource = {WEBDATASET}\nbatch_size = 2\n"
    config = load(shards, text).streams["a"]
    index = scan(config.source)

    assert planned_index(plan_of(config), index) is index
    blocked = load(shards, text + "shuffle = { blocks = 2, block_samples = 4 }").streams["a"]
    assert json.dumps(planned_index(plan_of(blocked), index).facts[FACT]) == '{"open_blocks": 2}'
