"""The table of metrics and an answer of the daemon, as Prometheus reads them. OBSERVER process.

Collectors of our own over the status; the library's default ones, about processes and its own
multiprocess mode, have nothing to say here. Invariant: each scrape asks the daemon anew, so at the
end of a run the numbers are exact; and an answer, of which there are ten a second at most, is
written down once, however many ask.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from time import monotonic

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from batchd.observer import metrics
from batchd.observer.inquiry import Answer, Inquiry
from batchd_wire.status import DaemonStatus

SCRAPE_S = 0.5
"""How long a scrape waits for a new answer before it takes the last one."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exposition:
    """Gives the text. Use from any thread."""

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self._lock = Lock()
        self._written: tuple[Answer, bytes] | None = None

    def text(self) -> bytes:
        """Ask, and write down everything; without an answer only what is known of the observer itself."""
        answer = self._inquiry.fresh(SCRAPE_S)
        if answer is None:
            return _written(_Own({"up": 0.0}))
        own = {"up": float(self._inquiry.is_answered), "status_age_seconds": monotonic() - answer.came_s}
        return _written(_Own(own)) + self._of(answer)

    def _of(self, answer: Answer) -> bytes:
        """What an answer says, written once however many ask for it."""
        with self._lock:
            if self._written is None or self._written[0] is not answer:
                self._written = answer, _written(_Table(answer.status))
            return self._written[1]


@dataclass(frozen=True, slots=True, eq=False)
class _Own(Collector):
    """The observer's own metrics that there are."""

    values: dict[str, float]

    def collect(self) -> Iterator[Metric]:
        for name, meaning in metrics.OWN:
            if name in self.values:
                yield GaugeMetricFamily(metrics.PREFIX + name, meaning, value=self.values[name])


@dataclass(frozen=True, slots=True, eq=False)
class _Table(Collector):
    """Everything in the table, from one status."""

    status: DaemonStatus

    def collect(self) -> Iterator[Metric]:
        for metric in metrics.METRICS:
            kind = CounterMetricFamily if metric.kind == metrics.COUNTER else GaugeMetricFamily
            family = kind(metrics.PREFIX + metric.name, metric.help, labels=metric.scope.labels)
            for labels, value in metric.values(self.status):
                family.add_metric(labels, value)
            yield family


def _written(collector: Collector) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
