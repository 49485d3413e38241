"""`batchd check` rejects what `batchd serve` rejects, in the same words, or names what it skips."""

import bz2
import gzip
import json
import lzma
import os
import resource
import socket
import zlib
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from batchd.cli.main import main
from batchd.config.load import load_config
from batchd.config.tree import DaemonConfig
from batchd.daemon import config_checks
from batchd.daemon.serve import ServeOptions, serve
from batchd.data.sources import source_checks
from batchd.data.sources.files.options import FolderSource
from batchd.data.sources.scan import scan_source
from batchd.data.sources.source_checks import try_source
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import BatchdError
from batchd.runtime import available
from batchd.stream import cache_memory
from batchd.stream.cache_file import cache_path
from batchd.stream.plan import plan_stream
from batchd.stream.rings import OWN_DESCRIPTORS
from support.images import write_photos
from support.shards import write_shard

DECODE = 'pipeline = [{ op = "decode" }, { op = "resize", size = [4, 4] }]'
FOLDER = 'source = { type = "folder", path = "photos" }'
SHARDS = 'source = { type = "webdataset", root = "shards", shards = ["*.tar"] }'
RECORDS = 'source = { type = "tfrecord", root = "shards", shards = ["a.tar"], fields = { l = "int64" } }'
ARRAY = 'source = { type = "npy", path = "x.npy" }'
SAMPLE = [("1.jpg", b"image"), ("1.cls", b"3")]

Pack = Callable[[bytes], bytes]
PACKED: dict[str, Pack] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda data: b"\x28\xb5\x2f\xfd" + data,
    "lz4": lambda data: b"\x04\x22\x4d\x18" + data,
}


def pack(kind: str) -> Callable[[Path], None]:
    """Make a compressed shard."""

    def prepare(folder: Path) -> None:
        shard = write_shard(folder / "shards" / "a.tar", SAMPLE)
        shard.write_bytes(PACKED[kind](shard.read_bytes()))

    return prepare


def cut(folder: Path) -> None:
    shard = write_shard(folder / "shards" / "a.tar", [("1.jpg", bytes(5000)), ("1.cls", b"3")])
    shard.write_bytes(shard.read_bytes()[:2000])


def members(*names: str) -> Callable[[Path], None]:
    return lambda folder: (write_shard(folder / "shards" / "a.tar", [(name, b"3") for name in names]), None)[1]


def link_out(name: str) -> Callable[[Path], None]:
    """Replace a file of a source by a link to a file elsewhere."""

    def prepare(folder: Path) -> None:
        (folder / "elsewhere").mkdir()
        target = folder / "elsewhere" / "a"
        write_shard(target, SAMPLE)
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).symlink_to(target)

    return prepare


def file(name: str, content: bytes = b"") -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(content)

    return prepare


def two_classes(folder: Path) -> None:
    write_photos(folder / "cats", {"cat": 1})
    write_photos(folder / "dogs", {"dog": 1})


def taken_place(folder: Path) -> None:
    """Create a file in place of the runtime directory."""
    (folder / "run").write_bytes(b"")


def nothing(_folder: Path) -> None:
    """Leave the valid data unchanged."""


# what is wrong, the change to the data, [daemon], the stream, the message
REFUSED = [
    *((f"tar as {kind}", pack(kind), "", f"{SHARDS}\n{DECODE}", f"a.tar is compressed ({kind})") for kind in PACKED),
    *((f"records as {kind}", pack(kind), "", RECORDS, f"a.tar is compressed ({kind})") for kind in PACKED),
    ("records as zlib", file("shards/a.tar", zlib.compress(b"record")), "", RECORDS, "is compressed (ZLIB)"),
    ("no records", file("shards/a.tar", b"hello, world, this is a text"), "", RECORDS, "this is no TFRecord file"),
    ("empty records", file("shards/a.tar"), "", RECORDS, "is empty; leave it out"),
    ("cut tar", cut, "", f"{SHARDS}\n{DECODE}", "is cut: it ends at byte 2000, within 1.jpg"),
    ("no tar", file("shards/a.tar", b"hello" * 200), "", f"{SHARDS}\n{DECODE}", "is not a tar file"),
    ("sample without image", members("1.cls"), "", f"{SHARDS}\n{DECODE}", "has no image"),
    ("sample without label", members("1.jpg"), "", f"{SHARDS}\n{DECODE}", "has no member .cls for its label"),
    ("label that is none", lambda folder: write_shard(folder / "shards/a.tar", [("1.jpg", b""), ("1.cls", b"x")]), "",
     f"{SHARDS}\n{DECODE}", "1.cls is not a whole number"),
    ("shard elsewhere", link_out("shards/a.tar"), "", f"{SHARDS}\n{DECODE}", "is a link that leads out of the root"),
    ("photo elsewhere", link_out("photos/b.jpg"), "", f"{FOLDER}\n{DECODE}", "is a link that leads out of the root"),
    ("match elsewhere", link_out("photos/b.jpg"), "",
     f'source = {{ type = "glob", root = "photos", patterns = ["*.jpg"] }}\n{DECODE}', "is a link that leads out of the root"),
    ("folder in itself", lambda folder: (folder / "photos" / "a").symlink_to(folder / "photos"), "",
     'source = { type = "glob", root = "photos", patterns = ["**/*.jpg"] }\n' + DECODE, "is a link to a folder that it lies in"),
    ("empty folder", lambda folder: (folder / "none").mkdir(), "",
     f'source = {{ type = "folder", path = "none" }}\n{DECODE}', "holds no image"),
    ("empty class", lambda folder: (folder / "cats" / "cat").mkdir(parents=True), "",
     f'source = {{ type = "folder", path = "cats" }}\n{DECODE}', "holds no image"),
    ("photos beside classes", file("photos/cat/2.jpg"), "", f"{FOLDER}\n{DECODE}", "holds both class folders"),
    ("long path", nothing, "", f'source = {{ type = "folder", path = "photos", path_bytes = 3 }}\n{DECODE}',
     "more than path_bytes = 3"),
    ("line that is none", file("list.txt", b"a.jpg 1\nb.jpg\n"), "",
     f'source = {{ type = "list", path = "list.txt" }}\n{DECODE}', "list.txt:2: not a path, a space and a whole number"),
    ("line that leads out", file("list.txt", b"../a.jpg 1\n"), "",
     f'source = {{ type = "list", path = "list.txt" }}\n{DECODE}', "a path that may lead out of the root"),
    ("empty list", file("list.txt", b"# nothing\n"), "",
     f'source = {{ type = "list", path = "list.txt" }}\n{DECODE}', "names no sample"),
    ("cut record", file("more/a.bin", bytes(13)), "",
     'source = { type = "raw", root = "more", files = ["*.bin"], record = { x = "uint8[4]" } }', "whole records of 4 bytes"),
    ("other titles", lambda folder: [file("more/a.csv", b"x\n1\n")(folder), file("more/b.csv", b"y\n1\n")(folder)], "",
     'source = { type = "csv", root = "more", files = ["*.csv"], fields = { x = "int64" } }', "has no column 'x'"),
    ("table without end", file("a.csv", b'x\n"1\n'), "",
     'source = { type = "csv", path = "a.csv", fields = { x = "int64" } }', "never closed"),
    ("table without lines", file("a.csv", b"x\n"), "",
     'source = { type = "csv", path = "a.csv", fields = { x = "int64" } }', "holds no record behind its titles"),
    ("other classes", two_classes, "", ('source = { type = "concat", sources = [{ type = "folder", path = "cats" }, '
     f'{{ type = "folder", path = "dogs" }}] }}\n{DECODE}'), "label 0 is cat in sources[0], but dog in sources[1]"),
    ("endless epoch", nothing, "", ('source = { type = "mix", weights = [1, 1e-12], sources = [{ type = "npy", path = "x.npy" }, '
     '{ type = "npy", path = "x.npy" }] }'), "make an epoch of"),
    ("part that is wrong", lambda folder: (folder / "none").mkdir(), "", ('source = { type = "concat", sources = [{ '
     f'type = "folder", path = "photos" }}, {{ type = "folder", path = "none" }}] }}\n{DECODE}'), "holds no image"),
    ("small folder", nothing, "", f"{FOLDER}\nbatch_size = 4\ndrop_last = true\n{DECODE}", "makes no batch of 4"),
    ("small array", nothing, "", f"{ARRAY}\nbatch_size = 11\ndrop_last = true", "a source of 10 samples makes no batch of 11"),
    ("small subset", nothing, "", ('source = { type = "subset", of = { type = "npy", path = "x.npy" }, stop = "30%" }\n'
     "batch_size = 4\ndrop_last = true"), "a source of 3 samples makes no batch of 4"),
    ("memory for rings", nothing, "", f"{ARRAY}\nbatch_size = 65536", "of shared memory, have 96.0 MiB: "),
    ("memory for caches", nothing, "", f'{ARRAY}\ncache = "encoded"\ncache_memory = "800TiB"', "are for caches"),
    ("cache without room", lambda folder: np.save(folder / "x.npy", np.zeros(99_999)), "",
     f'{ARRAY}\ncache = "encoded"\ncache_memory = "64KiB"', "only have room for the index of"),
    ("no directory", taken_place, "", ARRAY, "cannot be used: Not a directory"),
    ("no directory above", taken_place, 'runtime_dir = "run/further/down"', ARRAY, "cannot be used: Not a directory"),
    ("foreign address", nothing, 'http = "192.0.2.7:7071"', ARRAY, "cannot assign requested address"),
]  # fmt: skip


class Both:
    """A folder with valid data, and both commands for a configuration in it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._file = folder / "batchd.toml"
        self._capsys = capsys
        write_photos(folder / "photos", {"": 2})
        np.save(folder / "x.npy", np.zeros((10, 4), np.uint8))

    def write(self, daemon: str, stream: str) -> None:
        run = "" if "runtime_dir" in daemon else 'runtime_dir = "run"\n'
        http = "" if "http" in daemon else 'http = "off"\n'
        size = "" if "batch_size" in stream else "batch_size = 4\n"
        self._file.write_text(f"[daemon]\nworkers = 1\n{run}{http}{daemon}\n[streams.a]\n{stream}\n{size}")

    def check(self) -> tuple[int, list[tuple[str, str]], str]:
        """Return the exit code, each problem's path and text, and standard output."""
        with pytest.raises(SystemExit) as ended:
            main(["check", str(self._file)])
        printed = self._capsys.readouterr().out
        with pytest.raises(SystemExit):
            main(["check", "--format", "json", str(self._file)])
        found = json.loads(self._capsys.readouterr().out)
        problems = found["problems"] if isinstance(found, dict) else found
        texts = [(one["key"], "; ".join(filter(None, [one["problem"], one["help"]]))) for one in problems]
        return int(ended.value.code or 0), texts, printed

    def serve(self) -> tuple[int, str]:
        """Return exit code and text of the error, or None if it serves; a fault ends it there."""
        with pytest.raises(BatchdError) as refused:
            serve(load_config(self._file), ServeOptions(ready=_not_to_be_served))
        return int(refused.value.exit_code), str(refused.value)


def _not_to_be_served(_address: str) -> None:
    raise AssertionError("it is served")


@pytest.fixture
def both(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Both:
    """Make both commands on a machine that always has the same amount of free memory."""
    for module, name in (
        (config_checks, "available_bytes"),
        (available, "available_bytes"),
        (available, "limit_bytes"),
    ):
        monkeypatch.setattr(module, name, lambda: 160 << 20)
    return Both(tmp_path, capsys)


def assert_both_refuse(both: Both, said: str) -> None:
    """Check that both reject it in the same words with the same exit code, and nothing else."""
    code, problems, _output = both.check()
    refusal_code, refusal = both.serve()

    ((_path, text),) = problems
    assert said in text
    assert text in refusal
    # The daemon failed to take a directory or an address; for check, its key is wrong.
    assert refusal_code in {code, 1}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("prepare", "daemon", "stream", "said"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_serve_refuses_check_refuses_in_the_same_words(
    both: Both, prepare: Callable[[Path], object], daemon: str, stream: str, said: str
) -> None:
    """There is one case for each error that does not depend on other programs of the machine."""
    prepare(both.folder)
    both.write(daemon, stream)

    assert_both_refuse(both, said)


@pytest.mark.thorough
@pytest.mark.parametrize("key", ["http", "tcp"])
def test_an_address_that_is_taken_is_found(both: Both, key: str) -> None:
    """The check binds the address and releases it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        both.write(f'{key} = "127.0.0.1:{taken.getsockname()[1]}"', ARRAY)

        assert_both_refuse(both, "ddress already in use")

    assert both.check()[0] == 0


def test_descriptors_that_cannot_suffice_are_found(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check uses the hard limit, to which the daemon raises its own."""
    limits = {resource.RLIMIT_NOFILE: (OWN_DESCRIPTORS, OWN_DESCRIPTORS)}
    given = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits.get(what) or given(what))
    monkeypatch.setattr(resource, "setrlimit", lambda _what, _limits: None)
    both.write("", ARRAY)

    assert_both_refuse(both, f"descriptors at least, have {OWN_DESCRIPTORS}")


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("spoil", ["link", "open"])
def test_the_file_of_a_cache_that_cannot_be_used_is_found(both: Both, spoil: str) -> None:
    """The name of the file is known after a complete scan of the source."""
    (both.folder / "kept").mkdir()
    both.write("", f'{ARRAY}\ncache = "encoded"\ncache_dir = "kept"\ncache_size = "1MiB"')
    config = load_config(both.folder / "batchd.toml")
    stream = config.streams["a"]
    index = scan_source(stream.source, lambda _found: None, IndexCache(None), Storage())
    spec = cache_memory.cache_spec(plan_stream("a", stream, (), DaemonConfig()), index)
    assert spec is not None
    if spoil == "link":
        cache_path(spec).symlink_to(both.folder / "x.npy")
    else:
        cache_path(spec).touch()
        cache_path(spec).chmod(0o666)

    assert_both_refuse(both, "is a link: remove it" if spoil == "link" else "can be written by other users")


@pytest.mark.thorough
def test_where_a_daemon_runs_its_memory_and_its_addresses_are_its_own(both: Both) -> None:
    """A new configuration can be checked beside it, and the output lists the skipped checks."""
    both.write("", f"{ARRAY}\nbatch_size = 65536")
    (both.folder / "run").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as lifeline:
        lifeline.bind(os.fspath(both.folder / "run" / "lifeline.sock"))
        lifeline.listen()

        code, problems, output = both.check()

    assert (code, problems) == (0, [])
    assert "[daemon]  memory, descriptors and addresses: the daemon that runs has its own" in output


GENERATOR = file("mine.py", b"def g():\n while True: yield 1")
UNSEEN = [
    ("samples", nothing, 'source = { type = "npy", path = "y.npy", field = "x" }', "the content of its 9 samples, except 8"),
    ("a generator", GENERATOR, 'source = { type = "generator", function = "mine:g", fields = { x = "int64" } }',
     "the samples that mine:g yields, except 1"),
    ("what is pushed", nothing, 'source = { type = "push", fields = { x = "int64" } }', "the samples that producers push"),
]  # fmt: skip


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(("prepare", "stream", "said"), [case[1:] for case in UNSEEN], ids=[case[0] for case in UNSEEN])
def test_what_check_does_not_look_at_it_says(
    both: Both, prepare: Callable[[Path], object], stream: str, said: str
) -> None:
    """The note for each stream follows the table."""
    prepare(both.folder)
    np.save(both.folder / "y.npy", np.zeros(9, np.int64))
    both.write("", stream)

    code, problems, output = both.check()

    assert (code, problems) == (0, [])
    lines = output.partition("\nNot looked at")[2].splitlines()
    assert any(line.startswith("  a ") and said in line for line in lines)


def test_a_large_source_is_left_behind_its_first_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors in the first samples are found, and a note says that the rest is not checked."""
    monkeypatch.setattr("batchd.data.sources.files.index.PROGRESS_EVERY", 2)
    for number in range(9):
        write_shard(tmp_path / f"{number}.tar", SAMPLE)
    source = WebDatasetSource(root=tmp_path, shards=("*.tar",))

    early = try_source(source, (), Storage(), samples_max=3)
    (tmp_path / "8.tar").write_bytes(b"")
    behind = try_source(source, (), Storage(), samples_max=3)
    (tmp_path / "1.tar").write_bytes(b"")
    wrong = try_source(source, (), Storage(), samples_max=3)

    assert early == behind == (None, (), ("everything behind the first 4 samples",), ())
    assert [one.text for one in wrong.problems] == [f"{tmp_path}/1.tar is not a tar file, or is damaged: empty file"]


def test_a_slow_source_is_left_when_its_time_is_over(tmp_path: Path) -> None:
    """This also ends the listing of a folder with very many files."""
    write_photos(tmp_path, {"a": 3, "b": 3})
    clock = count(0, source_checks.SECONDS_MAX / 4)

    left = try_source(FolderSource(path=tmp_path), (), Storage(), clock=lambda: next(clock))

    assert left == (None, (), ("everything behind the first 0 samples",), ())
