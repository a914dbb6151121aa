"""The rows of train steps and validations, and `metrics.jsonl`: one complete line of JSON for each.

`collector.RunMetrics` writes it for the user's tools. Every line is standard JSON: a number that is not finite is
written as null. The row of a validation has `sets`: by the name of the set, each figure with the ends of its 95 %
confidence interval.

    {"math": {"prompts": 30, "pass@4": 0.8, "pass@4_low": 0.63, "pass@4_high": 0.9, ...}}
"""

import json
import logging
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, Self

from engine.commands import TrainStep
from engine.errors import FULL, ConfigError, StorageFull
from engine.events import RunResumed
from engine.ids import GroupId, StepId
from engine.metrics.counts import group_counts
from engine.metrics.health import START, WINDOW
from engine.metrics.intervals import Estimate
from engine.record.files import open_private, private_opener
from engine.record.frames import Tick
from engine.states.group import Group
from engine.states.state import State

log = logging.getLogger(__name__)


class Journal:
    """Appends rows to a file. When `write` returns, the operating system has the row. A torn last line of an earlier
    process is cut. Raises: `StorageFull`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.path)
        self._file = open_private(self.path, "ab")

    def write(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(plain(row), allow_nan=False, ensure_ascii=False) + "\n"
        left = memoryview(line.encode("utf-8", "replace"))
        with room_for(self.path):
            while left:
                left = left[self._file.write(left) :]

    def close(self) -> None:
        self._file.close()


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Context manager around writes to `path`. Raises: `StorageFull` if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StorageFull(str(path), path.stat().st_size, str(error.strerror)) from None


def keep_rows(
    path: Path,
    keep: Callable[[dict[str, Any]], bool],
    complain: Callable[[str], None] = log.warning,
    aside: Path | None = None,
    again: Callable[[dict[str, Any]], bool] = lambda row: False,
) -> list[dict[str, Any]]:
    """Remove the rows for which `keep` is false, and return the others. The file is replaced atomically. A line that is
    not a row is removed, and `complain` gets its file and number.

    `aside`: path for a copy of the old file, if a line is removed that will not be written `again`.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    kept, loses = [], False
    for number, line in enumerate(lines[:-1], start=1):  # text after the last line end is incomplete
        try:
            row = json.loads(line)
            stays = keep(row)
            kept += [row] if stays else []
            loses |= not stays and not again(row)
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            loses = True
            complain(f"{path}: line {number} is not a row of metrics and is removed: {error}")
    temporary = path.with_name(path.name + ".tmp")
    with room_for(path), open(temporary, "w", encoding="utf-8", opener=private_opener) as file:
        if aside is not None and loses:
            shutil.copyfile(path, aside)
        file.writelines(json.dumps(plain(row), allow_nan=False, ensure_ascii=False) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return kept


def validation_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of validations in the metrics of a run, which may still be writing its last line."""
    return (row for row in rows_of(path) if "validation" in row)


def step_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of train steps in the metrics of a run. Raises: `ConfigError` if the file cannot be read."""
    return [row for row in rows_of(path) if "step" in row]


def first_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the first train steps, for health checks that compare them with the newest. Raises: `ConfigError` if
    the file cannot be read."""
    return [*islice((row for row in rows_of(path) if "step" in row), START)]


TAIL_BYTES = 1 << 18
"""More than the rows of a train step and of its validations."""


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows in the metrics of a run, which may still be writing its last line; none without the file. Raises:
    `ConfigError` if the file cannot be read."""
    if path.exists():
        with _readable(path) as file:
            yield from rows_in(file)


def last_row(path: Path, key: str) -> dict[str, Any] | None:
    """The last row with a key among the last `TAIL_BYTES` of the metrics; None if there is none. Raises: `ConfigError`
    if the file cannot be read."""
    if not path.exists():
        return None
    with _readable(path) as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return next((row for row in reversed([*rows_in(file)]) if key in row), None)


@contextmanager
def _readable(path: Path) -> Iterator[IO[bytes]]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise ConfigError("RUN", str(path), f"cannot be read: {error.strerror or error}") from None


NUMBERS = ("step", "validation", "steps")
"""Keys of rows whose values are whole numbers."""


def rows_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The rows among lines of text, without those that are incomplete or damaged."""
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # a line that is being written, or that a crash of the machine damaged
        if isinstance(row, dict) and all(isinstance(row[key], int) for key in NUMBERS if key in row):
            yield row


def cut_rows(
    path: Path,
    steps: int,
    complain: Callable[[str], None] = log.warning,
    unfinished: Container[int] = (),
    validations: Container[int] | None = None,
    aside: Path | None = None,
) -> list[dict[str, Any]]:
    """Keep and return the rows of the first `steps` train steps and of validations of weights with no more steps. The
    others will be written again, as will rows of `unfinished` steps and of validations other than `validations`.
    `aside`: path for a copy of the file if a row of a finished step is removed."""

    def stays(row: dict[str, Any]) -> bool:
        if "validation" in row and validations is not None and row["validation"] not in validations:
            return False
        return bool(row.get("step", row.get("steps", 0) - 1) < steps and row.get("step", -1) not in unfinished)

    def again(row: dict[str, Any]) -> bool:
        return "step" not in row or row["step"] in unfinished

    return keep_rows(path, stays, complain, aside, again)


def plain(value: Any) -> Any:
    """The value as JSON data: mappings with text keys, lists, null for numbers that are not finite, numbers from array
    scalars."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    item = getattr(value, "item", None)
    return plain(item()) if callable(item) else str(value)


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)


# -- figures of validation sets ----------------------------------------------------------------------------------------


BOUNDS = {"value": "", "low": "_low", "high": "_high"}
"""Suffix of each estimate of a figure."""
PROMPTS = "prompts"
"""Key of the number of prompts with a measured response."""


def sets_of(estimates: Sequence[Estimate]) -> dict[str, dict[str, Any]]:
    """The figures of each set, by its name."""
    sets: dict[str, dict[str, Any]] = {}
    for found in estimates:
        figures = sets.setdefault(found.set, {PROMPTS: found.prompts})
        figures |= {found.metric: found.value, f"{found.metric}_low": found.low, f"{found.metric}_high": found.high}
    return sets


def metrics_in(figures: Mapping[str, Any]) -> Iterator[tuple[str, float, float | None, float | None]]:
    """(metric, value, low, high) of each figure of a set."""
    for name, value in figures.items():
        if f"{name}_low" in figures:
            yield name, value, figures[f"{name}_low"], figures[f"{name}_high"]


def bounds_in(figures: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(metric, estimate, number) of each figure of a set, without unknown ends of intervals."""
    for metric, *ends in metrics_in(figures):
        for bound, number in zip(BOUNDS, ends, strict=True):
            if number is not None:
                yield metric, bound, number


def value_in(row: Mapping[str, Any], metric: str) -> float | None:
    """A figure of a validation's row by its name: `accuracy`, `reward_mean` or `SET/METRIC`."""
    name, slash, own = metric.rpartition("/")
    value = row.get("sets", {}).get(name, {}).get(own) if slash else row.get(metric)
    return float(value) if isinstance(value, int | float) else None


PHASES = ("collecting", "scoring", "training", "publishing")
TRAINER_SECONDS = "seconds_"
"""Prefix of the trainer's own timings; a row has them under `trainer_seconds`."""

Row = dict[str, Any]


@dataclass(slots=True)
class _OpenGroup:
    """A step with a batch whose row is not written yet."""

    fields: Row
    groups: tuple[GroupId, ...] = ()
    staleness: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    entered_at: float = 0.0
    phase: str = "scoring"
    finished: bool = False


class StepRows:
    """Collects rows of open steps; passes finished rows to `emit` in order of steps."""

    def __init__(self, emit: Callable[[Row], None], counts: Mapping[str, int] | None = None) -> None:
        """`counts`: counts, as in `finished`, that later rows must not include."""
        self.first: list[Row] = []
        """Rows of the first `START` steps of the run."""
        self.recent: deque[Row] = deque(maxlen=WINDOW)
        """The newest rows that this process wrote, oldest first."""
        self._emit = emit
        self._open: dict[StepId, _OpenGroup] = {}
        self._reported: dict[StepId, Row] = {}
        self._collecting_since = 0.0
        self._counts = dict(counts or {})

    def written_to(self, emit: Callable[[Row], None], first: Sequence[Row]) -> Self:
        """Write rows to another target from now on. `first`: rows of the first steps that are written already."""
        self.first = [*first]
        self.recent.clear()
        self._emit = emit
        return self

    def formed(self, step: StepId, groups: list[Group], staleness: tuple[int, ...]) -> None:
        """Note that a batch was ordered to be trained. A repeated order changes nothing.

        `staleness`: staleness of each group. Groups that no longer exist have no other figures.
        """
        entry = self._open.get(step)
        if entry is None or "groups" in entry.fields:
            return
        entry.groups, entry.staleness = tuple(group.id for group in groups), staleness
        rewards = [group.outcome.reward_mean for group in groups]
        entry.fields.update(
            groups=len(staleness),
            reward_mean=sum(rewards) / len(rewards) if rewards else None,
            accuracy=None,
            loss=None,
            staleness_min=min(staleness, default=0),
            staleness_mean=sum(staleness) / max(1, len(staleness)),
            staleness_max=max(staleness, default=0),
            tokens=sum(group.stored.tokens for group in groups),
        )

    def changed(self, step: StepId, state: str, at: float) -> None:
        """A step entered a state of its machine."""
        if state == "collecting":
            self._collecting_since = at
            return
        entry = self._open.get(step)
        if entry is None:
            entry = self._open[step] = _OpenGroup({"step": step}, entered_at=at)
            entry.seconds["collecting"] = at - self._collecting_since
        entry.seconds[entry.phase] = entry.seconds.get(entry.phase, 0.0) + at - entry.entered_at  # added states, too
        entry.entered_at = at
        entry.phase = {"finished": "publishing"}.get(state, state)

    def trains(self, step: StepId) -> bool:
        """Whether a step was being trained when it last changed its state."""
        entry = self._open.get(step)
        return entry is not None and entry.phase == "training"

    def batch(self, step: StepId) -> tuple[tuple[GroupId, ...], tuple[int, ...], int]:
        """Groups of an unfinished step, the staleness of each, and their response tokens."""
        entry = self._open.get(step)
        return (entry.groups, entry.staleness, entry.fields.get("tokens", 0)) if entry is not None else ((), (), 0)

    def finished(self, step: StepId, version: int, at: float, counts: Mapping[str, int]) -> None:
        """Note that a step finished. `counts`: groups aborted, resumed, filtered and failed since the run began."""
        entry = self._open.get(step)
        if entry is None:
            return
        for earlier in [id for id, other in self._open.items() if other.finished and id != step]:
            self._write(earlier)
        entry.finished = True
        entry.fields.update(
            version=version, elapsed_s=at, seconds={**entry.seconds, "total": sum(entry.seconds.values())}
        )
        entry.fields.update({name: count - self._counts.get(name, 0) for name, count in counts.items()})
        self._counts = dict(counts)
        if step in self._reported:
            self._write(step)

    def report(self, step: StepId, metrics: Mapping[str, Any]) -> None:
        """Take the trainer's metrics for a step, before or after the step finishes."""
        self._reported[step] = dict(metrics)
        if step in self._open and self._open[step].finished:
            self._write(step)

    def flush(self) -> None:
        """Write the rows of finished steps for which the trainer reported no metrics."""
        for step in [id for id, entry in self._open.items() if entry.finished]:
            self._write(step)

    def _write(self, step: StepId) -> None:
        fields = self._open.pop(step).fields
        reported = self._reported.pop(step, {})
        row: Row = {key: fields[key] for key in ("step", "version", "groups") if key in fields} | fields
        own = {name: value for name, value in reported.items() if not name.startswith(TRAINER_SECONDS)}
        row |= {name: value for name, value in own.items() if row.get(name) is None}
        seconds = {name.removeprefix(TRAINER_SECONDS): value for name, value in reported.items() if name not in own}
        if seconds:
            row["trainer_seconds"] = seconds
        self.recent.append(row)
        if step == len(self.first) < START:
            self.first.append(row)
        self._emit(row)


class ReplayedRows:
    """Rebuilds rows of the steps that are open at the end of a record, so that a resumed run can write them.

    During the replay, `note` must be called after each change of state, and `watch` after each tick.
    """

    def __init__(self) -> None:
        self.rows = StepRows(lambda row: None)
        self._moves: list[tuple[StepId, str]] = []
        """(step, new state) of each step that changed in this tick."""
        self._begun = False

    def note(self, machine: str, record: Any, source: str, trigger: str) -> None:
        if machine == "step":
            self._moves.append((record.id, record.state))

    def watch(self, tick: Tick, state: State) -> None:
        if not self._begun:
            self._begin(state)
        for step, entered in self._moves:
            self.rows.changed(step, entered, tick.at)
            if entered == "finished":
                self.rows.finished(step, state.training.latest_version, tick.at, group_counts(state))
                self.rows.flush()  # an earlier process has written this row
        self._moves.clear()
        if any(isinstance(event, RunResumed) and not event.kept for event in tick.events):
            self._begin(state)
        for command in tick.commands:
            if type(command) is TrainStep:
                groups = [state.groups.live[id] for id in command.groups if id in state.groups.live]
                self.rows.formed(command.step, groups, command.staleness)

    def _begin(self, state: State) -> None:
        self.rows, self._begun = StepRows(lambda row: None, group_counts(state)), True
