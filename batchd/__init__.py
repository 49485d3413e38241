"""batchd: a daemon that decodes training batches once, into shared memory, for every trainer on the machine.

    with batchd.serve("batchd.toml") as address:        # a daemon for this script alone
        daemon = batchd_client.connect(address)

As a service it is started with ``batchd serve``. Workers import this package too, so it imports
next to nothing.
"""

from batchd.embedded import serve

__version__ = "0.1.0"

__all__ = ["__version__", "serve"]
