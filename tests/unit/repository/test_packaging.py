"""The metadata of the two distributions, and the modules that their import loads."""

import ast
import re
import subprocess
import sys
from importlib.metadata import metadata, requires, version
from importlib.resources import files
from pathlib import Path

import pytest

import batchd
import batchd_client
import batchd_wire

PACKAGES = (batchd, batchd_client, batchd_wire)
DISTRIBUTIONS = ("batchd", "batchd-client")
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
ADAPTERS = ("torch", "lightning", "jax", "tensorflow", "keras")
"""Modules of the client for users of a framework; no other module imports them."""
ARRAY = re.compile(r"\b(Array|NDArray|ndarray|Picture|Tensors?)\b")
ARRAY_WORDS = re.compile(r"dtype|shape|``\[|uint8|u?int64|float32|\bSee ``")
TREE = Path(__file__).parents[3]
INSTALLS = re.compile(r"\b(?:(?:pip|pipx|uv pip|uv tool) (?:install|run)|uv add) ([^`\"\n]*)")
VALUED_OPTIONS = {
    "--only-binary",
    "--target",
    "--find-links",
    "--index-url",
    "--extra-index-url",
    "--pip-args",
    "--spec",
    "--python",
}
AFTER_A_LINE = {"in", "or", "and", "with", "which", "next", "on", "installs", "takes", "&&"}
"""Words that go on with a sentence behind a line."""
OTHER_PACKAGES = {"torch", "torchvision", "jax", "tensorflow", "tensorflow-cpu", "keras", "scikit-image", "lightning"}
"""Packages of public indexes that pages name, and that develop and test nothing here."""
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def needed(distribution: str) -> set[str]:
    """Return the names of a distribution's requirements, without versions and extras."""
    always = [line for line in requires(distribution) or [] if "extra ==" not in line]
    return {re.match(r"[A-Za-z0-9_.-]+", line)[0].lower() for line in always}


def all_loaded_by(*modules: str) -> set[str]:
    """Import modules in a new interpreter, and return all modules that were loaded."""
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *modules], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def loaded_by(*modules: str) -> set[str]:
    """Return only the top-level modules that the import loads."""
    return {name.partition(".")[0] for name in all_loaded_by(*modules)}


def modules_of(package: object) -> list[str]:
    """Return every module of a package by its dotted name."""
    folder = Path(str(files(package)))
    found = (path.relative_to(folder.parent).with_suffix("") for path in sorted(folder.rglob("*.py")))
    return [".".join(path.parts).removesuffix(".__init__") for path in found]


def without_frameworks() -> list[str]:
    """Return every module of the client except the adapters."""
    return [name for name in modules_of(batchd_client) if name.split(".")[1:2] not in ([one] for one in ADAPTERS)]


def texts() -> dict[str, str]:
    """Return all that tells users what to install, by its path: pages, examples, messages."""
    found = [*TREE.glob("*.md"), TREE / "client" / "README.md", *(TREE / "docs").rglob("*.md")]
    found += [file for file in (TREE / "examples").rglob("*") if file.suffix in {".py", ".md"}]
    for folder in ("batchd", "client/batchd_client", "client/batchd_wire", "deploy"):
        found += [file for file in (TREE / folder).rglob("*") if file.suffix in {".py", ".md", ".sh", ".yaml"}]
    return {str(file.relative_to(TREE)): file.read_text(errors="replace") for file in found}


def installed_by(text: str) -> list[str]:
    """Return what the lines for pip, uv and pipx in a text install, without options."""
    names = []
    for words in INSTALLS.findall(text):
        before = ""
        for word in words.replace("'", "").split():
            if word in AFTER_A_LINE or word.startswith(("#", "(", "{")):
                break
            if not word.startswith("-") and before not in VALUED_OPTIONS:
                names.append(word.rstrip(",;:)") if word == "." else word.rstrip(".,;:)"))
            if word.endswith((",", ";", ":", ")")):
                break
            before = word
    return names


def test_an_index_or_the_tree_has_all_that_pages_and_messages_install() -> None:
    """No index has batchd yet. For extras, pip uses the installed batchd."""
    known = {line.partition("==")[0].partition(" ")[0] for line in (TREE / "constraints.txt").read_text().splitlines()}
    known |= OTHER_PACKAGES

    found = {
        (path, name)
        for path, text in texts().items()
        for name in installed_by(text)
        if re.split(r"[\[=<>]", name)[0].lower() not in known
        and not name.isupper()
        and not name.startswith((".", "https://packages.example.org/batchd_client-", "batchd["))
        and not (path == "docs/release.md" and name in {"batchd", "dist", "demo"})
    }

    assert found == set()


def test_each_page_for_trainers_has_the_line_that_installs_the_client() -> None:
    """It is the same line everywhere, and it works in a clone."""
    pages = [
        f"docs/{name}.md" for name in ("torch", "jax", "tensorflow", "notebooks", "quickstart", "remote", "install")
    ]
    pages += [
        "README.md",
        "client/README.md",
        *(f"docs/moving/{file.name}" for file in (TREE / "docs/moving").glob("*.md")),
    ]
    pages += [f"examples/{name}.py" for name in ("torch_resnet", "torch_ddp", "jax_train", "keras_train")]

    assert (TREE / "client" / "pyproject.toml").exists()
    assert [page for page in pages if "pip install ./client" not in texts()[page].replace("\n", " ")] == []


def test_the_client_needs_exactly_three_distributions() -> None:
    """The client is installed into users' training environments, so it needs few packages."""
    assert needed("batchd-client") == {"msgpack", "numpy", "pyzmq"}


def test_both_distributions_their_packages_and_the_chart_have_one_version() -> None:
    """The server requires the client of exactly its own version; the Helm chart has it, too."""
    versions = {*map(version, DISTRIBUTIONS), batchd.__version__, batchd_client.__version__}
    chart = (Path(__file__).parents[3] / "deploy/helm/batchd/Chart.yaml").read_text()
    of_chart = re.findall(r'^(?:version|appVersion): "?([^"\n]+)', chart, re.MULTILINE)

    assert of_chart == [batchd.__version__] * 2
    assert len(versions) == 1
    assert f"batchd-client=={versions.pop()}" in (requires("batchd") or [])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_licence_is_apache_2(distribution) -> None:
    """The licence is an SPDX expression and never a classifier, which could contradict it."""
    facts = metadata(distribution)

    assert facts["License-Expression"] == "Apache-2.0"
    assert not [line for line in facts.get_all("Classifier", []) if line.startswith("License")]
    assert (facts.get_all("License-File") or [])[0] == "LICENSE"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_package_says_that_it_is_typed(package) -> None:
    """Type checkers would ignore the annotations otherwise."""
    assert files(package).joinpath("py.typed").is_file()


def test_the_client_brings_along_nothing_of_the_server() -> None:
    """No module of the two client packages imports the server, even if it is installed.

    Nor does any of them import a framework.
    """
    loaded = loaded_by(*without_frameworks(), *modules_of(batchd_wire))

    assert {"batchd_client", "batchd_wire", "msgpack", "numpy", "zmq"} <= loaded
    assert not loaded & {"batchd", "cv2", "pydantic", "simplejpeg", "click", "rich", "structlog", "pytest", *ADAPTERS}


def test_the_wire_needs_msgpack_alone_but_for_the_views() -> None:
    """A tool that reads messages does not need to load numpy."""
    loaded = loaded_by(*(name for name in modules_of(batchd_wire) if name != "batchd_wire.views"))

    assert "msgpack" in loaded
    assert not loaded & {"numpy", "zmq", "batchd_client"}


def test_a_worker_brings_along_nothing_of_the_daemon() -> None:
    """There are many workers, so each unneeded module costs memory and start time many times."""
    loaded = loaded_by("batchd.worker.loop")

    assert {"cv2", "numpy", "msgpack"} <= loaded
    assert not loaded & {"pydantic", "click", "zmq", "structlog", "rich", "batchd_client", "multiprocessing"}


@pytest.mark.thorough
def test_the_daemon_brings_along_no_decoders() -> None:
    """The daemon never decodes pixels, so a hostile image cannot reach it."""
    loaded = loaded_by("batchd.daemon.serve")

    assert {"zmq", "pydantic"} <= loaded
    assert not loaded & {"cv2", "simplejpeg", "batchd_client", "prometheus_client", "socketserver"}


def test_the_observer_brings_along_no_more_than_it_needs() -> None:
    """The observer runs beside every daemon, even without clients, so it must stay small."""
    loaded = loaded_by("batchd.observe.http.__main__")

    assert {"zmq", "msgpack", "prometheus_client"} <= loaded
    assert not loaded & {"numpy", "cv2", "pydantic", "click", "structlog", "rich"}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    "command", ["bad", "config", "logs", "main", "reload", "status", "stop", "top", "why", "worker"]
)
def test_a_command_that_asks_a_daemon_starts_with_little(command) -> None:
    """NumPy and pydantic take longer to load than the daemon takes to answer."""
    loaded = loaded_by(f"batchd.cli.{command}")

    assert "click" in loaded
    assert not loaded & {"numpy", "pydantic", "cv2", "simplejpeg", "structlog", "asyncio"}


KINDS = {"arrays", "csv", "jsonl", "lerobot", "lmdb", "parquet", "tfrecord", "tokens", "video", "webdataset"}
"""Folders of sources that only a stream with such a source needs."""


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("process", ["batchd.worker.loop", "batchd.daemon.serve", "batchd.pool.worker_host.host"])
def test_kinds_of_sources_are_loaded_for_a_stream_that_has_them(process) -> None:
    """Every worker loads sources of files, because they are the most usual."""
    assert not all_loaded_by(process) & {f"batchd.data.sources.{kind}.options" for kind in KINDS}


def _names(node: ast.AST) -> list[str]:
    """Return the modules that an import statement names."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom():
            return [node.module or ""]
        case _:
            return []


def _offences(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        found += [name for name in _names(node) if name.partition(".")[0] in FORBIDDEN_MODULES]
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append(f"{name}()")
            case ast.Attribute(value=ast.Name(id="builtins"), attr=name) if name in FORBIDDEN_CALLS:
                found.append(f"builtins.{name}")
            case ast.keyword(arg="allow_pickle"):
                found.append("allow_pickle")
            case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="load"):
                found.append("numpy.load")
    return [f"{path.name}: {offence}" for offence in found]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_no_data_can_become_code(package) -> None:
    """The shipped code contains no pickle, marshal, shelve, eval or exec."""
    paths = sorted(Path(str(files(package))).rglob("*.py"))

    assert paths
    assert [offence for path in paths for offence in _offences(path)] == []


def test_the_search_for_offences_finds_them(tmp_path) -> None:
    """Each forbidden form is detected, so a clean result is meaningful."""
    lines = [
        "import pickle as p",
        "from marshal import loads",
        "import os, shelve",
        "eval('1')",
        "exec('1')",
        "builtins.eval('1')",
        "np.load('x', allow_pickle=True)",
        "re.compile('fine')",
    ]
    (tmp_path / "bad.py").write_text("\n".join(lines))

    assert sorted(_offences(tmp_path / "bad.py")) == sorted(
        f"bad.py: {offence}"
        for offence in (
            "pickle",
            "marshal",
            "shelve",
            "eval()",
            "exec()",
            "builtins.eval",
            "numpy.load",
            "allow_pickle",
        )
    )


def public_functions(package: object) -> dict[str, ast.FunctionDef]:
    """Return the public functions and methods of a package, without setters, by their place."""
    found = {}
    for file in sorted(Path(package.__file__).parent.rglob("*.py")):
        tree = ast.parse(file.read_text())
        bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
        for node in (node for body in bodies for node in body if isinstance(node, ast.FunctionDef)):
            is_setter = any(isinstance(one, ast.Attribute) and one.attr == "setter" for one in node.decorator_list)
            if not node.name.startswith("_") and not is_setter:
                found[f"{file.name}:{node.lineno} {node.name}"] = node
    return found


def raised_by(function: ast.FunctionDef) -> set[str]:
    """Return the classes of errors that a function itself raises."""
    errors = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise)]
    names = [ast.unparse(one.func if isinstance(one, ast.Call) else one).rpartition(".")[2] for one in errors if one]
    return {name for name in names if name.isidentifier() and name[0].isupper()}


@pytest.mark.parametrize("package", [batchd_client, batchd_wire], ids=lambda package: package.__name__)
def test_public_functions_of_the_client_name_their_errors_and_arrays(package) -> None:
    """Docstrings name every error; arrays have a shape, a dtype or a reference to them."""
    functions = public_functions(package)
    texts = {place: ast.get_docstring(function) or "" for place, function in functions.items()}
    annotated = {
        place: [ast.unparse(one) for one in (function.returns, *(arg.annotation for arg in function.args.args)) if one]
        for place, function in functions.items()
    }
    arrays = [place for place, types in annotated.items() if ARRAY.search(" ".join(types))]

    assert len(arrays) > 20 or package is batchd_wire
    assert [
        place for place, function in functions.items() for name in raised_by(function) if name not in texts[place]
    ] == []
    assert [place for place in arrays if not ARRAY_WORDS.search(texts[place])] == []
