"""``batchd peek``: a picture of a stream's first batch, as a trainer that begins now would get it. Runs in the user's shell.

A batch without images is printed as a table instead. Whoever waits because a live stream has no samples is told so.
"""

from pathlib import Path

import click

from batchd.attach.find import find_daemon
from batchd.cli.complete import running_streams
from batchd.cli.options import address_option
from batchd.cli.peephole import Peephole
from batchd.cli.table import batch_table
from batchd.errors import BatchdError
from batchd_wire.wording import counted


@click.command("peek")
@click.argument("stream", shell_complete=running_streams)
@address_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("sheet.png"),
    show_default=True,
    help="The PNG file.",
)
@click.option("--field", help="The field to draw. [default: image, or else the first one with images]")
@click.option("--bgr", is_flag=True, help='The pipeline decodes with color = "bgr".')
def command(stream: str, address: str | None, output: Path, field: str | None, bgr: bool) -> None:
    """Draw the next batch of STREAM with its labels; where it has no images, print its fields and first samples."""
    from batchd.cli.sheet import image_fields, write_sheet  # noqa: PLC0415  OpenCV takes longer to load than the rest together

    with Peephole(find_daemon(address)) as attachment:
        batch = attachment.peek(stream, _say)
    where = f"epoch {batch.epoch}, step {batch.step}, {counted(batch.rows, 'sample')}"
    images = image_fields(batch)
    if field is not None and field not in images:
        raise BatchdError(
            f"stream {stream!r} has no images in a field {field!r}: it has {', '.join(images) or 'none in any field'}"
        )
    if not images:
        click.echo(f"stream {stream!r} has no field with images, so no picture is drawn: {where}")
        for line in batch_table(batch):
            click.echo(line)
        return
    write_sheet(batch, output, field or images[0], is_bgr=bgr)
    click.echo(f"{output}: {where}")


def _say(text: str) -> None:
    click.echo(f"batchd: {text}", err=True)
