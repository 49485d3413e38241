"""Sources of files that match patterns: the files, their order, labels and paths."""

import os
from pathlib import Path

import pytest

from batchd.data.sources.files.options import GlobSource
from batchd.data.sources.files.scan import KINDS
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import SourceInvalid
from support.source_files import make, nothing, scan_files


def scan(root: Path, *patterns: str, **changes: object):
    """Return the index of a glob source."""
    return scan_files(GlobSource(root=root, patterns=patterns, **changes))


def names_of(index) -> list[str]:
    return [index.name(sample).decode() for sample in range(len(index))]


def test_matching_files_are_listed_once_folder_by_folder(tmp_path) -> None:
    """Several patterns may find the same file; the order of patterns has no effect."""
    make(tmp_path, "b/2.jpg", "b/10.jpg", "a/x/1.jpg", "a/1.png", "a/note.txt", "c.jpg", "a-b/0.jpg")
    expected = ["c.jpg", "a/1.png", "a-b/0.jpg", "a/x/1.jpg", "b/10.jpg", "b/2.jpg"]

    for patterns in (["**/*.{jpg,png}"], ["b/*", "**/*.jpg", "a/*.png"], ["*/*.png", "**/*.jpg", "**/*.png"]):
        index = scan(tmp_path, *patterns)
        assert names_of(index) == expected
        assert index.labels.tolist() == [0] * 6
        assert index.class_names == ("",)


def test_the_pattern_alone_selects_a_file_not_its_ending(tmp_path) -> None:
    """A pattern that names a file includes it."""
    make(tmp_path, "a.tiff", "b", "c.jpg")

    assert names_of(scan(tmp_path, "*")) == ["a.tiff", "b", "c.jpg"]


def test_hidden_files_match_only_patterns_with_the_dot(tmp_path) -> None:
    """A shell does the same."""
    make(tmp_path, ".a.jpg", "b.jpg", ".cache/c.jpg")

    assert names_of(scan(tmp_path, "**/*.jpg")) == ["b.jpg"]
    assert names_of(scan(tmp_path, ".*", ".cache/*")) == [".a.jpg", ".cache/c.jpg"]


def test_labels_may_be_the_sorted_folders(tmp_path) -> None:
    """Only folders with a matching file get a label."""
    make(tmp_path, "train/owl/1.jpg", "train/cat/1.jpg", "train/cat/2.jpg", "train/none/x.txt", "train/cat/big/3.jpg")

    index = scan(tmp_path, "train/**/*.jpg", classes="folder")

    assert index.class_names == ("train/cat", "train/cat/big", "train/owl")
    assert dict(zip(names_of(index), index.labels.tolist(), strict=True)) == {
        "train/cat/1.jpg": 0,
        "train/cat/2.jpg": 0,
        "train/cat/big/3.jpg": 1,
        "train/owl/1.jpg": 2,
    }


def test_folders_that_cannot_match_are_not_opened(tmp_path) -> None:
    """A link to itself, or a folder without permission, would otherwise be an error."""
    make(tmp_path, "photos/1.jpg", "other/x.jpg")
    (tmp_path / "other/loop").symlink_to(tmp_path / "other")

    assert names_of(scan(tmp_path, "photos/**")) == ["photos/1.jpg"]
    with pytest.raises(SourceInvalid, match="is a link to a folder that it lies in"):
        scan(tmp_path, "**")


def test_patterns_without_a_match_are_an_error_that_names_them(tmp_path) -> None:
    """The error names the folder, too."""
    make(tmp_path, "a.png")

    with pytest.raises(SourceInvalid, match=rf"no file below {tmp_path} matches '\*\.jpg', 'b/\*'"):
        scan(tmp_path, "*.jpg", "b/*")


@pytest.mark.parametrize("pattern", ["/a", "../a", "{a", "a**"])
def test_wrong_patterns_are_found_without_opening_any_file(tmp_path, pattern) -> None:
    """`batchd check` and the start of the daemon report them."""
    source = GlobSource(root=tmp_path, patterns=("*.jpg", pattern))

    (problem,) = KINDS[GlobSource].problems(source, Storage())
    assert problem.startswith("patterns: ")
    with pytest.raises(SourceInvalid, match="patterns: "):
        scan_source(source, nothing, IndexCache(None), Storage())


def test_a_missing_root_is_named(tmp_path) -> None:
    """A root that is a file is named, too."""
    make(tmp_path, "file")

    assert KINDS[GlobSource].problems(GlobSource(root=tmp_path / "no", patterns=("*",)), Storage()) == [
        f"there is no folder {tmp_path / 'no'}"
    ]
    assert KINDS[GlobSource].problems(GlobSource(root=tmp_path / "file", patterns=("*",)), Storage()) == [
        f"{tmp_path / 'file'} is not a folder"
    ]


def test_a_path_that_does_not_fit_into_its_field_is_refused_by_name(tmp_path) -> None:
    """The path is not cut."""
    make(tmp_path, "short.jpg", "folder/longer.jpg")

    assert len(scan(tmp_path, "**/*.jpg", path_bytes=len("folder/longer.jpg"))) == 2
    with pytest.raises(SourceInvalid, match=r"the path folder/longer\.jpg has 17 bytes, more than path_bytes = 16"):
        scan(tmp_path, "**/*.jpg", path_bytes=16)


def test_names_that_are_no_text_are_matched_and_kept(tmp_path) -> None:
    """A name can have any bytes."""
    raw = os.path.join(os.fsencode(tmp_path), b"\xff\xfe.jpg")  # noqa: PTH118
    with open(raw, "wb"):  # noqa: PTH123
        pass

    index = scan(tmp_path, "??.jpg")
    assert [index.name(0), index.file(0)] == [b"\xff\xfe.jpg", raw]


@pytest.mark.parametrize("changes", [{"patterns": ()}, {"path_bytes": -1}, {"path_bytes": 4097}, {"root": Path()}])
def test_invalid_settings_are_refused(changes) -> None:
    """The error has the name of the key."""
    with pytest.raises(ValueError, match=next(iter(changes))):
        GlobSource(**{"root": Path("/a"), "patterns": ("*",)} | changes)
