"""``batchd config``: print all keys, explained. Runs in the user's shell."""

import json

import click

from batchd.config.reference import annotated_toml, reference_markdown
from batchd.config.schema import json_schema


@click.command("config")
@click.option("--schema", "form", flag_value="schema", help="Print a JSON Schema of batchd.toml, for editors.")
@click.option("--reference", "form", flag_value="reference", help="Print the manual's page in Markdown.")
def command(form: str | None) -> None:
    """Print a whole batchd.toml: each key with its default and meaning, or with an example."""
    match form:
        case "schema":
            click.echo(json.dumps(json_schema(), indent=2))
        case "reference":
            click.echo(reference_markdown(), nl=False)
        case _:
            click.echo(annotated_toml(), nl=False)
