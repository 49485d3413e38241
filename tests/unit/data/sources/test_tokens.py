"""Files of tokens: windows by arithmetic, documents by Megatron's index, and damaged indexes."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from struct import pack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.samples.columns import Column
from batchd.data.sources.interface import kind_of
from batchd.data.sources.recognise import recognise
from batchd.data.sources.tokens.options import TokensSource
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import quick_look
from batchd.errors import SourceInvalid
from support.megatron import write_megatron
from support.samples import opened, read_samples, refused, scan
from support.source_files import source_problems


def flat(folder: Path, count: int, dtype: str = "uint16", name: str = "a.bin", first: int = 0) -> Path:
    """Write ``count`` consecutive numbers, after so many bytes ``first`` of something else."""
    path = folder / name
    path.write_bytes(b"\xff" * first + np.arange(count, dtype=dtype).tobytes())
    return path


def tokens(source: TokensSource) -> list[list[int]]:
    return [values["tokens"].tolist() for values in read_samples(source)]


# --- windows --------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(5, 40), min_size=1, max_size=3),
    length=st.integers(1, 5),
    overlap=st.integers(0, 4),
    dtype=st.sampled_from(["uint8", "uint16", "uint32", "int64"]),
    offset=st.sampled_from([0, 3]),
)
def test_windows_are_slices_of_each_file(tmp_path_factory, sizes, length, overlap, dtype, offset) -> None:
    """They begin ``length - overlap`` tokens apart; a rest that fills no window is left out.

    Rows that are read together are equal, too (``read_samples`` compares them).
    """
    folder = tmp_path_factory.mktemp("tokens")
    overlap = min(overlap, length - 1)
    step = length - overlap
    for number, size in enumerate(sizes):
        flat(folder, size, dtype, f"{number}.bin", offset)
    options = {"dtype": dtype, "length": length, "overlap": overlap, "offset": offset}
    source = TokensSource(root=folder, files=("*.bin",), **options)

    expected = [list(range(at, at + length)) for size in sizes for at in range(0, size - length + 1, step)]
    assert tokens(source) == expected
    assert len(scan(source)) == len(expected)


def test_the_field_has_the_type_of_the_file(tmp_path) -> None:
    """The columns are known before a file is opened."""
    source = TokensSource(path=flat(tmp_path, 9, "uint32"), dtype="uint32", length=4, field="x")

    assert kind_of(source).columns(source, Storage()) == (Column("x", dtype="uint32", shape=(4,)),)
    assert kind_of(source).samples(source, Storage()) == 2
    assert read_samples(source)[1]["x"].dtype == np.uint32


@pytest.mark.parametrize(
    ("count", "options", "text"),
    [
        (9, {"dtype": "uint32"}, "18 bytes are no whole number of uint32; is its dtype another one, or the file cut?"),
        (9, {"length": 10}, "has 9 tokens, and a sample has length = 10; leave it out"),
        (0, {}, "0 bytes hold no token"),
        (2, {"offset": 4}, "4 bytes behind the first 4 hold no token"),
    ],
)
def test_a_file_without_a_window_is_refused(tmp_path, count, options, text) -> None:
    """The check finds it before the scan, in the same words."""
    source = TokensSource(**{"path": flat(tmp_path, count), "dtype": "uint16", "length": 4, **options})

    assert source_problems(source) == [refused(source)]
    assert text in refused(source)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"length": None},
            "length must be set, as in length = 1024: flat files have no documents; .* format = .megatron",
        ),
        ({"length": 0}, "length must be from 1 to"),
        ({"overlap": 4}, "overlap must be 0 or more, and less than length, not 4"),
        ({"overlap": -1}, "overlap must be 0 or more"),
        ({"format": "megatron", "length": None, "overlap": 1}, "overlap must be 0 or more, and less than length"),
        ({"offset": -1}, "offset is 0 or more"),
        ({"format": "megatron", "offset": 1}, "offset is 0 or more, and counts only for flat files"),
        ({"field": "1"}, "not a valid field name"),
        ({"files": ("a",)}, "set either path"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, text) -> None:
    """The text says what to set."""
    with pytest.raises(ValueError, match=text):
        TokensSource(**{"path": Path("/a.bin"), "dtype": "uint16", "length": 4, **options})


# --- documents ------------------------------------------------------------------------------------


DOCUMENTS = [[[1, 2, 3], [4]], [[5]], [], [[], []], [[6, 7], [], [8]], [[9]]]
"""Documents of sequences; two have no token."""
WHOLE = [[1, 2, 3, 4], [5], [6, 7, 8], [9]]


def documents(folder: Path, those: Sequence = DOCUMENTS, dtype: str = "uint16", **options) -> TokensSource:
    """A source of Megatron's files with these documents."""
    path = write_megatron(folder / "a.bin", those, dtype)
    return TokensSource(**{"path": path, "format": "megatron", "dtype": dtype, **options})


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_each_document_with_a_token_is_a_sample(tmp_path, dtype) -> None:
    """All its sequences follow each other."""
    source = documents(tmp_path, dtype=dtype)

    assert kind_of(source).columns(source, Storage()) == (Column("tokens", dtype=dtype, shape=(None,)),)
    assert source_problems(source) == []
    assert tokens(source) == WHOLE
    assert read_samples(source)[0]["tokens"].dtype == np.dtype(dtype)


def test_documents_of_several_files_follow_each_other(tmp_path) -> None:
    """Messages count them in their file."""
    for name in ("a", "b"):
        write_megatron(tmp_path / f"{name}.bin", DOCUMENTS, "int32")
    source = TokensSource(root=tmp_path, files=("*.bin",), format="megatron", dtype="int32")

    assert tokens(source) == WHOLE * 2
    with opened(source) as (reader, index):
        assert reader.name(6) == f"{tmp_path}/b.bin: document 2 (byte 20)"
        assert index.arrays["starts"].tolist() == [0, 16, 20, 32] * 2


def test_windows_go_through_documents(tmp_path) -> None:
    """The index is still checked."""
    assert tokens(documents(tmp_path, length=4, overlap=1)) == [[1, 2, 3, 4], [4, 5, 6, 7]]


def index(**changed: object) -> bytes:
    """An index of three sequences of uint16 with 2, 1 and 3 tokens, in two documents."""
    parts = {
        "magic": b"MMIDIDX\0\0",
        "version": pack("<Q", 1),
        "dtype": pack("<B", 8),
        "counts": pack("<QQ", 3, 3),
        "lengths": pack("<3i", 2, 1, 3),
        "pointers": pack("<3q", 0, 4, 6),
        "documents": pack("<3q", 0, 2, 3),
        "end": b"",
    }
    return b"".join({**parts, **changed}.values())


def test_the_index_of_the_next_test_is_read(tmp_path) -> None:
    """Without a change it is a good one."""
    (tmp_path / "a.bin").write_bytes(np.arange(6, dtype=np.uint16).tobytes())
    (tmp_path / "a.idx").write_bytes(index())

    assert tokens(TokensSource(path=tmp_path / "a.bin", format="megatron", dtype="uint16")) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"magic": b"TNTIDX\0\0\0"}, r"a.idx is no index of Megatron: it begins with b'TNTIDX\x00\x00\x00' instead of"),
        ({"version": pack("<Q", 2)}, "a.idx is an index of version 2, and batchd reads version 1"),
        ({"dtype": pack("<B", 4)}, "a.idx says that a token is int32, and dtype = 'uint16'"),
        ({"dtype": pack("<B", 7)}, "a.idx says that a token is float32"),
        ({"dtype": pack("<B", 99)}, "a.idx says that a token is number 99, which is unknown"),
        ({"counts": pack("<QQ", 4, 3)}, "a.idx is cut or damaged: it has 94 bytes, and its counts need 106"),
        ({"counts": pack("<QQ", 1 << 63, 1 << 63)}, "a.idx is cut or damaged: it has 94 bytes"),
        ({"end": b"\0"}, "a.idx is cut or damaged: it has 95 bytes, and its counts need 94"),
        ({"end": b"\0\0\0"}, "a.idx has modes of sequences, of several modalities, which batchd does not read"),
        ({"lengths": pack("<3i", 2, -1, 5)}, "a.idx is damaged: sequence 1 has -1 tokens from byte 4 on"),
        (
            {"lengths": pack("<3i", 2, 2, 2)},
            "sequence 2 has 2 tokens from byte 6 on, and those before it end at byte 8",
        ),
        ({"pointers": pack("<3q", 0, 4, -6)}, "sequence 2 has 3 tokens from byte -6 on"),
        ({"lengths": pack("<3i", 2, 1, 4)}, "a.bin has 12 bytes, and the sequences in a.idx have 14; copy both again"),
        ({"documents": pack("<3q", 0, 2, 2)}, "its documents do not go from sequence 0 to 3 in order"),
        ({"documents": pack("<3q", 1, 2, 3)}, "its documents do not go from sequence 0 to 3 in order"),
        ({"documents": pack("<3q", 0, 9, 3)}, "its documents do not go from sequence 0 to 3 in order"),
        ({"counts": pack("<QQ", 3, 4), "documents": pack("<4q", 0, (1 << 63) - 1, -2, 3)}, "do not go from sequence 0"),
        ({"counts": pack("<QQ", 3, 0), "documents": b""}, "its documents do not go from sequence 0 to 3 in order"),
        (
            {"counts": pack("<QQ", 3, 4), "documents": pack("<4q", 0, 2, 1, 3)},
            "do not go from sequence 0 to 3 in order",
        ),
    ],
)
def test_a_damaged_index_is_refused_with_the_place(tmp_path, changed, text) -> None:
    """No number of the index is trusted."""
    (tmp_path / "a.bin").write_bytes(np.arange(6, dtype=np.uint16).tobytes())
    (tmp_path / "a.idx").write_bytes(index(**changed))

    assert text in refused(TokensSource(path=tmp_path / "a.bin", format="megatron", dtype="uint16"))


def test_a_missing_index_is_found_by_the_check(tmp_path) -> None:
    """The problem names the index."""
    source = TokensSource(path=flat(tmp_path, 9), format="megatron", dtype="uint16")

    assert source_problems(source) == [f"there is no file {tmp_path}/a.idx"]
    assert "a.idx" in refused(source)


def test_documents_without_any_token_are_no_source(tmp_path) -> None:
    """A file without tokens has no sample."""
    assert "0 bytes hold no token" in refused(documents(tmp_path, [[]]))


# --- the first configuration ----------------------------------------------------------------------


def test_init_recognises_megatron_files_by_their_index(tmp_path) -> None:
    """Both files are used; the training part is taken."""
    for name in ("train_document", "valid_document"):
        write_megatron(tmp_path / f"{name}.bin", [[[1, 2, 3]] * 1000], "int32")
    found = recognise(tmp_path, quick_look(Storage()))

    path = tmp_path / "train_document.bin"
    assert found.recognised.source == TokensSource(path=path, format="megatron", dtype="int32", length=1025, overlap=1)
    assert found.recognised.names == [b"train_document.bin", b"train_document.idx"]
    assert "without length, each document is a sample" in found.recognised.notes[-1]


def test_init_finds_the_index_beside_a_file_that_is_named(tmp_path) -> None:
    """An index of floats is refused, and one without its file says what to name."""
    path = write_megatron(tmp_path / "a.bin", [[[1, 2, 3]]], "int32")
    found = recognise(path, quick_look(Storage())).recognised.source
    assert found == TokensSource(path=path, format="megatron", dtype="int32", length=3, overlap=1)

    with pytest.raises(SourceInvalid, match=r"a\.idx is an index; name the file \.bin beside it"):
        recognise(tmp_path / "a.idx", quick_look(Storage()))
    write_megatron(path, [[[1, 2, 3]]], "float32")
    with pytest.raises(SourceInvalid, match="says that a token is float32, which is no whole number"):
        recognise(path, quick_look(Storage()))


@pytest.mark.parametrize(
    ("data", "dtype", "offset", "length"),
    [
        (np.tile(np.arange(50257, dtype=np.uint16), 2), "uint16", 0, 1025),
        (np.tile(np.array([3, 17, 60], np.uint16), 50), "uint16", 0, 150),
        (np.arange(100_000, dtype=np.uint32), "uint32", 0, 1025),
        (np.concatenate([np.array([20240520, 1], np.int32), np.full(300, -1, np.int32)]), "uint16", 1024, 92),
    ],
)
def test_init_recognises_flat_files_by_their_first_numbers(tmp_path, data, dtype, offset, length) -> None:
    """The note says what is assumed."""
    path = tmp_path / "train.bin"
    path.write_bytes(data.tobytes())
    found = recognise(path, quick_look(Storage())).recognised

    assert found.source == TokensSource(path=path, dtype=dtype, length=length, overlap=1, offset=offset)
    assert f"tokens and the one behind them, as {dtype}" in found.notes[-1]


@pytest.mark.parametrize("content", [b"", b"a text, and no tokens", bytes(range(256)) * 10, b"\0\0\0"])
def test_init_takes_other_records_for_no_tokens(tmp_path, content) -> None:
    """The message says how to configure them."""
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(SourceInvalid, match=r'may hold tokens or other records, .* type = "tokens", .* type raw'):
        recognise(tmp_path, quick_look(Storage()))


WRITE = """
import sys
import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

for dtype in (np.uint16, np.int32):
    path = f"{sys.argv[1]}/{np.dtype(dtype).name}"
    builder = IndexedDatasetBuilder(path + ".bin", dtype=dtype)
    for number in range(50):
        lengths = [number % 4, 3][: 1 + number % 2]
        builder.add_document(torch.full((sum(lengths),), number), lengths)
    builder.finalize(path + ".idx")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_files_that_megatron_writes_are_read(tmp_path, dtype) -> None:
    """Its own builder writes them."""
    done = subprocess.run([sys.executable, "-c", WRITE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    source = TokensSource(path=tmp_path / f"{dtype}.bin", format="megatron", dtype=dtype)

    expected = [[number] * sum([number % 4, 3][: 1 + number % 2]) for number in range(50)]
    assert tokens(source) == [one for one in expected if one]
    found = recognise(tmp_path / f"{dtype}.bin", quick_look(Storage())).recognised.source
    assert isinstance(found, TokensSource)
    assert (found.path, found.format, found.dtype) == (source.path, "megatron", dtype)
