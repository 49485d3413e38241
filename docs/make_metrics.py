"""Writes docs/metrics.md to standard output, from the fields of the status: ``make docs``.

The words on top are ``docs/metrics_head.md``. Invariant: every metric that is exposed is on the
page, and nothing else.
"""

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from batchd.cli.config import wrap_prose
from batchd.observe.http.metrics import LINKS_MAX, METRICS, OTHER, OWN, PREFIX, REPORTED, REPORTS, TRAINERS_MAX, Metric

HEAD = Path(__file__).with_name("metrics_head.md")
TABLE = ("| metric | type | meaning | in the status |", "|---|---|---|---|")


def metrics_markdown() -> str:
    """The page ``docs/metrics.md``."""
    return wrap_prose("\n".join([HEAD.read_text(), *_reference()]).rstrip() + "\n")


def _reference() -> Iterator[str]:
    yield "## All metrics\n"
    yield "Totals count from the daemon's start, and what has a `worker` or `trainer` in its labels from that one's start."
    yield "`session` tells trainers of one name apart: the number that `batchd status` has, new each time that one connects. The"
    yield f"{TRAINERS_MAX} trainers that came first have labels of their own; all others of a stream are counted together as"
    yield f'`trainer="{OTHER}"`, in gauges alone: a counter of those who come and go would fall. The stream\'s have them all.'
    yield f"The same holds for worker hosts: {LINKS_MAX} of them have a `name` and a `link` of their own. `link` is new each time"
    yield "that a worker host connects. Without `worker_address` there are no metrics of worker hosts.\n"
    yield "### Of the observer\n"
    yield from TABLE
    for name, meaning in OWN:
        yield f"| `{PREFIX}{name}` | gauge | {meaning} | |"
    yield ""
    for scope, metrics in groupby(METRICS, key=lambda metric: (metric.scope.where, metric.scope.labels)):
        where, labels = scope
        yield f"### `{where}`" + (f" by {', '.join(f'`{label}`' for label in labels)}" if labels else "") + "\n"
        yield from TABLE
        yield from map(_row, metrics)
        if where == REPORTS.where:
            yield f"| `{PREFIX}{REPORTED[0]}` | histogram | {REPORTED[1]} | `buckets` |"
        yield ""


def _row(metric: Metric) -> str:
    kind = "counter" if metric.is_counter else "gauge"
    return f"| `{PREFIX}{metric.name}` | {kind} | {metric.kind.help} | `{metric.key}` |"


if __name__ == "__main__":
    sys.stdout.write(metrics_markdown())
