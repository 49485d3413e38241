"""The table of possible URLs in docs/urls.md against the code: all keys that are paths."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import BaseModel, ValidationError

from batchd.config.tree import DaemonConfig, StreamConfig
from batchd.data.pipeline.options import STEP_KINDS
from batchd.data.sources.files.options import ListSource
from batchd.data.sources.interface import kind_of
from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.sources.options import SOURCE_KINDS
from batchd.data.sources.video.options import VideoSource
from batchd.data.storage.access import Storage
from support.s3_server import CREDENTIALS

PAGE = Path(__file__).parents[3] / "docs/urls.md"
NOT_HERE = "must be a path on this machine, not a URL"
CANNOT_LIST = "http servers cannot list files"
NO_SERVER = "127.0.0.1:1"
ROW = re.compile(r"^\| (yes|no|named files) \| (yes|no) \| (.+) \|$", re.MULTILINE)
KEYS = re.compile(r"`([^`]+)`: ((?:`\w+`(?:, )?)+)")
FIELDS = {"x": "int64"}
HERE = Path("/here")
BESIDES: dict[tuple[str, str], dict[str, Any]] = {
    ("folder", "path"): {},
    ("list", "path"): {},
    ("list", "root"): {"path": HERE},
    ("glob", "root"): {"patterns": ("*",)},
    ("webdataset", "root"): {"shards": ("*",)},
    ("tfrecord", "root"): {"shards": ("*",), "fields": FIELDS},
    ("parquet", "root"): {"shards": ("*",), "fields": FIELDS},
    ("csv", "path"): {"fields": FIELDS},
    ("csv", "root"): {"files": ("*",), "fields": FIELDS},
    ("csv", "image_root"): {"path": HERE, "image": "file"},
    ("jsonl", "root"): {"shards": ("*",), "fields": FIELDS},
    ("jsonl", "image_root"): {"root": HERE, "shards": ("a",), "fields": FIELDS},
    ("coco", "path"): {"images": HERE},
    ("coco", "images"): {"path": HERE},
    ("coco", "segments"): {"path": HERE, "images": HERE, "fields": ("image", "segments")},
    ("pairs", "root"): {"fields": {"image": "image"}, "files": {"image": "*.jpg"}},
    ("yolo", "root"): {"images": "*.jpg"},
    ("voc", "root"): {},
    ("npy", "path"): {},
    ("npy", "root"): {"arrays": {"x": "x.npy"}},
    ("npz", "path"): {},
    ("raw", "path"): {"record": FIELDS},
    ("raw", "root"): {"files": ("*",), "record": FIELDS},
    ("tokens", "path"): {"dtype": "uint16", "length": 8},
    ("tokens", "root"): {"files": ("*",), "dtype": "uint16", "length": 8},
    ("subset", "indices"): {"of": ListSource(path=HERE)},
    ("lmdb", "path"): {"fields": FIELDS},
    ("video", "root"): {"files": ("*",)},
    ("lerobot", "root"): {},
    ("tokenize", "file"): {"max_length": 8},
    ("chat", "tokenizer"): {"template": "chatml", "max_length": 8},
    ("chat", "template"): {"tokenizer": HERE, "max_length": 8},
    ("remove_stopwords", "file"): {},
    ("lookup", "words"): {"table": HERE, "max_words": 8},
    ("lookup", "table"): {"words": HERE, "max_words": 8},
    ("map_ids", "file"): {},
    ("add_noise", "root"): {},
    ("room", "root"): {},
}
"""The options needed besides the path; the pattern "*" needs a search for names."""


def is_path(hint: Any) -> bool:
    """Return whether the type is that of a path, or contains one."""
    return hint is Path or any(map(is_path, get_args(hint)))


def options_with_paths() -> Iterator[tuple[str, str, Any]]:
    """Each option of a source or step that is a path: kind, key, and the class of the options."""
    for name, kind in {**SOURCE_KINDS, **STEP_KINDS}.items():
        hints = get_type_hints(kind)
        yield from ((name, one.name, kind) for one in fields(kind) if is_path(hints[one.name]))


def answer(name: str, key: str, kind: Any, url: str, storage: Storage) -> str:
    """The code's answer to a URL, in the words of the table."""
    besides = BESIDES[name, key]
    try:
        source = kind(**besides, **{key: Path(url)})
    except ValueError as refusal:
        return "no" if NOT_HERE in str(refusal) else str(refusal)
    assert name in SOURCE_KINDS, "a step reads no URL"
    cannot_list = any(CANNOT_LIST in str(problem) for problem in kind_of(source).problems(source, storage))
    if not cannot_list:
        return "yes"
    return "named files" if any(value == ("*",) for value in besides.values()) else "no"


def refused_by(branch: type[BaseModel]) -> Iterator[str]:
    """Yield the keys of a configuration table that are paths, after each refused a URL."""
    for key, field in branch.model_fields.items():
        if key == "source" or not is_path(field.annotation):
            continue
        url = Path("s3://bucket/x")
        with pytest.raises(ValidationError) as refusal:
            branch.model_validate({key: (url,) if "tuple" in str(field.annotation) else url})
        assert [NOT_HERE in one["msg"] for one in refusal.value.errors() if one["loc"][0] == key] == [True]
        yield key


def test_the_table_of_urls_is_what_the_code_takes(monkeypatch: pytest.MonkeyPatch, storage: Storage) -> None:
    """The table has every key that is a path, and no other key."""
    for variable, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{NO_SERVER}"}.items():
        monkeypatch.setenv(variable, value)
    said = {
        (name, key): (http, bucket)
        for http, bucket, places in ROW.findall(PAGE.read_text())
        for name, keys in KEYS.findall(places)
        for key in re.findall(r"\w+", keys)
    }
    found = {
        (name, key): tuple(answer(name, key, kind, url, storage) for url in (f"http://{NO_SERVER}/x", "s3://bucket/x"))
        for name, key, kind in options_with_paths()
    }
    for name, branch in (("[daemon]", DaemonConfig), ("[streams.NAME]", StreamConfig)):
        found |= {(name, key): ("no", "no") for key in refused_by(branch)}
    assert said == found


def test_gs_is_treated_as_s3_and_https_as_http() -> None:
    """The table has one column for both schemes."""
    kinds = [(name, key, kind) for name, key, kind in options_with_paths() if name in SOURCE_KINDS]
    for name, key, kind in kinds:
        refusals = []
        for url in ("http://host/x", "https://host/x", "s3://host/x", "gs://host/x"):
            try:
                kind(**BESIDES[name, key], **{key: Path(url)})
            except ValueError as refusal:
                refusals.append(str(refusal))
        assert len(refusals) in (0, 4)


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        (lambda: VideoSource(root=Path("s3://bucket/x"), files=("*",)), "copy the videos to this machine, or mount"),
        (lambda: LmdbSource(path=Path("https://host/x"), fields=FIELDS), "copy the database to this machine"),
    ],
)
def test_what_needs_files_says_what_to_do(source: Any, advice: str) -> None:
    """The message proposes what to do instead."""
    with pytest.raises(ValueError, match=f"{NOT_HERE}: .*{advice}"):
        source()
