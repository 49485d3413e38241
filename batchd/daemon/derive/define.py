"""Works out a stream that a trainer defines, as if it stood in batchd.toml. DEFINING process.

    table -> TOML -> config.load -> whose keys, code and files? -> rings -> scan -> facts, index

The process is a fork of the DERIVING one, for this stream alone. It takes the user and the groups
of a user of this host, gives up by Landlock all but reading below ``roots``, and scans in itself:
a damaged file ends this process, and the kernel bounds its memory.

Invariant: no file is opened that who asks may not open himself, and none outside of ``roots``.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from batchd.config.derive import LIMITS, SIDE_MAX, too_large
from batchd.config.load import LoadedConfig, parse_config
from batchd.config.schema import change_paths, problem_at, toml_key, toml_value
from batchd.config.tree import MEMORY_BYTES_MIN, Config, DaemonConfig, DefineConfig, Mark, StreamConfig, keys_marked
from batchd.daemon.derive.messages import DefineRequest
from batchd.daemon.identity import Identity, look_up
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.options import StepOptions, with_inner
from batchd.data.samples.location import looks_like_url
from batchd.data.sources.composed.options import sources_in
from batchd.data.sources.options import SourceOptions
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.values import CHECK_LIMITS
from batchd.errors import (
    BatchdError,
    ConfigInvalid,
    KeyPath,
    MemoryTooSmall,
    Problem,
    ProblemKind,
    SourceInvalid,
    path_text,
)
from batchd.runtime import failpoints
from batchd.runtime.rights import CAPABILITIES, become, lacking
from batchd.runtime.sandbox import enclose, unreadable_code, version
from batchd.runtime.sizes import round_bytes
from batchd.runtime.suggestions import known_here
from batchd.stream.access import access_of_roots
from batchd.stream.rings import DERIVED_SLOTS_MAX, plan_rings
from batchd.stream.served import ServedStream, open_stream
from batchd_wire.wording import counted

SAMPLES_MAX = 20_000_000
"""Of a defined stream: the index of more is the operator's to pay for."""
ENVIRONMENT = ("PATH", "LANG", "LC_", "PYTHON", "LD_", "OMP_", "OPENBLAS_", "BATCHD_")
"""How the names of variables begin that workers get who measure samples as another user."""
PROC = "/proc"
"""What workers who measure samples read of themselves."""
DEPTH_MAX = 32
"""Of tables and lists in one another."""
LINE_CHARACTERS_MAX = 160
"""A longer line of a table is not shown with its problem."""


def may_define(define: DefineConfig | None, who: Identity) -> bool:
    """True if who asks is one of ``who``. Looks users and groups up, which may take time."""
    if define is None or not who.is_proved:
        return False
    return who.is_operator or who.is_one_of(define.who, look_up(define.who))


def define(asked: DefineRequest, scans: IndexCache) -> tuple[ServedStream, list[str]]:
    """Work out the stream, after which this process has fewer rights; and the roots that it needs.

    Raises ``BatchdError``, ``OSError``.
    """
    daemon = DaemonConfig.model_validate_json(json.dumps(asked.daemon))
    rules, who = daemon.define, asked.identity
    assert rules is not None, "the daemon asks for what it allows alone"
    if not may_define(rules, who):
        raise BatchdError(
            f"{who.owner} may not define streams here; its operator may add to who in [daemon.define], which is: "
            f"{', '.join(rules.who)}"
        )
    _take_user(who)
    reading = _read(asked)
    config = _allowed(reading, asked, rules)
    access, is_measured = access_of_roots(daemon), config.streams[asked.stream].orders_by_size
    if is_measured and who.reader:
        _forget_environment()
    if version():
        of_workers = [PROC] if is_measured else []
        enclose(access._replace(read=[*access.read, *of_workers]), runs_own=is_measured)
    stream = _open(reading, config, asked, daemon, scans)
    facts = stream.facts
    changed = [name for name, digest in facts.message.recipe.modules if asked.modules.get(name, digest) != digest]
    if changed:
        stream.close()
        raise BatchdError(f"the module {changed[0]} of its functions has changed; have the operator reload the daemon")
    # what is decoded with the rights of one is not for others
    siblings = facts.spec.siblings and f"{facts.spec.siblings} {who.owner}"
    spec = replace(facts.spec, siblings=siblings, shares_caches=False, decodes_here=True)
    recipe = facts.message.recipe._replace(access=[access])
    message = replace(facts.message, siblings=siblings, recipe=recipe, reader=who.reader)
    cache = None if facts.cache is None else facts.cache._replace(key=f"{facts.cache.key} {who.owner}")
    stream.facts = replace(facts, spec=spec, message=message, cache=cache)
    return stream, sorted({root for _key, text in _paths(asked) for root in [_root_of(text, rules)] if root})


def _take_user(who: Identity) -> None:
    """Go on as who asks, if he is a user of this host. Raises ``BatchdError``."""
    if not who.reader:
        return
    if missing := lacking():
        raise BatchdError(
            f"the daemon runs as user {os.geteuid()} without {', '.join(missing)}, and cannot read files with the rights of "
            f"{who.owner}: it has to run as root, or with {', '.join(CAPABILITIES)}; or the operator adds the stream to the file"
        )
    become(who.reader)
    if closed := unreadable_code():
        raise BatchdError(
            f"{who.owner} may not read {closed}, where the daemon's program is; have the operator open it"
        )


def _forget_environment() -> None:
    """Keep credentials of the daemon from processes that his user could look into."""
    for name in list(os.environ):
        if not name.startswith(ENVIRONMENT):
            del os.environ[name]


def _read(asked: DefineRequest) -> LoadedConfig:
    """Read the table as if it were in the file. Raises ``BatchdError``."""
    try:
        table = json.loads(asked.table, parse_constant=_refuse_constant)
        if not isinstance(table, dict):
            raise ValueError("is no table")  # noqa: TRY004  as of all that is wrong with the text
        _check_depth(table)
        text = "\n".join([f"[streams.{toml_key(asked.stream)}]", *_lines(table), ""])
        text.encode()
    except (ValueError, RecursionError) as error:
        text = "it has tables or lists in one another too deep" if isinstance(error, RecursionError) else str(error)
        raise _refused([Problem("", ProblemKind.WRONG_VALUE, text)], asked) from None
    # paths are absolute, or refused: nothing is looked for in a folder of the daemon
    try:
        return parse_config(text, Path("/-/define"), environment={})
    except ConfigInvalid as error:
        raise _refused(error.problems, asked) from None


def _refused(problems: Sequence[Problem], asked: DefineRequest) -> BatchdError:
    """The problems, each with the line of the table and carets under the key."""
    table = path_text(("streams", asked.stream))
    lines = [f"{asked.stream} has {counted(len(problems), 'problem')}:"]
    for problem in problems:
        path = problem.path.removeprefix(table).removeprefix(".")
        lines.append(f"  {path}{': ' if path else ''}{problem.message.replace(f'[{table}]', 'the table')}")
        if path and problem.source and len(problem.source) <= LINE_CHARACTERS_MAX:
            before = " " * ((problem.column or 1) - 1)
            lines += [f"      {problem.source}", f"      {before}{'^' * problem.length}"]
    return BatchdError("\n".join(lines))


def _check_depth(value: object, depth: int = 0) -> None:
    if depth > DEPTH_MAX:
        raise ValueError(f"has tables or lists in one another deeper than {DEPTH_MAX}")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(inner, depth + 1)


def _lines(table: Mapping[str, object]) -> Iterator[str]:
    """A table as TOML: a line for each key, and for each item of a list of tables."""
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield f"{toml_key(key)} = ["
            yield from (f"    {toml_value(item)}," for item in value)
            yield "]"
        elif value is not None:
            yield f"{toml_key(key)} = {toml_value(value)}"


def _allowed(reading: LoadedConfig, asked: DefineRequest, rules: DefineConfig) -> Config:
    """The configuration, if who asks may have it. Raises ``BatchdError`` with all problems."""
    problems = list(reading.problems)
    table = reading.data["streams"][asked.stream]  # type: ignore[index]
    problems += _of_the_operator(asked.stream, table)
    problems += _outside(asked, rules)
    if reading.config is not None:
        problems += _of_theirs(asked.stream, reading.config.streams[asked.stream], rules, table)
    if reading.config is None or problems:
        raise _refused(reading.located(problems), asked)
    return reading.config


def _of_the_operator(name: str, table: Mapping[str, object]) -> Iterator[Problem]:
    """Keys that cost the daemon more than a ring."""
    known = sorted({*keys_marked(Mark.DERIVES, StreamConfig), *keys_marked(Mark.DEFINES, StreamConfig)})
    for key in table:
        if key in StreamConfig.model_fields and key not in known:
            text = f"is for the operator of the daemon to set; {known_here(known)}"
            yield problem_at(("streams", name, key), ProblemKind.WRONG_VALUE, text)


def _outside(asked: DefineRequest, rules: DefineConfig) -> Iterator[Problem]:
    """Files that are not below the roots."""
    for key, text in _paths(asked):
        if not looks_like_url(text) and (not text.startswith("/") or "\0" in text):
            where = "are those of the daemon's host, and begin with /"
            yield problem_at(key, ProblemKind.WRONG_VALUE, f"{text!r}: paths of a defined stream {where}")
        elif not _root_of(text, rules):
            what = f"{text} is not below the roots of [daemon.define]: {', '.join(rules.roots)}"
            yield problem_at(key, ProblemKind.WRONG_VALUE, what)


def _root_of(text: str, rules: DefineConfig) -> str:
    """The root that a path or URL is below, as it is written; "" if there is none."""
    if looks_like_url(text):
        return next((root for root in rules.roots if ".." not in text.split("/") and _is_below(text, root)), "")
    real = {root: os.path.realpath(place) for root, place in zip(rules.roots, rules.places, strict=True)}
    return next((root for root, place in real.items() if _is_below(os.path.realpath(text), place)), "")


def _paths(asked: DefineRequest) -> list[tuple[KeyPath, str]]:
    """The paths and URLs that a table names, and where."""
    whole = {"streams": {asked.stream: json.loads(asked.table)}}
    change_paths(whole, lambda text: f"\0{text}")  # other texts with that are refused with them
    return [(key, text[1:]) for key, text in _texts((), whole) if text.startswith("\0")]


def _texts(key: KeyPath, value: object) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield key, value
    items: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in items:
        yield from _texts((*key, name), inner)


def _is_below(text: str, root: str) -> bool:
    return f"{text.rstrip('/')}/".startswith(f"{root.rstrip('/')}/")


def _of_theirs(name: str, stream: StreamConfig, rules: DefineConfig, data: object) -> Iterator[Problem]:
    """Code that may not be theirs, links, and samples that come from programs."""
    around: KeyPath = ("streams", name)
    functions = "runs functions of its own; its operator may allow that with code = true in [daemon.define]"
    for key, source in sources_in(stream.source):
        path = (*around, "source", *key)
        if getattr(source, "allow_outside_root", False):
            yield problem_at((*path, "allow_outside_root"), ProblemKind.WRONG_VALUE, "leads out of the roots")
        if source.is_own_code and not rules.code:
            yield problem_at((*path, "type"), ProblemKind.WRONG_VALUE, f"{source.type!r} {functions}", data)
        elif source.is_live:
            text = f"samples of {source.type!r} come once, from programs: the operator adds such a stream to the file"
            yield problem_at((*path, "type"), ProblemKind.WRONG_VALUE, text, data)
        yield from (problem_at((*path, name), ProblemKind.WRONG_VALUE, text, data) for name, text in _raised(source))
    for key, step in with_inner({("pipeline", place): step for place, step in enumerate(stream.pipeline)}).items():
        if isinstance(step, Call) and not rules.code:
            yield problem_at((*around, *key, "function"), ProblemKind.WRONG_VALUE, f'"call" {functions}', data)
        wrong = [*too_large(step), *_raised(step)]
        yield from (problem_at((*around, *key, name), ProblemKind.WRONG_VALUE, text, data) for name, text in wrong)


def _raised(options: StepOptions | SourceOptions) -> Iterator[tuple[str, str]]:
    """Limits that protect workers, above what they are by default."""
    for option in fields(options):
        most, value = option.default or SIDE_MAX**2, getattr(options, option.name)
        if option.name in LIMITS and isinstance(most, int) and value and value > most:
            yield option.name, f"may be {most} at most; the operator may have more in the file"


def _open(
    reading: LoadedConfig, config: Config, asked: DefineRequest, daemon: DaemonConfig, scans: IndexCache
) -> ServedStream:
    """Plan the ring, and scan. Raises ``BatchdError``."""
    name = asked.stream
    stream = config.streams[name]
    part_bytes = stream.memory or max(MEMORY_BYTES_MIN, daemon.defined_bytes // daemon.define.streams_max)  # type: ignore[union-attr]
    if part_bytes > daemon.defined_bytes:
        text = f"all streams that you define have {round_bytes(daemon.defined_bytes)} (memory in [daemon.define])"
        problem = problem_at(("streams", name, "memory"), ProblemKind.MEMORY_TOO_SMALL, text)
        raise _refused(reading.located([problem]), asked)
    alone = daemon.model_copy(update={"memory": part_bytes, "derive": False, "define": None})
    whole = config.model_copy(update={"daemon": alone})

    def found(samples: int) -> None:
        if samples > SAMPLES_MAX:
            raise SourceInvalid(f"has more than {counted(SAMPLES_MAX, 'sample')}; the operator adds it to the file")

    with Storage(CHECK_LIMITS, encloses=daemon.encloses) as storage:
        storage.scans_here = True
        failpoints.passing("daemon.define.scan")
        try:
            ring = plan_rings(whole, storage)[name]
            ring = replace(ring, slots_max=min(ring.slots_max, DERIVED_SLOTS_MAX))
            storage.limits = daemon.storage_limits()
            return open_stream(0, name, whole, ring, storage, scans, found)
        except SourceInvalid as error:
            path, _colon, text = str(error).partition(": ")
            problems = [Problem(path, ProblemKind.UNUSABLE_SOURCE, text)]
            raise _refused(reading.located(problems), asked) from None
        except (ConfigInvalid, MemoryTooSmall) as error:
            raise _refused(reading.located(error.problems), asked) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of TOML")
