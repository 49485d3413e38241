"""Patterns of file names: the paths of Python's ``glob``, without needless visits of folders."""

import glob
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.storage.patterns import ALTERNATIVES_MAX, Pattern, resolve_braces
from support.source_files import make

FILES = (
    "a.jpg", "b.png", ".hidden.jpg", "cat/1.jpg", "cat/2.JPG", "cat/deep/er/3.jpg", "cat/.secret/4.jpg", "dog/1.jpg",
    "dog/1.jpeg", "dog/ä.jpg", "dog/x[1].jpg", "owl/ya k/z.jpg",
)  # fmt: skip
NAMES = st.sampled_from(
    ["*", "**", "cat", "d*", "*.jpg", "?.jpg", "[ad]*", "[!c]*", "*.[jp]*", "deep", "er", ".*", "ä.jpg", "ya k"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Make files in folders, some of them hidden."""
    return make(tmp_path_factory.mktemp("glob"), *FILES)


def names(path: str) -> list[bytes]:
    return path.encode().split(b"/")


def matching(pattern: str) -> set[str]:
    return {file for file in FILES if Pattern(pattern).matches(names(file))}


@given(st.lists(NAMES, min_size=1, max_size=4))
def test_what_matches_is_what_globbing_finds(folder, parts) -> None:
    """The result contains the files that ``glob`` finds.

    ``**`` at the end means every file below; Python lists those with the folders.
    """
    pattern = "/".join(parts)
    found = {
        path
        for path in glob.glob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207  to be compared with
        if (folder / path).is_file()
    }
    assert matching(pattern) == found


@given(st.lists(NAMES, min_size=1, max_size=4))
def test_a_folder_is_skipped_only_where_nothing_below_it_matches(parts) -> None:
    """A folder that is visited could contain a matching file."""
    pattern = Pattern("/".join(parts))
    for file in FILES:
        if pattern.matches(names(file)):
            folders = names(file)[:-1]
            assert all(pattern.may_match_below(folders[:depth]) for depth in range(len(folders) + 1))


@pytest.mark.parametrize(
    ("pattern", "folder", "worth_it"),
    [
        ("cat/*.jpg", "dog", False),
        ("cat/*.jpg", "cat", True),
        ("cat/*.jpg", "cat/deep", False),
        ("**/*.jpg", "dog/any/thing", True),
        ("**/*.jpg", "dog/.git", False),
        ("cat/**", "cat/x/y", True),
        ("*/deep/**/*.jpg", "dog/shallow", False),
    ],
)
def test_the_search_goes_only_where_something_may_be(pattern, folder, worth_it) -> None:
    """A root may contain many other folders."""
    assert Pattern(pattern).may_match_below(names(folder)) is worth_it


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        ("a.jpg", ["a.jpg"]),
        ("*.{jpg,png}", ["*.jpg", "*.png"]),
        ("{a,b}/{c,d}.x", ["a/c.x", "a/d.x", "b/c.x", "b/d.x"]),
        ("a{,b}", ["a", "ab"]),
        ("t-{8..11}.tar", ["t-8.tar", "t-9.tar", "t-10.tar", "t-11.tar"]),
        ("{0000..0002}/{x,y}", ["0000/x", "0000/y", "0001/x", "0001/y", "0002/x", "0002/y"]),
        ("{5..5}{a..b}", ["5a..b"]),
    ],
)
def test_braces_stand_for_several_patterns(pattern, plain) -> None:
    """The alternatives keep the order in which they are written."""
    assert resolve_braces(pattern) == plain


@pytest.mark.parametrize("pattern", ["{a", "a}", "{a,{b,c}}", "a}{b", "{a}}"])
def test_braces_that_do_not_match_are_refused(pattern) -> None:
    """Unbalanced braces are errors, not literal characters."""
    with pytest.raises(ValueError, match="braces of"):
        resolve_braces(pattern)


@pytest.mark.parametrize(("pattern", "text"), [("{9..1}", "goes down"), ("{0..999999}", "more than 4096 numbers")])
def test_numbers_that_go_down_or_too_far_are_refused(pattern, text) -> None:
    """Otherwise such a range would match nothing, or too much."""
    with pytest.raises(ValueError, match=text):
        resolve_braces(pattern)


def test_braces_that_stand_for_too_much_are_refused_before_they_are_resolved() -> None:
    """Thirty groups of two alternatives would be a thousand million patterns."""
    with pytest.raises(ValueError, match=f"stand for {2**30} patterns, more than {ALTERNATIVES_MAX}"):
        resolve_braces("{a,b}" * 30)


@pytest.mark.parametrize("pattern", ["", "/etc/*", "../*", "a/../b", "a//b", "a/", "./a", "a**/b", "**.jpg"])
def test_what_leads_out_of_the_root_or_means_nothing_is_refused(pattern) -> None:
    """The error shows an example of a valid pattern."""
    with pytest.raises(ValueError, match=r"photos/\*\*/\*\.jpg"):
        Pattern(pattern)
