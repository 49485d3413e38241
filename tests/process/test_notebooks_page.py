"""The programs of docs/notebooks.md, run in order in one process, as in a notebook."""

import ast
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from support.settings import folder_stream, write_settings

PAGE = Path(__file__).parents[2] / "docs" / "notebooks.md"


class FakeBar:
    """The part of tqdm's bar that the page uses, for machines without tqdm."""

    def __init__(self, iterable, *, total):
        self.iterable, self.total, self.done, self.postfix = iterable, total, 0, ""

    def __iter__(self):
        for item in self.iterable:
            yield item
            self.done += 1
        assert self.done == self.total

    def set_postfix_str(self, text):
        self.postfix = text


@pytest.fixture
def tqdm(monkeypatch):
    """Import ``tqdm.auto``, or put a stand-in in its place."""
    if find_spec("tqdm") is None:
        fake = ModuleType("tqdm.auto")
        fake.tqdm = FakeBar
        monkeypatch.setitem(sys.modules, "tqdm", ModuleType("tqdm"))
        monkeypatch.setitem(sys.modules, "tqdm.auto", fake)
    else:
        # its thread would outlive the test
        monkeypatch.setattr("tqdm.auto.tqdm.monitor_interval", 0)


def cells():
    """Return the programs, in order."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def run(cell, names):
    """Run a cell; return the value that the notebook shows for its last expression, or None."""
    program = ast.parse(cell)
    last = program.body[-1]
    shown = None
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Name):
        exec(compile(ast.Module(program.body[:-1], []), str(PAGE), "exec"), names)
        shown = names[last.value.id]._repr_html_()
    else:
        exec(compile(program, str(PAGE), "exec"), names)
    return shown


@pytest.mark.usefixtures("tqdm")
def test_the_programs_of_the_page_run(tmp_path, photos, daemons_folder, monkeypatch, capsys):
    """A batch is shown as pictures, bars count whole epochs, and the last cell ends the daemon."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(daemons_folder))
    monkeypatch.chdir(tmp_path)
    write_settings(tmp_path / "batchd.toml", {"photos": folder_stream(photos)}, {"workers": 1, "memory": "16MiB"})
    names, shown = {}, []
    for cell in cells():
        if "to_torch" in cell and find_spec("torch") is None:
            continue
        shown.append(run(cell, names))
        if "stream.progress()" in cell:
            assert re.match(
                r"epoch \d+, step \d+ of \d+, [\d,]+ samples/s, \d+% waiting$", str(names["stream"].progress())
            )

    (html,) = filter(None, shown)
    assert html.count("<img ") == 8
    stream = names["stream"]
    assert (stream.progress().epoch, stream.progress().step) == (1, stream.steps)
    assert f"epoch 0, step {1 if find_spec('torch') is None else 2} of" in capsys.readouterr().out
    assert list(daemons_folder.iterdir()) == []
