"""URLs in place of paths: how they are written, joined and rejected."""

import os
from pathlib import Path

import pytest

from batchd.config.load import load_config
from batchd.data.pipeline.text.options import RemoveStopwords
from batchd.data.samples.location import Url
from batchd.data.sources.arrays.options import NpySource
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.files.options import FolderSource, ListSource
from batchd.data.sources.options import source_from_plain, source_to_plain
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.errors import ConfigInvalid


@pytest.mark.parametrize(
    "text", ["s3://bucket", "s3://bucket/a b/é?#%", "gs://bucket/x", "http://[::1]:80/a", "https://host:8443/a/b.csv"]
)
def test_a_url_is_written_as_it_was_and_joined_like_a_path(text: str) -> None:
    """The two slashes are not merged by pathlib, and the parts and the parent are URLs, too."""
    root = FolderSource(path=Path(text)).path

    assert str(root) == os.fspath(root) == text
    assert os.fsencode(root / "x/y.tar") == os.fsencode(f"{text}/x/y.tar")
    assert str((root / "x").parent) == text
    assert str(root.absolute()) == text
    assert isinstance(root / "x", Url)


def test_a_source_of_urls_survives_plain_data() -> None:
    """Each path of the source is still the same URL."""
    source = CsvSource(path=Path("https://host/t.csv"), image="file", image_root=Path("s3://bucket/photos"))

    assert source_to_plain(source)["image_root"] == "s3://bucket/photos"
    assert source_from_plain(source_to_plain(source)) == source
    assert (source.place, str(source.image_root)) == ("https://host/t.csv", "s3://bucket/photos")


def test_other_paths_stay_what_they_are() -> None:
    """Absolute paths, relative paths and a path with a colon stay paths."""
    for text in ("/data/s3:/bucket", "data/train", "s3:bucket", "a:/b"[:2]):
        path = FolderSource(path=Path(text)).path
        assert (type(path), str(path)) == (type(Path()), text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://host/a", "path is a URL of the scheme ftp, and http, https, s3, gs are what can be read"),
        ("file:///a", "path is a URL of the scheme file"),
        ("s3://key:secret@bucket/a", "path must hold no user and no password; credentials come from the environment"),
        ("https://host/a?X-Amz-Signature=secret", r"path must not hold '\?': a URL names a file, without a query"),
        ("https://host/a#b", "path must not hold '#'"),
        ("https://host/a%20b", "path must not hold '%'.*its characters are written as they are"),
    ],
)
def test_urls_that_cannot_be_read_or_hold_secrets_are_refused(text: str, message: str) -> None:
    """No error message repeats the secret."""
    with pytest.raises(ValueError, match=message) as refusal:
        ListSource(path=Path(text))
    assert "secret" not in str(refusal.value)


def test_urls_in_a_file_are_not_relative_to_it(tmp_path: Path) -> None:
    """A URL is not relative to the file, nor to the current directory if it comes from outside."""
    file = tmp_path / "batchd.toml"
    file.write_text(
        '[streams.a]\nsource = { type = "webdataset", root = "s3://b/c", shards = ["*"] }\nbatch_size = 1\n'
    )

    source = load_config(file, {}, {}).streams["a"].source
    assert isinstance(source, WebDatasetSource)
    assert str(source.root) == "s3://b/c"
    changed = load_config(file, {"streams.a.source.root": "https://host/d"}, {}).streams["a"].source
    assert changed.place == "https://host/d: *"


def test_what_has_to_be_on_this_machine_is_no_url(tmp_path: Path) -> None:
    """Directories of the daemon and files of steps must be local paths."""
    file = tmp_path / "batchd.toml"
    file.write_text(
        '[daemon]\nruntime_dir = "s3://b/c"\n[streams.a]\nsource = { type = "folder", path = "." }\nbatch_size = 1\n'
    )

    with pytest.raises(ConfigInvalid, match="must be a path on this machine, not a URL"):
        load_config(file, {}, {})
    with pytest.raises(ValueError, match="file must be a path on this machine, not a URL"):
        RemoveStopwords(file=Path("https://host/words.txt"))


def test_arrays_below_a_url_are_urls() -> None:
    """Each array has a URL with the name that the source gives it."""
    source = NpySource(root=Path("s3://b"), arrays={"image": "x.npy", "label": "d/y.npy"})

    assert [str(path) for path in source.paths().values()] == ["s3://b/x.npy", "s3://b/d/y.npy"]
