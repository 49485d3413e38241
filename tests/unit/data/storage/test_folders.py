"""Files are opened relative to their folders, never outside of the root."""

import errno
import os

import pytest

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.storage import reader
from batchd.data.storage.reader import Folders


@pytest.fixture
def root(tmp_path):
    """Two folders with a file each in a root, and a file outside."""
    for name in ("root/a/1", "root/b/1", "outside/1"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    return tmp_path / "root"


@pytest.fixture
def opened(root):
    opened = Folders(bytes(root))
    yield opened
    opened.close()


def content(opened, path):
    descriptor = opened.open(bytes(path))
    try:
        return os.read(descriptor, 100).decode()
    finally:
        os.close(descriptor)


def test_files_are_read_repeatedly(opened, root):
    """The first read uses the path, later ones the open folder."""
    assert [content(opened, root / name) for name in ("a/1", "b/1", "a/1", "a/1")] == [
        f"root/{name}" for name in ("a/1", "b/1", "a/1", "a/1")
    ]


@pytest.mark.parametrize("is_known", [False, True])
def test_a_link_that_leads_outside_is_refused(opened, root, is_known):
    """This holds for a link that has just replaced a file, in a folder that is open."""
    if is_known:
        content(opened, root / "a" / "1")
        content(opened, root / "a" / "1")
        (root / "a" / "1").unlink()
    (root / "a" / "link").symlink_to(root.parent / "outside" / "1")
    (root / "a" / "link").rename(root / "a" / "1")
    for _ in range(2):
        with pytest.raises(SampleUnreadable, match="leads out of the root"):
            content(opened, root / "a" / "1")


def test_a_link_that_stays_inside_is_followed(opened, root):
    """From then on, the other files of its folder are read by their paths."""
    content(opened, root / "a" / "1")
    (root / "a" / "2").symlink_to(root / "b" / "1")
    assert content(opened, root / "a" / "2") == "root/b/1"
    assert [content(opened, root / "a" / name) for name in ("2", "1", "2")] == ["root/b/1", "root/a/1", "root/b/1"]


def test_a_folder_that_becomes_a_link_leads_nowhere_else(opened, root):
    """The folder that was checked stays open.

    A link in its place is checked like any other.
    """
    content(opened, root / "a" / "1")
    (root / "a").rename(root / "old")
    (root / "a").symlink_to(root.parent / "outside")
    assert content(opened, root / "a" / "1") == "root/a/1"
    (root / "old" / "1").unlink()
    with pytest.raises(SampleUnreadable, match="leads out of the root"):
        content(opened, root / "a" / "1")


def test_a_folder_that_was_replaced_is_found(opened, root):
    """The result is that of its path."""
    content(opened, root / "a" / "1")
    (root / "a" / "1").unlink()
    (root / "a").rmdir()
    with pytest.raises(FileNotFoundError):
        content(opened, root / "a" / "1")
    (root / "a").mkdir()
    (root / "a" / "1").write_text("new")
    assert [content(opened, root / "a" / "1") for _ in range(2)] == ["new", "new"]


def test_more_folders_than_may_be_open_are_read_as_well(opened, root, monkeypatch):
    """The others are read by their paths."""
    monkeypatch.setattr(reader, "FOLDERS_MAX", 1)
    for _ in range(2):
        assert [content(opened, root / name / "1") for name in "ab"] == ["root/a/1", "root/b/1"]
    assert len(opened._open) == 1


def test_a_missing_descriptor_for_a_folder_is_no_fault_of_a_file(opened, root, monkeypatch):
    """The file is read by its path."""
    really = os.open

    def open_file(path, flags, *mode, **options):
        if flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, "Too many open files")
        return really(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", open_file)
    assert [content(opened, root / "a" / "1") for _ in range(2)] == ["root/a/1"] * 2


def test_without_a_bound_nothing_stays_open(root):
    """Without a root there is nothing to check."""
    opened = Folders(None)
    assert content(opened, root / "a" / "1") == content(opened, root / "a" / "1") == "root/a/1"
    assert not opened._open
