"""What a scan does with URLs: open objects, list folders of buckets, and see whether they are what they were. Daemon and CLI.

Invariant: a message names the URL as people wrote it, and what is wrong with it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from io import BufferedReader
from os import fsdecode, fsencode
from typing import BinaryIO

from batchd.errors import SourceInvalid
from batchd.storage import access as storage
from batchd.storage.access import CHECK_LIMITS, ObjectUnreadable, Version, Wanted
from batchd.storage.index import readable
from batchd.storage.location import Url
from batchd.storage.remote_stream import ObjectStream
from batchd.storage.survey import Survey, Witness, listing_witness, object_witness

BUFFER_BYTES = 64 << 10


@contextmanager
def opened(url: Url, survey: Survey) -> Iterator[BinaryIO]:
    """An object, open for a scan, and among what the survey saw. Raises ``SourceInvalid`` where it cannot be read."""
    client, name = storage.client(), str(url)
    try:
        version = client.head(name)
    except ObjectUnreadable as reason:
        raise unreadable_object(name, reason) from None
    survey.read_object(name, version)
    raw = ObjectStream(name, version.size, lambda start, size: client.read(Wanted(name, start, size, version)))
    with BufferedReader(raw, BUFFER_BYTES) as stream:
        yield stream


def unreadable_object(url: str, reason: ObjectUnreadable) -> SourceInvalid:
    """What to raise where a server does not give what it should."""
    return SourceInvalid(f"{readable(fsencode(url))} cannot be read: {reason}")


def list_folder(folder: bytes, survey: Survey) -> tuple[list[bytes], list[bytes]]:
    """The names of the folders and files in a folder of a bucket. Raises ``SourceInvalid``."""
    url = fsdecode(folder).rstrip("/")
    refuse_listing(Url(url))
    try:
        found = storage.client().list_folder(url)
    except ObjectUnreadable as reason:
        raise unreadable_object(url, reason) from None
    survey.saw_listing(url, _digest(found.folders, found.files))
    return [fsencode(name) for name in found.folders if name], [fsencode(name) for name, _ in found.files if name]


def refuse_listing(url: Url) -> None:
    """Raise ``SourceInvalid`` where nobody can ask what there is."""
    if not url.can_list:
        raise SourceInvalid(
            f"{url} cannot be listed: nobody can ask a server of {url.scheme} what it has. Name its files, in a list source, "
            'or as shards = ["train-{000..123}.tar"]'
        )


def check_objects(urls: Sequence[str], survey: Survey) -> None:
    """See that objects which are named are there. Raises ``SourceInvalid`` for the first that is not."""
    for url, version in zip(urls, storage.client().heads(urls), strict=True):
        if isinstance(version, ObjectUnreadable):
            raise unreadable_object(url, version)
        survey.saw_object(url, version)


def object_problems(url: Url) -> list[str]:
    """What is wrong with an object, as far as a quick look tells."""
    try:
        storage.client().head(str(url), CHECK_LIMITS.deadline_s)
    except ObjectUnreadable as reason:
        return [str(unreadable_object(str(url), reason))]
    except SourceInvalid as problem:
        return [str(problem)]
    return []


def bucket_problems(url: Url) -> list[str]:
    """What is wrong with a folder of a bucket, as far as a quick look tells; none where nobody can ask."""
    try:
        if url.can_list and not storage.client().holds_any(str(url), CHECK_LIMITS.deadline_s):
            return [f"there is nothing in {url}"]
    except ObjectUnreadable as reason:
        return [str(unreadable_object(str(url), reason))]
    except SourceInvalid as problem:
        return [str(problem)]
    return []


def first_changed(witnesses: Iterable[Witness]) -> str:
    """The first object or folder that is not what it was, or cannot be looked at; "" where all are the same."""
    seen = list(witnesses)
    objects = [one for one in seen if not one.is_listing]
    versions = storage.client().heads([one.path for one in objects])
    for one, version in zip(objects, versions, strict=True):
        if isinstance(version, ObjectUnreadable) or object_witness(one.path, version) != one:
            return one.path
    for one in seen:
        if one.is_listing and not _is_same_listing(one):
            return one.path
    return ""


def _is_same_listing(one: Witness) -> bool:
    url = one.path.removesuffix("/")
    try:
        found = storage.client().list_folder(url)
    except ObjectUnreadable:
        return False
    return listing_witness(url, _digest(found.folders, found.files)) == one


def _digest(folders: Iterable[str], files: Iterable[tuple[str, Version]]) -> str:
    digest = sha256()
    for one in [*sorted(folders), None, *sorted(files, key=lambda file: file[0])]:
        digest.update(repr(one).encode("utf-8", "backslashreplace") + b"\0")
    return digest.hexdigest()
