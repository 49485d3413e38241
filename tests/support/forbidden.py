"""Finds code in a module's source that could run data or read arbitrary memory.

For one unit test.

It reads the syntax tree and follows names through imports (``import yaml as y``, ``from os import
system``), so that it finds the full name of each object that is mentioned, with or without a call.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

MODULES = {
    "_pickle", "pickle", "pickletools", "cPickle", "dill", "cloudpickle", "joblib", "jsonpickle", "copyreg", "shelve", "dbm",
    "marshal", "builtins", "code", "codeop", "runpy", "imp", "importlib.util", "importlib.machinery", "importlib.abc",
    "multiprocessing", "_multiprocessing", "concurrent.futures.process", "xmlrpc", "logging.config", "ctypes", "_ctypes", "cffi",
}  # fmt: skip
"""Forbidden imports: they load objects or code from bytes, or bypass checks of memory."""
BUILTINS = {"eval", "exec", "compile", "__import__", "__builtins__"}
NAMES = {
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell",
    "concurrent.futures.ProcessPoolExecutor", "logging.handlers.SocketHandler", "yaml.load", "yaml.load_all",
    "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "pandas.read_pickle", "torch.load",
    "types.FunctionType", "types.CodeType",
}  # fmt: skip
"""These load objects, start a shell, or use a function that does."""
METHODS = {"recv_pyobj", "send_pyobj", "from_address"}
"""Forbidden attributes: ZeroMQ's sockets pickle with the first two, ctypes reads any address."""
ARRAY_LOADERS = {"numpy.load", "numpy.lib.format.read_array", "numpy.lib.npyio.NpzFile", "numpy.lib.npyio.load"}
IMPORTERS = {"importlib.import_module", "importlib.reload"}


class Finding(NamedTuple):
    """A forbidden object: its full name, and its line."""

    name: str
    line: int


def forbidden_in(source: str) -> list[Finding]:
    """Every forbidden object in the text of a module."""
    nodes = list(ast.walk(ast.parse(source)))
    names = dict(_imported_names(nodes))
    found = {finding for node in nodes for finding in _findings(node, names)} | set(_handed_on(nodes, names))
    return sorted(found, key=lambda one: one.line)


def _handed_on(nodes: list[ast.AST], names: dict[str, str]) -> Iterator[Finding]:
    """Objects that import modules, mentioned without a call: their arguments are unknown."""
    called = {node.func for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and node not in called:
            full = _full_name(node, names)
            if full in IMPORTERS:
                yield Finding(full, node.lineno)


def _imported_names(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Each name that an import binds anywhere, with the full name of its object."""
    for node in nodes:
        match node:
            case ast.Import():
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    yield (alias.asname, alias.name) if alias.asname else (top, top)
            case ast.ImportFrom(module=str(module), level=0):
                for alias in node.names:
                    yield alias.asname or alias.name, f"{module}.{alias.name}"


def _findings(node: ast.AST, names: dict[str, str]) -> Iterator[Finding]:
    for name in _forbidden_names(node, names):
        yield Finding(name, node.lineno)


def _forbidden_names(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names if _is_of(alias.name, MODULES))
        case ast.ImportFrom():
            yield from _forbidden_from(node)
        case ast.Name(id=name) if name in BUILTINS:
            yield name
        case ast.Name() | ast.Attribute():
            full = _full_name(node, names)
            if full is not None and (_is_of(full, MODULES) or _is_of(full, NAMES)):
                yield full
            if isinstance(node, ast.Attribute) and node.attr in METHODS:
                yield node.attr
        case ast.Call():
            yield from _forbidden_call(node, names)


def _forbidden_from(node: ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        full = f"{node.module or ''}.{alias.name}"
        if alias.name == "*" or node.level:
            # The names of a star import cannot be followed.
            yield f"from {'.' * node.level}{node.module or ''} import {alias.name}"
        elif _is_of(full, MODULES) or _is_of(full, NAMES):
            yield full


def _forbidden_call(node: ast.Call, names: dict[str, str]) -> Iterator[str]:
    full = _full_name(node.func, names)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if full in ARRAY_LOADERS and not _is_false(keywords.get("allow_pickle")):
        yield f"{full} without allow_pickle=False"
    if "allow_pickle" in keywords and not _is_false(keywords["allow_pickle"]):
        yield "allow_pickle"
    if "shell" in keywords and not _is_false(keywords["shell"]):
        yield "shell"
    if full is not None and full.startswith("subprocess.") and None in keywords:
        yield f"{full} with keywords that do not stand there"
    if full in IMPORTERS:
        match node.args:
            case [ast.Constant(value=str(module)), *_]:
                if _is_of(module, MODULES):
                    yield module
            case _:
                yield full
    match node:
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(attribute)), *_]):
            owner_name = _full_name(owner, names)
            if attribute in METHODS or (
                owner_name is not None and _is_of(f"{owner_name}.{attribute}", MODULES | NAMES)
            ):
                yield f"getattr {attribute}"


def _full_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """The full name of a name, or of a chain of attributes that starts with one.

    None if no import bound it.
    """
    match node:
        case ast.Name(id=name):
            return names.get(name)
        case ast.Attribute(value=value, attr=attribute):
            owner = _full_name(value, names)
            return None if owner is None else f"{owner}.{attribute}"
        case _:
            return None


def _is_of(name: str, forbidden: set[str]) -> bool:
    """Whether it is one of these, or inside one of these."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in forbidden for count in range(1, len(parts) + 1))


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
