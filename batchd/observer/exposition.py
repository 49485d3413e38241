"""The table of metrics and an answer of the daemon, as Prometheus reads them. OBSERVER process.

One collector of our own over the status; the library's default ones, about processes and its own multiprocess mode, have
nothing to say here. Invariant: each scrape asks the daemon anew, so at the end of a run the numbers are exact.
"""

from collections.abc import Iterator
from time import monotonic

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from batchd.observer import metrics
from batchd.observer.inquiry import Inquiry

SCRAPE_S = 0.5
"""How long a scrape waits for a new answer before it takes the last one."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusCollector(Collector):
    """Everything in the table, from one answer."""

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry

    def collect(self) -> Iterator[Metric]:
        """Ask, and give a family for each metric; without an answer only those of the observer."""
        answer = self._inquiry.fresh(SCRAPE_S)
        own = {"up": float(answer is not None and self._inquiry.is_answered)}
        if answer is not None:
            own["status_age_seconds"] = monotonic() - answer.came_s
        for name, meaning in metrics.OWN:
            if name in own:
                yield GaugeMetricFamily(metrics.PREFIX + name, meaning, value=own[name])
        for metric in metrics.METRICS if answer is not None else ():
            kind = CounterMetricFamily if metric.kind == metrics.COUNTER else GaugeMetricFamily
            family = kind(metrics.PREFIX + metric.name, metric.help, labels=metric.scope.labels)
            for labels, value in metric.values(answer.status if answer is not None else {}):
                family.add_metric(labels, value)
            yield family


class Exposition:
    """Gives the text. Use from any thread."""

    def __init__(self, inquiry: Inquiry) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(StatusCollector(inquiry))

    def text(self) -> bytes:
        """All metrics as they are now."""
        return generate_latest(self._registry)
