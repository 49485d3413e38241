"""Twelve kinds of reference cycles, whose collection must not hang."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any
from weakref import ref

DEADLINE_S = 30.0
"""A collection takes milliseconds; one that waits for an open socket never ends."""


def collected(make: Callable[[], object], tie: Callable[[object], None]) -> None:
    """Put an object into a cycle, drop it and collect it: in a thread, which may hang."""
    errors: list[BaseException] = []

    def live_and_end() -> None:
        try:
            tie(make())
            gc.collect()
        except BaseException as error:  # noqa: BLE001  it is raised in the test's own thread
            errors.append(error)

    thread = Thread(target=live_and_end, name="garbage", daemon=True)
    gc.disable()  # the thread must collect it, not this one by chance
    try:
        thread.start()
        thread.join(DEADLINE_S)
    finally:
        gc.enable()
    assert not thread.is_alive(), "the collection never ended"
    if errors:
        raise errors[0]


class _Node(SimpleNamespace):
    """An object of the program."""

    def use(self) -> object:
        return self


class _Closing(_Node):
    """An object whose own finaliser closes its contents, as in programs."""

    def __del__(self) -> None:
        for one in self.things if isinstance(self.things, tuple) else (self.things,):
            if hasattr(one, "close"):
                one.close()


def _exception(things: object) -> None:
    try:
        raise ValueError("the loss is nan")
    except ValueError as error:
        kept = error
    assert kept.__traceback__ is not None
    assert things


def _chained_exceptions(things: object) -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__cause__ = second, first
    first.add_note("")
    first.things = things  # type: ignore[attr-defined]


def _attribute(things: object) -> None:
    node = _Node(things=things)
    node.me = node


def _list(things: object) -> None:
    kept: list[Any] = [things]
    kept.append(kept)


def _dict(things: object) -> None:
    kept: dict[str, Any] = {"things": things}
    kept["kept"] = kept


def _closure(things: object) -> None:
    def train() -> tuple[object, ...]:
        return things, train

    assert train


def _generator(things: object) -> None:
    def batches() -> Iterator[object]:
        yield things
        yield itself

    itself = batches()
    next(itself)


def _method(things: object) -> None:
    node = _Node(things=things)
    node.callback = node.use


def _class(things: object) -> None:
    type("Model", (), {"things": things})


def _pair(things: object) -> None:
    parent = _Node(things=things)
    parent.child = _Node(parent=parent)


def _weak_reference(things: object) -> None:
    node = _Node(things=things)
    node.watcher = ref(things[0] if isinstance(things, tuple) else things, partial(print, node))


def _destructor(things: object) -> None:
    node = _Closing(things=things)
    node.me = node


CYCLES: dict[str, Callable[[object], None]] = {
    "an exception that is kept": _exception,
    "exceptions in a chain": _chained_exceptions,
    "an attribute": _attribute,
    "a list": _list,
    "a dict": _dict,
    "a closure": _closure,
    "a suspended generator": _generator,
    "a bound method": _method,
    "a class": _class,
    "parent and child": _pair,
    "a weak reference": _weak_reference,
    "an object that closes it": _destructor,
}
