"""``batchd seen``: say in which rows the model saw a file, a class or a sample.

Runs in the user's shell, without a daemon: places are computed from the index of the source.

Invariant: the state or the card of a run with other batches is refused, as by ``batchd replay``.
"""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated

import click

from batchd.cli import terminal
from batchd.cli.asking import client_errors, running_daemon
from batchd.cli.log_lines import set_up_logs
from batchd.cli.options import (
    Address,
    CardFile,
    ConfigFile,
    Json,
    Overrides,
    argument,
    as_command,
    is_config_given,
    option,
    parse_position,
)
from batchd.cli.prepare import ConfiguredStream
from batchd.cli.replay import drawn_text, served_card
from batchd.cli.text import escaped
from batchd.commands.history.batches import ReplayedDocument, ReplayedRow, Replayer, check_fingerprint
from batchd.commands.history.cards import TrainerState, read_card, read_state
from batchd.commands.history.journal import PUSHED, JournalReader, parse_wanted
from batchd.commands.history.seen import Leg, SampleLookup, Seen, SeenPlace
from batchd.config.load import load_config
from batchd.data.storage.paths import why_unreadable
from batchd.errors import ArgumentInvalid, BatchdError
from batchd_client.asking import ANSWER_TIMEOUT_S
from batchd_wire.messages import AskBad, BadSamples
from batchd_wire.position import Position
from batchd_wire.wording import counted

LISTED_MAX = 16
"""Up to so many samples, each place is listed; of more, the number in each epoch."""
_LEG = re.compile(r"(\d{1,9})(?:@(\d{1,9}:\d{1,9}))?")


def _legs(values: tuple[str, ...]) -> list[Leg]:
    """Parse N and N@EPOCH:STEP. Raises ``click.BadParameter``."""
    legs = []
    for value in values:
        found = _LEG.fullmatch(value)
        if found is None:
            raise click.BadParameter(f"{value!r} is not a number of ranks, as in 4, or as in 2@1:40 from a position on")
        legs.append(Leg(parse_position(found[2] or "0:0"), int(found[1])))
    return legs


@as_command("seen")
def command(
    context: click.Context,
    *,
    stream: ConfiguredStream,
    file: Annotated[str | None, argument()],
    label: Annotated[str | None, option("The samples of a class, by its name or number, instead of FILE.")],
    index: Annotated[
        int | None, option("The sample with this number, instead of FILE.", limits=(0, None), metavar="N")
    ],
    state_file: Annotated[
        Path | None,
        option("The state of a trainer as JSON: batches before it count. A card may have one, too.", "--state"),
    ],
    epochs: Annotated[
        int | None, option("Count the first N epochs, instead of a state.", limits=(1, None), metavar="N")
    ],
    until: Annotated[
        Position | None,
        option("Count the batches before this one, instead.", parse=parse_position, metavar="EPOCH:STEP"),
    ],
    legs: Annotated[
        list[Leg],
        option(
            "The number of ranks that shared the stream; N@EPOCH:STEP from where it was another one. Repeatable. [default: 1]",
            "--world-size",
            multiple=True,
            parse=_legs,
            metavar="N[@EPOCH:STEP]",
        ),
    ],
    makes_rows: Annotated[bool, option("Make each row again, and print what random steps drew.", "--rows")],
    bad_file: Annotated[
        Path | None,
        option(
            "The bad samples: what `batchd bad --json` printed, or the file that it names. With --running, the daemon's.",
            "--bad",
        ),
    ],
    card_file: CardFile,
    config_file: ConfigFile,
    overrides: Overrides,
    running: Annotated[bool, option("Use the configuration and the bad samples of the running daemon.")],
    address: Address,
    as_json: Json,
) -> None:
    """Print when the model saw samples of STREAM: epoch, step, row and rank.

    FILE is a path, the end of one, or a pattern in quotes; a record is named as `batchd replay`
    names it. Of more than 16 samples, the numbers in each epoch are printed. Nothing of the run
    need have been logged, and nothing is decoded. In the journal of a push stream, FILE is
    FIELD=NUMBER, such as key=1200, and --index the number of a push.
    """
    set_up_logs("warning")
    if sum(given is not None for given in (file, label, index)) != 1:
        raise click.UsageError("name the samples by one of FILE, --label and --index")
    if sum(given is not None for given in (state_file, epochs, until)) > 1:
        raise click.UsageError("--state, --epochs and --until are several ends of the run; give one")
    card = read_card(card_file) if card_file is not None else None
    state: TrainerState | None = None
    end = Position(epochs, 0) if epochs is not None else until
    is_given = is_config_given(context, overrides)
    served = served_card(stream, address, running=running, is_given=is_given)
    of_card = served or (None if is_given else card)
    config = of_card.config() if of_card is not None else load_config(config_file, overrides)
    # a derived stream has another name there
    stream = served.stream if served is not None else stream
    if stream in config.streams and config.streams[stream].journal is not None:
        if makes_rows or bad_file is not None or legs:
            raise ArgumentInvalid(f"stream {stream!r} is live: --rows, --bad and --world-size do not go with a journal")
        state = read_state(state_file)[0] if state_file is not None else None
        end = state.position if state is not None else end
        wanted = file if file is not None else f"label={label}" if label is not None else f"pushed={index}"
        _show_journal(JournalReader(config, stream, state), parse_wanted(wanted), end, as_json=as_json)
        return
    if end is None:
        ended = state_file or card_file
        if ended is None:
            raise click.UsageError("say how far the run is: --state FILE, --epochs N or --until EPOCH:STEP")
        state, _written_s = read_state(ended)
        end = state.position
    bad = KnownBad.read(bad_file) if bad_file is not None else KnownBad()
    if (running or address is not None) and bad_file is None:
        bad = KnownBad.ask(stream, address)
    lookup = SampleLookup(config, stream, bad.samples)
    check_fingerprint(lookup.card(), served, None, "the daemon serves")
    check_fingerprint(lookup.card(), card, state)
    seen = lookup.seen(lookup.find(file, label, index), end, legs or (Leg(Position(0, 0), 1),))
    with ExitStack() as until_done:
        replayer = until_done.enter_context(Replayer(config, stream)) if makes_rows else None
        if as_json:
            terminal.emit_json(_plain(seen, lookup, bad, replayer))
            return
        for line in _shown(seen, lookup, bad, replayer):
            terminal.say(line)


def _show_journal(journal: JournalReader, wanted: tuple[str, int], end: Position | None, *, as_json: bool) -> None:
    """Print in which rows the journal of a push stream has a number."""
    (field, value), found = wanted, journal.find(*wanted, end)
    if as_json:
        rows = [
            {**batch.position._asdict(), "row": row, "time_s": batch.time_s, "push": int(batch.pushed[row])}
            for batch, row in found
        ]
        terminal.emit_json({"batches": len(journal), "places": rows})
        return
    what = f"push {value}" if field == PUSHED else f"{field} = {value}"
    terminal.say(f"{what}: {counted(len(found), 'row')} of the journal, which has {journal.extent}")
    for batch, row in found:
        epoch, step = batch.position
        terminal.say(f"  epoch {epoch}, step {step}, row {row}, {batch.time_text}: {batch.row_text(row)}")


@dataclass(frozen=True, slots=True)
class KnownBad:
    """Bad samples that are known. ``where``: who knows them; "" if no one was asked."""

    samples: tuple[int, ...] = ()
    total: int = 0
    where: str = ""

    @classmethod
    def read(cls, file: Path) -> "KnownBad":
        """Read what `batchd bad --json` printed, or the daemon's file. Raises ``BatchdError``."""
        try:
            text = file.read_text(encoding="utf-8")
            try:
                plain = json.loads(text)
            except ValueError:  # a line for each sample
                plain = [json.loads(line) for line in text.splitlines()]
            total = int(plain["total"]) if "total" in plain else None
            of_file = plain.get("samples", [plain]) if isinstance(plain, dict) else plain
            samples = tuple(int(entry["sample"]) for entry in of_file)
        except OSError as error:
            raise BatchdError(why_unreadable(file, error)) from None
        except (ValueError, TypeError, KeyError):
            raise BatchdError(f"{file} is no list of bad samples; write what `batchd bad --json` prints") from None
        return cls(samples, len(samples) if total is None else total, str(file))

    @classmethod
    def ask(cls, stream: str, address: str | None) -> "KnownBad":
        """Ask the daemon. Raises ``BatchdError``."""
        with running_daemon(address) as session, client_errors():
            deadline = monotonic() + ANSWER_TIMEOUT_S
            answer = session.request(lambda request: AskBad(request, stream), BadSamples, deadline)
        return cls(tuple(sample for sample, *_facts in answer.samples), answer.total, "the daemon")

    def text(self) -> str:
        """What is known of bad samples, for people."""
        if not self.where:
            return "no bad samples are known: --running asks the daemon, --bad FILE reads its list"
        if self.total > len(self.samples):
            return f"the first {len(self.samples):,} of {self.total:,} bad samples are considered, as {self.where} lists them"
        return f"{counted(self.total, 'bad sample')} considered, as {self.where} lists them"


def _plain(seen: Seen, lookup: SampleLookup, bad: KnownBad, replayer: Replayer | None) -> dict[str, object]:
    """The facts as JSON; places only of a few samples, or if rows are made."""
    plain: dict[str, object] = {
        "stream": seen.stream,
        "fingerprint": seen.fingerprint,
        "until": seen.until._asdict(),
        "samples": len(seen.samples),
        "seen": seen.times,
        "never": seen.never,
        "bad_known": len(bad.samples) if bad.where else None,
        "epochs": [{"epoch": epoch, "seen": times} for epoch, times in seen.by_epoch.items()],
    }
    if len(seen.samples) <= LISTED_MAX or replayer is not None:
        plain["names"] = {sample: lookup.name(sample) for sample in seen.samples.tolist()}
        plain["places"] = [
            place._asdict() | ({} if made is None else {"made": made.to_plain()})
            for place, made in _made(seen, replayer)
        ]
    return plain


def _made(seen: Seen, replayer: Replayer | None) -> Iterator[tuple[SeenPlace, ReplayedRow | None]]:
    """Each place, and how its row is made, if that is asked for."""
    for place in seen.places():
        made = None
        if replayer is not None:
            made = replayer.rows(Position(place.epoch, place.step), place.row, 1).rows[0]
        yield place, made


def _shown(seen: Seen, lookup: SampleLookup, bad: KnownBad, replayer: Replayer | None) -> Iterator[str]:
    """The facts as lines of text."""
    epoch, step = seen.until
    samples = counted(len(seen.samples), "sample")
    yield f"{seen.stream}, before epoch {epoch}, step {step}: {samples}, seen {counted(seen.times, 'time')}"
    yield f"fingerprint {seen.fingerprint}; {bad.text()}"
    if seen.never:
        yield f"never seen: {counted(seen.never, 'sample')}"
    yield ""
    if len(seen.samples) > LISTED_MAX and replayer is None:
        for epoch, times in seen.by_epoch.items():
            yield f"epoch {epoch}: {times:,}"
        return
    for sample in seen.samples.tolist():
        name = lookup.name(sample)
        yield f"sample {sample}" + (f": {escaped(name)}" if name else "")
    for place, made in _made(seen, replayer):
        yield _place_text(place)
        yield from (f"  {escaped(text)}" for text in _row_texts(place, made))


def _place_text(place: SeenPlace) -> str:
    ranks = " and ".join(
        f"rank {rank}" + (f" (row {row} of its batch)" if row != place.row else "")
        for rank, row in zip(place.ranks, place.rank_rows, strict=True)
    )
    text = f"  epoch {place.epoch}, step {place.step}, row {place.row}, {ranks}: sample {place.sample}"
    if place.stands_in_for is not None:
        text += f", in the place of {place.stands_in_for}, which is bad"
    return text + (f", from its element {place.element}" if place.element else "")


def _row_texts(place: SeenPlace, made: ReplayedRow | None) -> list[str]:
    """What a row says of a sample that was made again."""
    if made is None:
        return []
    parts: list[ReplayedRow | ReplayedDocument] = [made]
    if made.documents:
        wanted = place.sample, place.element
        parts = [document for document in made.documents if (document.sample, document.first) == wanted]
    texts = []
    for part in parts:
        if isinstance(part, ReplayedDocument):
            texts.append(part.reason or f"elements {part.offset} to {part.offset + part.length - 1} of the row")
        elif part.sample != place.sample or not part.is_good:
            reason = next(
                (tried.reason for tried in part.tried if tried.sample == place.sample), "it is not in this row"
            )
            texts.append(f"not seen: {reason}")
        texts += map(drawn_text, part.draws)
    return [f"  {text}" for text in texts]
