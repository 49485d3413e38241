"""Finds a user's function, named "package.module:name", without importing it. Daemon, CLI, workers.

    "package.module:name"  --folders, package after package-->  file  --sha256-->  digest
                                                                      --ast----->  its top names

``importlib.util.find_spec`` would import the packages around a module, so each part is searched by
itself in the folders of the part before. Standard library only.

Invariant: no code that is found here is run.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from importlib.machinery import PathFinder
from pathlib import Path
from pkgutil import iter_modules
from typing import NamedTuple

from batchd.data.functions.signature import CallArguments, call_problem, plain_value, written_signature
from batchd.runtime.suggestions import nearest, nearly, pip_command
from batchd_wire.record import frozen

FUNCTION_CHARACTERS_MAX = 256
ANY_NAME = "*"
"""Among the names of a module that may define others, too."""


class FunctionName(NamedTuple):
    """A function or another callable; ``path`` is ``("name",)``, or leads into a class."""

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


class ModuleNotFound(LookupError):  # noqa: N818  names what is wrong
    """There is no such module, or its file cannot be read; the text names the folders searched."""


@frozen
class Module:
    """A module on disk: its file and its source."""

    file: Path
    source: bytes

    @property
    def digest(self) -> str:
        """64 hexadecimal digits."""
        return sha256(self.source).hexdigest()


def find_module(name: str, folders: Sequence[Path]) -> Module:
    """Find a module in ``folders``, or on the interpreter's path. Raises ``ModuleNotFound``."""
    PathFinder.invalidate_caches()
    # workers do not search the folder that this program was started in
    searched = [*map(str, folders), *sys.path[0 if sys.flags.safe_path else 1 :]]
    top, *parts = name.split(".")
    spec = PathFinder.find_spec(top, searched)
    if spec is None:  # editable installs and built-in modules have finders of their own
        others = (finder.find_spec(top, None) for finder in sys.meta_path if finder is not PathFinder)
        spec = next(filter(None, others), None)
    if spec is None:
        raise ModuleNotFound(_nowhere(name, top, searched))
    found = top
    for part in parts:
        here = list(spec.submodule_search_locations or ())
        if not here:
            raise ModuleNotFound(f"there is no module {name}, for {found} is no package: it is {spec.origin}")
        found = f"{found}.{part}"
        spec = PathFinder.find_spec(part, here)
        if spec is None:
            raise ModuleNotFound(_nowhere(name, found, here))
    if not spec.has_location or spec.origin is None:
        what = "is a folder without __init__.py" if spec.submodule_search_locations else "is built into Python"
        raise ModuleNotFound(f"the module {name} {what}, so it has no source")
    try:
        return Module(Path(spec.origin), Path(spec.origin).read_bytes())
    except OSError as error:
        raise ModuleNotFound(f"{spec.origin} cannot be read: {error.strerror}") from None


def function_problems(text: str, folders: Sequence[Path], arguments: CallArguments | None = None) -> list[str]:
    """Problems of a function's name, or of how it will be called, found without importing it."""
    name = parse_function(text)
    try:
        module = find_module(name.module, folders)
    except ModuleNotFound as error:
        return [str(error)]
    if module.file.suffix != ".py":
        return []
    try:
        body = ast.parse(module.source, module.file).body
        names = list(_top_names(body))
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        return [f"{module.file}{line} is no Python: {getattr(error, 'msg', error)}"]
    problems = _name_problems(name, module, frozenset(names))
    if problems or arguments is None or len(name.path) > 1 or names.count(name.path[0]) != 1 or ANY_NAME in names:
        return problems
    value = plain_value(body, name.path[0])
    if value is not None:
        return [f"{text} is {value} ({module.file})"]
    problem = call_problem(text, written_signature(body, name.path[0]), arguments)
    return [] if problem is None else [f"{problem} ({module.file})"]


def _name_problems(name: FunctionName, module: Module, names: frozenset[str]) -> list[str]:
    wanted = name.path[0]
    if wanted in names or ANY_NAME in names or "__getattr__" in names:
        return []
    meant = nearest(wanted, names)
    advice = f"did you mean {meant}?" if meant else f"defined there: {', '.join(sorted(names)) or 'nothing'}"
    return [f"{module.file} does not define {wanted!r} at its top level; {advice}"]


def _nowhere(name: str, missing: str, searched: Sequence[str]) -> str:
    """The message for ``missing``, which is ``name`` or a package around it, found in no folder."""
    why = "" if missing == name else f", for there is no {missing}"
    meant = nearly(missing.rpartition(".")[2], [module.name for module in iter_modules(searched)])
    advice = "" if meant is None else f"did you mean {meant}?"
    places = ", ".join(place if Path(place).exists() else f"{place} (which is not there)" for place in searched)
    hint = "" if "." in missing else f"; [daemon] python_path adds folders, and {pip_command(missing)} adds a package"
    return f"there is no module {name}{why}; {advice + ' ' if advice else ''}searched: {places}{hint}"


def _top_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Every name that the statements of a module may define, also within ``if`` and ``try``."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name
            case ast.Import():
                yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
            case ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in statement.names)
            case ast.Assign():
                yield from _targets(statement.targets)
            case ast.AnnAssign(value=ast.expr()):
                yield from _targets([statement.target])
            case _:
                if isinstance(statement, ast.For):
                    yield from _targets([statement.target])
                elif isinstance(statement, ast.With):
                    yield from _targets([item.optional_vars for item in statement.items if item.optional_vars])
                yield from _top_names(list(_within(statement)))


def _within(statement: ast.stmt) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield from child.body


def _targets(targets: Iterable[ast.expr]) -> Iterator[str]:
    for target in targets:
        yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
