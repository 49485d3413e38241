"""``batchd card``: save what it takes to make the batches of a run again, and to compare runs.

Runs in the user's shell. Of a running daemon, or of a configuration, whose source is scanned.
"""

from pathlib import Path
from typing import Annotated

from batchd.cli import terminal
from batchd.cli.log_lines import set_up_logs
from batchd.cli.options import Address, ConfigFile, Overrides, as_command, option
from batchd.cli.prepare import ConfiguredStream
from batchd.cli.replay import ask_card
from batchd.config.load import load_config
from batchd.data.storage.paths import why_unwritable
from batchd.errors import BatchdError


@as_command("card")
def command(
    *,
    stream: ConfiguredStream,
    config_file: ConfigFile,
    overrides: Overrides,
    running: Annotated[bool, option("Write the card of the running daemon's stream.")],
    address: Address,
    state_file: Annotated[Path | None, option("The state of a trainer as JSON, to be saved with the card.", "--state")],
    joined_files: Annotated[
        tuple[Path, ...],
        option(
            "The card of another host whose ranks read other rows of the run: add its digests. Repeatable.", "--join"
        ),
    ],
    output: Annotated[Path | None, option("Write to FILE, not to standard output.", "-o", "--output")],
) -> None:
    """Print the card of STREAM: fingerprint and its parts, versions, and the configuration.

    From a running daemon, with `digest = true`, also a digest of what each epoch delivered.

    Keep it beside the checkpoints of a run. `batchd replay --card` makes any batch of the run again
    when batchd.toml has changed, and `batchd diff` says where two runs differ.
    """
    from dataclasses import replace  # noqa: PLC0415  as below

    from batchd.commands.history.batches import card_of, open_alone  # noqa: PLC0415  numpy
    from batchd.commands.history.cards import joined_card, read_card, read_state  # noqa: PLC0415  the same
    from batchd.data.pipeline.image.decode import decoder_versions  # noqa: PLC0415  it loads OpenCV

    set_up_logs("warning")
    if running or address is not None:
        card = ask_card(stream, address)
    else:
        opened = open_alone(load_config(config_file, overrides), stream)
        try:
            card = card_of(opened, decoder_versions())
        finally:
            opened.close()
    if state_file is not None:
        state, _written_s = read_state(state_file)
        if (state.stream, state.fingerprint) != (stream, card.fingerprint):
            raise BatchdError(
                f"{state_file} is the state of stream {state.stream!r} with the fingerprint {state.fingerprint}, not of "
                f"{stream!r} with {card.fingerprint}; name the stream and the configuration of that run"
            )
        card = replace(card, state=state)
    card = joined_card(card, [(file, read_card(file)) for file in joined_files])
    if output is None:
        terminal.emit(card.to_json())
        return
    try:
        output.write_text(card.to_json(), encoding="utf-8")
    except OSError as error:
        raise BatchdError(why_unwritable(output, error)) from None
    terminal.say(f"{output}: stream {stream}, fingerprint {card.fingerprint}")
