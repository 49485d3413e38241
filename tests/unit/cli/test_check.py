"""`batchd check` in one run.

It reports every problem at its own line, and no consequence of another problem.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from batchd.cli.main import main
from support.images import write_photos

pytestmark = pytest.mark.usefixtures("forked_children")
Told = dict[str, tuple[int | None, str]]


class Checker(NamedTuple):
    """A folder with some data, and `batchd check` of a configuration in it."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, text: str, *arguments: str) -> Told:
        """Return line and message of each problem by its path; empty if the file is valid."""
        file = self.folder / "batchd.toml"
        file.write_text(f'[daemon]\nruntime_dir = "run"\n{text}')
        with pytest.raises(SystemExit) as ended:
            main(["check", str(file), "--format", "json", *arguments])
        problems = json.loads(self.capsys.readouterr().out)["problems"]
        told = {
            one["key"]: (one["line"], one["problem"] + (f"; {one['help']}" if one["help"] else "")) for one in problems
        }
        assert bool(told) == (ended.value.code not in (0, None))
        return told


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Checker:
    write_photos(tmp_path / "photos", {"": 1})
    np.save(tmp_path / "x.npy", np.zeros((10, 4, 4, 3), np.uint8))
    return Checker(tmp_path, capsys)


def test_a_problem_in_one_place_hides_nothing_elsewhere(check: Checker) -> None:
    """The file has a wrong value, a missing source and wrong steps, in one stream and in others."""
    told = check(
        """[streams.a]
source = { type = "folder", path = "fotos" }
batch_size = "4"
pipeline = [
    { op = "decode" },
    { op = "resize", size = 224 },
    { op = "one_hot", field = "lable", classes = 2 },
]
[streams.b]
source = { type = "folder", path = "photos" }
batch_size = 4
[[streams.b.pipeline]]
op = "decode"
[[streams.b.pipeline]]
op = "resize"
size = [8, 8]
field = "imge"
[streams.c]
source = { type = "foldr" }
batch_size = 4
pipeline = [{ op = "tokenize", file = "none.json", max_length = 4 }]
"""
    )

    assert {path: line for path, (line, _message) in told.items()} == {
        "streams.a.source.path": 4,
        "streams.a.batch_size": 5,
        "streams.a.pipeline[1].size": 8,
        "streams.a.pipeline[2].field": 9,
        "streams.b.pipeline[1].field": 19,
        "streams.c.source.type": 21,
        "streams.c.pipeline[0].file": 23,
    }
    assert told["streams.b.pipeline[1].field"][1].endswith("a sample has 'image', 'label'; did you mean 'image'?")


def test_a_source_that_only_a_scan_finds_wrong_is_reported_beside_other_problems(check: Checker) -> None:
    """Neither a wrong key, nor another source, nor too little memory hides it.

    Nor its own neighbour.
    """
    (check.folder / "bad.csv").write_text('x\n1\n2,"3\n')
    (check.folder / "empty.jsonl").write_text("\n")
    table = '{ type = "csv", path = "bad.csv", fields = { x = "int64" } }'
    lines = '{ type = "jsonl", root = ".", shards = ["empty.jsonl"], fields = { x = "int64" } }'
    absent = '{ type = "npy", path = "absent.npy", field = "x" }'
    scanned = f"[streams.b]\nsource = {table}\nbatch_size = 2\n[streams.c]\nsource = {lines}\nbatch_size = 2\n"
    mixed = f'[streams.d]\nsource = {{ type = "concat", sources = [{table}, {lines}, {absent}] }}\nbatch_size = 2\n'
    wanted = {"streams.b.source", "streams.c.source"}
    parts = {f"streams.d.source.sources[{number}]{key}" for number, key in enumerate(("", "", ".path"))}

    assert (
        set(check(f"[streams.a]\nsource = {absent}\nbatch_size = 2\n{scanned}")) == {"streams.a.source.path"} | wanted
    )
    assert (
        set(check(f"[streams.a]\nsource = {PHOTOS}\npipeline = [{FIRST}]\nbatch_size = 0\n{scanned}"))
        == {"streams.a.batch_size"} | wanted
    )
    assert set(check(f"wokers = 2\n{scanned}{mixed}")) == {"daemon.wokers"} | wanted | parts
    short = check(f'memory = "1KiB"\n[streams.a]\nsource = {PHOTOS}\nbatch_size = 1\npipeline = [{FIRST}]\n{scanned}')
    assert {"daemon.memory"} | wanted == set(short)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (
            'source = { type = "list", path = "list.txt" }\npipeline = [DECODE]',
            "a.txt: not a JPEG, PNG",
        ),
        ('source = { type = "glob", root = ".", patterns = ["*.tif"] }\npipeline = [DECODE]', "a.tif: not a JPEG, PNG"),
        (
            'source = X\npipeline = [{ op = "call", function = "mine:f", outputs = { y = "int64" } }]',
            "gives another type",
        ),
        ('source = X\npipeline = [{ op = "call", function = "mine:g" }]', "No module named 'absent_module'"),
        ('source = X\npipeline = [{ op = "call", function = "mine:dies" }]', "it ended its process by"),
        ('source = { type = "python", function = "mine:D", fields = { x = "int64[2]" } }', "mine:D"),
        ('source = { type = "python", function = "mine:D", fields = { x = "text" } }\npipeline = [BYTES]', "mine:D"),
        (
            'source = { type = "csv", path = "t.csv", fields = { x = "int64" } }',
            "which is no whole number, so not int64",
        ),
        (
            'source = { type = "csv", path = "t.csv", fields = { x = "text" } }\npipeline = [SHORT]',
            "more than length = 2",
        ),
    ],
)
def test_what_stops_a_stream_at_its_first_batch_is_found_by_making_samples(
    check: Checker, stream: str, reason: str
) -> None:
    """A few samples are made in another process, with the user's functions.

    A good one is enough.
    """
    (check.folder / "a.txt").write_text("words")
    (check.folder / "list.txt").write_text("a.txt 1\n")
    (check.folder / "a.tif").write_bytes(b"II*\0" + bytes(100))
    (check.folder / "t.csv").write_text("x\nmany\nwords\n")
    (check.folder / "mine.py").write_text(
        "import os\ndef f(sample, rng): return {'y': 'words'}\ndef dies(sample, rng): os.abort()\n"
        "class D:\n def __len__(self): return 3\n def __getitem__(self, i): return {'x': 1.5}\n"
    )
    if "mine:g" in stream:
        (check.folder / "mine.py").write_text("import absent_module\ndef g(sample, rng): ...\n")
    for word, step in (
        ("DECODE", FIRST),
        ("BYTES", '{ op = "text_bytes", field = "x", length = 8 }'),
        ("SHORT", '{ op = "text_bytes", field = "x", length = 2, truncation = false }'),
        ("X", '{ type = "npy", path = "x.npy", field = "x" }'),
    ):
        stream = stream.replace(word, step)

    told = check(f"[streams.a]\nbatch_size = 1\n{stream}\n")

    assert list(told) == ["streams.a"]
    assert reason in told["streams.a"][1]
    assert check(f"[streams.a]\nbatch_size = 1\nmax_bad_fraction = 1.0\n{stream}\n") in ({}, told)


def test_a_sample_that_is_good_is_enough(check: Checker) -> None:
    """Bad samples among good ones are what on_error is for."""
    (check.folder / "t.csv").write_text("x\n1\n" + "word\n" * 4)

    assert (
        check('[streams.a]\nbatch_size = 1\nsource = { type = "csv", path = "t.csv", fields = { x = "int64" } }') == {}
    )


def test_the_configuration_is_named_as_in_other_commands(check: Checker) -> None:
    """--config does what the argument does; two different ones are refused."""
    assert check(f"[streams.a]\nsource = {OTHERS}\nbatch_size = 1\n") == {}
    file = str(check.folder / "batchd.toml")
    for arguments, code in ((["-c", file], None), (["--config", file, file], None), (["-c", "other.toml", file], 2)):
        with pytest.raises(SystemExit) as ended:
            main(["check", *arguments])
        assert ended.value.code in (code, code or 0)


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ('{ op = "decode", color = "red" }, { op = "resize", size = [4, 4] }, { op = "normalize" }', ["[0].color"]),
        ('{ op = "decode" }, { op = "resize", field = "imge", size = [4, 4] }, { op = "normalize" }', ["[1].field"]),
        ('{ op = "decode" }, { op = "resize", field = "picture", size = [4, 4] }', ["[1].field"]),
        ('{ op = "decode" }, { op = "rezise", size = [4, 4] }, { op = "one_hot", field = "lable", classes = 2 }',
         ["[1].op", "[2].field"]),
        ('{ op = "decode" }, { op = "nonsense", size = [4, 4] }, { op = "cast", field = "b", dtype = "int8" }', ["[1].op"]),
        ('{ op = "decode" }, { op = "resize", field = "imge", size = 4 }', ["[1].field", "[1].size"]),
        ('{ op = "drop", fields = "image" }, { op = "cast", field = "label", dtype = "int8" }', ["[0].fields"]),
        ('{ op = "drop", fields = ["imag", "x"] }, { op = "one_hot", classes = 3 }', ["[0].fields[0]"]),
        ('{ op = "drop", fields = ["image"] }, { op = "resize", size = [4, 4] }', ["[1].field"]),
        (('{ op = "rename", field = "lable", to = "y" }, { op = "drop", fields = ["image"] }, { op = "one_hot", field = "y", '
         'classes = 3 }'), ["[0].field"]),
        ('"decode", { op = "cast", field = "x", dtype = "int8" }', ["[0]"]),
        ('{ op = "call", function = 3 }, { op = "cast", field = "score", dtype = "int8" }', ["[0].function"]),
    ],
)  # fmt: skip
def test_consequences_of_an_earlier_mistake_are_not_reported(check: Checker, steps: str, wrong: list[str]) -> None:
    """A wrong step hides its missing effect and the fields that it leaves at the end."""
    source = 'source = { type = "folder", path = "photos" }'

    told = check(f"[streams.a]\n{source}\nbatch_size = 4\npipeline = [{steps}]\n")

    assert sorted(told) == [f"streams.a.pipeline{path}" for path in wrong]


GOOD = """[streams.photos]
source = { type = "folder", path = "photos" }
batch_size = 4
lag = "lockstep"
max_skew = 3
pipeline = [{ op = "decode" }, { op = "resize", size = [8, 8] }]
"""


@pytest.mark.parametrize(
    ("right", "wrong", "key", "text"),
    [
        ("batch_size", "batchsize", "streams.photos.batchsize", "unknown key; did you mean batch_size?"),
        ("batch_size", "bs", "streams.photos.bs", "unknown key; did you mean batch_size?"),
        ("source", "soruce", "streams.photos.soruce", "unknown key; did you mean source?"),
        ("pipeline", "pipline", "streams.photos.pipline", "unknown key; did you mean pipeline?"),
        ("pipeline", "transforms", "streams.photos.transforms", "unknown key; did you mean pipeline?"),
        ("lag", "lagg", "streams.photos.lagg", "unknown key; did you mean lag?"),
        ("max_skew", "max_skwe", "streams.photos.max_skwe", "unknown key; did you mean max_skew?"),
        ("path", "pth", "streams.photos.source.pth", "unknown key; did you mean path?"),
        ("type =", "tpye =", "streams.photos.source.type", 'missing; write type = "folder" instead of tpye = "folder"'),
        (
            'op = "dec',
            'opp = "dec',
            "streams.photos.pipeline[0].op",
            'missing; write op = "decode" instead of opp = "decode"',
        ),
        ("size = [", "sise = [", "streams.photos.pipeline[1].sise", "unknown key; did you mean size?"),
        ("[streams.", "[stream.", "stream", "unknown key; did you mean streams?"),
        ("[streams.photos]", "[photos]", "photos", "unknown key; did you mean [streams.photos]?"),
    ],
)
def test_one_slip_is_one_problem(check: Checker, right: str, wrong: str, key: str, text: str) -> None:
    """The key that was meant is not missing, too, and what needs it is not wrong."""
    assert {path: message for path, (_line, message) in check(GOOD.replace(right, wrong, 1)).items()} == {key: text}


def test_a_missing_key_beside_a_strange_one_is_another_problem(check: Checker) -> None:
    """The two have nothing to do with each other."""
    told = check(GOOD.replace("batch_size = 4", "colour = 4"))

    assert told.keys() == {"streams.photos.batch_size", "streams.photos.colour"}
    assert told["streams.photos.batch_size"][1] == "missing"


@pytest.mark.parametrize("size", ["[8]", "8", '"8x8"', "[8, 8, 8]"])
def test_an_invalid_size_is_reported_with_its_form_or_its_length(check: Checker, size: str) -> None:
    """The problem is at the key, for each kind of mistake."""
    source = 'source = { type = "folder", path = "photos" }'

    told = check(
        f'[streams.a]\n{source}\nbatch_size = 4\npipeline = [{{ op = "decode" }}, {{ op = "resize", size = {size} }}]\n'
    )

    ((path, (line, message)),) = told.items()
    assert (path, line) == ("streams.a.pipeline[1].size", 6)
    assert "[224, 224]" in message or "2 or fewer items, not 3" in message


@pytest.mark.parametrize(
    ("step", "help_text"),
    [
        ('op = "random_flip", p = 0.5', "did you mean probability?"),
        ('op = "random_flip", o = 0.5', "known here: "),
        ('op = "decode", top = 1', "known here: "),
    ],
)
def test_the_key_that_names_the_step_is_never_proposed(check: Checker, step: str, help_text: str) -> None:
    """The step has that key already. Another key may be proposed, also for a shortened one."""
    source = 'source = { type = "folder", path = "photos", tipe = 1 }'

    told = check(f'[streams.a]\n{source}\nbatch_size = 4\npipeline = [{{ op = "decode" }}, {{ {step} }}]\n')

    key = step.split()[3]
    assert told[f"streams.a.pipeline[1].{key}"][1].startswith(f"unknown key; {help_text}")
    assert not {"op", "type"} & set(re.findall(r"\w+", " ".join(text for _line, text in told.values())))


def test_a_field_that_a_step_removed_is_reported_with_that_step(check: Checker) -> None:
    """The field's name is right, so no other name is proposed."""
    steps = (
        '[{ op = "decode" }, { op = "resize", size = [4, 4] }, { op = "drop", fields = ["label"] }, '
        '{ op = "one_hot", classes = 3 }]'
    )

    told = check(f'[streams.a]\nsource = {{ type = "folder", path = "photos" }}\nbatch_size = 4\npipeline = {steps}\n')

    message = told["streams.a.pipeline[3].field"][1]
    assert (
        message == "\"one_hot\" is done to 'label', and a sample has 'image'; pipeline[2], \"drop\", took 'label' away"
    )


def test_parts_of_a_source_are_reported_one_by_one(check: Checker) -> None:
    """Each problem is at its own line.

    The columns are those of a valid part, so steps are checked as well.
    """
    told = check(
        """[streams.a]
batch_size = 4
pipeline = [{ op = "decode" }, { op = "resize", size = [4, 4] }, { op = "cast", field = "form", dtype = "int8" }]
[streams.a.source]
type = "mix"
weights = [1, 1, 1]
source_field = "from"
sources = [
    { type = "folder", path = "photos" },
    { type = "folder", path = "none" },
    { type = "folder", pth = "photos" },
]
"""
    )

    assert {path: line for path, (line, _message) in told.items()} == {
        "streams.a.pipeline[2].field": 5,
        "streams.a.source.sources[1].path": 12,
        "streams.a.source.sources[2].pth": 13,
    }
    assert "did you mean 'from'?" in told["streams.a.pipeline[2].field"][1]


def test_parts_that_do_not_agree_are_reported_at_the_source(check: Checker) -> None:
    """Each part is valid by itself."""
    parts = '[{ type = "folder", path = "photos" }, { type = "npy", path = "x.npy" }]'

    told = check(f'[streams.a]\nsource = {{ type = "concat", sources = {parts} }}\nbatch_size = 4\n')

    assert list(told) == ["streams.a.source"]
    assert (
        "sources[1] has image: uint8[4,4,3], but sources[0] has image: image, label: int64"
        in told["streams.a.source"][1]
    )


def test_a_wrong_key_of_the_daemon_hides_nothing(check: Checker) -> None:
    """A key that is already reported gets no second message."""
    stream = '[streams.a]\nsource = { type = "npy", path = "y.npy" }\nbatch_size = 4\nmax_skew = 3\npipeline = [{ op = "x" }]\n'

    told = check(f'workers = 0\ntcp = "nowhere"\n{stream}')

    assert sorted(told) == [
        "daemon.tcp",
        "daemon.workers",
        "streams.a.max_skew",
        "streams.a.pipeline[0].op",
        "streams.a.source.path",
    ]
    assert told["streams.a.max_skew"][1] == 'max_skew counts only with lag = "lockstep"'


def test_values_of_the_command_line_are_not_looked_for_in_the_file(check: Checker) -> None:
    """This also holds for problems that appear only after the file was read."""
    text = '[streams.a]\nsource = { type = "npy", path = "x.npy" }\nbatch_size = 4\n'

    told = check(text, "--set", f"streams.a.source.path={check.folder}/y.npy")

    expected = f"there is no file {check.folder}/y.npy (set by --set streams.a.source.path)"
    assert told == {"streams.a.source.path": (None, expected)}


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ('indices = "none.txt"', ".indices", "there is no file {}/none.txt"),
        ('indices = "good.txt"', "", ""),
        ('indices = "far.txt"', ".indices", "{}/far.txt:2: 10 is not a sample; there are 10, counted from 0"),
        ('indices = "below.txt"', ".indices", "{}/below.txt:1: not the number of a sample: -3"),
        ('indices = "below.npy"', ".indices", "{}/below.npy:1: -3 is not a sample; there are 10, counted from 0"),
        ('indices = "words.txt"', ".indices", "{}/words.txt:2: not the number of a sample: two"),
        ('indices = "empty.txt"', ".indices", "{}/empty.txt names no sample; each line is a number"),
        ("stop = 11", "", "stop = 11, but the source has 10 samples"),
        ("stop = 10", "", ""),
        ('start = "99%", stop = 9', "", "the range from 99% to 9 of 10 samples is from 9 to 9, which holds none"),
    ],
)  # fmt: skip
def test_a_subset_is_checked_as_the_daemon_checks_it(check: Checker, options: str, key: str, message: str) -> None:
    """`check` reads its file, and compares it with the source's length if a header has that."""
    contents = {"good": "9\n0\n", "far": "9\n10\n", "below": "-3\n", "words": "1\ntwo\n", "empty": "# none\n"}
    for name, content in contents.items():
        (check.folder / f"{name}.txt").write_text(content)
    np.save(check.folder / "below.npy", np.array([0, -3]))

    told = check(
        f'[streams.a]\nsource = {{ type = "subset", of = {{ type = "npy", path = "x.npy" }}, {options} }}\nbatch_size = 2\n'
    )

    assert told == ({f"streams.a.source{key}": (4, message.format(check.folder))} if message else {})


def test_indices_of_a_source_that_needs_a_scan_are_checked(check: Checker) -> None:
    """`check` validates the indices by themselves, and against a scan of the source."""
    (check.folder / "zero.txt").write_text("0\n")
    (check.folder / "one.txt").write_text("1\n")
    np.save(check.folder / "below.npy", np.array([0, -3]))
    text = """[streams.a]
source = {{ type = "subset", of = {{ type = "folder", path = "photos" }}, indices = "{}" }}
batch_size = 2
pipeline = [{{ op = "decode" }}, {{ op = "resize", size = [4, 4] }}]
"""

    assert check(text.format("zero.txt")) == {}
    assert "one.txt:1: 1 is not a sample; there are 1" in check(text.format("one.txt"))["streams.a.source"][1]
    assert "below.npy:1: -3 is not a sample" in check(text.format("below.npy"))["streams.a.source.indices"][1]


CALLED = """
from functools import wraps
def one(sample): return {}
def two(sample, rng): return {}
def more(sample, rng=None, *, why=3): return {}
def options(**given): yield 1
def generate(size, *, depth=3, rng): yield 1
def place_only(size, /): yield 1
class Data:
    def __init__(self, n, split="train"): ...
class Derived(Data): ...
def decorated(call):
    @wraps(call)
    def inner(*arguments, **options): return call(*arguments[:1], **options)
    return inner
@decorated
def inside(sample): return {}
def twice(sample): return {}
twice = two
"""


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("source", "call", "message"),
    [
        (None, "one", "mine:one(sample) cannot be called as mine:one(sample, rng): too many positional arguments"),
        (None, "two", ""),
        (None, "more", ""),
        (None, "inside", ""),
        (None, "twice", ""),
        (("generator", "generate", "{ size = 1 }"), None, ""),
        (("generator", "options", "{ anything = 1 }"), None, ""),
        (("generator", "generate", "{}"), None, "missing a required argument: 'size'"),
        (("generator", "generate", "{ size = 1, dept = 2 }"), None, ("mine:generate(size, *, depth=3, rng) cannot be called "
         "as mine:generate(size=1, dept=2, rng): there is no option 'dept'; did you mean 'depth'?")),
        (("generator", "place_only", "{ size = 1 }"), None, "there is no option 'size'"),
        (("python", "Data", "{ n = 1, splt = 'x' }"), None, ("mine:Data(n, split='train') cannot be called as "
         "mine:Data(n=1, splt='x'): there is no option 'splt'; did you mean 'split'?")),
        (("python", "Data", "{ n = 1 }"), None, ""),
        (("python", "Derived", "{ m = 1 }"), None, ""),
    ],
)  # fmt: skip
def test_functions_with_wrong_signatures_are_reported_without_an_import(
    check: Checker, write: Callable[..., Path], source: tuple[str, str, str] | None, call: str | None, message: str
) -> None:
    """`check` reads the source text; if that does not decide, the function passes."""
    file = write("mine.py", f"raise AssertionError('imported')\n{CALLED}")
    text = f'python_path = ["{file.parent}"]\n[streams.a]\nbatch_size = 1\n'
    if source is not None:
        kind, name, options = source
        text += f'source = {{ type = "{kind}", function = "mine:{name}", fields = {{ x = "int64" }}, options = {options} }}\n'
    else:
        text += (
            f'source = {{ type = "npy", path = "x.npy" }}\npipeline = [{{ op = "call", function = "mine:{call}" }}]\n'
        )

    told = [found for _line, found in check(text).values() if "AssertionError: imported" not in found]

    assert bool(told) == bool(message)
    assert all(message in found and str(file) in found for found in told)


_DECLARED = {
    "parquet": 'root = "photos", shards = ["*.parquet"]',
    "tfrecord": 'root = "photos", shards = ["*"]',
    "webdataset": 'root = "photos", shards = ["*.tar"]',
    "jsonl": 'root = "photos", shards = ["*.jsonl"]',
    "lmdb": 'path = "photos", key = "{field}-*"',
}


@pytest.mark.parametrize("kind", _DECLARED)
def test_fields_and_their_names_are_reported_together(check: Checker, kind: str) -> None:
    """Each problem is at its own key; a field with an invalid type has only that problem."""
    fields = (
        'fields = { image = "image", box = "float32(4)", l = "int46", valid = "bool" }, names = { bx = "b", l = "" }'
    )

    told = check(f'[streams.a]\nsource = {{ type = "{kind}", {_DECLARED[kind]}, {fields} }}\nbatch_size = 4\n')

    keys = {path.removeprefix("streams.a.source.") for path in told}
    assert {"fields.box", "fields.l", "names.bx", "names.l"} <= keys
    assert ("fields.valid" in keys) == (kind != "tfrecord")
    assert "did you mean box?" in told["streams.a.source.names.bx"][1]
    assert {line for line, _message in told.values()} == {4}


@pytest.mark.parametrize("kind", ["jsonl", "tfrecord", "webdataset"])
def test_defaults_are_reported_together(check: Checker, kind: str) -> None:
    """Each is at its own line; the default of a field with an invalid type is not checked."""
    told = check(
        f"""[streams.a]
batch_size = 4
[streams.a.source]
type = "{kind}"
{_DECLARED[kind].replace(", shards", chr(10) + "shards")}
[streams.a.source.fields]
l = "int64"
box = "float32[4]"
x = "flat32"
[streams.a.source.defaults]
l = "x"
box = [1, 2]
x = 3
lbl = 4
"""
    )

    assert {path.removeprefix("streams.a.source."): line for path, (line, _message) in told.items()} == {
        "fields.x": 12,
        "defaults.l": 14,
        "defaults.box": 15,
        "defaults.lbl": 17,
    }


def test_all_titles_that_a_table_lacks_are_reported(check: Checker) -> None:
    """Each problem is at the key that asks for the title."""
    (check.folder / "t.csv").write_text("file,Class Label,twice,twice\na.jpg,1,2,3\n")
    source = (
        'type = "csv", path = "t.csv", image = "fle", fields = { label = "int64", twice = "int8" }, '
        'names = { label = "ClassLabel" }'
    )

    steps = 'pipeline = [{ op = "decode" }, { op = "resize", size = [4, 4] }]'
    told = check(f"[streams.a]\nsource = {{ {source} }}\nbatch_size = 4\n{steps}\n")

    messages = {path.removeprefix("streams.a.source."): message for path, (_line, message) in told.items()}
    assert messages.keys() == {"image", "names.label", "fields.twice"}
    assert messages["image"].endswith("has no column 'fle'; did you mean file?")
    assert messages["names.label"].endswith("has no column 'ClassLabel'; did you mean Class Label?")
    assert "2 columns have the title 'twice'" in messages["fields.twice"]


@pytest.mark.parametrize("wrong", ['x = "int46"', 'x = "int64" }, capasity = 3, more = { y = "int8"', "x = 3"])
def test_a_wrong_source_does_not_hide_the_conflicting_keys_of_its_stream(check: Checker, wrong: str) -> None:
    """The type of the source alone decides; each problem is at its own line."""
    told = check(
        f"""[streams.a]
source = {{ type = "push", when_full = "never", fields = {{ {wrong} }} }}
batch_size = 1000
shuffle = true
on_error = "substitute"
lag = "independent"
max_skew = "3"
"""
    )

    lines = {path.removeprefix("streams.a."): line for path, (line, _message) in told.items() if "source" not in path}
    assert lines == {"batch_size": 5, "shuffle": 6, "on_error": 7, "lag": 8, "max_skew": 9}
    assert "streams.a.source.when_full" in told
    assert wrong != 'x = "int46"' or "did you mean" in told["streams.a.source.fields.x"][1]


@pytest.mark.parametrize("keys", ["capacity = 0", 'capacity = "many"', 'feilds = { x = "int8" }, capacity = 2000'])
def test_nothing_is_reported_of_a_mailbox_that_could_not_be_read(check: Checker, keys: str) -> None:
    """A batch may fit the values that the user meant."""
    told = check(f'[streams.a]\nsource = {{ type = "push", {keys} }}\nbatch_size = 1000\n')

    assert all(path.startswith("streams.a.source") for path in told)
    assert told


@pytest.mark.parametrize("lag", ['lag = "lockstp"', ""])
def test_nothing_is_reported_of_a_skew_whose_lag_could_not_be_read(check: Checker, lag: str) -> None:
    """A source of an unknown type may be a pushed one, which is always in lockstep."""
    source = '{ type = "psh" }' if not lag else '{ type = "npy", path = "x.npy" }'

    told = check(f"[streams.a]\nsource = {source}\nbatch_size = 1\nmax_skew = 3\n{lag}\n")

    assert list(told) == ["streams.a.lag" if lag else "streams.a.source.type"]


@pytest.mark.parametrize("kind", ['"psh"', '["push"]', '{ push = "push" }'])
def test_nothing_is_reported_of_keys_whose_source_is_of_no_kind(check: Checker, kind: str) -> None:
    """A source of another type may allow them, whatever stands in place of its name."""
    keys = 'journal = "64MiB"\ncache = "encoded"\n'

    told = check(f"[streams.a]\nsource = {{ type = {kind} }}\nbatch_size = 1\n{keys}")

    assert list(told) == ["streams.a.source.type"]


def test_the_steps_count_where_another_key_is_wrong(check: Checker) -> None:
    """A pack has costs to balance, and needs no buckets; a wrong step may have been one."""
    source = '{ type = "tokens", path = "a.bin", dtype = "uint16", length = 8 }'
    text = f"[streams.a]\nsource = {source}\nbatch_size = 1\nsed = 1\nbalance = 8\n"
    bucket = 'bucket = { field = "tokens" }\n'
    pack = 'pipeline = [{ op = "pack", field = "tokens", length = 8 }]\n'

    assert "streams.a.balance" in check(text)
    assert "streams.a.balance" not in check(text + pack)
    assert "streams.a.balance" not in check(text + pack.replace("length", "lenght"))
    assert {"streams.a.sed", "streams.a.bucket"} <= set(check(text + pack + bucket))


def test_an_unknown_key_of_a_source_hides_nothing_of_its_fields(check: Checker) -> None:
    """This holds for parts, too; fields that the unknown key may have decided are not reported."""
    part = '{ type = "lmdb", pth = "photos", fields = { a = "int46", b = "text" }, names = { c = "d" } }'
    source = f'{{ type = "subset", of = {part} }}'

    told = check(f"[streams.a]\nsource = {source}\nbatch_size = 1\n")

    assert {path.removeprefix("streams.a.source.of.") for path in told} == {"pth", "fields.a", "names.c"}


def test_a_stream_that_the_file_lacks_is_reported_as_the_command_line_names_it(check: Checker) -> None:
    """A mistyped stream has no missing keys; a stream complete on the command line is served."""
    text = '[streams.photos]\nsource = { type = "npy", path = "x.npy" }\nbatch_size = 4\n'

    told = check(text, "--set", "streams.photo.batch_size=4")

    origin = "(set by --set streams.photo.batch_size)"
    assert told == {
        "streams.photo.batch_size": (None, f"the file has no stream 'photo' {origin}; did you mean photos?")
    }
    made = [
        "streams.more.batch_size=4",
        "streams.more.source.type=npy",
        f"streams.more.source.path={check.folder}/x.npy",
    ]
    assert check(text, *(argument for one in made for argument in ("--set", one))) == {}


@pytest.mark.parametrize(
    ("setting", "path", "words"),
    [
        ("weights.1=-3", ".weights[1]", "weights must be more than 0, not -3 (set by --set {})"),
        ("weights=[1]", ".weights", "2 sources and 1 weight (set by --set {}); give each source one"),
        ("sources.0.fields.l=int46", ".sources[0].fields.l", ' (set by --set {}); did you mean "int64"?'),
        ("sources.0.shards.0=''", ".sources[0].shards", "shards must not be empty (in part set by --set {})"),
    ],
)
def test_problems_in_a_value_of_the_command_line_are_reported_there(
    check: Checker, setting: str, path: str, words: str
) -> None:
    """This holds for one item of a list, and for a source that was right without it."""
    part = '{ type = "parquet", root = "photos", shards = ["a"], fields = { l = "int64" } }'
    text = f'[streams.mix]\nsource = {{ type = "mix", weights = [1, 2], sources = [{part}, {part}] }}\nbatch_size = 4\n'
    dotted = f"streams.mix.source.{setting.partition('=')[0]}"

    told = check(text, "--set", f"streams.mix.source.{setting}")

    assert told[f"streams.mix.source{path}"][1].endswith(words.format(dotted))


# --- output for people and programs ---------------------------------------------------------------

WRONG = """[daemon]
worker = 1
[streams.a]
batch_size = 4
source = { type = "folder", path = "photos" }
\tpipeline = [{ op = "decode" }, { op = "resize", sise = [64, 64] }, { op = "random_flip", direction = "up" }]
"""


def told_by(check: Checker, text: str, *arguments: str) -> tuple[str, str]:
    """The lines of both outputs."""
    file = check.folder / "batchd.toml"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["check", str(file), *arguments])
    assert ended.value.code == 2
    captured = check.capsys.readouterr()
    return captured.out, captured.err.replace(str(file), "batchd.toml")


def test_a_problem_is_shown_with_its_line(check: Checker) -> None:
    """Carets mark the key, even in a long line with tabs; output to a file has no colours."""
    out, told = told_by(check, WRONG)

    assert not out
    assert "\x1b" not in told
    assert told.startswith(
        "batchd: batchd.toml has 3 problems:\n\n"
        "batchd.toml:2: daemon.worker: unknown key [unknown-key]\n"
        "  |\n2 | worker = 1\n  | ^^^^^^\n  = help: did you mean workers?\n\n"
        "batchd.toml:6: streams.a.pipeline[1].sise: unknown key [unknown-key]\n"
    )
    lines = told.splitlines()
    carets = [number for number, line in enumerate(lines) if set(line) == set(" |^")]
    marked = [lines[number - 1][lines[number].index("^") : lines[number].rindex("^") + 1] for number in carets]
    assert marked == ["worker", "sise", "direction"]
    assert all(len(lines[number - 1]) <= 80 for number in carets)


def test_a_key_that_is_wrong_in_two_streams_is_explained_once(check: Checker) -> None:
    """Programs get the meaning with each problem."""
    text = "".join(
        f'[streams.{name}]\nsource = {PHOTOS}\nbatch_size = 1\npipeline = [{FIRST}]\ncache = "atuo"\n' for name in "ab"
    )
    _out, told = told_by(check, text)
    with pytest.raises(SystemExit):
        main(["check", str(check.folder / "batchd.toml"), "--format", "json"])
    found = json.loads(check.capsys.readouterr().out)["problems"]

    assert told.count('= help: did you mean "auto"?') == 2
    assert told.count("= note: Part of a sample that is kept") == 1
    assert [problem["meaning"][:16] for problem in found] == ["Part of a sample"] * 2


def test_a_file_that_is_no_toml_is_shown_where_reading_ended(check: Checker) -> None:
    """Control characters of the file do not reach the terminal."""
    _out, told = told_by(check, "[daemon]\nworkers = 1 \x7f\x1b[2J\n")

    assert "\x1b" not in told
    assert "batchd.toml:2: is not TOML: " in told
    assert "2 | workers = 1 \\x7f" in told


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colours_are_for_terminals_and_can_be_switched_off(check: Checker, monkeypatch, no_color: str) -> None:
    """NO_COLOR with any value switches them off."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr("click._compat.isatty", lambda _stream: True)

    _out, told = told_by(check, WRONG)

    assert ("\x1b[" in told) == (not no_color)


def test_programs_read_each_problem_with_its_place(check: Checker) -> None:
    """Each has key and column, and the remedy in a separate key; standard error is empty."""
    out, told = told_by(check, WRONG, "--format", "json")

    assert not told
    worker, sise, _direction = json.loads(out)["problems"]
    assert worker == {
        "path": str(check.folder / "batchd.toml"),
        "line": 2,
        "column": 1,
        "key": "daemon.worker",
        "name": "unknown-key",
        "problem": "unknown key",
        "help": "did you mean workers?",
        "meaning": "",
    }
    assert (sise["line"], sise["column"]) == (6, WRONG.splitlines()[5].index("sise") + 1)


def test_programs_get_valid_json_without_problems_or_without_a_file(check: Checker) -> None:
    """The output has the same form; an option that prints text is refused."""
    good = check.folder / "good.toml"
    good.write_text('[streams.a]\nbatch_size = 1\nsource = { type = "npy", path = "x.npy" }\n')
    found = []
    for file in (good, check.folder / "none.toml"):
        with pytest.raises(SystemExit) as ended:
            main(["check", str(file), "--format", "json"])
        found.append((ended.value.code, json.loads(check.capsys.readouterr().out)["problems"]))
    _out, told = told_by(check, WRONG, "--format", "json", "--explain")

    assert found[0] == (0, [])
    code, (problem,) = found[1]
    assert (code, problem["line"], problem["key"]) == (2, None, "")
    assert problem["problem"] == f"there is no file {check.folder}/none.toml"
    assert "leave out --format json" in told


# --- streams that could share ---------------------------------------------------------------------

FIRST = '{ op = "decode" }, { op = "resize", size = [8, 8] }'
PHOTOS = '{ type = "folder", path = "photos" }'
PIXELS = 'cache_memory = "1MiB"'
DECODED = 'cache = "decoded"\ncache_memory = "1MiB"'
GRAY = 'pipeline = [{ op = "decode", color = "gray" }, { op = "pad", size = [64, 64] }]'
OTHERS = '{ type = "npy", path = "x.npy" }'


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("one", "other", "advice"),
    [
        ("", "window = 9", "the same batches: one stream for all their trainers is decoded once, not 2 times"),
        (
            "seed = 1",
            "seed = 2",
            "the same samples: each stream decodes them itself; with the same cache_memory in all of them each image",
        ),
        (DECODED, f"{DECODED}\nseed = 2", 'the same samples: cache = "decoded" keeps each image once'),
        (
            PIXELS,
            f'{PIXELS}\npipeline = [{FIRST}, {{ op = "random_flip" }}]',
            "the same samples in the same order, and the same first steps (decode, resize): one cache of pixels keeps each",
        ),
        (
            PIXELS,
            f"{PIXELS}\nseed = 2\n{GRAY}",
            "the same samples: each has a cache of its own, as color, max_bytes or",
        ),
        (
            PIXELS,
            f'{PIXELS[:-5]}2MiB"\nseed = 2',
            "the same samples: each stream decodes them itself; with the same cache_memory",
        ),
        (
            'cache = "encoded"\ncache_memory = "1MiB"',
            'cache = "encoded"\ncache_memory = "1MiB"\nseed = 2',
            'the same samples: each stream decodes them itself; with cache = "pixels" and the same cache_memory in all of',
        ),
        (
            "",
            f'pipeline = [{FIRST}, {{ op = "random_flip" }}]',
            "the same samples in the same order, and the same first steps (decode, resize): what trainers read of them",
        ),
        ("", GRAY, "the same samples: caches of them"),
    ],
    ids=[
        "the same batches",
        "another order",
        "decoded",
        "pixels",
        "other pixels",
        "another budget",
        "encoded",
        "another last step",
        "another decode",
    ],
)
def test_streams_over_the_same_source_get_advice_on_sharing(check: Checker, one: str, other: str, advice: str) -> None:
    """The advice leaves out a stream of another source."""
    streams = {"a": one, "b": other}
    text = "".join(
        f"[streams.{name}]\nsource = {PHOTOS}\nbatch_size = 1\n{keys}\n"
        + ("" if "pipeline" in keys else f"pipeline = [{FIRST}]\n")
        for name, keys in streams.items()
    )
    (check.folder / "batchd.toml").write_text(
        f'[daemon]\nruntime_dir = "run"\n{text}[streams.c]\nsource = {OTHERS}\nbatch_size = 1\n'
    )
    with pytest.raises(SystemExit):
        main(["check", str(check.folder / "batchd.toml")])
    printed = check.capsys.readouterr().out
    assert f"Over the same source:\n  a, b  {advice}" in printed


def test_a_budget_that_is_not_used_is_named(check: Checker) -> None:
    (check.folder / "batchd.toml").write_text(
        f'[daemon]\nruntime_dir = "run"\n[streams.c]\nsource = {OTHERS}\nbatch_size = 1\n{PIXELS}\n'
    )
    with pytest.raises(SystemExit):
        main(["check", str(check.folder / "batchd.toml")])
    printed = check.capsys.readouterr().out
    assert (
        "Keys of a cache that 'auto' does not use:\n  c  cache_memory: no image is decoded from a file, so" in printed
    )


def test_streams_over_different_sources_get_no_advice(check: Checker) -> None:
    (check.folder / "batchd.toml").write_text(
        f'[daemon]\nruntime_dir = "run"\n[streams.a]\nsource = {PHOTOS}\nbatch_size = 1\npipeline = [{FIRST}]\n'
        f"[streams.c]\nsource = {OTHERS}\nbatch_size = 1\n"
    )
    with pytest.raises(SystemExit):
        main(["check", str(check.folder / "batchd.toml")])
    assert "Over the same source" not in check.capsys.readouterr().out


def test_boxes_that_vanish_without_their_labels_are_a_note(check: Checker) -> None:
    """It says what happens until the configuration does."""
    np.savez(check.folder / "d.npz", image=np.zeros((4, 8, 8, 3), np.uint8), boxes=np.zeros((4, 2, 4), np.float32))
    told = []
    for options in ("", ", keep_empty = true"):
        (check.folder / "batchd.toml").write_text(
            '[daemon]\nruntime_dir = "run"\n[streams.t]\nbatch_size = 1\nsource = { type = "npz", path = "d.npz" }\n'
            f'pipeline = [{{ op = "follow", boxes = "boxes"{options} }}, {{ op = "random_flip" }}]\n'
        )
        with pytest.raises(SystemExit):
            main(["check", str(check.folder / "batchd.toml")])
        told.append("becomes four zeros in 'boxes', and what belongs to it stays" in check.capsys.readouterr().out)
    assert told == [True, False]


def test_notes_on_sources_are_shown(check: Checker) -> None:
    """What a scan leaves out or takes for granted is not silent, and stops no daemon."""
    (check.folder / "t.csv").write_text('a,b\n"x\ny",1\n')
    (check.folder / "batchd.toml").write_text(
        '[daemon]\nruntime_dir = "run"\n[streams.t]\nbatch_size = 1\n'
        'source = { type = "csv", path = "t.csv", fields = { b = "int64" } }\n'
    )
    with pytest.raises(SystemExit):
        main(["check", str(check.folder / "batchd.toml")])
    assert "Notes:\n  t  records with line ends inside a cell: " in check.capsys.readouterr().out
