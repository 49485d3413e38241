"""``batchd peek``: a picture of one batch of a stream, as a trainer that begins there would get it. Runs in the user's shell.

A batch without images is printed as a table instead. Whoever waits because a live stream has no
samples is told so.
"""

import re
from pathlib import Path

import click

from batchd.cli.complete import running_streams
from batchd.cli.options import address_option
from batchd.cli.peephole import peek
from batchd.cli.table import batch_table
from batchd.errors import BatchdError
from batchd_wire.wording import counted

POSITION = re.compile(r"\d{1,9}:\d{1,9}")


def _position(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, int]:
    """The two numbers of EPOCH:STEP, both from 0; a usage error where they are none."""
    if not POSITION.fullmatch(value):
        raise click.BadParameter(f"{value!r} is no position: EPOCH:STEP, as in 0:250, both counted from 0")
    epoch, step = value.split(":")
    return int(epoch), int(step)


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
@click.option(
    "--at",
    "position",
    callback=_position,
    default="0:0",
    show_default=True,
    metavar="EPOCH:STEP",
    help="Which batch; of a live stream, the first one from there on that still exists.",
)
@click.option("--field", help="The field to draw. [default: image, or else the first one with images]")
@click.option("--bgr", is_flag=True, help="Treat the image as BGR (for example frames pushed by OpenCV).")
def command(  # noqa: PLR0917  one for each option
    stream: str, address: str | None, output: Path, position: tuple[int, int], field: str | None, bgr: bool
) -> None:
    """Draw a batch of STREAM with its labels; where it has no images, print its fields and first samples."""
    from batchd.cli.contact_sheet import image_fields, write_sheet  # noqa: PLC0415  OpenCV takes longer to load than the rest together

    batch = peek(address, stream, *position)
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
    drawn = field or images[0]
    write_sheet(batch, output, drawn, is_bgr=bgr or drawn in batch.bgr_fields)
    click.echo(f"{output}: {where}")
