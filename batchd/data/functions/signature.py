"""Checks that a function can be called with the arguments that it will get. Daemon, CLI, workers.

    "mine:generate"  --ast----->  (size, *, rng=None)   nothing is imported
    generate         --inspect->  (size, *, rng=None)   in workers; a decorator's result counts

A function that cannot be called would make every sample a bad one, so this is reported before the
first.

Invariant: a function whose signature is not certain passes; it is never refused for what its source
seems to say.
"""

import ast
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple

from batchd.runtime.suggestions import nearest

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
        bare = Signature([one.replace(annotation=Parameter.empty) for one in signature.parameters.values()])
        values = [f"{option}={_brief(value)}" for option, value in arguments.options.items()]
        offered = [option for option in options if option not in arguments.options]
        called = f"{name}({', '.join([*arguments.places, *values, *offered])})"
        return f"{name}{bare} cannot be called as {called}: {_reason(error, signature, arguments)}"
    return None


def takes(signature: Signature, option: str) -> bool:
    """True if a function takes an option of this name."""
    return any(
        one.kind is one.VAR_KEYWORD or (one.name == option and one.kind is not one.POSITIONAL_ONLY)
        for one in signature.parameters.values()
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
    if any(name in node.names for one in body for node in ast.walk(one) if isinstance(node, ast.Global)):
        return None
    for statement in body:
        match statement:
            case ast.AsyncFunctionDef(name=found, decorator_list=[]) if found == name:
                return "an async function, not a plain one"
            case ast.Import(names=names) if any((one.asname or one.name.partition(".")[0]) == name for one in names):
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
    methods = [one for one in statement.body if isinstance(one, ast.FunctionDef)]
    made = [one for one in methods if one.name in ("__init__", "__new__")]
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
            one,
            Parameter.POSITIONAL_ONLY if place < len(arguments.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD,
            defaults[place],
        )
        for place, one in enumerate(by_place)
    ]
    if arguments.vararg is not None:
        parameters.append(_parameter(arguments.vararg, Parameter.VAR_POSITIONAL))
    parameters += [
        _parameter(one, Parameter.KEYWORD_ONLY, default)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
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
