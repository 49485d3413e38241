"""Writes docs/logs.md to standard output, from the manual of the log's events: ``make docs``.

The words on top are ``docs/logs_head.md``.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from batchd.cli.config import wrap_prose
from batchd.cli.log_events import EVENTS

HEAD = Path(__file__).with_name("logs_head.md")
INTRODUCTIONS = {
    "Worker hosts": "A gateway also has those [above](#trainers-on-other-hosts) about connections and keys.",
    "`batchd worker`": "It also has those about workers and caches above.",
    "`batchd ray`": "[ray.md](ray.md#when-something-fails) says what follows from each event.",
}


def logs_markdown() -> str:
    """The page ``docs/logs.md``."""
    return wrap_prose("\n".join([HEAD.read_text(), *_reference()]).rstrip() + "\n")


def _reference() -> Iterator[str]:
    yield "## Every event\n"
    yield "The text in the first column is `event` in JSON; the field `reason` has the cause.\n"
    for part, events in EVENTS.items():
        yield f"### {part}\n"
        if part in INTRODUCTIONS:
            yield f"{INTRODUCTIONS[part]}\n"
        yield "| event | level | what it means | what to do |"
        yield "|---|---|---|---|"
        for name, event in events.items():
            yield f"| `{name}` | {event.level} | {event.meaning} | {event.remedy} |".replace("|  |", "| |")
        yield ""


if __name__ == "__main__":
    sys.stdout.write(logs_markdown())
