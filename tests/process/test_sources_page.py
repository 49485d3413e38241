"""What the pages of sources promise of wrong data, tried on a daemon and with `batchd check`."""

import gzip
import io
import os
import re
from pathlib import Path

import msgpack
import numpy as np
import pytest

import batchd_client
from support.commands import batchd
from support.images import encode
from support.lmdb_files import write_lmdb
from support.parquet_files import hugging_face, write_arrow, write_parquet
from support.settings import write_settings
from support.shards import write_shard
from support.tfrecords import example, write_records
from support.waiting import wait_until

MASKED = {"batch_size": 1, "on_error": "mask", "max_bad_fraction": 1.0, "shuffle": False, "storage_away_s": 0}
X = {"x": "int64"}


def array(value):
    """The bytes of an array in a member of a shard."""
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def table(root, text, **options):
    """Write a table without images; return its source."""
    (root / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return {"type": "csv", "path": str(root / "t.csv"), "fields": X, **options}


def lines(root, text, **options):
    """Write lines of JSON; return their source."""
    (root / "t.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    return {"type": "jsonl", "root": str(root), "shards": ["t.jsonl"], "fields": X, **options}


def members(root, *samples, **options):
    """Write a shard whose samples are dicts of endings; return its source."""
    write_shard(root / "t.tar", [(f"{n}.{end}", data) for n, one in enumerate(samples) for end, data in one.items()])
    return {"type": "webdataset", "root": str(root), "shards": ["t.tar"], **options}


def records(root, *examples, **options):
    """Write a TFRecord file; return its source."""
    write_records(root / "t.tfr", examples)
    return {"type": "tfrecord", "root": str(root), "shards": ["t.tfr"], "fields": X, **options}


def columns(root, fields=X, names=(), options=(), **values):
    """Write a Parquet file; return its source."""
    write_parquet(root / "t.parquet", values, **dict(options))
    return {"type": "parquet", "root": str(root), "shards": ["t.parquet"], "fields": fields, "names": dict(names)}


def maps(root, *values):
    """Write a database of maps; return its source."""
    write_lmdb(root / "db", {str(n).encode(): msgpack.packb({"x": value}) for n, value in enumerate(values)})
    return {"type": "lmdb", "path": str(root / "db"), "fields": X, "format": "msgpack"}


SAMPLES = {
    "a number in JSON": (
        lambda root: lines(
            root, '{"x": 1}\n{"x": true}\n{"x": 5.0}\n{"x": 0.5}\n{"x": "7"}\n{"x": 9007199254740994.0}\n'
        ),
        [1, 1, 5, "0.5", "is a text", "9007199254740994"],
    ),
    "a key in JSON": (
        lambda root: lines(root, '{"x": 1}\n{"y": 1}\n{"x": null}\n[1]\n{"x": 2, "x": 3}\nnonsense\n'),
        [1, "x", "x", "", 3, ""],
    ),
    "a default in JSON": (
        lambda root: lines(root, '{"x": 1}\n{"y": 1}\n{"x": null}\n', defaults={"x": -1}),
        [1, -1, -1],
    ),
    "a cell": (
        lambda root: table(root, b"x,y\n1,\n1_0,\n0x10,\n5.0,\n,\n1\n1,2,3\n300000000000000000000,\n-3,\xff\n"),
        [1, "1_0", "0x10", "5.0", "", "", "", "300000000000000000000", ""],
    ),
    "a text without quotes": (
        lambda root: table(root, 'x\ty\n1\t"a\n2\tb"\n', delimiter="\t", quoting="none"),
        [1, 2],
    ),
    "a member in JSON": (
        lambda root: members(
            root,
            {"json": b'{"x": true}'},
            {"json": b'{"x": 5.0}'},
            {"json": b'{"x": 0.5}'},
            {"json": b"{"},
            {"json": b"{}"},
            fields=X,
        ),
        [1, 5, "0.5", "json", "x"],
    ),
    "an array as a member": (
        lambda root: members(
            root,
            *(
                {"boxes.npy": array(np.ones(shape, dtype))}
                for shape, dtype in (((1, 4), "f4"), (4, "f4"), ((0, 4), "f8"))
            ),
            {"txt": b"no boxes"},
            fields={"boxes": "float32[1,4]"},
        ),
        [1, 'boxes.npy: boxes has the shape [4], and is declared as "float32[1,4]"', "boxes.npy", "boxes.npy"],
    ),
    "a feature": (
        lambda root: records(root, example(x=[1]), example(y=[1]), example(x=[1, 2]), example(x=[0.5]), b"nonsense"),
        [1, "x", "x", "x", ""],
    ),
    "a map": (lambda root: maps(root, 1, True, 5.0, 0.5, "7", 2**63), [1, 1, 5, "0.5", "is str", str(2**63)]),
    "a boolean column": (lambda root: columns(root, x=[True, False]), [1, 0]),
    "a column of whole floats": (lambda root: columns(root, x=[5.0, -7.0]), [5, -7]),
    "a column of lists": (
        lambda root: columns(root, {"x": "int64[1]"}, x=[[1], None, [1, 2]]),
        [1, "x", "x"],
    ),
    "columns together": (
        lambda root: columns(root, {"x": "int64[2]"}, {"x": "p{0..1}"}, p0=[1, 2], p1=[3.0, 4.0]),
        [1, 2],
    ),
    "cells together": (
        lambda root: table(root, "p0,p1\n1,3\n2,\n", fields={"x": "int64[2]"}, names={"x": "p{0..1}"}),
        [1, "p1"],
    ),
    "paths of keys": (
        lambda root: lines(root, '{"a": {"b": [4, 5]}}\n{"a": {"b": [4]}}\n{"a": 1}\n', names={"x": "a.b.1"}),
        [5, "a.b.1", "a.b.1"],
    ),
}
"""Data of one stream; of each sample the first number of its field, or words of the reason why it
is bad."""


def one_stream(source):
    """A stream of single samples, with the steps that images and texts need."""
    return {"source": source, **MASKED, "pipeline": steps(source)}


def steps(source):
    """The steps that a batch needs for images and texts."""
    fields = source.get("fields", {})
    if (
        source["type"] in ("folder", "glob", "list")
        or (source["type"] == "webdataset" and not fields)
        or "image" in source
        or fields.get("image") == "image"
    ):
        return [{"op": "decode"}, {"op": "resize", "size": [16, 16]}]
    return [{"op": "text_bytes", "field": name, "length": 1} for name, kind in fields.items() if kind == "text"]


@pytest.fixture
def serving(start_daemon, tmp_path):
    """Start one daemon with a stream for each source; return it with the names of its streams."""

    def serving(sources):
        streams = {}
        for number, (name, make) in enumerate(sources.items()):
            folder = tmp_path / f"s{number:03}"
            folder.mkdir()
            streams[name.replace(" ", "-")] = one_stream(make(folder))
        return start_daemon(streams), [*streams]

    return serving


@pytest.mark.thorough
def test_each_sample_is_what_the_data_writes_or_bad_with_its_reason(serving):
    """Nothing is cut, wrapped or guessed, whatever the source."""
    daemon, names = serving({name: make for name, (make, _samples) in SAMPLES.items()})
    wrong = {}
    with batchd_client.connect(daemon.address) as connection:
        for name, (_make, expected) in zip(names, SAMPLES.values(), strict=True):
            found = read(connection, name)
            for sample, value in enumerate(expected):
                is_right = (
                    value in str(found[sample]) and isinstance(found[sample], str)
                    if isinstance(value, str)
                    else found[sample] == value
                )
                if not is_right:
                    wrong[name, sample] = (value, found[sample])
    assert not wrong


def read(connection, name):
    """One epoch.

    Of each sample the first number of its first field, or the reason why it is bad.
    """
    found, bad = {}, 0
    for batch in connection.stream(name, epochs=1):
        (field, *_) = [one for one in batch if one not in ("index", "valid")]
        value = batch[field][0]
        first = np.asarray(value).ravel()
        found[int(batch["index"][0])] = (first[0].item() if first.size else 0) if batch["valid"][0] else None
        bad += not batch["valid"][0]
        del batch, value, first
    listed = wait_until(lambda: len(connection.bad(name).samples) == bad and connection.bad(name), "they are listed")
    return {**found, **{one.sample: one.reason for one in listed.samples}}


def pictures(root):
    """Write three images of one colour each, 0, 10 and 20; return their folder."""
    (root / "c").mkdir()
    for number in range(3):
        (root / "c" / f"{number}.png").write_bytes(plain(10 * number))
    return root / "c"


def plain(value):
    """A PNG of one grey."""
    return encode(np.full((16, 16, 3), value, np.uint8), ".png")


def written(root, name, write, *values):
    """Write a file by a function; return its path."""
    write(root / name, *values)
    return str(root / name)


PICTURES = {
    "folder": lambda root: {"type": "folder", "path": str(pictures(root).parent)},
    "glob": lambda root: {"type": "glob", "root": str(pictures(root).parent), "patterns": ["**/*.png"]},
    "list": lambda root: {
        "type": "list",
        "root": str(pictures(root)),
        "path": written(root, "t.txt", Path.write_text, "0.png 0\n1.png 1\n2.png 2\n"),
    },
    "images of a table": lambda root: table(pictures(root), "image,x\n0.png,1\n1.png,2\n2.png,3\n", image="image"),
    "images of lines": lambda root: lines(
        pictures(root), "".join(f'{{"image": "{n}.png"}}\n' for n in range(3)), fields={"image": "image"}
    ),
    "images of Parquet": lambda root: columns(
        pictures(root), {"image": "image"}, image=hugging_face([None] * 3, ["0.png", "1.png", "2.png"])
    ),
}
"""Sources of the three images; one of them is changed."""
NUMBERS = {
    "table": lambda root: table(root, "x\n0\n1\n2\n"),
    "lines": lambda root: lines(root, '{"x": 0}\n{"x": 1}\n{"x": 2}\n'),
    "shard": lambda root: members(root, *({"json": b'{"x": %d}' % n} for n in range(3)), fields=X),
    "TFRecord": lambda root: records(root, *(example(x=[n]) for n in range(3))),
    "Parquet": lambda root: columns(root, {"x": "uint8[1]"}, options={"compression": "none"}, x=[b"\0", b"\1", b"\2"]),
    "compressed Parquet": lambda root: columns(root, {"x": "uint8[1]"}, x=[b"\0", b"\1", b"\2"]),
    "Arrow": lambda root: {
        "type": "parquet",
        "root": str(root),
        "shards": [write_arrow(root / "t.arrow", {"x": [b"\0", b"\1", b"\2"]}).name],
        "fields": {"x": "uint8[1]"},
    },
    "npy": lambda root: {"type": "npy", "path": written(root, "t.npy", np.save, np.arange(3))},
    "npz": lambda root: {"type": "npz", "path": written(root, "t.npz", np.savez, np.arange(3))},
    "raw": lambda root: {
        "type": "raw",
        "path": written(root, "t.bin", Path.write_bytes, np.arange(3).tobytes()),
        "record": X,
    },
}
"""Sources of 0, 1 and 2; their only file is changed."""


def rewrite(file):
    """Write as many other bytes into a file, as a program does that makes it again."""
    data = bytearray(file.read_bytes())
    data[-5] ^= 1  # not in the last checksum of a TFRecord file: batchd has its own
    file.write_bytes(plain(99) if file.suffix == ".png" else data)


def cut(file):
    """Cut a file in its middle."""
    os.truncate(file, file.stat().st_size // 2)


CHANGES = [rewrite, cut, Path.unlink]


@pytest.mark.thorough
def test_a_file_that_changes_after_the_scan_makes_bad_samples(serving, tmp_path):
    """Workers serve the scanned content or nothing: of a file rewritten, cut or removed."""
    cases = [(name, change) for name in PICTURES | NUMBERS for change in CHANGES]
    daemon, names = serving({f"{name} {change.__name__}": (PICTURES | NUMBERS)[name] for name, change in cases})
    for folder, (name, change) in zip(sorted(tmp_path.glob("s*")), cases, strict=True):
        (changed,) = folder.glob("c/1.png" if name in PICTURES else "t.*")
        change(changed)
    wrong = {}
    with batchd_client.connect(daemon.address) as connection:
        for stream, (name, _change) in zip(names, cases, strict=True):
            found = read(connection, stream)
            scanned = [0, 10, 20] if name in PICTURES else [0, 1, 2]
            is_bad = [isinstance(found[sample], str) for sample in range(3)]
            is_scanned = all(bad or found[sample] == scanned[sample] for sample, bad in enumerate(is_bad))
            if not is_scanned or (is_bad != [False, True, False] if name in PICTURES else not any(is_bad)):
                wrong[stream] = found
    assert not wrong


# --- refused at the start -------------------------------------------------------------------------


def packed(root, name, data):
    """Write a compressed file; return its name."""
    (root / name).write_bytes(gzip.compress(data))
    return name


def one_array(root, value):
    """Write an array; return its source."""
    return {"type": "npy", "path": written(root, "x.npy", np.save, value)}


def shortened(source, bytes_fewer):
    """Cut the only file of a source; return the source."""
    file = Path(source.get("path") or Path(source["root"]) / source["shards"][0])
    os.truncate(file, file.stat().st_size - bytes_fewer)
    return source


def twice(root):
    """Write a shard that `cat` made of two."""
    source = members(root, {"json": b"{}"}, fields=X)
    (root / "t.tar").write_bytes((root / "t.tar").read_bytes() * 2)
    return source


def apart(root):
    """Write a shard in which one sample's members are apart."""
    write_shard(root / "t.tar", [("a.json", b'{"x": 1}'), ("b.json", b'{"x": 1}'), ("a.txt", b"")])
    return {"type": "webdataset", "root": str(root), "shards": ["t.tar"], "fields": {**X, "t": "text"}}


def damaged(root):
    """Write an archive with a wrong byte."""
    source = {"type": "npz", "path": written(root, "t.npz", np.savez, np.arange(200))}
    data = bytearray((root / "t.npz").read_bytes())
    data[400] ^= 1
    (root / "t.npz").write_bytes(data)
    return source


def labels(root, text):
    """Write a list of images; return its source."""
    return {"type": "list", "root": str(root), "path": written(root, "l.txt", Path.write_text, text)}


def class_folders(root, **options):
    """Make a folder of two classes; return its source."""
    (root / "cat").mkdir()
    (root / "dog").mkdir()
    (root / "cat" / "1.png").write_bytes(plain(0))
    return {"type": "folder", "path": str(root), **options}


def linked(root):
    """Make a class folder with a link to another file of the machine."""
    source = class_folders(root)
    (root / "cat" / "2.png").symlink_to("/etc/hostname")
    return source


REFUSED = {
    "two shards in one": (twice, "has other bytes behind its end, from byte 10240 on"),
    "a cut shard": (
        lambda root: shortened(members(root, {"json": b"{}"}, fields=X), 9400),
        "is cut: it ends at byte 840",
    ),
    "a compressed shard": (
        lambda root: {**members(root, {"json": b"{}"}, fields=X), "shards": [packed(root, "z.tar", b"")]},
        "unpack the shard: gzip -dc",
    ),
    "no shard": (lambda root: {**members(root, {"json": b"{}"}, fields=X), "shards": ["no.tar"]}, "there is no file"),
    "members apart": (apart, "tar --sort=name"),
    "no label": (lambda root: members(root, {"png": plain(0)}), "has no member .cls for its label"),
    "a label in other digits": (lambda root: members(root, {"png": plain(0), "cls": b"1_0"}), "is not a whole number"),
    "a field in no sample": (
        lambda root: members(root, {"json": b"{}"}, fields={"y": "int64"}, names={"y": "y.txt"}),
        "no sample has a member .y.txt",
    ),
    "cut records": (
        lambda root: shortened(records(root, example(x=[1]), example(x=[2])), 3),
        "within record 1, which begins at byte 30",
    ),
    "no Parquet": (
        lambda root: {**columns(root, x=[1]), "shards": [packed(root, "z.parquet", b"")]},
        "is not a Parquet file",
    ),
    "no column": (lambda root: columns(root, {"y": "int64"}, x=[1]), "has no column 'y'"),
    "a null": (lambda root: columns(root, x=[1, None]), "row 1 (row group 0), column 'x': there is no value"),
    "a number too large": (lambda root: columns(root, {"x": "uint8"}, x=[1, 300]), "x is 300, which no uint8 can be"),
    "a part of a number": (lambda root: columns(root, x=[1.0, 2.5]), "x is 2.5, which no int64 can be"),
    "a null in one of several": (
        lambda root: columns(root, {"x": "int64[2]"}, {"x": "p{0..1}"}, p0=[1, 2], p1=[1, None]),
        "row 1 (row group 0), column 'p1'",
    ),
    "no record": (lambda root: table(root, "x\n"), "no record"),
    "a title twice": (lambda root: table(root, "x,x\n1,2\n"), "2 columns have the title 'x'"),
    "an open quote": (lambda root: table(root, 'x,y\n1,"2\n'), "has a quote at byte 6 that is never closed"),
    "a quote inside": (lambda root: table(root, 'x,y\n1,a"b\n'), "has a quote at byte 7 that neither begins nor ends"),
    "a table in UTF-16": (lambda root: table(root, "x\n1\n".encode("utf-16")), "is UTF-16"),
    "a table with NUL": (lambda root: table(root, b"x\n1\0\n"), "has a character NUL at byte 3"),
    "lines with CR": (lambda root: table(root, "x\r1\r"), "ends its lines with CR alone"),
    "a list of objects": (lambda root: lines(root, '[{"x": 1}]\n'), "begins with '['"),
    "a cut array": (
        lambda root: shortened(one_array(root, np.arange(3)), 1),
        "it has 151 bytes, and its header says 152",
    ),
    "Python objects": (lambda root: one_array(root, np.array([{}], object)), "holds Python objects"),
    "complex numbers": (lambda root: one_array(root, np.ones(2, complex)), "is of the type complex128"),
    "dates": (lambda root: one_array(root, np.zeros(2, "M8[s]")), "is of the type datetime64[s]"),
    "a structured array": (lambda root: one_array(root, np.zeros(2, [("a", "i4")])), "is a structured array"),
    "Fortran order": (lambda root: one_array(root, np.zeros((2, 5000), order="F")), "is in Fortran order"),
    "a damaged archive": (damaged, "is damaged: its checksum is"),
    "a compressed archive": (
        lambda root: {"type": "npz", "path": written(root, "t.npz", np.savez_compressed, np.arange(9))},
        "is compressed",
    ),
    "half a record": (
        lambda root: {
            "type": "raw",
            "path": written(root, "t.bin", Path.write_bytes, b"1234567"),
            "record": {"x": "int32"},
        },
        "7 bytes are not 0 and whole records of 4 bytes",
    ),
    "a map without a database": (lambda root: {**maps(root, 1), "path": str(root / "nothing")}, "there is no file"),
    "a strange class": (lambda root: class_folders(root, classes=["cat", "owl"]), "has the class folder 'dog'"),
    "a link out": (linked, "is a link that leads out of the root"),
    "a label of a list": (lambda root: labels(root, "1.png 1_0\n"), "l.txt:1: not a path, a space and a whole number"),
    "a path out of a list": (lambda root: labels(root, "../1.png 0\n"), "a path that may lead out of the root"),
    "different fields": (
        lambda root: {"type": "concat", "sources": [one_array(root, np.arange(3)), table(root, "x\n1\n")]},
        "sources[1] has",
    ),
}
"""Sources that are refused, and words of the reason."""


def test_everything_that_is_refused_is_found_at_once(tmp_path):
    """`batchd check` names each problem with its stream; none hides another."""
    streams = {}
    for number, (name, (make, _words)) in enumerate(REFUSED.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        streams[name.replace(" ", "-")] = one_stream(make(folder))
    settings = write_settings(tmp_path / "batchd.toml", streams, {})

    printed = batchd("check", settings, status=2).stderr

    problems = re.split(r"\n(?=\S+batchd\.toml:\d+: streams\.)", printed)
    missing = {
        name: words
        for name, (_make, words) in REFUSED.items()
        if not any(f": streams.{name.replace(' ', '-')}." in one and words in one for one in problems)
    }
    assert not missing, printed
