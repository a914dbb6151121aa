"""From `RunMetrics` to Prometheus: families made when scraped, in a registry of their own.

The exporter reads counters and sizes only, so that a scrape from the server's thread never walks a record that the
scheduler is changing. It exports exactly the names of `names.py`.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from engine.metrics import names
from engine.metrics.collector import RunMetrics
from engine.metrics.histogram import Histogram
from engine.metrics.names import METRICS, Metric

Samples = Iterable[tuple[tuple[str, ...], float]]
"""(label values in the order of `Metric.labels`, value)."""


class Exporter(Collector):
    """Turns the figures of one run into families.

    `now`: seconds since the run began; the newest event's time if not given.
    """

    def __init__(self, metrics: RunMetrics, now: Callable[[], float] | None = None) -> None:
        self._metrics = metrics
        self._now = now

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            if metric.kind == "histogram":
                yield self._histogram(metric)
            else:
                yield self._plain(metric)

    def _plain(self, metric: Metric) -> Family:
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.family, metric.help, labels=list(metric.labels))
        for labels, value in self._samples(metric):
            family.add_metric(list(labels), value)
        return family

    def _histogram(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(metric.family, metric.help, labels=list(metric.labels))
        for labels, histogram in self._histograms(metric):
            family.add_metric(list(labels), buckets=histogram.cumulative(), sum_value=histogram.total)
        return family

    def _histograms(self, metric: Metric) -> Iterable[tuple[tuple[str, ...], Histogram]]:
        if metric is names.STALENESS:
            return [((), self._metrics.staleness)]
        if metric is names.VALIDATION_SECONDS:
            return [((), self._metrics.validation_s)]
        return [((mode,), histogram) for mode, histogram in self._metrics.sync_s.items()]

    def _samples(self, metric: Metric) -> Samples:
        m, state = self._metrics, self._metrics.state
        replicas = list(state.fleet.replicas.values())
        reward, accuracy = m.rewards[-1:], m.accuracies[-1:]
        workers, staleness = m.idle.capacity
        slots = {
            "busy": m.idle.busy,
            "frozen": m.idle.frozen,
            "free": max(0, m.idle.slots - m.idle.busy - m.idle.frozen),
        }
        read: dict[str, Callable[[], Samples]] = {
            names.GROUPS.name: lambda: _labelled(m.groups_by_state()),
            names.GROUPS_ENDED.name: lambda: [((s,), m.transitions.entered("group", s)) for s in names.GROUP.terminal],
            names.GROUPS_RUNNING.name: lambda: [((), state.ledger.running)],
            names.CAPACITY.name: lambda: [(("workers",), workers), (("staleness",), staleness)],
            names.SLOTS.name: lambda: _labelled(slots),
            names.STEPS.name: lambda: [((), state.steps_trained)],
            names.TOKENS_GENERATED.name: lambda: [((), m.tokens_generated)],
            names.TOKENS_TRAINED.name: lambda: [((), m.tokens_trained)],
            names.TRANSITIONS.name: lambda: list(m.transitions.count.items()),
            names.REPLICAS.name: lambda: [((s,), sum(r.state == s for r in replicas)) for s in names.REPLICA.states],
            names.WEIGHTS_VERSION.name: lambda: [((), state.latest_version)],
            names.REPLICA_WEIGHTS_VERSION.name: lambda: [
                ((str(r.id),), r.version) for r in replicas if r.state != "lost"
            ],
            names.ROLLOUT_BUSY.name: lambda: [((), m.idle.rollout_busy_s)],
            names.ROLLOUT_IDLE.name: lambda: _labelled(m.idle.rollout_idle_s),
            names.TRAINER_BUSY.name: lambda: _labelled(m.idle.trainer_busy_s),
            names.TRAINER_IDLE.name: lambda: _labelled(m.idle.trainer_idle_s),
            names.RETRIES.name: lambda: _labelled(m.retries),
            names.STALE_ECHOES.name: lambda: [((), state.stale_echoes)],
            names.EVENTS.name: lambda: _labelled(m.events),
            names.REWARD.name: lambda: [((), value) for value in reward if value is not None],
            names.ACCURACY.name: lambda: [((), value) for _, value in accuracy],
            names.VALIDATION_VERSION.name: lambda: [((), row["version"]) for row in m.reported()[-1:]],
            names.VALIDATIONS.name: lambda: _labelled(m.validations_by_state()),
            names.VALIDATIONS_ENDED.name: lambda: [
                ((s,), m.transitions.entered("validation", s)) for s in names.VALIDATION.terminal
            ],
            names.VALIDATION_ROWS.name: lambda: [((), m.rows_measured)],
            names.UPTIME.name: lambda: [((), m.at if self._now is None else self._now())],
        }
        return read[metric.name]()


def registry(metrics: RunMetrics, now: Callable[[], float] | None = None) -> CollectorRegistry:
    """A registry of its own that exports one run and nothing else."""
    own = CollectorRegistry(auto_describe=False)
    own.register(Exporter(metrics, now))
    return own


def _labelled(values: dict[str, int] | dict[str, float]) -> Samples:
    return [((label,), value) for label, value in list(values.items())]
