"""The directory of a run, with its configuration, record, metrics, trajectories and checkpoints.

Called by the CLI. `runs/<id>/` contains `config.yaml`, `schedule/`, `metrics.jsonl`, `checkpoints/`, `trajectories/`
and `samples/`; the link `runs/latest` points to the newest run. It must never overwrite files of an earlier run. Only
the user who started the run can read its directory.
"""

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine.errors import ConfigError, suggestion
from engine.record.files import is_locked, make_directory, make_run_directory, replace_whole
from engine.record.segment_log import has_segments
from engine.storage.input_files import INPUTS
from engine.storage.samples import FOLDER


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def schedule(self) -> Path:
        return self.path / "schedule"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / FOLDER

    @property
    def has_record(self) -> bool:
        """Whether the run has begun. Raises: `RecordError` if its record cannot be read."""
        return has_segments(self.schedule)

    @property
    def is_prepared(self) -> bool | None:
        """Whether a process prepares or runs it (`cli.run.watch`); None if the file system has no locks."""
        return is_locked(self.path)

    @property
    def is_running(self) -> bool:
        """Whether a process writes its record, or has begun to resume it. False if the file system has no locks."""
        return bool(is_locked(self.schedule) or (self.has_record and self.is_prepared))

    @property
    def shown(self) -> str:
        """The path for messages: relative if the run is below the working directory."""
        try:
            near = self.path.resolve().relative_to(Path.cwd().resolve())
        except ValueError:
            return str(self.path)
        return str(near)


def run_id(name: str, moment: datetime | None = None) -> str:
    """`<UTC time>-<name>`, so that names sort by time: `20260131-235959-quickstart`."""
    moment = moment or datetime.now(UTC)
    return f"{moment.astimezone(UTC):%Y%m%d-%H%M%S}-{name}"


def create(
    parent: str | Path,
    name: str,
    *,
    config_yaml: str,
    chosen: str | Path | None = None,
    argument: str = "--run-dir",
) -> RunDirectory:
    """Create the directory of a new run, write its resolved configuration, and let `<parent>/latest` point to it.

    `chosen`: a path from the user, instead of `<parent>/<id>`. It may exist, but must be empty, or have only what this
    function wrote for a run whose process ended before the first event. `argument`: what the user calls it, for errors.
    Raises: `ConfigError` if it is not empty or cannot be written.
    """
    field, path = (argument, Path(chosen)) if chosen is not None else ("run.dir", Path(parent) / run_id(name))
    try:
        path = _claim(path, argument) if chosen is not None else claim_free(path)
        directory = RunDirectory(path)
        make_run_directory(path)
        make_directory(directory.schedule)
        make_directory(directory.checkpoints)
        with replace_whole(directory.config) as file:
            file.write(config_yaml.encode())
        _point_latest(Path(parent), path)
    except OSError as error:
        raise ConfigError(field, str(path), f"cannot be written: {error.strerror or error}") from None
    return directory


def open_run(run: str | Path, parent: str | Path = "runs") -> RunDirectory:
    """The directory of an existing run. `run` is a path, or a name under `parent` such as `latest`. A name with `..` is
    used only as a path.

    Raises: `ConfigError` if there is no run.
    """
    named = [Path(parent) / run] if ".." not in Path(run).parts else []
    for path in (Path(run), *named):
        if path.is_dir():
            directory = RunDirectory(path.parent if path.name == "schedule" else path)
            if not directory.schedule.is_dir():
                raise ConfigError("RUN", str(run), "has no schedule/ directory", "give the directory of a run")
            return directory
    if Path(run).exists():
        raise ConfigError("RUN", str(run), "is not a directory", "give the directory of a run")
    latest, others = Path(parent) / "latest", sorted(path.parent for path in Path(parent).glob("*/schedule"))
    if latest.is_dir():
        fix = f"the newest run is {latest}"
    elif others:
        fix = f"the last run by name in {Path(parent)}/ is {others[-1]}"
    else:
        fix = f"{Path(parent)}/ contains no run; give the directory of a run, or start one with `engine run`"
    raise ConfigError("RUN", str(run), "does not exist", suggestion(str(run), [path.name for path in others], fix))


def runs_named(parent: str | Path, name: str) -> list[RunDirectory]:
    """The runs under `parent` with this name, newest first."""
    pattern = re.compile(rf"(\d{{8}}-\d{{6}})-{re.escape(name)}(?:-(\d+))?")
    found = []
    for path in Path(parent).iterdir() if Path(parent).is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and (path / "schedule").is_dir() and not path.is_symlink():
            found.append((match[1], int(match[2] or 1), path))
    return [RunDirectory(path) for _, _, path in sorted(found, reverse=True)]


def _claim(path: Path, argument: str) -> Path:
    make_directory(path)
    run, found = RunDirectory(path), sorted(inside.name for inside in path.iterdir())
    made = [name for name in found if name != INPUTS]
    abandoned = made == [run.checkpoints.name, run.config.name, run.schedule.name] and not run.has_record
    if found and not (abandoned and run.is_prepared is False):
        law = "already holds a run" if "schedule" in found else f"is not empty: it has {found[0]}"
        raise ConfigError(argument, str(path), law, "a run needs a new or empty directory")
    return path


def claim_free(path: Path) -> Path:
    """Create the path; if it exists because two runs started in the same second, append a number to it."""
    candidate, number = path, 2
    while True:
        try:
            make_directory(candidate, exist_ok=False)
            return candidate
        except FileExistsError:
            candidate = path.with_name(f"{path.name}-{number}")
            number += 1


def leave_latest(parent: Path, path: Path) -> None:
    """If `<parent>/latest` points to this run, which did not start, let it point to the newest one that did, if any."""
    latest = parent / "latest"
    if not latest.is_symlink() or latest.resolve() != path.resolve():
        return
    begun = [run for run in map(RunDirectory, parent.iterdir()) if not run.path.is_symlink() and run.has_record]
    if begun:
        _point_latest(parent, max(begun, key=lambda run: run.schedule.stat().st_mtime).path)
    else:
        latest.unlink()


def _point_latest(parent: Path, path: Path) -> None:
    """Let `<parent>/latest` point to the run. This is atomic: the link always points to the old run or the new one."""
    parent.mkdir(parents=True, exist_ok=True)
    latest = parent / "latest"
    if latest.exists() and not latest.is_symlink():
        return
    target = path.name if path.parent.resolve() == parent.resolve() else str(path.resolve())
    temporary = parent / f".latest-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target, target_is_directory=True)
    temporary.replace(latest)
