"""``batchd replay``: make the batch of any position again, and say how each row was made.

Runs in the user's shell, without a daemon: worker processes of its own make the rows.

Invariant: a batch of other files or other settings than those of the given card or state is not
made. A file that was written later is named, and the command fails unless a checksum matches.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Annotated, cast

import click
import numpy as np

from batchd.cli import terminal
from batchd.cli.asking import client_errors, running_daemon
from batchd.cli.log_lines import set_up_logs
from batchd.cli.options import (
    Address,
    CardFile,
    ConfigFile,
    DrawnField,
    Json,
    Overrides,
    PositionArgument,
    as_command,
    is_config_given,
    option,
)
from batchd.cli.peeked import PeekedBatch
from batchd.cli.prepare import ConfiguredStream
from batchd.cli.text import escaped, wrapped
from batchd.commands.history import batches as history
from batchd.commands.history.cards import RunCard, TrainerState, read_card, read_run, read_state, version_differences
from batchd.commands.history.journal import JournalReader, live_position
from batchd.config.load import load_config
from batchd.data.storage.paths import why_unwritable
from batchd.errors import ArgumentInvalid, BatchdError
from batchd.runtime.suggestions import suggestion
from batchd_client.asking import ANSWER_TIMEOUT_S
from batchd_client.batch import WholeField, ragged_view
from batchd_wire.fields import RAGGED
from batchd_wire.messages import AskStatus, Status
from batchd_wire.position import Position
from batchd_wire.status import DaemonStatus
from batchd_wire.status import read_status as typed_status
from batchd_wire.wording import counted

COLUMNS_MAX = 80
"""Width of the text, where the terminal is not narrower."""
CHANGED_SHOWN_MAX = 10


def _checksums(value: str) -> set[int]:
    """The numbers that a text may mean: Python prints decimal ones, this command eight digits."""
    found = set()
    for base in (16, 10):
        try:
            found.add(int(value, base))
        except ValueError:
            continue
    if not found:
        raise click.BadParameter(f"{value!r} is not a CRC-32, such as 9f03aa12, or what batch.crc32() gave")
    return found


@as_command("replay")
def command(
    context: click.Context,
    *,
    stream: ConfiguredStream,
    position: PositionArgument,
    state_file: Annotated[
        Path | None,
        option("The state of a trainer as JSON: its next batch. A card may have one, too.", "--state"),
    ],
    card_file: CardFile,
    rank: Annotated[int, option("The trainer's rank.", limits=(0, None))] = 0,
    world_size: Annotated[int, option("The number of ranks that share the stream.", limits=(1, None))] = 1,
    back: Annotated[
        int,
        option("The N-th batch of the rank before that, instead.", limits=(0, None), metavar="N", show_default=False),
    ] = 0,
    config_file: ConfigFile,
    overrides: Overrides,
    running: Annotated[bool, option("Use the configuration of the running daemon.")],
    address: Address,
    as_json: Json,
    output: Annotated[Path | None, option("Draw the batch, as `batchd peek`.", "-o", "--output", metavar="PNG")],
    field: DrawnField,
    npz: Annotated[Path | None, option("Write the fields for numpy.load.")],
    expected: Annotated[
        set[int] | None,
        option(
            "Compare the batch with the CRC-32 that batch.crc32() gave in the trainer, and fail if it differs.",
            "--verify",
            parse=_checksums,
            metavar="CRC",
        ),
    ],
) -> None:
    """Make the batch of STREAM at EPOCH:STEP again, and print how each row was made.

    For each row: the sample, its file, label and checksum, what each random step drew, and what
    stood in for a bad sample. With --rank, the position is where all ranks were. Of a push stream
    with a journal: what that has of each row.

    Exit code 1 if a checksum differs, or if a file was written after the card or the state.
    """
    set_up_logs("warning")
    card = read_card(card_file) if card_file is not None else None
    begin, state, since_s = _begin(position, state_file, card_file, card)
    is_given = is_config_given(context, overrides)
    served = served_card(stream, address, running=running, is_given=is_given)
    if served is not None:
        config, stream = served.config(), served.stream  # a derived stream has another name there
    elif card is not None and not is_given:
        config = card.config()
    else:
        config = load_config(config_file, overrides)
    if stream in config.streams and config.streams[stream].journal is not None:
        if output is not None or npz is not None:
            raise ArgumentInvalid(f"stream {stream!r} is live: a journal has no samples to draw or to write")
        at = live_position(begin, history.TrainerRank(rank, world_size), back)
        _show_journal(JournalReader(config, stream, state), at, expected, as_json=as_json)
        return
    with history.Replayer(config, stream, since_s=since_s) as replayer:
        history.check_fingerprint(replayer.card(), served, None, "the daemon serves")
        history.check_fingerprint(replayer.card(), card or _card_in(state_file), state)
        replayed = replayer.at(begin, history.TrainerRank(rank, world_size), back)
    for older in (card, served):
        _warn_of_versions(older, replayed)
    if as_json:
        terminal.emit_json(replayed.to_plain())
    else:
        terminal.say(*shown(replayed, min(terminal.columns(), COLUMNS_MAX)))
    if npz is not None:
        write_npz(replayed, npz)
        terminal.note(f"{npz}: written")
    if output is not None:
        _draw(replayed, output, field)
    _check(replayed, expected)


def _show_journal(journal: JournalReader, position: Position, expected: set[int] | None, *, as_json: bool) -> None:
    """Print what a push stream's journal has. Raises ``BatchdError`` without a matching CRC."""
    batches = journal.at(position)
    if as_json:
        terminal.emit_json([batch.to_plain() for batch in batches])
    for batch in [] if as_json else batches:
        epoch, step = batch.position
        terminal.say(f"epoch {epoch}, step {step}, delivered {batch.time_text}, CRC {history.crc_text(batch.crc32)}")
        terminal.say(f"fingerprint {batch.fingerprint}")
        terminal.say(*(f"row {row}: {batch.row_text(row)}" for row in range(len(batch.pushed))), "")
    if expected and not expected & {batch.crc32 for batch in batches}:
        raise BatchdError("no batch that was delivered at this position has this CRC: its bytes differ")
    if expected:
        terminal.note("the CRC matches: the trainer got these rows")


def _card_in(state_file: Path | None) -> RunCard | None:
    """The card that a state has with it, from ``state_dict(card=True)``; None if it has none."""
    run = read_run(state_file) if state_file is not None else None
    return run if isinstance(run, RunCard) else None


def _begin(
    position: Position | None, state_file: Path | None, card_file: Path | None, card: RunCard | None
) -> tuple[Position, TrainerState | None, float | None]:
    """The position, the state that has it, and the Unix time after which files count as changed."""
    since_s = card.time_s if card is not None else None
    if position is not None and state_file is not None:
        raise click.UsageError("EPOCH:STEP and --state are two positions; leave one out")
    if position is not None:
        return position, None, since_s
    file = state_file or card_file
    if file is None:
        raise click.UsageError("name the position as EPOCH:STEP, such as 3:117, or the --state of a trainer")
    state, written_s = read_state(file)
    return state.position, state, since_s if since_s is not None else written_s


def served_card(stream: str, address: str | None, *, running: bool, is_given: bool) -> RunCard | None:
    """The card of the running daemon, if that is asked for; ``is_given``: a configuration is."""
    if not running and address is None:
        return None
    if is_given:
        raise click.UsageError("--running and --config are two configurations; leave one out")
    return ask_card(stream, address)


def ask_card(stream: str, address: str | None) -> RunCard:
    """The card of a stream of the running daemon. Raises ``BatchdError``."""
    with running_daemon(address) as session, client_errors():
        deadline = monotonic() + ANSWER_TIMEOUT_S
        answer = session.request(lambda request: AskStatus(request, card_of=stream), Status, deadline)
        status: DaemonStatus = typed_status(answer.status)
        if status.card is None or not status.card.configuration:
            answer = session.request(AskStatus, Status, deadline)
            names = [stream.name for stream in typed_status(answer.status).streams]
            if stream not in names:
                raise BatchdError(f"the daemon has no stream {stream!r}; {suggestion(stream, names)}")
            raise BatchdError(f"the daemon has no card of stream {stream!r}: it is an older one; upgrade batchd there")
        return RunCard.of(status.card, {"batchd": status.daemon.version, "decoders": status.daemon.decoders})


def _warn_of_versions(card: RunCard | None, replayed: history.Replayed) -> None:
    differ = version_differences(card.versions, replayed.versions) if card is not None else []
    if differ:
        terminal.warn(
            "other versions than those of the run made this batch, so pixels may differ; --verify CRC shows whether they do"
        )
    for line in differ:
        terminal.note(f"  {escaped(line)}")


def _check(replayed: history.Replayed, expected: set[int] | None) -> None:
    """Compare checksums. Raises ``BatchdError`` if they differ, or if files have changed."""
    if expected and replayed.crc32 not in expected:
        wanted = " or ".join(sorted(map(history.crc_text, expected)))
        raise BatchdError(f"the batch has the CRC {history.crc_text(replayed.crc32)}, not {wanted}: its bytes differ")
    if expected:
        terminal.note(f"the CRC {history.crc_text(replayed.crc32)} matches: the batch has the same bytes")
        return
    if replayed.changed:
        names = "".join(f"\n  {name}" for name in replayed.changed[:CHANGED_SHOWN_MAX])
        more = len(replayed.changed) - CHANGED_SHOWN_MAX
        raise BatchdError(
            f"{counted(len(replayed.changed), 'file')} of this batch changed after the run, so the batch may be another; "
            f"--verify CRC shows whether it is:{names}" + (f"\n  and {more} more" if more > 0 else "")
        )


def shown(replayed: history.Replayed, width: int) -> list[str]:
    """The facts of a batch as text of ``width`` columns."""
    epoch, step = replayed.position
    rows = counted(len(replayed.rows), "row")
    lines = _wrapped(
        f"{replayed.stream}, epoch {epoch}, step {step}: {rows}, CRC {history.crc_text(replayed.crc32)}", width
    )
    lines += _wrapped(f"fingerprint {replayed.fingerprint}", width)
    for row in replayed.rows:
        lines += ["", *_wrapped(_head(row), width)]
        for text in (row.name, *map(drawn_text, row.draws), *map(_document, row.documents), *_others(row)):
            lines += _wrapped(escaped(text), width, indent=2)
    return lines


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    blank = " " * indent
    return wrapped(text, width, blank, f"{blank}  ")


def _head(row: history.ReplayedRow) -> str:
    parts = [
        f"row {row.row}: " + (counted(len(row.documents), "document") if row.sample < 0 else f"sample {row.sample}")
    ]
    if row.label is not None:
        parts.append(f"label {row.label}" + (f" ({escaped(row.class_name)})" if row.class_name else ""))
    return ", ".join([*parts, f"CRC {history.crc_text(row.crc32)}"])


def _document(one: history.ReplayedDocument) -> str:
    """Where a document is in its row, and what it is."""
    if one.reason:
        return f"bad: sample {one.sample}, {one.name}: {one.reason}"
    part = f" from its element {one.first}" if one.first else ""
    place = f"elements {one.offset} to {one.offset + one.length - 1}: sample {one.sample}, {one.name}{part}"
    return "; ".join([place, *map(drawn_text, one.draws)])


def _others(row: history.ReplayedRow) -> list[str]:
    """What happened to the sample of the plan, and to its file."""
    others = [f"bad: sample {tried.sample}, {tried.name}: {tried.reason}" for tried in row.tried]
    if row.sample != row.planned:
        others.append(f"stands in for sample {row.planned}, which the plan names")
    if not row.is_good:
        others.append("no sample is in this row, as on_error says")
    return [*others, *(["its file was written after the run"] if row.is_changed else [])]


def drawn_text(draw: history.Draw) -> str:
    """The results of a random step as text."""
    field = f" of {draw.field}" if draw.field not in ("", "image") else ""
    return f"{draw.op}{field}: {_results(draw.drew, '; ' if draw.op == 'views' else ', ')}"


def _result(name: str, value: object) -> str:  # noqa: C901, PLR0912  one case for each
    match name, value:
        case "crop", Mapping():
            return f"{value['width']} x {value['height']} from {value['left']}, {value['top']}"
        case "padded", Mapping():
            return f"placed at {value['left']}, {value['top']}"
        case "flips", list():
            return " and ".join(map(str, value)) or "not flipped"
        case "with", list():
            return "with " + "; ".join(f"{name} ({sample})" for sample, name in value)
        case "pasted", int():
            return f"{value} pasted"
        case "centre", list():
            return f"around {value[0]}, {value[1]}"
        case "degrees", _:
            return f"{value:.6g} degrees"
        case "holes", list():
            return "from " + "; ".join(f"{hole['left']}, {hole['top']}" for hole in value)
        case "numbers", _:
            return "numbers of its own"
        case "operations", list():
            return _operations(value)
        case "chains", list():
            return "chains of " + "; ".join(map(_operations, value))
        case "corners", list():
            return "corners at " + "; ".join(f"{x}, {y}" for x, y in value)
        case _, []:
            return f"{name} nothing"
        case _, [{"op": _}, *_]:  # of a view
            return f"{name} {', '.join(map(_step_text, cast('list[dict[str, object]]', value)))}"
        case _, list() | tuple():
            return f"{name} " + ", ".join(f"{number:.6g}" for number in value)
        case "acts", _:
            return "done" if value else "not done"
        case _, Mapping():  # of a clip
            return f"{name} {_results(value, ' and ')}"
        case _:
            return f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"


def _operations(named: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {number:.6g}" if number else name for name, number in named) or "nothing"


def _step_text(drew: Mapping[str, object]) -> str:
    """A step of a view, and its results."""
    return f"{drew['op']} {_results({name: value for name, value in drew.items() if name != 'op'})}"


def _results(drew: Mapping[str, object], between: str = ", ") -> str:
    return between.join(_result(name, value) for name, value in drew.items()) or "done"


def write_npz(replayed: history.Replayed, file: Path) -> None:
    """Write the fields; of a ragged one NAME.values and NAME.row_splits. Raises ``BatchdError``."""
    arrays: dict[str, np.ndarray] = {}
    for name, room in replayed.rooms.items():
        if room.varying is not None and room.sizes is not None and room.varying.kind == RAGGED:
            compact = ragged_view(room.array, room.sizes, room.varying).compact()
            arrays |= {f"{name}.values": compact.values, f"{name}.row_splits": compact.row_splits}
        else:
            arrays[name] = np.asarray(replayed.fields[name])
    try:
        with file.open("wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise BatchdError(why_unwritable(file, error)) from None


def _draw(replayed: history.Replayed, output: Path, field: str | None) -> None:
    """Draw the contact sheet of `batchd peek`. Raises ``BatchdError``."""
    from batchd.cli.contact_sheet import draw  # noqa: PLC0415  it loads OpenCV

    rooms = replayed.rooms
    varying = {name: WholeField(*room) for name, room in rooms.items() if room.varying is not None}
    arrays = {name: room.array for name, room in rooms.items()}
    classes, bgr_fields, overlays = replayed.classes, replayed.bgr_fields, replayed.overlays
    batch = PeekedBatch(*replayed.position, classes, arrays, varying, bgr_fields, overlays)
    draw(batch, replayed.stream, output, field)
    terminal.note(f"{output}: drawn")
