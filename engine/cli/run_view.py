"""Shows a run: a live view on a terminal, else one line per train step, and a summary at the end.

Used by the CLI. It draws `Status` snapshots from any source. Everything fits into 80 columns.
"""

import math
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engine.metrics.idle import LEAST_WAIT
from engine.metrics.journal import FAILED_SHARE, metrics_in
from engine.metrics.status import Status
from engine.states.limits import HELD_OUT

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 24
VERSIONS_SHOWN = 8
DATA = "group_data"
"""The cause of failures of prompts and rewards."""
PLAIN_SHARE = 0.25
"""Minimum progress, as a share from 0 to 1, between two plain lines during the preparation."""


class RunView(AbstractContextManager["RunView"]):
    """Shows a run. A context manager; call `show` for each snapshot."""

    _told: tuple[str, ...] = ()

    @abstractmethod
    def show(self, status: Status) -> None: ...

    @abstractmethod
    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""

    def note_news(self, status: Status) -> None:
        """Print the sentences of a status that were not in the snapshot before it."""
        now = (status.silence, *(one.text for one in status.health))
        for text in now:
            if text and text not in self._told:
                self.note(text)
        self._told = now


def view_for(console: Console, *, title: str, plain: bool = False) -> RunView:
    """The live view if `console` is a terminal and not `plain`, else plain lines."""
    if plain or not console.is_terminal:
        return PlainView(console.file)
    return LiveView(console, title)


class PreparationView:
    """Shows the preparation of a run: a spinner on a terminal, else a line from time to time."""

    def __init__(self, console: Console, *, plain: bool = False) -> None:
        self.console = console
        self._spinner = console.status("starting") if console.is_terminal and not plain else None
        self._next_share = 0.0

    def __enter__(self) -> Self:
        if self._spinner is not None:
            self._spinner.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._spinner is not None:
            self._spinner.stop()

    def show(self, share: float, text: str) -> None:
        """Show what is being done. `share`: how much of it is done, from 0 to 1. A share of 0 begins another stage."""
        done = share >= 1.0
        if share <= 0.0:
            self._next_share = 0.0
        if self._spinner is not None:
            self._spinner.update(Text(text, overflow="ellipsis"))
        if done or (self._spinner is None and share >= self._next_share):
            self._next_share = share + PLAIN_SHARE
            self.console.print(Text(text), soft_wrap=True)


class LiveView(RunView):
    """Redraws one panel in place."""

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self.title = title
        self._live = Live(console=console, auto_refresh=False, redirect_stderr=False, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, status: Status) -> None:
        self.note_news(status)
        self._live.update(panel(status, self.title), refresh=True)

    def note(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


class PlainView(RunView):
    """Prints each train step once, in order, as one line of `key=value` fields, which is easy to search."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self._shown = self._validation_shown = -1
        self._failed = False

    def __exit__(self, *error: object) -> None:
        self.stream.flush()

    def show(self, status: Status) -> None:
        for row in status.recent:
            if row["step"] > self._shown:
                self._shown = row["step"]
                self.note(step_line(row, status))
        for row in status.validations:
            if row["validation"] > self._validation_shown:
                self._validation_shown = row["validation"]
                self.note(validation_line(row))
        if DATA in status.failures and not self._failed:
            self._failed = True
            self.note(
                f"a prompt, agent or reward failed; groups without attempts left are not trained: {status.last_failure}"
            )
        self.note_news(status)

    def note(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()


def step_line(row: Mapping[str, Any], status: Status) -> str:
    """The plain line of a train step. A missing figure is `-`."""
    total = status.max_steps if status.max_steps is not None else "-"
    stale = "/".join(figure(row.get(f"staleness_{key}"), ".3g") for key in ("min", "mean", "max"))
    fields = {
        "step": row["step"],
        "done": f"{row['step'] + 1}/{total}",
        "version": row.get("version", "-"),
        "reward": figure(row.get("reward_mean"), ".4f"),
        "accuracy": figure(row.get("accuracy"), ".4f"),
        "loss": figure(row.get("loss"), ".4g"),
        "staleness": stale,
        "tokens": row.get("tokens", "-"),
        "tokens_s": figure(status.tokens_per_s, ".0f"),
        "busy": f"{status.slots_busy}/{status.slots}",
        "data_failures": status.failures.get(DATA, 0),
        "groups_failed": status.groups_ended.get("failed", 0),
        "elapsed_s": figure(row.get("elapsed_s"), ".1f"),
        "eta_s": figure(status.eta_s, ".0f"),
    }
    return " ".join(f"{key}={value}" for key, value in fields.items())


def validation_line(row: Mapping[str, Any]) -> str:
    """The plain line of a validation that ended."""
    fields = {
        "validation": row["validation"],
        "version": row["version"],
        "steps": row["steps"],
        "outcome": row["outcome"],
        "accuracy": figure(row["accuracy"], ".4f"),
        "reward": figure(row["reward_mean"], ".4f"),
        **set_fields(row),
        FAILED_SHARE: figure(row[FAILED_SHARE], ".3f"),
        "rows": f"{row['measured']}/{row['rows']}",
        "elapsed_s": figure(row["elapsed_s"], ".1f"),
    }
    said = " ".join(f"{key}={value}" for key, value in fields.items())
    return said + (f" reason={row['reason']!r}" if row["reason"] else "")


def set_fields(row: Mapping[str, Any]) -> dict[str, str]:
    """The figures of the validation sets, without rewards, as `SET/METRIC`: value and confidence interval."""
    return {
        f"{name}/{metric}": f"{figure(value, '.4f')}[{figure(low, '.3f')},{figure(high, '.3f')}]"
        for name, figures in row.get("sets", {}).items()
        for metric, value, low, high in metrics_in(figures)
        if not metric.startswith("reward_") and not _is_shown(name, metric)
    }


def _is_shown(name: str, metric: str) -> bool:
    """Whether a figure is already shown as the validation's accuracy or reward. True for those of the default set."""
    return name == HELD_OUT and metric in ("avg@1", "reward_mean")


def set_rows(validations: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Lines of a table: each figure of the sets, in the first and in the newest reported validation."""
    reported = [row for row in validations if row["outcome"] == "reported"]
    if not reported:
        return
    first, newest = reported[0], reported[-1]
    for name, figures in newest["sets"].items():
        for metric, value, low, high in metrics_in(figures):
            if _is_shown(name, metric):
                continue
            earlier = first["sets"].get(name, {}) if first is not newest else {}
            before = f"{_with_failed(earlier[metric], earlier[FAILED_SHARE])} / " if metric in earlier else ""
            cell = f"{before}{_with_failed(value, figures[FAILED_SHARE])}"
            yield f"{name} {metric}", f"{cell}  (95 %: {figure(low, '.3f')} to {figure(high, '.3f')})"


def _with_failed(value: float | None, share: float) -> str:
    """A figure of a validation, beside the share of its responses that failed."""
    return figure(value, ".3f") + (f" ({percent(share)} failed)" if share else "")


def panel(status: Status, title: str, *, replicas: bool = True) -> RenderableType:
    """The whole live view. `replicas`: include the line of the replicas, if the caller does not show them elsewhere."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="bold", no_wrap=True, width=9)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_row("step", _progress(status))
    grid.add_row("reward", _reward(status))
    grid.add_row("staleness", _staleness(status))
    grid.add_row("rollout", _rollout(status))
    if replicas:
        grid.add_row("replicas", _replicas(status))
    grid.add_row("trainer", f"version {status.version}, idle {percent(status.trainer_idle_share)}")
    if status.failures:
        grid.add_row("failures", Text(_failures(status), style="yellow"))
    if status.silence:
        grid.add_row("waiting", Text(status.silence, style="yellow"))
    for finding in status.health:
        grid.add_row("health", Text(finding.text, style="yellow"))
    now = Table.grid(padding=(0, 1), expand=True)
    now.add_column(style="dim", no_wrap=True, width=9)
    now.add_column(style="dim", no_wrap=True, overflow="ellipsis", ratio=1)
    now.add_row("trainer", status.trainer_now)
    now.add_row("rollout", status.rollout_now)
    if status.calls_now:
        now.add_row("calls", Text(status.calls_now, overflow="fold", no_wrap=False))
    if status.validation_now:
        now.add_row("validation", status.validation_now)
    return Panel(Group(grid, now), title=Text(title, overflow="ellipsis"), title_align="left", padding=(0, 1))


def _progress(status: Status) -> RenderableType:
    done = f"{status.step}/{status.max_steps if status.max_steps is not None else '?'}"
    left = (
        f"{clock(status.elapsed_s)}, {clock(status.eta_s)} left"
        if status.eta_s is not None
        else clock(status.elapsed_s)
    )
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    total = status.max_steps or 1
    bar: RenderableType = ProgressBar(total=total, completed=min(status.step, total)) if status.max_steps else ""
    row.add_row(done, bar, left)
    return row


def _reward(status: Status) -> Text:
    text = Text(f"{figure(status.reward, '.3f')} ")
    text.append(sparkline(status.rewards, SPARK_WIDTH), style="cyan")
    text.append(f" first {figure(status.reward_first, '.3f')}")
    if status.accuracy is not None:
        text.append(f"  validation {_validation_figures(status)}")
    failed = status.groups_ended.get("failed", 0)
    if failed:
        text.append(f"  without {failed} failed", style="yellow")
    return text


def _validation_figures(status: Status) -> str:
    """The accuracy of one set. For several sets, the last figure of each before the reward, such as its pass@k."""
    reported = [row for row in status.validations if row["outcome"] == "reported"]
    sets = reported[-1]["sets"] if reported else {}
    if len(sets) < 2:
        return _with_failed(status.accuracy, status.accuracies[-1][2])
    shares = {
        name: [found for found in metrics_in(figures) if not found[0].startswith("reward_")]
        for name, figures in sets.items()
    }
    shown = {name: found[-1] for name, found in shares.items()}
    return ", ".join(
        f"{name} {metric} {_with_failed(value, sets[name][FAILED_SHARE])}"
        for name, (metric, value, *_) in shown.items()
    )


def _staleness(status: Status) -> str:
    low, mean, high = (
        figure(value, ".2g") for value in (status.staleness_min, status.staleness_mean, status.staleness_max)
    )
    return f"min {low}, mean {mean}, max {high}; bound {status.max_staleness_steps}"


def _rollout(status: Status) -> str:
    return (
        f"{status.slots_busy}/{status.slots} slots busy, {status.ready} ready, {status.parked} parked, "
        f"{status.tokens_per_s:.0f} tokens/s, idle {percent(status.rollout_idle_share)}"
    )


def _failures(status: Status) -> str:
    """How many attempts failed, how many of them on a prompt, agent or reward, and what the last one was."""
    own = status.failures.get(DATA, 0)
    detail = f", {own} on prompts, agents or rewards" if own else ""
    return f"{sum(status.failures.values())} attempts{detail}; the last: {status.last_failure}"


def _replicas(status: Status) -> str:
    shown = list(status.replica_versions.items())[:VERSIONS_SHOWN]
    parts = []
    for id, version in shown:
        state = status.replica_states.get(id, "")
        parts.append(f"{id}: v{version}" + (f" {state}" if state not in ("ready", "") else ""))
    more = len(status.replica_versions) - len(shown)
    return "  ".join(parts) + (f"  and {more} more" if more else "") or "none is up"


def summary(status: Status, *, where: str, wall_s: float | None = None, advice: str = "") -> Table:
    """The table that is shown after a run has ended. `wall_s`: seconds since the command began. `advice`: the first
    line of it."""
    table = Table(
        show_header=False, title=f"run {status.ending or 'interrupted'}", title_justify="left", title_style="bold"
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    steps = f"{status.step}" + (f" of {status.max_steps}" if status.max_steps is not None else "")
    if status.outcome == "finished" and status.max_steps is not None and status.step < status.max_steps:
        steps += "  (the prompts are used up)"
    stale = (status.staleness_min, status.staleness_mean, status.staleness_max)
    since = "  (since the last start)" if status.recoveries else ""  # a new process counts these figures from 0
    table.add_row("train steps", steps)
    rewards = f"{figure(status.reward_first, '.3f')} / {figure(status.reward, '.3f')}"
    table.add_row("reward first / last", f"{rewards}{since}")
    before = _with_failed(status.accuracy_first, status.failed_share(0))
    after = _with_failed(status.accuracy_last, status.failed_share(status.step) if status.step else 0.0)
    table.add_row("validation accuracy before / after", f"{before} / {after}")
    for name, cell in set_rows(status.validations):
        table.add_row(f"  {name}", cell)
    table.add_row(
        "staleness min / mean / max",
        " / ".join(figure(value, ".3g") for value in stale) + f"  (bound {status.max_staleness_steps}){since}",
    )
    table.add_row("groups", ", ".join(f"{count} {end}" for end, count in status.groups_ended.items()))
    failed = status.groups_ended.get("failed", 0)
    if failed:
        share = f"{failed} of {sum(status.groups_ended.values())} groups failed: the rewards above leave them out"
        table.add_row("not trained", Text(share, style="yellow"))
    for finding in status.health:
        table.add_row("health", Text(finding.text, style="yellow"))
    if status.failures:
        counts = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in status.failures.items())
        table.add_row("failed attempts", Text(f"{counts}; the last: {status.last_failure}"))
    table.add_row(
        "rollout idle",
        Text(_idle(status.rollout_idle_share, status.rollout_idle_s, status.slowest) + since),
    )
    table.add_row("trainer idle", _idle(status.trainer_idle_share, status.trainer_idle_s, {}) + since)
    table.add_row("tokens generated / trained", f"{status.tokens_generated:,} / {status.tokens_trained:,}{since}")
    if wall_s is None:
        table.add_row("wall seconds", f"{status.elapsed_s:.1f}")
    else:
        table.add_row("wall seconds of this command", f"{wall_s:.1f}")
    if advice:
        table.add_row("advice", Text(advice))
    table.add_row("run directory", where)
    return table


def _idle(share: float, seconds: Mapping[str, float], slowest: Mapping[str, str]) -> str:
    """A share of idle time with its main cause, if it is more than chance."""
    if not seconds or share < LEAST_WAIT:
        return percent(share)
    cause = max(seconds, key=lambda name: seconds[name])
    return f"{percent(share)}  (mostly {slowest.get(cause, cause.replace('_', ' '))})"


def sparkline(values: tuple[float | None, ...], width: int) -> str:
    """The newest values as a line of bars, scaled from the smallest to the largest of them."""
    newest = [value for value in values if value is not None and math.isfinite(value)][-width:]
    if not newest:
        return ""
    return bars(newest, min(newest), max(newest))


def bars(values: Sequence[float | None], low: float, high: float) -> str:
    """A bar for each value on a scale from `low` to `high`; a space for None."""
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else BARS[round((value - low) * scale)] for value in values)


def figure(value: float | None, form: str) -> str:
    """A formatted number; `-` for None, NaN and infinity."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def clock(seconds: float | None) -> str:
    """Seconds as `m:ss`, from one hour on as `h:mm:ss`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
