"""The report of a run: one HTML file with its timeline, curves, idle time, samples and configuration. It needs no
network, and nothing of the run is markup in it.

Called by `engine report`. Slices and arrows are columns of numbers, compressed; the page unpacks and draws them on a
canvas. Texts of the run, such as responses, reach the page only through `_as_html` or `_as_script`.
"""

import base64
import gzip
import html
import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

import yaml

from engine.errors import visible
from engine.errors.redaction import without_secrets
from engine.inspect.timeline import Timeline
from engine.metrics.health import failed_responses
from engine.metrics.history import FATES, History
from engine.metrics.journal import FAILED_SHARE, plain
from engine.reward_histogram import HISTOGRAMS, REWARD
from engine.version import __version__

PAGE = files("engine.inspect") / "report_page"
BINS = 1500
"""Maximum number of columns of the picture of idle time."""
MISSING = -(1 << 31)
"""A whole number or a text that a slice does not have."""
CURVES = {
    "reward": ("reward_mean", "accuracy"),
    "loss": ("loss",),
    "response tokens": ("tokens_per_group",),
    "staleness": ("staleness_min", "staleness_mean", "staleness_max"),
    "seconds": ("collecting", "scoring", "training", "publishing"),
}
"""The curves of each plot; those without a value are left out."""


def report_html(
    timeline: Timeline,
    rows: Sequence[Mapping[str, Any]] = (),
    samples: Sequence[Mapping[str, Any]] = (),
    advice: Sequence[str] = (),
) -> str:
    """The page. `rows`: those of `metrics.jsonl`, instead of what the record alone says about train steps. `samples`:
    responses, with the columns of `storage.samples.SampleRow`. `advice`: what to change, most useful first."""
    history = timeline.history
    meta, data = _packed(timeline)
    meta |= {
        "idle": _idle_bins(history), "curves": _curves(history, rows), "run": history.run, "end": history.end,
    }  # fmt: skip
    parts = {
        "TITLE": _as_html(history.run), "SUMMARY": _summary(history), "ADVICE": _advice(advice),
        "SHARES": _shares(history), "SAMPLES": _samples(samples), "CONFIG": _config(history),
        "VERSIONS": _versions(history), "META": _as_script(meta), "DATA": data,
        "CSS": _asset("uPlot.min.css") + _asset("page.css"), "UPLOT": _asset("uPlot.iife.min.js"),
        "SCRIPT": _asset("page.js"), "LICENSE": _as_html(_asset("uPlot.LICENSE")),
    }  # fmt: skip
    page = _asset("page.html")
    pieces = page.split("@@")  # text, name, text, ...: nothing that is put in is looked at again
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _as_html(text: str) -> str:
    """Text without markup, and with control characters, such as those that turn its direction, as escapes."""
    return html.escape(visible(text))


def _as_script(value: Any) -> str:
    """JSON that cannot end the script element that it is in, with texts as in `_as_html`."""
    text = json.dumps(_with_visible_texts(plain(value)), ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _with_visible_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {visible(name): _with_visible_texts(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_visible_texts(inner) for inner in value]
    return visible(value) if isinstance(value, str) else value


# -- the timeline ------------------------------------------------------------------------------------------------------


def _packed(timeline: Timeline) -> tuple[dict[str, Any], str]:
    """(description, columns) of the slices, ordered by track and then by time."""
    order = sorted(range(len(timeline.slices)), key=lambda place: timeline.slices[place].track)  # stable
    place_of = {old: new for new, old in enumerate(order)}
    slices = [timeline.slices[place] for place in order]
    columns = _Columns(len(slices))
    for place, slice in enumerate(slices):
        columns.put("start", place, float(slice.start))
        columns.put("end", place, float(slice.end))
        columns.put("kind", place, slice.kind)
        columns.put("title", place, timeline.title(slice))
        for name, detail in timeline.details(slice).items():
            columns.put(name, place, detail)
    ends = array("i", [place_of[end] for arrow in timeline.arrows for end in arrow])
    counts = [0] * len(timeline.tracks)
    for slice in slices:
        counts[slice.track] += 1
    tracks = [[track.process, track.name, count] for track, count in zip(timeline.tracks, counts, strict=True)]
    described, data = columns.packed({"arrows": ends})
    return {"tracks": tracks, **described}, data


class _Columns:
    """Columns of float64, int32 and texts, which are int32 places in one table of texts."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._numbers: dict[str, array[float]] = {}
        self._whole: dict[str, array[int]] = {}
        self._texts: dict[str, array[int]] = {}
        self._table: dict[str, int] = {}

    def put(self, name: str, place: int, value: Any) -> None:
        if isinstance(value, float):
            self._of(self._numbers, name, "d", math.nan)[place] = value
        elif isinstance(value, str):
            self._of(self._texts, name, "i", MISSING)[place] = self._table.setdefault(value, len(self._table))
        else:
            self._of(self._whole, name, "i", MISSING)[place] = int(value)

    def _of(self, columns: dict[str, Any], name: str, code: str, empty: float) -> Any:
        if name not in columns:
            columns[name] = array(code, [empty]) * self._count
        return columns[name]

    def packed(self, others: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """(where each column is, all columns as gzip in base64). Those with eight bytes each come first."""
        listed: list[tuple[str, Mapping[str, Any]]]
        listed = [("float64", self._numbers), ("int32", self._whole), ("text", self._texts), ("int32", others)]
        places, parts, offset = [], [], 0
        for kind, columns in listed:
            for name, column in columns.items():
                places.append([name, kind, offset, len(column)])
                parts.append(column.tobytes())
                offset += len(parts[-1])
        data = base64.b64encode(gzip.compress(b"".join(parts), 6, mtime=0)).decode()
        return {"columns": places, "texts": list(self._table)}, data


def _idle_bins(history: History) -> dict[str, Any]:
    """Slots by what they do, in equal bins of time: `busy`, then the causes of idleness."""
    if not history.idle or history.end <= 0:
        return {"seconds": 0, "names": [], "slots": []}
    count = min(BINS, max(1, 4 * len(history.idle)))
    size = history.end / count
    names = ["busy", *history.idle_s]
    slots = [[0.0] * count for _ in names]
    for span in history.idle:
        known = {"busy": span.busy_s, **dict(span.idle_s)}
        first, last = int(span.start / size), min(count - 1, int(span.end / size))
        for bin in range(min(first, count - 1), last + 1):
            part = min(span.end, (bin + 1) * size) - max(span.start, bin * size)
            for name, seconds in known.items():
                slots[names.index(name)][bin] += seconds * part / (span.end - span.start) / size
    return {"seconds": size, "names": names, "slots": [[round(value, 3) for value in row] for row in slots]}


# -- curves ------------------------------------------------------------------------------------------------------------


def _curves(history: History, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of each curve, by step, and those of validations."""
    steps = [row for row in (rows or history.rows) if "step" in row]
    figures = []
    for row in steps:
        own = dict(row) | dict(row.get("seconds", {}))
        if row.get("groups"):
            own["tokens_per_group"] = row.get("tokens", 0) / row["groups"]
        figures.append(own)
    plots = []
    for title, names in CURVES.items():
        kept = [name for name in names if any(isinstance(own.get(name), int | float) for own in figures)]
        if kept:
            plots.append({"title": title, "names": kept, "values": [[own.get(n) for own in figures] for n in kept]})
    by_step = [row.get(HISTOGRAMS) or {} for row in steps]
    histograms = {
        name: {
            "buckets": [own.get(name, []) for own in by_step],
            "mean": [row.get("reward_mean" if name == REWARD else name) for row in steps],
        }
        for name in sorted(set().union(*by_step))
    }
    found = [row for row in history.validations if row.get("outcome") == "reported"]
    return {
        "step": [row["step"] for row in steps], "wall": [row.get("elapsed_s") for row in steps], "plots": plots,
        "validations": [[row["steps"], row["elapsed_s"], row["accuracy"], row[FAILED_SHARE]] for row in found],
        "histograms": histograms, "bound": history.limits.get("max_staleness_steps"),
    }  # fmt: skip


# -- texts -------------------------------------------------------------------------------------------------------------


def _summary(history: History) -> str:
    groups = sum(group.ended_at >= 0 for group in history.groups)
    failed = sum(group.state == "failed" for group in history.groups)
    details = {
        "outcome": f"{history.outcome}{': ' if history.reason else ''}{history.reason}",
        "train steps": sum(step.finished_at >= 0 for step in history.trained),
        "groups": f"{groups} ended of {len(history.groups)} drawn"
        + (f", {failed} failed: no reward has them" if failed else ""),
        "time": f"{history.end:.1f} s", "events": history.events,
        "replicas": f"{len(history.slots)} with {sum(history.slots.values())} slots",
        "bounds": ", ".join(
            f"{short} = {history.limits[name]}" for short, name in BOUNDS.items() if name in history.limits
        ),
    }  # fmt: skip
    said = [*history.notes, *(one.text for one in failed_responses(history.validations))]
    notes = "".join(f"<p class=note>{_as_html(note)}</p>" for note in said)
    return _details(details) + notes


BOUNDS = {"B": "train_batch_size", "S": "max_staleness_steps", "K": "max_concurrent_groups", "k": "sync_every"}


def _details(details: Mapping[str, Any]) -> str:
    items = [
        f"<div><dt>{_as_html(name)}</dt><dd>{_as_html(str(detail))}</dd></div>" for name, detail in details.items()
    ]
    return f"<dl class=details>{''.join(items)}</dl>"


def _advice(advice: Sequence[str]) -> str:
    lines = "".join(f"<li>{_as_html(line)}</li>" for line in advice)
    return f"<section aria-label=Advice><h2>Advice</h2><ol class=advice>{lines}</ol></section>" if advice else ""


def _shares(history: History) -> str:
    """Tables of slot seconds, trainer seconds, tokens and attempts, with the share of each cause."""
    idle = {f"idle: {cause}": seconds for cause, seconds in history.idle_s.items()}
    fates = {f"{fate}: {FATES[fate]}": tokens for fate, tokens in history.tokens.items() if tokens}
    ends = {" ".join(filter(None, end)): count for end, count in history.ends().most_common()}
    return "".join(
        _share_table(title, unit, values)
        for title, unit, values in (
            ("Slots", "slot seconds", {"busy": history.busy_s, **idle}),
            ("Trainer", "seconds", history.trainer_s),
            ("Sampled tokens", "tokens", fates),
            ("Attempts", "attempts", ends),
        )
    )


def _share_table(title: str, unit: str, values: Mapping[str, float]) -> str:
    whole = sum(values.values())
    if whole <= 0:
        return ""
    lines = []
    for name, value in values.items():
        if value < 1e-9 * whole:
            continue
        shown = f"{value:,.0f}" if value >= 100 or isinstance(value, int) else f"{value:.2f}"
        share = 100 * value / whole
        lines.append(
            f"<tr><th scope=row>{_as_html(name.replace('_', ' '))}</th><td>{shown}</td><td>{share:.1f} %</td>"
            f'<td class=bar><span style="width:{share:.2f}%"></span></td></tr>'
        )
    columns = "".join(f"<th scope=col>{name}</th>" for name in (title, unit, "share"))
    head = f"<thead><tr>{columns}<td></td></tr></thead>"
    return f"<table class=shares>{head}<tbody>{''.join(lines)}</tbody></table>"


def _samples(samples: Iterable[Mapping[str, Any]]) -> str:
    parts = []
    for row in samples:
        reward = "" if row.get("reward") is None else f", reward {row['reward']:.3g}"
        place = f"attempt {row.get('attempt')}" if row.get("attempt") is not None else f"step {row.get('step')}"
        title = _as_html(f"{place}, group {row.get('group')}, sample {row.get('sample')}{reward}")
        names = (
            "error",
            "tokens",
            "staleness",
            "oldest_version",
            "newest_version",
            "finish_reason",
            "advantage",
            "answer",
        )
        details = {name.replace("_", " "): row[name] for name in names if row.get(name) not in (None, "")}
        prompt, response = _as_html(str(row.get("prompt", ""))), _as_html(str(row.get("response", "")))
        parts.append(
            f"<details class=sample><summary>{title}</summary>{_details(details)}<h4>Prompt</h4><pre>{prompt}</pre>"
            f"<h4>Response</h4><pre>{response}</pre></details>"
        )
    return "".join(parts) or "<p>This run has no samples of these steps.</p>"


def _config(history: History) -> str:
    config = history.config or {"limits": history.limits, "policies": history.policies}
    text = yaml.safe_dump(plain(without_secrets(config)), sort_keys=False, allow_unicode=True)
    changes = "".join(
        f"<li>{at:.1f} s: {_as_html(setting)} = {_as_html(value)}</li>" for at, setting, value in history.settings
    )
    return f"<pre>{_as_html(text)}</pre>" + (f"<h3>Changed during the run</h3><ul>{changes}</ul>" if changes else "")


def _began(run: str) -> str:
    """When a run began, from its id."""
    try:
        return f"{datetime.strptime(run[:15], '%Y%m%d-%H%M%S'):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return "unknown"


def _versions(history: History) -> str:
    details = {
        "run": history.run,
        "began": _began(history.run),
        "engine of the run": history.code or "unknown", "engine of this report": __version__,
    }  # fmt: skip
    return _details(details)
