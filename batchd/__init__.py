"""batchd decodes training batches once, into shared memory, for all trainers of a machine.

    with batchd.serve("batchd.toml") as address:        # a daemon for this script alone
        daemon = batchd_client.connect(address)

``batchd serve`` runs it as a service. Workers import this package too, so it imports next to
nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from batchd.embedded import serve
from batchd.runtime import __version__

if TYPE_CHECKING:
    from batchd.commands.history.batches import replay
    from batchd.commands.history.journal import journal
    from batchd.commands.history.seen import seen

__all__ = ["__version__", "journal", "replay", "seen", "serve"]


def __getattr__(name: str) -> object:
    """Import ``journal``, ``replay`` and ``seen`` at their first use: they need numpy."""
    if name == "journal":
        return import_module("batchd.commands.history.journal").journal
    if name == "replay":
        return import_module("batchd.commands.history.batches").replay
    if name == "seen":
        return import_module("batchd.commands.history.seen").seen
    raise AttributeError(f"module 'batchd' has no attribute {name!r}")
