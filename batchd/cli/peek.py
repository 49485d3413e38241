"""``batchd peek``: draw one batch of a stream as a new trainer would get it at that position.

Runs in the user's shell. A batch without images is printed as a table. While a live stream has no
samples, the command says so and waits.

Invariant: the batch is a copy, so its slot is released at once.
"""

import logging
from pathlib import Path
from typing import Annotated

import click

import batchd_client
from batchd.cli import terminal
from batchd.cli.asking import RunningStream, client_errors, running_daemon
from batchd.cli.options import Address, DrawnField, PositionArgument, as_command, option, parse_position
from batchd.cli.peeked import PeekedBatch, batch_table, drawn_rows, is_packed, joined_patches
from batchd_client.asking import ask_status
from batchd_client.sounds import sounds_in
from batchd_wire.position import Position
from batchd_wire.wording import counted

BATCH_TIMEOUT_S = 120.0
BEGINNING = Position(0, 0)
ROW_COLUMNS = 120
"""Width of the drawing of a packed row, where the terminal is not narrower."""


@as_command("peek")
def command(
    *,
    stream: RunningStream,
    position: PositionArgument,
    address: Address,
    output: Annotated[Path, option("The PNG file.", "-o", "--output", metavar="PATH")] = Path("sheet.png"),
    at: Annotated[
        Position | None, option("The same as the argument EPOCH:STEP.", parse=parse_position, metavar="EPOCH:STEP")
    ],
    field: DrawnField,
    bgr: Annotated[bool, option("Treat the image as BGR (for example frames pushed by OpenCV).")],
) -> None:
    """Draw a batch of STREAM with its labels; without images, print fields and samples.

    Tokens are drawn and printed as the texts that they stand for, beside the images of their rows,
    the words that are learned in green. Masks, boxes with the numbers of their classes, and
    keypoints are drawn over the images that they follow; sound below, over its seconds.

    It is the batch at EPOCH:STEP, by default at 0:0; of a live stream, the first one from there on
    that still exists.
    """
    if position is not None and at is not None and position != at:
        raise click.UsageError("EPOCH:STEP and --at are two positions; leave one out")
    show(peek(address, stream, *(position or at or BEGINNING)), stream, output, field, is_bgr=bgr)


def show(batch: PeekedBatch, stream: str, output: Path, field: str | None = None, *, is_bgr: bool = False) -> None:
    """Draw a batch into a file, or print it if it has no images. Raises ``BatchdError``."""
    from batchd.cli.contact_sheet import draw, image_fields  # noqa: PLC0415  OpenCV takes longer to load than the rest together
    from batchd.cli.token_texts import text_lines, texts_of  # noqa: PLC0415

    texts, packed, sounds = texts_of(batch), batch, sounds_in(batch.overlays, batch.arrays)
    batch = joined_patches(batch)
    where = f"epoch {batch.epoch}, step {batch.step}, {counted(batch.rows, 'sample')}"
    if field is None and not image_fields(batch):
        if texts or sounds:
            draw(batch, stream, output, field)
            terminal.say(f"{output}: {'sounds' if sounds else 'texts'} of {where}")
        else:
            terminal.say(f"stream {stream!r} has no field with images, so no picture is drawn: {where}")
        terminal.say(*batch_table(batch, terminal.columns()))
        if is_packed(batch):
            terminal.say(*drawn_rows(batch, min(terminal.columns(), ROW_COLUMNS)))
        terminal.say(*text_lines(texts))
        return
    draw(packed, stream, output, field, is_bgr=is_bgr)
    terminal.say(f"{output}: {where}", *text_lines(texts if field is None else ()))


class _Echo(logging.Handler):
    """Prints warnings that the client logs, such as that a live stream has no samples yet."""

    def emit(self, record: logging.LogRecord) -> None:
        terminal.warn(record.getMessage())


def peek(address: str | None, stream: str, epoch: int, step: int) -> PeekedBatch:
    """Wait for the batch at this position and copy it. Raises ``BatchdError``."""
    with running_daemon(address) as session:
        status, found = ask_status(session), session.address
        known = status.stream(stream)
    log, echo = logging.getLogger("batchd_client"), _Echo(logging.WARNING)
    log.addHandler(echo)
    try:
        with (
            client_errors(),
            batchd_client.connect(found, reconnect_timeout_s=0, batch_timeout_s=BATCH_TIMEOUT_S) as daemon,
            daemon.spectate(stream, epoch, step) as looked_at,
            next(iter(looked_at)) as batch,
        ):
            rooms = {name: (room := batch.room(name))._replace(array=room.array.copy()) for name in batch}
            arrays = {name: room.array for name, room in rooms.items()}
            varying = {name: room for name, room in rooms.items() if room.varying is not None}
            bgr_fields = known.bgr_fields if known is not None else ()
            return PeekedBatch(
                batch.epoch, batch.step, looked_at.classes, arrays, varying, bgr_fields, looked_at.overlays
            )
    finally:
        log.removeHandler(echo)
