"""Objects of http, s3 and gs, by range requests; the only user of obstore. Daemon, workers, CLI.

    read_many   [ (url, start, size) ... ]  --16 at once-->  bytes, or the reason why there are none
                every request: after timeout_s without a byte, an answer 429 or 5xx, or a connection
                closed within the answer, it is sent again, with growing pauses, up to the deadline

obstore does the HTTP, the TLS and the signing, and takes credentials, endpoints and proxies from
the environment. It tries once; retries are made here, so they are the same for all failures,
within answers too.

Invariant: the bytes of an object whose version is known are of that version. No reason holds the
server's own words, or any part of the credentials.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import ceil, inf, log
from os import environ
from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import obstore
from obstore.exceptions import BaseError, NotSupportedError
from obstore.store import GCSStore, HTTPStore, S3Store

from batchd.data.storage.values import Listing, ObjectTooLong, ObjectUnreadable, StorageLimits, Version, Wanted

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

    from batchd.data.storage.ahead import Answer

T = TypeVar("T")
_Ask: TypeAlias = tuple[str, Callable[[float], T]]
"""A URL, and a function that sends a request for it with a timeout in seconds."""

CONCURRENT_MAX = 16
"""Requests of one process at once."""
BLOCK_BYTES = 4 << 20
"""A longer range is requested in parts."""
BLOCK_TIMEOUTS = 12
"""A request may take this many times ``timeout_s`` in all, even if bytes keep arriving."""
GONE_FAILURES = 3
"""After this many failures in a row, each after all retries, a server rests for ``timeout_s``."""
TIMEOUT_STEP = 1.25
"""Each timeout that a request may have is this many times the next shorter one."""
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
    ("ConnectionRefused", "no server listens at its host and port", True),
    ("InvalidContentType", "its server does not speak TLS; is it http?", False),
    ("kind: Timeout", "its server does not answer", True),
    ("TimedOut", "its server does not answer", True),
    ("MissingContentLength", "its server does not say how long it is (no Content-Length)", False),
    ("BareRedirect", "its server redirects without saying where; is the region the right one?", False),
    ("kind: Body", "the connection was closed within the answer", True),
    ("kind: Interrupted", "the connection was closed within the answer", True),
    ("kind: Connect", "there is no connection to its server", True),
)
_S3_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true if the bucket is public"
_GS_CREDENTIALS = "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true if the bucket is public"
_METADATA = {
    "computeMetadata": _GS_CREDENTIALS,
    "169.254.169.254": _S3_CREDENTIALS,
    "169.254.170.2": _S3_CREDENTIALS,
}
"""Parts of the URLs that give a machine its credentials; what to do where there are none."""


class _Trouble(ObjectUnreadable):
    """Something that asking again may mend."""


class _Time(NamedTuple):
    """Time limits of some requests together: each begins in the first half, and takes no longer."""

    deadline_s: float
    begin_until_s: float
    request_s: float

    @classmethod
    def of(cls, limits: StorageLimits, deadline_s: float | None) -> _Time:
        """From now on; None is no limit but that of each request.

        A request's timeout is one of a few: each has a store, with connections that are used again.
        """
        usual_s = BLOCK_TIMEOUTS * limits.timeout_s
        if deadline_s is None:
            return cls(inf, inf, usual_s)
        steps = ceil(log(usual_s / min(usual_s, deadline_s / 2), TIMEOUT_STEP))
        return cls(deadline_s, monotonic() + deadline_s / 2, usual_s / TIMEOUT_STEP**steps)

    def is_fair(self, limits: StorageLimits) -> bool:
        """True if the server had about its usual time: a sample's last requests may have none."""
        return self.request_s >= min(limits.timeout_s, limits.deadline_s / 2) / 2


@dataclass(slots=True)
class _Server:
    """State of a server: failures since its last answer, and until when it gets no requests."""

    failures: int = 0
    gone_until_s: float = 0.0
    gone_because: str = ""
    trouble: str = ""
    """The error of the last request, if a retry may help."""


class RemoteClient:
    """Sends requests to servers. Belongs to one thread; ``limits`` may return others each time.

    Its own threads work on a call for several objects, and on what ``begin`` has begun.

    Things that don't work: obstore's functions for asyncio. One of their threads may still release
    a Python object while the process ends, and then the process is aborted, once in ten times.
    """

    def __init__(self, limits: Callable[[], StorageLimits]) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(CONCURRENT_MAX, "storage")
        self._stores: dict[tuple[str, float], ObjectStore] = {}
        self._servers: dict[str, _Server] = {}

    def close(self) -> None:
        """Close the connections, and end the threads after the requests under way."""
        self._threads.shutdown(cancel_futures=True)
        self._stores.clear()

    def heads(self, urls: Sequence[str], deadline_s: float | None = None) -> list[Version | ObjectUnreadable]:
        """The version of each object, or the error."""
        return self._all([(url, partial(self._head, url)) for url in urls], deadline_s)

    def head(self, url: str, deadline_s: float | None = None) -> Version:
        """The version of an object. Raises ``ObjectUnreadable``."""
        return _good(self.heads([url], deadline_s)[0])

    def read_many(
        self, wanted: Sequence[Wanted], deadline_s: float | None = None
    ) -> list[memoryview | ObjectUnreadable]:
        """The bytes of each, fewer if the object ends before, or why there are none."""
        return self._all([(one.url, partial(self._get, one)) for one in wanted], deadline_s)

    def read(self, wanted: Wanted, deadline_s: float | None = None) -> memoryview:
        """The bytes of one, long ones in parts at once. Raises ``ObjectUnreadable``."""
        if wanted.size is None or wanted.size <= BLOCK_BYTES:
            return _good(self.read_many([wanted], deadline_s)[0])
        end = wanted.start + wanted.size
        starts = range(wanted.start, end, BLOCK_BYTES)
        parts = [wanted._replace(start=start, size=min(BLOCK_BYTES, end - start)) for start in starts]
        return memoryview(b"".join(_good(part) for part in self.read_many(parts, deadline_s)))

    def begin(self, wanted: Wanted, deadline_s: float, is_wanted: Callable[[], bool]) -> Answer:
        """Begin to read an object, as ``read_many``.

        The answer is None if it is not wanted any more, or too late, when its turn comes.
        """
        time = _Time.of(self._limits(), None if deadline_s == inf else deadline_s)

        def read() -> memoryview | ObjectUnreadable | None:
            if monotonic() >= time.begin_until_s or not is_wanted():
                return None
            found = self._one(time, (wanted.url, partial(self._get, wanted)))
            # the frames in a traceback hold the future of this answer
            return found.with_traceback(None) if isinstance(found, ObjectUnreadable) else found

        return self._threads.submit(read)

    def list_folder(self, url: str, deadline_s: float | None = None) -> Listing:
        """The content of a folder of a bucket. Raises ``ObjectUnreadable``."""
        return _good(self._all([(url, partial(self._list, url))], deadline_s)[0])

    def holds_any(self, url: str, deadline_s: float | None = None) -> bool:
        """True if a folder of a bucket holds anything. Raises ``ObjectUnreadable``."""
        return _good(self._all([(url, partial(self._holds_any, url))], deadline_s)[0])

    # --- one after the other, several at once ---

    def _all(self, asks: Sequence[_Ask[T]], deadline_s: float | None) -> list[T | ObjectUnreadable]:
        """The answer to each request, or why there is none."""
        time = _Time.of(self._limits(), deadline_s)
        if len(asks) == 1:
            return [self._one(time, asks[0])]
        return list(self._threads.map(partial(self._one, time), asks))

    def _one(self, time: _Time, ask: _Ask[T]) -> T | ObjectUnreadable:
        server = self._servers.setdefault(_server_of(ask[0]), _Server())
        try:
            return self._persist(server, time, ask[1])
        except _Trouble as trouble:
            limits = self._limits()
            if time.is_fair(limits):
                server.failures += 1
                if server.failures >= GONE_FAILURES:  # all fail: later ones need not wait as long
                    server.gone_because, server.gone_until_s = str(trouble), monotonic() + limits.timeout_s
            return trouble
        except ObjectUnreadable as reason:
            return reason

    def _persist(self, server: _Server, time: _Time, ask: Callable[[float], T]) -> T:
        """Send a request until it is answered or retries cannot help: ``ObjectUnreadable``."""
        patience = self._limits()
        if monotonic() < server.gone_until_s:
            raise ObjectUnreadable(f"{server.gone_because}; it is left alone for a moment")
        for attempt in range(patience.retries + 1):
            if attempt:
                pause_s = min(PAUSE_S * 2 ** (attempt - 1), PAUSE_MAX_S)
                sleep(pause_s * random.uniform(1.0, 1.5))  # noqa: S311  that not all ask again at once
            if monotonic() >= time.begin_until_s:
                because = f": {server.trouble}" if server.trouble else ""
                raise _Trouble(f"it was not read within {time.deadline_s:g} s{because}")
            try:
                answer = _once(ask, time.request_s)
            except _Trouble as trouble:
                server.trouble = str(trouble)
            else:
                server.failures, server.trouble = 0, ""
                return answer
        times = "" if patience.retries == 0 else f" (asked {patience.retries + 1} times)"
        raise _Trouble(f"{server.trouble}{times}")

    # --- requests ---

    def _head(self, url: str, request_s: float) -> Version:
        store, path = self._store(url, request_s)
        return _version(obstore.head(store, path))

    def _get(self, wanted: Wanted, request_s: float) -> memoryview:
        store, path = self._store(wanted.url, request_s)
        options: GetOptions = {}
        if wanted.size is not None:
            options["range"] = (wanted.start, wanted.start + wanted.size)
        etag = wanted.version.etag if wanted.version is not None else None
        if etag is not None and not etag.startswith("W/"):
            options["if_match"] = etag
        result = obstore.get(store, path, options=options)
        version = _version(result.meta)
        difference = wanted.version.differs_from(version) if wanted.version is not None else ""
        if difference:
            raise ObjectUnreadable(f"it has changed since the source was scanned: {difference}")
        if wanted.version is None and 0 < wanted.as_of_ns < version.modified_ns and not wanted.url.startswith("http"):
            raise ObjectUnreadable("it was written after the source was scanned; restart the daemon")
        start, end = result.range
        if end - start > wanted.bytes_max:
            raise ObjectTooLong(f"has {end - start} bytes, more than max_bytes = {wanted.bytes_max}")
        if wanted.size is not None and (start != wanted.start or end > wanted.start + wanted.size):
            raise ObjectUnreadable(f"its server answered bytes {start} to {end} instead of those that were asked for")
        data = memoryview(result.bytes())
        if len(data) != end - start:
            raise _Trouble(f"its server sent {len(data)} bytes instead of {end - start}")
        return data

    def _list(self, url: str, request_s: float) -> Listing:
        store, prefix = self._store(url, request_s)
        found = obstore.list_with_delimiter(store, prefix or None)
        skipped = len(prefix) + 1 if prefix else 0
        folders = [path[skipped:] for path in found["common_prefixes"]]
        files = [(one["path"][skipped:], _version(one)) for one in found["objects"] if one["path"] != prefix]
        return Listing(folders, files)

    def _holds_any(self, url: str, request_s: float) -> bool:
        store, prefix = self._store(url, request_s)
        return len(next(iter(obstore.list(store, prefix or None, chunk_size=1)), ())) > 0

    def _store(self, url: str, request_s: float) -> tuple[ObjectStore, str]:
        """The store of an object with this timeout, and the object's path in it."""
        scheme, _, rest = url.partition("://")
        host, _, path = rest.partition("/")
        key = (_server_of(url), request_s)
        store = self._stores.get(key)
        if store is None:
            silence_s = min(self._limits().timeout_s, request_s)
            store = self._stores.setdefault(key, _new_store(scheme, host, silence_s, request_s))
        return store, path.rstrip("/")


def _once(ask: Callable[[float], T], request_s: float) -> T:
    """Raise ``_Trouble`` if a retry may help, and ``ObjectUnreadable`` for another failure."""
    try:
        return ask(request_s)
    except (BaseError, OSError) as error:
        reason, passes = _meaning(error)
    except ValueError:
        reason, passes = "its name is none that an object can have", False
    raise _Trouble(reason) if passes else ObjectUnreadable(reason)


def _server_of(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _meaning(error: BaseError | OSError) -> tuple[str, bool]:
    """A reason for users, and whether a retry may help."""
    text = str(error)
    for part, advice in _METADATA.items():
        if part in text:
            return f"there are no credentials for it in the environment, and this machine has none: {advice}", False
    if isinstance(error, NotSupportedError):
        return "its server ignores Range, so no part of a file can be read: use one that knows range requests", False
    if status := _STATUS.search(text):
        return _status_meaning(int(status[1]), text)
    if certificate := _CERTIFICATE.search(text):
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


def _new_store(scheme: str, host: str, silence_s: float, request_s: float) -> ObjectStore:
    silence = timedelta(seconds=silence_s)
    request = timedelta(seconds=request_s)
    options: ClientConfig = {
        "connect_timeout": silence,
        "read_timeout": silence,
        "timeout": request,
        "pool_max_idle_per_host": str(CONCURRENT_MAX),
    }
    once: RetryConfig = {"max_retries": 0, "retry_timeout": request}
    if scheme == "s3":
        endpoint = environ.get("AWS_ENDPOINT_URL") or environ.get("AWS_ENDPOINT") or ""
        options["allow_http"] = endpoint.startswith("http://")
        return S3Store(host, client_options=options, retry_config=once)
    if scheme == "gs":
        options["allow_http"] = environ.get("GOOGLE_BASE_URL", "").startswith("http://")
        return GCSStore(host, client_options=options, retry_config=once)
    options["allow_http"] = scheme == "http"
    return HTTPStore.from_url(f"{scheme}://{host}", client_options=options, retry_config=once)


def _version(meta: ObjectMeta) -> Version:
    return Version(meta["size"], meta["e_tag"], int(meta["last_modified"].timestamp()) * 1_000_000_000)


def _good(found: T | ObjectUnreadable) -> T:
    if isinstance(found, ObjectUnreadable):
        raise found
    return found
