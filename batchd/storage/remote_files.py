"""Objects and folders of servers, as scans and checks see them. Daemon and CLI.

Invariant: a message names the URL as people wrote it, and what is wrong with it.
"""

from __future__ import annotations

from contextlib import contextmanager
from hashlib import sha256
from io import BufferedReader
from os import fsdecode, fsencode
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from batchd.errors import SourceInvalid
from batchd.storage.index import readable
from batchd.storage.local_files import FoundNames, WantedNames
from batchd.storage.location import Url
from batchd.storage.remote_stream import ObjectStream
from batchd.storage.values import (
    CHECK_LIMITS,
    Listing,
    ObjectUnreadable,
    Version,
    Wanted,
    Witness,
    listing_witness,
    object_witness,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batchd.storage.access import Storage
    from batchd.storage.survey import Survey

BUFFER_BYTES = 64 << 10


class RemoteFiles:
    """See ``LocalFiles``. ``storage`` has the client, which is made when the first URL is met."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def file_problems(self, file: Path, _what: str) -> list[str]:
        """See ``LocalFiles``, as far as a quick look tells."""
        return _problems(file, lambda: self._storage.client.head(str(file), CHECK_LIMITS.deadline_s))

    def folder_problems(self, folder: Path, *, is_listed: bool = False) -> list[str]:
        """See ``LocalFiles``, as far as a quick look tells."""

        def look() -> None:
            if is_listed:
                _refuse_listing(Url(folder))
            if Url(folder).can_list and not self._storage.client.holds_any(str(folder), CHECK_LIMITS.deadline_s):
                raise SourceInvalid(f"there is nothing in {folder}")

        return _problems(folder, look)

    def known_size(self, _file: Path) -> None:
        """See ``LocalFiles``: asking is a request."""

    @contextmanager
    def open(self, file: Path, survey: Survey) -> Iterator[BinaryIO]:
        """See ``LocalFiles``."""
        client, name = self._storage.client, str(file)
        try:
            version = client.head(name)
        except ObjectUnreadable as reason:
            raise _unreadable(name, reason) from None
        raw = ObjectStream(name, version.size, lambda start, size: client.read(Wanted(name, start, size, version)))
        survey.reads(file, object_witness(name, version), version)
        with BufferedReader(raw, BUFFER_BYTES) as stream:
            yield stream

    def look_at(self, _folder: bytes, _survey: Survey) -> None:
        """See ``LocalFiles``. Nothing is asked: a listing is its own witness, and no link leads here."""

    def names_in(self, folder: bytes, wanted: WantedNames, survey: Survey) -> FoundNames:
        """See ``LocalFiles``."""
        url = fsdecode(folder).rstrip("/")
        _refuse_listing(Url(url))
        try:
            found = self._storage.client.list_folder(url)
        except ObjectUnreadable as reason:
            raise _unreadable(url, reason) from None
        survey.add(_listed(url, found))
        folders, files = (
            [name for name in map(fsencode, names) if name and (wanted.hidden or not name.startswith(b"."))]
            for names in (found.folders, [name for name, _version in found.files])
        )
        return FoundNames(sorted(folders), sorted(filter(wanted.is_wanted, files)))

    def first_changed(self, witnesses: Sequence[Witness]) -> str:
        """See ``LocalFiles``."""
        objects = [one for one in witnesses if not one.is_listing]
        versions = self._storage.client.heads([one.path for one in objects]) if witnesses else []
        for one, version in zip(objects, versions, strict=True):
            if isinstance(version, ObjectUnreadable) or object_witness(one.path, version) != one:
                return one.path
        return next((one.path for one in witnesses if one.is_listing and not self._is_same_listing(one)), "")

    def look_at_each(self, urls: Sequence[str], survey: Survey) -> None:
        """See that objects which are named one by one are there. Raises ``SourceInvalid`` for the first that is not."""
        for url, version in zip(urls, self._storage.client.heads(urls), strict=True):
            if isinstance(version, ObjectUnreadable):
                raise _unreadable(url, version)
            survey.add(object_witness(url, version))

    def _is_same_listing(self, one: Witness) -> bool:
        url = one.path.removesuffix("/")
        try:
            return _listed(url, self._storage.client.list_folder(url)) == one
        except ObjectUnreadable:
            return False


def _problems(path: Path, look: Callable[[], object]) -> list[str]:
    """Why a look at an object or a folder fails; empty where it does not."""
    try:
        look()
    except ObjectUnreadable as reason:
        return [str(_unreadable(str(path), reason))]
    except SourceInvalid as problem:
        return [str(problem)]
    return []


def _refuse_listing(url: Url) -> None:
    """Raise ``SourceInvalid`` where the server cannot be asked what there is."""
    if not url.can_list:
        raise SourceInvalid(
            f"{url} cannot be listed: nobody can ask a server of {url.scheme} what it has. Name its files, in a list source, "
            'or as shards = ["train-{000..123}.tar"]'
        )


def _unreadable(url: str, reason: ObjectUnreadable) -> SourceInvalid:
    """What to raise where a server does not give what it should."""
    return SourceInvalid(f"{readable(fsencode(url))} cannot be read: {reason}")


def _listed(url: str, found: Listing) -> Witness:
    files: list[tuple[str, Version]] = sorted(found.files, key=lambda file: file[0])
    digest = sha256()
    for one in [*sorted(found.folders), None, *files]:
        digest.update(repr(one).encode("utf-8", "backslashreplace") + b"\0")
    return listing_witness(url, digest.hexdigest())
