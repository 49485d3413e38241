"""Sources: samples of folders and lists, the index, and messages for unusual files."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.files.index import FilesIndex
from batchd.data.sources.files.options import FolderSource, GlobSource, ListSource
from batchd.data.sources.files.reader import FilesReader, SampleReader
from batchd.data.sources.interface import BuiltInKind, PlainReader, kind_of, open_reader
from batchd.data.sources.options import SOURCE_KINDS, SourceOptions
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index import PREFIX_BYTES, IndexMalformed, SourceIndex, blob, readable
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd_wire.record import options
from support.source_files import make, nothing, scan_files, scan_folder, scan_list


def problems(source: SourceOptions) -> list[str]:
    return kind_of(source).problems(source, Storage())


def names_of(index: FilesIndex) -> list[str]:
    root = readable(index.root) + "/"
    return [index.path(sample).removeprefix(root) for sample in range(len(index))]


@pytest.fixture
def descriptor_of() -> Iterator[list[int]]:
    """Descriptors that are closed after the test."""
    descriptors: list[int] = []
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def shared(index: FilesIndex, descriptors: list[int]) -> FilesIndex:
    descriptors.append(index.index.to_memfd())
    return FilesIndex(SourceIndex.from_descriptor(descriptors[-1]))


# --- folders --------------------------------------------------------------------------------------


def test_classes_are_the_sorted_sub_folders_and_files_are_found_at_any_depth(tmp_path: Path) -> None:
    """Numbers of samples and labels are those of torchvision's ImageFolder."""
    make(
        tmp_path, "dog/2.jpg", "dog/10.JPG", "cat/x/b.png", "cat/x-1/c.webp", "cat/z.jpeg", "cat/x/y/a.gif", "Ape/1.bmp"
    )

    index = scan_folder(tmp_path)

    assert index.class_names == ("Ape", "cat", "dog")
    image_folder = [
        Path(folder, name).relative_to(tmp_path).as_posix()
        for class_name in sorted(entry.name for entry in tmp_path.iterdir())
        for folder, _folders, names in sorted(os.walk(tmp_path / class_name, followlinks=True))
        for name in sorted(names)
    ]
    assert names_of(index) == image_folder
    assert image_folder[1:5] == ["cat/z.jpeg", "cat/x/b.png", "cat/x-1/c.webp", "cat/x/y/a.gif"]
    assert [index.label(sample) for sample in range(len(index))] == [0, 1, 1, 1, 1, 2, 2]


def test_a_flat_folder_is_one_class_without_a_name(tmp_path: Path) -> None:
    """Photographs without classes can be served from a plain folder."""
    index = scan_folder(make(tmp_path, "b.jpg", "a.jpg", "notes.txt", ".hidden.jpg", ".thumbnails/a.jpg"))

    assert (names_of(index), index.class_names, index.labels.tolist()) == (["a.jpg", "b.jpg"], ("",), [0, 0])


def test_hidden_files_and_other_files_are_no_samples(tmp_path: Path) -> None:
    """Files without an image's ending are ignored at any depth."""
    make(
        tmp_path, "a/1.jpg", "a/.2.jpg", "a/.git/3.jpg", "a/4.txt", "a/5.jpg.part", "a/jpg", ".cache/6.jpg", "README.md"
    )

    assert names_of(scan_folder(tmp_path)) == ["a/1.jpg"]


def test_links_are_followed(tmp_path: Path) -> None:
    """Subsets are often folders of links; a dead link is a sample that the reader reports."""
    make(tmp_path / "all", "cat/1.jpg", "cat/2.jpg")
    subset = tmp_path / "subset"
    (subset / "some").mkdir(parents=True)
    (subset / "some/link.jpg").symlink_to(tmp_path / "all/cat/1.jpg")
    (subset / "some/dead.jpg").symlink_to(tmp_path / "gone.jpg")
    (subset / "whole").symlink_to(tmp_path / "all/cat")

    index = scan_files(FolderSource(path=subset, allow_outside_root=True))

    assert names_of(index) == ["some/dead.jpg", "some/link.jpg", "whole/1.jpg", "whole/2.jpg"]


def test_links_within_the_root_are_followed_without_being_asked(tmp_path: Path) -> None:
    """The root may be a link itself."""
    make(tmp_path / "all", "cat/1.jpg")
    (tmp_path / "all/cat/2.jpg").symlink_to("1.jpg")
    (tmp_path / "all/dog").symlink_to("cat")
    (tmp_path / "link").symlink_to("all")

    index = scan_folder(tmp_path / "link")

    assert names_of(index) == ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "dog/2.jpg"]
    reader = FilesReader(FolderSource(path=tmp_path / "link"), index.index, 100, Storage())
    assert [bytes(reader.read(sample)["image"]) for sample in range(4)] == [b"bytes of cat/1.jpg"] * 4


@pytest.mark.parametrize("name", ["cat/out.jpg", "out", "cat/deep"])
def test_a_link_out_of_the_root_is_refused(name: str, tmp_path: Path) -> None:
    """The data's author must not reach other files of the machine, nor a folder like ``root2``."""
    make(tmp_path / "root", "cat/1.jpg")
    make(tmp_path / "root2", "3.jpg")
    (tmp_path / "root" / name).symlink_to(tmp_path / ("root2/3.jpg" if name.endswith("jpg") else "root2"))
    sources = [FolderSource(path=tmp_path / "root"), GlobSource(root=tmp_path / "root", patterns=("**/*.jpg",))]

    for source in sources:
        with pytest.raises(SourceInvalid, match=rf"{name} is a link that leads out of the root, to .*/root2"):
            scan_files(source)
    assert len(scan_files(GlobSource(root=tmp_path / "root", patterns=("cat/1.jpg",)))) == 1, (
        "a link that no pattern matches"
    )


def test_a_file_that_becomes_a_link_out_of_the_root_is_a_bad_sample(tmp_path: Path) -> None:
    """The open file is checked, so there is no moment to exchange it."""
    make(tmp_path / "root", "1.jpg")
    make(tmp_path, "secret.jpg")
    source = FolderSource(path=tmp_path / "root")
    index = scan_files(source).index
    (tmp_path / "root/1.jpg").unlink()
    (tmp_path / "root/1.jpg").symlink_to(tmp_path / "secret.jpg")

    with pytest.raises(
        SampleUnreadable, match=r"a link that leads out of the root, to .*/secret\.jpg; set allow_outside_root"
    ):
        FilesReader(source, index, 100, Storage()).read(0)
    free = replace(source, allow_outside_root=True)
    assert bytes(FilesReader(free, index, 100, Storage()).read(0)["image"]) == b"bytes of secret.jpg"


def test_a_link_that_a_list_names_is_a_bad_sample_where_it_leads_out(tmp_path: Path) -> None:
    """The paths in the list all stay within the root."""
    make(tmp_path / "root", "1.jpg")
    make(tmp_path, "secret.jpg")
    (tmp_path / "root/2.jpg").symlink_to(tmp_path / "secret.jpg")
    (tmp_path / "list.txt").write_text("1.jpg 0\n2.jpg 1\n")
    source = ListSource(path=tmp_path / "list.txt", root=tmp_path / "root")
    reader = FilesReader(source, scan_files(source).index, 100, Storage())

    assert bytes(reader.read(0)["image"]) == b"bytes of 1.jpg"
    with pytest.raises(SampleUnreadable, match="leads out of the root"):
        reader.read(1)


def test_a_link_to_a_folder_around_it_is_refused(tmp_path: Path) -> None:
    """Following the link would never end."""
    make(tmp_path, "cat/1.jpg")
    (tmp_path / "cat/again").symlink_to(tmp_path / "cat")

    with pytest.raises(SourceInvalid, match=r"cat/again is a link to a folder that it lies in"):
        scan_folder(tmp_path)


def test_names_that_are_no_text_survive(tmp_path: Path) -> None:
    """A file name is bytes: the file opens, and messages show the name with escapes."""
    name = b"\xff\x1b[31m\n.jpg"
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"here")

    index = scan_folder(tmp_path)

    assert index.file(0) == os.fsencode(tmp_path) + b"/" + name
    assert index.path(0) == rf"{tmp_path}/\xff\x1b[31m\n.jpg"
    assert bytes(SampleReader(index, 100, Storage()).read(0)) == b"here"


def test_progress_is_reported_during_the_scan(tmp_path: Path) -> None:
    """Reports come at intervals, and the last one has the total number."""
    told: list[int] = []
    path = tmp_path / "list.txt"
    path.write_text("a.jpg 1\n" * 100_000)

    scan_source(ListSource(path=path), told.append, IndexCache(None), Storage())

    assert len(told) > 3
    assert told == sorted(told)
    assert told[-1] == 100_000


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "photos holds no image"),
        (["notes.txt", ".a.jpg"], "photos holds no image"),
        (["cat/notes.txt", "dog/notes.txt"], "photos holds no image in its class folders"),
        (["cat/1.jpg", "2.jpg"], r"both class folders \(cat, …\) and images of its own \(2.jpg, …\)"),
    ],
)
def test_a_folder_that_cannot_be_meant_is_refused(tmp_path: Path, files: list[str], message: str) -> None:
    """Empty folders and images beside classes are named, never left out silently."""
    (tmp_path / "photos").mkdir()

    with pytest.raises(SourceInvalid, match=message):
        scan_folder(make(tmp_path / "photos", *files))


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """The path is missing, or is a file."""
    make(tmp_path, "file")

    with pytest.raises(SourceInvalid, match="none cannot be read: No such file or directory"):
        scan_folder(tmp_path / "none")
    with pytest.raises(SourceInvalid, match="file cannot be read: Not a directory"):
        scan_folder(tmp_path / "file")


# --- lists ----------------------------------------------------------------------------------------


def test_a_list_has_paths_with_spaces_comments_and_blank_lines(tmp_path: Path) -> None:
    """The last word is the label; the text before it is the path, relative to the list."""
    index = scan_list(
        tmp_path / "list.txt",
        b"\xef\xbb\xbfa b/c 1.jpg 3\r\n\n  # a comment 7\n  d.jpg\t-1  \n\xff.jpg +12",
    )

    assert names_of(index) == ["a b/c 1.jpg", "d.jpg", r"\xff.jpg"]
    assert index.labels.tolist() == [3, -1, 12]
    assert index.class_names == ()
    assert index.root == os.fsencode(tmp_path)


def test_paths_of_a_list_are_relative_to_its_root(tmp_path: Path) -> None:
    """The list may be in another folder than the files."""
    make(tmp_path / "data", "a.jpg")

    index = scan_list(tmp_path / "list.txt", "a.jpg 0\n", root=tmp_path / "data")

    assert bytes(SampleReader(index, 100, Storage()).read(0)) == b"bytes of a.jpg"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"photo.jpg", "not a path, a space and a whole number: photo.jpg"),
        (b"photo.jpg cat", "not a path, a space and a whole number: photo.jpg cat"),
        (b"photo.jpg 1.5", "not a path"),
        (b"photo.jpg 99999999999999999999", "not a path"),
        (b"photo.jpg 9999999999999999999", "does not fit into 64 bits"),
        (b"7", "not a path"),
        (b"a\0b.jpg 1", "NUL"),
        (b"a" * 4096 + b".jpg 1", "longer than 4095 bytes"),
        (b"a" * 9000 + b".jpg 1", "a line longer than"),
        (b"/etc/passwd 1", "allow_outside_root = true"),
        (b"../up.jpg 1", "allow_outside_root = true"),
        (b"a/../../up.jpg 1", "allow_outside_root = true"),
        ("ä".encode("utf-16"), "not a path|NUL"),
        (b"\xff\xd8\xff\xe0 \x1b[2J", r"not a path.*\\xff\\xd8\\xff\\xe0 \\x1b\[2J"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number_and_its_text(tmp_path: Path, line: bytes, message: str) -> None:
    """The first bad line ends the scan: a list with one mistake is corrected, not half served."""
    path = tmp_path / "list.txt"

    with pytest.raises(SourceInvalid, match=message) as caught:
        scan_list(path, b"# head\ngood.jpg 1\n" + line + b"\nother.jpg 2\n")
    assert str(caught.value).startswith(f"{path}:3: ")


def test_a_list_may_lead_out_of_its_root_where_that_is_allowed(tmp_path: Path) -> None:
    """Absolute paths stay absolute."""
    make(tmp_path, "a.jpg", "lists/x")

    index = scan_list(tmp_path / "lists/l.txt", f"{tmp_path}/a.jpg 1\n../a.jpg 2\n", allow_outside_root=True)

    reader = SampleReader(index, 100, Storage())
    assert bytes(reader.read(0)) == bytes(reader.read(1)) == b"bytes of a.jpg"


@pytest.mark.parametrize("text", ["", "\n\n", "# only words\n"])
def test_an_empty_list_is_refused(tmp_path: Path, text: str) -> None:
    """A stream without samples is a mistake."""
    with pytest.raises(SourceInvalid, match="names no sample"):
        scan_list(tmp_path / "list.txt", text)


def test_what_is_not_there_is_found_without_a_scan(tmp_path: Path) -> None:
    """`batchd check` reports them."""
    make(tmp_path, "list.txt", "photos/a.jpg")

    assert problems(FolderSource(path=tmp_path / "photos")) == []
    assert problems(ListSource(path=tmp_path / "list.txt", root=tmp_path / "photos")) == []
    assert problems(FolderSource(path=tmp_path / "list.txt")) == [f"{tmp_path}/list.txt is not a folder"]
    assert problems(FolderSource(path=tmp_path / "none")) == [f"there is no folder {tmp_path}/none"]
    for name in ("pictures/train", "part-1"):
        (tmp_path / name).mkdir(parents=True)
    assert problems(FolderSource(path=tmp_path / "picture/train")) == [
        f"there is no folder {tmp_path}/picture/train; did you mean {tmp_path}/pictures/train?"
    ]
    assert problems(FolderSource(path=tmp_path / "picture/val")) == [f"there is no folder {tmp_path}/picture/val"]
    assert problems(FolderSource(path=tmp_path / "part-2")) == [f"there is no folder {tmp_path}/part-2"]
    assert problems(ListSource(path=tmp_path / "none", root=tmp_path / "gone")) == [
        f"there is no folder {tmp_path}/gone",
        f"there is no file {tmp_path}/none",
    ]


# --- the index ------------------------------------------------------------------------------------


def test_the_index_is_the_same_on_the_other_side_of_a_descriptor(tmp_path: Path, descriptor_of: list[int]) -> None:
    """A worker maps every path, label, class name and the digest as the daemon found them."""
    made = scan_folder(make(tmp_path, "b/2.jpg", "a/1.jpg", "a/x y/3.jpg"))

    mapped = shared(made, descriptor_of)

    assert names_of(mapped) == names_of(made) == ["a/1.jpg", "a/x y/3.jpg", "b/2.jpg"]
    assert mapped.labels.tolist() == made.labels.tolist() == [0, 0, 1]
    assert (mapped.root, mapped.class_names, mapped.digest) == (made.root, made.class_names, made.digest)
    assert not mapped.labels.flags.writeable


def test_the_memory_of_an_index_can_neither_be_written_nor_shrunk(tmp_path: Path, descriptor_of: list[int]) -> None:
    """One worker cannot spoil the index of the others, and no mapping ends in SIGBUS."""
    shared(scan_folder(make(tmp_path, "1.jpg")), descriptor_of)

    for change in (
        lambda fd: os.pwrite(fd, b"x", 0),
        lambda fd: os.ftruncate(fd, 0),
        lambda fd: os.ftruncate(fd, 1 << 20),
    ):
        with pytest.raises(PermissionError):
            change(descriptor_of[0])
    assert Path(f"/proc/self/fd/{descriptor_of[0]}").readlink().name.startswith("memfd:batchd-index")
    assert not os.get_inheritable(descriptor_of[0])


def test_the_digest_is_of_the_content_and_of_nothing_else(tmp_path: Path) -> None:
    """It is equal on other machines with the same files, and differs for other names or labels."""
    base = scan_folder(make(tmp_path / "one", "a/1.jpg", "b/2.jpg"))
    make(tmp_path / "two", "a/1.jpg", "b/2.jpg")
    os.utime(tmp_path / "two/a/1.jpg", (1, 1))

    assert scan_folder(tmp_path / "two").digest == base.digest
    assert len(base.digest) == 64
    others = [
        scan_folder(make(tmp_path / "three", "a/1.jpg", "c/2.jpg")),
        scan_folder(make(tmp_path / "four", "a/1.jpg", "b/22.jpg")),
        scan_list(tmp_path / "five.txt", "a/1.jpg 0\nb/2.jpg 1\n"),
        scan_list(tmp_path / "six.txt", "a/1.jpg 0\nb/2.jpg 0\n"),
        scan_list(tmp_path / "seven.txt", "a/1.jp 0\ngb/2.jpg 0\n"),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 6


def sealed(content: bytes) -> int:
    descriptor = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, content)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_memory_that_is_no_index_is_refused(tmp_path: Path, descriptor_of: list[int]) -> None:
    """Every value of the header is checked against the size before it is used."""
    descriptor_of.append(scan_folder(make(tmp_path, "1.jpg", "2.jpg")).index.to_memfd())
    good = os.pread(descriptor_of[0], 1 << 16, 0)
    forgeries = [
        b"",
        good[: PREFIX_BYTES - 1],
        good[:-1],
        good + b"\0" * 64,
        b"BATCHIX9" + good[8:],
        *(good[:8] + count.to_bytes(8, "little") + good[16:] for count in (0, 9, 1 << 62)),
        good[:PREFIX_BYTES] + b"\1" + good[PREFIX_BYTES + 1 :],
        *(
            good.replace(old, new)
            for old, new in [
                (b'"<i8", [3]', b'"<i8", [9]'),
                (b'"<i8", [3]', b'"<i8", "3"'),
                (b'"<i8", [3]', b'"<i8",[-3]'),
                (b'"<i8", [3]', b'"|O8", [3]'),
                (b'"samples"', b'"simples"'),
                (b'"arrays"', b'"errays"'),
            ]
        ),
    ]

    for forgery in forgeries:
        descriptor_of.append(sealed(forgery))
        assert forgery != good
        with pytest.raises(IndexMalformed):
            SourceIndex.from_descriptor(descriptor_of[-1])
    descriptor_of.append(os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.write(descriptor_of[-1], good)
    with pytest.raises(IndexMalformed, match="seals"):
        SourceIndex.from_descriptor(descriptor_of[-1])
    file = tmp_path / "file"
    file.write_bytes(good)
    with file.open("rb") as stream, pytest.raises(IndexMalformed, match="sealed"):
        SourceIndex.from_descriptor(stream.fileno())


def test_offsets_that_lead_elsewhere_are_refused_where_they_are_used(tmp_path: Path, descriptor_of: list[int]) -> None:
    """A path is never read from outside the paths' memory."""
    descriptor_of.append(scan_folder(make(tmp_path, "1.jpg", "2.jpg")).index.to_memfd())
    good = os.pread(descriptor_of[0], 1 << 16, 0)
    offsets = np.array([0, 5, 10]).tobytes()
    for offset in (-1, 1 << 40):
        descriptor_of.append(sealed(good.replace(offsets, np.array([0, offset, 10]).tobytes())))

        with pytest.raises(IndexMalformed, match="sample 0 has its path"):
            FilesIndex(SourceIndex.from_descriptor(descriptor_of[-1])).file(0)


def test_an_index_that_does_not_count_its_samples_is_refused() -> None:
    """Each sample has one label and one path."""
    arrays = {"offsets": np.zeros(3, np.int64), "labels": np.zeros(2, np.int64), "paths": np.empty(0, np.uint8)}

    FilesIndex(SourceIndex.build(2, {}, arrays, {"root": "/"}))
    for samples in (1, 3):
        with pytest.raises(IndexMalformed, match=f"of {samples} samples"):
            FilesIndex(SourceIndex.build(samples, {}, arrays, {"root": "/"}))


def test_a_sample_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """Negative numbers do not count from the end, as they do in lists."""
    index = scan_folder(make(tmp_path, "1.jpg"))

    for sample in (-1, 1):
        with pytest.raises(IndexError, match="a source with 1 samples"):
            index.path(sample)
        with pytest.raises(IndexError):
            index.label(sample)


PRIVATE_BYTES_OF_A_WORKER = """
import os, sys
from batchd.data.sources.files.index import FilesIndex
from batchd.data.storage.index import SourceIndex

def private_bytes():
    fields = (line.split() for line in open("/proc/self/smaps_rollup"))
    return sum(int(field[1]) * 1024 for field in fields if field[0].startswith("Private_"))

before = private_bytes()
index = FilesIndex(SourceIndex.from_descriptor(int(sys.argv[1])))
for sample in range(0, len(index), 16):
    assert index.file(sample).startswith(b"/data/train/n") and index.label(sample) == sample
shared_only = private_bytes() - before
ballast = b"x" * 20_000_000
print(shared_only, private_bytes() - before)
"""


def test_1280000_paths_cost_a_further_worker_less_than_10_mb(descriptor_of: list[int]) -> None:
    """The index is in memory once for all workers that map it."""
    samples = 1_280_000
    path = b"train/n01440764/n01440764_10026.JPEG"
    arrays = {
        "offsets": np.arange(samples + 1, dtype=np.int64) * len(path),
        "labels": np.arange(samples, dtype=np.int64),
        "paths": np.frombuffer(path * samples, np.uint8),
        "classes": blob([b"class %d" % number for number in range(1000)]),
    }
    index = FilesIndex(SourceIndex.build(samples, {}, arrays, {"root": "/data"}))
    # This process counts as the first worker: it has touched all pages.
    mapped = shared(index, descriptor_of).index
    assert mapped.arrays["paths"].tobytes() == path * samples
    assert all(np.array_equal(mapped.arrays[name], array) for name, array in arrays.items())

    worker = subprocess.run(
        [sys.executable, "-c", PRIVATE_BYTES_OF_A_WORKER, str(descriptor_of[0])],
        pass_fds=descriptor_of,
        capture_output=True,
        text=True,
        check=True,
    )

    grown, grown_with_ballast = map(int, worker.stdout.split())
    assert grown < 10_000_000
    assert grown_with_ballast > 19_000_000, "the measurement does not see private memory"


def test_a_worker_imports_sources_without_what_only_the_daemon_needs() -> None:
    """Modules such as pydantic and click would cost each worker memory and start time."""
    code = (
        "import sys, batchd.data.sources.interface, batchd.data.sources.files.reader, batchd.data.sources.webdataset.reader\n"
        "import batchd.data.pipeline.options\n"
        "print(*sorted({'pydantic', 'click', 'structlog', 'rich', 'zmq'} & sys.modules.keys()))"
    )

    worker = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert worker.stdout.strip() == ""


# --- a source of its own --------------------------------------------------------------------------


@options
class SquaresSource(SourceOptions):
    """A source of these tests: its options class, the first of three places."""

    type: str = "squares"
    count: int = 4
    columns = (Column("number", dtype="int64"),)


def scan_squares(source: SquaresSource, _survey: Survey) -> SourceIndex:
    return SourceIndex.build(source.count, {"squares": source.count}, {}, {})


KINDS = {SquaresSource: BuiltInKind(scan=scan_squares)}
"""In a folder of ``batchd.data.sources`` this is its ``scan``."""


class SquaresReader(PlainReader):
    """Reads no file."""

    def __init__(self, _source: SquaresSource, _index: SourceIndex, _max_bytes: int, _storage: Storage) -> None:
        pass

    def read(self, sample: int) -> dict[str, np.int64]:
        return {"number": np.int64(sample * sample)}


READERS = {SquaresSource: SquaresReader}
"""And this its ``reader``."""


def test_a_source_has_three_places_its_options_its_scan_and_its_reader(
    monkeypatch: pytest.MonkeyPatch, storage: Storage
) -> None:
    """No list or table names the source: the code above is all that daemon and workers need."""
    for place in ("options", "scan", "reader"):
        monkeypatch.setitem(sys.modules, f"squares.{place}", sys.modules[__name__])
    monkeypatch.setattr(SquaresSource, "__module__", "squares.options")
    monkeypatch.setitem(SOURCE_KINDS._known, "squares", SquaresSource)  # as its folder would
    source = SquaresSource(count=5)

    index = scan_source(source, nothing, IndexCache(None), storage)
    reader = open_reader(source, index, 1, storage)

    assert kind_of(source).columns(source, storage) == SquaresSource.columns
    assert [reader.read(sample)["number"] for sample in range(len(index))] == [0, 1, 4, 9, 16]
