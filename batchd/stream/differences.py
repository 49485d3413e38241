"""Says how two streams differ: by the parts of their fingerprints, and by the keys beside these."""

import json

from batchd.core.plan import Facts
from batchd_wire.status import StreamCard

SHOWN_CHARACTERS_MAX = 60


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
