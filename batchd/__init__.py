"""batchd decodes training batches once, into shared memory, for all trainers of a machine.

    with batchd.serve("batchd.toml") as address:        # a daemon for this script alone
        daemon = batchd_client.connect(address)

``batchd serve`` runs it as a service. Workers import this package too, so it imports next to
nothing.
"""

from batchd.embedded import serve

__version__ = "0.1.0"

__all__ = ["__version__", "serve"]
