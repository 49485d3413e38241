"""Find the samples of shards in tar format. Daemon.

    train-0001.tar   | cat/0017.jpg | cat/0017.cls | cat/0018.jpg | cat/0018.cls | ...
                       key.ending     consecutive members with the same key are one sample

The key of a member is its name up to the first dot of its last part, as in WebDataset. An ending
that differs only in case stands for one that a sample does not have: .JPG for .jpg.

Without ``fields``, labels are read here, and the index is one of ``files.index``: of an image only
the extent is noted, and workers read each with one ``pread``, in any order. With ``fields``, short
numbers, arrays and texts enter the digest with their content, everything else with its extent:

    firsts    int64 [shards + 1]        first sample of each shard, and the number of all samples
    starts    int64 [n]                 first byte of the first member of each sample in its shard
    extents   uint32 [n, members, 2]    (blocks of 512 bytes from there, bytes) of each member
    endings   uint8 [n, members]        the number of its ending; MISSING if there is no such member
    points    uint32 [n, members, 2]    its access points, as in ``files.index``
    offsets   int64 [n + 1]             the key of sample i is keys[offsets[i]:offsets[i + 1]]
    keys      uint8 [bytes]             one key right after the other
    shards    uint8 [bytes]             the paths of the shards below the root, a NUL after each

A shard ends with at least one block of zeros, so a shard that was cut between two members is
recognised. Behind it there are only zeros: what `cat` appended would be lost.

Invariants: a damaged or truncated tar file, and a sample without image or label, are refused with
the names of shard and member; so is a field that no sample has, because its name is misspelt. Each
member is in a sample, noted, or refused: a link has no content, and members of one sample that are
apart would be two samples.
"""

import os
import re
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import chain, groupby
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import BinaryIO, NamedTuple, NoReturn
from zlib import adler32

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import default_value, from_plain, whole_number
from batchd.data.sources.files import index as files_index
from batchd.data.sources.files.walk import shards_of, shards_problems
from batchd.data.sources.finding import FilePattern, find_in_shards
from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.jsonl.values import json_object, value_at
from batchd.data.sources.neighbours import Neighbours, in_files
from batchd.data.sources.webdataset import options
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, blob, number_array, readable
from batchd.data.storage.paths import behind_the_end, size_of
from batchd.data.storage.survey import Survey, compression_of
from batchd.errors import SourceInvalid

PAX_BYTES_MAX = 64 << 10
_REGULAR, _EXTENDED = b"0\0", b"x"[0]
_TYPE_AT = 156
_NAME, _OWNER, _SIZE, _TIME = slice(0, 100), slice(100, 124), slice(124, 136), slice(136, 148)
_CHECKSUM, _DEVICE, _PREFIX = slice(148, 156), slice(329, 345), slice(345, 500)
_HALF = BLOCKSIZE // 2
"""Adler-32 has the sum of so few bytes in its lower half: it is smaller than its modulus."""
_BINARY = b"\x80\xff"
"""The first bytes of numbers in base 256."""
_RECORD = re.compile(rb"(\d+) ([^=\n]+)=")
_RECORD_BYTES_MIN = 5
_HARMLESS = frozenset({b"atime", b"ctime", b"mtime", b"uid", b"gid", b"uname", b"gname", b"comment"})
_HARMLESS_KINDS = (b"LIBARCHIVE.", b"SCHILY.")
_CHARACTER_SET = b"hdrcharset"
"""A key that tarfile looks for in all the bytes of the records."""


class PlainMember(NamedTuple):
    """A regular file in a tar file, and the byte at which the next header begins."""

    name: str
    start: int
    size: int
    end: int


def plain_member(stream: BinaryIO, offset: int) -> PlainMember | None:
    """The file whose header begins at a byte; None if tarfile has to read it, or its end.

        | header of a file | bytes .. zeros | pax records | header of a file | bytes .. zeros | ..
          usual              skipped          usual, if they change only names and times

    Usual headers are read in a tenth of the time that tarfile takes. A header is usual if it is
    that of a regular file with its numbers in octal digits, alone or behind one extended header in
    pax format. All others are tarfile's: links, folders, GNU's long names and sparse files, numbers
    in base 256, global headers, and all that is damaged.

    Invariant: a member that is returned is the one that tarfile finds at the same byte.
    """
    stream.seek(offset)
    header = stream.read(BLOCKSIZE)
    if len(header) < BLOCKSIZE:
        return None
    name: str | None = ""
    if header[_TYPE_AT] == _EXTENDED:
        size = _checked_size(header)
        if not 0 <= size <= PAX_BYTES_MAX:
            return None
        count = _padded(size)
        records = stream.read(count + BLOCKSIZE)
        if len(records) < count + BLOCKSIZE:
            return None
        name, header, offset = _name_in_pax(records[:count]), records[count:], offset + BLOCKSIZE + count
    size, own_name = _checked_size(header), _name_in(header)
    is_folder = own_name.endswith("/")  # in an old form, whatever the pax records say
    if name is None or size < 0 or header[_TYPE_AT] not in _REGULAR or is_folder:
        return None
    start = offset + BLOCKSIZE
    return PlainMember(name or own_name, start, size, start + _padded(size))


def _checked_size(header: bytes) -> int:
    """The size in a header; -1 unless its numbers are octal digits and its checksum is right."""
    checksum = _octal(header[_CHECKSUM])
    total = (adler32(header[:_HALF]) & 0xFFFF) + (adler32(header[_HALF:]) & 0xFFFF) - 2
    if total - sum(header[_CHECKSUM]) + 8 * b" "[0] != checksum:
        return -1
    if not (_are_numbers(header[_OWNER], 8) and _are_numbers(header[_DEVICE], 8) and _are_numbers(header[_TIME], 12)):
        return -1
    return _octal(header[_SIZE])


def _octal(field: bytes) -> int:
    """A number in octal digits; -1 for another form."""
    digits = field.rstrip(b"\0 ").lstrip(b" ")
    try:
        return int(digits, 8) if digits.isdigit() else -1
    except ValueError:
        return -1


@lru_cache(maxsize=4096)
def _are_numbers(fields: bytes, size: int) -> bool:
    """True if each of these fields is octal, blank or binary.

    Most are those of the member before.
    """
    starts = range(0, len(fields), size)
    return all(
        fields[start] in _BINARY or _octal(b"0" + fields[start : start + size].lstrip(b" ")) >= 0 for start in starts
    )


def _name_in(header: bytes) -> str:
    name = header[_NAME].partition(b"\0")[0]
    prefix = header[_PREFIX].partition(b"\0")[0] if header[_PREFIX.start] else b""
    return os.fsdecode(prefix + b"/" + name if prefix else name)


def _name_in_pax(records: bytes) -> str | None:
    """The name in pax records, or ""; None if they say more than a name, times and owners."""
    name, place = b"", 0
    while (match := _RECORD.match(records, place)) is not None:
        end = place + int(match[1])
        if end - place < _RECORD_BYTES_MIN or records[end - 1 : end] != b"\n" or end <= match.end():
            return None
        if match[2] == b"path":
            name = records[match.end() : end - 1].rstrip(b"/")
            if not name:
                return None
        elif match[2] not in _HARMLESS and not match[2].startswith(_HARMLESS_KINDS):
            return None
        place = end
    if records[place:].strip(b"\0") or _CHARACTER_SET in records:
        return None
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def _padded(size: int) -> int:
    return -(-size // BLOCKSIZE) * BLOCKSIZE


HEADER_BYTES_MAX = 1 << 20
"""Longest name or extended header of a member: tarfile reads any length that a member claims."""
MAGIC, MAGIC_AT = b"ustar", 257
"""Magic of a tar file. At its start is a name, which may look like the magic of another format."""
CONTENT_BYTES_MAX = 4096
"""Of longer members, only the length enters the digest."""
LABEL_BYTES_MAX = 1 << 20
POINTS_GAP_BYTES_MAX = 4 * BLOCKSIZE
"""From the end of an image to its access points, which are read with it: padding and header."""
_LABEL = Column("label", dtype="int64")
_SHOWN_MEMBERS_MAX = 12
_PACK_AGAIN = "mkdir DIR && tar -xif FILE -C DIR && tar --sort=name -cf NEW -C DIR ."


class TarMember(NamedTuple):
    """One file in a shard."""

    name: str
    start: int
    size: int


class TarSample(NamedTuple):
    """Members with the same key, by the rest of their names."""

    key: str
    members: dict[str, TarMember]

    def find(self, endings: Sequence[str]) -> tuple[int, TarMember] | None:
        """The first of some endings that the sample has, as written or else in any case."""
        for number, ending in enumerate(endings):
            if ending in self.members:
                return number, self.members[ending]
        in_any_case = {ending.lower(): member for ending, member in reversed(self.members.items())}
        found = ((number, in_any_case.get(ending.lower())) for number, ending in enumerate(endings))
        return next(((number, member) for number, member in found if member is not None), None)

    def points_of(self, member: TarMember) -> tuple[int, int]:
        """The first byte of an image's access points, from its own one, and their bytes; or zeros.

        They count only directly behind their image, and if they are shorter.
        """
        points = self.members.get(f"{member.name[len(self.key) + 1 :]}.{options.POINTS_ENDING}")
        if points is None or not 0 < points.size < member.size < options.MEMBER_BYTES_MAX // 2:
            return 0, 0
        is_behind = 0 < points.start - member.start - member.size <= POINTS_GAP_BYTES_MAX
        return (points.start - member.start, points.size) if is_behind else (0, 0)


def samples_in(path: Path, stream: BinaryIO, survey: Survey) -> Iterator[TarSample]:
    """The samples of a shard, each with at least one member. Raises ``SourceInvalid``."""
    hashes: set[int] = set()  # of the keys, which would take several times the memory
    for key, members in groupby(members_of(path, stream, survey), _key_of):
        sample: dict[str, TarMember] = {}
        for member in members:
            if not sample and hash(key) in hashes:
                raise SourceInvalid(
                    f"{path}: the members of {readable(os.fsencode(key))} are apart: {readable(os.fsencode(member.name))}, "
                    f"whose bytes begin at {member.start}, lies behind other samples, so it would be a sample of its own; "
                    f"sort the shard: {_PACK_AGAIN}"
                )
            ending = member.name[len(key) + 1 :]
            if ending in sample:
                raise SourceInvalid(f"{path}: two members are called {readable(os.fsencode(member.name))}")
            sample[ending] = member
        hashes.add(hash(key))
        yield TarSample(key, sample)


def _key_of(member: TarMember) -> str:
    folder, slash, last = member.name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def members_of(path: Path, stream: BinaryIO, survey: Survey) -> Iterator[TarMember]:
    """The files in a shard, in their order, without hidden ones."""
    start = stream.read(BLOCKSIZE)
    found = compression_of(start)
    if found is not None and not start.startswith(MAGIC, MAGIC_AT):
        raise SourceInvalid(
            f"{path} is compressed ({found.name}), so its samples cannot be read one by one; images are compressed already: "
            f"unpack the shard: {found.unpack} < FILE > UNPACKED"
        )
    stream.seek(0)
    last = TarMember("", 0, 0)
    try:
        with tarfile.open(fileobj=_HeadersOnly(stream), mode="r:", errors="surrogateescape") as shard:  # type: ignore[call-overload]
            for last in _files(path, shard, stream, survey):
                yield last
            _check_end(path, stream, shard.offset, survey)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        size = size_of(stream)
        if size < last.start - -last.size // BLOCKSIZE * BLOCKSIZE:
            name = readable(os.fsencode(last.name))
            raise SourceInvalid(f"{path} is cut: it ends at byte {size}, within {name}; copy it again") from None
        raise SourceInvalid(f"{path} is not a tar file, or is damaged: {error}") from None


def _check_end(path: Path, stream: BinaryIO, offset: int, survey: Survey) -> None:
    """Refuse a shard with anything but zeros from byte ``offset`` on."""
    stream.seek(offset)
    block = stream.read(BLOCKSIZE)
    if len(block) < BLOCKSIZE:
        raise SourceInvalid(f"{path}: no end-of-archive block at byte {offset}: the shard is cut; copy it again")
    if block.strip(b"\0"):  # tarfile takes a broken header for the end
        raise SourceInvalid(f"{path} is damaged: no header of a member at byte {offset}")
    if problem := behind_the_end(stream, offset + BLOCKSIZE, survey.looked):
        raise SourceInvalid(f"{path} {problem}; if several shards were joined, pack it again: {_PACK_AGAIN}")


def _files(path: Path, shard: tarfile.TarFile, stream: BinaryIO, survey: Survey) -> Iterator[TarMember]:
    """The files that tarfile finds. ``shard.offset`` is the first byte of the next header."""
    is_usual = False  # tarfile has read the first header
    while True:
        plain = plain_member(stream, shard.offset) if is_usual else None
        if plain is not None:
            shard.offset = plain.end
            if not _is_hidden(path, plain.name, plain.start, survey):
                yield TarMember(plain.name, plain.start, plain.size)
            continue
        stream.seek(max(0, shard.offset - 1))  # tarfile reads this byte first
        member = shard.next()
        if member is None:
            return
        if shard.offset < member.offset_data:  # tarfile would begin again and again
            raise ValueError(f"{member.name} has {member.size} bytes")
        shard.members = []  # type: ignore[attr-defined]  # it would keep them all
        is_usual = not shard.pax_headers  # global ones apply to all members behind them
        if member.isdir() or _is_hidden(path, member.name, member.offset_data, survey):
            continue
        _check_file(path, member)
        yield TarMember(member.name, member.offset_data, member.size)


def _is_hidden(path: Path, name: str, start: int, survey: Survey) -> bool:
    """True for a file whose name begins with a dot, such as those that macOS adds; notes it."""
    is_hidden = name.startswith(".", name.rfind("/") + 1)
    if is_hidden:
        where = f"{path}: {readable(os.fsencode(name))} (byte {start})"
        survey.note("hidden members of shards, which no sample has", where)
    return is_hidden


def _check_file(path: Path, member: tarfile.TarInfo) -> None:
    """Refuse a member that is no file, or lacks a part of its content."""
    where = f"{path}: {readable(os.fsencode(member.name))}, whose header is at byte {member.offset},"
    if member.islnk() or member.issym():
        kind, target = "hard" if member.islnk() else "symbolic", readable(os.fsencode(member.linkname))
        raise SourceInvalid(
            f"{where} is a {kind} link to {target}, so the shard has not its bytes; write it with the files themselves: tar -h "
            "--hard-dereference"
        )
    if member.issparse():
        raise SourceInvalid(f"{where} is sparse, which no sample can be; write the shard without tar's --sparse")
    if not member.isreg():
        raise SourceInvalid(f"{where} is no file (type {member.type!r}); leave it out of the shard")


class _HeadersOnly:
    """A shard for tarfile: members can be skipped; one read is at most as long as a header."""

    def __init__(self, stream: BinaryIO) -> None:
        self.seek = stream.seek
        self.tell = stream.tell
        self._stream = stream

    def read(self, count: int) -> bytes:
        """Read a header. Raises ``ValueError`` if its length is too long, or negative."""
        if not 0 <= count <= HEADER_BYTES_MAX:
            raise ValueError(f"a header of {count} bytes")
        return self._stream.read(count)


def _samples(
    source: options.WebDatasetSource, shards: list[bytes], survey: Survey
) -> Iterator[tuple[int, Path, BinaryIO, TarSample]]:
    """Each sample, with the number, path and stream of its shard. Raises ``SourceInvalid``."""
    for number, shard in enumerate(shards):
        path, sample = source.root / os.fsdecode(shard), None
        with survey.open(path) as stream:
            for sample in samples_in(path, stream, survey):
                survey.looked()
                yield number, path, stream, sample
        if sample is None:
            raise SourceInvalid(f"{path} holds no sample; leave it out of the shards")


def _scan(source: options.WebDatasetSource, survey: Survey) -> SourceIndex:
    """Find the samples of all shards, ordered by the shards' paths. Raises ``SourceInvalid``."""
    shards = shards_of(source, survey)
    if source.fields:
        return _FoundMembers(source).scan(shards, survey)
    growing = files_index.GrowingIndex(survey.progress, source.path_bytes)
    for number, path, stream, sample in _samples(source, shards, survey):
        image, label = _image(source, path, sample), _label(source, path, stream, sample)
        growing.add(os.fsencode(image.name), label, (number, image.start, image.size), sample.points_of(image))
    return growing.finish(source.root, [], survey, shards)


class _FoundMembers:
    """The members of the samples of a source with ``fields``, found so far."""

    def __init__(self, source: options.WebDatasetSource) -> None:
        self._source = source
        self._parts = source.parts
        self._wanted = source.wanted
        self._images = {slot for part in self._parts if part.coding == "image" for slot in part.slots or (part.slot,)}
        self._content = sha256()
        self._starts = array("q")
        self._extents = array("I")
        self._endings = array("B")
        self._points = array("I")
        self._keys = bytearray()
        self._offsets = array("q", [0])
        self._seen = [False] * len(self._wanted)

    def scan(self, shards: list[bytes], survey: Survey) -> SourceIndex:
        """Find all samples. Raises ``SourceInvalid``, also for a field that none of them has."""
        firsts, first = array("q"), ""
        for number, path, stream, sample in _samples(self._source, shards, survey):
            first = first or f"{readable(os.fsencode(sample.key))} of {path} has {_listed(sample.members)}"
            if len(firsts) == number:
                firsts.append(len(self._starts))
            self._add(path, stream, sample)
            if len(self._starts) % files_index.PROGRESS_EVERY == 0:
                survey.progress(len(self._starts))
        firsts.append(len(self._starts))
        survey.progress(firsts[-1])
        for part in self._parts:
            if (
                not any(self._seen[slot] for slot in part.slots or (part.slot,))
                and part.column.name not in self._source.defaults
            ):
                raise SourceInvalid(
                    f"{self._source.place}: no sample has a member {part.members} for the field {part.column.name}; the first, "
                    f"{first}; say in names where the field comes from, or in defaults what stands for it"
                )
        facts = {"fields": list(map(self._fact, self._parts)), "content": self._content.hexdigest()}
        arrays = {
            "firsts": number_array(firsts),
            "starts": number_array(self._starts),
            "extents": number_array(self._extents).reshape(-1, len(self._wanted), 2),
            "endings": number_array(self._endings).reshape(-1, len(self._wanted)),
            "offsets": number_array(self._offsets),
            "keys": np.frombuffer(self._keys, np.uint8),
            "shards": blob(shards),
        }
        if any(self._points):
            arrays["points"] = number_array(self._points).reshape(-1, len(self._wanted), 2)
        place = {"root": os.fsdecode(self._source.root.absolute()), **survey.place()}
        return SourceIndex.build(firsts[-1], facts, arrays, place)

    def _add(self, path: Path, stream: BinaryIO, sample: TarSample) -> None:
        key = os.fsencode(sample.key)
        files_index.check_path_length(f"{path}: the name", key, self._source.path_bytes)
        start = next(iter(sample.members.values())).start
        self._starts.append(start)
        self._keys += key
        self._offsets.append(len(self._keys))
        for slot, wanted in enumerate(self._wanted):
            found = sample.find(wanted)
            if found is None:
                self._endings.append(options.MISSING)
                self._extents.extend((0, 0))
                self._points.extend((0, 0))
                continue
            number, member = found
            self._endings.append(number)
            blocks = (member.start - start) // BLOCKSIZE
            if blocks > options.MEMBER_BYTES_MAX:
                raise SourceInvalid(f"{path}: the members of {readable(key)} lie too far from each other")
            self._seen[slot] = True
            self._extents.extend((blocks, min(member.size, options.MEMBER_BYTES_MAX)))
            self._points.extend(sample.points_of(member) if slot in self._images else (0, 0))
            if slot not in self._images and member.size <= CONTENT_BYTES_MAX:
                content = content_of(stream, member)
                self._content.update(b"%d:%b" % (len(content), content))

    def _fact(self, part: options.MemberField) -> list[object]:
        """The facts that decide the bytes of a field, in a normal form."""
        default = self._source.defaults.get(part.column.name)
        if default is not None and not isinstance(default, str) and part.column.kind == "array":
            default = np.asarray(default_value(part.column, default)).tobytes().hex()
        return [part.column.text, part.member.text, default]


def content_of(stream: BinaryIO, member: TarMember) -> bytes:
    """The bytes of a member."""
    stream.seek(member.start)
    return stream.read(member.size)


def _listed(members: dict[str, TarMember]) -> str:
    more = [f"{len(members) - _SHOWN_MEMBERS_MAX} more"] if len(members) > _SHOWN_MEMBERS_MAX else []
    shown = (readable(os.fsencode(f".{ending}")) for ending in list(members)[:_SHOWN_MEMBERS_MAX])
    return ", ".join(chain(shown, more))


def _image(source: options.WebDatasetSource, path: Path, sample: TarSample) -> TarMember:
    if found := sample.find(source.image):
        return found[1]
    name = next(iter(sample.members.values())).name
    raise SourceInvalid(
        f"{path}: the sample of {readable(os.fsencode(name))} has no image: its endings are {', '.join(sample.members)}, and "
        f"image = {list(source.image)}"
    )


def _label(source: options.WebDatasetSource, path: Path, stream: BinaryIO, sample: TarSample) -> int:
    ending, _, key = source.label.partition(":")
    if not ending:
        return 0
    found = sample.find([ending])
    if found is None:
        name = next(iter(sample.members.values())).name
        raise SourceInvalid(
            f"{path}: the sample of {readable(os.fsencode(name))} has no member .{ending} for its label; label = "
            f'"{source.label}" says that it has, and label = "" that there are no labels'
        )
    member = found[1]
    shown = readable(os.fsencode(member.name))
    if member.size > LABEL_BYTES_MAX:
        raise SourceInvalid(f"{path}: {shown} has {member.size} bytes, too many for a label")
    text = content_of(stream, member)
    try:
        value = value_at(json_object(text), key) if key else whole_number(text.decode("ascii").strip())
        return int(from_plain(_LABEL, value)) if type(value) in {int, float, bool} else _no_label(path, shown, key)
    except (UnicodeDecodeError, SampleUnreadable):
        return _no_label(path, shown, key)


def _no_label(path: Path, member: str, key: str) -> NoReturn:
    what = f"JSON with a whole number under {key!r}" if key else "a whole number"
    raise SourceInvalid(f"{path}: {member} is not {what}")


def _columns(source: options.WebDatasetSource, _storage: Storage) -> tuple[Column, ...]:
    if source.fields:
        return *source.columns, *files_index.path_columns(source.path_bytes)
    return files_index.image_columns(source.path_bytes)


def _neighbours(source: options.WebDatasetSource, index: SourceIndex) -> Neighbours:
    if "firsts" not in index.arrays:
        return files_index.files_neighbours(source, index)
    return in_files(index.arrays["firsts"], len(index), begins=index.arrays["starts"])


def _find(source: options.WebDatasetSource, index: SourceIndex, pattern: FilePattern) -> NDArray[np.int64]:
    return (
        find_in_shards(pattern, index) if "firsts" in index.arrays else files_index.find_files(source, index, pattern)
    )


KINDS = {
    options.WebDatasetSource: BuiltInKind(
        problems=shards_problems,
        columns=_columns,
        scan=_scan,
        neighbours=_neighbours,
        find=_find,
    )
}
