"""How people name a function of their own: ``"package.module:name"``. Daemon, workers and CLI; standard library only."""

from typing import NamedTuple

FUNCTION_CHARACTERS_MAX = 256


class FunctionName(NamedTuple):
    """A function, or a class or anything else that can be called; ``path`` is ``("name",)``, or leads into a class."""

    module: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module}:{'.'.join(self.path)}"


def parse_function(text: str) -> FunctionName:
    """Read ``"package.module:name"``. Raises ``ValueError``."""
    module, colon, name = text.partition(":")
    parts = [*module.split("."), *name.split(".")]
    if not colon or not all(part.isidentifier() for part in parts) or len(text) > FUNCTION_CHARACTERS_MAX:
        raise ValueError(f'function = "{text[:FUNCTION_CHARACTERS_MAX]}" must be written as "package.module:name"')
    return FunctionName(module, tuple(name.split(".")))
