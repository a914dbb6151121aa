"""`engine timeline`: writes the schedule of a run for other tools. Called by the command line."""

import argparse
from typing import Any
from urllib.parse import urlsplit

from engine.cli.recorded_run import history_of, output_path, takes_run, writable
from engine.errors import ConfigError


def add_command(commands: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "timeline",
        help="export the schedule of a run to Perfetto, OpenTelemetry or Parquet",
        description="Export what every slot and the trainer did, when and why. A running run is exported up to now.",
    )
    takes_run(parser)
    parser.add_argument(
        "--format", choices=("perfetto", "otlp", "parquet"), default="perfetto", help="default: perfetto"
    )
    parser.add_argument("--out", metavar="FILE", help="the file (default: the run's name, in the working directory)")
    parser.add_argument(
        "--endpoint", metavar="URL", help="with --format otlp: send the spans to a collector, such as localhost:4318"
    )
    parser.set_defaults(run=write)


def write(arguments: argparse.Namespace) -> int:
    """`engine timeline RUN`. Raises: `ConfigError` for wrong arguments and a file that cannot be written."""
    from engine.extras import require_packages
    from engine.inspect.timeline import timeline_of
    from engine.inspect.timeline_files import PACKAGES, SUFFIXES, WRITERS, send_otlp

    if arguments.endpoint is not None and arguments.format != "otlp":
        raise ConfigError(
            "--endpoint", arguments.endpoint, "must be used together with --format otlp", "add --format otlp"
        )
    if arguments.endpoint is not None and arguments.out is not None:
        raise ConfigError(
            "--endpoint", arguments.endpoint, "cannot be used together with --out", "leave one of them out"
        )
    url = None if arguments.endpoint is None else _collector(arguments.endpoint)
    require_packages(PACKAGES[arguments.format])
    run, history = history_of(arguments)
    timeline = timeline_of(history)
    if url is not None:
        print(f"sent {send_otlp(timeline, url)} spans to {url}")
        return 0
    path = output_path(arguments, run, SUFFIXES[arguments.format])
    with writable("--out", path):
        WRITERS[arguments.format](timeline, path)
    print(f"{len(timeline.slices)} slices and {len(timeline.arrows)} arrows are in {path}")
    if arguments.format == "perfetto":
        print("open it at https://ui.perfetto.dev; the page does not upload it")
    return 0


def _collector(endpoint: str) -> str:
    """The address of a collector, without the path that all collectors have. Raises: `ConfigError`."""
    url = (endpoint if "://" in endpoint else f"http://{endpoint}").rstrip("/").removesuffix("/v1/traces")
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known:
        raise ConfigError("--endpoint", endpoint, "must be an address of HTTP", "use HOST:PORT, such as localhost:4318")
    return url
