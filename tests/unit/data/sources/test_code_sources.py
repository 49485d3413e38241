"""Sources of users' own Python code: objects that give samples by number, and generators."""

from pathlib import Path

import numpy as np
import pytest

from batchd.config.tree import StreamConfig
from batchd.core.plan import Plan
from batchd.data.functions.find import find_module
from batchd.data.functions.load import FunctionFailed, FunctionUnusable, Here
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.options import RandomFlip
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.code.options import SAMPLES_MAX, GeneratorSource, PluginSource, PythonSource
from batchd.data.sources.composed.options import ConcatSource, SubsetSource
from batchd.data.sources.files.options import FolderSource
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd.stream.plan import code_of, code_problems, runs_own_code
from batchd_wire.position import Position
from support.images import jpeg, photo

FIELDS = {"image": "uint8[2,2]", "label": "int64"}


@pytest.fixture
def survey(code):
    """A scan that looks for modules in the folder."""
    return Survey(lambda _found: None, [code])


def open_python(fields=FIELDS, max_bytes=1000, **options):
    source = PythonSource(function="mine:Data", fields=fields, options=options)
    return open_reader(source, None, max_bytes, Storage())


def open_generator(fields=FIELDS, function="mine:generate", **changes):
    source = GeneratorSource(function=function, fields=fields, **changes)
    return open_reader(source, None, 1000, Storage())


def test_a_source_is_user_code_if_a_part_of_it_is():
    """The part may be at any depth."""
    folder = FolderSource(path=Path("/photos"))
    own = [
        PythonSource(function="mine:Data", fields=FIELDS),
        GeneratorSource(function="mine:generate", fields=FIELDS),
        PluginSource(name="zip"),
    ]
    assert all(map(runs_own_code, own))
    assert runs_own_code(SubsetSource(of=ConcatSource(sources=(folder, own[0]))))
    assert not runs_own_code(SubsetSource(of=ConcatSource(sources=(folder, folder))))


# --- python ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ("(np.full((2, 2), i, np.uint8), i)", FIELDS),
        ("[np.full((2, 2), i, np.uint8), np.int64(i)]", FIELDS),
        ("{'label': i, 'image': np.full((2, 2), i, np.uint8), 'more': 'is left out'}", FIELDS),
        ("np.full((2, 2), i, np.uint8)", {"image": "uint8[2,2]"}),
        ("(np.full((2, 2), i, np.uint8),)", {"image": "uint8[2,2]"}),
        ("{'image': np.full((2, 2), i, np.uint8)}", {"image": "uint8[2,2]"}),
        ("[[i, i], [i, i]]", {"image": "uint8[2,2]"}),
        ("Tensor(np.full((2, 2), i, np.uint8))", {"image": "uint8[2,2]"}),
    ],
)
def test_samples_come_as_tuples_dicts_or_values(write, given, fields):
    """Users' datasets give such samples; batchd takes them unchanged."""
    write(
        "mine.py",
        f"""
        import numpy as np
        class Tensor:
            def __init__(self, array): self.numpy = lambda: array
        class Data:
            def __getitem__(self, i): return {given}
        """,
    )

    values = open_python(fields).read(7)

    assert list(values) == list(fields)
    assert np.array_equal(values["image"], np.full((2, 2), 7, np.uint8))
    assert "label" not in fields or values["label"] == 7


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [][i]", "IndexError: list index out of range\n  at .*mine.py:3 in __getitem__: "),
        ("return (1, 2, 3)", "3 values instead of the 2 that fields declares"),
        ("return 5", "one int instead of the 2 that fields declares"),
        ("return None", "one NoneType instead of the 2"),
        ("return {'image': 1}", "there is no 'label', only 'image'"),
        ("return (np.zeros((2, 2)), 1)", r"'image' is float64\[2,2\] instead of uint8\[2,2\]"),
        ("return (np.zeros((2, 2), np.uint8), 1.5)", "'label' is float64 instead of int64"),
        ("exit(1)", "SystemExit: 1"),
        ("raise StopIteration", "StopIteration"),
    ],
)
def test_a_sample_that_raises_is_a_bad_one(write, body, message):
    """The reason has the type, the message and the place of the exception."""
    write("mine.py", f"import numpy as np\nclass Data:\n    def __getitem__(self, i): {body}")

    with pytest.raises(SampleUnreadable, match=message):
        open_python().read(3)


@pytest.mark.usefixtures("importable")
def test_images_as_bytes_are_decoded_by_the_pipeline_and_not_longer_than_allowed(write):
    """Bytes of files are declared as images."""
    data = jpeg(photo(8, 8))
    write("mine.py", f"class Data:\n    def __getitem__(self, i): return {data!r}")

    assert bytes(open_python({"image": "image"}, max_bytes=100_000).read(0)["image"]) == data
    with pytest.raises(SampleUnreadable, match=f"'image' has {len(data)} bytes, more than max_bytes = 10"):
        open_python({"image": "image"}, max_bytes=10).read(0)


@pytest.mark.usefixtures("importable")
def test_an_object_keeps_its_arrays(write):
    """No step writes into memory of a dataset."""
    write(
        "mine.py",
        """
        import numpy as np
        ALL = np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3)
        def Data(): return ALL
        """,
    )
    import mine  # noqa: PLC0415  it is there by now

    before, reader = mine.ALL.copy(), open_python({"image": "uint8[4,4,3]"})
    steps = [RandomFlip(probability=1.0), RandomFlip(probability=1.0, direction="vertical")]
    columns = kind_of(source := PythonSource(function="mine:Data", fields={"image": "uint8[4,4,3]"})).columns(
        source, Storage()
    )
    row = {field.name: np.zeros(field.shape, field.dtype) for field in sample_fields(columns, steps, "fail")}

    Pipeline(columns, steps, 0).run(reader.read(1), 0, 1, 0, row)

    assert np.array_equal(row["image"], before[1, ::-1, ::-1])
    assert np.array_equal(mine.ALL, before)


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "class Data:\n    def __init__(self): raise OSError('no such disk')",
            "calling mine:Data in a worker: OSError: ",
        ),
        ("def Data(): return 3", "what mine:Data returns in a worker has no __getitem__"),
        (
            "def Data(n): return [n]",
            r"mine:Data\(n\) cannot be called as mine:Data\(\): missing a required argument: 'n'",
        ),
        ("import nothing_of_this_name", "importing mine:Data in a worker: ModuleNotFoundError"),
    ],
)
def test_an_object_that_cannot_be_created_is_no_bad_sample(write, text, message):
    """The error would be the same for each sample."""
    write("mine.py", text)

    with pytest.raises(FunctionUnusable, match=message):
        open_python()


def scan_python(survey, **changes):
    source = PythonSource(**{"function": "mine:Data", "fields": FIELDS, "options": {"n": 5}, **changes})
    return kind_of(source).scan(source, survey)


def test_another_process_asks_for_the_length(write, survey, capfd):
    """This process imports nothing of it; the object may print, and leave threads running."""
    write(
        "mine.py",
        """
        import threading
        class Data:
            def __init__(self, n):
                self.n = n
                threading.Thread(target=threading.Event().wait).start()
            def __len__(self):
                print("a word " * 100_000)
                return self.n
            def __getitem__(self, i): ...
        """,
    )

    index = scan_python(survey)

    assert len(index) == 5
    assert "mine" not in __import__("sys").modules
    assert capfd.readouterr() == ("", "")


@pytest.mark.thorough
def test_the_digest_knows_source_options_length_and_the_text(write, survey):
    """A change of any of these makes a saved position invalid."""
    text = "def Data(n): return range(n)"
    write("mine.py", text)
    changes = [
        {},
        {"options": {"n": 6}},
        {"digest": "second edition"},
        {"fields": {"label": "int64", "image": "uint8[2,2]"}},
    ]
    digests = [scan_python(survey, **change).digest for change in changes]
    write("mine.py", text + "\n# changed")
    digests.append(scan_python(survey).digest)
    write("mine.py", text)

    assert len(set(digests)) == 5
    assert scan_python(survey, length_timeout_s=5.0).digest == digests[0]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def Data(n): return 1 / 0",
            r"asking mine:Data for its length: .* exit status 1:\nZeroDivisionError",
        ),
        ("def Data(n): return iter([])", "TypeError: object of type 'list_iterator' has no len"),
        ("import os\ndef Data(n): os._exit(9)", "its process ended with exit status 9"),
        ("import os\ndef Data(n): os.kill(os.getpid(), 11)", "its process ended with signal 11"),
        (
            "import sys\nsys.stderr.write('the last words')\nimport gone",
            "(?s)last words.*No module named 'gone'",
        ),
        ("def Data(n): return []", "gives an object with 0 samples"),
        ("import os\ndef Data(n): os._exit(0)", "gives an object with None samples"),
    ],
)
def test_an_object_without_a_length_is_refused_with_its_output(write, survey, text, message):
    """This holds for every behaviour of its process."""
    write("mine.py", text)

    with pytest.raises(SourceInvalid, match=message):
        scan_python(survey)


def test_options_may_have_any_name(write, survey):
    """Names of parameters of batchd's own functions are allowed as well."""
    write("mine.py", "def Data(function, source, self): return range(function)")

    assert len(scan_python(survey, options={"function": 3, "source": 1, "self": 2})) == 3


def test_functions_within_other_sources_are_looked_for(write, code):
    """Each has the key of its part, and its digest goes to workers as well."""
    write("mine.py", "def Data(): ...")
    parts = [PythonSource(function=f"mine:{name}", fields=FIELDS) for name in ("Data", "Date")]
    source = SubsetSource(of=ConcatSource(sources=tuple(parts)))
    stream = StreamConfig(source=source, batch_size=1)

    ((key, text),) = code_problems([((), stream.source)], {}, [code])

    assert key == ("source", "of", "sources", 1, "function")
    assert "does not define 'Date'" in text
    assert code_of(stream, [code]).digests == {"mine": find_module("mine", [code]).digest}


def test_an_object_that_never_answers_is_killed(write, survey):
    """All processes that it started are killed, too."""
    write(
        "mine.py",
        "import subprocess, time\ndef Data(n):\n    subprocess.Popen(['sleep', '1000'])\n    time.sleep(1000)",
    )

    with pytest.raises(SourceInvalid, match=r"it took longer than length_timeout_s = 0\.5"):
        scan_python(survey, length_timeout_s=0.5)


def test_a_module_that_has_disappeared_is_refused(survey):
    """The module existed when the configuration was checked."""
    with pytest.raises(SourceInvalid, match="there is no module mine"):
        scan_python(survey)


# --- generator ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("importable")
def test_a_generator_gives_the_next_sample_for_every_requested_number(write):
    """Numbers only count samples; they do not identify them."""
    write("mine.py", "def generate(first=0):\n    yield from ({'label': n, 'x': 0.5} for n in range(first, 100))")
    reader = open_generator({"label": "int64", "x": "float32"}, options={"first": 5})

    assert [int(reader.read(number)["label"]) for number in (0, 17, 3, 3)] == [5, 6, 7, 8]
    assert reader.name(17) == "mine:generate, number 17"
    assert reader.known(17) == {}


@pytest.mark.usefixtures("importable")
def test_a_generator_that_ends_is_restarted_with_another_seed(write):
    """Each instance has a seed of its own, too."""
    write("mine.py", "seeds = []\ndef generate(rng):\n    seeds.append(rng.integers(1 << 62))\n    yield from (1, 2)")
    import mine  # noqa: PLC0415  it is there by now

    readers = [open_generator({"x": "int64"}) for _ in range(3)]
    values = [[int(reader.read(0)["x"]) for _ in range(5)] for reader in readers]

    assert values == [[1, 2, 1, 2, 1]] * 3
    assert len(set(mine.seeds)) == 9


@pytest.mark.usefixtures("importable")
def test_with_a_seed_each_worker_has_its_own_reproducible_random_numbers(write, monkeypatch):
    """Seed, worker and number of restarts of its generator determine the numbers."""
    write("mine.py", "def generate(rng):\n    yield int(rng.integers(1 << 62))")

    def values(worker, seed):
        monkeypatch.setattr(Here, "worker", worker)
        reader = open_generator({"x": "int64"}, seed=seed)
        return [int(reader.read(0)["x"]) for _ in range(3)]

    expected = [int(np.random.default_rng(of).integers(1 << 62)) for of in ((7, 2), (7, 2, 1), (7, 2, 2))]
    assert values(2, 7) == values(2, 7) == expected
    assert len({*values(1, 7), *values(2, 7), *values(2, 8)}) == 9


@pytest.mark.usefixtures("importable")
def test_a_seed_is_part_of_the_digest(write, survey):
    """A state that was saved under another seed is refused; without a seed, digests stay equal."""
    write("mine.py", "def generate(rng):\n    yield 1")
    sources = [GeneratorSource(function="mine:generate", fields=FIELDS, seed=seed) for seed in (None, 1, 2, 1)]
    digests = [kind_of(source).scan(source, survey).digest for source in sources]

    assert digests[1] == digests[3]
    assert len(set(digests)) == 3


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("signature", "gets"), [("rng", True), ("**options", True), ("*, rng=None", True), ("", False), ("other=1", False)]
)
def test_random_numbers_are_passed_to_functions_that_take_them(write, signature, gets):
    """A generator that was written for another purpose needs no change."""
    write("mine.py", f"def generate({signature}):\n    given = dict(locals())\n    yield int('rng' in str(given))")

    assert bool(open_generator({"x": "int64"}).read(0)["x"]) is gets


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("signature", "options", "message"),
    [
        (
            "size",
            {},
            r"mine:generate\(size\) cannot be called as mine:generate\(\): missing a required argument: 'size'",
        ),
        ("size=1", {"sise": 2}, "there is no option 'sise'; did you mean 'size'"),
        (
            "*, rng, size: int = 1",
            {"other": "x" * 99},
            r"\(\*, rng, size=1\) cannot be called as .*other='x+\.\.\., rng\)",
        ),
    ],
)
def test_a_generator_that_cannot_be_called_so_is_no_bad_sample(write, signature, options, message):
    """The error would be the same for each sample, so the stream stops."""
    write("mine.py", f"def generate({signature}): yield 1")

    with pytest.raises(FunctionUnusable, match=message):
        open_generator({"x": "int64"}, options=options)


@pytest.mark.usefixtures("importable")
def test_a_generator_that_raises_is_a_bad_sample_and_is_restarted(write):
    """The next requested sample is a good one."""
    write(
        "mine.py",
        """
        count = [0]
        def generate():
            yield 1
            count[0] += 1
            if count[0] < 3: raise ValueError("wrong")
            yield 2
        """,
    )
    reader = open_generator({"x": "int64"})

    for _ in range(2):
        assert reader.read(0)["x"] == 1
        with pytest.raises(SampleUnreadable, match=r"(?s)^ValueError: wrong\n  at .*so the generator was restarted$"):
            reader.read(0)
    assert [int(reader.read(0)["x"]) for _ in range(3)] == [1, 2, 1]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return\n    yield", "ended before it had yielded anything"),
        ("yield (1, 2)", "'x' is int64"),
        ("raise SystemExit\n    yield", "SystemExit"),
        ("yield 'a'", "'x' is str instead of int64"),
    ],
)
def test_values_that_are_no_sample_are_bad_samples(write, body, message):
    """A source that never gives anything else makes bad samples without end, and does not hang."""
    write("mine.py", f"def generate():\n    {body}")
    reader = open_generator({"x": "int64"})

    for _ in range(3):
        with pytest.raises(SampleUnreadable, match=message):
            reader.read(0)


@pytest.mark.usefixtures("importable")
def test_a_function_that_returns_no_generator_is_reported(write):
    """Any iterable is accepted."""
    write("mine.py", "def generate(): return 3\ndef many(): return [1, 2]")

    with pytest.raises(SampleUnreadable, match="TypeError: 'int' object is not iterable"):
        open_generator({"x": "int64"}).read(0)
    reader = open_generator({"x": "int64"}, function="mine:many")
    assert [int(reader.read(0)["x"]) for _ in range(3)] == [1, 2, 1]


@pytest.mark.usefixtures("importable")
def test_batches_are_split_into_samples(write):
    """Keras's generators give such batches: tuples or dicts of arrays, the last one shorter."""
    write(
        "mine.py",
        """
        import numpy as np
        def generate():
            for first, count in ((0, 3), (3, 1)):
                numbers = np.arange(first, first + count)
                yield np.repeat(numbers, 4).astype(np.uint8).reshape(count, 2, 2), numbers
        """,
    )
    reader = open_generator(yields="batch")

    samples = [dict(reader.read(0)) for _ in range(5)]

    assert [int(sample["label"]) for sample in samples] == [0, 1, 2, 3, 0]
    assert [sample["image"].tolist() for sample in samples[:2]] == [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            "(np.zeros((2, 2, 2), np.uint8), np.zeros(3, np.int64))",
            "have different lengths: {'image': 2, 'label': 3}",
        ),
        ("(np.zeros((0, 2, 2), np.uint8), np.zeros(0, np.int64))", "a batch without samples"),
        ("(np.zeros((2, 2), np.uint8), 7)", "TypeError: object of type 'int' has no len"),
    ],
)
def test_a_batch_that_cannot_be_split_is_a_bad_sample(write, batch, message):
    """The reason says why."""
    write("mine.py", f"import numpy as np\ndef generate():\n    while True: yield {batch}")

    with pytest.raises(SampleUnreadable, match=message):
        open_generator(yields="batch").read(0)


def test_an_endless_epoch_costs_nothing(write, survey):
    """No index or plan lists each sample."""
    write("mine.py", "def generate(): yield 1")
    source = GeneratorSource(function="mine:generate", fields={"x": "int64"})

    index = kind_of(source).scan(source, survey)

    assert len(index) == SAMPLES_MAX
    assert index.sections()[1] < 4096
    plan = Plan(len(index), 256, 0, shuffle=False, drop_last=False)
    assert plan.indices(Position(0, plan.steps - 1), 0, 2).tolist() == [SAMPLES_MAX - 256, SAMPLES_MAX - 255]
    assert (
        len(
            kind_of(source).scan(
                GeneratorSource(function="mine:generate", fields={"x": "int64"}, epoch_samples=9), survey
            )
        )
        == 9
    )


def test_a_generator_cannot_be_part_of_another_source():
    """Its samples have no numbers that could be mixed or chosen."""
    generator = GeneratorSource(function="mine:generate", fields={"x": "int64"})
    for make in (lambda: ConcatSource(sources=(generator,)), lambda: SubsetSource(of=generator)):
        with pytest.raises(ValueError, match='samples of type "generator" have no numbers'):
            make()


def test_functions_that_failed_are_no_errors_of_batchd():
    """An exception of user code reaches the reader's caller only as a bad sample."""
    assert not issubclass(FunctionFailed, (SampleUnreadable, ValueError))
