"""What commands that read the record of a run have in common: their arguments, the history, and errors about them."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.run_state import listed_state_of, not_begun
from engine.errors import ConfigError, RecordError, RecordNotBegun
from engine.runtime.garbage_collection import collect_rarely

if TYPE_CHECKING:
    from engine.metrics.history import History
    from engine.storage.run_directory import RunDirectory


HISTORY_OBJECTS = 1_000_000
"""New objects after which a command that reads a history collects garbage: a history has millions and no cycles."""


RUN_OR_FILE = "the directory of a run, its name under runs/, or a bug file"


def takes_run(parser: argparse.ArgumentParser, what: str = "the directory of a run, or its name under runs/") -> None:
    """Add the arguments that name a run and load its policies and states."""
    parser.add_argument("directory", metavar="RUN", help=what)
    parser.add_argument(
        "--extensions", action="store_true", help="import the extensions named in the run's configuration"
    )


def run_or_bug_file(name: str) -> "RunDirectory":
    """The run that a command was given, or a bug file in its place. Raises: `ConfigError` if there is neither."""
    from engine.storage.run_directory import RunDirectory, open_run

    path = Path(name)
    return RunDirectory(path) if path.is_file() else open_run(name)


def history_of(arguments: argparse.Namespace) -> "tuple[RunDirectory, History]":
    """The history of the run that the arguments name. Its record does not say that its processes were killed; its lock
    does. Raises: `ConfigError`, `RecordError`."""
    from engine.inspect.history_reader import read_history
    from engine.metrics.history import RUNNING
    from engine.storage.run_directory import open_run

    run = open_run(arguments.directory)
    collect_rarely(HISTORY_OBJECTS)
    with record_errors(run, extensions=arguments.extensions):
        history = read_history(run.path)
        if history.outcome == RUNNING and not (state := listed_state_of(run)).is_running:
            history = replace(history, outcome=state.word, reason=state.reason)
        return run, history


@contextmanager
def record_errors(run: "RunDirectory", *, extensions: bool) -> Iterator[None]:
    """Load extensions, and say what to do if the record has no event yet or names policies that are not loaded."""
    try:
        load_recorded_extensions(run.path, named=extensions)
        yield
    except RecordNotBegun:
        raise not_begun(run) from None
    except RecordError as error:
        unknown = isinstance(error.__cause__, ConfigError)  # a name that is not registered in this process
        if unknown and not extensions and names_extensions(run.path):
            error.add_note("the run's configuration names extensions: use --extensions to import them")
        raise


def load_recorded_extensions(directory: Path, *, named: bool) -> None:
    """Load the extensions of installed packages. With `named`, also import those that the record names. This is not the
    default, because an import runs code."""
    from engine.config import load_extensions, load_extensions_of

    load_extensions()
    if named:
        load_extensions_of(recorded_config(directory))


def recorded_config(path: Path) -> dict[str, Any]:
    """The configuration in the record of a run's directory, or in a bug file. Raises: `RecordError`."""
    from engine.record import read
    from engine.record.bug_file import read_bug_file

    record = read_bug_file(path).record(str(path)) if path.is_file() else read(path / "schedule")
    return record.header.config


def names_extensions(path: Path) -> bool:
    """Whether the recorded configuration names the user's extensions. Raises: `RecordError`."""
    return bool(recorded_config(path).get("run", {}).get("extensions"))


def output_path(arguments: argparse.Namespace, run: "RunDirectory", suffix: str) -> Path:
    """The file that `--out` names; by default, one with the name of the run's directory, in the working directory."""
    return Path(arguments.out or f"{run.path.resolve().name}{suffix}")


@contextmanager
def writable(option: str, path: Path) -> Iterator[None]:
    """Raises: `ConfigError` if the file or directory cannot be written."""
    try:
        yield
    except OSError as error:
        law = f"cannot be written: {error.strerror or error}"
        raise ConfigError(option, str(path), law, f"give another path with {option}") from None
