"""Writes docs/errors.md to standard output, from the errors themselves: ``make docs``.

Exit codes and what ends with them are read from ``batchd.errors``, exceptions from
``batchd_client.errors`` with the words and the remedies of their docstrings, numbers on the wire
from ``batchd_wire.codes``, problems of a configuration from ``batchd.config.manual``. By hand
stands only when a number is sent, as one exception may stand for several. Invariant: every exit
code, every exception of that module, every kind of problem and every number is on the page.
"""

import inspect
import sys
from collections.abc import Iterator

from batchd import errors as server
from batchd.cli.config import wrap_prose
from batchd.config.manual import MANUAL
from batchd.errors import EXIT_CODE_MEANINGS, BatchdError, ExitCode
from batchd_client import errors as client
from batchd_client.errors import BatchdClientError, error_for_code
from batchd_wire.codes import ErrorCode

HEAD = """# Errors

*Made by `make docs` from `batchd/errors.py`, `batchd/config/manual.py`, `batchd_client/errors.py` and
`batchd_wire/codes.py`; do not edit.*

The meaning of each error, and what helps. Every message says what is wrong, by how much, and which key or command helps.
This page has the common part of all messages of a kind. Bad samples are data, not errors: `batchd bad STREAM` lists them.

* [Exit codes](#exit-codes) of `batchd` commands.
* [Problems of a configuration](#problems-of-a-configuration), by the names that `batchd check` prints.
* [Exceptions](#exceptions) in a training program, sorted by what it does next.
* [Numbers](#numbers) of the daemon's refusals on the wire.
"""
SENT_WHEN = {
    ErrorCode.UNSUPPORTED_VERSION: "trainer and daemon speak different versions of the protocol",
    ErrorCode.NOT_ALLOWED: "a process that may not connect, or may not do this, or one more than a limit allows",
    ErrorCode.MALFORMED_MESSAGE: "bytes that are not a message of this version",
    ErrorCode.UNEXPECTED_MESSAGE: "a message that makes no sense at this point",
    ErrorCode.UNKNOWN_SESSION: "a message outside of a session, or one of a session that has ended",
    ErrorCode.KEY_REFUSED: "a key that was revoked, or that does not open this stream",
    ErrorCode.TOO_MANY_SESSIONS: "a trainer beyond `sessions_max`",
    ErrorCode.TOO_OFTEN: "a host that connects, or a trainer that asks, too often; the refusal is temporary",
    ErrorCode.UNKNOWN_STREAM: "a stream that is not served",
    ErrorCode.RANK_OUT_OF_RANGE: "a rank outside of 0 to world_size - 1",
    ErrorCode.POSITION_OUT_OF_RANGE: "a position that the stream does not have",
    ErrorCode.FINGERPRINT_MISMATCH: "a saved state of a stream with other files, other settings or other pixels",
    ErrorCode.RING_TOO_SMALL: "one more trainer than the ring has slots for, two for each",
    ErrorCode.TOO_FEW_BATCHES: "more ranks than an epoch has batches, with `drop_last = true`",
    ErrorCode.WINDOW_OUT_OF_RANGE: "a window outside of its limits",
    ErrorCode.RING_BUSY: "one more trainer, while others hold the slots that it needs",
    ErrorCode.NOT_LIVE: "a push into a stream with another kind of source",
    ErrorCode.SETTINGS_REFUSED: "a derived stream (`set=`) that the daemon does not allow, or whose settings are wrong",
    ErrorCode.DEFINITION_REFUSED: "a stream from a script (`define`) that the daemon does not allow, or whose table is wrong",
    ErrorCode.RING_EXHAUSTED: "a trainer that waits for a batch and holds all slots itself",
    ErrorCode.STREAM_STOPPED: "a stream that cannot continue; the reason is in the message and in `batchd status`",
    ErrorCode.UNKNOWN_SUBSCRIPTION: "a message about a subscription that the session does not have",
    ErrorCode.PLACE_NOT_LENT: "a producer that fills another producer's place",
    ErrorCode.STREAM_REMOVED: "a stream that a reload removed",
    ErrorCode.STREAM_REPLACED: "a stream that a reload changed; clients subscribe again by themselves",
    ErrorCode.DRAINING: "a daemon that is about to end",
}
assert set(SENT_WHEN) == set(ErrorCode), "say in SENT_WHEN when each number is sent"


def errors_markdown() -> str:
    """The page ``docs/errors.md``."""
    return wrap_prose("\n".join([HEAD, *_exit_codes(), *_problems(), *_exceptions(), *_numbers()]).rstrip() + "\n")


def _exit_codes() -> Iterator[str]:
    kinds = [
        kind
        for kind in vars(server).values()
        if inspect.isclass(kind) and issubclass(kind, BatchdError) and kind is not BatchdError
    ]
    yield "## Exit codes\n"
    yield "| code | meaning | what it is, and what helps |"
    yield "|---|---|---|"
    for code in ExitCode:
        said = " Or: ".join(_cell(inspect.getdoc(kind) or "") for kind in kinds if kind.exit_code is code)
        yield f"| {int(code)} | {EXIT_CODE_MEANINGS[code]} | {said or _without_a_kind(code)} |"
    yield ""


def _without_a_kind(code: ExitCode) -> str:
    """What the codes mean that no class of its own ends with."""
    return {ExitCode.FINE: "", ExitCode.FAILED: "The message says what, and what helps."}[code]


def _problems() -> Iterator[str]:
    yield "## Problems of a configuration\n"
    yield "`batchd explain NAME` prints the same. Lines of a stream are keys of `[streams.photos]`.\n"
    for kind, entry in MANUAL.items():
        yield f"### `{kind}`\n"
        yield f"{entry.text}\n"
        if entry.wrong:
            yield f"Wrong, then right:\n\n```text\n{entry.wrong}\n```\n\n```text\n{entry.right}\n```\n"


def _exceptions() -> Iterator[str]:
    yield "## Exceptions\n"
    yield "All are in `batchd_client.errors`, below `BatchdClientError`. The end of an epoch is no error: a `for` just ends.\n"
    for branch in BatchdClientError.__subclasses__():
        if branch.__module__ != client.__name__:
            continue
        below = list(_below(branch))
        yield f"### {_title(branch)}\n"
        yield _told(branch)
        if below:
            yield f"Of this kind: {', '.join(f'[`{kind.__name__}`](#{kind.__name__.lower()})' for kind in below)}.\n"
        for kind in below:
            yield f"#### {_title(kind)}\n"
            yield _told(kind)


def _below(kind: type[BatchdClientError]) -> Iterator[type[BatchdClientError]]:
    """The subclasses of a kind, each before its own; without private ones of other modules."""
    for one in kind.__subclasses__():
        if one.__module__ == client.__name__:
            yield one
            yield from _below(one)


def _title(kind: type[BatchdClientError]) -> str:
    return f"`{kind.__name__}`"


def _told(kind: type[BatchdClientError]) -> str:
    """When it is raised and what helps: the two parts of its docstring."""
    happened, _, remedy = _text(inspect.getdoc(kind) or "").partition("\n\n")
    codes = [str(code.value) for code in ErrorCode if type(error_for_code(code, "")) is kind]
    number = f" (the daemon's number {' or '.join(codes)})" if codes else ""
    base = kind.__mro__[1]
    is_nested = base is not BatchdClientError and base.__mro__[1] is not BatchdClientError
    also = f" It is a `{base.__name__}`, too." if is_nested else ""
    helps = f"\n\n**What helps:** {' '.join(remedy.split())}" if remedy else ""
    return f"{' '.join(happened.split())}{number and f' *{number.strip()}*'}{also}{helps}\n"


def _numbers() -> Iterator[str]:
    yield "## Numbers\n"
    yield f"```text\n{inspect.getdoc(sys.modules[ErrorCode.__module__]).partition(chr(10) * 2)[2]}\n```\n"
    yield "| number | name | sent for | the Python client raises |"
    yield "|---|---|---|---|"
    for code in ErrorCode:
        raised = type(error_for_code(code, "")).__name__
        yield f"| {code.value} | `{code.name}` | {SENT_WHEN[code]} | [`{raised}`](#{raised.lower()}) |"
    yield ""


def _text(docstring: str) -> str:
    return docstring.replace("``", "`")


def _cell(docstring: str) -> str:
    return " ".join(_text(docstring).replace("|", "\\|").split())


if __name__ == "__main__":
    sys.stdout.write(errors_markdown())
