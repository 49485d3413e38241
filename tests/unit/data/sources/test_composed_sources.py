"""Sources that consist of others: concatenated, mixed by weight, and parts of one."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.sources.composed.options import ConcatSource, MixSource, SubsetSource, share_of
from batchd.data.sources.composed.scan import mixed_counts, mixed_order, shuffled
from batchd.data.sources.files.options import FolderSource, ListSource
from batchd.data.sources.interface import Reader, kind_of, open_reader
from batchd.data.sources.options import SourceOptions, source_from_plain, source_to_plain
from batchd.data.sources.scan import scan_source
from batchd.data.sources.source_checks import check_source
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.survey import Survey
from batchd.errors import ConfigInvalid, SourceInvalid
from support.configs import load
from support.shards import write_shard
from support.source_files import as_shared, make, nothing, source_problems


def scan(source: SourceOptions) -> SourceIndex:
    return scan_source(source, nothing, IndexCache(None), Storage())


def reader_of(source: SourceOptions) -> Reader:
    """A reader as in a worker: from plain data and a descriptor."""
    shared = as_shared(scan(source))
    return open_reader(source_from_plain(source_to_plain(source)), shared, 1000, Storage())


def contents(source: SourceOptions) -> list[str]:
    """The content of every sample's file."""
    reader = reader_of(source)
    found = [bytes(reader.read(sample)["image"]).decode() for sample in range(len(scan(source)))]
    reader.close()
    return found


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[FolderSource, FolderSource]]:
    """Three and two images, in the same classes."""
    one = FolderSource(path=make(tmp_path / "one", "a/1", "a/2", "b/3").rename(tmp_path / "1"))
    two = FolderSource(path=make(tmp_path / "two", "a/4", "b/5").rename(tmp_path / "2"))
    for file in [*one.path.rglob("*/*"), *two.path.rglob("*/*")]:
        file.write_text(file.name)
        file.rename(file.with_suffix(".jpg"))
    return one, two


# --- concat ---------------------------------------------------------------------------------------


def test_concat_has_one_source_after_the_other(folders) -> None:
    """Each sample has its own label, and its name has its path."""
    source = ConcatSource(sources=folders, source_field="from")
    reader = reader_of(source)

    assert contents(source) == ["1", "2", "3", "4", "5"]
    assert [int(reader.known(sample)["label"]) for sample in range(5)] == [0, 0, 1, 0, 1]
    assert [reader.read(sample)["from"] for sample in range(5)] == [0, 0, 0, 1, 1]
    assert reader.name(3) == str(folders[1].path / "a/4.jpg")
    assert scan(source).class_names == ("a", "b")
    for sample in (-1, 5):
        with pytest.raises(IndexError):
            reader.read(sample)
    reader.close()


def test_sources_of_different_kinds_can_be_combined(tmp_path: Path, folders) -> None:
    """The test combines a list, shards, and another composed source."""
    write_shard(tmp_path / "0.tar", [("x.jpg", b"six"), ("x.cls", b"9")])
    (tmp_path / "list.txt").write_text("1/a/1.jpg 7\n")
    shards = WebDatasetSource(root=tmp_path, shards=("*.tar",))
    inner = ConcatSource(sources=(ListSource(path=tmp_path / "list.txt"), shards))
    source = ConcatSource(sources=(folders[1], inner))

    assert contents(source) == ["4", "5", "1", "six"]
    assert [int(reader_of(source).known(sample)["label"]) for sample in range(4)] == [0, 1, 7, 9]


def test_classes_that_differ_are_refused(tmp_path: Path, folders) -> None:
    """Label 1 would have two meanings."""
    make(tmp_path / "other", "a/1.jpg", "c/2.jpg")
    make(tmp_path / "fewer", "a/1.jpg")
    for name, message in (
        ("other", r"label 1 is b in sources\[0\], but c in sources\[1\]"),
        ("fewer", r"sources\[0\] has 2 classes, but sources\[1\] has 1"),
    ):
        with pytest.raises(SourceInvalid, match=message):
            scan(ConcatSource(sources=(folders[0], FolderSource(path=tmp_path / name))))


def test_fields_that_differ_are_refused(folders) -> None:
    """A batch has the same fields in all rows."""
    other = FolderSource(path=folders[1].path, path_bytes=20)

    with pytest.raises(
        SourceInvalid, match=r"sources\[1\] has .*path: uint8\[20\], but sources\[0\] has image: image, label: int64"
    ):
        kind_of(ConcatSource(sources=(folders[0], other))).columns(ConcatSource(sources=(folders[0], other)), Storage())
    twice = ConcatSource(sources=folders, source_field="label")
    with pytest.raises(SourceInvalid, match="'label' is a field of the sources already"):
        kind_of(twice).columns(twice, Storage())


def test_the_part_that_is_wrong_is_named(tmp_path: Path, folders) -> None:
    """The checks before the scan name it, and the scan does."""
    gone = ConcatSource(sources=(folders[0], FolderSource(path=tmp_path / "gone")))
    (tmp_path / "empty").mkdir()
    empty = ConcatSource(sources=(folders[0], FolderSource(path=tmp_path / "empty")))

    assert check_source(gone, Storage()).problems == ((("sources", 1, "path"), f"there is no folder {tmp_path}/gone"),)
    with pytest.raises(SourceInvalid, match=r"sources\[1\]: .*holds no image"):
        scan(empty)


def test_progress_continues_from_part_to_part(folders) -> None:
    """The user sees one number that grows."""
    told: list[int] = []

    scan_source(ConcatSource(sources=folders), told.append, IndexCache(None), Storage())

    assert told == [3, 5]


def test_an_index_of_parts_is_kept_while_no_part_changes(folders) -> None:
    """If one part cannot be watched, no index is kept."""
    survey = Survey(nothing)
    kind_of(ConcatSource(sources=folders)).scan(ConcatSource(sources=folders), survey)

    assert survey.is_settled(-(10**12))
    assert {Path(one.path) for one in survey.witnesses} >= {folders[0].path, folders[1].path / "b"}
    survey.part(0)
    assert not survey.is_settled(-(10**12))


# --- mix ------------------------------------------------------------------------------------------


def test_mix_gives_every_stretch_its_share(folders) -> None:
    """Two of the first for one of the second, which repeats until the first is exhausted."""
    source = MixSource(sources=folders, weights=(1, 2))

    assert contents(source) == ["4", "1", "5", "4", "2", "5", "4", "3", "5"]


def test_mix_ends_with_its_first_exhausted_part(folders) -> None:
    """No sample occurs twice."""
    source = MixSource(sources=folders, weights=(2, 1), until="first")

    assert contents(source) == ["1", "4", "2", "3"]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=5),
    st.booleans(),
)
def test_a_mix_is_even_and_whole(parts: list[tuple[int, int]], whole: bool) -> None:
    """In each prefix, each part has its share to within one; "all" reads every sample."""
    samples, weights = [count for count, _ in parts], tuple(float(weight) for _, weight in parts)
    order, numbers = mixed_order(samples, weights, whole=whole)

    assert Counter(order.tolist()) == {
        part: count for part, count in enumerate(mixed_counts(samples, weights, whole=whole)) if count
    }
    shares = np.array(weights) / sum(weights)
    come = np.cumsum(order[:, np.newaxis] == np.arange(len(samples)), axis=0)
    expected = np.arange(1, len(order) + 1)[:, np.newaxis] * shares
    assert np.abs(come - expected).max() <= 1 + len(samples) / 2
    for part, count in enumerate(samples):
        own = numbers[order == part].tolist()
        assert own == [place % count for place in range(len(own))]
        assert len(own) >= count if whole else len(own) <= count
    assert any(mixed_counts(samples, weights, whole=whole)[part] == count for part, count in enumerate(samples))


def test_a_mix_that_would_never_end_is_refused(folders) -> None:
    """Weights that are far apart would make a small source repeat almost without end."""
    with pytest.raises(SourceInvalid, match="make an epoch of 6000000000000003"):
        scan(MixSource(sources=folders, weights=(1, 2e15)))


def test_the_order_is_part_of_the_digest(folders) -> None:
    """Other weights give other positions."""
    digests = {
        scan(source).digest
        for source in (
            ConcatSource(sources=folders),
            ConcatSource(sources=folders[::-1]),
            MixSource(sources=folders, weights=(1, 1)),
            MixSource(sources=folders, weights=(2, 1)),
            SubsetSource(of=ConcatSource(sources=folders)),
            SubsetSource(of=ConcatSource(sources=folders), shuffle_seed=1),
        )
    }

    assert len(digests) == 6


# --- subset ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "12345"),
        ({"start": 2}, "345"),
        ({"stop": 2}, "12"),
        ({"start": "20%", "stop": "60%"}, "23"),
        ({"stop": "99%"}, "1234"),
        ({"start": 4, "stop": 5}, "5"),
    ],
)
def test_a_range_selects_part_of_a_source(options, expected, folders) -> None:
    """By number and by percentage; adjacent ranges share no sample."""
    source = SubsetSource(of=ConcatSource(sources=folders), **options)

    assert "".join(contents(source)) == expected


def test_parts_of_a_shuffled_source_share_nothing_and_leave_nothing_out(folders) -> None:
    """They can be a training and a validation set."""
    whole = ConcatSource(sources=folders)
    train = contents(SubsetSource(of=whole, stop="60%", shuffle_seed=5))
    rest = contents(SubsetSource(of=whole, start="60%", shuffle_seed=5))

    assert (len(train), len(rest)) == (3, 2)
    assert sorted(train + rest) == list("12345")
    assert train + rest != list("12345")


def test_the_shuffle_of_a_subset_never_changes() -> None:
    """No version of a library moves a sample from one set to the other."""
    assert shuffled(10, 7).tolist() == GOLDEN
    assert sorted(shuffled(1000, 1).tolist()) == list(range(1000))
    firsts = np.array([shuffled(100, seed)[0] for seed in range(500)])
    assert len(np.unique(firsts)) > 90
    assert shuffled(1000, 1).tolist() != shuffled(1000, 2).tolist()


GOLDEN = [7, 4, 0, 8, 2, 3, 6, 9, 5, 1]


def write_indices(file: Path, content: object) -> Path:
    if isinstance(content, np.ndarray):
        with file.open("wb") as stream:
            np.save(stream, content)
    else:
        file.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    return file


@pytest.mark.parametrize(
    "content",
    [
        "4\n0\n4\n",
        b"\xef\xbb\xbf4\r\n0\r\n4\r\n",
        "# chosen\r\n4\r\n\r\n 0 \n4",
        np.array([4, 0, 4]),
        np.array([4, 0, 4], np.uint8),
    ],
)
def test_a_file_selects_samples(content, tmp_path: Path, folders) -> None:
    """The subset has the order and the repetitions of the file."""
    file = write_indices(tmp_path / "indices", content)

    assert contents(SubsetSource(of=ConcatSource(sources=folders), indices=file)) == ["5", "1", "5"]


PICKLED = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(128) + b"x"


PICKLED = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(127) + b"\nx"
CUT = b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }".ljust(127) + b"\n" + bytes(12)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "names no sample"),
        ("1\n5\n", r"indices:2: 5 is not a sample; there are 5, counted from 0"),
        ("1\n-1\n", "indices:2: not the number of a sample: -1"),
        ("1\ntwo\n", "indices:2: not the number of a sample: two"),
        ("9" * 5000, "indices:1: not the number of a sample"),
        (np.array([0, -1]), "indices:1: -1 is not a sample"),
        (np.array([0.5]), r"float64\[1\], not a list of whole numbers"),
        (np.array([[0]]), r"int64\[1, 1\], not a list"),
        (np.array([2**63], np.uint64), "9223372036854775808 is not a sample"),
        (b"\x93NUMPY\x01", "damaged header"),
        (CUT, "is cut: it ends at byte 140, within its numbers"),
        (PICKLED, "Python objects, which are never loaded"),
    ],
)
def test_indices_that_make_no_sense_are_refused(content, message, tmp_path: Path, folders) -> None:
    """The error names the line."""
    file = write_indices(tmp_path / "indices", content)

    with pytest.raises(SourceInvalid, match=message):
        scan(SubsetSource(of=ConcatSource(sources=folders), indices=file))


def test_a_missing_file_of_indices_is_found_without_a_scan(tmp_path: Path, folders) -> None:
    """A FIFO in its place does not block the check."""
    source = SubsetSource(of=folders[0], indices=tmp_path / "none")
    assert source_problems(source) == [f"there is no file {tmp_path}/none"]
    os.mkfifo(tmp_path / "none")

    with pytest.raises(SourceInvalid, match="not a regular file"):
        scan(source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": 6}, "the source has 5 samples"),
        ({"start": "60%", "stop": 3}, "holds none"),
        ({"start": "50%", "stop": 1}, "holds none"),
    ],
)
def test_a_range_without_samples_is_refused(options, message, folders) -> None:
    """The error has the numbers that its percentages give."""
    with pytest.raises(SourceInvalid, match=message):
        scan(SubsetSource(of=ConcatSource(sources=folders), **options))


@pytest.mark.parametrize(
    ("given", "share"),
    [
        (0, 0),
        (7, 7),
        (-1, None),
        ("29%", 29),
        ("12.5%", 12),
        ("100%", 100),
        *((text, None) for text in ("100.1%", "7", "%", "1.%", "-1%", "1e2%", "\u0663%", "0." + "1" * 20 + "%")),
    ],
)
def test_a_share_is_a_number_or_a_percentage(given, share) -> None:
    """The share is exact: 29 % of 100 are 29, which floating-point numbers would miss."""
    assert share_of(given, 100) == share


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ConcatSource, {"sources": ()}),
        (MixSource, {"sources": (FolderSource(path=Path("/x")),), "weights": (1, 1)}),
        (MixSource, {"sources": (FolderSource(path=Path("/x")),), "weights": (0,)}),
        (MixSource, {"sources": (FolderSource(path=Path("/x")),), "weights": (float("inf"),)}),
        (SubsetSource, {"of": FolderSource(path=Path("/x")), "start": "half"}),
        (SubsetSource, {"of": FolderSource(path=Path("/x")), "start": 3, "stop": 3}),
        (SubsetSource, {"of": FolderSource(path=Path("/x")), "shuffle_seed": -1}),
        (SubsetSource, {"of": FolderSource(path=Path("/x")), "indices": Path("/i"), "stop": 3}),
        (SubsetSource, {"of": FolderSource(path=Path("/x")), "indices": Path()}),
    ],
)
def test_options_that_make_no_sense_are_refused(kind, options) -> None:
    """The error comes before any file is opened."""
    with pytest.raises(ValueError, match=r"weights|sources|start|shuffle_seed|indices"):
        kind(**options)


# --- in the configuration -------------------------------------------------------------------------

NESTED = """
[streams.a]
source = { type = "subset", stop = "90%", of = { type = "mix", weights = [3, 1.5], sources = [
    { type = "folder", path = "photos" },
    { type = "folder", path = "/more" },
] } }
batch_size = 2
pipeline = [ { op = "decode" }, { op = "resize", size = [2, 2] } ]
"""


def test_sources_are_nested_in_the_file(tmp_path: Path) -> None:
    """Relative paths are relative to the file at every depth."""
    config = load(tmp_path, NESTED)

    folders = (FolderSource(path=tmp_path / "photos"), FolderSource(path=Path("/more")))
    assert config.streams["a"].source == SubsetSource(of=MixSource(sources=folders, weights=(3, 1.5)), stop="90%")


def test_problems_of_nested_sources_have_their_place(tmp_path: Path) -> None:
    """A misspelt key and an unknown kind are two levels deep."""
    text = NESTED.replace('path = "/more"', 'pth = "/more"').replace(
        '{ type = "folder", path = "photos" }', '{ type = "fold" }'
    )

    with pytest.raises(ConfigInvalid) as refused:
        load(tmp_path, text)

    told = {problem.path: problem.message for problem in refused.value.problems}
    assert 'did you mean type = "folder"?' in told["streams.a.source.of.sources[0].type"]
    assert "did you mean path?" in told["streams.a.source.of.sources[1].pth"]
