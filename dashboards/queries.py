"""PromQL from the names of `engine/metrics/names.py`, so that no board can ask for a name that does not exist.

Used by the boards. Every query is of one run, `$run`, and averages over `$window`.
"""

from engine.metrics.names import Metric

WINDOW = "$window"
RUN = "$run"
REPLICA = "$replica"


def of(metric: Metric, suffix: str = "", **labels: str) -> str:
    """The series of a metric in the chosen run; a label value with a regular expression begins with `~`.

    Raises: ValueError for a label, or a value of a closed set, that the metric does not have.
    """
    filters = {"run": RUN, **{("from" if name == "source" else name): value for name, value in labels.items()}}
    for name, value in filters.items():
        known = metric.labels.get(name)
        if name != "run" and known is None:
            raise ValueError(f"{metric.name} has no label {name!r}")
        if known and not value.startswith("~") and value not in known:
            raise ValueError(f"{metric.name} never has {name}={value!r}")
    if "replica" in metric.labels and "replica" not in filters:
        filters["replica"] = f"~{REPLICA}"
    parts = [f'{k}=~"{v[1:]}"' if v.startswith("~") else f'{k}="{v}"' for k, v in filters.items()]
    return f"{metric.name}{suffix}{{{', '.join(parts)}}}"


def rate(metric: Metric, suffix: str = "", by: str = "", **labels: str) -> str:
    """The growth of a counter per second, summed over all labels except those in `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate({of(metric, suffix, **labels)}[{WINDOW}]))"


def mean(metric: Metric, by: str = "", **labels: str) -> str:
    """The mean of a histogram's newest values."""
    return f"{rate(metric, '_sum', by, **labels)} / {rate(metric, '_count', by, **labels)}"


def buckets(metric: Metric, **labels: str) -> str:
    """The newest values of a histogram, by bucket."""
    return f"sum by (le) (increase({of(metric, '_bucket', **labels)}[{WINDOW}]))"


def quantile(share: float, metric: Metric, by: str = "", **labels: str) -> str:
    """A quantile of a histogram's newest values, as exact as its buckets."""
    labels_left = "le" + (f", {by}" if by else "")
    return f"histogram_quantile({share}, {rate(metric, '_bucket', labels_left, **labels)})"


def idle_share(busy: Metric, idle: Metric) -> str:
    """Idle time as a share of all time."""
    return f"{rate(idle)} / ({rate(idle)} + {rate(busy)})"


def share_by_cause(busy: Metric, idle: Metric) -> str:
    """Idle time by cause, as a share of all time."""
    return f"{rate(idle, by='cause')} / scalar({rate(idle)} + {rate(busy)})"


def coded(metric: Metric, label: str, by: str = "") -> str:
    """The number, counted from 1, of the value of `label` whose series is 1; `panels.timeline` shows its name."""
    parts = (f"{of(metric, **{label: value})} * {code}" for code, value in enumerate(metric.labels[label], start=1))
    return f"sum{f' by ({by})' if by else ''} ({' or '.join(parts)})"


def whole_quantile(share: float, metric: Metric, most: Metric) -> str:
    """A quantile of a histogram of whole numbers up to `most`, rounded up, so that it is a whole number, too."""
    return f"clamp_max(ceil({quantile(share, metric)}), scalar({of(most)}))"
