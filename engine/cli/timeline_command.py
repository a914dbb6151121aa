"""`engine timeline`: writes the schedule of a run for other tools. Called by the command line."""

import argparse
from typing import Any

from engine.cli.recorded_run import history_of, output_path, takes_run, writable


def add_command(commands: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "timeline",
        help="export the schedule of a run to Perfetto or Parquet",
        description="Export what every slot and the trainer did, when and why. A running run is exported up to now.",
    )
    takes_run(parser)
    parser.add_argument("--format", choices=("perfetto", "parquet"), default="perfetto", help="default: perfetto")
    parser.add_argument("--out", metavar="FILE", help="the file (default: the run's name, in the working directory)")
    parser.set_defaults(run=write)


def write(arguments: argparse.Namespace) -> int:
    """`engine timeline RUN`. Raises: `ConfigError` for a run without a record and a file that cannot be written."""
    from engine.extras import require_packages
    from engine.inspect.timeline import timeline_of
    from engine.inspect.timeline_files import SUFFIXES, WRITERS

    if arguments.format == "parquet":
        require_packages("pyarrow")
    run, history = history_of(arguments)
    timeline = timeline_of(history)
    path = output_path(arguments, run, SUFFIXES[arguments.format])
    with writable("--out", path):
        WRITERS[arguments.format](timeline, path)
    print(f"{len(timeline.slices)} slices and {len(timeline.arrows)} arrows are in {path}")
    if arguments.format == "perfetto":
        print("open it at https://ui.perfetto.dev; the page does not upload it")
    return 0
