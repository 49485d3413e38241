"""Crops of a large JPEG on a server: only the needed bytes are read, or in doubt the whole file."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from batchd.config.load import load_config
from batchd.config.tree import DaemonConfig
from batchd.data.pipeline.image import jpeg_box
from batchd.data.pipeline.image.geometry import Cut
from batchd.data.pipeline.image.jpeg_box import found_points
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.samples.columns import Column
from batchd.data.samples.kept_files import FileHead
from batchd.data.sources.cache.record import FILE_WITH_PARTS_BYTES_MIN
from batchd.data.sources.interface import kind_of
from batchd.data.sources.scan import scan_source
from batchd.data.storage.index_cache import IndexCache
from batchd.stream.cache_memory import CacheMemory, CacheSpec
from batchd.stream.plan import plan_stream
from batchd.worker.members import MemberEncoder
from batchd.worker.sample_maker import SampleMaker
from batchd.worker.stopwatch import Stopwatch
from support.http_files import FileServer, IgnoreRange, Status
from support.images import encode, jpeg, jpeg_of, photo, progressive_jpeg
from support.jpeg_boxes import SUBSAMPLINGS, extension, where_it_is_built
from support.parquet_files import write_parquet
from support.shards import write_shard
from support.source_files import nothing
from support.tfrecords import example, write_records

pytestmark = where_it_is_built
SIZE = 1200, 900
CROPS = {
    "anywhere": "{ op = 'random_crop', size = [64, 64] }, { op = 'random_flip' }",
    "scaled": "{ op = 'random_resized_crop', size = [32, 32], scale = [0.01, 1.0] }, { op = 'random_flip' }",
    "in the middle": "{ op = 'center_crop', size = [100, 80] }",
    "views": (
        "{ op = 'views', into = { image = { count = 2, steps = [ { op = 'random_crop', size = [64, 64] } ] }, "
        "small = { steps = [ { op = 'random_crop', size = [300, 8] }, { op = 'resize', size = [30, 2] } ] } } }"
    ),
}


def noisy(seed: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """A photograph with a long file."""
    noise = np.random.default_rng(seed).integers(0, 60, (*size, 3), np.uint8)
    return photo(*size, seed=seed) // 2 + noise


@cache
def files() -> dict[str, bytes]:
    """The bytes of three files by name."""
    return {f"{seed}.jpg": jpeg_of(noisy(seed), quality=85) for seed in range(3)}


@pytest.fixture
def server(web: FileServer) -> FileServer:
    web.files.update(files())
    return web


@pytest.fixture
def make(server, storage, tmp_path):
    """Make the samples of one epoch, like a worker with a cache of access points or without."""
    stack = ExitStack()
    memory = stack.enter_context(closing(CacheMemory(CacheSpec("points", "key", len(files()), 4 << 20))))
    memory.allow(4 << 20)

    def start(crop: str, kind: str = "points", color: str = "rgb", source: str = "", limits: str = ""):
        source = source or f"{{ type = 'list', path = '{tmp_path}/list.txt', root = '{server.url}' }}"
        (tmp_path / "list.txt").write_text("".join(f"{name} 7\n" for name in server.files))
        pipeline = f"[{{ op = 'decode', color = '{color}'{limits} }}, {CROPS[crop]}]"
        (tmp_path / "batchd.toml").write_text(
            f"[streams.a]\nsource = {source}\nbatch_size = 3\npipeline = {pipeline}\ncache = '{kind}'\n"
        )
        config = load_config(tmp_path / "batchd.toml", {}, {}).streams["a"]
        plan = plan_stream("a", config, kind_of(config.source).columns(config.source, storage), DaemonConfig())
        index = scan_source(config.source, nothing, IndexCache(None), storage)
        others = list(memory.descriptors) if kind == "points" else []
        watch = Stopwatch()
        maker = SampleMaker(plan.recipe(), index, watch, storage, cache=kind, others=others)
        stack.enter_context(closing(maker))

        def epoch(number: int, planned_for: int | None = None) -> tuple[list[np.ndarray | str], int]:
            made: list[np.ndarray | str] = []
            watch.begin()
            maker.read_ahead(range(len(index)), number if planned_for is None else planned_for)
            for sample in range(len(index)):
                row = {name: np.zeros(one.fixed_shape, one.dtype) for name, one in maker.columns.items()}
                reason = maker.make_row(number, sample, 0, row)
                made.append(row["image"] if reason is None else reason)
            return made, watch.work().read_bytes

        return epoch

    with stack:
        yield start


def same(one: list[np.ndarray | str], other: list[np.ndarray | str]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def asked(server: FileServer) -> list[tuple[str, int | None]]:
    """The files requested since the last call, each with the number of bytes; None means all."""
    found = [(one.name, one.span) for one in server.asked if one.method == "GET" and one.name in server.files]
    server.asked.clear()
    ends = [(name, span.removeprefix("bytes=").split("-") if span else None) for name, span in found]
    return sorted((name, None if end is None else int(end[1]) + 1 - int(end[0])) for name, end in ends)


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("color", ["rgb", pytest.param("gray", marks=pytest.mark.thorough)])
def test_parts_have_the_pixels_of_whole_files(make, server, crop, color):
    """This holds in many epochs, with one request for each file."""
    by_parts, whole = make(crop, color=color), make(crop, "off", color)
    all_bytes = sum(map(len, files().values()))
    assert same(by_parts(0)[0], whole(0)[0])
    asked(server)
    saved = 0
    for number in range(1, 6):
        made, read_bytes = by_parts(number)
        requests = asked(server)
        assert [name for name, _size in requests] == sorted(files())
        assert read_bytes == sum(len(files()[name]) if size is None else size for name, size in requests)
        saved += all_bytes - read_bytes
        assert same(made, whole(number)[0])
        asked(server)
    assert saved > {"scaled": 0.1, "views": 0.1}.get(crop, 0.6) * 5 * all_bytes


def test_objects_of_a_bucket_are_read_in_parts(make, bucket):
    """A folder in a bucket behaves like any other folder."""
    bucket.put({f"photos/cat/{name}": data for name, data in files().items()})
    source = "{ type = 'folder', path = 's3://bucket/photos' }"
    by_parts, whole = make("anywhere", source=source), make("anywhere", "off", source=source)
    all_bytes = sum(map(len, files().values()))
    assert by_parts(0)[1] == all_bytes
    for number in (1, 2):
        made, read_bytes = by_parts(number)
        assert read_bytes < 0.5 * all_bytes
        assert same(made, whole(number)[0])


def members(file: Path) -> None:
    write_shard(file, [one for name, data in files().items() for one in ((name, data), (f"{name[:-3]}cls", b"7"))])


def rows(file: Path) -> None:
    write_parquet(file, {"image": list(files().values()), "label": [7, 7, 7]}, compression="none", use_dictionary=False)


def examples(file: Path) -> None:
    write_records(file, [example(image=data, label=[7]) for data in files().values()])


FIELDS = "fields = { image = 'image', label = 'int64' }"
IN_PARTS = {
    "members": (members, "type = 'webdataset'"),
    "members with fields": (members, f"type = 'webdataset', {FIELDS}, names = {{ label = 'cls' }}"),
    "rows": (rows, f"type = 'parquet', {FIELDS}"),
}
SHARDS = {**IN_PARTS, "examples": (examples, f"type = 'tfrecord', {FIELDS}")}
"""How a shard of three images is written, and the options of a source that reads it."""


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("kind", SHARDS)
def test_images_in_shards_are_walked_once(make, tmp_path, kind, monkeypatch):
    """Later epochs decode by the points of the first one, to the same pixels as without."""
    walked, decoded = [], []
    walk, decode = extension.access_points, extension.decode
    monkeypatch.setattr(extension, "access_points", lambda *given: walked.append(1) or walk(*given))
    monkeypatch.setattr(extension, "decode", lambda *given: decoded.append(given[6] is not None) or decode(*given))
    write, options = SHARDS[kind]
    write(tmp_path / "shard")
    source = f"{{ root = '{tmp_path}', shards = ['shard'], {options} }}"
    by_points, whole = make("anywhere", source=source), make("anywhere", "off", source=source)
    for number in range(3):
        decoded.clear()
        made = by_points(number)[0]
        assert (len(walked), decoded) == (3, [True] * 3)
        assert same(made, whole(number)[0])


def prepared(file: Path, change: Callable[[bytes], bytes] = lambda points: points) -> None:
    """Write a shard as ``batchd prepare`` does, with other access points."""
    encoder = MemberEncoder({"image": Column("image", "encoded"), "label": Column("label")}, "jpg", 90, is_bgr=False)
    samples = (
        (number, encoder.members({"image": memoryview(data), "label": 7}))
        for number, data in enumerate(files().values())
    )
    found = [(f"{number}.{ending}", content) for number, sample in samples for ending, content in sample]
    write_shard(file, [(name, change(content) if name.endswith(".points") else content) for name, content in found])


PREPARED = {
    "a pair": "type = 'webdataset'",
    "fields": f"type = 'webdataset', {FIELDS}",
    "a concat": "type = 'webdataset'",
}


def prepared_source(root: Path | str, kind: str) -> str:
    source = f"{{ root = '{root}', shards = ['shard'], {PREPARED[kind]} }}"
    return f"{{ type = 'concat', sources = [{source}] }}" if kind == "a concat" else source


@pytest.mark.parametrize("kind", PREPARED)
def test_images_in_prepared_shards_are_never_walked(make, tmp_path, kind, monkeypatch):
    """The first epoch decodes by the points in the shard, to the same pixels as without."""
    prepared(tmp_path / "shard")
    walked, decoded, decode = [], [], extension.decode
    monkeypatch.setattr(extension, "access_points", lambda *_given: walked.append(1))
    monkeypatch.setattr(extension, "decode", lambda *given: decoded.append(given[6] is not None) or decode(*given))
    source = prepared_source(tmp_path, kind)
    by_points, whole = make("anywhere", source=source), make("anywhere", "off", source=source)
    for number in range(2):
        decoded.clear()
        made = by_points(number)[0]
        assert decoded == [True] * 3
        assert same(made, whole(number)[0])
    assert not walked


@pytest.mark.parametrize(
    "change",
    [
        lambda points: points[:-1],
        lambda points: points[:40] + bytes([points[40] ^ 1]) + points[41:],
        lambda points: b"\0" + points[1:],
        lambda _points: found_points(memoryview(files()["0.jpg"]), probe_image(memoryview(files()["0.jpg"]))),
        lambda _points: b"x",
        lambda points: points + bytes(1 << 20),
    ],
    ids=["cut", "damaged", "of another version", "of another file", "short", "long"],
)
def test_points_in_a_shard_that_do_not_fit_change_no_pixel(make, tmp_path, change):
    """Such files are walked, as files without points are."""
    prepared(tmp_path / "shard", change)
    source = prepared_source(tmp_path, "fields")
    by_points, whole = make("anywhere", source=source), make("anywhere", "off", source=source)
    for number in range(3):
        assert same(by_points(number)[0], whole(number)[0])


def read_in_parts(make, server, source, epochs):
    """Read the images of a shard; from the second epoch on, only parts of it are requested."""
    by_parts, whole = make("anywhere", source=source), make("anywhere", "off", source=source)
    assert same(by_parts(0)[0], whole(0)[0])
    for number in range(1, epochs):
        asked(server)
        made, read_bytes = by_parts(number)
        sizes = [size for _name, size in asked(server)]
        assert None not in sizes
        assert max(read_bytes, sum(sizes)) < 0.6 * len(server.files["shard"])
        assert same(made, whole(number)[0])


@pytest.mark.parametrize("kind", ["a pair", "fields"])
def test_prepared_shards_on_a_server_are_read_in_parts(make, server, tmp_path, kind, monkeypatch):
    """The first epoch reads the points with their files, and the cache keeps them for the next."""
    prepared(tmp_path / "shard")
    server.files = {"shard": (tmp_path / "shard").read_bytes()}
    monkeypatch.setattr(extension, "access_points", lambda *_given: pytest.fail("a file was walked"))
    source = prepared_source(server.url, kind)
    read_in_parts(make, server, source, 3)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("kind", IN_PARTS)
def test_images_in_shards_are_read_in_parts(make, server, tmp_path, kind):
    """Only the crop's rows of a member or a value are requested, and no other bytes of its file."""
    write, options = IN_PARTS[kind]
    write(tmp_path / "shard")
    server.files = {"shard": (tmp_path / "shard").read_bytes()}
    source = f"{{ root = '{server.url}', shards = ['shard'], {options} }}"
    read_in_parts(make, server, source, 4)


def test_an_image_in_a_compressed_row_group_is_read_with_it(make, server, tmp_path):
    """The images of another file of the same source are read in parts."""
    for name, images, compression in (("a", ["0.jpg"], "snappy"), ("b", ["1.jpg", "2.jpg"], "none")):
        columns = {"image": [files()[one] for one in images], "label": [7] * len(images)}
        write_parquet(tmp_path / name, columns, compression=compression, use_dictionary=False)
    server.files = {name: (tmp_path / name).read_bytes() for name in "ab"}
    source = f"{{ root = '{server.url}', shards = ['a', 'b'], type = 'parquet', {FIELDS} }}"
    by_parts, whole = make("anywhere", source=source), make("anywhere", "off", source=source)
    whole_bytes = by_parts(0)[1]
    for number in range(1, 3):
        made, read_bytes = by_parts(number)
        assert len(files()["0.jpg"]) < read_bytes < 0.8 * whole_bytes
        assert same(made, whole(number)[0])


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    "other",
    [
        lambda _data: jpeg_of(noisy(9), quality=85),
        lambda data: data[: len(data) // 2] + bytes(40) + data[len(data) // 2 + 40 :],
        lambda _data: jpeg_of(noisy(9, (300, 1200)), quality=95),
        lambda data: data[: len(data) // 2],
        lambda _data: encode(photo(120, 130), ".png"),
        lambda _data: b"no image",
        lambda _data: progressive_jpeg(photo(300, 400)),
    ],
    ids=["as large", "damaged", "of another size", "shorter", "a PNG", "no image", "progressive"],
)
def test_a_file_that_was_replaced_is_read_whole(make, server, other):
    """The result is the same as without access points, good or bad."""
    by_parts = make("in the middle")
    by_parts(0)
    server.files["1.jpg"] = other(files()["1.jpg"])
    whole = make("in the middle", "off")
    for number in range(1, 4):
        assert same(by_parts(number)[0], whole(number)[0])


def test_a_crop_that_was_not_planned_is_read_whole(make):
    """The requests of one epoch cannot serve another one."""
    by_parts, whole = make("anywhere"), make("anywhere", "off")
    by_parts(0)
    assert same(by_parts(2, planned_for=7)[0], whole(2)[0])


@pytest.mark.parametrize("fault", [IgnoreRange(), Status(404)])
def test_a_server_that_sends_no_part_is_asked_for_the_whole_file(make, server, fault):
    """The server refuses the part, or sends more than it."""
    by_parts, whole = make("in the middle"), make("in the middle", "off")
    by_parts(0)
    expected = whole(1)[0]
    server.faults["1.jpg"] = [fault]
    assert same(by_parts(1)[0], expected)


def test_streams_with_other_limits_share_points_and_not_limits(make):
    """An image is too large for one stream, independently of the other one."""
    by_parts = make("in the middle")
    by_parts(0)
    limited = [make("in the middle", kind, limits=", max_pixels = 1_000_000") for kind in ("points", "off")]
    reasons, expected = (epoch(1)[0] for epoch in limited)
    assert reasons == expected
    assert "= 1080000 pixels, more than max_pixels = 1000000" in str(reasons[0])


def test_a_short_file_is_read_whole(make, server):
    """A file without access points is read whole, too."""
    server.files |= {"0.jpg": jpeg(photo(200, 300)), "1.jpg": encode(noisy(1), ".png")}
    by_parts = make("in the middle")
    by_parts(0)
    asked(server)
    by_parts(1)
    assert [size is None for _name, size in asked(server)] == [True, True, False]
    assert len(server.files["0.jpg"]) < FILE_WITH_PARTS_BYTES_MIN < len(server.files["1.jpg"])


# --- the extension --------------------------------------------------------------------------------


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_only_the_part_is_read(subsampling):
    """All other bytes are noise, and the pixels are right; a smaller part gives no pixels."""
    image = noisy(4, (400, 330))
    data = jpeg_of(image[..., 0] if subsampling == "grey" else image, subsampling)
    header = probe_image(memoryview(data))
    points = jpeg_box.found_points(memoryview(data), header)
    draw = np.random.default_rng(5)
    scan_end = header.scan + 2 + int.from_bytes(data[header.scan + 2 :][:2], "big")
    head = FileHead(header, len(data), data[:scan_end])
    parts = 0
    for factor in (1, 2, 4, 8) * 10:
        height, width = -(-400 // factor), -(-330 // factor)
        top, left = int(draw.integers(height)), int(draw.integers(width))
        box = Cut(top, left, int(draw.integers(1, height - top + 1)), int(draw.integers(1, width - left + 1)))
        part = jpeg_box.part_of(head, points, factor, box)
        if part is None:
            continue
        parts += 1
        first, end = part
        noise = bytearray(draw.integers(0, 256, len(data), np.uint8).tobytes())
        noise[:scan_end], noise[first:end] = data[:scan_end], data[first:end]
        memory, right = (bytearray(box.height * (box.width + extension.COLUMNS_BESIDE_MAX) * 3) for _ in range(2))
        given = 8 // factor, (400, 330), box, points
        made = extension.decode(bytes(noise), memory, "rgb", *given, True)
        assert made == extension.decode(data, right, "rgb", *given)
        assert memory == right
        noise[end - 9] ^= 1
        assert extension.decode(bytes(noise), memory, "rgb", *given, True) is None
    assert parts > 10


@pytest.mark.parametrize("points", [b"", b"no points", bytes(100)])
def test_a_record_of_no_file_plans_no_part(points):
    data = files()["0.jpg"]
    assert extension.part(data[:5000], 8, SIZE, (0, 0, 10, 10), points) is None
    assert extension.part(b"", 8, SIZE, (0, 0, 10, 10), points) is None
    for eighths, box in ((3, (0, 0, 10, 10)), (8, (0, 0, 1201, 10)), (8, (-1, 0, 10, 10)), (8, (0, 0, 0, 10))):
        with pytest.raises(ValueError, match="the box is empty, or reaches out of the picture, or the scale is none"):
            extension.part(data, eighths, SIZE, box, points)
