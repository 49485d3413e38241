"""Recognise data: find the kind of source that reads the files of a place, and its options. CLI.

    place -- find_files --> FoundFiles -- each kind with such files --> Recognised: the most files

A kind has the ``endings`` of its files (``SourceOptions.endings``); ``recognise.py`` in its folder
looks into some of the files and returns the source that reads them. Files of other kinds are left
out, and reported. If names show which part of a data set a file belongs to ("train", "test"), the
source is the training part, or that of ``FoundFiles.part``.

Invariant: a recogniser declares only fields that it found in the data, reads a limited number of
records, and says of everything that it leaves out why. ``cli.first_config`` looks at all samples
for the limits.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, chain, takewhile
from math import isfinite
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import NamedTuple

from batchd.data.samples.columns import MAGIC_BYTES, image_format
from batchd.data.samples.location import Url
from batchd.data.sources.files.walk import below, matching, walk
from batchd.data.sources.interface import FoundFiles, Recognised, recogniser_of
from batchd.data.sources.options import SOURCE_KINDS, Patterns, ShardOptions, SourceOptions
from batchd.data.storage.access import WantedNames
from batchd.data.storage.index import readable
from batchd.data.storage.paths import absent, unreachable
from batchd.data.storage.patterns import NameRule, Pattern, resolve_braces
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd_wire.wording import counted

LOOKED_AT = 32
"""Number of records of a file that a recogniser reads."""
OTHER_PART = "of another part of the data set"
UNUSABLE_MAX = 100
"""Files that are left out, one after the other, as they are damaged."""
NUMBERED = "-00000-of-00001"
"""Stands for the ending of a name like train-00003-of-00016, which has no other ending."""
TAR = "mkdir {folder} && tar xf {file} -C {folder}"
PACKED = {
    ".zip": "python3 -m zipfile -e {file} {folder}",
    ".7z": "7z x {file} -o{folder}",
    ".tgz": TAR,
    ".gz": "gunzip {file}",
    ".bz2": "bunzip2 {file}",
    ".xz": "unxz {file}",
    ".zst": "unzstd {file}",
}
"""Endings of files that have to be unpacked, and the commands, which a shell runs."""
_NUMBERS = re.compile(rb"-\d+-of-\d+$")
_WILD = re.compile(r"[*?\[{]")
TRAINING_PARTS = ("train", "training")
PARTS = (*TRAINING_PARTS, "val", "valid", "validation", "dev", "eval", "test", "testing")
"""Names of parts of a data set, in their order."""
_WORD = re.compile(rb"[A-Za-z]+")
_LABELS = ("label", "labels", "class", "class_id", "category", "category_id", "target", "fine_label", "y", "cls")
"""Names of integer fields that are labels, the likeliest first."""
_TEXT_LABELS = ("label_name", "class_name", "species", "variety", "breed", "sentiment", "genre", "topic", "intent")
"""Further names, of texts."""
_NAMES_SHOWN, _ENDINGS_SHOWN = 3, 6
FIELDS_IN_A_BATCH = 61
"""As many as ``pipeline.sample_fields`` allows; a field whose length varies needs another one."""
SINGLE_MAX = 16
"""More columns of numbers than this become one field."""
FLOAT32_WHOLE = 1 << 24
"""Whole numbers up to this one are exact in float32."""
_IN_FLOAT32 = {"int8", "uint8", "int16", "uint16", "float16", "float32", "bool"}
_NUMBERS_JOINED = {*_IN_FLOAT32, "int32", "uint32", "int64", "float64"}
_LAST_DIGITS = re.compile(r"[0-9]+$")


_SOUND_STARTS = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"FORM")


CHATS = 'chats need the tokenizer of a model; docs/cookbook.md ("Chats") has lines that serve them'
TEXT_LISTS = 'lists of texts, which are of type "text[<=8]": docs/sources.md ("Types")'


def is_sound(start: bytes) -> bool:
    """True for the first bytes of the usual files of sound, if they are of no image."""
    return start.startswith(_SOUND_STARTS) and image_format(start) is None


_NOTHING: Mapping[str, tuple[str, str]] = MappingProxyType({})


class FoundSource(NamedTuple):
    """The result: a source, all files of the place, and the files that the source leaves out.

    ``kind``: the one whose recogniser found it; of images, also for other sources than folders.
    """

    recognised: Recognised
    files: FoundFiles
    left_out: Sequence[bytes]
    kind: type[SourceOptions]

    def left_out_by_reason(self) -> dict[str, list[bytes]]:
        """The files that are left out, by the reason."""
        by_reason: dict[str, list[bytes]] = {}
        by_ending = {ending: self._reason(ending) for ending in set(self.files.endings)}
        for name in self.left_out:
            reason = self.files.unusable.get(name) or self.recognised.left_out.get(name)
            by_reason.setdefault(reason or by_ending[ending_of(name)], []).append(name)
        return by_reason

    def _reason(self, ending: str) -> str:
        if ending in type(self.recognised.source).endings:
            return OTHER_PART
        is_known = any(ending in kind.endings for kind in SOURCE_KINDS.values())
        return "which a stream of its own can read" if is_known else "which no source reads"


def recognise(path: Path, survey: Survey) -> FoundSource:
    """Find the source that reads the most files of a place. Raises ``SourceInvalid``."""
    files = find_files(path, survey)
    if not files.names:
        raise SourceInvalid(f"{path} has no files; name the folder or file that has the data")
    return recognise_files(path, files, survey)


def recognise_files(
    path: Path, files: FoundFiles, survey: Survey, kinds: Iterable[type[SourceOptions]] | None = None
) -> FoundSource:
    """As ``recognise``, of files that were found, and by some kinds. Raises ``SourceInvalid``."""
    found: list[tuple[type[SourceOptions], Recognised]] = []
    refused: list[tuple[int, bool, SourceInvalid]] = []
    there = set(files.endings)
    for kind in SOURCE_KINDS.values() if kinds is None else kinds:
        if there.isdisjoint(kind.endings):
            continue
        while names := of_kind(files, kind):
            try:
                found.append((kind, recogniser_of(kind)(files, survey)))
                break
            except (SourceInvalid, ValueError) as error:  # invalid options, such as a URL
                files, is_other = without_blamed(files, kind, str(error))
                if not is_other:
                    refused.append((len(names), not kind.outranks, SourceInvalid(str(error))))
                    break
    if not found:
        # a kind for some of another's files does not speak for all of them
        raise max(refused, key=lambda refusal: refusal[:2])[-1] if refused else _unknown(path, files)
    kind, best = max(found, key=lambda one: (one[0].outranks, len(one[1].names)))
    used = set(best.names)
    return FoundSource(best, files, [name for name in files.names if name not in used], kind)


def without_blamed(files: FoundFiles, kind: type[SourceOptions], problem: str) -> tuple[FoundFiles, bool]:
    """The files, and the one that a problem begins with as unusable.

    False if it names none of many.
    """
    if len(of_kind(files, kind)) < 2 or len(files.unusable) >= UNUSABLE_MAX:  # noqa: PLR2004  one would be left
        return files, False
    for name in of_kind(files, kind):
        path = str(files.root / readable(name))
        if problem.startswith(path) and problem[len(path) : len(path) + 1] in (":", " "):
            reason = problem[len(path) :].lstrip(": ")
            return files._replace(unusable={**files.unusable, name: reason}), True
    return files, False


def readable_endings() -> list[str]:
    """A line for each kind that batchd recognises, with its endings."""
    return [f"{name}: {' '.join(kind.endings)}" for name, kind in SOURCE_KINDS.items() if kind.endings]


def _unknown(path: Path, files: FoundFiles) -> SourceInvalid:
    """The error for a place without any file that a kind reads."""
    lines = [f"{path} has no files that batchd recognises, but {endings_text(files.names)}"]
    packed = sorted({ending for ending in map(ending_of, files.names) if ending in PACKED})
    if packed and files.patterns == (path.name,):
        return SourceInvalid(f"{path} is packed; unpack it first:\n  {_unpack(path)}")
    if packed:
        each = """find {} -iname '*{}' -exec sh -c '{}' {{}} ';' &&"""
        commands = [PACKED[ending].format(file='"$0"', folder='"${0%.*}"') for ending in packed]
        finds = [each.format(quote(str(files.root)), *pair) for pair in zip(packed, commands, strict=True)]
        lines += ["unpack them first:", *(f"  {find}" for find in finds), f"  batchd init {quote(str(files.root))}"]
    lines += ["batchd recognises", *(f"  {line}" for line in readable_endings())]
    lines.append(
        "read binary records with a source of type raw, and other files with type python: `batchd config` has examples"
    )
    return SourceInvalid("\n".join(lines))


def _unpack(file: Path) -> str:
    """The command that unpacks a file and goes on with its content."""
    stem = file.with_suffix("")
    if stem.suffix.lower() == ".tar":
        template, stem = TAR, stem.with_suffix("")
    else:
        template = PACKED[file.suffix.lower()]
    file_text, folder = quote(str(file)), quote(str(stem))
    return f"{template.format(file=file_text, folder=folder)} && batchd init {folder}"


# --- files ----------------------------------------------------------------------------------------


def find_files(path: Path, survey: Survey) -> FoundFiles:
    """Find the files of a folder, or of a pattern such as ``train-{000..123}.tar``, or one file.

    Raises ``SourceInvalid``.
    """
    if not isinstance(path, Url) and (problem := unreachable(path)) is not None:
        raise SourceInvalid(problem)
    is_there = not isinstance(path, Url) and path.exists()
    if _WILD.search(str(path)) and not is_there:
        first = next(number for number, part in enumerate(path.parts) if _WILD.search(part))
        root, pattern = type(path)(*path.parts[:first]), "/".join(path.parts[first:])
        found = matching(Patterns(root, [pattern], "the pattern", allow_outside_root=False), survey)
        names = [below(folder, name) for folder, those in found for name in those]
        return FoundFiles(root, names, list(map(ending_of, names)), patterns=(pattern,))
    name, store = os.fsencode(path.name), survey.storage.at(path)
    if _is_known(name) if isinstance(path, Url) else path.is_file():
        if problems := store.file_problems(path, "the file"):
            raise SourceInvalid(problems[0])
        return FoundFiles(path.parent, [name], [ending_of(name)], patterns=(path.name,))
    if isinstance(path, Url) and ending_of(name) in PACKED:
        raise SourceInvalid(f"{path} is packed; download it, and unpack it:\n  {_unpack(Path(path.name))}")
    if isinstance(path, Url) and not path.can_list:
        raise SourceInvalid(
            f"{path} cannot be listed: {path.scheme} servers cannot list files; name them, as in batchd init "
            f"'{path}/train-{{000..123}}.tar'"
        )
    if not isinstance(path, Url) and not is_there:
        raise SourceInvalid(f"{absent('file or folder', path)}; name the folder or file that has the data")
    if problems := store.folder_problems(path, is_listed=True):
        raise SourceInvalid(problems[0])
    return _files_below(path, survey)


def _files_below(folder: Path, survey: Survey) -> FoundFiles:
    """Find all files below a folder. Raises ``SourceInvalid``."""
    top = os.fsencode(folder)
    count = Counter[str]()

    def list_folder(below_top: bytes) -> tuple[list[bytes], list[bytes]]:
        folders, names = survey.names_in(os.path.join(top, below_top), WantedNames(NameRule()))  # noqa: PTH118  bytes
        count["files"] += len(names)
        survey.progress(count["files"])
        return folders, names

    walked = walk(top, b"", list_folder, survey, None)
    files = [below(inner, name) for inner, names in walked for name in names]
    return FoundFiles(folder, files, list(map(ending_of, files)), frozenset(inner for inner, _ in walked if inner))


def of_kind(files: FoundFiles, kind: type[SourceOptions]) -> list[bytes]:
    """The files with an ending of this kind."""
    wanted = frozenset(kind.endings)
    return [
        name
        for name, ending in zip(files.names, files.endings, strict=True)
        if ending in wanted and name not in files.unusable
    ]


def ending_of(name: bytes) -> str:
    """The ending of a file's name with its dot, in lower case, without the numbers of a shard."""
    last = name[name.rfind(b"/") + 1 :]
    bare = _NUMBERS.sub(b"", last) if last[-1:].isdigit() else last
    _stem, dot, ending = bare.rpartition(b".")
    if dot:
        return _shown_ending(ending)
    return NUMBERED if bare != last else ""


@lru_cache(maxsize=1024)
def _shown_ending(ending: bytes) -> str:
    return "." + readable(ending).lower()


def _is_known(name: bytes) -> bool:
    return any(ending_of(name) in kind.endings for kind in SOURCE_KINDS.values())


def endings_text(names: Sequence[bytes]) -> str:
    """The number of files by ending, with some names: "2 .md (a.md, b.md), 1 .txt (c.txt)"."""
    by_ending: dict[str, list[bytes]] = {}
    for name in names:
        by_ending.setdefault(ending_of(name), []).append(name)
    ranked = sorted(by_ending.items(), key=lambda item: -len(item[1]))
    texts = []
    for ending, those in ranked[:_ENDINGS_SHOWN]:
        more = ", …" if len(those) > _NAMES_SHOWN else ""
        shown = ", ".join(map(readable, those[:_NAMES_SHOWN]))
        texts.append(f"{len(those):,} {ending or 'without an ending'} ({shown}{more})")
    others = sum(len(those) for _ending, those in ranked[_ENDINGS_SHOWN:])
    return ", ".join(texts + ([f"{others:,} others"] if others else []))


def patterns_of(files: FoundFiles, names: Sequence[bytes]) -> tuple[str, ...]:
    """The shortest patterns that match these files and no others. Raises ``SourceInvalid``."""
    if files.patterns and set(names) == set(files.names):
        return files.patterns
    folders = {name.rpartition(b"/")[0] for name in names}
    endings = sorted({readable(name.rpartition(b".")[2]) for name in names if ending_of(name).startswith(".")})
    end = f".{endings[0]}" if len(endings) == 1 else f".{{{','.join(endings)}}}" if endings else ""
    last_names = sorted(_NUMBERS.sub(b"-", name.rpartition(b"/")[2]) for name in names)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(last_names[0], last_names[-1], strict=False))
    begin = readable(bytes(byte for byte, _other in same)).rstrip("0123456789")
    inside = {readable(folder) + "/" if folder else "" for folder in folders}
    first = {f"{folder.partition(b'/')[0].decode(errors='replace')}/**/" for folder in folders if folder}
    for folder in [*(inside if len(inside) == 1 else ()), "**/", *(first if len(first) == 1 else ())]:
        only = [readable(names[0])] if len(names) == 1 and end else []
        for text in (*([f"{folder}*{end}"] if end else ()), f"{folder}{begin}*{end}", *only, f"{folder}{begin}*"):
            if _selects(text, files.names, names):
                return (text,)
    if len(names) > LOOKED_AT and not files.unusable:
        raise SourceInvalid(
            f"{files.root}: no simple pattern selects only {endings_text(names)}; name one: batchd init 'FOLDER/PATTERN'"
        )
    return tuple(readable(name) for name in names)


def _selects(text: str, names: Sequence[bytes], wanted: Sequence[bytes]) -> bool:
    try:
        plain = [Pattern(name) for name in resolve_braces(text)]
    except ValueError:
        return False
    return [name for name in names if any(pattern.matches(name.split(b"/")) for pattern in plain)] == list(wanted)


def training_folder(names: Sequence[bytes], part: str) -> tuple[bytes, tuple[str, ...]]:
    """The folder of a part ("": training), and the others; "" if no folder has parts alone.

    The parts may be below folders that all files share, as in Data/CLS-LOC/train.
    """
    shared = os.path.commonpath(names).split(b"/") if names else []
    for depth in range(len(shared) + 1):
        before = b"".join(folder + b"/" for folder in shared[:depth])
        tops = sorted({name[len(before) :].partition(b"/")[0] for name in names if b"/" in name[len(before) :]})
        wanted = [top for top in tops if (readable(top) == part if part else readable(top).lower() in TRAINING_PARTS)]
        are_parts = all(readable(top).lower() in PARTS for top in tops) and (depth == 0 or len(tops) > 1)
        if len(wanted) == 1 and are_parts:
            others = [readable(top) for top in tops if top != wanted[0]]
            return before + wanted[0], tuple(sorted(others, key=lambda other: PARTS.index(other.lower())))
    return b"", ()


def training_part(names: Sequence[bytes], part: str) -> tuple[list[bytes], tuple[str, ...]]:
    """The names of a part ("": training), and the others; all names if they show no parts.

    Raises ``SourceInvalid`` if they show parts, but not the one that is asked for.
    """
    parts: dict[str, list[bytes]] = {}
    for name in names:
        words = [word.decode().lower() for word in _WORD.findall(name)]
        parts.setdefault(next((word for word in words if word in PARTS), ""), []).append(name)
    wanted = (part,) if part else TRAINING_PARTS
    chosen = [name for one in wanted for name in parts.get(one, ())]
    others = [one for one in PARTS if one in parts and one not in wanted]
    if part and others and not chosen:
        raise SourceInvalid(f"no file of the part {part} can be used")
    return (sorted(chosen), tuple(others)) if chosen and others else (list(names), ())


def training_files(files: FoundFiles, kind: type[SourceOptions]) -> tuple[list[bytes], tuple[str, ...], Path]:
    """A kind's files in the wanted part, the other parts, and the path of the first file."""
    names, others = training_part(of_kind(files, kind), files.part)
    return names, others, files.root / os.fsdecode(names[0])


# --- fields ---------------------------------------------------------------------------------------


def type_of(values: Sequence[object]) -> str | None:
    """The common type of the values, as users write it; None if there is none."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return "bool"
    if kinds and kinds <= {int, bool}:
        return "int64" if all(isinstance(value, int) and -(1 << 63) <= value < 1 << 63 for value in values) else None
    if kinds and kinds <= {int, float, bool}:
        if kinds != {float} and all(isinstance(value, (int, float)) and float(value).is_integer() for value in values):
            return type_of([int(value) for value in values if isinstance(value, (int, float))])
        return float_type([float(value) for value in values if isinstance(value, (int, float))])
    if kinds == {str}:
        return "text"
    if kinds == {bytes}:
        return _type_of_bytes([value for value in values if isinstance(value, bytes)])
    if kinds and kinds <= {list, tuple}:
        return _type_of_lists([value for value in values if isinstance(value, (list, tuple))])
    return None


def float_type(numbers: Iterable[float]) -> str:
    """The type of floats that keeps their whole parts: of large ones float32 does not."""
    return "float64" if any(abs(value) >= FLOAT32_WHOLE and isfinite(value) for value in numbers) else "float32"


def _type_of_lists(lists: Sequence[Sequence[object]]) -> str | None:
    """The type of lists of numbers, at any depth; None for others, and for ragged inner lists."""
    lengths = {len(values) for values in lists}
    length = str(lengths.pop()) if len(lengths) == 1 and lengths != {0} else "?"
    inner = [value for numbers in lists for value in numbers]
    if not inner:
        return None
    text = type_of(inner)
    number, bracket, shape = (text or "").partition("[")
    is_ragged = "?" in shape and any(
        len({len(value) for value in numbers if isinstance(value, list)}) > 1 for numbers in lists
    )
    if number not in ("bool", "int64", "float32", "float64") or is_ragged:
        return None
    return f"{number}[{length},{shape}" if bracket else f"{number}[{length}]"


def _type_of_bytes(values: Sequence[bytes]) -> str:
    try:
        if all(value.decode().isprintable() or value.decode().split() for value in values):
            return "text"
    except UnicodeDecodeError:
        pass
    is_image = all(image_format(value[:MAGIC_BYTES]) is not None for value in values)
    return "image" if is_image else "uint8[?]"


LIST_ROOM = 8
"""Images for which a list has room at least."""


def image_list(longest: int) -> str:
    """The type of lists of images of which one has so many: room for the next power of two."""
    return f"image[<={max(LIST_ROOM, 1 << (longest - 1).bit_length())}]"


def why_no_type(values: Sequence[object], count: int) -> str:
    """Why a key is no field, which has these values in ``count`` samples."""
    if len(values) < count:
        return f"missing or null in {count - len(values)} of {counted(count, 'sample')}"
    kinds = sorted({_KINDS.get(type(value), type(value).__name__) for value in values})
    if len(kinds) > 1:
        return f"of several kinds: {', '.join(kinds)}"
    if kinds == ["lists"] and not any(value for value in values):
        return "empty lists"
    if kinds == ["lists"] and is_chat(values):
        return CHATS
    if kinds != ["lists"]:
        return kinds[0]
    lists = [value for value in values if isinstance(value, (list, tuple))]
    if all(isinstance(text, str) for texts in lists for text in texts):
        return TEXT_LISTS
    return "lists of other things than numbers, or of different depth"


def is_chat(values: Iterable[object]) -> bool:
    """True if all are lists of messages: objects, each with a role or a sender."""
    turns = [turn for value in values for turn in (value if isinstance(value, (list, tuple)) else [value])]
    return bool(turns) and all(isinstance(turn, dict) and not _SENDERS.isdisjoint(turn) for turn in turns)


_SENDERS = {"role", "from"}
_KINDS = {dict: "objects", list: "lists", tuple: "lists", str: "texts", bool: "truths", type(None): "nulls"}
_KINDS |= {int: "numbers beyond int64", float: "numbers", bytes: "bytes"}


class NamedFields(NamedTuple):
    """Values of the options ``fields`` and ``names`` of a source."""

    fields: dict[str, str]
    names: dict[str, str]


def named_fields(
    types: Mapping[str, str], label: str | None = None, joined: Mapping[str, tuple[str, str]] = _NOTHING
) -> NamedFields:
    """Name the fields as the data does, but the image ``image`` and the label ``label``.

    ``label``: the label's name in the data, if the data declares one.
    """
    images = [title for title, text in types.items() if text == "image"]
    image = images[0] if images and "image" not in types else None
    label = label or label_in(types)
    fields: dict[str, str] = {}
    names: dict[str, str] = {}
    for title, text in types.items():
        name = "image" if title == image else "label" if title == label else field_name(title)
        while name in fields or (name != title and name in types):
            name += "_"
        fields[name] = text
        if name != title:
            names[name] = title
    for name, (text, pattern) in joined.items():
        fields[name], names[name] = text, pattern
    return NamedFields(fields, names)


def label_in(types: Mapping[str, str]) -> str | None:
    """The name of the integer field that is probably the label; None if there is none."""
    whole = [title for title, text in types.items() if text.startswith(("int", "uint")) and "[" not in text]
    last_words = {_last_word(title): title for title in reversed(whole)}
    return next((last_words[word] for word in _LABELS if word in last_words), None)


def is_label(title: str) -> bool:
    """True if a column of texts is probably the label by its name."""
    return _last_word(title) in (*_LABELS, *_TEXT_LABELS)


def _last_word(title: str) -> str:
    return re.split(r"[/.:]", title)[-1].lower()


def field_name(title: str) -> str:
    """A valid name of a field, made from ``title``."""
    name = re.sub(r"[^A-Za-z0-9_]+", "_", title).strip("_")[:60] or "field"
    return f"{name}_" if name in ("index", "valid") else f"_{name}" if name[0].isdigit() else name


class FoundFields(NamedTuple):
    """Types by name in the data, why other names are none, and what ``choose_fields`` takes."""

    types: dict[str, str]
    reasons: dict[str, str]
    exact: Collection[str] | None = None
    label: str | None = None


def values_by_name(records: Iterable[Iterable[tuple[str, object]]]) -> dict[str, list[object]]:
    """All values of each name, without nulls."""
    values: dict[str, list[object]] = {}
    for name, value in chain.from_iterable(records):
        values.setdefault(name, []).extend(() if value is None else (value,))
    return values


def common_fields(values: Mapping[str, Sequence[object]], count: int) -> FoundFields:
    """The fields that each of ``count`` records has, by the values of each name."""
    found = {name: type_of(those) for name, those in values.items() if len(those) == count}
    types = {name: text for name, text in found.items() if text is not None}
    return FoundFields(types, {name: why_no_type(those, count) for name, those in values.items() if name not in types})


def recognise_records(
    kind: type[ShardOptions], files: FoundFiles, found: FoundFields, noun: str, **options: object
) -> Recognised:
    """The source of a kind of records that reads the training files. ``noun``: a field in them."""
    names, others, _path = training_files(files, kind)
    chosen = choose_fields(found.types, found.reasons, found.exact, found.label)
    fields = named_fields(chosen.types, found.label, chosen.joined)._asdict()
    make: Callable[..., ShardOptions] = kind
    source = make(root=files.root, shards=patterns_of(files, names), **fields, **options)
    return Recognised(source, names, left_out_notes(noun, found.reasons), others=others)


class Chosen(NamedTuple):
    """What becomes fields: types by title, and several titles that are one field together.

    ``joined``: by the title that stands for the field, its type and the names of its columns.
    """

    types: dict[str, str]
    joined: dict[str, tuple[str, str]]


def choose_fields(
    types: Mapping[str, str], reasons: dict[str, str], exact: Collection[str] | None = None, label: str | None = None
) -> Chosen:
    """Join columns of numbers where there are many, and leave out what a batch has no room for.

    ``exact``: titles of whole numbers that float32 holds; None for a kind of source that joins
    nothing. Adds to ``reasons`` why titles are left out. ``label``: as in ``named_fields``.
    """
    label = label or label_in(types)
    boxes = [title for title, text in types.items() if text == "int64[?,4]" and _last_word(title) == "boxes"]
    types = {**types, **dict.fromkeys(boxes, "float32[?,4]")}
    numbers = [title for title, text in types.items() if text in _NUMBERS_JOINED and title != label]
    joined: dict[str, tuple[str, str]] = {}
    if len(numbers) > SINGLE_MAX and exact is not None:
        for titles in _groups(numbers):
            pattern = _pattern_of(titles)
            if pattern is not None:
                dtype = _common([types[title] for title in titles], all(title in exact for title in titles))
                name = "x" if "x" not in types and "x" not in joined else f"x_{len(joined)}"
                joined[name] = f"{dtype}[{len(titles)}]", pattern
                numbers = [title for title in numbers if title not in titles]
                types = {title: text for title, text in types.items() if title not in titles}
    first = sorted(types, key=lambda title: title != label and types[title] != "image")
    rooms = [2 if "?" in types[title] else 1 for title in first]
    kept = {
        title for title, end in zip(first, accumulate(rooms), strict=True) if end + len(joined) <= FIELDS_IN_A_BATCH
    }
    reasons |= {title: f"a batch has at most {FIELDS_IN_A_BATCH} fields" for title in types if title not in kept}
    return Chosen({title: text for title, text in types.items() if title in kept}, joined)


def _groups(titles: Sequence[str]) -> list[list[str]]:
    """Titles of numbers that belong together: with a common stem, and then all others."""
    stems: dict[str, list[str]] = {}
    for title in titles:
        stems.setdefault(_LAST_DIGITS.sub("", title), []).append(title)
    large = [those for those in stems.values() if len(those) > SINGLE_MAX]
    others = [title for title in titles if not any(title in those for those in large)]
    return [*large, *([others] if len(others) > SINGLE_MAX else [])]


def _pattern_of(titles: Sequence[str]) -> str | None:
    """Braces that stand for the titles, in their order; None if nothing does."""
    stem = _LAST_DIGITS.sub("", titles[0])
    ends = [title[len(stem) :] for title in titles]
    for pattern in (f"{stem}{{{ends[0]}..{ends[-1]}}}", f"{{{','.join(titles)}}}"):
        with suppress(ValueError):
            if resolve_braces(pattern) == list(titles):
                return pattern
    return None


def _common(types: Sequence[str], is_exact: bool) -> str:
    """The type that holds the numbers of all types."""
    if is_exact or all(text in _IN_FLOAT32 for text in types):
        return "float32"
    return types[0] if len(set(types)) == 1 else "int64" if not any("float" in text for text in types) else "float64"


def left_out_notes(what: str, reasons: Mapping[str, str]) -> tuple[str, ...]:
    """A note for each reason, with all the names that are left out for it."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return tuple(
        f"{counted(len(names), what)} left out, {reason}: {', '.join(names)}" for reason, names in by_reason.items()
    )
