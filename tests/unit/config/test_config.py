"""The configuration: valid and invalid values, and helpful errors."""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from batchd.config import synonyms
from batchd.config.load import load_config
from batchd.config.tree import Config, DaemonConfig, StreamConfig
from batchd.data.pipeline.cache_split import has_crop_decoder, plan_pipeline
from batchd.data.pipeline.image.options import Decode, RandomFlip, RandomResizedCrop, Resize
from batchd.data.pipeline.options import STEP_KINDS
from batchd.data.sources.arrays.options import NpySource, NpzSource, RawSource
from batchd.data.sources.code.options import GeneratorSource, PluginSource, PythonSource
from batchd.data.sources.composed.options import ConcatSource, MixSource, SubsetSource
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.files.options import FolderSource, GlobSource, ListSource
from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.sources.options import SOURCE_KINDS, SourceOptions, source_from_plain, source_to_plain
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.push.options import PushSource
from batchd.data.sources.tfrecord.options import TFRecordSource
from batchd.data.sources.video.options import VideoSource
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.errors import BatchdError, ConfigInvalid, ExitCode, Problem
from batchd.stream.cache_file import cache_problems
from batchd.stream.rings import budgets_bytes
from support.configs import STREAM, WHOLE, load
from support.toml_values import SCALARS, TREES, written

MEBIBYTE = 1 << 20


def problems(
    folder: Path, text: str, overrides: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, Problem]:
    with pytest.raises(ConfigInvalid) as caught:
        load(folder, text, overrides, environment)
    found = {problem.path: problem for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems), "two problems for one path"
    return found


# --- valid values ---------------------------------------------------------------------------------


def test_a_short_file_gives_a_whole_tree_of_defaults(tmp_path: Path) -> None:
    """A missing key has its default; steps and sources are plain dataclasses."""
    config = load(tmp_path, f"[streams.photos]{STREAM}")

    assert config.daemon == DaemonConfig(python_path=(tmp_path,))
    photos = config.streams["photos"]
    assert photos.source == FolderSource(path=tmp_path / "photos")
    assert photos.pipeline == (Decode(), RandomResizedCrop(size=(8, 8)))
    assert (photos.seed, photos.shuffle, photos.drop_last, photos.on_error) == (0, True, False, "substitute")
    assert (photos.window, photos.lag, photos.max_bad_fraction, photos.memory) == ("auto", "independent", 0.05, None)


def test_the_tree_is_frozen(tmp_path: Path) -> None:
    """No code changes the configuration of a running daemon by accident."""
    config = load(tmp_path, WHOLE)

    with pytest.raises(ValidationError):
        config.daemon.workers = 3
    with pytest.raises(AttributeError):
        config.streams["photos"].source.path = Path("/")  # type: ignore[misc]


def test_flags_override_the_environment_and_that_overrides_the_file(tmp_path: Path) -> None:
    """Flags have the highest precedence, then the environment, then the file."""
    environment = {"BATCHD_WORKERS": "3", "BATCHD_MEMORY": "64MiB", "BATCHD_SESSIONS_MAX": ""}

    config = load(tmp_path, WHOLE, {"daemon.workers": "5", "streams.photos.seed": "7"}, environment)

    assert (config.daemon.workers, config.daemon.memory, config.daemon.sessions_max) == (5, 64 * MEBIBYTE, 256)
    assert config.streams["photos"].seed == 7
    assert load(tmp_path, WHOLE, {}, environment).daemon.workers == 3
    assert load(tmp_path, WHOLE).daemon.workers == 2


def test_every_key_of_the_daemon_has_its_variable(tmp_path: Path) -> None:
    """No key of [daemon] can be set only in the file."""
    rest = {"roots": (), "code": False, "streams_max": 8, "memory": None}
    given = {
        "runtime_dir": ("/tmp/x", Path("/tmp/x")),
        "tcp": ("[::1]:7070", "[::1]:7070"),
        "http": ("off", "off"),
        "http_details": ("true", True),
        "http_names": ('["batchd.Example.org."]', ("batchd.example.org",)),
        "keys_dir": ("/tmp/keys", Path("/tmp/keys")),
        "python_path": ('["/srv/one", "/srv/two"]', (Path("/srv/one"), Path("/srv/two"))),
        "cache_dir": ("/tmp/cache", Path("/tmp/cache")),
        "workers": ("auto", "auto"),
        "numa": ("off", "off"),
        "memory": ("1.5GiB", 1536 * MEBIBYTE),
        "sample_timeout_s": ("2", 2.0),
        "drain_timeout_s": ("0.5", 0.5),
        "sessions_max": ("9", 9),
        "sessions_per_peer": ("4", 4),
        "storage_timeout_s": ("2.5", 2.5),
        "storage_retries": ("7", 7),
        "reserve": ("start", "start"),
        "chunk_rows": ("16", 16),
        "derive": ("true", True),
        "derive_max": ("3", 3),
        "derive_memory": ("1GiB", 1 << 30),
        "shares": (
            "{a = {weight = 2.0}}",
            {"a": {"weight": 2.0, "users": (), "groups": (), "keys": (), "sessions_max": None}},
        ),
        "define": ('{ who = ["key:a"], what = "derived" }', {**rest, "who": ("key:a",), "what": "derived"}),
        "sandbox": ("on", "on"),
        "writable_slots": ("true", True),
        "worker_address": ("127.0.0.1:7072", "127.0.0.1:7072"),
        "pool_max": ("64", 64),
        "pool_accept": ("any", "any"),
        "pool_audit": ("0.5", 0.5),
        "pool_cache": ("shared", "shared"),
        "pool_withdraw_after_s": ("2", 2.0),
        "pool_hosts_max": ("8", 8),
        "pool_hosts_per_key": ("4", 4),
        "pool_gateways": ("3", 3),
    }
    assert given.keys() == DaemonConfig.model_fields.keys()

    config = load(tmp_path, WHOLE, environment={f"BATCHD_{key.upper()}": text for key, (text, _) in given.items()})

    assert config.daemon.model_dump() == {key: value for key, (_, value) in given.items()}


def test_overrides_reach_quoted_names_and_whole_tables(tmp_path: Path) -> None:
    """A stream's name with dots is quoted, as in TOML; a pipeline is replaced as a whole."""
    config = load(
        tmp_path,
        f'[streams."a.b"]{STREAM}',
        {
            'streams."a.b".pipeline': '[{op = "decode"}, {op = "random_flip"}]',
            'streams."a.b".source.path': "2024-01-01",
        },
    )

    assert config.streams["a.b"].pipeline == (Decode(), RandomFlip())
    assert config.streams["a.b"].source.path == Path.cwd() / "2024-01-01"


def test_paths_are_relative_to_where_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the file are relative to it, others to the current directory. ~ is home."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", "/home/somebody")
    text = """
    [daemon]
    runtime_dir = "run"
    [streams.a]
    source = { type = "list", path = "sub/list.txt", root = "~/photos" }
    batch_size = 1
    pipeline = [ { op = "decode" } ]
    """

    config = load(tmp_path, text)
    changed = load(tmp_path, text, {"streams.a.source.path": "other.txt"}, {"BATCHD_RUNTIME_DIR": "here"})

    assert config.daemon.runtime_dir == tmp_path / "run"
    assert config.streams["a"].source == ListSource(path=tmp_path / "sub/list.txt", root=Path("/home/somebody/photos"))
    assert changed.streams["a"].source.path == elsewhere / "other.txt"
    assert changed.daemon.runtime_dir == elsewhere / "here"


def test_names_of_the_user_s_own_are_no_paths(tmp_path: Path) -> None:
    """A field may be called "path", and a title "root"."""
    source = (
        '{ type = "csv", path = "t.csv", fields = { path = "text", root = "text" }, names = { root = "keys_dir" } }'
    )

    config = load(tmp_path, WHOLE, {"streams.photos.source": source}).streams["photos"].source
    in_file = load(tmp_path, WHOLE.replace('{ type = "folder", path = "photos" }', source)).streams["photos"].source

    assert (config.fields, config.names) == ({"path": "text", "root": "text"}, {"root": "keys_dir"})
    assert (in_file.fields, in_file.names) == (config.fields, config.names)
    assert in_file.path == tmp_path / "t.csv"


def test_names_that_users_choose_are_no_paths(tmp_path: Path) -> None:
    """A field may be called "path". Options of that name and module folders are paths."""
    text = """
    [daemon]
    python_path = ["code", "/srv/code"]
    [streams.a]
    source = { type = "python", function = "a:B", fields = { path = "uint8[9]" }, options = { root = "x", b = { n = "y" } } }
    batch_size = 1
    """

    config = load(tmp_path, text)

    assert config.daemon.python_path == (tmp_path / "code", Path("/srv/code"))
    source = config.streams["a"].source
    assert isinstance(source, PythonSource)
    assert (source.fields, source.options) == ({"path": "uint8[9]"}, {"root": str(tmp_path / "x"), "b": {"n": "y"}})
    assert load(tmp_path, WHOLE).daemon.python_path == (tmp_path,)


@pytest.mark.parametrize(
    "source",
    [
        FolderSource(path=Path("/data")),
        ListSource(path=Path("/l.txt")),
        ListSource(path=Path("/l.txt"), root=Path("/r"), allow_outside_root=True),
        FolderSource(path=Path("/data"), path_bytes=64),
        GlobSource(root=Path("/data"), patterns=("**/*.jpg", "b/*.png")),
        GlobSource(root=Path("/data"), patterns=("*",), classes="folder", path_bytes=9),
        PushSource(fields={"image": "image", "label": "int64", "wave": "float32[?,2]"}),
        PushSource(fields={"x": "uint8[2,2]"}, capacity=9, sample_bytes_max="1MiB", when_full="drop_oldest"),
        WebDatasetSource(root=Path("/data"), shards=("a-{00..11}.tar", "b.tar")),
        WebDatasetSource(root=Path("/data"), shards=("*.tar",), image=("png",), label="json:label", path_bytes=9),
        WebDatasetSource(
            root=Path("/data"),
            shards=("*.tar",),
            fields={"image": "image", "mask": "image", "boxes": "float32[?,4]", "label": "int64", "caption": "text"},
            names={"mask": "seg.png;mask.png", "label": "json:class"},
            defaults={"boxes": (), "label": -1, "caption": ""},
        ),
        ParquetSource(root=Path("/data"), shards=("*.parquet",), fields={"image": "image", "label": "int64"}),
        ParquetSource(
            root=Path("/data"),
            shards=("a.parquet",),
            fields={"x": "int32[?]"},
            names={"x": "tokens"},
            cache_bytes=1,
            allow_outside_root=True,
        ),
        LmdbSource(path=Path("/data"), fields={"image": "image"}),
        LmdbSource(
            path=Path("/d.mdb"), fields={"a": "text", "b": "int8"}, names={"a": "c"}, key="*-{field}", format="text"
        ),
        ConcatSource(sources=(FolderSource(path=Path("/a")), ListSource(path=Path("/l.txt"))), source_field="from"),
        MixSource(sources=(FolderSource(path=Path("/a")),) * 2, weights=(0.5, 3.0), until="first"),
        SubsetSource(of=ConcatSource(sources=(FolderSource(path=Path("/a")),)), start="90%", stop=7, shuffle_seed=3),
        SubsetSource(of=FolderSource(path=Path("/a")), indices=Path("/i.npy")),
        PluginSource(name="zip", options={"path": "/a.zip", "deep": {"list": [1, 2.5, None, True]}}),
        CsvSource(path=Path("/t.csv"), fields={"b": "float32[3]", "a": "text"}, names={"a": "A b"}, delimiter="\t"),
        CsvSource(root=Path("/t"), files=("*.csv",), image="f", image_root=Path("/i"), allow_outside_root=True),
        NpySource(path=Path("/x.npy"), field="x"),
        NpySource(root=Path("/x"), arrays={"image": "x.npy", "label": "y.npy"}),
        NpzSource(path=Path("/x.npz"), arrays={"image": "x_train"}),
        RawSource(path=Path("/x.bin"), record={"label": "uint8", "image": "uint8[3,32,32]"}, offset=16),
        RawSource(root=Path("/x"), files=("*.bin",), record={"x": "int16"}, byte_order="big"),
        TFRecordSource(root=Path("/data"), shards=("a-*",), fields={"image": "image", "label": "int64"}),
        TFRecordSource(
            root=Path("/data"),
            shards=("a-*",),
            fields={"a": "bool", "b": "float32[?]", "c": "text", "d": "int8[2]", "e": "float32"},
            names={"b": "x/y"},
            defaults={"a": True, "b": (), "c": "", "d": (1, 2), "e": 1.5},
            sequence=True,
        ),
        PythonSource(function="a.b:C", fields={"image": "uint8[2,2]", "label": "int64"}),
        PythonSource(
            function="a:f", fields={"x": "text"}, options={"n": [1, {"a": 0.5}]}, digest="2", length_timeout_s=5.0
        ),
        GeneratorSource(function="a:g", fields={"x": "float32"}),
        GeneratorSource(function="a:g", fields={"x": "int8[?]"}, options={"n": 1}, epoch_samples=9, yields="batch"),
        VideoSource(root=Path("/data"), files=("**/*.mp4",)),
        VideoSource(
            root=Path("/v"), files=("a.mkv",), every=3, frames=8, stride=2, size=(112, 96), color="gray", path_bytes=9
        ),
    ],
)
def test_sources_survive_the_way_to_a_worker(source: SourceOptions) -> None:
    """A source survives the conversion to plain data, and its names keep their order."""
    copy = source_from_plain(source_to_plain(source))
    assert copy == source
    assert str(copy) == str(source)


@pytest.mark.parametrize(
    "plain", [{}, {"type": "folder"}, {"type": "folder", "path": "/a", "more": 1}, {"type": "list", "path": "/a"}]
)
def test_plain_data_that_is_no_source_is_refused(plain: dict[str, object]) -> None:
    """A worker accepts exactly the data that the daemon writes."""
    with pytest.raises(ValueError, match=r"is not one of|has the options"):
        source_from_plain(plain)


@pytest.mark.parametrize(
    "changes",
    [
        {"path": 3},
        {"path_bytes": True},
        {"path_bytes": "9"},
        {"patterns": "*"},
        {"patterns": [3]},
        {"classes": "x"},
        {"record": {"x": 3}},
        {"record": {3: "int8"}},
        {"record": []},
    ],
)
def test_plain_data_of_another_type_is_refused(changes: dict[str, object]) -> None:
    """Each option has the type of its dataclass."""
    folder, glob = FolderSource(path=Path("/data")), GlobSource(root=Path("/data"), patterns=("*",))
    raw = RawSource(path=Path("/data"), record={"x": "int8"})
    plain = source_to_plain(raw if "record" in changes else folder if "path" in changes else glob)

    with pytest.raises(TypeError):
        source_from_plain(plain | changes)


def test_a_mapping_of_another_type_is_refused() -> None:
    """Keys and values have the types of the dataclass."""
    plain = source_to_plain(TFRecordSource(root=Path("/data"), shards=("*",), fields={"a": "int64"}))

    for changes in ({"fields": ["a"]}, {"fields": {"a": 3}}, {"names": {"a": None}}, {"defaults": {"a": [["x"]]}}):
        with pytest.raises(TypeError):
            source_from_plain(plain | changes)


def test_names_in_a_table_of_the_users_own_are_no_paths(tmp_path: Path) -> None:
    """A field may be called path."""
    text = """
    [streams.a]
    source = { type = "tfrecord", root = "r", shards = ["*"], fields = { path = "text", root = "int64" }, names = { path = "p" } }
    batch_size = 1
    """

    source = load(tmp_path, text).streams["a"].source

    assert isinstance(source, TFRecordSource)
    assert (source.root, source.fields, source.names) == (
        tmp_path / "r",
        {"path": "text", "root": "int64"},
        {"path": "p"},
    )


@pytest.mark.parametrize("dotted", ["streams.photos.pipeline.1.size", "streams.photos.pipeline[1].size"])
def test_overrides_reach_items_of_lists(tmp_path: Path, dotted: str) -> None:
    """Items have numbers, as in messages or with dots; each override sees the earlier ones."""
    replaced = {"streams.photos.pipeline": '[{ op = "decode" }, { op = "resize", size = [1, 1] }]'}

    assert load(tmp_path, WHOLE, {dotted: "[9, 7]"}).streams["photos"].pipeline[1] == RandomResizedCrop(size=(9, 7))
    assert load(tmp_path, WHOLE, {**replaced, dotted: "[9, 7]"}).streams["photos"].pipeline[1] == Resize(size=(9, 7))


def test_overrides_reach_parts_of_sources_and_whole_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path in one is relative to the current directory, like all paths on the command line."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    source = '{ type = "mix", weights = [1, 2], sources = [{ type = "folder", path = "a" }, { type = "folder", path = "b" }] }'
    text = WHOLE.replace('{ type = "folder", path = "photos" }', source)
    changes = {
        "streams.photos.source.sources.1.path": "c",
        "streams.photos.source.weights.0": "5",
        "streams.photos.pipeline.0": '{ op = "decode", color = "gray" }',
    }

    photos = load(tmp_path, text, changes).streams["photos"]

    folders = (FolderSource(path=tmp_path / "a"), FolderSource(path=elsewhere / "c"))
    assert photos.source == MixSource(sources=folders, weights=(5, 2))
    assert photos.pipeline[0] == Decode(color="gray")


def test_a_stream_whose_name_is_a_number_is_no_item(tmp_path: Path) -> None:
    """A number means an item only in lists."""
    assert load(tmp_path, f"[streams.0]{STREAM}", {"streams.0.seed": "3"}).streams["0"].seed == 3


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("streams.photos.pipeline.2.size", "streams.photos.pipeline has 2 items, numbers 0 to 1, and there is no 2"),
        ("streams.photos.pipeline.5", "streams.photos.pipeline has 2 items, numbers 0 to 1, and there is no 5"),
        ("streams.photos.pipeline.-1.size", "and there is no -1"),
        ("streams.photos.pipeline.resize.size", "and there is no resize"),
        ("daemon.python_path.1", "daemon.python_path has 1 item, number 0, and there is no 1"),
        ("streams.photos.batch_size.0", "streams.photos.batch_size is neither a table nor a list"),
    ],
)
def test_a_missing_item_is_reported_with_the_length_of_the_list(tmp_path: Path, dotted: str, message: str) -> None:
    """An override never adds an item to a list by mistake."""
    (problem,) = problems(tmp_path, WHOLE, {dotted: "[8, 8]"}).values()

    assert problem.message.startswith(f"cannot be set by --set {dotted}: ")
    assert problem.message.endswith(message)


def test_a_problem_that_an_override_causes_in_an_item_names_the_override(tmp_path: Path) -> None:
    """The problem has no line, because the value is not in the file."""
    (problem,) = problems(tmp_path, WHOLE, {"streams.photos.pipeline.1.size": "224"}).values()

    assert problem.path == "streams.photos.pipeline[1].size"
    assert problem.message == (
        "must be an array, such as [224, 224], not 224 (set by --set streams.photos.pipeline.1.size)"
    )
    assert problem.line is None


# --- invalid values -------------------------------------------------------------------------------

MIXES = 'shuffle = true mixes the whole source, and shuffle = { blocks = 64, block_bytes = "8MiB" } blocks of it'
WRONG_VALUES = [
    ("daemon.workers", "0", "at least 1|greater than or equal to 1"),
    ("daemon.workers", "true", "integer"),
    ("daemon.workers", '"many"', "auto.*many"),
    ("daemon.memory", '"4 loaves"', "4GiB"),
    ("daemon.memory", "1000", "64KiB"),
    ("daemon.memory", '"0.3B"', "whole number"),
    ("daemon.runtime_dir", '""', "name a directory"),
    ("daemon.tcp", '"::1:7070"', "brackets"),
    ("daemon.tcp", '"10.0.0.5:0"', "port from 1 to 65535"),
    ("daemon.tcp", "7070", "string"),
    ("daemon.pool_gateways", "0", "greater than or equal to 1"),
    ("daemon.pool_gateways", "9", "less than or equal to 8"),
    ("daemon.keys_dir", '""', "name a directory"),
    ("daemon.python_path", '"/srv"', "array"),
    ("daemon.drain_timeout_s", "10", "less than 10"),
    ("daemon.sample_timeout_s", "nan", "finite"),
    ("streams.photos.batch_size", "0", "greater than or equal to 1, not 0"),
    ("streams.photos.batch_size", "65537", "less than or equal to 65536, not 65537"),
    ("streams.photos.batch_size", '"4"', 'an integer, such as 256, not "4"'),
    ("streams.photos.batch_size", "4.0", "integer"),
    ("streams.photos.seed", "-1", "greater than or equal to 0"),
    ("streams.photos.seed", str(1 << 63), "less than"),
    ("streams.photos.shuffle", '"yes"', 'a boolean: true or false, not "yes"'),
    ("streams.photos.shuffle", "{ blocks = 2 }", 'block_bytes, such as "8MiB", or block_samples, and not both'),
    ("streams.photos.shuffle", '{ blocks = 2, block_samples = 3, block_bytes = "1MiB" }', "and not both"),
    ("streams.photos.weights", '"w.npy"', r"a table, such as { by = \"class\", power = 0.5 }, not \"w.npy\""),
    ("streams.photos.weights", "{ power = 0.5 }", 'by = "class", or a file of weights, and not both'),
    ("streams.photos.weights", '{ file = "w.npy", power = 0.5 }', 'power counts only with by = "class"'),
    ("streams.photos.weights", '{ by = "class", replacement = false }', "replacement = false needs samples"),
    ("streams.photos.memory", "3.5", 'an integer or a text such as "1GiB", not 3.5'),
    ("streams.photos.on_error", '"ignore"', "'substitute', 'mask' or 'fail', not \"ignore\""),
    ("streams.photos.lag", '"lock"', "'independent' or 'lockstep'"),
    ("streams.photos.max_bad_fraction", "1.5", "less than or equal to 1"),
    ("streams.photos.window", "65", "less than or equal to 64"),
    ("streams.photos.pipeline", "3", r"an array, such as \[{ op = \"decode\" },.*\], not 3"),
    ("streams.photos.source", "3", 'a table, such as { type = "folder", path = .* }, not 3'),
]


def test_gateways_beyond_the_last_port_are_refused(tmp_path: Path) -> None:
    """Each gateway has its own port, counted from that of worker_address."""
    text = WHOLE.replace("workers = 2", 'worker_address = "10.0.0.5:65534"\npool_gateways = 2')
    assert load(tmp_path, text).daemon.pool_gateways == 2
    found = problems(tmp_path, text.replace("pool_gateways = 2", "pool_gateways = 3"))
    said = "3 gateways need the ports 65534 to 65536, and the last one is 65535"
    assert found["daemon.pool_gateways"].message == said


@pytest.mark.parametrize(("path", "value", "message"), WRONG_VALUES)
def test_a_wrong_value_is_named_with_its_line_and_its_meaning(
    tmp_path: Path, path: str, value: str, message: str
) -> None:
    """The error has the place, the expected and the found value, and the meaning of the key."""
    table, _, key = path.rpartition(".")
    streams = dict(line.split(" = ", 1) for line in STREAM.strip().splitlines())
    if table == "daemon":
        text = f"[daemon]\n{key} = {value}\n[streams.photos]{STREAM}"
    else:
        streams.pop(key, None)
        rest = "".join(f"{name} = {text}\n" for name, text in streams.items())
        text = f"[streams.photos]\n{key} = {value}\n{rest}"

    found = problems(tmp_path, text)

    assert [path] == list(found)
    assert found[path].line == 2
    assert found[path].meaning
    assert re.search(message, found[path].message)


def test_each_mistake_in_the_table_of_a_shuffle_is_named_with_its_key(tmp_path: Path) -> None:
    """A wrong number, a wrong size and a slip; each key has its own meaning."""
    found = problems(
        tmp_path, f'[streams.photos]{STREAM}\nshuffle = {{ blocks = 0, block_bytes = "1KiB", block_sample = 1 }}'
    )

    assert {key: (one.message, one.remedy) for key, one in found.items()} == {
        "streams.photos.shuffle.blocks": ("must be greater than or equal to 1, not 0", ""),
        "streams.photos.shuffle.block_bytes": ("must be from 64KiB to 1024TiB, not 1024 bytes", ""),
        "streams.photos.shuffle.block_sample": (
            "unknown key; did you mean block_samples?",
            "did you mean block_samples?",
        ),
    }
    assert found["streams.photos.shuffle.blocks"].meaning.startswith("Number of blocks that are open at a time")


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    """One run shows several tables and kinds of mistakes, in the order of the file."""
    text = """
    [daemon]
    wokers = 3
    memory = "a lot"
    [streams.photos]
    source = { type = "foldr", path = "photos" }
    batch_sise = 4
    pipeline = [
        { op = "decode", max_pixels = 0 },
        { op = "rezise", size = [8, 8] },
        { op = "random_resized_crop", size = [8, 8, 8], sise = 3 },
        { size = [8, 8] },
    ]
    [streams."two words"]
    source = { type = "folder" }
    batch_size = 1
    pipeline = [ { op = "decode" }, { op = "resize" } ]
    [speling]
    """

    found = problems(tmp_path, text)

    lines = {path: problem.line for path, problem in found.items()}
    assert lines == {
        "daemon.wokers": 3,
        "daemon.memory": 4,
        "streams.photos.source.type": 6,
        "streams.photos.batch_sise": 7,
        "streams.photos.pipeline[0].max_pixels": 9,
        "streams.photos.pipeline[1].op": 10,
        "streams.photos.pipeline[2].size": 11,
        "streams.photos.pipeline[2].sise": 11,
        "streams.photos.pipeline[3].op": 12,
        'streams."two words"': 14,
        'streams."two words".source.path': 15,
        'streams."two words".pipeline[1]': 17,
        "speling": 18,
    }
    assert list(lines.values()) == sorted(lines.values())
    assert found["daemon.wokers"].message == "unknown key; did you mean workers?"
    assert found["streams.photos.source.type"].message == '"foldr" is unknown; did you mean type = "folder"?'
    assert found["streams.photos.batch_sise"].message == "unknown key; did you mean batch_size?"
    assert found["streams.photos.pipeline[1].op"].message == '"rezise" is unknown; did you mean op = "resize"?'
    assert found["streams.photos.pipeline[2].sise"].message == "unknown key; did you mean size?"
    assert found["streams.photos.pipeline[3].op"].message.startswith("missing; known here: a")
    assert found["speling"].message == "unknown key; known here: daemon, streams"


@pytest.mark.parametrize(
    ("table", "words", "remedy"),
    [
        ("step", 'op = "random_flip", p = 0.5', "did you mean probability?"),
        ("step", 'op = "to", outputDtype = "float16"', "did you mean dtype?"),
        ("step", 'op = "resize", img_size = 224, size = [8, 8]', "did you mean size?"),
        ("step", 'op = "resize", shortest-edge = 224', "did you mean shorter_side?"),
        ("step", 'op = "ToTensor"', 'did you mean op = "to"?'),
        ("step", 'op = "to_tensor"', 'did you mean op = "to"?'),
        ("step", 'op = "horizontal_flip"', 'did you mean op = "random_flip"?'),
        ("step", 'op = "RandomResizedCrop", size = [8, 8]', 'did you mean op = "random_resized_crop"?'),
        ("step", 'type = "Resize", size = [8, 8]', 'write op = "resize" instead of type = "Resize"'),
        ("source", 'type = "ImageFolder", path = "x"', 'did you mean type = "folder"?'),
        ("source", 'type = "folder", root = "x"', "did you mean path?"),
        ("source", 'type = "webdataset", urls = ["x"]', "did you mean shards?"),
        ("source", 'kind = "wds", shards = ["x"]', 'write type = "webdataset" instead of kind = "wds"'),
        ("stream", "num_workers = 4", "did you mean workers in [daemon]?"),
        ("stream", "prefetch_factor = 4", "did you mean window?"),
        ("stream", "drop_remainder = true", "did you mean drop_last?"),
        ("stream", "reprob = 0.25", "did you mean erase?"),
        ("stream", "cutmix = 1.0", "did you mean mix?"),
        ("stream", "transforms = []", "did you mean pipeline?"),
        ("stream", "img_size = 224", "did you mean size in a step of pipeline?"),
        ("stream", "horizontal_flip = true", 'that is a step: write { op = "random_flip" } into pipeline'),
        ("stream", "normalize = true", 'that is a step: write { op = "normalize" } into pipeline'),
        ("stream", "shuffle_buffer = 1000", f"not needed: {MIXES}"),
        ("stream", "epochs = 3", "the trainer decides it: daemon.stream(name, epochs=3)"),
        ("daemon", "prefetch = 3", "did you mean window in [streams.NAME]?"),
        ("daemon", "num-workers = 3", "did you mean workers?"),
    ],
)  # fmt: skip
def test_words_of_other_tools_lead_to_the_right_key(tmp_path: Path, table: str, words: str, remedy: str) -> None:
    """That key is in the same table, in another one, or does not exist."""
    text = {
        "daemon": f"[daemon]\n{words}\n[streams.photos]{STREAM}",
        "stream": f"[streams.photos]{STREAM}\n{words}\n",
        "step": f'[streams.photos]\nbatch_size = 1\nsource = {{ type = "folder", path = "x" }}\npipeline = [{{ {words} }}]\n',
        "source": f"[streams.photos]\nbatch_size = 1\nsource = {{ {words} }}\n",
    }[table]
    assert remedy in [problem.remedy for problem in problems(tmp_path, text).values()]


@pytest.mark.parametrize(
    ("table", "words", "what", "remedy"),
    [
        ("stream", 'on_error = "mesk"', "must be 'substitute', 'mask' or 'fail', not \"mesk\"", 'did you mean "mask"?'),
        ("stream", 'window = "aut"', "must be an integer or 'auto', not \"aut\"", 'did you mean "auto"?'),
        ("stream", 'lag = "xyz"', "must be 'independent' or 'lockstep', not \"xyz\"", ""),
        ("stream", "lag = 3", "must be 'independent' or 'lockstep', not 3", ""),
        ("daemon", 'reserve = "strat"', "must be 'demand' or 'start', not \"strat\"", 'did you mean "start"?'),
    ],
)  # fmt: skip
def test_a_misspelt_choice_leads_to_the_right_one(
    tmp_path: Path, table: str, words: str, what: str, remedy: str
) -> None:
    """The message has all choices, whether one of them is near or not."""
    text = {"daemon": f"[daemon]\n{words}\n[streams.photos]{STREAM}", "stream": f"[streams.photos]{STREAM}\n{words}\n"}
    (problem,) = problems(tmp_path, text[table]).values()
    assert (problem.what, problem.remedy) == (what, remedy)


def test_every_word_of_another_tool_leads_to_something_that_exists() -> None:
    """It leads to a key, a step or a source, never to itself, ``op`` or ``type``."""
    kinds = {*STEP_KINDS, *SOURCE_KINDS}
    tables = [Config, DaemonConfig, StreamConfig]
    keys = {key for table in tables for key in table.model_fields}
    keys |= {one.name for kind in [*STEP_KINDS.values(), *SOURCE_KINDS.values()] for one in fields(kind)} - {
        "op",
        "type",
    }

    assert set(synonyms.KINDS) <= kinds
    assert set(synonyms.KEYS) <= keys
    for words in (synonyms.KINDS, synonyms.KEYS):
        assert not [name for name, others in words.items() if name in others.split()]


def test_the_text_of_an_error_names_the_file_the_line_and_the_key(tmp_path: Path) -> None:
    """A user can read the message without the documentation."""
    with pytest.raises(ConfigInvalid) as caught:
        load(tmp_path, f"[daemon]\nworkers = 0\n[streams.photos]{STREAM}")

    file = tmp_path / "batchd.toml"
    assert str(caught.value).startswith(f"{file} has 1 problem:\n  {file}:2: daemon.workers: must be ")
    assert "(Number of decoding processes." in str(caught.value)


def test_an_unknown_step_without_a_near_name_lists_the_known_ones(tmp_path: Path) -> None:
    """A user learns the known steps from the message."""
    found = problems(tmp_path, WHOLE.replace('"random_resized_crop"', '"xyz"'))

    message = found["streams.photos.pipeline[1].op"].message
    assert all(kind in message for kind in STEP_KINDS)


def test_problems_of_steps_inside_of_steps_have_their_whole_key_and_line(tmp_path: Path) -> None:
    """A view's steps are checked as those of a pipeline are, and can be set on the command line."""
    views = """pipeline = [ { op = "decode" }, { op = "views", into = { image = { count = 2, steps = [
        { op = "random_resized_crop", size = [9, 9] },
    ] }, local = { steps = [
        { op = "resize", sise = [9, 9] },
        { op = "views", into = { image = { steps = [] } } },
    ] } } } ]
    """
    text = WHOLE[: WHOLE.index("pipeline")] + views
    line = 1 + text[: text.index("sise")].count("\n")
    local = "streams.photos.pipeline[1].into.local.steps"

    found = problems(tmp_path, text)
    once = problems(tmp_path, text.replace("sise", "size"))

    assert found[f"{local}[0].sise"].message == "unknown key; did you mean size?"
    assert found[f"{local}[0].sise"].line == line
    assert once[f"{local}[1]"].message.startswith('"views" cannot be inside of "views"')
    assert once[f"{local}[1]"].line == line + 1
    given = text.replace("sise", "size").replace('{ op = "views", into = { image = { steps = [] } } },', "")
    (_decode, step) = (
        load(tmp_path, given, {"streams.photos.pipeline.1.into.image.steps.0.size": "[7, 8]"})
        .streams["photos"]
        .pipeline
    )
    assert step.into["image"].steps[0].size == (7, 8)


def test_journal_of_samples_that_can_be_had_again_is_refused(tmp_path: Path) -> None:
    """Only pushed samples come once; the batches of others are computed."""
    found = problems(tmp_path, WHOLE + 'journal = "64MiB"\n')
    assert 'need no journal: only those of "push" have one' in found["streams.photos.journal"].message


def test_skew_without_lockstep_is_refused(tmp_path: Path) -> None:
    """An option without an effect is a misunderstanding."""
    found = problems(tmp_path, WHOLE + "max_skew = 3\n")

    assert found["streams.photos.max_skew"].message == 'max_skew counts only with lag = "lockstep"'
    assert load(tmp_path, WHOLE + 'max_skew = 3\nlag = "lockstep"\n').streams["photos"].max_skew == 3


RESIZED = WHOLE.replace(
    '{ op = "random_resized_crop"', '{ op = "resize", shorter_side = 256 }, { op = "random_resized_crop"'
)


def test_a_cache_needs_a_budget_and_a_budget_a_cache(tmp_path: Path) -> None:
    """Samples are kept only on request, and an option without an effect is refused."""
    found = problems(tmp_path, WHOLE + 'cache = "encoded"\n')
    assert found["streams.photos.cache"].message.startswith('cache = "encoded" needs cache_memory')

    found = problems(tmp_path, WHOLE + 'cache = "off"\ncache_memory = "8GiB"\n')
    assert found["streams.photos.cache_memory"].message == (
        'cache_memory counts only with a cache: cache = "points", "pixels", "media", "encoded" or "decoded"'
    )

    stream = load(tmp_path, WHOLE + 'cache = "encoded"\ncache_memory = "8GiB"\n').streams["photos"]
    assert (stream.cache, stream.cache_memory, stream.cache_bytes) == ("encoded", 8 << 30, 8 << 30)


def test_a_cache_of_earlier_versions_is_told_what_replaces_it(tmp_path: Path) -> None:
    """A configuration that named it needs one word, and keeps its positions."""
    found = problems(tmp_path, WHOLE + 'cache = "seekable"\ncache_memory = "8GiB"\n')
    assert found["streams.photos.cache"].message.startswith('"seekable" is no more: write "encoded", which keeps')


def test_a_cache_on_disk_has_a_size_and_no_memory(tmp_path: Path) -> None:
    """One key is for memory, the other for the folder."""
    on_disk = 'cache = "encoded"\ncache_dir = "/ssd"\n'
    stream = load(tmp_path, WHOLE + on_disk + 'cache_size = "8GiB"\n').streams["photos"]
    assert (stream.cache_dir, stream.cache_bytes, stream.cache_memory) == (Path("/ssd"), 8 << 30, None)

    found = problems(tmp_path, WHOLE + on_disk)
    assert found["streams.photos.cache"].message.startswith('cache = "encoded" needs cache_size')
    found = problems(tmp_path, WHOLE + on_disk + 'cache_size = "8GiB"\ncache_memory = "8GiB"\n')
    assert (
        found["streams.photos.cache_memory"].message
        == "the cache is a file in cache_dir: say cache_size, not cache_memory"
    )
    found = problems(tmp_path, WHOLE + 'cache = "encoded"\ncache_memory = "8GiB"\ncache_size = "8GiB"\n')
    assert found["streams.photos.cache_size"].message == "cache_size counts only with cache_dir"
    found = problems(tmp_path, WHOLE + 'cache = "off"\ncache_dir = "/ssd"\ncache_size = "8GiB"\n')
    assert set(found) == {"streams.photos.cache_dir", "streams.photos.cache_size"}


TOKENS = """
[streams.photos]
source = { type = "npy", path = "/data/x.npy", field = "x" }
batch_size = 8
"""
LISTS = """
[streams.photos]
source = { type = "jsonl", root = "/data", shards = ["a.jsonl"], fields = { image = "image[<=8]" } }
batch_size = 8
pipeline = [
    { op = "decode" },
    { op = "random_resized_crop", size = [8, 8] },
    { op = "ragged", field = "image", max_shape = [8, 8, 8, 3] },
]
"""


@pytest.mark.parametrize(
    ("text", "keys", "kind"),
    [
        (WHOLE, "", "points" if has_crop_decoder() else "off"),
        (RESIZED, "", "off"),
        (WHOLE, 'cache_memory = "8GiB"', "pixels"),
        (RESIZED, 'cache_memory = "8GiB"', "pixels"),
        (WHOLE, 'cache_dir = "/ssd"\ncache_size = "8GiB"', "points" if has_crop_decoder() else "off"),
        (RESIZED, 'cache_dir = "/ssd"\ncache_size = "8GiB"', "off"),
        (TOKENS, 'cache_memory = "8GiB"', "off"),
        (TOKENS.replace("/data", "s3://bucket"), 'cache_memory = "8GiB"', "encoded"),
        (TOKENS.replace("/data", "s3://bucket"), 'cache_dir = "/ssd"\ncache_size = "8GiB"', "encoded"),
        (TOKENS.replace("/data", "s3://bucket"), "", "off"),
        (LISTS, 'cache_memory = "8GiB"', "off"),
        (LISTS, "", "off"),
    ],
)
def test_the_cache_follows_from_the_budget_the_steps_and_the_place(
    tmp_path: Path, text: str, keys: str, kind: str
) -> None:
    """``cache = "auto"`` keeps nothing if that gains nothing."""
    assert load(tmp_path, f"{text}{keys}\n").streams["photos"].cache_kind == kind


PUSHED = """
[streams.photos]
source = { type = "push", capacity = 8, fields = { x = "int64" } }
batch_size = 8
"""
WANTED = 'cache = "encoded" keeps what the source gives, and "pixels" images as decoded'
SLOW_DISK = "a crop follows decode, and a disk is rarely faster than a decoder"
SHORT_SIDE = 'cache_short_side: it counts only with cache = "decoded"'
ON_DISK = 'cache_dir = "/ssd"\n'


@pytest.mark.parametrize(
    ("text", "keys", "told"),
    [
        (WHOLE, 'cache_memory = "8GiB"', ""),
        (WHOLE, ON_DISK, ""),
        (
            WHOLE,
            f'{ON_DISK}cache_size = "8GiB"',
            f"cache_size: only access points are kept, which need little: {SLOW_DISK}; {WANTED}",
        ),
        (
            RESIZED,
            f'{ON_DISK}cache_size = "8GiB"',
            f"cache_dir, cache_size: no crop follows decode directly, so nothing is kept; {WANTED}",
        ),
        (
            TOKENS,
            'cache_memory = "8GiB"',
            f"cache_memory: no image is decoded from a file, so nothing is kept; {WANTED.partition(', and')[0]}",
        ),
        (
            WHOLE,
            'cache_memory = "8GiB"\ncache_short_side = 9',
            'cache_short_side: it counts only with cache = "decoded"',
        ),
        (RESIZED, 'cache_size = "8GiB"', "cache_size: there is no cache_dir"),
        (
            WHOLE,
            f'{ON_DISK}cache_memory = "8GiB"\ncache_short_side = 9',
            f"cache_memory: the size of a file in cache_dir is cache_size; {SHORT_SIDE}",
        ),
        (
            PUSHED,
            f'{ON_DISK}cache_memory = "8GiB"',
            'cache_memory, cache_dir: samples of type "push" come once, so there is nothing to keep of them',
        ),
    ],
)
@pytest.mark.skipif(not has_crop_decoder(), reason="the extension is not built: apt install gcc libjpeg62-turbo-dev")
def test_auto_refuses_no_key_and_names_those_without_effect(tmp_path: Path, text: str, keys: str, told: str) -> None:
    """It says why, and which cache would use them; neither steps nor the planned memory change."""
    with_keys = load(tmp_path, f"{text}{keys}\n")
    stream = with_keys.streams["photos"]
    plan = plan_pipeline(stream.pipeline, stream.cache_kind, stream.cache_short_side)

    assert stream.unused_by_cache == told
    assert (cache_problems(with_keys) == []) == (stream.cache_dir is None or stream.cache_kind == "off")
    assert plan.steps == stream.pipeline
    assert budgets_bytes(with_keys) == (8 << 30 if stream.cache_kind == "pixels" else 0)


def test_a_budget_beside_a_folder_reserves_no_memory(tmp_path: Path) -> None:
    """The cache is a file, whose size is another key."""
    stored = TOKENS.replace("/data", "s3://bucket") + ON_DISK + 'cache_size = "8GiB"\n'

    for memory in ("", 'cache_memory = "1GiB"\n'):
        with_keys = load(tmp_path, stored + memory)
        assert (with_keys.streams["photos"].cache_kind, budgets_bytes(with_keys)) == ("encoded", 0)


def test_a_short_side_is_for_decoded_samples(tmp_path: Path) -> None:
    """A cache of files keeps them unchanged."""
    short = 'cache_memory = "8GiB"\ncache_short_side = 256\n'
    assert load(tmp_path, WHOLE + 'cache = "decoded"\n' + short).streams["photos"].cache_short_side == 256

    found = problems(tmp_path, WHOLE + 'cache = "encoded"\n' + short)
    assert found["streams.photos.cache_short_side"].message.startswith(
        'cache_short_side counts only with cache = "decoded"'
    )


def test_a_cache_of_samples_that_occur_once_is_refused(tmp_path: Path) -> None:
    """These are pushed samples and those of a generator."""
    for source in ('type = "push", capacity = 8', 'type = "generator", function = "a:b"'):
        text = f"""
        [streams.a]
        source = {{ {source}, fields = {{ x = "int64" }} }}
        batch_size = 1
        cache = "encoded"
        cache_memory = "8GiB"
        """
        found = problems(tmp_path, text)
        assert "come once, so there is nothing to keep of them" in found["streams.a.cache"].message


def test_shuffle_of_a_source_without_order_is_refused(tmp_path: Path) -> None:
    """Only an explicit key is refused; the default has no effect."""
    text = """
    [streams.a]
    source = { type = "generator", function = "a:b", fields = { x = "int64" } }
    batch_size = 1
    """

    found = problems(tmp_path, text + "shuffle = true")

    assert (
        'samples of type "generator" come in their own order, so shuffle = true' in found["streams.a.shuffle"].message
    )
    found = problems(tmp_path, text + "shuffle = { blocks = 2, block_samples = 3 }")
    assert "so shuffle = { blocks = 2, block_samples = 3 } cannot" in found["streams.a.shuffle"].message
    assert not load(tmp_path, text).streams["a"].is_shuffled
    assert not load(tmp_path, text + "shuffle = false").streams["a"].is_shuffled


def test_a_live_stream_has_no_repeats(tmp_path: Path) -> None:
    """Its samples come once; one row of each, the default, may be said."""
    source = '{ type = "generator", function = "a:b", fields = { x = "int64" } }'
    text = f"[streams.a]\nsource = {source}\nbatch_size = 4\nrepeats = 1\n"
    assert load(tmp_path, text).streams["a"].repeats == 1

    found = problems(tmp_path, text.replace("repeats = 1", "repeats = 3"))

    assert (
        'samples of type "generator" come once, each to one row, so none can be in 3'
        in found["streams.a.repeats"].message
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{ type = "python", function = "a.b", fields = { x = "int64" } }', 'must be written as "package.module:name"'),
        (
            '{ type = "python", function = "a b:c", fields = { x = "int64" } }',
            'must be written as "package.module:name"',
        ),
        ('{ type = "python", function = "a:b", fields = { } }', "fields must not be empty"),
        ('{ type = "python", function = "a:b", fields = { x = "int65" } }', 'x = "int65" is not a valid type'),
        (
            '{ type = "python", function = "a:b", fields = { x = "text" }, options = { n = 9223372036854775808 } }',
            "above",
        ),
        (
            '{ type = "python", function = "a:b", fields = { x = "text" }, options = { n = [-9223372036854775808] } }',
            "above",
        ),
        (
            f'{{ type = "python", function = "a:b", fields = {{ x = "text" }}, options = {{ n = "{"x" * 9000}" }} }}',
            "is long",
        ),
        ('{ type = "generator", function = "a:b", fields = { x = "text" }, options = { rng = 3 } }', "cannot have rng"),
        (
            '{ type = "generator", function = "a:", fields = { x = "int64" } }',
            'must be written as "package.module:name"',
        ),
        ('{ type = "generator", function = "a:b", fields = { "9x" = "int64" } }', "'9x' is not a valid field name"),
    ],
)
def test_a_source_of_code_that_makes_no_sense_is_refused(tmp_path: Path, source: str, message: str) -> None:
    """The check does not look for the module."""
    found = problems(tmp_path, f"[streams.a]\nsource = {source}\nbatch_size = 1\n")

    assert [problem.line for problem in found.values()] == [2]
    assert message in next(iter(found.values())).message


@pytest.mark.parametrize("text", ["", "[daemon]\nworkers = 1\n", "[streams]\n"])
def test_a_daemon_without_streams_is_refused(tmp_path: Path, text: str) -> None:
    """An empty file is not a valid configuration."""
    assert "streams" in problems(tmp_path, text)


@pytest.mark.parametrize("name", ["two words", "a/b", "ä", "x" * 65, ""])
def test_a_stream_name_that_a_command_line_cannot_take_is_refused(tmp_path: Path, name: str) -> None:
    """Names of streams appear in commands, logs and metrics."""
    found = problems(tmp_path, f'[streams."{name}"]{STREAM}')

    assert [problem.line for problem in found.values()] == [1]
    assert "letters, digits" in next(iter(found.values())).message


@pytest.mark.parametrize(
    ("text", "path", "line", "message"),
    [
        ("[daemon]\nworkers = \n", "", 2, "not TOML: Invalid value, column 11"),
        ("[daemon\n", "", 1, "not TOML"),
        ('a = "open', "", 1, "not TOML: Unterminated string"),
        (f"[streams.a]{STREAM}[streams.b]{STREAM}[streams.a]{STREAM}", "streams.a", 9, "stands twice"),
        ("[daemon]\nworkers = 1\nworkers = 2\n", "", 3, "stands twice"),
        ("x = { a = 1, a = 2 }\n", "", 1, "stands twice"),
        ("x = [\n  { into = {\n    a = 1 } } ]\n", "", 2, "a table in braces is on one line"),
        ("x = { a = 1,\n b = 2 }\n", "", 1, "a table in braces is on one line"),
        ("x = { a = 1\n}\n", "", 1, "a table in braces is on one line"),
        ("a = " + "[" * 5000 + "]" * 5000, "", None, "too deep"),
        ("a = " + "9" * 5000, "", 1, "not TOML"),
    ],
)
def test_text_that_is_no_toml_is_refused_with_its_line(
    tmp_path: Path, text: str, path: str, line: int | None, message: str
) -> None:
    """The text has a typing mistake, a duplicate stream, or hostile content."""
    found = problems(tmp_path, text)

    assert list(found) == [path]
    assert found[path].line == line
    assert message in found[path].message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """The file is missing, a directory, not text or endless: each error is one sentence."""
    (tmp_path / "latin1.toml").write_bytes(b"# good\n# caf\xe9\n")
    expected = {
        tmp_path / "none.toml": f"there is no file {tmp_path}/none.toml; `batchd init PATH` writes one for your data",
        tmp_path: f"is a folder; `batchd init {tmp_path}` writes a configuration for the data in it",
        tmp_path / "latin1.toml": "not UTF-8: byte 0xe9; save the file as UTF-8",
        Path("/dev/zero"): "not a configuration",
    }

    for file, message in expected.items():
        with pytest.raises(ConfigInvalid, match=re.escape(message)) as caught:
            load_config(file, {}, {})
        assert str(caught.value).startswith(f"{file} has 1 problem:")
        assert caught.value.exit_code == ExitCode.USAGE


def test_values_from_outside_the_file_name_their_origin(tmp_path: Path) -> None:
    """A wrong variable or flag is not looked for in the file."""
    found = problems(
        tmp_path, WHOLE, {"streams.photos.window": "0", "streams.photos.sed": "1"}, {"BATCHD_WORKERS": "many"}
    )

    assert found["daemon.workers"].message.endswith('not "many" (set by BATCHD_WORKERS)')
    assert found["streams.photos.window"].message.endswith("(set by --set streams.photos.window)")
    assert found["streams.photos.sed"].message == "unknown key (set by --set streams.photos.sed); did you mean seed?"
    assert [problem.line for problem in found.values()] == [None, None, None]


def test_overrides_with_invalid_paths_are_refused(tmp_path: Path) -> None:
    """The path leads through a number, is malformed, or has bytes that are not text."""
    found = problems(
        tmp_path,
        WHOLE,
        {"daemon.workers.x": "1", "no path": "1", "a\nb": "1"},
        {"BATCHD_RUNTIME_DIR": "/run/\udcff"},
    )

    assert "daemon.workers is neither a table" in found["daemon.workers.x"].message
    assert "not a path of keys" in found["no path"].message
    assert "not a path of keys" in found["a\nb"].message
    assert "not UTF-8" in found["daemon.runtime_dir"].message


ANY_PLACE = st.sampled_from(
    [
        "daemon",
        "daemon.memory",
        "daemon.workers",
        "daemon.runtime_dir",
        "streams",
        "streams.photos",
        "streams.photos.source",
        "streams.photos.source.path",
        "streams.photos.pipeline",
        "streams.photos.batch_size",
        "streams.photos.on_error",
        "streams.photos.new",
    ]
)


@given(ANY_PLACE, st.one_of(SCALARS, TREES, st.lists(TREES | st.fixed_dictionaries({"op": SCALARS | TREES}))))
def test_every_value_gives_a_tree_or_problems(path: str, value: Any) -> None:
    """For any value at any place the loader returns, and each problem is inside the change."""
    with NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(WHOLE)
        file.flush()
        try:
            config = load_config(Path(file.name), {path: written(value, "")}, {})
        except ConfigInvalid as error:
            for problem in error.problems:
                assert problem.path.startswith(path) or path.startswith(problem.path)
        else:
            assert isinstance(config, Config)


def test_every_error_has_its_exit_code() -> None:
    """No two errors share an exit code by mistake, and no code lacks a name."""
    codes = {
        kind.__name__: int(kind.exit_code)
        for kind in BatchdError.__subclasses__()
        if kind.__module__ == "batchd.errors"
    }

    assert codes == {
        "ArgumentInvalid": 2,
        "ConfigInvalid": 2,
        "SourceInvalid": 2,
        "KeysInvalid": 2,
        "DaemonUnreachable": 3,
        "AlreadyRunning": 4,
        "MemoryTooSmall": 5,
        "Interrupted": 130,
    }
