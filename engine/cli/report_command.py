"""`engine report`: writes what a run did into one HTML file. Called by the command line."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engine.cli.advice_line import may_have_gpus
from engine.cli.recorded_run import history_of, output_path, takes_run, writable
from engine.errors import ConfigError
from engine.metrics.journal import step_rows

if TYPE_CHECKING:
    from engine.storage.run_directory import RunDirectory

SAMPLES_SHOWN = 8
"""Maximum number of responses of each chosen step."""


def add_command(commands: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="write the timeline, curves, idle time and samples of a run to one HTML file",
        description="Write one HTML file that needs no network. A running run is shown up to now.",
    )
    takes_run(parser)
    parser.add_argument("--out", metavar="FILE", help="the file (default: the run's name, in the working directory)")
    parser.add_argument(
        "--samples", metavar="STEPS", help="show responses of these train steps, such as 0,50,99 (default: 3 of them)"
    )
    parser.set_defaults(run=write)


def write(arguments: argparse.Namespace) -> int:
    """`engine report RUN`. Raises: `ConfigError` for wrong arguments and a file that cannot be written."""
    from engine.inspect.report import report_html
    from engine.inspect.timeline import timeline_of
    from engine.record.files import write_private
    from engine.simulation.advice import advise

    steps = None if arguments.samples is None else _steps(arguments.samples)
    run, history = history_of(arguments)
    advice = advise(history, gpus=may_have_gpus(history.config)).lines
    page = report_html(timeline_of(history), step_rows(run.metrics), _samples(run, steps), advice)
    path = output_path(arguments, run, ".html")
    with writable("--out", path):
        write_private(path, page)
    print(f"the report is {path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser")
    return 0


def _steps(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError("--samples", text, "must be numbers of train steps, separated by commas", "use 0,50,99")
    return [int(part) for part in parts]


def _samples(run: "RunDirectory", steps: list[int] | None) -> list[dict[str, Any]]:
    """The first responses of the chosen train steps; by default, of the first, the middle and the last one. Without
    a train step, those whose reward failed. Raises: `ConfigError` for a step without samples."""
    from engine.storage.samples import FAILED, TRAIN, SampleFiles, lacks_pyarrow

    if lacks_pyarrow() or not run.samples.is_dir():
        if steps is not None:
            law = "cannot be shown: this run has no samples"
            raise ConfigError("--samples", _listed(steps), law, "leave --samples out")
        return []
    files = SampleFiles(run.samples)
    known = files.numbers(TRAIN)
    if steps is None:
        steps = sorted({known[0], known[len(known) // 2], known[-1]}) if known else []
    missing = [step for step in steps if step not in known]
    if missing:
        law = f"names steps without samples: {_listed(missing)}"
        fix = f"use steps from {known[0]} to {known[-1]}" if known else "this run has none"
        raise ConfigError("--samples", _listed(steps), law, fix)
    return [row for step in steps for row in _first(files.rows(TRAIN, {step}))] or _first(files.rows(FAILED))


def _first(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row, _ in zip(rows, range(SAMPLES_SHOWN), strict=False)]


def _listed(steps: list[int]) -> str:
    return ",".join(map(str, steps))
