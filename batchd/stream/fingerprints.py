"""What a stream's fingerprint is a digest of, by names; how two streams differ, also from a state.

    content     all that decides the bytes of a position, see ``served.content_of``
    parts       the same by the names that people know, as cards have them
    sketch      some fifty characters of it, in each saved state; pieces between points are

        content version, batch_size, seed in hexadecimal digits, drop_last, on_error, shuffle
        2 characters of a digest for each of ``DIGESTED``
        each step: 1 character for its op, 2 for all of it, 1 for each option if there is room;
        2 characters for all further steps

A fingerprint tells only that something has changed. A trainer gets the sketch with ``Subscribed``,
keeps it in its states, and shows it when it comes back: so a refusal can name the key.

Invariants: equal fingerprints have equal parts. The fingerprint alone decides whether a state fits:
of 4,096 values two have the same 2 characters, so a sketch may fail to name a change.
"""

import json
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from hashlib import sha256
from typing import Any, NamedTuple, get_args

from batchd.config.tree import OnError
from batchd.core.plan import Facts
from batchd_wire.status import StreamCard

FINGERPRINT_DIGITS = 32
PART_NAMES = {"version": "content version", "cut": "cached steps", "accept": "pool_accept"}
"""Parts of a fingerprint that are not called as the keys of the configuration."""
DIGESTED = (
    "source",
    "columns",
    "shuffle",
    "weights",
    "cut",
    "accept",
    "modules",
    "mix",
    "erase",
    "repeats",
    "libraries",
)
"""Parts whose earlier value a sketch does not tell. The last ones are left out where they are
absent."""
SKETCH_CHARACTERS = 80
"""Beyond, a sketch has no options of steps: a state stays below 200 bytes."""
SKETCH_CHARACTERS_MAX = 1_024
CHANGES_MAX = 4
ANOTHER = "another value"
SHOWN_CHARACTERS_MAX = 60
_ABSENT = "--"
_FAILURES: tuple[str, ...] = get_args(OnError)
OWN_ORDER = 2
"""In place of ``shuffle``, which is 0 or 1, where the content has the digest of an order."""
_WHOLE = 3
"""Characters of a step before those of its options."""

Content = Mapping[str, Any]


def fingerprint(content: Content) -> str:
    """Digest of ``content_of`` a stream."""
    return _digest(content).hex()[:FINGERPRINT_DIGITS]


def parts_of(content: Content) -> Iterator[tuple[str, object]]:
    """Name the parts of a fingerprint: steps as ``pipeline[0]``, modules as ``module NAME``."""
    for key, value in content.items():
        if key == "steps":
            yield from ((f"pipeline[{place}]", step) for place, step in enumerate(value))
        elif key == "modules":
            yield from ((f"module {module}", digest) for module, digest in value.items())
        elif key == "columns":
            yield "columns", dict(value)
        else:
            yield PART_NAMES.get(key, key), value


def content_from(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The content that the ``parts`` of a card describe: the way back from ``parts_of``."""
    keys = {known_as: key for key, known_as in PART_NAMES.items()}
    content: dict[str, Any] = {"steps": [step for name, step in parts.items() if name.startswith("pipeline[")]}
    modules = {name.removeprefix("module "): digest for name, digest in parts.items() if name.startswith("module ")}
    for name, value in parts.items():
        if name == "columns":
            content[name] = list(value.items())
        elif not name.startswith(("pipeline[", "module ")):
            content[keys.get(name, name)] = value
    return content | ({"modules": modules} if modules else {})


class StateChanges(NamedTuple):
    """How a stream differs from the one of a saved state.

    ``lines``: one for each part that is known to differ. ``batch_size``: that of the state, if both
    streams have the same samples in the same order, and only their batches are cut otherwise.
    """

    lines: tuple[str, ...] = ()
    batch_size: int | None = None

    @property
    def text(self) -> str:
        """The lines in one; "" if there are none."""
        more = len(self.lines) - CHANGES_MAX
        return "; ".join(self.lines[:CHANGES_MAX]) + (f"; and {more} more" if more > 0 else "")


def sketch_of(content: Content) -> str:
    """Sketch the content of a stream; see the module."""
    plain = [content["version"], content["batch_size"], content["seed"]]
    plain += [int(content["drop_last"]), _FAILURES.index(content["on_error"]), _order(content)]
    codes = list(_named_codes(content).values())
    while codes[-1] == _ABSENT:
        codes.pop()
    digests = "".join(codes)
    head = ["-".join(f"{number:x}" for number in plain), digests]
    steps = [_step_code(step) for step in content["steps"]]
    whole = ".".join([*head, *steps])
    if len(whole) <= SKETCH_CHARACTERS:
        return whole
    steps = [step[:_WHOLE] for step in steps]
    room = (SKETCH_CHARACTERS - len(".".join(head))) // (_WHOLE + 1)
    if len(steps) > room:
        steps[room - 1 :] = [_code(steps[room - 1 :], 2)]
    return ".".join([*head, *steps])


def changes_since(was: str, sketch: str, content: Content) -> StateChanges:
    """Say how the stream of ``content`` differs from that of a state: its fingerprint and sketch.

    A trainer may show anything as the sketch; what makes no sense tells nothing.
    """
    with suppress(ValueError, IndexError):
        head, digests, *steps = sketch[:SKETCH_CHARACTERS_MAX].split(".")
        version, batch_size, seed, drop_last, on_error, order = (int(number, 16) for number in head.split("-"))
        old: dict[str, Any] = {"version": version, "batch_size": batch_size, "seed": seed, "drop_last": bool(drop_last)}
        old["on_error"] = _FAILURES[on_error]
        same = fingerprint({**content, "batch_size": batch_size, "drop_last": old["drop_last"]}) == was
        before, after = _named_before(digests, order, content)
        before |= {PART_NAMES.get(key, key): value for key, value in old.items()}
        after |= {PART_NAMES.get(key, key): content[key] for key in old}
        lines = part_differences(before, after) + _step_changes(steps, content["steps"])
        return StateChanges(tuple(lines), batch_size if same and batch_size > 0 else None)
    return StateChanges()


def _named_before(digests: str, order: int, content: Content) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parts that a sketch has digests of, as far as they differ: as they were, and are."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    for place, (key, code) in enumerate(_named_codes(content).items()):
        was = digests[2 * place : 2 * place + 2] or _ABSENT  # of a part that is newer
        name = "module of your functions" if key == "modules" else PART_NAMES.get(key, key)
        if was == code:
            continue
        if code != _ABSENT:
            after[name] = content[key] if key != "columns" else dict(content[key])
        if was != _ABSENT:
            before[name] = bool(order) if key == "shuffle" and order != OWN_ORDER else ANOTHER
    return before, after


def _step_changes(was: Sequence[str], steps: Sequence[Mapping[str, Any]]) -> list[str]:
    now = [_step_code(step) for step in steps]
    lines: list[str] = []
    if was and len(was[-1]) < _WHOLE:
        place = len(was) - 1
        if was[-1] != _code([step[:_WHOLE] for step in now[place:]], 2):
            lines.append(f"pipeline[{place}], or a step behind it, changed")
        was, now = was[:place], now[:place]
    pairs = SequenceMatcher(None, [code[:_WHOLE] for code in was], [code[:_WHOLE] for code in now], autojunk=False)
    for kind, first, end, at, until in pairs.get_opcodes():
        if kind == "equal":
            continue
        both = min(end - first, until - at)
        for old, place in zip(was[first : first + both], range(at, at + both), strict=True):
            lines += _option_changes(old, now[place], f"pipeline[{place}]", steps[place])
        lines += [f'pipeline[{place}], "{steps[place]["op"]}": it is new' for place in range(at + both, until)]
        lines += [f"pipeline[{at + both}]: a step was there that is gone"] * (end - first - both)
    return lines


def _option_changes(was: str, now: str, name: str, step: Mapping[str, Any]) -> list[str]:
    here = f'{name}, "{step["op"]}"'
    if was[:1] != now[:1]:
        return [f"{name}: another step became {shown({name: step}, name)}"]
    options = [option for option in sorted(step) if option != "op"]
    if len(was) != len(now):
        return [f"{here}: its options changed"]
    changed = [option for option, old, new in zip(options, was[_WHOLE:], now[_WHOLE:], strict=True) if old != new]
    return [f"{here}: {option} changed to {shown(step, option)}" for option in changed] or [
        f"{here}: its options changed"
    ]


def _named_codes(content: Content) -> dict[str, str]:
    return {key: _code(content[key], 2) if key in content else _ABSENT for key in DIGESTED}


def _step_code(step: Mapping[str, Any]) -> str:
    options = "".join(_code(step[option], 1) for option in sorted(step) if option != "op")
    return _code(step["op"], 1) + _code(step, 2) + options


def _order(content: Content) -> int:
    return int(content["shuffle"]) if isinstance(content["shuffle"], bool) else OWN_ORDER


def _code(value: object, characters: int) -> str:
    return urlsafe_b64encode(_digest(value)).decode()[:characters]


def _digest(value: object) -> bytes:
    return sha256(json.dumps(value, sort_keys=True).encode()).digest()


def card_differences(before: StreamCard, after: StreamCard) -> list[str]:
    """How a stream's batches become others, and then the keys that leave them the same."""
    old, new = (_stream_of(card) for card in (before, after))
    lines = part_differences(*({part.name: json.loads(part.value) for part in card.parts} for card in (before, after)))
    counted = {part.name.partition("[")[0] for card in (before, after) for part in card.parts}
    beside = [{key: value for key, value in keys.items() if key not in counted} for keys in (old, new)]
    return lines + [f"{option}: {change}" for option, change in _changes(*beside)]


def _stream_of(card: StreamCard) -> dict[str, object]:
    """The keys that the configuration sets for the stream."""
    stream: dict[str, object] = json.loads("".join(card.configuration))["streams"][card.stream]
    return stream


def part_differences(before: Facts, after: Facts) -> list[str]:
    """The parts of two fingerprints that differ, one line of text for each."""
    lines = []
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if name == "source":
            lines.append("source: other files, or other options of the source")
        elif name.startswith("module "):
            lines.append(f"{name}: the code of your function has changed")
        elif name == "content version":
            lines.append(f"content version {old} became {new}: this batchd makes other bytes of the same configuration")
        elif isinstance(old, dict) and isinstance(new, dict) and old.get("op") == new.get("op"):
            step = f"{name}, {json.dumps(old['op'])}" if "op" in old else name
            lines += [f"{step}: {option} {change}" for option, change in _changes(old, new)]
        else:
            lines.append(f"{name}: {shown(before, name)} became {shown(after, name)}")
    return lines


def _changes(old: Facts, new: Facts) -> list[tuple[str, str]]:
    """Each option that differs, and how; of views and of steps inside a step the option in it."""
    changes: list[tuple[str, str]] = []
    for option in [*old, *(option for option in new if option not in old)]:
        before, after = (_tables(facts.get(option)) for facts in (old, new))
        if before.keys() == after.keys() != set():
            changes += [
                (f"{option}{key}.{name}", text) for key in before for name, text in _inner(before[key], after[key])
            ]
        elif old.get(option) != new.get(option) or (option in old) != (option in new):
            changes.append((option, f"{shown(old, option)} became {shown(new, option)}"))
    return changes


def _inner(old: Facts, new: Facts) -> list[tuple[str, str]]:
    is_other = old.get("op") != new.get("op")
    return [("op", f"{shown(old, 'op')} became {shown(new, 'op')}")] if is_other else _changes(old, new)


def _tables(value: object) -> dict[str, Facts]:
    """The tables that a value consists of, each with its key; empty if it is no table or list."""
    if isinstance(value, dict):
        items = [(f".{name}", item) for name, item in value.items()]
    else:
        items = [(f"[{place}]", item) for place, item in enumerate(value)] if isinstance(value, list) else []
    return dict(items) if all(isinstance(item, dict) for _key, item in items) else {}


def shown(parts: Facts, name: str) -> str:
    """The value of a part for people: a step as its op, anything long cut; "nothing" if absent."""
    if name not in parts:
        return "nothing"
    value = parts[name]
    if isinstance(value, dict) and "op" in value:
        return json.dumps(value["op"])
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[: SHOWN_CHARACTERS_MAX - 1]}…"
