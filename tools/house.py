"""Measures the source: its size, and signs of parts that are not about what batchd does.

    python tools/house.py [ROOT]              a table; ROOT is a tree of batchd (default: this one)
    python tools/house.py --since REVISION    the lines added and removed since, by folder
    python tools/house.py --prose             the lines of prose that are too long; fails if one is

Counted are the modules of the two distributions, ``batchd`` and ``client``. Prose is comments and
docstrings of these, of tests, benchmarks and examples, comments of C, JavaScript and CSS, and the
text of Markdown pages outside of headings, tables, code and links. A private read is a name with
one underscore that the source defines and a test reads, imports or replaces, unless the test's
module defines the same name. Modules that name the class of a
step or a source are those that a new one of the same form has to write or change. Fields of
messages have no unique names, so a script cannot count their places.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

PROSE_COLUMNS = 100
PRIVATE = re.compile(r"_[^_]\w*[^_]")
MADE_PAGES = {"commands.md", "configuration.md", "errors.md", "logs.md", "metrics.md", "protocol.md"}
"""Pages of docs/ that `make docs` writes."""
SOURCES = ("batchd", "client")
READ = (*SOURCES, "tests", "benchmarks", "examples", "docs", "deploy", "tools")
COMMENTED = (".py", ".c", ".h", ".js", ".css")
COMMENT_OR_STRING = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`""", re.DOTALL
)
IMPORTS = (
    "import sys, batchd.cli.main, batchd.cli.serve, batchd.cli.log_lines, batchd.config.load, batchd.daemon.serve\n"
    "print(*sorted(sys.modules))"
)


def files_of(root: Path, *folders: str, endings: tuple[str, ...] = (".py",)) -> list[Path]:
    """The files with these endings that are in the repository."""
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders],
        capture_output=True,
        text=True,
        check=True,
    )
    return [root / name for name in listed.stdout.splitlines() if name.endswith(endings) and (root / name).exists()]


def print_changes(root: Path, revision: str) -> None:
    """Print the lines added and removed since a revision, by room of the source and by folder."""
    command = ["git", "-C", root, "diff", "--numstat", "--find-renames", revision]
    sums = defaultdict(lambda: [0, 0])
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        added, removed, name = line.split("\t")
        # of a renamed file: a/{old => new}/file
        *folders, _ = re.sub(r"\{.* => (.*)\}", r"\1", name).replace("//", "/").split("/")
        folder = "/".join(folders[: 2 if folders[:1] and folders[0] in SOURCES else 1]) or "."
        if added != "-":
            sums[folder][0] += int(added)
            sums[folder][1] += int(removed)
    for folder, (added, removed) in sorted(sums.items()):
        print(f"{folder:24} {added:+7,} {-removed:7,} {added - removed:+7,}")


def import_lines(tree: ast.Module) -> int:
    """Lines of import statements."""
    found = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in found)


def uses_of_any(tree: ast.Module) -> int:
    """Number of uses of ``Any`` in annotations and expressions."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


def broad_excepts(tree: ast.Module) -> int:
    """Handlers and ``suppress`` of everything, or of every ``Exception``."""
    caught: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught += node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress":
            caught += node.args
    return sum(one is None or ast.unparse(one) in {"Exception", "BaseException"} for one in caught)


def classes(tree: ast.Module) -> Iterator[str]:
    """The classes of a module."""
    return (node.name for node in tree.body if isinstance(node, ast.ClassDef))


def comment_lines(text: str) -> Iterator[str]:
    """Lines with a comment of C, JavaScript or CSS."""
    lines = text.splitlines()
    for found in COMMENT_OR_STRING.finditer(text):
        if found["comment"]:
            first = text.count("\n", 0, found.start())
            yield from lines[first : first + found[0].count("\n") + 1]


def prose_lines(file: Path) -> Iterator[str]:
    """Lines of comments and docstrings of a module, or of a page's text, if any is too long."""
    text = file.read_text()
    if all(len(line) <= PROSE_COLUMNS for line in text.splitlines()):
        return
    if file.suffix == ".md":
        is_code = False
        for line in text.splitlines():
            is_code ^= line.lstrip().startswith("```")
            if not is_code and not line.startswith(("|", "    ", "#")):
                yield re.sub(r"\]\([^)]*\)", "]()", line)
        return
    if file.suffix != ".py":
        yield from comment_lines(text)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match("# (noqa|type: ignore)", token.string):
            yield token.line.rstrip("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from text.splitlines()[node.lineno - 1 : node.end_lineno]


def kinds(trees: dict[Path, ast.Module], root: Path, package: str) -> Iterator[tuple[Path, str]]:
    """Folder and class of each kind of a package: a class with the key ``op`` or ``type``."""
    for file, tree in trees.items():
        if (
            file.name == "options.py"
            and file.is_relative_to(root / "batchd/data" / package)
            and file.parent.name != package
        ):
            for node in tree.body:
                keys = (
                    one.target.id
                    for one in getattr(node, "body", [])
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                )
                if isinstance(node, ast.ClassDef) and {"op", "type"} & set(keys):
                    yield file.parent, node.name


def names_of(tree: ast.AST) -> set[str]:
    """The names that a module uses or defines."""
    return {getattr(node, key, None) or "" for node in ast.walk(tree) for key in ("id", "attr", "name")}


def defined(tree: ast.AST) -> set[str]:
    """The private names that a module defines, in its classes too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(getattr(node, "ctx", None), ast.Store) or isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found |= {getattr(node, key, None) or "" for key in ("id", "attr", "name")}
    return {name for name in found if PRIVATE.fullmatch(name)}


def private_reads(tree: ast.Module, private: set[str]) -> int:
    """Reads of private names of the source in a module of the tests."""
    private = private - defined(tree)
    names: list[object] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in {"self", "cls"}:
            names.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names += [imported.name for imported in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "getattr", "delattr")):
            names += [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
    return sum(name in private for name in names)


def places(trees: dict[Path, ast.Module], root: Path, package: str) -> str:
    """Median number of modules that name a kind, in all and outside of its folder."""
    counts = []
    names = {file: names_of(tree) for file, tree in trees.items()}
    for folder, kind in kinds(trees, root, package):
        found = [file.is_relative_to(folder) for file in trees if kind in names[file]]
        counts.append((len(found), found.count(False)))
    total, outside = (median(numbers) for numbers in zip(*counts, strict=True))
    return f"{total:g} ({outside:g} outside of its folder; median of {len(counts)})"


def long_prose(root: Path) -> list[str]:
    """The lines of prose that are too long, each behind its file."""
    pages = files_of(root, "*.md", endings=(".md",))
    return [
        f"{file.relative_to(root)}: {line}"
        for file in [*files_of(root, *READ, endings=COMMENTED), *pages]
        for line in prose_lines(file)
        if len(line) > PROSE_COLUMNS
    ]


def modules_of_serve(root: Path) -> list[str]:
    """The modules that ``batchd serve`` imports before it opens its sockets."""
    path = f"{root}:{root / 'client'}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTS], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def main() -> None:
    """Print the table, or the changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--since", metavar="REVISION")
    parser.add_argument("--prose", action="store_true")
    arguments = parser.parse_args()
    root = arguments.root
    if arguments.prose:
        sys.exit("\n".join(long_prose(root)) or None)
    if arguments.since:
        print_changes(root, arguments.since)
        return
    files = files_of(root, *SOURCES)
    trees = {file: ast.parse(file.read_text()) for file in files}
    lines = sum(len(file.read_text().splitlines()) for file in files)
    homes = defaultdict(list)
    for file, tree in trees.items():
        for name in classes(tree):
            homes[name].append(file.relative_to(root))
    several = sorted(name for name, places in homes.items() if len(places) > 1)
    tests = [ast.parse(file.read_text()) for file in files_of(root, "tests")]
    private: set[str] = set().union(*map(defined, trees.values())) - set(dir(NamedTuple("Public", [])))
    private -= {extension.stem for extension in files_of(root, *SOURCES, endings=(".c",))}
    reads = [count for tree in tests if (count := private_reads(tree, private))]
    words = sum(len(page.read_text().split()) for page in (root / "docs").rglob("*.md") if page.name not in MADE_PAGES)
    modules = modules_of_serve(root)
    own = [name for name in modules if name.partition(".")[0].startswith("batchd")]
    rows = {
        "source lines / files": f"{lines:,} / {len(files)}",
        "import statements, part of all lines": f"{sum(map(import_lines, trees.values())) / lines:.1%}",
        "Any": sum(map(uses_of_any, trees.values())),
        "broad excepts": sum(map(broad_excepts, trees.values())),
        "class names with several meanings": f"{len(several)} ({', '.join(several)})",
        "modules that name a step": places(trees, root, "pipeline"),
        "modules that name a source": places(trees, root, "sources"),
        "modules that batchd serve imports (own)": f"{len(modules)} ({len(own)})",
        f"prose lines beyond {PROSE_COLUMNS} columns": f"{len(long_prose(root)):,}",
        "private reads of tests": f"{sum(reads)} in {len(reads)} modules",
        "words of docs, written by hand": f"{words:,}",
    }
    for name, value in rows.items():
        print(f"{name:40} {value}")


if __name__ == "__main__":
    main()
