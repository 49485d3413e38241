"""Recognise numpy's files. If arrays differ in length, it takes the most common length. CLI."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from batchd.data.sources.arrays.index import StoredArray
from batchd.data.sources.arrays.options import NpySource, NpzSource
from batchd.data.sources.arrays.scan import npy_arrays, npz_arrays
from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.sources.recognise import field_name, left_out_notes, of_kind, training_part
from batchd.data.storage.index import readable
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid

_LABEL, _IMAGE = re.compile(r"y|labels?|targets?", re.IGNORECASE), re.compile(r"x|images?|data", re.IGNORECASE)
_PART = re.compile(
    r"[_.-](train|training|val|valid|validation|test)|(train|training|val|valid|validation|test)[_.-]", re.IGNORECASE
)
_IMAGE_DIMENSIONS = (3, 4)
_Name = TypeVar("_Name", str, bytes)


def _recognise_npy(files: FoundFiles, survey: Survey) -> Recognised:
    names, others = training_part(of_kind(files, NpySource), files.part)
    arrays = {
        name: npy_arrays(NpySource(path=files.root / os.fsdecode(name)), survey.storage)["image"] for name in names
    }
    if len(arrays) == 1:
        field = _fields({readable(names[0]): arrays[names[0]]}).popitem()[0]
        return Recognised(NpySource(path=files.root / os.fsdecode(names[0]), field=field), names, others=others)
    same = _same_length(arrays)
    fields = _fields({readable(name): arrays[name] for name in same})
    reasons = {readable(name): _why_other(arrays[name], arrays[same[0]]) for name in names if name not in same}
    return Recognised(NpySource(root=files.root, arrays=fields), same, left_out_notes("array", reasons), others=others)


def _recognise_npz(files: FoundFiles, survey: Survey) -> Recognised:
    names, others = training_part(of_kind(files, NpzSource), files.part)
    if len(names) != 1:
        raise SourceInvalid(
            f"{files.root} has several archives: {', '.join(map(readable, names[:3]))}; name one of them"
        )
    path = files.root / os.fsdecode(names[0])
    arrays = npz_arrays(NpzSource(path=path), survey.storage)
    training, beside = training_part([os.fsencode(name) for name in arrays], files.part)
    training_names = list(map(os.fsdecode, training))
    same = _same_length({name: arrays[name] for name in training_names})
    fields = _fields({name: arrays[name] for name in same})
    reasons = {name: _why_other(arrays[name], arrays[same[0]]) for name in training_names if name not in same}
    rest = [name for name in arrays if name not in training_names and not any(part in name.lower() for part in beside)]
    reasons |= dict.fromkeys(rest, "of no part of the data set")
    source = NpzSource(path=path, arrays={} if fields == {name: name for name in arrays} else fields)
    return Recognised(source, names, left_out_notes("array", reasons), others=others + beside)


def _why_other(array: StoredArray, first: StoredArray) -> str:
    return f"{array.shape[0] if array.shape else 'no'} rows, and not {first.shape[0]}"


def _same_length(arrays: Mapping[_Name, StoredArray]) -> list[_Name]:
    """The names of the arrays with the most common number of samples."""
    (length, _count), *_others = Counter(array.shape[0] for array in arrays.values()).most_common()
    return [name for name, array in arrays.items() if array.shape[0] == length]


def _fields(arrays: Mapping[str, StoredArray]) -> dict[str, str]:
    """Field names by array: ``image`` and ``label`` if names and types show them, else its own."""
    fields: dict[str, str] = {}
    for name, array in arrays.items():
        bare = field_name(_PART.sub("", Path(name).stem) or Path(name).stem)
        is_picture = array.dtype.name == "uint8" and len(array.shape) in _IMAGE_DIMENSIONS
        if _IMAGE.fullmatch(bare) and is_picture:
            bare = "image"
        elif _LABEL.fullmatch(bare) and array.dtype.kind in "iu":
            bare = "label"
        fields[bare if bare not in fields else field_name(name)] = name
    return fields


RECOGNISE = {NpySource: _recognise_npy, NpzSource: _recognise_npz}
