"""Sends the rows of `metrics.jsonl` and samples to TensorBoard, Weights & Biases and MLflow, by their own clients.

The sinks are opened together with the journal. Each works on its own thread behind a bounded queue. A slow, missing or
broken sink loses rows and logs it. It must never delay or fail the run, or lose a line of `metrics.jsonl`.
"""

import contextlib
import importlib.util
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from engine.errors import ConfigError, visible
from engine.extras import install_command
from engine.metrics.journal import Journal
from engine.record.files import write_private
from engine.reward_histogram import HISTOGRAMS, Histograms, edges_and_counts

log = logging.getLogger(__name__)

QUEUED_ROWS = 1000
"""Maximum number of rows that wait for a slow sink; it loses further rows."""
CLOSE_TIMEOUT_S = 8.0
"""Seconds that all sinks together get at the end of a run to write the rows that wait."""

MLFLOW_RUN = "mlflow_run.txt"
"""File in the run's directory with the id of the MLflow run."""
WANDB_RUN = "wandb_run.txt"
"""File in the run's directory with the id of the run of Weights & Biases."""

Row = Mapping[str, Any]
Samples = Callable[[Row], Sequence[Row]]
"""Returns the samples to send with a row of metrics; may raise anything."""


class Client(Protocol):
    """Writes rows to one sink. Used only on the sink's thread; may raise anything."""

    def write(self, step: int, figures: Mapping[str, float], histograms: Histograms) -> None: ...
    def show(self, step: int, name: str, samples: Sequence[Row]) -> None:
        """Show samples of a train step (`name`: `train`) or a validation (`validation`)."""

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files for `tensorboard --logdir`."""

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        from tensorboard.summary import Writer

        self._directory = Path(options.get("dir") or directory / "tensorboard")
        self._writer = Writer(str(self._directory))
        self._others: Any = None

    def write(self, step: int, figures: Mapping[str, float], histograms: Histograms) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        if histograms:
            self._write_histograms(step, histograms)

    def _write_histograms(self, step: int, histograms: Histograms) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.histogram.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        about = create_summary_metadata(display_name=None, description=None)
        for name, buckets in histograms.items():
            triples = make_tensor_proto([[float(number) for number in bucket] for bucket in buckets], dtype="float64")
            self._add(step, Summary(value=[Summary.Value(tag=f"rewards/{name}", metadata=about, tensor=triples)]))

    def show(self, step: int, name: str, samples: Sequence[Row]) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(step, text_pb(f"samples/{name}", as_markdown(samples)))

    def _add(self, step: int, summary: Any) -> None:
        """Write what the writer cannot: texts and histograms. They go into a separate run, `samples`, because
        TensorBoard reads only the newer of two files in a directory."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._others is None:
            self._others = EventFileWriter(str(self._directory / "samples"))
        self._others.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._others.flush()

    def close(self) -> None:
        self._writer.close()
        if self._others is not None:
            self._others.close()


class WeightsAndBiases:
    """Writes a run of Weights & Biases. In offline mode, it stays in the run's directory until `wandb sync`."""

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        import wandb

        self._end = wandb.teardown
        self._table = wandb.Table
        self._histogram: Any = wandb.Histogram  # lists are accepted, too, although its types do not say so
        self._step = 0
        self._run = wandb.init(
            project=options.get("project") or "step-engine",
            entity=options.get("entity"),
            name=run,
            id=_own_id(directory / WANDB_RUN),
            resume="allow",
            dir=str(directory),
            config=dict(config),
            mode=options.get("mode") or "offline",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, step: int, figures: Mapping[str, float], histograms: Histograms) -> None:
        self._step = max(self._step, step)  # W&B's steps must not decrease, but a validation may measure older weights
        drawn = {}
        for name, buckets in histograms.items():
            edges, counts = edges_and_counts(buckets)
            drawn[f"rewards/{name}"] = self._histogram(np_histogram=(counts, edges))
        self._run.log({**figures, **drawn}, step=self._step)

    def show(self, step: int, name: str, samples: Sequence[Row]) -> None:
        self._step = max(self._step, step)
        columns: list[Any] = list(samples[0])
        rows = [[_cell(sample[column]) for column in columns] for sample in samples]
        self._run.log({f"samples/{name}": self._table(columns=columns, data=rows)}, step=self._step)

    def close(self) -> None:
        self._run.finish()
        self._end()  # otherwise its process may end before the last rows are on disk


def _own_id(noted: Path) -> str:
    """The id that an earlier process of this run noted, else a new one: runs in two places may have the same name."""
    if not noted.exists():
        write_private(noted, secrets.token_hex(8) + "\n")
    return noted.read_text(encoding="utf-8").strip()


class MLflow:
    """Writes a run of MLflow, by default to `mlruns/` beside the runs. A resumed run continues the same MLflow run."""

    def __init__(self, run: str, directory: Path, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        uri = options.get("uri") or (directory.resolve().parent / "mlruns").as_uri()
        if "://" not in uri or uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise new versions accept only databases
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        name = options.get("experiment") or "step-engine"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        noted = directory / MLFLOW_RUN
        self._id, known_params = self._continue_run(noted) or self._begin(noted, experiment, run)
        given = {key: str(value)[:500] for key, value in leaves(config).items()}
        params = [Param(key, value) for key, value in given.items() if key not in known_params]  # they cannot change
        for first in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[first : first + 100])

    def _continue_run(self, noted: Path) -> tuple[str, Container[str]] | None:
        """The MLflow run of an earlier process and its parameters; None if there is none or it was deleted."""
        from mlflow.exceptions import MlflowException

        if not noted.exists():
            return None
        try:
            earlier = self._client.get_run(noted.read_text(encoding="utf-8").strip())
            self._client.update_run(earlier.info.run_id, status="RUNNING")
        except MlflowException as error:
            log.warning("MLflow no longer has the earlier run, so a new one is started: %s", error)
            return None
        return earlier.info.run_id, earlier.data.params

    def _begin(self, noted: Path, experiment: str, run: str) -> tuple[str, Container[str]]:
        id: str = self._client.create_run(experiment, run_name=run).info.run_id
        write_private(noted, id + "\n")
        return id, ()

    def write(self, step: int, figures: Mapping[str, float], histograms: Histograms) -> None:
        now = round(time.time() * 1000)
        named = {name.replace("@", "_at_"): value for name, value in figures.items()}  # MLflow refuses an @
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in named.items()])

    def show(self, step: int, name: str, samples: Sequence[Row]) -> None:
        self._client.log_text(self._id, as_markdown(samples), f"samples/{name}-{step:06d}.md")

    def close(self) -> None:
        self._client.set_terminated(self._id)


CLIENTS: dict[str, tuple[str, Callable[..., Client]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WeightsAndBiases),
    "mlflow": ("mlflow", MLflow),
}
"""Module and client of each sink by name. The name is also that of the extra."""


def check_sinks(names: Sequence[str]) -> None:
    """Raises: ConfigError for a sink whose package is not installed."""
    for name in names:
        module, _ = CLIENTS[name]
        found = importlib.util.find_spec(module)
        if found is None or found.origin is None:  # a plain folder is not the package; wandb creates one named wandb
            law = f"the package {module} is not installed"
            raise ConfigError(f"metrics.sinks.{name}", name, law, f"run `{install_command(name)}`")


class Sink:
    """One sink on its thread. `make` opens the client there, because that may take seconds or need the network."""

    def __init__(self, name: str, make: Callable[[], Client], samples: Samples = lambda row: ()) -> None:
        self.name = name
        self._samples = samples
        self._shows = True
        self.lost = 0
        """Number of rows that this sink lost."""
        self._queue: queue.Queue[Row | None] = queue.Queue(QUEUED_ROWS)
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"sink {name}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Queue a row. Never waits and never raises."""
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self.lost += 1
            if self.lost == 1:
                log.warning("%s is too slow, so it loses rows; metrics.jsonl has all of them", self.name)

    def end(self) -> None:
        """End the sink after the queued rows. If the queue is full, its oldest row is dropped."""
        while True:
            try:
                self._queue.put_nowait(None)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()
                    self.lost += 1

    def wait(self, seconds: float) -> None:
        """Wait until everything is written, for at most `seconds`."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("%s did not end in time, so its last rows may be missing", self.name)

    def _work(self, make: Callable[[], Client]) -> None:
        """Write queued rows. A row that cannot be written is lost. If the client cannot be opened, all rows are
        lost."""
        try:
            client = make()
        except BaseException:
            log.exception("%s cannot be opened; the run continues without it", self.name)
            self._drain()
            return
        for row in iter(self._queue.get, None):
            try:
                client.write(*figures_at(row), row.get(HISTOGRAMS) or {})
            except Exception:
                self.lost += 1
                if self.lost == 1:
                    log.exception("%s did not accept a row; the run continues", self.name)
            self._show(client, row)
        try:
            client.close()
        except Exception:
            log.exception("%s could not be closed", self.name)

    def _show(self, client: Client, row: Row) -> None:
        """Send the samples that belong to a row. A failure is reported once."""
        try:
            samples = [
                {name: visible(value) if isinstance(value, str) else value for name, value in sample.items()}
                for sample in self._samples(row)
            ]
            if samples:
                client.show(figures_at(row)[0], "validation" if "validation" in row else "train", samples)
        except Exception:
            if self._shows:
                self._shows = False
                log.exception("%s did not accept samples; the run continues", self.name)

    def _drain(self) -> None:
        for _ in iter(self._queue.get, None):
            self.lost += 1


class RowWriter:
    """Writes each row to `metrics.jsonl` first, then to the sinks."""

    def __init__(self, journal: Journal, sinks: Sequence[Sink]) -> None:
        self.path = journal.path
        self._journal = journal
        self.sinks = sinks

    def write(self, row: Row) -> None:
        self._journal.write(row)
        for sink in self.sinks:
            sink.write(row)

    def close(self) -> None:
        """End all sinks together, and wait a limited time for them."""
        self._journal.close()
        for sink in self.sinks:
            sink.end()
        last = time.monotonic() + CLOSE_TIMEOUT_S
        for sink in self.sinks:
            sink.wait(max(0.0, last - time.monotonic()))


def open_row_writer(
    directory: Path,
    config: Mapping[str, Any],
    chosen: Mapping[str, Mapping[str, Any]],
    samples: Samples = lambda row: (),
) -> RowWriter:
    """Open the journal and the sinks of a run in its directory. `chosen`: options of each sink by name."""
    journal = Journal(directory / "metrics.jsonl")
    sinks = [
        Sink(name, partial(CLIENTS[name][1], directory.name, directory, config, options), samples)
        for name, options in chosen.items()
    ]
    return RowWriter(journal, sinks)


# -- samples -----------------------------------------------------------------------------------------------------------


TEXTS = ("prompt", "response")


def as_markdown(samples: Sequence[Row]) -> str:
    """Samples as text. Prompts and responses are code blocks, so nothing in them is markup."""
    return "\n\n".join(_as_markdown(sample) for sample in samples)


def _as_markdown(sample: Row) -> str:
    known = {name: value for name, value in sample.items() if name not in TEXTS and value is not None}
    parts = [", ".join(f"{name}: {_cell(value)}" for name, value in known.items())]
    for name in TEXTS:
        lines = str(sample[name]).splitlines() or [""]
        parts += [f"**{name}**", "\n".join(f"    {line}" for line in lines)]
    return "\n\n".join(parts)


def _cell(value: Any) -> Any:
    """A value of one column; lists and mappings as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value


# -- figures of a row --------------------------------------------------------------------------------------------------


def figures_at(row: Row) -> tuple[int, dict[str, float]]:
    """The step and the figures of a row. Figures of a validation are under `validation/`, those of its sets under
    `validation/SET/`, at the train steps of its weights."""
    if "validation" in row:
        own = {name: value for name, value in row.items() if name not in ("validation", "sets")}
        return int(row["steps"]), figures_of({"validation": {**own, **row.get("sets", {})}})
    return int(row["step"]), figures_of(row)


def figures_of(row: Row) -> dict[str, float]:
    """The finite numbers of a row by name; nested ones as `outer/inner`."""
    numbers = {name: value for name, value in leaves(row).items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def leaves(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """All values that are not mappings, by path: `outer/inner`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{above}{name}"
        found |= leaves(value, f"{path}/") if isinstance(value, Mapping) else {path: value}
    return found
