"""Recognise data: find the kind of source that reads the files of a place, and its options. CLI.

    place -- find_files --> FoundFiles -- each kind with such files --> Recognised: the most files

A kind has the ``endings`` of its files (``SourceOptions.endings``); ``recognise.py`` in its folder
looks into some of the files and returns the source that reads them. Files of other kinds are left
out, and reported. If names show which part of a data set a file belongs to ("train", "test"), the
source is the training part.

Invariant: a recogniser declares only fields that it found in the data; it reads at most the first
records of the first file.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from batchd.errors import SourceInvalid
from batchd.samples.formats import MAGIC_BYTES, image_format
from batchd.samples.location import Url
from batchd.sources.files.walk import Patterns, below, matching, walk
from batchd.sources.interface import FoundFiles, Recognised, recogniser_of
from batchd.sources.kinds import SOURCE_KINDS
from batchd.sources.options import SourceOptions
from batchd.storage.access import WantedNames
from batchd.storage.index import readable
from batchd.storage.paths import absent, unreachable
from batchd.storage.patterns import NameRule, Pattern, resolve_braces
from batchd.storage.survey import Survey
from batchd_wire.wording import counted

LOOKED_AT = 32
"""Number of records of a file that a recogniser reads."""
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
_TRAINING = {"train", "training"}
_PARTS = {*_TRAINING, "val", "valid", "validation", "test", "testing", "dev", "eval"}
_WORD = re.compile(rb"[A-Za-z]+")
_LABELS = ("label", "labels", "class", "class_id", "category", "category_id", "target", "fine_label", "y", "cls")
"""Names of integer fields that are labels, the likeliest first."""
_NAMES_SHOWN, _ENDINGS_SHOWN = 3, 6


class FoundSource(NamedTuple):
    """The result: a source, all files of the place, and the files that the source leaves out."""

    recognised: Recognised
    files: FoundFiles
    left_out: Sequence[bytes]


def recognise(path: Path, survey: Survey) -> FoundSource:
    """Find the source that reads the most files of a place. Raises ``SourceInvalid``."""
    files = find_files(path, survey)
    if not files.names:
        raise SourceInvalid(f"{path} has no files")
    found: list[Recognised] = []
    refused: list[tuple[int, SourceInvalid]] = []
    there = set(files.endings)
    for kind in SOURCE_KINDS.values():
        if there.isdisjoint(kind.endings):
            continue
        names = of_kind(files, kind)
        try:
            found.append(recogniser_of(kind)(files, survey))
        except (SourceInvalid, ValueError) as error:  # invalid options, such as a URL
            refused.append((len(names), SourceInvalid(str(error))))
    best = max(found, key=lambda one: len(one.names), default=None)
    if best is None:
        raise max(refused, key=lambda one: one[0])[1] if refused else _unknown(path, files)
    used = set(best.names)
    return FoundSource(best, files, [name for name in files.names if name not in used])


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
        finds = [each.format(quote(str(files.root)), *one) for one in zip(packed, commands, strict=True)]
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
        raise SourceInvalid(absent("file or folder", path))
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
    return [name for name, ending in zip(files.names, files.endings, strict=True) if ending in wanted]


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
    begin = readable(bytes(one for one, _other in same)).rstrip("0123456789")
    inside = {readable(folder) + "/" if folder else "" for folder in folders}
    first = {f"{folder.partition(b'/')[0].decode(errors='replace')}/**/" for folder in folders if folder}
    for folder in [*(inside if len(inside) == 1 else ()), "**/", *(first if len(first) == 1 else ())]:
        for text in (*([f"{folder}*{end}"] if end else ()), f"{folder}{begin}*{end}", f"{folder}{begin}*"):
            if _selects(text, files.names, names):
                return (text,)
    if len(names) > LOOKED_AT:
        raise SourceInvalid(
            f"{files.root}: no simple pattern selects only {endings_text(names)}; name one: batchd init 'FOLDER/PATTERN'"
        )
    return tuple(readable(name) for name in names)


def _selects(text: str, names: Sequence[bytes], wanted: Sequence[bytes]) -> bool:
    try:
        plain = [Pattern(one) for one in resolve_braces(text)]
    except ValueError:
        return False
    return [name for name in names if any(one.matches(name.split(b"/")) for one in plain)] == list(wanted)


def training_folder(names: Sequence[bytes]) -> tuple[bytes, str]:
    """(The training folder, a note) if all top folders are parts of a data set; else ("", "")."""
    tops = sorted({name.partition(b"/")[0] for name in names if b"/" in name})
    training = [top for top in tops if readable(top).lower() in _TRAINING]
    if len(training) != 1 or any(readable(top).lower() not in _PARTS for top in tops):
        return b"", ""
    others = [readable(top) for top in tops if top != training[0]]
    note = f"the part {readable(training[0])}; make streams of their own of {', '.join(others)}" if others else ""
    return training[0], note


def training_part(names: Sequence[bytes]) -> tuple[list[bytes], tuple[str, ...]]:
    """The names of the training part, and a note; all names if they show no parts."""
    parts: dict[str, list[bytes]] = {}
    for name in names:
        words = [word.decode().lower() for word in _WORD.findall(name)]
        parts.setdefault(next((word for word in words if word in _PARTS), ""), []).append(name)
    training = [name for part in _TRAINING for name in parts.get(part, ())]
    others = sorted(part for part in parts if part and part not in _TRAINING)
    if not training or not others:
        return list(names), ()
    return sorted(training), (f"the training part; make streams of their own of {', '.join(others)}",)


def training_files(files: FoundFiles, kind: type[SourceOptions]) -> tuple[list[bytes], tuple[str, ...], Path]:
    """The names of a kind's files in the training part, a note, and the path of the first file."""
    names, notes = training_part(of_kind(files, kind))
    return names, notes, files.root / os.fsdecode(names[0])


# --- fields ---------------------------------------------------------------------------------------


def type_of(values: Sequence[object]) -> str | None:
    """The common type of the values, as users write it; None if there is none."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return "bool"
    if kinds == {int}:
        return "int64"
    if kinds and kinds <= {int, float}:
        return "float32"
    if kinds == {str}:
        return "text"
    if kinds == {bytes}:
        return _type_of_bytes([value for value in values if isinstance(value, bytes)])
    if kinds and kinds <= {list, tuple}:
        lists = [value for value in values if isinstance(value, (list, tuple))]
        numbers = type_of([number for one in lists for number in one])
        if numbers not in ("bool", "int64", "float32"):
            return None
        lengths = {len(one) for one in lists}
        return f"{numbers}[{lengths.pop() if len(lengths) == 1 else '?'}]"
    return None


def _type_of_bytes(values: Sequence[bytes]) -> str:
    try:
        if all(value.decode().isprintable() or value.decode().split() for value in values):
            return "text"
    except UnicodeDecodeError:
        pass
    is_image = all(image_format(value[:MAGIC_BYTES]) is not None for value in values)
    return "image" if is_image else "uint8[?]"


class NamedFields(NamedTuple):
    """Values of the options ``fields`` and ``names`` of a source."""

    fields: dict[str, str]
    names: dict[str, str]


def named_fields(types: Mapping[str, str], label: str | None = None) -> NamedFields:
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
    return NamedFields(fields, names)


def label_in(types: Mapping[str, str]) -> str | None:
    """The name of the integer field that is probably the label; None if there is none."""
    whole = [title for title, text in types.items() if text.startswith(("int", "uint")) and "[" not in text]
    last_words = {re.split(r"[/.:]", title)[-1].lower(): title for title in reversed(whole)}
    return next((last_words[word] for word in _LABELS if word in last_words), None)


def field_name(title: str) -> str:
    """A valid name of a field, made from ``title``."""
    name = re.sub(r"[^A-Za-z0-9_]+", "_", title).strip("_")[:60] or "field"
    return f"{name}_" if name in ("index", "valid") else f"_{name}" if name[0].isdigit() else name


def left_out_note(what: str, titles: Sequence[str]) -> tuple[str, ...]:
    """A note that names the ``titles`` that are left out; empty without titles."""
    more = ", …" if len(titles) > _ENDINGS_SHOWN else ""
    return (f"{counted(len(titles), what)} left out: {', '.join(titles[:_ENDINGS_SHOWN])}{more}",) if titles else ()
