"""Objects of http, s3 and gs, by range requests. Daemon, workers and CLI; the one module that knows obstore.

    read_many   [ (url, start, size) ... ]  --16 at once-->  bytes, or the reason why there are none
                every request: a server that says nothing for timeout_s, answers 429 or 5xx, or closes within the answer
                is asked again, with growing pauses, up to the deadline

obstore does the HTTP, the TLS and the signing, and takes credentials, endpoints and proxies from the environment. It is asked to
try once; trying again is done here, so that it is the same for all that may go wrong, within answers too.

Invariant: what is read of an object whose version is known is of that version. No reason holds what a server says in its own
words, or anything of the credentials.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from os import environ
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import obstore
from obstore.exceptions import BaseError, NotSupportedError
from obstore.store import GCSStore, HTTPStore, S3Store

from batchd.sources.storage import Listing, ObjectTooLong, ObjectUnreadable, Version, Wanted, limits

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
_Ask: TypeAlias = tuple[str, Callable[[], Awaitable[T]]]
"""A URL, and what asks for it."""

CONCURRENT_MAX = 16
"""Requests of one process at once."""
BLOCK_BYTES = 4 << 20
"""A longer range is asked for in parts."""
BLOCK_TIMEOUTS = 12
"""A request may take as many times ``timeout_s`` in all, even if bytes keep coming."""
GONE_FAILURES = 3
"""After as many requests in a row that no asking again could mend, a server is gone, and left alone for ``timeout_s``."""
PAUSE_S = 0.1
PAUSE_MAX_S = 5.0
_STATUS = re.compile(r"\bstatus: (\d{3}),")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_TOO_MANY, _TIMEOUT, _SERVER_ERRORS = 429, 408, 500
_MEANINGS = {
    401: "the server asks for other credentials (401)",
    404: "it is not there (404)",
    405: "the server does not allow it (405)",
    412: "it has changed since the source was scanned (412)",
    416: "it ends before the bytes that were asked for (416)",
}
_SYMPTOMS = (
    ("dns error", "its host has no address that could be found (DNS)", True),
    ("ConnectionRefused", "nobody listens at its host and port", True),
    ("InvalidContentType", "its server does not speak TLS; is it http?", False),
    ("kind: Timeout", "its server does not answer", True),
    ("TimedOut", "its server does not answer", True),
    ("MissingContentLength", "its server does not say how long it is (no Content-Length)", False),
    ("BareRedirect", "its server redirects without saying where; is the region the right one?", False),
    ("kind: Body", "the connection was closed within the answer", True),
    ("kind: Interrupted", "the connection was closed within the answer", True),
    ("kind: Connect", "there is no connection to its server", True),
)
_METADATA_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")


class _Trouble(ObjectUnreadable):
    """Something that asking again may mend."""


@dataclass(slots=True)
class _Server:
    """What is known of a server: its failures since it last answered, and until when it is left alone."""

    failures: int = 0
    gone_until_s: float = 0.0
    gone_because: str = ""
    trouble: str = ""
    """What was wrong with the last request, where it may pass."""


class RemoteClient:
    """Asks servers. Belongs to one thread; its event loop runs while it is asked something, and at no other time."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stores: dict[str, ObjectStore] = {}
        self._servers: dict[str, _Server] = defaultdict(_Server)

    def close(self) -> None:
        """Close the connections."""
        self._stores.clear()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def heads(self, urls: Sequence[str], deadline_s: float | None = None) -> list[Version | ObjectUnreadable]:
        """What each object is, or why it cannot be known."""
        return self._all([(url, partial(self._head, url)) for url in urls], deadline_s)

    def head(self, url: str, deadline_s: float | None = None) -> Version:
        """What an object is. Raises ``ObjectUnreadable``."""
        return _good(self.heads([url], deadline_s)[0])

    def read_many(
        self, wanted: Sequence[Wanted], deadline_s: float | None = None
    ) -> list[memoryview | ObjectUnreadable]:
        """The bytes of each: fewer than were asked for where the object ends before. Within the deadline, or a reason."""
        return self._all([(one.url, partial(self._get, one)) for one in wanted], deadline_s)

    def read(self, wanted: Wanted, deadline_s: float | None = None) -> memoryview:
        """The bytes of one, long ones in parts at once. Raises ``ObjectUnreadable``."""
        if wanted.size is None or wanted.size <= BLOCK_BYTES:
            return _good(self.read_many([wanted], deadline_s)[0])
        end = wanted.start + wanted.size
        starts = range(wanted.start, end, BLOCK_BYTES)
        parts = [wanted._replace(start=start, size=min(BLOCK_BYTES, end - start)) for start in starts]
        return memoryview(b"".join(_good(part) for part in self.read_many(parts, deadline_s)))

    def fetch(
        self, wanted: Sequence[Wanted], deadline_s: float, bytes_max: int
    ) -> list[memoryview | ObjectUnreadable | None]:
        """As ``read_many``, but once there are ``bytes_max`` bytes, nothing more is asked for, and the rest are None."""
        spent = 0

        async def one(wanted: Wanted) -> memoryview | None:
            nonlocal spent
            if spent >= bytes_max:
                return None
            data = await self._get(wanted)
            spent += len(data)
            return data

        return self._all([(each.url, partial(one, each)) for each in wanted], deadline_s)

    def list_folder(self, url: str, deadline_s: float | None = None) -> Listing:
        """What is in a folder of a bucket. Raises ``ObjectUnreadable``."""
        return _good(self._all([(url, partial(self._list, url))], deadline_s)[0])

    def holds_any(self, url: str, deadline_s: float | None = None) -> bool:
        """Is there anything in a folder of a bucket? Raises ``ObjectUnreadable``."""
        return _good(self._all([(url, partial(self._holds_any, url))], deadline_s)[0])

    # --- one after the other, several at once ---------------------------------------------------------------------------

    def _all(self, asks: Sequence[_Ask[T]], deadline_s: float | None) -> list[T | ObjectUnreadable]:
        return self._loop.run_until_complete(self._gather(asks, deadline_s))

    async def _gather(self, asks: Sequence[_Ask[T]], deadline_s: float | None) -> list[T | ObjectUnreadable]:
        turn = asyncio.Semaphore(CONCURRENT_MAX)
        until_s = None if deadline_s is None else self._loop.time() + deadline_s

        async def one(ask: _Ask[T]) -> T | ObjectUnreadable:
            server = self._servers[_server_of(ask[0])]
            try:
                async with asyncio.timeout_at(until_s), turn:
                    return await self._persist(server, ask[1])
            except _Trouble as trouble:
                return self._failed(server, trouble)
            except ObjectUnreadable as reason:
                return reason
            except TimeoutError:
                because = f": {server.trouble}" if server.trouble else ""
                return self._failed(server, _Trouble(f"it was not read within {deadline_s:g} s{because}"))

        return await asyncio.gather(*map(one, asks))

    async def _persist(self, server: _Server, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer, or asking again is of no use. Raises ``ObjectUnreadable``."""
        patience = limits()
        if self._loop.time() < server.gone_until_s:
            raise ObjectUnreadable(f"{server.gone_because}; it is left alone for a moment")
        for attempt in range(patience.retries + 1):
            if attempt:
                pause_s = min(PAUSE_S * 2 ** (attempt - 1), PAUSE_MAX_S)
                await asyncio.sleep(pause_s * random.uniform(1.0, 1.5))  # noqa: S311  that not all ask again at once
            try:
                answer = await _once(ask)
            except _Trouble as trouble:
                server.trouble = str(trouble)
            else:
                server.failures, server.trouble = 0, ""
                return answer
        times = "" if patience.retries == 0 else f" (asked {patience.retries + 1} times)"
        raise _Trouble(f"{server.trouble}{times}")

    def _failed(self, server: _Server, trouble: _Trouble) -> _Trouble:
        """A request failed for good. Where they all do, whoever asks next need not wait as long."""
        server.failures += 1
        if server.failures >= GONE_FAILURES:
            server.gone_because, server.gone_until_s = str(trouble), self._loop.time() + limits().timeout_s
        return trouble

    # --- what is asked --------------------------------------------------------------------------------------------------

    async def _head(self, url: str) -> Version:
        store, path = self._store(url)
        return _version(await obstore.head_async(store, path))

    async def _get(self, wanted: Wanted) -> memoryview:
        store, path = self._store(wanted.url)
        options: dict[str, Any] = {}
        if wanted.size is not None:
            options["range"] = (wanted.start, wanted.start + wanted.size)
        etag = wanted.version.etag if wanted.version is not None else None
        if etag is not None and not etag.startswith("W/"):
            options["if_match"] = etag
        result = await obstore.get_async(store, path, options=options)  # type: ignore[arg-type]
        version = _version(result.meta)
        difference = wanted.version.differs_from(version) if wanted.version is not None else ""
        if difference:
            raise ObjectUnreadable(f"it has changed since the source was scanned: {difference}")
        start, end = result.range
        if end - start > wanted.bytes_max:
            raise ObjectTooLong(f"has {end - start} bytes, more than max_bytes = {wanted.bytes_max}")
        if wanted.size is not None and (start != wanted.start or end > wanted.start + wanted.size):
            raise ObjectUnreadable(f"its server answered bytes {start} to {end} instead of those that were asked for")
        data = memoryview(await result.bytes_async())
        if len(data) != end - start:
            raise _Trouble(f"its server sent {len(data)} bytes instead of {end - start}")
        return data

    async def _list(self, url: str) -> Listing:
        store, prefix = self._store(url)
        found = await obstore.list_with_delimiter_async(store, prefix or None)
        skipped = len(prefix) + 1 if prefix else 0
        folders = [path[skipped:] for path in found["common_prefixes"]]
        files = [(one["path"][skipped:], _version(one)) for one in found["objects"] if one["path"] != prefix]
        return Listing(folders, files)

    async def _holds_any(self, url: str) -> bool:
        store, prefix = self._store(url)
        async for found in obstore.list(store, prefix or None, chunk_size=1):
            return len(found) > 0
        return False

    def _store(self, url: str) -> tuple[ObjectStore, str]:
        """The store of an object, and its path there."""
        scheme, _, rest = url.partition("://")
        host, _, path = rest.partition("/")
        key = _server_of(url)
        store = self._stores.get(key)
        if store is None:
            store = self._stores[key] = _new_store(scheme, host)
        return store, path.rstrip("/")


async def _once(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask once. Raises ``_Trouble`` where asking again may mend it, and ``ObjectUnreadable`` where not."""
    limit_s = BLOCK_TIMEOUTS * limits().timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await ask()
    except TimeoutError:
        raise _Trouble(f"a request took longer than {limit_s:g} s") from None
    except (BaseError, OSError) as error:
        raise _trouble(error) from None
    except ValueError:
        raise ObjectUnreadable("its name is none that an object can have") from None


def _server_of(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _trouble(error: BaseError | OSError) -> _Trouble:
    """What an error of obstore means, where asking again may mend it. Raises ``ObjectUnreadable`` where it does not."""
    text = str(error)
    reason, passes = _meaning(error, text)
    if passes:
        return _Trouble(reason)
    raise ObjectUnreadable(reason)


def _meaning(error: BaseError | OSError, text: str) -> tuple[str, bool]:
    """A reason for people, and whether asking again may mend it."""
    if any(host in text for host in _METADATA_HOSTS):
        return "there are no credentials for it in the environment, and no machine gives any", False
    if isinstance(error, NotSupportedError):
        return "its server ignores Range, so no part of a file can be read: use one that knows range requests", False
    status = _STATUS.search(text)
    if status is not None:
        return _status_meaning(int(status[1]), text)
    certificate = _CERTIFICATE.search(text)
    if certificate is not None:
        return f"TLS fails: its server's certificate is not accepted ({certificate[1]})", False
    for symptom, reason, passes in _SYMPTOMS:
        if symptom in text:
            return reason, passes
    if isinstance(error, FileNotFoundError):
        return _MEANINGS[404], False
    return f"it cannot be read ({type(error).__name__})", True


def _status_meaning(status: int, text: str) -> tuple[str, bool]:
    passes = status >= _SERVER_ERRORS or status in (_TOO_MANY, _TIMEOUT)
    code = _CODE.search(text)
    detail = f"{status} {code[1]}" if code else str(status)
    if status in _MEANINGS:
        return _MEANINGS[status].replace(str(status), detail), passes
    refused = 403
    return (f"it may not be read ({detail})" if status == refused else f"its server answers {detail}"), passes


def _new_store(scheme: str, host: str) -> ObjectStore:
    patience = limits()
    silence = timedelta(seconds=patience.timeout_s)
    options: dict[str, Any] = {
        "connect_timeout": silence,
        "read_timeout": silence,
        "timeout": BLOCK_TIMEOUTS * silence,
        "pool_max_idle_per_host": str(CONCURRENT_MAX),
    }
    once: dict[str, Any] = {"max_retries": 0, "retry_timeout": BLOCK_TIMEOUTS * silence}
    if scheme == "s3":
        endpoint = environ.get("AWS_ENDPOINT_URL") or environ.get("AWS_ENDPOINT") or ""
        options["allow_http"] = endpoint.startswith("http://")
        return S3Store(host, client_options=options, retry_config=once)  # type: ignore[arg-type]
    if scheme == "gs":
        return GCSStore(host, client_options=options, retry_config=once)  # type: ignore[arg-type]
    options["allow_http"] = scheme == "http"
    return HTTPStore.from_url(f"{scheme}://{host}", client_options=options, retry_config=once)  # type: ignore[arg-type]


def _version(meta: Any) -> Version:
    return Version(meta["size"], meta["e_tag"], int(meta["last_modified"].timestamp()) * 1_000_000_000)


def _good(found: T | ObjectUnreadable) -> T:
    if isinstance(found, ObjectUnreadable):
        raise found
    return found
