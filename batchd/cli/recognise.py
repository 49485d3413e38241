"""What kind of source a path is, and which options it has. Runs in the user's shell.

    path --endings of its files--> kind --a look at the first record--> options, and what was found

Only what is the same in all samples is taken: one image, and numbers of a fixed shape. The rest is
named in ``Found.left_out``, since it needs steps that only the user can choose.

Invariant: files are read, and nothing in them is executed; the result is checked by those who use it.
"""

import csv
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np

from batchd.errors import SourceInvalid
from batchd.samples.errors import SampleUndecodable
from batchd.sources.files.walk import IMAGE_SUFFIXES
from batchd.sources.tfrecord.frames import HEADER
from batchd.sources.webdataset.options import IMAGE_ENDINGS, LABEL_ENDING
from batchd.storage.location import looks_like_url
from batchd_wire.fields import ITEM_BYTES
from batchd_wire.wording import counted

FILES_MAX = 200_000
"""Files of a folder that are looked at; those behind them are taken to be alike."""
NAMED_MAX = 4
"""Names in a list of classes, files or arrays."""
MEMBERS_MAX = 100
"""Members of a shard that are looked at for its first sample."""
ROWS_MAX = 100
"""Rows of a table that are looked at."""
VIDEO_ENDINGS = (".mp4", ".mkv", ".mov", ".avi", ".webm")
PICTURE_DIMENSIONS = (3, 4)
"""Of an array of pictures: [samples, height, width] or [samples, height, width, channels]."""
_IMAGE = tuple(ending.decode() for ending in IMAGE_SUFFIXES)


class Found(NamedTuple):
    """A source, as written in batchd.toml.

    ``facts``: what was seen, in lines. ``decodes``: it has a field ``image`` of image files.
    ``left_out``: fields and files that are not served, each with the reason.
    """

    source: dict[str, Any]
    facts: list[str]
    decodes: bool
    left_out: list[str]


def recognise(place: str) -> Found:
    """Look at a path. Raises ``SourceInvalid`` with what was seen and what can be read."""
    if looks_like_url(place):
        return _url(place)
    path = Path(place).expanduser().absolute()
    try:
        if path.is_dir():
            return _folder(path)
        if not path.exists():
            raise SourceInvalid(f"there is no {path}")
        return _files(path.parent, [path.name], ending_of(path.name))
    except PermissionError as error:
        raise SourceInvalid(f"{error.filename or path} is not readable for this user") from None


def ending_of(name: str) -> str:
    """What says of a file's name which kind it is: ".tar", ".tfrecord" for part 3 of 9, too."""
    lower = name.lower()
    if ".tfrecord" in lower:
        return ".tfrecord"
    return os.path.splitext(lower)[1]  # noqa: PTH122  a name, no path


# --- folders --------------------------------------------------------------------------------------


def _folder(path: Path) -> Found:
    if (path / "data.mdb").is_file():
        raise SourceInvalid(
            f"{path} is an LMDB database, which does not say what its records are; write the source by hand: "
            'type = "lmdb", docs/sources.md has an example'
        )
    names = [name for name, _number in zip(_names_below(path), range(FILES_MAX), strict=False)]
    counts = Counter(map(ending_of, names))
    images = sum(counts[ending] for ending in _IMAGE)
    videos = sum(counts[ending] for ending in VIDEO_ENDINGS)
    shards = [ending for ending in _KINDS if counts[ending]]
    best = max(shards, key=lambda ending: counts[ending], default="")
    if best and best not in {".csv", ".tsv", ".npy", ".npz"} | set(VIDEO_ENDINGS):
        kind = best  # images beside shards are what somebody unpacked
    elif images:
        return _images(path, names, images)
    else:
        kind = VIDEO_ENDINGS[0] if videos else best
    if not kind:
        seen = ", ".join(f"{number:,} x {ending or 'no ending'}" for ending, number in counts.most_common(NAMED_MAX))
        raise SourceInvalid(f"{path} has no files that batchd reads: {seen or 'it is empty'}; {_READABLE}")
    endings = VIDEO_ENDINGS if kind in VIDEO_ENDINGS else (kind,)
    chosen = [name for name in names if ending_of(name) in endings]
    found = _files(path, chosen, kind)
    return found._replace(left_out=[*_others(names, endings), *found.left_out])


def _names_below(top: Path) -> Iterator[str]:
    """Paths of the files below a folder, relative to it, in order. Hidden ones are skipped."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(top, onerror=refuse, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = os.path.relpath(folder, top)
        yield from (os.path.normpath(os.path.join(below, name)) for name in sorted(files) if not name.startswith("."))  # noqa: PTH118  names


def _images(path: Path, names: Sequence[str], images: int) -> Found:
    """A class for each sub-folder, or a flat folder, or a tree of folders by a pattern."""
    chosen = [name for name in names if ending_of(name) in _IMAGE]
    depths = {name.count(os.sep) for name in chosen}
    folders = Counter(name.partition(os.sep)[0] for name in chosen if os.sep in name)
    empty = [
        one.name for one in sorted(path.iterdir()) if one.is_dir() and one.name[0] != "." and one.name not in folders
    ]
    facts = [counted(images, "image") + (" or more" if len(names) == FILES_MAX else "")]
    if depths == {0} and not empty:
        facts[0] += ", without classes"
        source: dict[str, Any] = {"type": "folder", "path": str(path)}
    elif 0 not in depths and not empty:
        facts[0] += (
            f" in {counted(len(folders), 'class')}: {_some([f'{name} ({number:,})' for name, number in folders.items()])}"
        )
        source = {"type": "folder", "path": str(path)}
    else:
        facts[0] += ", with the names of their folders as classes"
        endings = ",".join(sorted({ending_of(name)[1:] for name in chosen}))
        pattern = f"**/*.{{{endings}}}" if "," in endings else f"**/*.{endings}"
        source = {"type": "glob", "root": str(path), "patterns": [pattern], "classes": "folder"}
    return Found(source, [*facts, *_sizes(path, chosen)], decodes=True, left_out=_others(names, _IMAGE))


def _sizes(path: Path, names: Sequence[str]) -> list[str]:
    """The sizes of a few images, from the first to the last."""
    from batchd.pipeline.image.probe import probe_image  # noqa: PLC0415  not for other kinds

    sizes = []
    for name in [names[0], names[len(names) // 2], names[-1]]:
        try:
            header = probe_image(memoryview((path / name).read_bytes()))
            sizes.append(f"{header.format} {header.width} x {header.height}")
        except SampleUndecodable as error:
            sizes.append(f"{name}: {error}")
    return [f"for example {_some(list(dict.fromkeys(sizes)))}"]


def _others(names: Sequence[str], endings: Sequence[str]) -> list[str]:
    others = [name for name in names if ending_of(name) not in endings]
    return [f"{len(others):,} of {counted(len(names), 'file')}: {_some(others)}"] if others else []


def _files(root: Path, names: Sequence[str], ending: str) -> Found:
    """Files of one kind below a folder. Raises ``SourceInvalid``."""
    look = _KINDS.get(ending)
    if look is None:
        raise SourceInvalid(f"{root / names[0]} is no file that batchd reads; {_READABLE}")
    return look(root, names)


def _patterns(names: Sequence[str], ending: str) -> list[str]:
    """Names, or a pattern of all of them where they are many."""
    if len(names) <= NAMED_MAX:
        return list(names)
    return [f"**/*{ending}" if any(os.sep in name for name in names) else f"*{ending}"]


# --- kinds ----------------------------------------------------------------------------------------


def _tar(root: Path, names: Sequence[str]) -> Found:
    shard = root / names[0]
    sample, members = "", []
    try:
        with tarfile.open(shard, "r:") as tar:
            for member, _number in zip(tar, range(MEMBERS_MAX), strict=False):
                key, _dot, ending = os.path.basename(member.name).partition(".")  # noqa: PTH119  a name in an archive
                sample = sample or key
                if member.isfile() and key == sample:
                    members.append(ending.lower())
    except tarfile.TarError as error:
        raise SourceInvalid(f"{shard} is no plain tar file: {error}") from None
    if not any(ending in IMAGE_ENDINGS for ending in members):
        raise SourceInvalid(
            f"the first sample of {shard}, {sample!r}, has no image but {_some(members) or 'nothing'}; "
            'write the fields by hand: type = "webdataset", docs/sources.md has examples'
        )
    source: dict[str, Any] = {"type": "webdataset", "root": str(root), "shards": _patterns(names, ".tar")}
    if LABEL_ENDING not in members:
        source["label"] = ""
    others = [f".{ending}" for ending in members if ending not in {*IMAGE_ENDINGS, LABEL_ENDING}]
    left_out = [f"{_some(others)} of each sample: name them in `fields`"] if others else []
    return Found(source, [f"{counted(len(names), 'shard')}; a sample has .{', .'.join(members)}"], True, left_out)


def _parquet(root: Path, names: Sequence[str]) -> Found:
    try:
        from pyarrow import parquet  # noqa: PLC0415  an extra
    except ModuleNotFoundError:
        raise SourceInvalid("Parquet files need pyarrow, which is not installed: pip install 'batchd[arrow]'") from None
    with parquet.ParquetFile(root / names[0]) as file:
        schema, rows = file.schema_arrow, file.metadata.num_rows
        first = next(file.iter_batches(batch_size=1)).to_pylist()[0] if rows else {}
    facts = [f"{counted(len(names), 'file')}; the first has {counted(rows, 'row')}"]
    features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    texts = {field.name: str(field.type) for field in schema}
    found = _fields({name: _parquet_type(text, first.get(name)) for name, text in texts.items()}, root / names[0])
    for name, feature in features.items():
        if feature.get("_type") == "ClassLabel" and name in texts:
            facts.append(f"classes of {name}: {_some(feature.get('names', []))}")
    shards = {"type": "parquet", "root": str(root), "shards": _patterns(names, ".parquet")}
    return found._replace(source=shards | found.source, facts=facts)


def _parquet_type(arrow: str, value: object) -> str | None:
    if isinstance(value, Mapping):  # Hugging Face's images
        value = value.get("bytes")
        return "image" if isinstance(value, bytes) and _is_image(value) else None
    if isinstance(value, bytes):
        return "image" if _is_image(value) else None
    return {"double": "float64", "float": "float32", "halffloat": "float16"}.get(
        arrow, arrow if arrow in ITEM_BYTES else None
    )


def _tfrecord(root: Path, names: Sequence[str]) -> Found:
    try:
        from batchd.sources.tfrecord.reader import Example  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        raise SourceInvalid(
            f"TFRecord files need {error.name}, which is not installed: pip install 'batchd[tfrecord]'"
        ) from None
    with (root / names[0]).open("rb") as file:
        head = file.read(HEADER.size)
        record = file.read(HEADER.unpack(head)[0]) if len(head) == HEADER.size else b""
    example = Example.FromString(record)
    types: dict[str, str | None] = {}
    for name, feature in sorted(example.features.feature.items()):
        kind = feature.WhichOneof(feature.DESCRIPTOR.oneofs[0].name)
        values = getattr(feature, kind).value if kind else []
        types[name] = None
        if len(values) == 1:
            is_image = kind == "bytes_list" and _is_image(values[0])
            types[name] = "image" if is_image else {"int64_list": "int64", "float_list": "float32"}.get(kind)
    found = _fields(types, root / names[0])
    shards = {
        "type": "tfrecord",
        "root": str(root),
        "shards": _patterns(names, ""),
    }
    return found._replace(source=shards | found.source, facts=[counted(len(names), "file")])


def _csv(root: Path, names: Sequence[str]) -> Found:
    file = root / names[0]
    with file.open(newline="", encoding="utf-8-sig", errors="replace") as stream:
        delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
        titles, *rows = [
            row for row, _number in zip(csv.reader(stream, delimiter=delimiter), range(ROWS_MAX), strict=False)
        ] or [[]]
    columns = {title: [row[place] for row in rows if len(row) > place] for place, title in enumerate(titles)}
    images = [title for title, values in columns.items() if values and all(ending_of(one) in _IMAGE for one in values)]
    types = {title: _number_type(values) for title, values in columns.items() if title not in images[:1]}
    found = _fields(types, file, needs_any=not images)
    source: dict[str, Any] = {"type": "csv", "path": str(file)} | found.source
    if images:
        source["image"] = images[0]
    if delimiter != ",":
        source["delimiter"] = delimiter
    more = [f"{counted(len(names) - 1, 'further table')}: {_some(names[1:])}"] if len(names) > 1 else []
    return Found(source, [f"a table with {_some(titles)}"], bool(images), [*found.left_out, *more])


def _number_type(values: Sequence[str]) -> str | None:
    for dtype, parse in (("int64", int), ("float32", float)):
        try:
            _ = [parse(value) for value in values]
        except ValueError:
            continue
        return dtype if values else None
    return None


def _npy(root: Path, names: Sequence[str]) -> Found:
    arrays = {os.path.splitext(name)[0].replace(os.sep, "_"): name for name in names}  # noqa: PTH122  names
    shapes = {field: _npy_header(root / name) for field, name in arrays.items()}
    if len(names) == 1:
        ((_field, (shape, dtype)),) = shapes.items()
        is_picture = dtype == np.uint8 and len(shape) in PICTURE_DIMENSIONS
        source: dict[str, Any] = {"type": "npy", "path": str(root / names[0]), "field": "image" if is_picture else "x"}
        return Found(source, [f"{dtype}{list(shape)}"], False, [])
    return _arrays({"type": "npy", "root": str(root)}, arrays, shapes)


def _npy_header(file: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with file.open("rb") as stream:
        return _header(stream, file)


def _header(stream: IO[bytes], file: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, _is_fortran, dtype = read(stream)
    except ValueError as error:
        raise SourceInvalid(f"{file} cannot be read: {error}") from None
    return shape, dtype


def _npz(root: Path, names: Sequence[str]) -> Found:
    shapes = {}
    try:
        with ZipFile(root / names[0]) as archive:
            for member in archive.namelist():
                with archive.open(member) as stream:
                    shapes[member.removesuffix(".npy")] = _header(stream, root / names[0])
    except BadZipFile as error:
        raise SourceInvalid(f"{root / names[0]} cannot be read: {error}") from None
    found = _arrays({"type": "npz", "path": str(root / names[0])}, {name: name for name in shapes}, shapes)
    return found._replace(left_out=[*found.left_out, *([_some(names[1:])] if len(names) > 1 else [])])


def _arrays(
    source: dict[str, Any], places: Mapping[str, str], shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
) -> Found:
    """The arrays that have as many samples as the first of the longest ones."""
    most = max((shape[0] for shape, _dtype in shapes.values() if shape), default=0)
    taken = [name for name, (shape, _dtype) in shapes.items() if shape and shape[0] == most]
    if not most:
        raise SourceInvalid(f"{source.get('path') or source.get('root')} has no array with samples")
    facts = [f"{name}: {shapes[name][1]}{list(shapes[name][0])}" for name in taken]
    others = [f"{name}, which has another number of samples" for name in places if name not in taken]
    return Found(source | {"arrays": {name: places[name] for name in taken}}, facts, False, others)


def _video(root: Path, names: Sequence[str]) -> Found:
    endings = sorted({ending_of(name)[1:] for name in names})
    files = _patterns(names, f".{{{','.join(endings)}}}" if len(endings) > 1 else f".{endings[0]}")
    source = {"type": "video", "root": str(root), "files": files, "every": 8, "size": [224, 224]}
    return Found(source, [counted(len(names), "video"), "every 8th frame is a sample"], False, [])


_KINDS: dict[str, Callable[[Path, Sequence[str]], Found]] = {
    ".tar": _tar,
    ".parquet": _parquet,
    ".tfrecord": _tfrecord,
    ".csv": _csv,
    ".tsv": _csv,
    ".npy": _npy,
    ".npz": _npz,
    **dict.fromkeys(VIDEO_ENDINGS, _video),
}
_READABLE = f"it reads images ({' '.join(_IMAGE)}) and {' '.join(_KINDS)}; other sources are in docs/sources.md"


def _url(place: str) -> Found:
    """Only what needs no look: the server is asked when the configuration is tried."""
    root, _slash, name = place.rpartition("/")
    if ending_of(name) == ".tar":
        return Found({"type": "webdataset", "root": root, "shards": [name]}, [f"shards of {root}"], True, [])
    if ending_of(name) in {".npy", ".npz"}:
        return Found({"type": ending_of(name)[1:], "path": place}, [f"arrays of {place}"], False, [])
    raise SourceInvalid(
        f"{place}: of URLs, only those of tar shards and arrays are recognised (s3://bucket/train-{{000..099}}.tar, "
        "https://host/x.npy); for others write the source by hand: docs/sources.md"
    )


# --- fields ---------------------------------------------------------------------------------------


def _fields(types: Mapping[str, str | None], file: Path, *, needs_any: bool = True) -> Found:
    """One image and the numbers, under names that a batch can have. Raises ``SourceInvalid``."""
    fields: dict[str, str] = {}
    names: dict[str, str] = {}
    left_out = []
    for title, text in types.items():
        field = "image" if text == "image" else "".join(letter if letter.isalnum() else "_" for letter in title).lower()
        if text is None or field in fields or not field.isidentifier():
            left_out.append(title)
            continue
        fields[field] = text
        if field != title:
            names[field] = title
    if not fields and needs_any:
        raise SourceInvalid(f"{file} has no image and no column of single numbers, only {_some(left_out)}; {_BY_HAND}")
    source: dict[str, Any] = {"fields": fields} | ({"names": names} if names else {})
    why = [f"{_some(left_out)}: texts, lists and further images need steps"] if left_out else []
    return Found(source, [], "image" in fields.values(), why)


_BY_HAND = "name the fields by hand, with steps for texts and lists: docs/sources.md, docs/steps.md"


def _is_image(data: bytes) -> bool:
    from batchd.pipeline.image.probe import probe_image  # noqa: PLC0415  not for other kinds

    try:
        probe_image(memoryview(data))
    except SampleUndecodable:
        return False
    return True


def _some(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more
