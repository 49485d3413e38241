"""Run cards: what it takes to make the batches of a run again. JSON files of a command's user.

    {"card": 1, "stream": "photos", "fingerprint": "3f…", "samples": 1281167,
     "time_s": 1700000000.0,
     "parts": {"seed": 7, "source": "9a…", "pipeline[0]": {"op": "decode", …}, …},
     "versions": {"batchd": "0.1.0", "decoders": "libjpeg-turbo 2.1.5 …", …},
     "configuration": {"daemon": {…}, "streams": {"photos": {…}}},
     "state": {"stream": "photos", "fingerprint": "3f…", "epoch": 3, "step": 117},

     "digests": [{"epoch": 0, "rows": 1281167, "rows_max": 1281167, "digest": "c4…"}]}

Equal fingerprints mean equal parts. Versions are no part of them: they may make other pixels of the
same file. The state of a trainer is there if the user gave one, and digests of the rows that were
delivered (``core.digests``) if a daemon kept some.

Invariant: the configuration of a card makes the card's fingerprint, as long as neither the files
nor batchd's own steps have changed.
"""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import time
from typing import NamedTuple

import numpy as np
from pydantic import ValidationError

from batchd.config.tree import Config
from batchd.core.digests import RowsDigest, joined
from batchd.core.plan import Facts
from batchd.data.storage.paths import why_unreadable
from batchd.errors import BatchdError
from batchd.runtime import __version__
from batchd_wire.position import Position
from batchd_wire.status import CARD_VERSION, StreamCard, plain_card

FILE_BYTES_MAX = 16 << 20
CPU_INFO = Path("/proc/cpuinfo")
DECODING_FEATURES = ("sse4_2", "avx2", "avx512f", "avx512bw", "asimd", "sve", "sve2")
"""Instructions for which the decoders have code of their own."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
STATE_KEYS = ("stream", "fingerprint", "epoch", "step")


class TrainerState(NamedTuple):
    """The state of a trainer, from its ``state_dict``. ``position``: of its next batch."""

    stream: str
    fingerprint: str
    position: Position
    parts: str = ""
    """A sketch of the stream's settings; "" in a state of an older client."""

    def to_plain(self) -> dict[str, object]:
        """As ``state_dict`` has it."""
        plain = dict(zip(STATE_KEYS, (self.stream, self.fingerprint, *self.position), strict=True))
        return plain | ({"parts": self.parts} if self.parts else {})


@dataclass(frozen=True, slots=True)
class RunCard:
    """See the module. ``time_s``: when the card was made, in Unix time."""

    stream: str
    fingerprint: str
    samples: int
    parts: Facts
    versions: Mapping[str, str]
    configuration: Facts
    time_s: float = field(default_factory=time)
    state: TrainerState | None = None
    digests: tuple[RowsDigest, ...] = ()

    @staticmethod
    def of(card: StreamCard, versions: Mapping[str, str]) -> "RunCard":
        """A card of a stream that a daemon serves, or that this process has opened."""
        return _card_of(plain_card(card, versions, time()), f"the card of {card.stream}")

    def config(self) -> Config:
        """The configuration, with this stream alone. Raises ``BatchdError``."""
        try:
            return Config.model_validate_json(json.dumps(self.configuration), strict=True)
        except ValidationError as error:
            raise BatchdError(
                f"this batchd {__version__} cannot use the configuration of the card, which batchd "
                f"{self.versions.get('batchd', 'of an unknown version')} wrote: {error.errors()[0]['msg']}"
            ) from None

    def to_json(self) -> str:
        """The text of a file."""
        state = self.state.to_plain() if self.state else None
        plain = {**asdict(self), "state": state, "digests": [delivered._asdict() for delivered in self.digests]}
        return json.dumps({"card": CARD_VERSION, **plain}, indent=2) + "\n"


def read_run(file: Path) -> RunCard | TrainerState:
    """Read a card, or the state of a trainer as JSON. Raises ``BatchdError``, naming the file."""
    plain = _read_json(file)
    if "card" not in plain:
        return state_of(plain, str(file))
    if isinstance(plain["card"], dict):  # a state with its card
        return replace(_card_of(plain["card"], file), state=state_of(plain, str(file)))
    return _card_of(plain, file)


def _card_of(plain: Mapping[str, object], file: str | Path) -> RunCard:
    if plain.get("card") != CARD_VERSION:
        raise BatchdError(
            f"{file} is a card of version {plain.get('card')!r}, and this batchd reads {CARD_VERSION}; upgrade batchd"
        )
    match plain:
        case {
            "stream": str(stream),
            "fingerprint": str(fingerprint),
            "samples": int(samples),
            "parts": dict(parts),
            "versions": dict(versions),
            "configuration": dict(configuration),
            "time_s": float(time_s),
        }:
            state = state_of(plain["state"], f"{file}: state") if plain.get("state") is not None else None
            texts = {str(name): str(text) for name, text in versions.items()}
            digests = _digests_of(plain.get("digests", []), file)
            return RunCard(stream, fingerprint, samples, parts, texts, configuration, time_s, state, digests)
    raise BatchdError(
        f"{file} is a damaged card: {', '.join(_missing(plain))} missing, or of a wrong type; write it again"
    )


def _digests_of(plain: object, file: str | Path) -> tuple[RowsDigest, ...]:
    found = []
    for entry in plain if isinstance(plain, list) else [plain]:
        match entry:
            case {"epoch": int(epoch), "rows": int(rows), "rows_max": int(rows_max), "digest": str(digest)} if (
                _DIGEST.fullmatch(digest)
            ):
                found.append(RowsDigest(epoch, rows, rows_max, digest))
            case _:
                raise BatchdError(f"{file} is a damaged card: its digests cannot be read; write it again")
    return tuple(found)


def read_card(file: Path) -> RunCard:
    """Read a card. Raises ``BatchdError``, naming the file."""
    run = read_run(file)
    if isinstance(run, TrainerState):
        raise BatchdError(f"{file} is the state of a trainer, not a card; `batchd card` writes one")
    return run


def read_state(file: Path) -> tuple[TrainerState, float]:
    """A state, and when it was written in Unix time. Raises ``BatchdError``, naming the file."""
    run = read_run(file)
    if isinstance(run, TrainerState):
        return run, file.stat().st_mtime
    if run.state is None:
        raise BatchdError(f"{file} is a card without the state of a trainer; name an EPOCH:STEP, or a state")
    return run.state, run.time_s


def _read_json(file: Path) -> dict[str, object]:
    try:
        with file.open("rb") as stream:
            text = stream.read(FILE_BYTES_MAX + 1)
        plain = json.loads(text) if len(text) <= FILE_BYTES_MAX else None
    except OSError as error:
        made = "`batchd card STREAM -o FILE` writes a card, json.dumps(stream.state_dict()) a state"
        raise BatchdError(f"{why_unreadable(file, error)}; {made}") from None
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        raise BatchdError(f"{file} is neither a card nor the state of a trainer: write json.dumps(stream.state_dict())")
    return plain


def state_of(plain: object, where: str) -> TrainerState:
    """Read what ``state_dict`` gave. Raises ``BatchdError``; ``where`` names it."""
    match plain:
        case {"stream": str(stream), "fingerprint": str(fingerprint), "epoch": int(epoch), "step": int(step)} if (
            epoch >= 0 and step >= 0
        ):
            assert isinstance(plain, Mapping), "it matched"
            if "sample" in plain:
                raise BatchdError(
                    f"{where} is within the batch of epoch {epoch}, step {step}, since the trainer was moved to sample "
                    f"{plain['sample']} and had read nothing yet; name that batch as {epoch}:{step}"
                )
            return TrainerState(stream, fingerprint, Position(epoch, step), str(plain.get("parts", "")))
    raise BatchdError(
        f"{where} is not the state of a trainer, which has {', '.join(STATE_KEYS)}; write what state_dict() gave"
    )


def _missing(plain: Mapping[str, object]) -> list[str]:
    needed = ("stream", "fingerprint", "samples", "parts", "versions", "configuration", "time_s")
    return [name for name in needed if name not in plain] or ["something is"]


def versions_here(decoders: str) -> dict[str, str]:
    """The versions of what makes pixels in this environment. ``decoders``: see ``Ready``."""
    return {
        "batchd": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "decoders": decoders,
        "machine": platform.machine(),
        "CPU features": _cpu_features(),
    }


def _cpu_features() -> str:
    """The features of the first CPU that matter to decoders; "" where the kernel lists none."""
    try:
        lines = CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    found = next(
        (line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features"))), []
    )
    return " ".join(feature for feature in DECODING_FEATURES if feature in found)


def joined_card(card: RunCard, others: Sequence[tuple[Path, RunCard]]) -> RunCard:
    """Add the digests of cards of other hosts, whose daemons delivered other rows of the same run.

    Raises ``BatchdError``, naming the file, for another run, or if rows were delivered twice.
    """
    digests = {delivered.epoch: delivered for delivered in card.digests}
    for file, other in others:
        if (other.stream, other.fingerprint) != (card.stream, card.fingerprint):
            raise BatchdError(
                f"{file} is the card of stream {other.stream!r} with the fingerprint {other.fingerprint}, not of "
                f"{card.stream!r} with {card.fingerprint}; join cards of one run"
            )
        for delivered in other.digests:
            both = joined(digests[delivered.epoch], delivered) if delivered.epoch in digests else delivered
            if both.rows > both.rows_max:
                raise BatchdError(
                    f"{file}: epoch {delivered.epoch} has {delivered.rows_max:,} rows, and both cards together {both.rows:,}, so "
                    "the hosts delivered the same rows; join cards of hosts that shared the ranks of one run"
                )
            digests[delivered.epoch] = both
    return replace(card, digests=tuple(digests[epoch] for epoch in sorted(digests)))


def version_differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The versions that differ, one line for each: of what both know."""
    return [
        f"{name}: {text or 'none'} became {after[name] or 'none'}"
        for name, text in before.items()
        if name in after and after[name] != text
    ]
