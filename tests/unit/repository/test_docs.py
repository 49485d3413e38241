"""Markdown pages are correct: links, commands, configurations and programs.

Generated pages are current.
"""

import ast
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path, PurePosixPath

import click
import pytest

from batchd.cli.main import cli
from batchd.config import schema
from batchd.config.load import read_config
from batchd.data.pipeline.effects import StepInvalid
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.sources.interface import kind_of
from batchd.data.sources.options import SOURCE_KINDS
from batchd.data.storage.access import Storage
from batchd.errors import EXIT_CODE_MEANINGS, SourceInvalid
from batchd.observe.diagnosis import verdicts
from batchd_client import errors
from batchd_wire.codes import ErrorCode
from support.reference import programs

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
LEFT_OUT = {"build", "dist", "demo", "node_modules"}
FRAGMENTS = {"logs_head.md", "metrics_head.md"}
"""Files that `make docs` inserts into other pages."""
NOT_GIVEN = {"missing", "required"}
"""Kinds of problems that a part of a configuration may have."""


def load(path):
    """Load a script of docs/ as a module."""
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stage = load(DOCS / "site" / "stage.py")


def pages():
    """Every Markdown file of the repository, except installed and generated ones."""
    for path in sorted(ROOT.rglob("*.md")):
        parts = path.relative_to(ROOT).parts
        if not any(part.startswith(".") or part in LEFT_OUT or part.endswith(".egg-info") for part in parts):
            yield path


PAGES = [path.relative_to(ROOT).as_posix() for path in pages()]


def blocks(name, language):
    """The blocks of code in a language, each with the number of its first line."""
    block = None
    for number, line, is_code in stage.numbered((ROOT / name).read_text()):
        fence = stage.FENCE.match(line)
        if block is None and fence and line.strip().strip("`~") == language:
            block = (number + 1, [])
        elif block is not None and fence:
            yield block[0], textwrap.dedent("\n".join(block[1])) + "\n"
            block = None
        elif block is not None:
            assert is_code
            block[1].append(line)


def anchors(path):
    """The anchors of a page, as code hosts and the site derive them from its headings."""
    seen = {}
    for _number, line, is_code in stage.numbered(path.read_text()):
        heading = None if is_code else re.match(r"#{1,6} (.+?)\s*#*$", line)
        if heading:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            seen[slug] = seen.get(slug, -1) + 1
            yield slug if not seen[slug] else f"{slug}-{seen[slug]}"


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_a_page_has_a_target(name):
    """The target is an existing file or folder, and a heading that it has."""
    page = ROOT / name
    for link in stage.links_of(page.read_text()):
        goal = (page.parent / link.path).resolve() if link.path else page
        assert goal.exists(), f"{name}:{link.line}: {link.path} does not exist"
        assert goal.is_relative_to(ROOT), f"{name}:{link.line}: {link.path} is not in the repository"
        if link.anchor:
            assert link.anchor in anchors(goal), f"{name}:{link.line}: {link.path} has no heading #{link.anchor}"


def own_pages():
    """The pages of docs/, in whatever folder, without the site's front page."""
    return [path for path in DOCS.rglob("*.md") if "site" not in path.relative_to(DOCS).parts]


def test_every_page_is_in_the_index():
    """Readers find pages there, and the site's sidebar is made from it."""
    index = (DOCS / "README.md").read_text()
    linked = {link.path for link in stage.links_of(index)}

    there = {path.relative_to(DOCS).as_posix() for path in own_pages()} - FRAGMENTS - {"README.md"}

    assert there <= linked, f"add these pages to docs/README.md: {sorted(there - linked)}"


def test_every_page_begins_with_its_title():
    """The title is the only heading of the first level, in the first line."""
    for path in own_pages():
        titles = [
            line for _, line, is_code in stage.numbered(path.read_text()) if line.startswith("# ") and not is_code
        ]
        assert [path.read_text().splitlines()[0]] == titles, path.name


def test_every_kind_of_source_has_its_page():
    """The table of docs/sources.md links to it."""
    linked = {link.path for link in stage.links_of((DOCS / "sources.md").read_text())}

    assert {path.stem for path in (DOCS / "sources").iterdir()} == set(SOURCE_KINDS)
    assert {f"sources/{kind}.md" for kind in SOURCE_KINDS} <= linked


# --- the site -------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["batchd/data/sources", "batchd/data/pipeline", "tests/support"])
def test_a_folder_of_many_modules_says_what_each_is_for(folder):
    """Its README names every module in it, its folders, and the modules that few of them have."""
    page = (ROOT / folder / "README.md").read_text()
    usual = {"__init__", "options", "effects", "stages", "scan", "index", "reader", "recognise"}
    for file in (ROOT / folder).rglob("*.py"):
        is_inside = file.parent != ROOT / folder
        names = [f"{file.parent.name}/"] if is_inside else []
        names += [file.stem] if file.stem not in (usual if is_inside else {"__init__"}) else []
        assert [name for name in names if f"`{name}`" not in page] == []


PACKAGES = ("batchd", "client/batchd_client", "client/batchd_wire")
"""Not client/build, where copies of some are behind a build of the wheels."""


def test_a_list_of_modules_has_each_of_its_folder_and_no_other():
    """The docstrings of packages have lists: a line begins with one or more modules or folders."""
    lists = 0
    for package in (file for top in PACKAGES for file in (ROOT / top).rglob("__init__.py")):
        text = ast.get_docstring(ast.parse(package.read_text())) or ""
        listed = {
            name for names in re.findall(r"^(\w+(?:, \w+)*)  +\S", text, re.MULTILINE) for name in names.split(", ")
        }
        there = {file.stem for file in package.parent.glob("*.py")}
        there |= {file.parent.name for file in package.parent.glob("*/__init__.py")}
        if listed:
            lists += 1
            assert (package, listed - there) == (package, set())
            assert (package, there - {"__init__"} - set(re.findall(r"\w+", text))) == (package, set())
    assert lists > 10


def test_the_site_has_every_page_and_all_linked_files():
    """Pages of docs/ are at the top, others at their paths, and files become pages.

    Every link has a target.
    """
    staged = dict(stage.Stage().pages())

    names = {path.name for path in DOCS.glob("*.md")} - FRAGMENTS - {"README.md"}
    assert set(map(PurePosixPath, names)) <= set(staged)
    assert PurePosixPath("SECURITY.md") in staged
    assert staged[PurePosixPath("files/benchmarks/results/peers.png")].startswith(b"\x89PNG")
    assert staged[PurePosixPath("files/docs/pictures/top.svg")].startswith(b"<svg")
    assert "[Unit]" in staged[PurePosixPath("files/deploy/batchd.service.md")]
    for place, text in staged.items():
        for link in stage.links_of(text) if isinstance(text, str) else ():
            assert not link.path or stage.target_of(place, link.path) in staged, f"{place}: {link.path}"


def test_pictures_are_small_and_load_nothing():
    """`make pictures` draws all that are shown; a page loads quickly, also without a network."""
    pictures = [*(DOCS / "pictures").iterdir()]

    assert {"batch.png", "page.png", "top.svg", "why.svg"} <= {path.name for path in pictures}
    for path in pictures:
        assert path.stat().st_size <= 100_000, path.name
        if path.suffix == ".svg":
            loaded = re.findall(r"(?:href|src)\s*=\s*\"(?!#)[^\"]*|url\((?!#)[^)]*|@import", path.read_text())
            assert not loaded, path.name
    shown = {path.name for path in pictures for page in PAGES if f"pictures/{path.name})" in (ROOT / page).read_text()}
    assert shown == {path.name for path in pictures}


def test_a_link_with_a_file_name_gets_the_title_on_the_site():
    """A reader of the site sees no files."""
    page = dict(stage.Stage().pages())[PurePosixPath("quickstart.md")]

    assert "[why.md](why.md)" in (DOCS / "quickstart.md").read_text()
    assert "[Find out why a GPU waits](why.md) has all verdicts" in page


def test_the_sidebar_has_the_headings_of_the_index():
    """It has the pages under them, each once."""
    index = dict(stage.Stage().pages())[PurePosixPath("index.md")]

    captions = re.findall(r":caption: (.+)", index)
    assert index.startswith("# batchd\n")
    assert "\napi\n" in index.partition(":caption: Reference")[2].partition("```")[0]
    titles = re.findall(r"^## (.+)$", (DOCS / "README.md").read_text(), re.MULTILINE)
    assert captions == titles
    assert index.count("\nquickstart\n") == 1


def test_a_link_without_a_target_stops_the_site(tmp_path):
    """The error names the link and its page."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text("# Title\n\n[gone](gone.md)\n")

    with pytest.raises(stage.LinkBroken, match=r"docs/README.md links to gone.md"):
        list(stage.Stage(tmp_path).pages())


def test_links_in_code_are_none():
    """This covers blocks with any fence, and text without a target after it."""
    text = "```sh\n[a](b)\n```\n~~~~\n[c](d)\n~~~\n[e](f)\n~~~~\n[g](h#i) and [j] (k) and [`l[m]`](n)\n"

    assert [(link.line, link.path, link.anchor) for link in stage.links_of(text)] == [(9, "h", "i"), (9, "n", "")]


def test_the_reference_has_every_public_name():
    """Each section has a program; `tests/support/reference.py` runs it."""
    reference = (DOCS / "site" / "api.rst").read_text()
    client = ROOT / "client" / "batchd_client"

    missing = [
        f"{path.parent.name}/{path.name}: {name}"
        for path in (client / "__init__.py", client / "torch" / "__init__.py", *map(client.joinpath, ADAPTERS))
        for name in public_names(path)
        if name not in IN_AUTOMODULE
        and not re.search(rf"^\.\. auto\w+:: batchd_client\.(\w+\.)?{name}$", reference, re.MULTILINE)
    ]

    assert not missing
    assert all(programs().values()), "a section without a program"


IN_AUTOMODULE = {"BatchdClientError", "errors"}
ADAPTERS = ("jax.py", "keras.py", "lightning.py", "tensorflow.py")


def public_names(path):
    """The names in `__all__`; the frameworks may be missing, so the module is not imported."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return ast.literal_eval(statement.value)
    raise AssertionError(path)


# --- commands -------------------------------------------------------------------------------------

BEFORE_A_COMMAND = re.compile(
    r"^(?:\w+=\S+\s+|(?:sudo|docker exec|kubectl exec|srun|runuser)(?:\s+-\S+(?:\s+(?!batchd\b)[a-z]+)?)*\s+(?:batchd\s+)?)*"
)
SPAN = re.compile(r"`([^`]+)`")


def typed(name):
    """Every line on a page that a user may type, with its number.

    These are lines of shell blocks, and code in the text.
    """
    for first, text in blocks(name, "sh"):
        for number, line in enumerate(text.replace("\\\n", "  ").splitlines(), first):
            yield number, line.strip()
    for number, line, is_code in stage.numbered((ROOT / name).read_text()):
        if not is_code:
            yield from ((number, span) for span in SPAN.findall(line))


def commands_of(line):
    """The calls of batchd in a line, each as its words after ``batchd``."""
    for part in re.split(r"&&|\|\||[|;&]|\$\(|\s#\s", line):
        words = BEFORE_A_COMMAND.sub("", part.strip()).rstrip(")").split()
        if len(words) > 1 and words[0] in ("batchd", ".venv/bin/batchd"):
            yield words[1:]


def complaint(words):
    """Return the problem of the words after ``batchd``; None if they are valid."""
    command, context = cli, click.Context(cli, info_name="batchd", **cli.context_settings)
    for word in words:
        if word == "--":
            break  # the rest belongs to another command
        if word.startswith("-"):
            if default := getattr(command, "default", None):
                command = command.commands[default]
            name = word.rstrip("…,.:").partition("=")[0]
            known = {option for one in command.get_params(context) for option in [*one.opts, *one.secondary_opts]}
            if name not in known:
                return f"{context.command_path} has no option {name}"
        elif isinstance(command, click.Group) and word.isalpha() and word.islower():
            inner = command.get_command(context, word)
            if inner is None:
                return f"{context.command_path} has no command {word}"
            command, context = inner, click.Context(inner, info_name=word, parent=context)
    return None


@pytest.mark.parametrize("name", PAGES)
def test_every_command_and_option_on_a_page_exists(name):
    """A user can copy each of them into a shell."""
    for number, line in typed(name):
        for words in commands_of(line):
            wrong = complaint(words)
            assert wrong is None, f"{name}:{number}: {line}: {wrong}"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("batchd serve --config batchd.toml", None),
        ("BATCHD_TCP=0.0.0.0:7070 batchd serve --confg batchd.toml", "batchd serve has no option --confg"),
        ("sudo -u batchd batchd keys nwe --name x", "batchd keys has no command nwe"),
        ("docker exec batchd batchd stauts", "batchd has no command stauts"),
        ("batchd check && batchd serv -c x", "batchd has no command serv"),
        ("usermod -aG batchd alice", None),
    ],
)
def test_invalid_commands_are_found(line, wrong):
    """The test above also sees commands behind other commands."""
    assert [found for words in commands_of(line) if (found := complaint(words))] == ([wrong] if wrong else [])


def test_the_pages_have_commands():
    """The test above would pass without any."""
    found = sum(1 for name in PAGES for _number, line in typed(name) for _words in commands_of(line))

    assert found > 60


# --- names of code --------------------------------------------------------------------------------

PACKAGES = [ROOT / "batchd", ROOT / "client" / "batchd_client", ROOT / "client" / "batchd_wire"]
FOLDERS = [ROOT, ROOT / "batchd", ROOT / "client", ROOT / "benchmarks"]
"""Paths on pages begin at one of these."""
FIRST_FOLDERS = {path.name for path in (*ROOT.iterdir(), *PACKAGES[0].iterdir(), *PACKAGES) if path.is_dir()} - LEFT_OUT
INVENTED = ("batchd/data/sources/squares/", "batchd/data/sources/KIND/", "batchd/data/pipeline/FAMILY/")
"""Paths of examples, and of what a reader is going to make."""
NOT_CODE = {
    "batchd.toml",
    "batchd.toml.new",
    "batchd.sock",
    "daemon.yaml",
    "config.yaml",
    "data.mdb",
    "pool.key",
    "batchd.sources",
}
"""Files, and a group of entry points."""


def defined(tree):
    """The names of all functions, classes and variables in a part of a program, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


@pytest.fixture(scope="module")
def code():
    """The names of every module, by its dotted name; those of every class, by its name alone."""
    modules, classes = {}, {}
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            parts = path.relative_to(package.parent).with_suffix("").parts
            tree = ast.parse(path.read_text())
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = set(defined(tree))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, set()).update(defined(node))
    return modules, classes


def is_defined(name, code):
    """Whether a dotted name is that of a module, of a class, or of what one of them defines."""
    modules, classes = code
    for full in (name, f"batchd.{name}", f"batchd_client.{name}", f"batchd_wire.{name}"):
        owner, _, inner = full.rpartition(".")
        if full in modules or inner in modules.get(owner, ()):
            return True
    owner, _, inner = name.partition(".")
    return owner in classes and (not inner or inner in classes[owner])


def named_code(name):
    """Every dotted name of code on a page, with its line.

    In a last column "where in the code", every name.
    """
    in_column = False
    for number, line, is_code in stage.numbered((ROOT / name).read_text()):
        in_column = not is_code and (line.endswith("| where in the code |") or (in_column and line.startswith("|")))
        if in_column:
            yield from ((number, span) for span in SPAN.findall(line.removesuffix(" |").rpartition(" | ")[2]))
        elif not is_code and not line.startswith("#"):
            for span in set(SPAN.findall(line)) - NOT_CODE:
                if re.fullmatch(r"\w+(\.\w+)+", span) and span.partition(".")[0] in FIRST_FOLDERS:
                    yield number, span


def named_files(name):
    """Every path of this repository in the text of a page, with its line.

    Alternatives one by one.
    """
    for number, line, is_code in stage.numbered((ROOT / name).read_text()):
        for span in [] if is_code else SPAN.findall(line):
            is_path = re.fullmatch(r"[\w./*{},-]+", span) and span.partition("/")[0] in FIRST_FOLDERS and "/" in span
            if is_path and not span.startswith(INVENTED):
                yield from ((number, path) for path in braces(span))


def braces(path):
    """The paths that a path with alternatives, as in ``{a,b}.py``, stands for."""
    before, found, after = re.match(r"([^{]*)(?:\{([^}]*)\})?(.*)", path).groups()
    return [path] if found is None else [before + one + after for one in found.split(",")]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("name", PAGES)
def test_every_name_of_code_on_a_page_exists(name, code):
    """A reader who looks it up finds it."""
    for number, span in named_code(name):
        assert is_defined(span, code), f"{name}:{number}: there is no {span}"
    for number, path in named_files(name):
        assert any(any(folder.glob(path.rstrip("/"))) for folder in FOLDERS), f"{name}:{number}: there is no {path}"


def test_the_pages_have_names_of_code():
    """The test above would pass without any, or if it skipped names that do not exist."""
    names = {span for page in PAGES for _number, span in named_code(page)}
    files = {path for page in PAGES for _number, path in named_files(page)}

    assert {"worker.loop", "Delivery.lose", "batchd_wire.slot", "core.fleet"} <= names
    assert {"batchd/daemon/serve.py", "tests/faults/test_fuzz.py", "pool/remote.py", "batchd/core/"} <= files


@pytest.mark.parametrize(
    ("name", "exists"),
    [
        ("core.stream.chunk_lost", True),
        ("Delivery.lose", True),
        ("WorkerProcesses", True),
        ("batchd.replay", True),
        ("core.streams", False),
        ("core.stream.chunk_found", False),
        ("Delivery.win", False),
        (".switch", False),
    ],
)
def test_names_that_do_not_exist_are_found(name, exists, code):
    """Each kind of name has to exist: modules, classes and what they define."""
    assert is_defined(name, code) == exists


# --- configurations and programs ------------------------------------------------------------------


def wrong_with(text, tmp_path):
    """The problems of a configuration, or of a part of one, except for missing keys."""
    data = tomllib.loads(text)
    file = tmp_path / "batchd.toml"
    if not ({"streams", "daemon"} & set(data)):
        text = f"[streams.shown]\n{text}"
    file.write_text(text)
    reading = read_config(file, environment={})
    return [one for one in reading.located(reading.problems) if not any(word in one.message for word in NOT_GIVEN)]


@pytest.mark.parametrize("name", PAGES)
def test_every_configuration_on_a_page_is_valid(name, tmp_path):
    """Its keys are known and its values are valid.

    A part may leave out keys that its text does not discuss.
    """
    for number, text in blocks(name, "toml"):
        assert not wrong_with(text, tmp_path), f"{name}:{number}"


def misfits(text, tmp_path):
    """Steps that do not fit the fields of their source, where the configuration tells these."""
    file = tmp_path / "batchd.toml"
    file.write_text(text)
    config = read_config(file, environment={}).config
    for stream in config.streams.values() if config is not None else ():
        try:
            columns = kind_of(stream.source).columns(stream.source, Storage())
            sample_fields(columns, stream.pipeline, stream.on_error)
        except StepInvalid as error:
            yield str(error)
        except SourceInvalid:  # its files tell
            pass


@pytest.mark.parametrize("name", PAGES)
def test_the_steps_on_a_page_fit_their_fields(name, tmp_path):
    """A stream that is copied from a page can be served."""
    for number, text in blocks(name, "toml"):
        assert list(misfits(text, tmp_path)) == [], f"{name}:{number}"


def test_problems_of_a_configuration_are_found(tmp_path):
    """They are unknown keys, also in a part of a configuration, and invalid values."""
    assert "bath_size" in str(wrong_with("[streams.a]\nbath_size = 1\n", tmp_path))
    assert "sise" in str(wrong_with('pipeline = [ { op = "resize", sise = [1, 1] } ]', tmp_path))
    assert wrong_with("[daemon]\nworkers = -1\n", tmp_path)
    source = 'source = { type = "csv", path = "a.csv", fields = { x = "int64" } }'
    stream = f'[streams.a]\nbatch_size = 1\n{source}\npipeline = [ {{ op = "decode", field = "picture" }} ]'
    assert "picture" in "".join(misfits(stream, tmp_path))


@pytest.mark.parametrize("name", PAGES)
def test_every_program_on_a_page_is_python(name):
    """Each program compiles."""
    for number, text in blocks(name, "python"):
        try:
            ast.parse(text)
        except SyntaxError as error:
            pytest.fail(f"{name}:{number}: {error}")


@pytest.mark.parametrize("name", PAGES)
def test_every_line_for_a_shell_can_be_split(name):
    """No quotation mark is left open."""
    for number, text in blocks(name, "sh"):
        try:
            shlex.split(text, comments=True)
        except ValueError as error:
            pytest.fail(f"{name}:{number}: {error}")


# --- verdicts -------------------------------------------------------------------------------------


def test_every_verdict_of_batchd_why_is_on_its_page_and_no_other():
    """Each has its meaning and its remedy."""
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+) \| (.+) \|$", (DOCS / "why.md").read_text(), re.MULTILINE)

    assert sorted(kind for kind, _meaning, _remedy in rows) == sorted(kind.value for kind in verdicts.Kind)


def test_the_shares_on_the_page_of_verdicts_are_those_of_the_code():
    """The page spells them out."""
    rules = (DOCS / "why.md").read_text().partition("## How it decides")[2]
    for words, share in (
        ("less than {} % of the time", verdicts.WAIT_SHARE_MIN),
        ("if bad samples took {} % of the workers' time", verdicts.BAD_TIME_MIN),
        ("for {} % or more", verdicts.IDLE_SHARE_MIN),
        ("took {} % of it", verdicts.SLOW_SHARE_MIN),
        ("were ready to run and had no CPU for {} % of it", verdicts.NO_CPU_MIN),
        ("more than {} % takes", verdicts.ENDLESS_SHARE),
    ):
        assert words.format(round(100 * share)) in " ".join(rules.split())
    in_words = (verdicts.MAIN_SHARE, verdicts.SLOW_ROWS_SHARE_MAX, verdicts.BAD_SHARE_MIN)
    assert in_words == (0.5, 0.25, 0.05), "the page says half, a quarter and a twentieth"


# --- generated pages ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def errors_page():
    """The page as the generator makes it."""
    return load(DOCS / "make_errors.py").errors_markdown()


def test_the_pages_of_errors_commands_and_the_log_are_current(errors_page):
    """They equal the output of their generators."""
    assert (DOCS / "logs.md").read_text() == load(DOCS / "make_logs.py").logs_markdown(), "run `make docs`"
    assert (DOCS / "errors.md").read_text() == errors_page, "run `make docs`"
    assert (DOCS / "commands.md").read_text() == load(DOCS / "make_commands.py").commands_markdown(), "run `make docs`"


def test_the_json_schema_is_current():
    """It equals the tree of the configuration, in a process with all kinds of sources and steps."""
    made = subprocess.run([sys.executable, DOCS / "make_schema.py"], check=True, capture_output=True, text=True).stdout
    assert Path(schema.__file__).with_name("schema.json").read_text() == made, "run `make docs`"


def test_every_exception_of_the_client_is_on_the_page_with_its_remedy(errors_page):
    """All have a remedy in their docstring, except base classes."""
    for kind in vars(errors).values():
        if (
            isinstance(kind, type)
            and issubclass(kind, errors.BatchdClientError)
            and kind is not errors.BatchdClientError
        ):
            _, found, rest = errors_page.partition(f"# `{kind.__name__}`\n")
            assert found, kind
            section = rest.partition("\n#")[0]
            is_branch = kind.__mro__[1] is errors.BatchdClientError and bool(kind.__subclasses__())
            assert "**What helps:**" in section or is_branch, kind


@pytest.mark.parametrize("code", ErrorCode, ids=lambda code: code.name)
def test_every_number_is_on_the_page_of_errors(errors_page, code):
    """Each number has its occasion and its exception."""
    (row,) = [line for line in errors_page.splitlines() if line.startswith(f"| {code.value} | `{code.name}` |")]
    assert all(cell.strip() for cell in row.strip("|").split("|"))


def test_every_exit_code_is_on_both_pages(errors_page):
    """The pages list it by its number."""
    for code, meaning in EXIT_CODE_MEANINGS.items():
        assert f"| {int(code)} | {meaning} |" in errors_page
        assert f"| {int(code)} | {meaning} |" in (DOCS / "commands.md").read_text()


def test_every_command_has_a_manual_page_with_all_of_its_options():
    """A page's text contains no requests to roff, and no section begins with an empty paragraph."""
    pages = dict(load(DOCS / "make_manpages.py").manual_pages())

    assert set(pages) == {"batchd.1"} | {
        f"{path.replace(' ', '-')}.1" for path, _command in commands_below(cli, "batchd")
    }
    for path, command in commands_below(cli, "batchd"):
        page = pages[f"{path.replace(' ', '-')}.1"]
        for option in (one for one in command.params if isinstance(one, click.Option) and not one.hidden):
            assert option.opts[-1].replace("-", "\\-") in page, (path, option.opts)
    requests = {line.split()[0] for page in pages.values() for line in page.splitlines() if line[:1] in (".", "'")}
    assert requests == {".TH", ".SH", ".PP", ".TP", ".B", ".BR"}
    assert [name for name, page in pages.items() if re.search(r"\.SH .*\n\.PP|\.PP\n(\n|\.PP|$)", page)] == []


def commands_below(group, path):
    """Every command, as a user types it."""
    context = click.Context(group, **group.context_settings)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from commands_below(command, f"{path} {name}")


def test_every_command_is_on_its_page_with_all_of_its_options():
    """This includes commands of subcommands."""
    page = (DOCS / "commands.md").read_text()
    for path, command in commands_below(cli, "batchd"):
        section = page.partition(f"# `{path}`\n")[2].partition("\n#")[0]
        for option in (one for one in command.params if isinstance(one, click.Option) and not one.hidden):
            assert f"`{option.opts[-1]}`" in section, (path, option.opts)
