"""Training batches from batchd in shared memory. Runs in the trainer; needs pyzmq, msgpack, numpy.

    with batchd_client.connect() as daemon:
        train = daemon.stream("photos")
        for epoch in range(3):
            for batch in train:
                batch["image"]                  # uint8 [B, H, W, 3], read-only, no copy

Starts no thread at import. All exceptions are in ``batchd_client.errors`` and derive from
``BatchdClientError``.

The modules of these names are imported at their first use: a process that only sends requests
(``asking``), such as the server's observer, never loads numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchd_client import errors
    from batchd_client.batch import Batch, CompactRagged, Ragged, text
    from batchd_client.daemon import BadReport, BadSample, Daemon, connect
    from batchd_client.errors import BatchdClientError
    from batchd_client.producer import Producer, ProducerStatistics, push
    from batchd_client.stream import FieldSchema, Stream, StreamProgress, StreamStatistics
    from batchd_client.subscription import StreamState

__version__ = "0.1.0"

__all__ = [
    "BadReport",
    "BadSample",
    "Batch",
    "BatchdClientError",
    "CompactRagged",
    "Daemon",
    "FieldSchema",
    "Producer",
    "ProducerStatistics",
    "Ragged",
    "Stream",
    "StreamProgress",
    "StreamState",
    "StreamStatistics",
    "connect",
    "errors",
    "push",
    "text",
]

_MODULES = ("errors", "batch", "daemon", "producer", "stream", "subscription")
"""The modules that define the public names."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for home in _MODULES:
        module = import_module(f"{__name__}.{home}")
        found = module if name == home else module.__dict__.get(name)
        if found is not None:
            globals()[name] = found
            return found
    raise AssertionError(f"{name} is in none of {_MODULES}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
