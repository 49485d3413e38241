"""What commands print goes through ``batchd.cli.terminal``: it knows width, encoding and reader."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchd.cli

FOLDER = Path(batchd.cli.__file__).parent
WRITER = FOLDER / "terminal.py"
FUNCTIONS = {"print", "Console", "click.echo", "click.secho", "click.echo_via_pager", "click.confirm", "click.prompt"}
STREAMS = ("sys.stdout.", "sys.stderr.", "sys.__stdout__", "sys.__stderr__")
MODULES = sorted(set(FOLDER.glob("*.py")) - {WRITER})


def writes(source: str) -> Iterator[str]:
    """Yield what prints, or takes a method of an output stream, in the text of a module."""
    for node in ast.walk(ast.parse(source)):
        name = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        if name in FUNCTIONS or name.startswith(STREAMS):
            yield name


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_no_other_module_writes(module) -> None:
    """``terminal.say``, ``note``, ``warn``, ``draw``, ``emit`` and ``progress`` do."""
    assert list(writes(module.read_text())) == []


def test_each_way_to_print_is_found() -> None:
    """The test above can fail."""
    source = "print(1)\nclick.echo(2)\nsys.stderr.write('3')\nConsole()\nterminal.columns(sys.stderr)\n"
    assert sorted(writes(source)) == ["Console", "click.echo", "print", "sys.stderr.write"]
