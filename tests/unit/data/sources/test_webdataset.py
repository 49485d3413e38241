"""Shards in tar format: their samples, the place of bytes, and messages for each damage."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.files.index import FilesIndex
from batchd.data.sources.files.reader import SampleReader
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.data.sources.webdataset.scan import KINDS
from batchd.data.storage.access import Storage
from batchd.data.storage.paths import SHARDS_MAX
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from support.shards import write_shard
from support.source_files import as_shared, nothing


def scan(root: Path, *shards: str, **changes: object) -> FilesIndex:
    """The index of shards, as a worker gets it."""
    index = KINDS[WebDatasetSource].scan(
        WebDatasetSource(root=root, shards=shards or ("*.tar",), **changes), Survey(nothing)
    )
    shared = FilesIndex(as_shared(index))
    assert shared.shards == index.names("shards")
    return shared


@pytest.mark.parametrize("name", ["BZh/1.jpg", "BZh91AY&SY/1.jpg", "\x04\x22\x4d\x18/1.jpg"])
@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
def test_a_plain_shard_whose_first_name_is_like_a_magic_is_read(tmp_path: Path, name: str, kind: int) -> None:
    """A tar file begins with a member's name, and its own magic comes later."""
    write_shard(tmp_path / "a.tar", [(name, b"one"), (name.replace("jpg", "cls"), b"7")], format=kind)

    assert read_all(scan(tmp_path)) == [b"one"]


def test_what_begins_with_a_part_of_the_magic_of_bzip2_is_not_taken_for_it(tmp_path: Path) -> None:
    """The first three bytes of that magic are letters, as in words and names."""
    (tmp_path / "a.tar").write_bytes(b"BZh is how this text begins" * 100)

    with pytest.raises(SourceInvalid, match="is not a tar file"):
        scan(tmp_path)


def read_all(index: FilesIndex, max_bytes: int = 1 << 20) -> list[bytes]:
    """The bytes of all samples, read from the last one to the first."""
    reader = SampleReader(index, max_bytes, Storage())
    try:
        return [bytes(reader.read(sample)) for sample in reversed(range(len(index)))][::-1]
    finally:
        reader.close()


def test_access_points_count_only_directly_behind_their_image(tmp_path: Path) -> None:
    """Without any, the index is that of a shard without such members, to its digest."""
    image, label, points = pair("a", 1)[0], pair("a", 1)[1], ("a.jpg.points", b"12")
    behind, apart = [image, points, label], [image, ("a.txt", bytes(4096)), points, label]
    for name, members in {"behind": behind, "apart": apart, "without": [*apart[:2], ("a.x", b"12"), label]}.items():
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "a.tar", members)

    assert scan(tmp_path / "behind").points.tolist() == [[1024, 2]]
    assert scan(tmp_path / "apart").points is None
    assert scan(tmp_path / "apart").digest == scan(tmp_path / "without").digest
    assert read_all(scan(tmp_path / "behind")) == [image[1]]


def pair(key: str, label: int) -> list[tuple[str, bytes]]:
    """An image and its label, as members."""
    return [(f"{key}.jpg", f"image {key}".encode()), (f"{key}.cls", f"{label}\n".encode())]


def test_each_sample_is_found_with_its_label_and_its_bytes(tmp_path) -> None:
    """This holds for every tar dialect, over several shards, in the order of their names."""
    for number, dialect in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        members = [member for row in range(3) for member in pair(f"{number}-{row}", 10 * number + row)]
        write_shard(tmp_path / f"train-{number:04}.tar", members, format=dialect)

    index = scan(tmp_path, "train-{0000..0002}.tar")

    assert index.labels.tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert read_all(index) == [f"image {number}-{row}".encode() for number in range(3) for row in range(3)]
    assert index.path(4) == f"{tmp_path}/train-0001.tar: 1-1.jpg (byte {index.extent(4)[0]})"
    assert index.name(4) == b"1-1.jpg"


def test_the_key_is_the_name_up_to_the_first_dot_of_its_last_part(tmp_path) -> None:
    """Other members are ignored; folders and hidden files are no members of a sample."""
    write_shard(
        tmp_path / "a.tar",
        [
            ("v1.0/a.jpg", b"first"),
            ("v1.0/a.seg.png", b"mask"),
            ("v1.0/a.cls", b"1"),
            ("v1.0/.DS_Store", b"x"),
            ("v1.0/._b.jpg", b"x"),
            ("v2.0/a.cls", b"2"),
            ("v2.0/a.jpg", b"second"),
        ],
    )

    index = scan(tmp_path)
    assert (read_all(index), index.labels.tolist()) == ([b"first", b"second"], [1, 2])


def test_names_longer_than_a_header_and_names_that_are_no_text_are_kept(tmp_path) -> None:
    """Both tar dialects for long names are read."""
    long, odd = "d/" * 60 + "n" * 120, os.fsdecode(b"\xff\xfe")
    members = [*pair(long, 3), (f"{odd}.jpg", b"odd"), (f"{odd}.cls", b"4")]
    write_shard(tmp_path / "a.tar", members, format=tarfile.GNU_FORMAT)
    write_shard(tmp_path / "b.tar", pair(long, 5), format=tarfile.PAX_FORMAT)

    index = scan(tmp_path)
    assert [index.name(sample) for sample in range(3)] == [
        f"{long}.jpg".encode(),
        b"\xff\xfe.jpg",
        f"{long}.jpg".encode(),
    ]
    assert index.labels.tolist() == [3, 4, 5]


def test_labels_may_stand_in_json_or_be_left_out(tmp_path) -> None:
    """``json:label`` names a key; without labels, no member for them is needed."""
    write_shard(tmp_path / "a.tar", [("x.png", b"i"), ("x.json", json.dumps({"label": 7, "more": [1]}).encode())])

    assert scan(tmp_path, label="json:label").labels.tolist() == [7]
    assert scan(tmp_path, label="").labels.tolist() == [0]


def test_the_first_ending_that_a_sample_has_is_its_image(tmp_path) -> None:
    """The order is that of the option ``image``."""
    write_shard(tmp_path / "a.tar", [("x.png", b"png"), ("x.jpg", b"jpg"), ("x.cls", b"0")])

    assert read_all(scan(tmp_path)) == [b"jpg"]
    assert read_all(scan(tmp_path, image=("webp", "png"))) == [b"png"]


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([("x.cls", b"1")], r"the sample of x\.cls has no image: its endings are cls, and image = \['jpg'"),
        ([("x.jpg", b"i")], r'the sample of x\.jpg has no member \.cls for its label; label = "cls" says'),
        ([("x.jpg", b"i"), ("x.cls", b"cat")], r"x\.cls is not a whole number"),
        ([("x.jpg", b"i"), ("x.cls", b"1.5")], r"x\.cls is not a whole number"),
        ([("x.jpg", b"i"), ("x.cls", b"9" * 30)], r"x\.cls is not a whole number"),
        ([("x.jpg", b"i"), ("x.cls", b"1" * (1 << 21))], r"x\.cls has 2097152 bytes, too many for a label"),
        ([("x.jpg", b"i"), ("x.jpg", b"j"), ("x.cls", b"1")], r"two members are called x\.jpg"),
        ([], r"a\.tar holds no sample"),
    ],
)
def test_a_sample_that_is_not_as_the_user_means_it_is_refused_by_name(tmp_path, members, text) -> None:
    """The message has the shard and the member."""
    write_shard(tmp_path / "a.tar", members)

    with pytest.raises(SourceInvalid, match=rf"{tmp_path}/a\.tar.*{text}|{text}"):
        scan(tmp_path)


@pytest.mark.parametrize("text", [b"[1]", b'{"other": 1}', b'{"label": "1"}', b'{"label": 0.5}', b"{", b"[" * 100_000])
def test_json_without_the_number_is_refused(tmp_path, text) -> None:
    """This includes deeply nested JSON."""
    write_shard(tmp_path / "a.tar", [("x.jpg", b"i"), ("x.json", text)])

    with pytest.raises(SourceInvalid, match=r"x\.json is not JSON with a whole number under 'label'"):
        scan(tmp_path, label="json:label")


@pytest.mark.parametrize(
    ("compress", "kind"),
    [(gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz"), (b"\x28\xb5\x2f\xfd".__add__, "zstd")],
)
def test_compressed_shards_are_refused_with_advice(tmp_path, compress, kind) -> None:
    """The content decides, not the name of the shard."""
    shard = write_shard(tmp_path / "a.tar", pair("x", 1))
    shard.write_bytes(compress(shard.read_bytes()))

    with pytest.raises(SourceInvalid, match=rf"a\.tar is compressed \({kind}\).*unpack the shard"):
        scan(tmp_path)


@pytest.mark.parametrize("data", [b"no tar at all" * 100, bytes(5), b"\xff" * 2000])
def test_what_is_no_tar_file_is_refused(tmp_path, data) -> None:
    """The message names the file, and the file never counts as an empty shard."""
    (tmp_path / "a.tar").write_bytes(data)

    with pytest.raises(SourceInvalid, match=r"a\.tar (is not a tar file|holds no sample)"):
        scan(tmp_path)


def test_a_header_that_says_it_is_huge_costs_no_memory(tmp_path) -> None:
    """The daemon reads headers that other people wrote."""
    huge = tarfile.TarInfo("x.jpg")
    huge.type, huge.size = tarfile.XHDTYPE, 1 << 32
    (tmp_path / "a.tar").write_bytes(huge.tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 12))

    with pytest.raises(SourceInvalid, match=r"a\.tar is not a tar file, or is damaged: a header of \d+ bytes"):
        scan(tmp_path)


def test_a_shard_that_is_cut_is_refused_with_the_place(tmp_path) -> None:
    """The cut is in a sample, in a header, or between two members, without the end block."""
    shard = write_shard(tmp_path / "a.tar", [("a.jpg", b"a" * 600), ("b.jpg", b"b" * 5000), ("c.jpg", b"c")])
    os.truncate(shard, 512 + 1024 + 512 + 1000)
    with pytest.raises(SourceInvalid, match=r"a\.tar is cut: it ends at byte 3048, within b\.jpg; copy it again"):
        scan(tmp_path, label="")
    os.truncate(shard, 512 + 1024 + 100)
    with pytest.raises(SourceInvalid, match=r"a\.tar: no end-of-archive block at byte 1536: the shard is cut; copy it"):
        scan(tmp_path, label="")
    os.truncate(shard, 512 + 1024)
    with pytest.raises(SourceInvalid, match=r"a\.tar: no end-of-archive block at byte 1536: the shard is cut; copy it"):
        scan(tmp_path, label="")
    os.truncate(shard, 512 + 1000)
    with pytest.raises(SourceInvalid, match=r"a\.tar is cut: it ends at byte 1512, within a\.jpg; copy it again"):
        scan(tmp_path, label="")


def test_a_broken_header_is_no_end(tmp_path) -> None:
    """Otherwise, all members after the header would be left out silently."""
    shard = write_shard(tmp_path / "a.tar", [("a.jpg", b"a"), ("b.jpg", b"b"), ("c.jpg", b"c")])
    data = bytearray(shard.read_bytes())
    data[1024 + 148 : 1024 + 156] = b"0000000\0"
    shard.write_bytes(data)

    with pytest.raises(SourceInvalid, match=r"a\.tar is damaged: no header of a member at byte 1024"):
        scan(tmp_path, label="")


SAMPLES = [("1.jpg", b"one"), ("1.cls", b"1"), ("2.jpg", b"two"), ("2.cls", b"2")]


@pytest.mark.parametrize("count", [0, 1, 512, 1000, 100_000])
def test_only_zeros_follow_the_end_of_a_shard(tmp_path: Path, count: int) -> None:
    """What `cat` appended would be lost, so the error has the byte; zeros are padding."""
    file = write_shard(tmp_path / "a.tar", SAMPLES)
    whole = file.read_bytes()
    file.write_bytes(whole + bytes(count))
    assert read_all(scan(tmp_path)) == [b"one", b"two"]

    for more in (b"x", whole, b"\0\0x"):
        file.write_bytes(whole + bytes(count) + more)
        place = len(whole) + count + len(more) - len(more.lstrip(b"\0"))
        with pytest.raises(
            SourceInvalid, match=rf"a\.tar ends at byte 4608, and has other bytes .* from byte {place} on"
        ):
            scan(tmp_path)


@pytest.mark.parametrize(
    ("kind", "target", "reason"),
    [
        (tarfile.LNKTYPE, "1.jpg", "is a hard link to 1.jpg"),
        (tarfile.SYMTYPE, "../1.jpg", r"is a symbolic link to \.\./1\.jpg"),
        (tarfile.FIFOTYPE, "", "is no file"),
        (tarfile.CHRTYPE, "", "is no file"),
        (b"M", "", "is no file"),
    ],
)
def test_a_member_without_content_is_refused_by_name(tmp_path: Path, kind: bytes, target: str, reason: str) -> None:
    """Otherwise its sample would lack it, or get what stands for a missing member."""
    with tarfile.open(tmp_path / "a.tar", "w") as shard:
        for name, data in [*SAMPLES, ("3.cls", b"3")]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))
        member = tarfile.TarInfo("3.jpg")
        member.type, member.linkname = kind, target
        shard.addfile(member)

    for fields in (None, {"label": "int64"}):
        with pytest.raises(SourceInvalid, match=rf"a\.tar: 3\.jpg, whose header is at byte 5120, {reason}"):
            KINDS[WebDatasetSource].scan(
                WebDatasetSource(root=tmp_path, shards=("*.tar",), fields=fields), Survey(nothing)
            )


@pytest.mark.parametrize("fields", [None, {"image": "image", "label": "int64"}])
def test_a_name_that_comes_back_is_refused(tmp_path: Path, fields: dict[str, str] | None) -> None:
    """Its members would be two samples, each without the other's.

    In another shard it is another.
    """
    source = WebDatasetSource(root=tmp_path, shards=("*.tar",), fields=fields)
    for name in ("a.tar", "b.tar"):
        write_shard(tmp_path / name, SAMPLES)
    assert len(KINDS[WebDatasetSource].scan(source, Survey(nothing))) == 4

    write_shard(tmp_path / "b.tar", [*SAMPLES, ("1.txt", b"more")])
    with pytest.raises(
        SourceInvalid, match=r"b\.tar: the members of 1 are apart: 1\.txt, whose bytes begin at 4608, .* --sort=name"
    ):
        KINDS[WebDatasetSource].scan(source, Survey(nothing))


def test_hidden_members_are_noted(tmp_path: Path) -> None:
    """Some systems add a file ``._NAME`` for each file; no sample has them."""
    hidden = [(f"x/._{number}.jpg", b"?") for number in range(3)]
    write_shard(tmp_path / "a.tar", [*hidden, *SAMPLES])
    index = KINDS[WebDatasetSource].scan(WebDatasetSource(root=tmp_path, shards=("*.tar",)), Survey(nothing))

    assert len(index) == 2
    assert index.notes == (
        f"hidden members of shards, which no sample has: {tmp_path}/a.tar: x/._0.jpg (byte 512) and 2 more",
    )


def test_endings_are_known_in_any_case(tmp_path: Path) -> None:
    """As written they come first.

    So a source that names .JPEG takes .jpeg, and the other way round.
    """
    write_shard(
        tmp_path / "a.tar",
        [
            ("1.JPG", b"one"),
            ("1.Cls", b"1"),
            ("2.jpg", b"two"),
            ("2.JPG", b"no"),
            ("2.cls", b"2"),
            ("3.PNG", b"three"),
            ("3.CLS", b"3"),
        ],
    )
    index = scan(tmp_path)
    assert read_all(index) == [b"one", b"two", b"three"]
    assert index.labels.tolist() == [1, 2, 3]
    assert read_all(scan(tmp_path, image=("JPG", "png"), label="CLS")) == [b"one", b"no", b"three"]


def test_one_block_of_zeros_ends_a_shard(tmp_path) -> None:
    """Usual shards have two such blocks, and zeros up to a whole record."""
    shard = write_shard(tmp_path / "a.tar", [("a.jpg", b"a"), ("b.jpg", b"b")])
    os.truncate(shard, 2048 + 512)

    assert read_all(scan(tmp_path, label="")) == [b"a", b"b"]


def test_a_shard_that_is_rewritten_makes_bad_samples(tmp_path) -> None:
    """New samples may have old places and lengths, and no label may go with another image."""
    images = [bytes([number]) * 600 for number in range(3)]
    write_shard(tmp_path / "a.tar", [(f"{number}.jpg", image) for number, image in enumerate(images)])
    index = scan(tmp_path, label="")
    reader, late = SampleReader(index, 1 << 20, Storage()), SampleReader(index, 1 << 20, Storage())
    assert bytes(reader.read(0)) == images[0]
    status = (tmp_path / "a.tar").stat()
    write_shard(tmp_path / "a.tar", [(f"{number}.jpg", image) for number, image in enumerate(reversed(images))])
    os.utime(tmp_path / "a.tar", ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    for one in (reader, late):
        with pytest.raises(SampleUnreadable, match="its file has changed since the daemon read it: it was modified"):
            one.read(0)
        one.close()


def test_a_shard_that_replaces_another_one_is_never_read(tmp_path) -> None:
    """A reader that has the old shard open still reads it; another reader notices the change."""
    write_shard(tmp_path / "a.tar", [("a.jpg", b"a" * 600)])
    index = scan(tmp_path, label="")
    reader, late = SampleReader(index, 1 << 20, Storage()), SampleReader(index, 1 << 20, Storage())
    reader.read(0)
    write_shard(tmp_path / "b.tar", [("a.jpg", b"b" * 600)]).rename(tmp_path / "a.tar")

    assert bytes(reader.read(0)) == b"a" * 600
    with pytest.raises(SampleUnreadable, match="it was modified"):
        late.read(0)
    reader.close()
    late.close()


def test_samples_that_are_empty_or_too_large_are_bad_ones(tmp_path) -> None:
    """Their sizes are checked before anything is read."""
    write_shard(tmp_path / "a.tar", [("a.jpg", b""), ("b.jpg", b"b" * 100)])
    reader = SampleReader(scan(tmp_path, label=""), 99, Storage())

    with pytest.raises(SampleUnreadable, match="is empty"):
        reader.read(0)
    with pytest.raises(SampleUnreadable, match="has 100 bytes, more than max_bytes = 99"):
        reader.read(1)
    reader.close()


def test_a_shard_that_vanishes_makes_bad_samples_and_no_other_ones(tmp_path) -> None:
    """A shard that is open stays readable."""
    for name in "ab":
        write_shard(tmp_path / f"{name}.tar", pair(name, 1))
    reader = SampleReader(scan(tmp_path), 1 << 20, Storage())
    reader.read(0)
    for name in "ab":
        (tmp_path / f"{name}.tar").unlink()

    assert bytes(reader.read(0)) == b"image a"
    with pytest.raises(SampleUnreadable, match="No such file"):
        reader.read(1)
    reader.close()


def test_a_worker_keeps_a_bounded_number_of_shards_open(tmp_path) -> None:
    """The least recently used shard is closed, and opened again for its next sample."""
    count = SHARDS_MAX + 5
    for number in range(count):
        write_shard(tmp_path / f"{number:03}.tar", pair(f"{number}", number))
    reader = SampleReader(scan(tmp_path), 1 << 20, Storage())
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough

    for sample in [*range(count), *range(count)]:
        assert bytes(reader.read(sample)) == f"image {sample}".encode()
        assert len(os.listdir("/proc/self/fd")) <= before + SHARDS_MAX  # noqa: PTH208
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_scanning_keeps_no_list_of_members(tmp_path) -> None:
    """The module ``tarfile`` would keep all members that it has read."""
    write_shard(tmp_path / "a.tar", [(f"{number}.jpg", b"x") for number in range(3000)])

    index = scan(tmp_path, label="")
    assert (len(index), np.unique(index.extents[:, 2]).tolist()) == (3000, [1])


def test_a_sparse_member_is_refused(tmp_path) -> None:
    """The bytes of such a member are not where its extent says."""
    sparse = tarfile.TarInfo("x.jpg")
    sparse.type = tarfile.GNUTYPE_SPARSE
    (tmp_path / "a.tar").write_bytes(sparse.tobuf(tarfile.GNU_FORMAT) + io.BytesIO().read() + bytes(1024))

    with pytest.raises(SourceInvalid, match=r"sparse|damaged"):
        scan(tmp_path, label="")


@pytest.mark.parametrize(
    "changes", [{"shards": ()}, {"image": ()}, {"image": ("",)}, {"label": "json:"}, {"path_bytes": -1}]
)
def test_settings_that_cannot_be_are_refused(changes) -> None:
    """The message has the key's name."""
    with pytest.raises(ValueError, match=next(iter(changes))):
        WebDatasetSource(**{"root": Path("/a"), "shards": ("*",)} | changes)


def test_patterns_of_shards_are_checked_without_looking_at_any(tmp_path) -> None:
    """`batchd check` reports them."""
    (problem,) = KINDS[WebDatasetSource].problems(WebDatasetSource(root=tmp_path, shards=("a-{9..1}.tar",)), Storage())
    assert problem == "shards: {9..1} goes down; write the smaller number first"
