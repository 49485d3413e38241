"""Find a user's function, and check how it will be called, without import. Daemon, CLI, workers.

    "package.module:name"  --folders, package after package-->  file  --sha256-->  digest
                                                                      --ast----->  its top names

    "mine:generate"  --ast----->  (size, *, rng=None)
    generate         --inspect->  (size, *, rng=None)   in workers; a decorator's result counts

``importlib.util.find_spec`` would import the packages around a module, so each part is searched by
itself in the folders of the part before. Standard library only.

A function that cannot be called would make every sample a bad one, so this is reported before the
first.

Invariants: no code that is found here is run. A function whose signature is not certain passes; it
is never refused for what its source seems to say.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.machinery import PathFinder
from inspect import Parameter, Signature
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

from batchd.runtime.suggestions import nearest, nearly, pip_command
from batchd_wire.record import frozen

VALUE_CHARACTERS_MAX = 40


class CallArguments(NamedTuple):
    """The arguments of a call: names, for users, of those by place, and options by name."""

    places: tuple[str, ...] = ()
    options: Mapping[str, object] = {}
    offered: str = ""
    """An option that is passed only to a function that takes it."""


class _Written:
    """A default as written in the source."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def call_problem(name: str, signature: Signature | None, arguments: CallArguments) -> str | None:
    """Why a function with this signature cannot be called so; None if it can, or may."""
    if signature is None:
        return None
    options = dict(arguments.options)
    if arguments.offered and takes(signature, arguments.offered):
        options[arguments.offered] = None
    try:
        signature.bind(*arguments.places, **options)
    except TypeError as error:
        bare = Signature([parameter.replace(annotation=Parameter.empty) for parameter in signature.parameters.values()])
        values = [f"{option}={_brief(value)}" for option, value in arguments.options.items()]
        offered = [option for option in options if option not in arguments.options]
        called = f"{name}({', '.join([*arguments.places, *values, *offered])})"
        return f"{name}{bare} cannot be called as {called}: {_reason(error, signature, arguments)}"
    return None


def takes(signature: Signature, option: str) -> bool:
    """True if a function takes an option of this name."""
    return any(
        parameter.kind is parameter.VAR_KEYWORD
        or (parameter.name == option and parameter.kind is not parameter.POSITIONAL_ONLY)
        for parameter in signature.parameters.values()
    )


def written_signature(body: Sequence[ast.stmt], name: str) -> Signature | None:
    """The signature of the function or class ``name``, if the module's source alone is certain."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=found, decorator_list=[]) if found == name:
                return _of_arguments(statement.args)
            case ast.ClassDef(name=found, decorator_list=[], keywords=[]) if found == name:
                return _of_class(statement)
    return None


def plain_value(body: Sequence[ast.stmt], name: str) -> str | None:
    """The kind of object that a name is, if its module's source shows that it cannot be called."""
    if any(name in node.names for statement in body for node in ast.walk(statement) if isinstance(node, ast.Global)):
        return None
    for statement in body:
        match statement:
            case ast.AsyncFunctionDef(name=found, decorator_list=[]) if found == name:
                return "an async function, not a plain one"
            case ast.Import(names=names) if any(
                (alias.asname or alias.name.partition(".")[0]) == name for alias in names
            ):
                return "a module, not a function"
            case (
                ast.Assign(targets=[ast.Name(id=found)], value=value)
                | ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value)
            ) if found == name:
                kind = _kind_of_value(value)
                return None if kind is None else f"{kind}, not a function"
    return None


def _kind_of_value(value: ast.expr) -> str | None:
    """The kind of value of an expression that cannot be called; None for any other."""
    match value:
        case ast.Constant():
            return "None" if value.value is None else f"of type {type(value.value).__name__}"
        case ast.JoinedStr():
            return "of type str"
        case ast.Tuple():
            return "of type tuple"
        case ast.List() | ast.ListComp():
            return "of type list"
        case ast.Dict() | ast.DictComp():
            return "of type dict"
        case ast.Set() | ast.SetComp():
            return "of type set"
        case _:
            return None


def _of_class(statement: ast.ClassDef) -> Signature | None:
    methods = [method for method in statement.body if isinstance(method, ast.FunctionDef)]
    made = [method for method in methods if method.name in ("__init__", "__new__")]
    if len(made) != 1 or made[0].name != "__init__" or made[0].decorator_list:
        return None
    whole = _of_arguments(made[0].args)
    parameters = list(whole.parameters.values())
    if not parameters or parameters[0].kind is Parameter.VAR_POSITIONAL:
        return None
    return whole.replace(parameters=parameters[1:])


def _of_arguments(arguments: ast.arguments) -> Signature:
    by_place = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*[None] * (len(by_place) - len(arguments.defaults)), *arguments.defaults]
    parameters = [
        _parameter(
            argument,
            Parameter.POSITIONAL_ONLY if place < len(arguments.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD,
            defaults[place],
        )
        for place, argument in enumerate(by_place)
    ]
    if arguments.vararg is not None:
        parameters.append(_parameter(arguments.vararg, Parameter.VAR_POSITIONAL))
    parameters += [
        _parameter(argument, Parameter.KEYWORD_ONLY, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append(_parameter(arguments.kwarg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None = None) -> Parameter:
    return Parameter(argument.arg, kind, default=Parameter.empty if default is None else _Written(ast.unparse(default)))


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_CHARACTERS_MAX else text[: VALUE_CHARACTERS_MAX - 3] + "..."


def _reason(error: TypeError, signature: Signature, arguments: CallArguments) -> str:
    """The arguments that do not fit, and the name that was probably meant."""
    unknown = next((name for name in arguments.options if not takes(signature, name)), None)
    meant = nearest(unknown, [name for name in signature.parameters if takes(signature, name)]) if unknown else None
    reason = str(error)
    if meant is not None and meant not in arguments.options:
        return f"there is no option {unknown!r}; did you mean {meant!r}?"
    return f"there is no option {unknown!r}" if unknown is not None else reason


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
