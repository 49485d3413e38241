"""``batchd config``: print all keys, explained. Runs in the user's shell.

The annotated batchd.toml and the manual's page are made from the JSON Schema, and that from the
tree, so each key has its meaning and its default in one place.

Invariant: ``annotated_toml()`` is valid, and each key in it that is not a comment has its default.
"""

import json
import re
from collections.abc import Iterator, Mapping
from textwrap import fill, wrap
from typing import Annotated

from batchd.cli import terminal
from batchd.cli.options import as_command, option
from batchd.config import schema

WIDTH_CHARACTERS = 110
PAGE_CHARACTERS = 100
_NOT_PROSE = ("|", "#", "```", "* ")
_UNBROKEN = re.compile(r"`[^`]+`|\[[^\]]*\]\([^)]*\)")
"""Code and links, which stay on one line."""
_EXAMPLE_STREAM = "photos"
_DEPENDENT = {"max_skew", "http"}
"""Commented out: keys that need another key, and one whose value is required if it is set."""
_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}
_MANUAL_HEAD = """# Configuration

*Made by `batchd config --reference`; do not edit.*

`batchd serve batchd.toml` reads one TOML file, and `batchd init PATH` writes a first one for your data. `batchd
config` prints all of it with its defaults, `batchd check
batchd.toml` says everything that is wrong with yours, each at its line, and `batchd config --schema` prints a JSON Schema for
editors.

A value is taken from the first of these that has one: `--set PATH=VALUE` on the command line, where the path has dots
(`--set streams.photos.batch_size=64`), and items of lists their numbers, counted from 0
(`--set 'streams.photos.pipeline.1.size=[64, 64]'`, `--set streams.photos.source.sources.0.path=/data`); for keys of
`[daemon]` the environment variable `BATCHD_` with the key in capitals
(`BATCHD_WORKERS=4`), unless it is empty; the file; the default. Relative paths in the file are relative to the file, others
to the current directory, and `~` is the home directory. Unknown keys are refused; of a variable `BATCHD_…` that nothing reads,
`serve`, `check`, `init`, `bench` and `worker` warn.
"""


@as_command("config")
def command(
    *,
    form: Annotated[
        str | None,
        option("Print a JSON Schema of batchd.toml, for editors.", "--schema", flag_value="schema"),
        option("Print the manual's page in Markdown.", "--reference", flag_value="reference"),
    ],
) -> None:
    """Print a whole batchd.toml: each key with its default and meaning, or with an example.

    `batchd init PATH` writes a short one for your data.
    """
    match form:
        case "schema":
            terminal.emit_json(schema.json_schema())
        case "reference":
            terminal.emit(reference_markdown())
        case _:
            terminal.emit(annotated_toml())


def annotated_toml() -> str:
    """A whole batchd.toml: each key with its meaning, and its default or an example."""
    daemon, streams, stream = _tables()
    lines = [
        *_comment(
            "All keys of batchd.toml with their defaults. What is commented out has no default, or is an example. "
            "`batchd init PATH` writes a short one for your data."
        ),
        "",
        "[daemon]",
        *_annotated_keys(daemon),
        *_comment(streams["description"]),
        f"[streams.{_EXAMPLE_STREAM}]",
        *_annotated_keys(stream),
        *_comment("The kinds of source:"),
        *_annotated_alternatives(stream["properties"]["source"]),
        *_comment("The steps of a pipeline:"),
        *_annotated_alternatives(stream["properties"]["pipeline"]["items"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def reference_markdown() -> str:
    """The page ``docs/configuration.md``."""
    daemon, streams, stream = _tables()
    sections = [
        _MANUAL_HEAD,
        *_section("## `[daemon]`", daemon),
        *_inner_sections(daemon),
        *_section("## `[streams.NAME]`", stream, _meaning(streams)),
        *_inner_sections(stream),
    ]
    keys = stream["properties"]
    for title, node in (("Sources", keys["source"]), ("Steps", keys["pipeline"]["items"])):
        sections.append(f"## {title}\n")
        for kind, table in schema.alternatives(node).items():
            sections += _section(f"### `{node['discriminator']['propertyName']} = {json.dumps(kind)}`", table)
            for name, key in table["properties"].items():
                if (entry := schema.entries_of(key)) is not None:
                    sections += _section(f"#### Each entry of `{name}`", entry)
    return wrap_prose("\n".join(sections).rstrip() + "\n")


def _inner_sections(table: schema.Node) -> Iterator[str]:
    """The tables that keys of a table may be."""
    for name, node in table["properties"].items():
        if (inner := schema.table_of(node)) is not None:
            yield from _section(f"### `{name} = {{ … }}`", inner)


def _tables() -> tuple[schema.Node, schema.Node, schema.Node]:
    """The schemas of [daemon], of all streams, and of one stream."""
    keys = schema.json_schema()["properties"]
    streams = keys["streams"]
    return schema.resolve(keys["daemon"]), streams, schema.resolve(next(iter(streams["patternProperties"].values())))


def wrap_prose(page: str) -> str:
    """Wrap paragraphs of Markdown; tables, headings, lists and code stay."""
    parts = page.split("\n\n")
    is_code = False
    for index, part in enumerate(parts):
        if not is_code and not part.lstrip("\n").startswith(_NOT_PROSE):
            whole = _UNBROKEN.sub(lambda found: found[0].replace(" ", "\0"), " ".join(part.split()))
            wrapped = fill(whole, PAGE_CHARACTERS, break_long_words=False, break_on_hyphens=False)
            parts[index] = wrapped.replace("\0", " ") + "\n" * part.endswith("\n")
        is_code ^= part.count("```") % 2 == 1
    return "\n\n".join(parts)


def _annotated_keys(table: schema.Node) -> Iterator[str]:
    for name, node in table["properties"].items():
        yield from _comment(_meaning(node))
        value = schema.toml_default(node)
        required = name in table.get("required", ())
        mark = "" if required or (value and name not in _DEPENDENT) else "# "
        yield f"{mark}{name} = {schema.toml_example(node) if value in ('', '[]') else value}"
        if (inner := schema.table_of(node)) is not None:
            if value:
                yield from _comment(f"Or {name} = {schema.toml_example(node)}")
            for key, child in inner["properties"].items():
                yield from _comment(f"{key} ({_shown_default(key, child, inner)}): {_meaning(child)}", "  ")
        yield ""


def _annotated_alternatives(node: schema.Node) -> Iterator[str]:
    """Each kind as comments: a line of TOML, then the meanings of its keys."""
    chosen_by = node["discriminator"]["propertyName"]
    for kind, table in schema.alternatives(node).items():
        keys = {name: key for name, key in table["properties"].items() if name != chosen_by}
        written = [f"{chosen_by} = {json.dumps(kind)}"]
        values = {name: schema.toml_default(key) or schema.toml_example(key) for name, key in keys.items()}
        written += [f"{name} = {value}" for name, value in values.items() if value]
        yield f"# {{ {', '.join(written)} }}"
        yield from _comment(_meaning(table), "    ")
        for name, key in keys.items():
            yield from _comment(f"{name} ({_shown_default(name, key, table)}): {_meaning(key)}", "      ")
            if (entry := schema.entries_of(key)) is not None:
                for inner, child in entry["properties"].items():
                    yield from _comment(
                        f"{inner} ({_shown_default(inner, child, entry)}): {_meaning(child)}", "        "
                    )
        yield "#"
    yield ""


def _section(title: str, table: schema.Node, introduction: str = "") -> list[str]:
    rows = [
        f"| `{name}` | {_shown_default(name, node, table, '`')} | {_meaning(node)} |"
        for name, node in table["properties"].items()
        if "const" not in node
    ]
    text = " ".join(filter(None, [_meaning(table), introduction]))
    return [f"{title}\n", text + "\n", "| key | default | meaning |", "|---|---|---|", *rows, ""]


def _shown_default(name: str, node: schema.Node, table: schema.Node, quote: str = "") -> str:
    if name in table.get("required", ()):
        return "required"
    default = schema.toml_default(node)
    return f"{quote}{default}{quote}" if default else "not set"


def _meaning(node: schema.Node) -> str:
    """The documentation and the limits of a key or table on one line."""
    text = " ".join(node["description"].replace("``", "`").split())
    choices = f"One of {', '.join(map(json.dumps, node['enum']))}." if "enum" in node else ""
    return " ".join(filter(None, [text, choices, _range(node)]))


def _range(node: schema.Node) -> str:
    """The limits of a number, also if it is one of several alternatives."""
    numbers = [option for option in [node, *node.get("anyOf", ())] if option.get("type") in ("integer", "number")]
    if not numbers or "x-unit" in node:
        return ""
    number: Mapping[str, object] = numbers[0]
    limits = [f"{words} {number[name]}" for name, words in _LIMITS.items() if name in number]
    return f"{', '.join(limits).capitalize()}." if limits else ""


def _comment(text: str, indent: str = "") -> list[str]:
    return [f"# {indent}{line}" for line in wrap(text, WIDTH_CHARACTERS - len(indent), break_on_hyphens=False)]
