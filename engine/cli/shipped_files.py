"""The presets and dashboards that come with the engine, and `engine dashboards`, which writes the latter.

Called by the CLI. A wheel has them as data of this package (setup.py), a clone beside it. Must never write into a
directory that has files.
"""

import argparse
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

DONE = 0
PACKAGE = Path(__file__).resolve().parents[1]
BOARDS = ("prometheus.yml", "alerts.yml", "compose.yaml", "generated", "grafana")


def shipped_folder(name: str) -> Path:
    """`configs` or `dashboards`."""
    inside = PACKAGE / "shipped" / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def presets() -> dict[str, Path]:
    """The configurations that come with the engine, by name."""
    return {path.stem: path for path in sorted(shipped_folder("configs").glob("*.yaml"))}


@contextmanager
def new_directory(name: str, field: str, what: str) -> Iterator[Path]:
    """A directory for the body to fill. If the body raises, nothing of it is left.

    `field`: the argument that names it. `what`: what it will be, for the message. Raises: `ConfigError` if it
    has files, or cannot be created or written.
    """
    path = Path(name)
    try:
        if not name.strip():
            raise ValueError("it is empty")
        made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        used = any(path.iterdir())
    except (OSError, ValueError) as error:
        law = f"cannot be {what}: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(field, name, law, "give the path of a new directory, for example my-project") from None
    if used:
        raise ConfigError(field, name, "is a directory with files", "use a new or empty directory")
    try:
        yield path
    except BaseException as error:
        for left in [path] if made else path.iterdir():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        law, fix = f"cannot be written: {error.strerror or error}", "free some space, or give a path on another disk"
        raise ConfigError(field, name, law, fix) from None


def add_command(commands: Any) -> None:
    """Add `engine dashboards` to the parsers of the command line."""
    text = "write Grafana boards, alert rules, and the configuration of Prometheus"
    parser: argparse.ArgumentParser = commands.add_parser("dashboards", help=text, description=f"{text.capitalize()}.")
    parser.add_argument("directory", metavar="DIR", help="must be new or empty, and beside the directory runs")
    parser.set_defaults(run=write_dashboards)


def write_dashboards(arguments: argparse.Namespace) -> int:
    """`engine dashboards DIR`. Raises: `ConfigError` for a directory that cannot be used."""
    with new_directory(arguments.directory, "DIR", "the directory of dashboards") as directory:
        for name in BOARDS:
            source = shipped_folder("dashboards") / name
            copy = shutil.copytree if source.is_dir() else shutil.copyfile
            copy(source, directory / name)
    print(f"created {arguments.directory}: {', '.join(BOARDS)}")
    print(f"next:\n  prometheus --config.file={shlex.quote(str(directory / BOARDS[0]))}")
    return DONE
