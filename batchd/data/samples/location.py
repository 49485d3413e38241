"""Locations of a source's files: paths, or URLs instead of paths. Daemon, workers and CLI.

    /data/train                      a path of files
    https://host/train/a.csv         a server that knows range requests; nothing can be listed there
    s3://bucket/train  gs://…        a bucket, whose names have folders as far as users see

``Path`` turns two slashes into one, so a URL has a path class of its own, which joins and divides
like any other and is written as users write it. Standard library only.

Invariant: a URL holds no secret: user names, passwords, and queries, which may hold signatures, are
refused.
"""

import re
from pathlib import Path, PosixPath

SCHEMES = ("http", "https", "s3", "gs")
URL_BEGINNINGS = tuple(f"{scheme}://".encode() for scheme in SCHEMES)
_WRITTEN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COLLAPSED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(?=[^/])")


class Url(PosixPath):
    """A URL in the place of a path. It is never passed to the file system."""

    __slots__ = ()

    def __str__(self) -> str:
        return _COLLAPSED.sub(r"\1://", super().__str__(), count=1)

    def __fspath__(self) -> str:
        return str(self)

    def absolute(self) -> "Url":
        """The URL itself: it is always complete."""
        return self

    @property
    def scheme(self) -> str:
        """The part before the colon."""
        return str(self).partition(":")[0]

    @property
    def can_list(self) -> bool:
        """True if the server can list files: buckets can."""
        return self.scheme in ("s3", "gs")


def is_url(path: bytes) -> bool:
    """True for the URL of an object, false for the path of a file."""
    return path.startswith(URL_BEGINNINGS)


def looks_like_url(text: str) -> bool:
    """True for a URL of any scheme."""
    return _WRITTEN.match(text) is not None


def check_local(name: str, path: Path, advice: str = "") -> None:
    """Raise ``ValueError``, with ``advice``, for a URL: only a path of this machine is allowed."""
    if not path.is_absolute() and _COLLAPSED.match(str(path)):
        raise ValueError(f"{name} must be a path on this machine, not a URL{advice and f': {advice}'}")


def as_location(name: str, path: Path) -> Path:
    """The path, as a ``Url`` if it is one. Raises ``ValueError`` for a URL that cannot be used."""
    if isinstance(path, Url) or path.is_absolute():
        return path
    found = _COLLAPSED.match(str(path))
    if found is None:
        return path
    url = Url(path)
    scheme, rest = found[1], str(path)[found.end() :]
    if scheme not in SCHEMES:
        raise ValueError(f"{name} is a URL of the scheme {scheme}, and {', '.join(SCHEMES)} are what can be read")
    if "@" in rest.partition("/")[0]:
        raise ValueError(f"{name} must hold no user and no password; credentials come from the environment")
    if not url.can_list and (odd := next((one for one in "?#%" if one in rest), None)):
        raise ValueError(
            f"{name} must not hold {odd!r}: a URL names a file, without a query, and its characters are written as they are"
        )
    return url


def check_path(name: str, path: Path, advice: str = "") -> None:
    """Raise ``ValueError`` for an impossible path, and for a URL, with ``advice``."""
    check_written(name, path)
    check_local(name, path, advice)


def check_written(name: str, path: Path) -> None:
    """Raise ``ValueError`` for an empty path, which would be the current directory, and a NUL."""
    if not path.parts:
        raise ValueError(f"{name} must not be empty")
    if "\0" in str(path):
        raise ValueError(f"{name} must not hold the character NUL")
