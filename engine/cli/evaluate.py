"""`engine evaluate`: measures a model on the validation sets of a configuration, without training.

Called by the CLI. It runs one validation with the workers of a run, in this process: a recorded run without a train
step, whose directory also has `results.json`. Must never write into a directory that has files.
"""

import argparse
import asyncio
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.json_output import print_json, takes_json
from engine.cli.recorded_run import writable
from engine.errors import ConfigError, EngineError
from engine.metrics.health import failed_responses
from engine.metrics.journal import FAILED_SHARE, metrics_in, plain
from engine.metrics.status import read_status
from engine.record.files import write_private
from engine.runtime.temporary_paths import shorten_temporary_paths

if TYPE_CHECKING:
    from rich.table import Table

    from engine.runtime.local.run import RunResult
    from engine.workers.plan import Plan

DONE = 0
EVALUATIONS = "evaluations"
"""Default parent of evaluations, beside that of the runs."""
RESULTS = "results.json"
SHOWN_EVERY_S = 1.0
FIX = "give a model in Hugging Face format, the name of one on the hub, a run, RUN@step-N or RUN@best"

# -- the command -------------------------------------------------------------------------------------------------------


def add_command(commands: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "evaluate",
        help="measure a model on validation sets, without training",
        description="Measure a model, or a checkpoint of a run, on the validation sets of a configuration.",
    )
    parser.add_argument(
        "model", metavar="MODEL|RUN", help="directory or hub name of a model; or a run: RUN, RUN@step-20, RUN@best"
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file (default: that of the run)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a field; may be repeated"
    )
    parser.add_argument("--to", metavar="D", help="directory of the results; must be new or empty")
    takes_json(parser)
    parser.set_defaults(run=evaluate)


def evaluate(arguments: argparse.Namespace) -> int:
    """`engine evaluate MODEL|RUN [CONFIG]`. Raises: `ConfigError` for a model, a run or a configuration that cannot be
    used, `EngineError` if the sets cannot be measured, `KeyboardInterrupt`."""
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    from engine.config.evaluation import load_evaluation
    from engine.plans.configured_plan import evaluation_plan
    from engine.storage import run_directory
    from engine.storage.samples import FOLDER, SampleFiles, lacks_pyarrow

    console = Console(highlight=False, stderr=bool(arguments.json))
    transformers_logging.disable_progress_bar()
    subject = subject_of(arguments.model)
    file = arguments.config or subject.config
    if file is None:
        law = "required by engine evaluate: only a run has a configuration of its own"
        raise ConfigError("CONFIG", None, law, "give a YAML file with data.validation_path")
    began = time.monotonic()
    with subject.model() as model:
        config = load_evaluation(file, arguments.set, model)
        target = _new_directory(arguments.to, Path(config.run.dir).parent / EVALUATIONS, file)
        with console.status("loading the model"):
            plan = evaluation_plan(config, model, target)
        try:
            result = _measured(plan, console)
        except BaseException as error:
            error.add_note(f"the files of the evaluation are in {run_directory.RunDirectory(target).shown}")
            raise
    row = result.validations[-1]
    if row["outcome"] != "reported":
        raise EngineError(
            f"the validation sets could not be measured: {row['reason']}; correct the cause and run the command again"
        )
    if lacks_pyarrow():
        console.print("no samples are kept: the package pyarrow is not installed")
    else:
        SampleFiles(target / FOLDER).merge(ended=True)
    results = results_of(row, subject, file, time.monotonic() - began)
    write_private(target / RESULTS, json.dumps(plain(results), indent=1) + "\n")
    if arguments.json:
        print_json("evaluate", run_directory.RunDirectory(target).shown, results)
        return DONE
    measured = f"{results['measured']} of {results['rows']} responses measured"
    console.print(f"{results['model']}: {measured}", soft_wrap=True, markup=False)
    for warning in failed_responses([row]):
        console.print(f"warning: {warning.text}", style="yellow", soft_wrap=True, markup=False)
    console.print(table_of(results))
    where = run_directory.RunDirectory(target).shown
    console.print(f"results: {where}/{RESULTS}; responses: engine samples {where} --validation", soft_wrap=True)
    return DONE


def _new_directory(chosen: str | None, parent: Path, config: str) -> Path:
    """Raises: `ConfigError` if it has files or cannot be created."""
    from engine.record.files import make_directory, make_run_directory
    from engine.storage.run_directory import claim_free, run_id

    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config).stem).strip("-.") or "evaluation"
    path = Path(chosen or parent)
    with writable("--to", path):
        path = Path(chosen) if chosen is not None else claim_free(parent / run_id(name))
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError("--to", str(path), "already has files", "use a new or empty directory")
        make_directory(path)
        make_run_directory(path)
    return path


# -- what is measured --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, or a checkpoint of a run."""

    name: str
    """As the user gave it."""
    path: str
    """Directory of the model or of the checkpoint, or a hub name."""
    steps: int | None = None
    """Train steps in the checkpoint; None: it is a model."""
    config: str | None = None
    """The configuration of the run, if it is the checkpoint of one."""

    @contextmanager
    def model(self) -> Iterator[str]:
        """The directory or hub name of the model. An adapter is merged into a temporary copy of its model."""
        from engine.training.model_checkpoint import export_model, has_only_adapter

        if self.steps is None or not has_only_adapter(Path(self.path)):
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="engine-evaluate-") as place:
            export_model(Path(self.path), Path(place) / "model", "float32", argument="TMPDIR")
            yield str(Path(place) / "model")


def subject_of(name: str) -> Subject:
    """Raises: `ConfigError` for a name of neither a model nor a checkpoint of a run."""
    from engine.cli.checkpoint_names import find_checkpoint
    from engine.config.inputs import check_model
    from engine.config.prompts import find_model

    at = "@" in name and not Path(name).exists()
    if at or any((place / "schedule").is_dir() for place in (Path(name), Path("runs") / name)):
        found = find_checkpoint(name)
        return Subject(name, str(found.path), found.steps, str(found.path.parents[1] / "config.yaml"))
    if Path(name).is_dir():
        check_model(Path(name))
        return Subject(name, str(Path(name).resolve()))
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError("MODEL", name, "is neither the directory of a model nor a run", FIX)
    find_model(name, "MODEL", FIX)
    return Subject(name, name)


# -- the measurement ---------------------------------------------------------------------------------------------------


def _measured(plan: "Plan", console: Any) -> "RunResult":
    """Run the validation to its end, and show its progress on a terminal. After an interrupt, it closes everything."""
    shorten_temporary_paths()
    with console.status("measuring") as spinner:
        return asyncio.run(_run(plan, lambda text: spinner.update(text or "measuring")))


async def _run(plan: "Plan", show: Callable[[str], None]) -> "RunResult":
    from dataclasses import replace

    from engine.runtime.local.run import LocalRun

    run = LocalRun(replace(plan, limits=replace(plan.limits, run_restarts=0)), lambda replica: True)
    task = asyncio.get_running_loop().create_task(run.to_end())
    try:
        while not task.done():
            await asyncio.wait([task], timeout=SHOWN_EVERY_S)
            show(read_status(run.parts.metrics).validation_now)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    return task.result()


# -- the results -------------------------------------------------------------------------------------------------------


def results_of(row: Mapping[str, Any], subject: Subject, config: str, seconds: float) -> dict[str, Any]:
    """The content of `results.json`. `row`: that of the validation, as in `metrics.jsonl`."""
    names = ("accuracy", "reward_mean", "rows", "measured", FAILED_SHARE, "reason", "sets")
    figures = {name: row[name] for name in names}
    return {"model": subject.name, "steps": subject.steps, "config": config, **figures, "seconds": seconds}


def table_of(results: Mapping[str, Any]) -> "Table":
    """The figures of each set, with their intervals."""
    from rich.table import Table

    from engine.cli.run_view import figure, percent

    table = Table()
    for name, justify in (("set", "left"), ("prompts", "right"), ("figure", "left"), ("value", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("95 % interval", justify="right")
    table.add_column("failed", justify="right")
    for name, figures in results["sets"].items():
        for metric, value, low, high in metrics_in(figures):
            interval = f"{figure(low, '.3f')} to {figure(high, '.3f')}"
            failed = percent(figures[FAILED_SHARE])
            table.add_row(name, str(figures["prompts"]), metric, figure(value, ".3f"), interval, failed)
    return table
