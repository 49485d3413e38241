"""Users' functions: found without an import, imported unchanged, with short error messages."""

import sys

import numpy as np
import pytest

from batchd.data.functions.find import CallArguments, ModuleNotFound, find_module, function_problems, parse_function
from batchd.data.functions.load import (
    FRAMES_MAX,
    FunctionFailed,
    FunctionUnusable,
    NotAsDeclared,
    call,
    checked_value,
    expect,
    load,
)
from batchd.data.samples.columns import parse_column

BOMB = "raise AssertionError('imported')\n"

# --- finding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "name", "found"),
    [
        (["plain.py"], "plain", "plain.py"),
        (["package/__init__.py"], "package", "package/__init__.py"),
        (["package/__init__.py", "package/inner.py"], "package.inner", "package/inner.py"),
        (["space/inner.py"], "space.inner", "space/inner.py"),
        (["space/deeper/inner.py"], "space.deeper.inner", "space/deeper/inner.py"),
        (["a/__init__.py", "a/b/__init__.py", "a/b/c.py"], "a.b.c", "a/b/c.py"),
    ],
)
def test_a_module_is_found_without_being_imported(code, write, files, name, found):
    """The packages around it, which would raise, are not imported either."""
    for file in files:
        write(file, BOMB)

    module = find_module(name, [code])

    assert module.file == code / found
    assert len(module.digest) == 64
    assert name not in sys.modules


def test_the_digest_covers_the_source(code, write):
    """It covers nothing else."""
    one = (write("one.py", "a = 1"), find_module("one", [code]))[1]
    write("two.py", "a = 1")
    write("three.py", "a = 2")

    assert find_module("two", [code]).digest == one.digest
    assert find_module("three", [code]).digest != one.digest


def test_the_first_folder_wins_and_the_interpreter_is_last(code, write, tmp_path):
    """As with ``sys.path``, a user's module can replace an installed one."""
    write("numpy.py")
    (tmp_path / "other").mkdir()

    assert find_module("numpy", [tmp_path / "other", code]).file == code / "numpy.py"
    assert find_module("numpy", []).file.match("*/numpy/__init__.py")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("augmnt", "there is no module augmnt; did you mean augment? searched: {code}, "),
        ("augmnt", "; [daemon] python_path adds folders, and {python} -m pip install augmnt adds a package"),
        ("augmnet", "; did you mean augment? "),
        ("agumetn", "; did you mean augment? "),
        ("package.inmer", "there is no module package.inmer; did you mean inner? searched: {code}/package"),
        ("packag.inner", "there is no module packag.inner, for there is no packag; did you mean package?"),
        ("augment.inner", "there is no module augment.inner, for augment is no package: it is {code}/augment.py"),
        ("space", "the module space is a folder without __init__.py"),
        ("sys", "the module sys is built into Python"),
        ("qqqq", "{code}-gone (which is not there)"),
    ],
)
def test_a_missing_module_is_reported_with_the_folders(code, write, name, message):
    """The error has the nearest name."""
    write("augment.py")
    write("package/__init__.py", BOMB)
    write("package/inner.py")
    (code / "space").mkdir()

    with pytest.raises(ModuleNotFound) as told:
        find_module(name, [code, code.with_name("code-gone")])

    assert message.format(code=code, python=sys.executable) in str(told.value)


NAMES = """
import os.path
import numpy as np
from json import loads, dumps as write
VALUE = 1
one = two = 3
(three, [four, *rest]) = 1, (2, 3, 4)
annotated: int = 5
declared: int
def function(): inner = 1
async def later(): ...
class Kind:
    attribute = 1
if VALUE:
    in_if = 1
else:
    in_else = 2
try:
    in_try = 1
except ImportError:
    in_except = 1
finally:
    in_finally = 1
for item in (): in_for = 1
with open(os.devnull) as stream, open(os.devnull): in_with = 1
match VALUE:
    case 1: in_match = 1
while False: in_while = 1
lambda_of = lambda argument: argument
"""
DEFINED = (
    "os np loads write VALUE one two three four rest annotated function later Kind in_if in_else in_try in_except in_finally "
    "item in_for stream in_with in_match in_while lambda_of"
)


@pytest.mark.parametrize("name", DEFINED.split())
def test_the_top_level_definitions_of_a_module_are_found(code, write, name):
    """This covers every kind of binding, and executes nothing."""
    write("names.py", BOMB + NAMES)

    assert function_problems(f"names:{name}", [code]) == []


@pytest.mark.parametrize("name", ["declared", "inner", "attribute", "argument", "path", "dumps", "numpy", "nothing"])
def test_a_function_that_is_not_defined_is_a_problem(code, write, name):
    """The message names the file."""
    write("names.py", NAMES)

    (problem,) = function_problems(f"names:{name}", [code])

    assert problem.startswith(f"{code}/names.py does not define '{name}' at its top level; ")


VALUES = """
import numpy as np
import os.path
number = 3
typed: str = "a"
text = f"{number}"
names = ["a"]
pair = 1, 2
table = {}
empty = None
async def later(sample, rng): ...
async def each(sample, rng): yield 1
@decorator
async def run(sample, rng): ...
late = None
def settle():
    global late
    late = print
twice = 3
def twice(sample, rng): ...
made = table["f"]
alias = other = len
from elsewhere import taken
if names:
    perhaps = 3
"""


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("np", "a module, not a function"),
        ("os", "a module, not a function"),
        ("number", "of type int, not a function"),
        ("typed", "of type str, not a function"),
        ("text", "of type str, not a function"),
        ("names", "of type list, not a function"),
        ("pair", "of type tuple, not a function"),
        ("table", "of type dict, not a function"),
        ("empty", "None, not a function"),
        ("later", "an async function, not a plain one"),
        ("each", "an async function, not a plain one"),
        *[(name, None) for name in ("run", "late", "twice", "made", "alias", "taken", "perhaps")],
    ],
)
def test_objects_that_clearly_cannot_be_called_are_a_problem(code, write, name, what):
    """The source text must be unambiguous.

    Objects of a decorator or an import are not reported, because they may be functions.
    """
    write("values.py", BOMB + VALUES)

    told = function_problems(f"values:{name}", [code], CallArguments(("sample", "rng")))

    assert told == ([] if what is None else [f"values:{name} is {what} ({code}/values.py)"])


@pytest.mark.parametrize("missing", ["nomodule", "datasets", "x"])
def test_only_a_near_module_is_proposed(code, write, missing):
    """Some installed modules always have a name that is merely similar."""
    for module in ("mdurl", "dataclasses", "augment"):
        write(f"{module}.py")

    with pytest.raises(ModuleNotFound) as told:
        find_module(missing, [code])

    assert "did you mean" not in str(told.value)


def test_a_misspelt_function_is_reported_with_the_nearest_name(code, write):
    """Without a near name, the error lists all names."""
    write("names.py", "def augment(): ...\ndef other(): ...")

    assert function_problems("names:augmnet", [code])[0].endswith("; did you mean augment?")
    assert function_problems("names:xyz", [code])[0].endswith("; defined there: augment, other")
    assert function_problems("names:augment.method", [code]) == []


@pytest.mark.parametrize("text", ["from other import *", "def __getattr__(name): ..."])
def test_after_a_star_import_every_name_passes(code, write, text):
    """The imported module is not searched."""
    write("names.py", text)

    assert function_problems("names:anything", [code]) == []


@pytest.mark.parametrize(
    ("text", "problem"), [("def f(:\n", "names.py, line 1 is no Python: "), ("a = '\0'", "names.py")]
)
def test_a_module_that_is_no_python_is_a_problem(code, write, text, problem):
    """The problem has its line."""
    write("names.py", text)

    assert problem in function_problems("names:f", [code])[0]
    assert "is no Python" in function_problems("names:f", [code])[0]


@pytest.mark.parametrize(
    "text", ["", "module", "module:", ":name", "a b:c", "a.:b", "a:b.", "1a:b", "a:b:c", "a" * 300 + ":b"]
)
def test_text_that_names_no_function_is_refused(text):
    """The error has the right form."""
    with pytest.raises(ValueError, match=r"must be written as .package\.module:name"):
        parse_function(text)


# --- importing ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("importable")
def test_a_function_is_imported_from_the_folders(write):
    """Classes and members of classes are imported, too."""
    write("mine.py", "class Kind:\n    @staticmethod\n    def method(): return 7\ndef function(): return 8")

    assert load("mine:function")() == 8
    assert load("mine:Kind").__name__ == "Kind"
    assert load("mine:Kind.method")() == 7


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("import not_there_at_all", "mine:f", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("def f(:", "mine:f", "SyntaxError: "),
        ("raise SystemExit(3)", "mine:f", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "mine:f", "KeyboardInterrupt"),
        ("f = 3", "mine:f", "mine:f is int, which cannot be called"),
        ("", "mine:f", "AttributeError: module 'mine' has no attribute 'f'"),
        ("", "other:f", "there is no module other"),
    ],
)
def test_failed_imports_are_reported(write, text, name, message):
    """The module may do anything; the process survives."""
    write("mine.py", text)

    with pytest.raises(FunctionUnusable) as told:
        load(name)

    assert message in str(told.value)


@pytest.mark.usefixtures("importable")
def test_the_place_of_a_failed_import_is_reported(write):
    """It is the line that imports the missing module, also two modules deep, without importlib."""
    outer = write("mine.py", "import deeper_one")
    inner = write("deeper_one.py", "\nimport not_there_at_all")

    with pytest.raises(FunctionUnusable) as told:
        load("mine:f")

    assert str(told.value).splitlines() == [
        "importing mine:f in a worker: ModuleNotFoundError: No module named 'not_there_at_all'",
        f"  to install it where batchd runs: {sys.executable} -m pip install not_there_at_all",
        f"  at {inner}:2 in <module>: import not_there_at_all",
        f"  from {outer}:1 in <module>: import deeper_one",
    ]


@pytest.mark.usefixtures("importable")
def test_a_changed_source_is_not_executed(code, write):
    """It would make other bytes at the same positions."""
    write("mine.py", "def f(): ...")
    expect([str(code)], {"mine": find_module("mine", [code]).digest})
    write("mine.py", BOMB)

    with pytest.raises(FunctionUnusable, match=r"mine\.py has changed since the daemon started"):
        load("mine:f")


@pytest.mark.usefixtures("importable")
def test_a_name_conflict_is_reported(write):
    """The process has imported another module of this name, and would silently use that one."""
    write("numpy.py", "def f(): ...")

    with pytest.raises(FunctionUnusable, match=r"gives .*numpy/__init__\.py instead of .*give yours another name"):
        load("numpy:f")


# --- exceptions -----------------------------------------------------------------------------------


def deep(levels):
    if levels:
        deep(levels - 1)
    raise KeyError("no such key")


def test_an_exception_is_reported_with_its_innermost_places_first():
    """So they remain when the text is cut."""
    with pytest.raises(FunctionFailed) as told:
        call(deep, 1)

    first, *places = str(told.value).splitlines()
    assert first == "KeyError: 'no such key'"
    assert [place.split()[0] for place in places] == ["at", "from"]
    assert places[0].endswith('in deep: raise KeyError("no such key")')
    assert places[1].endswith("in deep: deep(levels - 1)")
    assert all(__file__ in place for place in places)


def test_a_deep_traceback_is_cut():
    """The innermost places stay."""
    with pytest.raises(FunctionFailed) as told:
        call(deep, 50)

    assert len(str(told.value).splitlines()) == 1 + FRAMES_MAX
    assert "raise KeyError" in str(told.value).splitlines()[1]


def raise_(error):
    raise error


class Rude(Exception):  # noqa: N818  says what it is
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (SystemExit(), "SystemExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (StopIteration(3), "StopIteration: 3"),
        (ValueError("two\nlines\tand \x1b[31mcolour"), "ValueError: two lines and \\x1b[31mcolour"),
        (ValueError("x" * 10_000), "ValueError: " + "x" * 397 + "..."),
        (Rude(), "Rude: (its message cannot be read: RuntimeError)"),
        (OSError(2, "gone"), "FileNotFoundError: [Errno 2] gone"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_exception_is_reported_on_one_line(error, first):
    """The text is limited, and has nothing that a terminal would execute."""
    with pytest.raises(FunctionFailed) as told:
        call(raise_, error)

    assert str(told.value).splitlines()[0] == first


def test_the_cause_is_reported():
    """The cause often says more than the exception."""

    def wrapped():
        try:
            deep(0)
        except KeyError as error:
            raise ValueError("cannot") from error

    with pytest.raises(FunctionFailed, match=r"ValueError: cannot\n  because of KeyError: 'no such key'\n"):
        call(wrapped)


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "no memory"), OSError(24, "too many files")])
def test_faults_of_the_process_itself_are_raised(error):
    """They do not turn a good sample into a bad one."""
    with pytest.raises(type(error)):
        call(raise_, error)


# --- values ---------------------------------------------------------------------------------------


class Tensor:
    """The part of a tensor of torch or TensorFlow that batchd uses."""

    def __init__(self, array):
        self._array = array

    def numpy(self):
        if isinstance(self._array, Exception):
            raise self._array
        return self._array


class Picture:
    """The part of an image of PIL that batchd uses."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self._array = array


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("uint8[2,3]", np.ones((2, 3), np.uint8), np.ones((2, 3), np.uint8)),
        ("uint8[?,3]", np.ones((7, 3), np.uint8), np.ones((7, 3), np.uint8)),
        ("float32", np.float32(1.5), np.float32(1.5)),
        ("float32", np.array(1.5, np.float32), np.float32(1.5)),
        ("float32", 1.5, np.float32(1.5)),
        ("float32", 2, np.float32(2)),
        ("int64", 3, np.int64(3)),
        ("uint8", 255, np.uint8(255)),
        ("bool", True, np.bool_(True)),
        ("int32[3]", [1, 2, 3], np.array([1, 2, 3], np.int32)),
        ("float32[2,2]", [[1, 2.5], (3, 4)], np.array([[1, 2.5], [3, 4]], np.float32)),
        ("uint64", (1 << 64) - 1, np.uint64((1 << 64) - 1)),
        ("int16[2]", Tensor(np.array([1, 2], np.int16)), np.array([1, 2], np.int16)),
        ("uint8[2,2,3]", Picture(np.full((2, 2, 3), 9, np.uint8)), np.full((2, 2, 3), 9, np.uint8)),
        ("uint8[2,2]", np.arange(16, dtype=np.uint8).reshape(4, 4)[::2, ::-2], np.array([[3, 1], [11, 9]], np.uint8)),
    ],
)
def test_a_value_of_the_declared_type_is_accepted(text, value, expected):
    """It is an array of any library, or a number of Python, which has no dtype."""
    array = checked_value(parse_column("x", text), value)

    assert array.dtype == expected.dtype
    assert array.shape == np.shape(expected)
    assert array.flags.c_contiguous
    assert np.array_equal(array, expected)


@pytest.mark.parametrize(
    ("text", "value", "message"),
    [
        ("uint8[2,3]", np.ones((3, 2), np.uint8), r"'x' is uint8\[3,2\] instead of uint8\[2,3\]"),
        ("uint8[2,3]", np.ones((2, 3)), r"'x' is float64\[2,3\] instead of uint8\[2,3\]"),
        ("uint8[?,3]", np.ones(3, np.uint8), r"'x' is uint8\[3\] instead of uint8\[\?,3\]"),
        ("float32", np.float64(1), "'x' is float64 instead of float32"),
        ("float32", np.array([1], ">f4"), r"'x' is >f4\[1\] instead of float32"),
        ("int64", 1.5, "'x' is float64 instead of int64"),
        ("uint8", 256, "'x' is 256, which is not uint8"),
        ("uint8", -1, "'x' is -1, which is not uint8"),
        ("int64", 1 << 70, "'x' is object instead of int64"),
        ("bool", 1, "'x' is int64 instead of bool"),
        ("int64", True, "'x' is bool instead of int64"),
        ("int8[2]", [1, 300], r"'x' is \[1, 300\], which is not int8"),
        ("int8[2]", [1.5, 2], r"'x' is float64\[2\] instead of int8\[2\]"),
        ("int8[2]", ["a", "b"], r"'x' is str32\[2\] instead of int8\[2\]"),
        ("float32", None, r"'x' is nothing \(None\) instead of float32"),
        ("float32", object(), "'x' is object instead of float32"),
        ("image", np.ones(3, np.uint8), "'x' is numpy.ndarray instead of the bytes of an image"),
        ("text", b"bytes", "'x' is bytes instead of text"),
        ("int64", "7", "'x' is str instead of int64"),
    ],
)
def test_a_value_of_another_type_is_reported(text, value, message):
    """The error has its type and the declared one; nothing is cast silently."""
    with pytest.raises(NotAsDeclared, match=message):
        checked_value(parse_column("x", text), value)


def test_the_error_of_a_value_that_cannot_become_an_array_is_reported():
    """A tensor on a GPU has a remedy in its own error."""
    with pytest.raises(FunctionFailed, match=r"TypeError: use Tensor\.cpu\(\)"):
        checked_value(parse_column("x", "float32"), Tensor(TypeError("use Tensor.cpu()")))
    with pytest.raises(FunctionFailed, match="ValueError"):
        checked_value(parse_column("x", "float32[2]"), [[1], [2, 3]])


def test_bytes_and_text_are_accepted_unchanged():
    """The test has each kind of bytes."""
    for value in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        assert bytes(checked_value(parse_column("x", "image"), value)) == b"abc"
    assert checked_value(parse_column("x", "text"), "abc") == "abc"
