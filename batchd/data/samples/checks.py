"""Several checks of one table that report all problems together. Daemon, workers and CLI.

    checks = Checks()
    with checks.at("fields", "box"):     a problem here has the key fields.box
        parse_column("box", "int46")
    checks.done()                        raises all problems as one ``ValueError``

Invariant: no key has two problems.

``Range`` alone states the limits of a number. pydantic reads it as ``ge`` and ``le``, so this
module needs only the standard library.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from batchd.errors import KeyPath
from batchd_wire.record import frozen


class OptionsInvalid(ValueError):  # noqa: N818  names what is wrong
    """``found``: the key of each problem in the table, () for the whole, with its text."""

    def __init__(self, found: Sequence[tuple[KeyPath, str]]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(text for _key, text in self.found))


class Checks:
    """The problems that a series of checks has found so far.

    ``is_partial``: the table lacks its wrong keys, so a check that needs one of them is left out.
    """

    def __init__(self, *, is_partial: bool = False) -> None:
        self._is_partial = is_partial
        self.found: dict[KeyPath, str] = {}

    @contextmanager
    def at(self, *key: str | int) -> Iterator[None]:
        """Note a ``ValueError`` from within as a problem of this key, and continue."""
        try:
            yield
        except OptionsInvalid as error:
            for inner, text in error.found:
                self.say(text, *key, *inner)
        except ValueError as error:
            self.say(str(error), *key)
        except AttributeError:
            if not self._is_partial:
                raise

    def say(self, text: str, *key: str | int) -> None:
        """Note a problem of this key."""
        self.found[key] = f"{self.found[key]}; {text}" if key in self.found else text

    def done(self) -> None:
        """Raise ``OptionsInvalid`` with all that was found, if anything was."""
        if self.found:
            raise OptionsInvalid(list(self.found.items()))


@frozen
class Range:
    """The smallest and the largest value of a number, both allowed."""

    minimum: float
    maximum: float

    def __get_pydantic_core_schema__(
        self, source: object, handler: Callable[[object], dict[str, object]]
    ) -> dict[str, object]:
        """Tell pydantic, where it is there, in its own plain words."""
        return {**handler(source), "ge": self.minimum, "le": self.maximum}


@frozen
class Example:
    """A value that users could write: in the JSON Schema, in problems, and in `batchd config`.

    Each required key has one; where it is of a union, it belongs outside.
    """

    value: object

    def __get_pydantic_json_schema__(
        self, schema: object, handler: Callable[[object], dict[str, object]]
    ) -> dict[str, object]:
        """Add the value to the key's JSON Schema."""
        return {**handler(schema), "examples": [self.value]}
