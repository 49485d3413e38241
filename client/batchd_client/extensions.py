"""Functions at the rim of the client that its centre calls. Runs in the trainer.

    batch, daemon, reports, stream  --call-->  Extension  <--register--  notebook, torch.*

The rim draws and converts what the centre defines, and needs frameworks: it imports the centre,
never the other way. So an extension has its module by name.

Invariant: no module of the rim is imported before the first call of what it registers.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Extension(Generic[P, R]):
    """A function that ``module`` registers when it is imported, by the first call."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._function: Callable[P, R] | None = None

    def register(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate the function."""
        self._function = function
        return function

    def __call__(self, *values: P.args, **options: P.kwargs) -> R:
        """Call the function. Raises ``ImportError`` where its module lacks a library."""
        import_module(self._module)  # always: another thread may be half way through it
        assert self._function is not None, f"{self._module} registers it"
        return self._function(*values, **options)
