"""``batchd blame``: which samples, classes, files and sources stand out where the loss jumped.

Runs in the user's shell. The losses come from the running daemon, to which trainers reported them,
or from a file of lines; the pixels from worker processes of this command's own.

Invariant: a group is named only with the chance that it stands out without a cause.
"""

from collections.abc import Sequence
from math import isinf
from pathlib import Path
from typing import Annotated

import click
import numpy as np

from batchd.cli import terminal
from batchd.cli.asking import RunningStream, client_errors, running_daemon
from batchd.cli.log_lines import set_up_logs
from batchd.cli.options import (
    Address,
    ConfigFile,
    DrawnField,
    Json,
    Overrides,
    as_command,
    is_config_given,
    option,
)
from batchd.cli.peeked import PeekedBatch
from batchd.cli.replay import ask_card
from batchd.cli.tables import fitted
from batchd.cli.text import escaped
from batchd.commands.history.batches import Replayer, check_fingerprint
from batchd.commands.history.blame import DEVIATIONS, Found
from batchd.commands.history.cards import RunCard, read_card
from batchd.commands.history.losses import Losses, from_lines, from_pages
from batchd.commands.history.suspects import BadBatch, Blame, SuspectRow, examine
from batchd.config.load import load_config
from batchd.errors import BatchdError
from batchd.runtime.suggestions import suggestion
from batchd_client.asking import ask_reports
from batchd_client.batch import WholeField
from batchd_wire.fields import RAGGED
from batchd_wire.wording import counted

BATCHES_SHOWN = 8
GROUPS_SHOWN = 8
ROWS_SHOWN = 8
ROWS_DRAWN = 64
CHANCE_MIN = 1e-9
WHOLE_FROM = 10
"""Expected numbers from this one on are printed without decimals."""
_WAYS = {
    "rows": ("bad rows", "rows"),
    "batches": ("rows of bad batches", "rows"),
    "jumps": ("batches at which the loss jumps", "batches"),
}


@as_command("blame")
def command(
    context: click.Context,
    *,
    stream: RunningStream,
    losses_file: Annotated[
        Path | None,
        option(
            'Lines of JSON, each with "epoch", "step" and "loss", a number or one for each row. Default: what trainers '
            "reported to the running daemon.",
            "--losses",
        ),
    ],
    run: Annotated[str | None, option("The run whose reports count, if the daemon has those of several.")],
    card_file: Annotated[
        Path | None, option("With --losses: the card of the run, from `batchd card`, in place of --config.", "--card")
    ],
    config_file: ConfigFile,
    overrides: Overrides,
    address: Address,
    as_json: Json,
    output: Annotated[Path | None, option("Draw the worst rows.", "-o", "--output", metavar="PNG")],
    field: DrawnField,
) -> None:
    """Name what stands out in the batches of STREAM whose loss jumped.

    Bad are the batches, and the rows, whose loss is far above the usual one. A class, a file of
    many samples, a source or a sample is named if it is more frequent among them than chance
    explains; the chance of any false alarm is at most 1 in 100.
    """
    set_up_logs("warning")
    is_given = is_config_given(context, overrides)
    if losses_file is None and (is_given or card_file is not None):
        raise click.UsageError(
            "the daemon's reports are of its own configuration; --config and --card go with --losses"
        )
    if losses_file is not None and run is not None:
        raise click.UsageError("a file has the losses of one run; leave --run out")
    card = read_card(card_file) if card_file is not None else None
    reported: Losses | None = None
    if losses_file is None:
        reported, card = _reported(stream, run, address)
    config = card.config() if card is not None and not is_given else load_config(config_file, overrides)
    with Replayer(config, stream) as replayer:
        than = "when the card was written" if losses_file is not None else "the daemon serves"
        check_fingerprint(replayer.card(), card, None, than)
        losses = reported if losses_file is None else from_lines(losses_file, replayer.plan)
        assert losses is not None, "from the daemon, or from the file"
        blame = examine(replayer, losses, ROWS_DRAWN if output is not None else ROWS_SHOWN)
        bgr_fields = next(iter(blame.batches.values())).bgr_fields if blame.batches else ()
    if as_json:
        terminal.emit_json(blame.to_plain())
    else:
        terminal.say(*shown(blame))
    if output is not None:
        _draw(blame, output, field, bgr_fields)


def _reported(stream: str, run: str | None, address: str | None) -> tuple[Losses, RunCard]:
    """The reports of one run, and the card of its stream. Raises ``BatchdError``."""
    card = ask_card(stream, address)
    with running_daemon(address) as session, client_errors():
        runs = from_pages(ask_reports(session, stream))
    if not runs:
        raise BatchdError(
            f"no trainer has reported anything about stream {stream!r} since the daemon serves these batches: call "
            "stream.report(loss) or loader.report(loss) for each batch, or give --losses FILE"
        )
    names = ", ".join(sorted(map(repr, runs)))
    if run is None and len(runs) > 1:
        raise BatchdError(f"the daemon has reports of {len(runs)} runs: {names}; choose one with --run")
    chosen = runs.get(run) if run is not None else next(iter(runs.values()))
    if chosen is None:
        raise BatchdError(f"the daemon has no reports of a run {run!r}; {suggestion(str(run), sorted(runs))}")
    return chosen, card


def shown(blame: Blame) -> list[str]:
    """What stands out, as text."""
    run = f" of run {escaped(blame.run)}" if blame.run else ""
    bad = counted(blame.bad_batches, "bad batch")
    of_rows = f", {counted(blame.bad_rows, 'bad row')} of {blame.rows:,}" if blame.rows else ""
    lines = [f"{blame.stream}: {counted(blame.reports, 'report')}{run}, {bad}{of_rows}"]
    lines.append(f"(bad: more than {DEVIATIONS:g} robust deviations above the usual loss)")
    if blame.bad:
        lines += [
            "",
            *fitted(
                [("batch", "loss", "usual", "deviations"), *map(_batch_cells, blame.bad[:BATCHES_SHOWN])],
                terminal.columns(),
            ),
        ]
        lines += _more(blame.bad_batches - BATCHES_SHOWN)
    lines.append("")
    if blame.found:
        lines += [line for group in blame.found[:GROUPS_SHOWN] for line in _group_lines(group)]
        lines += _more(len(blame.found) - GROUPS_SHOWN)
        lines.append(f"(of {counted(blame.compared, 'comparison')}, for which the chances are corrected)")
    else:
        lines.append(
            f"nothing stands out: no group of {blame.compared:,} is there more or less often than chance explains"
        )
    if blame.worst:
        lines += ["", "worst rows", *(line for row in blame.worst[:ROWS_SHOWN] for line in _row_lines(row))]
    return lines


def _batch_cells(batch: BadBatch) -> tuple[str, str, str, str]:
    epoch, step = batch.position
    rows = f" rows {batch.first} to {batch.first + batch.rows - 1}" if batch.first else ""
    return f"{epoch}:{step}{rows}", f"{batch.loss:.4g}", f"{batch.usual:.4g}", _deviations(batch.deviations)


def _deviations(deviations: float) -> str:
    return "not a number" if isinf(deviations) else f"{deviations:.1f}"


def _group_lines(group: Found) -> list[str]:
    chance = f"1 in {1 / max(group.chance, CHANCE_MIN):,.0f}"
    if group.way == "losses":
        better, usual = (f"{100 * part / group.seen:.0f}" for part in (group.hits, group.expected))
        return [
            f"{group.kind} {escaped(group.name)}: its batches have a higher loss than {better} of 100",
            f"  over its {_count(group.seen)} rows, {usual} by chance; without a cause at most {chance}",
        ]
    hits, of = _WAYS[group.way]
    found, rows, by_chance = map(_count, (group.hits, group.seen, group.expected))
    return [
        f"{group.kind} {escaped(group.name)}: {group.times:.1f} times its share of the {hits}",
        f"  {found} of its {rows} {of}, {by_chance} by chance; without a cause at most {chance}",
    ]


def _count(number: float) -> str:
    """A number of rows, whole, or expected on average."""
    return f"{number:,.0f}" if number >= WHOLE_FROM or number == int(number) else f"{number:.2g}"


def _row_lines(row: SuspectRow) -> list[str]:
    epoch, step = row.position
    label = (
        ""
        if row.label is None
        else f", label {row.label}" + (f" ({escaped(row.class_name)})" if row.class_name else "")
    )
    loss = "" if row.loss is None else f", loss {row.loss:.4g}"
    return [f"  {epoch}:{step} row {row.row}: sample {row.sample}{label}{loss}", f"    {escaped(row.name)}"]


def _more(count: int) -> list[str]:
    return [f"and {count:,} more"] if count > 0 else []


def stacked(rows: Sequence[np.ndarray], *, is_ragged: bool) -> np.ndarray:
    """Stack rows of a field, ``[*shape]`` each; those of other buckets may be smaller.

    A ragged row is a run of values, any other one the first corner of the largest.
    """
    shape = np.max([row.shape for row in rows], axis=0).astype(int)
    stacked = np.zeros((len(rows), *shape), rows[0].dtype)
    for number, row in enumerate(rows):
        if is_ragged:
            stacked[number].reshape(-1)[: row.size] = row.reshape(-1)
        else:
            stacked[number, ...][tuple(map(slice, row.shape))] = row
    return stacked


def _draw(blame: Blame, output: Path, field: str | None, bgr_fields: Sequence[str]) -> None:
    """Draw the contact sheet of the worst rows. Raises ``BatchdError``."""
    from batchd.cli.contact_sheet import draw  # noqa: PLC0415  it loads OpenCV

    if not blame.worst:
        raise BatchdError(f"stream {blame.stream!r} has no bad rows to draw in {output}")
    rooms = [
        (blame.batches[row.position].rooms, row.row - blame.batches[row.position].rows[0].row) for row in blame.worst
    ]
    arrays = {
        name: stacked(
            [room[name].array[row] for room, row in rooms],
            is_ragged=first.varying is not None and first.varying.kind == RAGGED,
        )
        for name, first in rooms[0][0].items()
    }
    varying = {
        name: WholeField(arrays[name], np.stack([room[name].sizes[row] for room, row in rooms]), first.varying)  # type: ignore[index]
        for name, first in rooms[0][0].items()
        if first.varying is not None
    }
    first = blame.worst[0].position
    draw(PeekedBatch(*first, blame.batches[first].classes, arrays, varying, bgr_fields), blame.stream, output, field)
    terminal.note(f"{output}: drawn")
