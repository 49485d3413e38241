"""batchd: a daemon that decodes training batches once, into shared memory, for every trainer on the machine."""

from importlib.metadata import version

__version__ = version("batchd")
