"""One interface to the files of this machine and the objects of servers. Daemon, workers and CLI.

    Storage.at(path)  ──  a path  ->  LocalFiles     os.open, os.scandir
                      └─  a URL   ->  RemoteFiles    range requests and listings, by ``Storage.client``, which needs obstore

A process makes one ``Storage`` and passes it to whatever scans or reads: it has the limits, the
connections and the deadlines.

Invariant: without a URL no library is loaded, and no thread and no connection is there.
"""

from __future__ import annotations

import os
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Self

from batchd.errors import SourceInvalid
from batchd.storage.local_files import LocalFiles
from batchd.storage.location import is_url
from batchd.storage.remote_files import RemoteFiles
from batchd.storage.values import USUAL_LIMITS, StorageLimits

if TYPE_CHECKING:
    from pathlib import Path

    from batchd.storage.objects import RemoteClient


class Storage:
    """Files here and objects of servers, for one process. Belongs to one thread.

    ``limits`` may be replaced at any time; requests that begin later keep to the new ones.
    """

    def __init__(self, limits: StorageLimits = USUAL_LIMITS) -> None:
        self.limits = limits
        self.local = LocalFiles()
        self.remote = RemoteFiles(self)
        self._client: RemoteClient | None = None
        self._ahead_until_s = inf
        self._sample_until_s = inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def at(self, path: Path | bytes) -> LocalFiles | RemoteFiles:
        """Where a path, or a URL, leads to."""
        return self.remote if is_url(os.fsencode(path)) else self.local

    @property
    def client(self) -> RemoteClient:
        """What asks servers. Raises ``SourceInvalid`` where its library is not installed."""
        if self._client is None:
            try:
                from batchd.storage.objects import RemoteClient  # noqa: PLC0415  only where there are URLs
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "obstore":
                    raise
                raise SourceInvalid(
                    "a URL needs obstore, which is not installed: pip install 'batchd[cloud]'"
                ) from None
            self._client = RemoteClient(lambda: self.limits)
        return self._client

    def close(self) -> None:
        """Close all connections; the next request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def begin_reading_ahead(self) -> None:
        """From now on what is read ahead, of however many sources, may take as long as one sample."""
        self._ahead_until_s = monotonic() + self.limits.deadline_s

    @property
    def ahead_s(self) -> float:
        """Seconds that reading ahead may still take."""
        return min(self.limits.deadline_s, self._ahead_until_s - monotonic())

    def begin_sample(self) -> None:
        """From now on what is read is of one sample, in however many requests."""
        self._sample_until_s = monotonic() + self.limits.deadline_s

    @property
    def sample_s(self) -> float:
        """Seconds that reading this sample may still take."""
        return min(self.limits.deadline_s, self._sample_until_s - monotonic())
