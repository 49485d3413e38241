"""No file imports itself by way of others: also not inside of a function or for types alone."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = {"batchd": ROOT, "batchd_client": ROOT / "client", "batchd_wire": ROOT / "client"}


def modules() -> dict[str, ast.Module]:
    """The modules of the three packages, by name."""
    files = [(file, root) for package, root in PACKAGES.items() for file in sorted((root / package).rglob("*.py"))]
    names = [".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file, root in files]
    return {name: ast.parse(file.read_text()) for name, (file, _root) in zip(names, files, strict=True)}


def imported(tree: ast.Module, known: dict[str, ast.Module]) -> set[str]:
    """The known modules that a module names in imports, wherever they stand."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & known.keys() or {node.module}
    return found & known.keys()


def test_no_module_imports_itself_by_way_of_others() -> None:
    """The error of ``prepare`` shows the circle."""
    known = modules()
    graph = {name: imported(tree, known) - {name} for name, tree in known.items()}

    assert graph["batchd_client.reader"] >= {"batchd_client.batch", "batchd_wire.codes"}
    TopologicalSorter(graph).prepare()


def test_no_file_of_c_includes_itself_by_way_of_others() -> None:
    """Sources that use each other do so through a header."""
    files = [*(ROOT / "batchd").rglob("*.[ch]")]
    graph = {file.name: re.findall(r'#include "(?:.*/)?(.*)"', file.read_text()) for file in files}

    assert "_jpeg.h" in graph["_jpeg_cut.c"]
    assert all(name.endswith(".h") for names in graph.values() for name in names)
    TopologicalSorter(graph).prepare()
