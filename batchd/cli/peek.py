"""``batchd peek``: a picture of a stream's first batch, as a trainer that begins now would get it. Runs in the user's shell."""

from pathlib import Path

import click

from batchd.cli.attach import Attachment, find_daemon
from batchd.cli.options import address_option


@click.command("peek")
@click.argument("stream")
@address_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("sheet.png"),
    show_default=True,
    help="The PNG file.",
)
@click.option("--bgr", is_flag=True, help='The pipeline decodes with color = "bgr".')
def command(stream: str, address: str | None, output: Path, bgr: bool) -> None:
    """Draw the next batch of STREAM with its labels."""
    from batchd.cli.sheet import write_sheet  # noqa: PLC0415  OpenCV takes longer to load than the rest together

    with Attachment(find_daemon(address)) as attachment:
        batch = attachment.peek(stream)
    write_sheet(batch, output, is_bgr=bgr)
    click.echo(f"{output}: epoch {batch.epoch}, step {batch.step}, {len(batch.arrays['index'])} samples")
