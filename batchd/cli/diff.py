"""``batchd diff``: say at which position the batches of two runs differ first, and why.

Runs in the user's shell, from two files; it decodes no data, and scans it only if asked to.
"""

import sys
from pathlib import Path
from typing import Annotated

from batchd.cli import terminal
from batchd.cli.options import argument, as_command, option
from batchd.cli.text import escaped

DIFFERENT = 1


@as_command("diff")
def command(
    *,
    run_a: Annotated[Path, argument()],
    run_b: Annotated[Path, argument()],
    scan: Annotated[bool, option("Read the indexes of both sources, for packed rows, blocks and weights.")],
) -> None:
    """Compare the cards of two runs (`batchd card`), or the states of two trainers.

    Print which parts of their fingerprints differ, and the first position with other batches. Equal
    fingerprints mean the same batch at each position. Exit code 1 if the runs differ.
    """
    from batchd.commands.history.cards import RunCard, TrainerState, read_run  # noqa: PLC0415  pydantic and numpy
    from batchd.commands.history.differ import RowOrder, difference  # noqa: PLC0415  the same

    runs = [read_run(run_a), read_run(run_b)]
    states = [run if isinstance(run, TrainerState) else run.state for run in runs]
    for file, state in zip((run_a, run_b), states, strict=True):
        if state is not None:
            terminal.say(f"{file}: next batch at {state.position.epoch}:{state.position.step}")
    cards = [run for run in runs if isinstance(run, RunCard)]
    if len(cards) < len(runs):
        is_same = runs[0].fingerprint == runs[1].fingerprint
        terminal.say(
            "the same batch at each position"
            if is_same
            else "other batches, and a state does not say why: compare two cards, which `batchd card` writes"
        )
        sys.exit(0 if is_same else DIFFERENT)
    before, after = cards
    found = difference(before, after, (RowOrder.scan(before), RowOrder.scan(after)) if scan else None)
    for line in [*found.parts, *found.versions]:
        terminal.say(escaped(line))
    if found.position is not None:
        terminal.say(f"first other batch: {found.position.epoch}:{found.position.step}")
    elif not found.parts:
        terminal.say("the same batch at each position")
    for line in filter(None, [found.note, *found.delivered]):
        terminal.say(line)
    sys.exit(DIFFERENT if found.parts or found.has_other_rows else 0)
