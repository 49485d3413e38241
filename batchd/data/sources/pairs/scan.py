"""Find files that belong together by their names. Daemon.

    images/*/*.jpg      images/aachen/7.jpg      aachen, 7    a sample, if each field has a file of
    masks/*/*_ids.png   masks/aachen/7_ids.png   aachen, 7    the same texts for the stars

    names      uint8 [bytes]    paths of the first field below the root, one right after the other
    offsets    int64 [n + 1]    of sample i: names[offsets[i]:offsets[i + 1]]
    1.names, 1.offsets, …       the same of the second field and so on; empty where there is no file

Samples are in the order of the first field's paths.

Invariant: what has no counterpart is noted, and a file belongs to one sample.
"""

import os
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchd.data.sources.files.walk import below, matching, patterns_problems
from batchd.data.sources.finding import FilePattern, NamedSamples
from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.neighbours import in_order
from batchd.data.sources.pairs.options import ANY, ObjectsOptions, PairedOptions, PairsSource, VocSource, YoloSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, blob, number_array, readable
from batchd.data.storage.patterns import resolve_braces
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd_wire.views import Array

_ANY = {"*": "([^/]*)", "**/": "((?:[^/]+/)*)"}
_WORDS_MAX = 1 << 26
"""Bytes of the list of a part."""


def _scan(source: PairedOptions, survey: Survey) -> SourceIndex:
    first, *others = source.patterns
    found = _found(source, first, survey)
    columns = {first: found}
    for name in others:
        try:
            columns[name] = _found(source, name, survey)
        except SourceInvalid:
            if name not in source.may_miss:
                raise
            columns[name] = {}
    keys = _of_part(source, list(found), survey)
    for name in others:
        there = columns[name]
        _note(survey, f"files of {name} without one of {first}", [there[key] for key in there.keys() - found.keys()])
        if name not in source.may_miss:
            _note(survey, f"files of {first} without one of {name}", [found[key] for key in keys if key not in there])
            keys = [key for key in keys if key in there]
    if not keys:
        examples = [readable(next(iter(those.values()))) for those in columns.values() if those]
        raise SourceInvalid(
            f"{source.root}: no file of {first} has those of {', '.join(others)}, whose names differ in another way: "
            f"{', '.join(examples)}"
        )
    arrays: dict[str, Array] = {}
    for place, those in enumerate(columns.values()):
        paths = [those.get(key, b"") for key in keys]
        prefix = f"{place}." if place else ""
        arrays[f"{prefix}names"] = np.frombuffer(b"".join(paths), np.uint8)
        arrays[f"{prefix}offsets"] = number_array(np.cumsum([0, *map(len, paths)], dtype=np.int64))
    if isinstance(source, ObjectsOptions):
        arrays["classes"] = blob([name.encode() for name in source.names])
    facts = {"fields": [[column.name, column.text] for column in source.columns]}
    return SourceIndex.build(len(keys), facts, arrays, {"root": os.fsdecode(source.root.absolute()), **survey.place()})


def _found(source: PairedOptions, field: str, survey: Survey) -> dict[bytes, bytes]:
    """The files of a field, by what stands for the stars of its pattern."""
    wanted = source.patterns_of(field)
    forms = [_form(plain) for text in wanted.texts for plain in resolve_braces(text)]
    found: dict[bytes, bytes] = {}
    for folder, names in matching(wanted, survey):
        for name in names:
            path = below(folder, name)
            stars = next((match.groups() for form in forms if (match := form.fullmatch(path))), None)
            assert stars is not None, f"{path!r} matches a pattern"
            other = found.setdefault(b"\0".join(stars), path)
            if other != path:
                raise SourceInvalid(
                    f"{source.root}: {readable(other)} and {readable(path)} are both files of {field} of one sample; "
                    "let its pattern match one of them"
                )
        survey.progress(len(found))
    return found


def _form(plain: str) -> re.Pattern[bytes]:
    """A pattern without braces as a regular expression with a group for each star."""
    parts = ANY.split(plain)
    stars = [_ANY[star] for star in ANY.findall(plain)]
    text = "".join(re.escape(part) + star for part, star in zip(parts, [*stars, ""], strict=True))
    return re.compile(os.fsencode(text), re.DOTALL)


def _of_part(source: PairedOptions, keys: Sequence[bytes], survey: Survey) -> list[bytes]:
    """The samples of the part that is wanted, in the order of the keys."""
    if not isinstance(source, VocSource) or source.part is None:
        return list(keys)
    path = source.root / source.part
    with survey.open(path) as stream:
        words = stream.read(_WORDS_MAX).splitlines()
    wanted = {word.split()[0] for word in words if word.strip()}
    there = {key.rpartition(b"\0")[2]: key for key in keys}
    if absent := wanted - there.keys():
        raise SourceInvalid(f"{path} names {readable(min(absent))}, and no file of {source.images} is called so")
    return [key for key in keys if key.rpartition(b"\0")[2] in wanted]


def _note(survey: Survey, what: str, paths: Sequence[bytes]) -> None:
    if paths:
        survey.note(f"{what}, which are left out", readable(min(paths)), count=len(paths))


def _problems(source: PairedOptions, storage: Storage) -> list[str]:
    needed = [field for field in source.patterns if field not in source.may_miss]
    return next(filter(None, (patterns_problems(source.patterns_of(field), storage) for field in needed)), [])


def _find(_source: PairedOptions, index: SourceIndex, pattern: FilePattern) -> NDArray[np.int64]:
    before = os.fsencode(index.place["root"]).rstrip(b"/") + b"/"
    return NamedSamples(index.arrays["offsets"], index.arrays["names"], before).find(pattern)


KINDS = dict.fromkeys(
    (PairsSource, YoloSource, VocSource),
    BuiltInKind(
        problems=_problems,
        scan=_scan,
        neighbours=lambda _source, index: in_order(index, "each sample is a file, and the index has no sizes of files"),
        labels=lambda _source, _index: None,
        find=_find,
    ),
)
