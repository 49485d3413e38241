"""Loaders of any framework: ``loader_type`` is its ``BatchdLoader``."""

from collections.abc import Callable, Iterator
from typing import Any

from support.daemon_process import DaemonProcess


def loading(loader_type: Callable[..., Any]) -> Callable[[DaemonProcess], Iterator[Callable[..., Any]]]:
    """Return a fixture: it makes loaders of the daemon's stream, and closes them with the test."""

    def load(daemon: DaemonProcess) -> Iterator[Callable[..., Any]]:
        loaders: list[Any] = []

        def make(stream: str = "photos", **options: object) -> Any:
            loaders.append(loader_type(stream, **{"address": daemon.address, **options}))
            return loaders[-1]

        yield make
        for loader in loaders:
            loader.close()

    return load


def in_use(loader_type: Callable[..., Any], daemon: DaemonProcess) -> tuple[Any, Iterator[Any], Any]:
    """Make a loader, its iterator and a first batch, which the caller alone refers to."""
    loader = loader_type("photos", address=daemon.address)
    batches = iter(loader)
    return loader, batches, next(batches)
