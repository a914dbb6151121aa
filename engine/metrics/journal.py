"""The rows of train steps and validations, and `metrics.jsonl`: one complete line of JSON for each.

`collector.RunMetrics` writes it for the user's tools. Every line is standard JSON: a number that is not finite is
written as null. Each line also has a checksum of its row (`record.checked_lines`). The row of a validation has `sets`:
by the name of the set, each figure with the ends of its 95 % confidence interval.

    {"math": {"prompts": 30, "failed_share": 0.0, "pass@4": 0.8, "pass@4_low": 0.63, "pass@4_high": 0.9, ...}}
"""

import json
import logging
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

from engine.errors import FULL, ConfigError, StorageFull
from engine.ids import StepId, Version
from engine.metrics.health import START, WINDOW
from engine.metrics.intervals import Estimate
from engine.record.checked_lines import checked_line, object_of
from engine.record.files import open_private, replace_whole
from engine.states.step import STEP, Step

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
        left = memoryview(line_of(row))
        with room_for(self.path):
            while left:
                left = left[self._file.write(left) :]

    def close(self) -> None:
        self._file.close()


def line_of(row: Mapping[str, Any]) -> bytes:
    """The line of a row in the file."""
    return checked_line(json.dumps(plain(row), allow_nan=False, ensure_ascii=False))


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
            row = object_of(line)
            stays = keep(row)
            kept += [row] if stays else []
            loses |= not stays and not again(row)
        except ValueError as error:
            loses = True
            complain(f"{path}: line {number} is not a row of metrics and is removed: {error}")
    with room_for(path), replace_whole(path) as file:
        if aside is not None and loses:
            shutil.copyfile(path, aside)
        file.writelines(map(line_of, kept))
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


def rows_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The rows among lines of text, without those that are incomplete or damaged."""
    for line in lines:
        try:
            yield object_of(line)
        except ValueError:
            continue  # a line that is being written, or that a crash of the machine damaged


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
"""Key of the number of prompts."""
FAILED_SHARE = "failed_share"
"""Key of the share of responses that failed or were dropped."""


def sets_of(estimates: Sequence[Estimate]) -> dict[str, dict[str, Any]]:
    """The figures of each set, by its name."""
    sets: dict[str, dict[str, Any]] = {}
    for found in estimates:
        figures = sets.setdefault(found.set, {PROMPTS: found.prompts, FAILED_SHARE: found.failed_share})
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


def finished_row(step: Step, version: Version, at: float) -> Row:
    """The row of a step that finished at `at`, without the trainer's metrics. `version`: the newest one then."""
    seconds = dict.fromkeys(PHASES, 0.0) | {state: s for state, s in step.seconds.items() if state != STEP.initial}
    return {
        "step": step.id, "version": version, "groups": len(step.groups), "reward_mean": step.reward_mean,
        "accuracy": None, "loss": None, "staleness_min": min(step.staleness),
        "staleness_mean": sum(step.staleness) / len(step.staleness), "staleness_max": max(step.staleness),
        "tokens": step.tokens, "elapsed_s": at, "seconds": {**seconds, "total": sum(seconds.values())},
        **{f"groups_{name}": count for name, count in step.setbacks.items()},
    }  # fmt: skip


class StepRows:
    """Joins the rows of finished steps with the trainer's metrics; passes them to `emit` in order of steps."""

    def __init__(self, emit: Callable[[Row], None], first: Sequence[Row] = ()) -> None:
        """`first`: rows of the first steps of the run that are written already."""
        self.first = [*first]
        """Rows of the first `START` steps of the run."""
        self.recent: deque[Row] = deque(maxlen=WINDOW)
        """The newest rows that this process wrote, oldest first."""
        self._emit = emit
        self._finished: dict[StepId, Row] = {}
        """Rows that wait for the trainer's metrics."""
        self._reported: dict[StepId, Row] = {}

    def finished(self, row: Row) -> None:
        """Take the row of a step. Those of earlier steps wait no longer."""
        self.flush()
        self._finished[row["step"]] = row
        if row["step"] in self._reported:
            self._write(row["step"])

    def report(self, step: StepId, metrics: Mapping[str, Any]) -> None:
        """Take the trainer's metrics for a step, before or after the step finishes."""
        self._reported[step] = dict(metrics)
        if step in self._finished:
            self._write(step)

    def flush(self) -> None:
        """Write the rows of finished steps for which the trainer reported no metrics."""
        for step in list(self._finished):
            self._write(step)

    def _write(self, step: StepId) -> None:
        row, reported = self._finished.pop(step), self._reported.pop(step, {})
        own = {name: value for name, value in reported.items() if not name.startswith(TRAINER_SECONDS)}
        row |= {name: value for name, value in own.items() if row.get(name) is None}
        seconds = {name.removeprefix(TRAINER_SECONDS): value for name, value in reported.items() if name not in own}
        if seconds:
            row["trainer_seconds"] = seconds
        self.recent.append(row)
        if step == len(self.first) < START:
            self.first.append(row)
        self._emit(row)
