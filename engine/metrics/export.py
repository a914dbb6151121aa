"""Exports the figures of `RunMetrics` to Prometheus, in a separate registry, at each scrape.

It runs on the server's thread and never iterates over what the scheduler changes, but over copies. It exports exactly
the names of `names.py`, but those marked `run directory` or `Ray` only if the run has one.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from engine.events import CacheMeasured
from engine.metrics import names
from engine.metrics.collector import RunMetrics
from engine.metrics.counts import Histogram
from engine.metrics.health import ALL_CHECKS, run_findings
from engine.metrics.names import ADMISSION_LIMITS, METRICS, REPLICA_STATES, REQUESTS, Metric
from engine.metrics.status import draining_s, replicas_wanted, undisturbed
from engine.metrics.waits import unrewarded_groups
from engine.states.machine import Moves, Table, entered
from engine.states.process import KINDS, PROCESS, Process
from engine.states.replica import Replica

Samples = Iterable[tuple[tuple[str, ...], float]]
"""(label values in the order of `Metric.labels`, value)."""
Read = Callable[[], Samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalFigures:
    """Figures that the scheduler does not have, read at each scrape; None if the run does not have the source.

    The functions must not block.
    """

    now: Callable[[], float] | None = None
    """Seconds since the run began; by default the time of the newest event."""
    events_waiting: Callable[[], int] | None = None
    record: Callable[[], tuple[int, int]] | None = None
    """(bytes written, bytes that wait in memory) of the schedule record."""
    store: Callable[[], tuple[int, int, int]] | None = None
    """(groups, bytes, bytes on disk) of the trajectory store."""
    directory: Path | None = None
    """The run's directory, for the figures of its disk."""


class Exporter(Collector):
    """Creates the Prometheus metric families of one run."""

    def __init__(self, metrics: RunMetrics, around: ExternalFigures | None = None) -> None:
        self._metrics = metrics
        self._around = around or ExternalFigures()
        self._read = (
            self._of_the_scheduler()
            | self._of_progress()
            | self._of_replicas()
            | self._of_processes()
            | self._of_environment()
        )

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            if metric.kind == "histogram":
                yield self._histogram(metric)
            elif metric.name in self._read:
                yield self._plain(metric)

    def _plain(self, metric: Metric) -> Family:
        samples = undisturbed(lambda: list(self._read[metric.name]())) or []
        if metric.kind == "gauge":
            gauge = GaugeMetricFamily(metric.family, metric.help, labels=list(metric.labels))
            for labels, value in samples:
                gauge.add_metric(list(labels), value)
            return gauge
        counter = CounterMetricFamily(metric.family, metric.help, labels=list(metric.labels))
        failed = self._metrics.failed_group if metric is names.RETRIES else {}
        for labels, value in samples:
            group = failed.get(labels[0]) if failed else None
            example = None if group is None else Exemplar({"group": str(group)}, 1.0)
            counter.add_metric(list(labels), value, exemplar=example)
        return counter

    def _histogram(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(metric.family, metric.help, labels=list(metric.labels))
        for labels, histogram in self._histograms(metric):
            counts, total = histogram.read()
            buckets: list[tuple[Any, ...]] = []
            for place, bound in enumerate((*map(repr, histogram.bounds), "+Inf")):
                example = histogram.examples.get(place)
                exemplar = [] if example is None else [Exemplar({"group": str(example[1])}, example[0])]
                buckets.append((bound, float(counts[place]), *exemplar))
            family.add_metric(list(labels), buckets=buckets, sum_value=total)
        return family

    def _histograms(self, metric: Metric) -> Iterable[tuple[tuple[str, ...], Histogram]]:
        m = self._metrics
        alone = {
            names.STALENESS.name: m.trained.staleness,
            names.RESPONSE_TOKENS.name: m.generated.response_tokens,
            names.GROUP_SECONDS.name: m.generated.seconds,
            names.DECISION_SECONDS.name: m.decision_s,
            names.VALIDATION_SECONDS.name: m.validation_s,
        }
        if metric.name in alone:
            return [((), alone[metric.name])]
        labelled = {
            names.SYNC_SECONDS.name: m.replicas.sync_s,
            names.STEP_SECONDS.name: m.phase_s,
            names.REWARD_HISTOGRAM.name: m.reward_counts,
        }
        return [((label,), histogram) for label, histogram in list(labelled[metric.name].items())]

    # the functions that read each metric, by its name

    def _of_the_scheduler(self) -> dict[str, Read]:
        m, state, idle = self._metrics, self._metrics.state, self._metrics.idle
        return {
            names.GROUPS.name: lambda: _labelled(m.groups.by_state()),
            names.GROUPS_ENDED.name: lambda: _entered(state.moves, names.GROUP),
            names.GROUPS_RUNNING.name: lambda: _one(state.groups.ledger.running),
            names.CAPACITY.name: lambda: _labelled(dict(zip(("workers", "staleness"), idle.capacity, strict=True))),
            names.ADMISSION_LIMIT.name: lambda: _one_hot(ADMISSION_LIMITS, idle.admission_limit),
            names.MAX_STALENESS.name: lambda: _one(state.limits.max_staleness_steps),
            names.MAX_GROUPS.name: lambda: _one(state.limits.max_concurrent_groups),
            names.BATCH_SIZE.name: lambda: _one(state.limits.train_batch_size),
            names.SLOTS.name: lambda: _labelled(idle.split),
            names.STEP_STALENESS.name: lambda: _labelled(_spread(m.trained.newest)),
            names.DEADLINE_ROOM.name: self._deadline_room,
            names.OLDEST_GROUP_AGE.name: self._oldest_group_age,
            names.STEPS.name: lambda: _one(state.training.steps_trained),
            names.STEP_AGE.name: lambda: _one(max(0.0, self._now() - m.finished_at)),
            names.TOKENS_GENERATED.name: lambda: _one(m.generated.tokens),
            names.TOKENS_TRAINED.name: lambda: _one(m.trained.tokens),
            names.TRANSITIONS.name: lambda: list(state.moves.items()),
            names.WEIGHTS_VERSION.name: lambda: _one(state.training.latest_version),
            names.ROLLOUT_BUSY.name: lambda: _one(idle.sums.busy_s),
            names.ROLLOUT_IDLE.name: lambda: _labelled(idle.sums.idle_s),
            names.TRAINER_BUSY.name: lambda: _labelled(idle.sums.trainer_busy_s),
            names.TRAINER_IDLE.name: lambda: _labelled(idle.sums.trainer_idle_s),
            names.TRAINER_FIGURE.name: lambda: _labelled(m.figures),
            names.HEALTH_FINDING.name: self._health,
            names.SOURCE_REWARD.name: lambda: _by_source(m.sources, "reward_mean"),
            names.SOURCE_SHARE.name: lambda: _by_source(m.sources, "share"),
            **{
                metric.name: partial(self._of_sources, figure)
                for metric, figure in (
                    (names.SOURCE_DRAWN, "drawn"),
                    (names.SOURCE_DROPPED, "dropped"),
                    (names.SOURCE_RESTED, "rested"),
                )
            },
            names.RETRIES.name: lambda: _labelled(m.retries),
            names.BUDGET.name: lambda: _labelled(
                {"infrastructure": state.limits.infrastructure_attempts, "data": state.limits.data_attempts}
            ),
            names.STALE_ECHOES.name: lambda: _one(state.orders.facts.stale_echoes),
            names.EVENTS.name: lambda: _labelled(m.events),
            names.REWARD.name: lambda: [((), value) for value in m.rewards[-1:] if value is not None],
            names.ACCURACY.name: lambda: [((), value) for _, value, _ in m.accuracies[-1:]],
            names.VALIDATION_FIGURE.name: lambda: list(m.set_figures()),
            names.FAILED_SHARE.name: lambda: [((), share) for *_, share in m.accuracies[-1:]],
            names.ACCURACY_STEPS.name: lambda: [((), steps) for steps, *_ in m.accuracies[-1:]],
            names.VALIDATION_VERSION.name: lambda: [((), row["version"]) for row in m.reported()[-1:]],
            names.VALIDATIONS.name: lambda: _labelled(m.validations_by_state()),
            names.VALIDATIONS_ENDED.name: lambda: _entered(state.moves, names.VALIDATION),
            names.VALIDATION_ROWS.name: lambda: _one(m.rows_measured),
            names.UPTIME.name: lambda: _one(self._now()),
        }

    def _of_progress(self) -> dict[str, Read]:
        m, state = self._metrics, self._metrics.state
        return {
            names.SILENCE.name: lambda: _one(max(0.0, self._now() - m.at)),
            names.RECOVERIES.name: lambda: _labelled(state.recoveries),
            names.REQUESTS_TAKEN.name: lambda: [((label,), m.requests(kind)) for kind, label in REQUESTS.items()],
            names.DRAINING.name: lambda: _one(draining_s(state, self._now())),
            names.PARKED.name: lambda: _labelled(m.parked),
            names.REPLICAS_WANTED.name: lambda: _one(replicas_wanted(state)),
            names.BATCHES_KEPT.name: lambda: _one(len(state.checkpoints.stored_batches)),
            names.CHECKPOINT_AGE.name: lambda: _one(max(0.0, self._now() - m.checkpoint_at)),
            names.CHECKPOINT_STEPS.name: lambda: _one(state.checkpoints.newest),
            names.CHECKPOINT_EVERY.name: lambda: _one(state.limits.checkpoint_every),
        }

    def _of_replicas(self) -> dict[str, Read]:
        states, state, counts = REPLICA_STATES, self._metrics.state, self._metrics.replicas

        def each(figure: Callable[[Replica], float]) -> Read:
            """Reads a figure of each replica that is up."""
            return lambda: [((str(r.id),), figure(r)) for r in self._alive()]

        def slots() -> Samples:
            for r in self._alive():
                held = state.replicas.occupied(r)
                yield from [((str(r.id), "held"), held), ((str(r.id), "free"), max(0, r.slots - held))]

        def caches() -> Samples:
            return each(lambda r: r.cache_used)() if self._metrics.events[CacheMeasured.__name__] else []

        def slow() -> Samples:
            found = {replica.id for replica in state.replicas.slow(state.limits.straggler_factor)}
            return each(lambda r: r.id in found)()

        def known() -> list[Replica]:
            return [r for r in ever() if not r.process.dismissed]

        def ever() -> list[Replica]:
            """All replicas, lost ones included."""
            return list(state.replicas.by_id.values())

        def group_ends() -> Samples:
            for r in ever():
                ends = {"generated": r.generated, "aborted": r.aborted, "failed": r.failed}
                yield from [((str(r.id), end), count) for end, count in ends.items()]

        def by_state() -> Samples:
            now = [r.condition for r in known()]
            return [((state,), now.count(state)) for state in states]

        return {
            names.REPLICAS.name: by_state,
            names.REPLICA_WEIGHTS_VERSION.name: each(lambda r: r.version),
            names.REPLICA_STATE.name: lambda: [
                ((str(r.id), state), r.condition == state) for r in known() for state in states
            ],
            names.REPLICA_SLOW.name: slow,
            names.REPLICA_SLOTS.name: slots,
            names.REPLICA_LIMIT.name: each(lambda r: r.limit),
            names.REPLICA_CACHE.name: caches,
            names.REPLICA_TOKENS.name: lambda: [((str(r.id),), r.tokens) for r in ever()],
            names.REPLICA_RESUMED.name: lambda: [((str(r.id),), counts.resumed[r.id]) for r in ever()],
            names.REPLICA_GROUPS.name: group_ends,
            names.REPLICA_PAUSE.name: lambda: [
                ((str(r.id), mode), pauses.get(r.id, 0.0)) for r in ever() for mode, pauses in counts.pause_s.items()
            ],
        }

    def _of_processes(self) -> dict[str, Read]:
        metrics = self._metrics

        def processes() -> list[Process]:
            state = metrics.state
            replicas = [r.process for r in list(state.replicas.by_id.values()) if not r.process.dismissed]
            return [*replicas, *list(state.processes.values())]

        def waiting() -> Samples:
            now = dict.fromkeys(metrics.calls, 0)
            for process in processes():
                for name, calls in process.calls.items():
                    now[name] = now.get(name, 0) + calls.groups
            return _labelled(now)

        def by_state() -> Samples:
            now = Counter((process.kind, process.state) for process in processes())
            return [((kind, state), now[kind, state]) for kind in KINDS for state in PROCESS.states]

        return {
            names.PROCESSES.name: by_state,
            names.FUNCTION_CALLS.name: lambda: [((name,), one.calls) for name, one in list(metrics.calls.items())],
            names.FUNCTION_SECONDS.name: lambda: [((name,), one.seconds) for name, one in list(metrics.calls.items())],
            names.FUNCTION_GROUPS.name: waiting,
            names.UNREWARDED.name: lambda: _one(unrewarded_groups(metrics.state)),
            names.PROCESS_DEATHS.name: lambda: _labelled(metrics.deaths),
        }

    def _alive(self) -> list[Replica]:
        return [r for r in list(self._metrics.state.replicas.by_id.values()) if r.state != "down"]

    def _health(self) -> Samples:
        m, state = self._metrics, self._metrics.state
        versions = {r.id: r.version for r in self._alive()}
        newest, staleness = state.training.latest_version, state.limits.max_staleness_steps
        found = run_findings([*m.steps.recent], versions, newest, staleness, [*m.steps.first], m.reported()[-1:])
        return [((check,), any(one.check == check for one in found)) for check in ALL_CHECKS]

    def _of_sources(self, figure: str) -> Samples:
        mixed = self._metrics.mixed
        return [] if mixed is None else _by_source(mixed.figures(), figure)

    def _of_environment(self) -> dict[str, Read]:
        around, read = self._around, dict[str, Read]()
        if around.events_waiting is not None:
            waiting = around.events_waiting
            read[names.EVENTS_WAITING.name] = lambda: _one(waiting())
        if around.store is not None:
            store = around.store
            read[names.STORE_GROUPS.name] = lambda: _one(store()[0])
            read[names.STORE_BYTES.name] = lambda: _one(store()[1])
            read[names.STORE_DISK_BYTES.name] = lambda: _one(store()[2])
        if around.record is not None:
            record = around.record
            read[names.RECORD_BYTES.name] = lambda: _one(record()[0])
            read[names.RECORD_LAG.name] = lambda: _one(record()[1])
        if around.directory is not None:
            directory = around.directory
            read[names.DISK_FREE.name] = lambda: _disk(directory, "free")
            read[names.DISK_SIZE.name] = lambda: _disk(directory, "total")
        return read

    def _now(self) -> float:
        return self._metrics.at if self._around.now is None else self._around.now()

    def _deadline_room(self) -> Samples:
        state = self._metrics.state
        return [
            ((), max(0, deadline - state.training.steps_batched))
            for deadline in list(state.groups.deadlines.by_deadline())[:1]
        ]

    def _oldest_group_age(self) -> Samples:
        started_at = self._metrics.groups.oldest_started_at()
        return _one(0.0 if started_at is None else max(0.0, self._now() - started_at))


def registry(metrics: RunMetrics, around: ExternalFigures | None = None) -> CollectorRegistry:
    """A registry that exports one run and nothing else."""
    own = CollectorRegistry(auto_describe=False)
    own.register(Exporter(metrics, around))
    return own


def _entered(moves: Moves, table: Table) -> Samples:
    """How many records reached each final state."""
    return [((state,), entered(moves, table.name, state)) for state in table.terminal]


def _one(value: float) -> Samples:
    return [((), value)]


def _one_hot(values: tuple[str, ...], now: str) -> Samples:
    return [((value,), value == now) for value in values]


def _by_source(sources: Mapping[str, Mapping[str, float]], figure: str) -> Samples:
    return [((name,), figures[figure]) for name, figures in list(sources.items()) if figure in figures]


def _labelled(values: Mapping[str, float]) -> Samples:
    return [((label,), value) for label, value in list(values.items())]


def _spread(values: tuple[int, ...]) -> dict[str, float]:
    if not values:
        return {}
    return {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}


def _disk(directory: Path, figure: str) -> Samples:
    try:
        return _one(getattr(shutil.disk_usage(directory), figure))
    except OSError:
        return []
