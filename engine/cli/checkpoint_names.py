"""Checkpoints as a command names them: `RUN` (its newest), `RUN@step-20`, or `RUN@best`.

Called by `engine run --from`, `engine export` and `engine evaluate`. Reads the run's configuration, `metrics.jsonl` and
checkpoints, also while the run is running.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, counted
from engine.metrics.journal import validation_rows, value_in
from engine.states.checkpoints import best_of
from engine.storage.checkpoints import checkpoint_path, list_checkpoints, verify_checkpoint
from engine.storage.run_directory import RunDirectory, open_run

NEAREST = 5
"""Maximum number of checkpoints that an error names."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An undamaged checkpoint of a run."""

    path: Path
    steps: int
    """Train steps in it."""


def find_checkpoint(name: str, field: str = "RUN") -> Checkpoint:
    """The checkpoint that `name` names. `field`: the argument, for errors.

    Raises: `ConfigError` if the run or the checkpoint does not exist, or the checkpoint is damaged.
    """
    run, at, which = name.rpartition("@")
    if not at or (Path(name) / "schedule").is_dir():  # the path of a run may contain an @
        run, at, which = name, "", ""
    directory = open_run(run)
    saved = [steps for steps, _ in list_checkpoints(directory.checkpoints)]
    if not saved:
        every = _trainer_section(directory).get("checkpoint_every")
        later = f" yet; it writes one every {counted(every, 'train step')}" if every else ""
        fix = "give the command again after that" if every else "set trainer.checkpoint_every in that run"
        raise ConfigError(field, name, f"has no checkpoint{later}", fix)
    number = re.fullmatch(r"step-(\d+)", which)
    if at and which != "best" and number is None:
        fix = f"for example {run}@step-{saved[-1]}"
        raise ConfigError(field, name, "must be RUN, RUN@step-N or RUN@best", fix)
    steps = best_step(directory, field) if which == "best" else int(number[1]) if number else saved[-1]
    if steps not in saved:
        near = sorted(sorted(saved, key=lambda one: abs(one - steps))[:NEAREST])
        law = f"names a checkpoint that does not exist; {run} has {counted(len(saved), 'checkpoint')}"
        raise ConfigError(field, name, law, f"use one of the nearest: {', '.join(f'step-{one}' for one in near)}")
    path = checkpoint_path(directory.checkpoints, steps).resolve()
    verify_checkpoint(path)
    return Checkpoint(path, steps)


def best_step(directory: RunDirectory, field: str = "RUN") -> int:
    """Train steps in the best checkpoint by `trainer.keep_best`, of equal ones the oldest.

    Raises: `ConfigError` if the run keeps none, or no checkpoint was measured yet.
    """
    metric, mode = _asked(directory, field)
    ratings = {}
    for row in validation_rows(directory.metrics):
        value = value_in(row, metric)
        if row.get("outcome") == "reported" and value is not None:
            ratings[int(row["steps"])] = value
    best = best_of((steps for steps, _ in list_checkpoints(directory.checkpoints)), ratings, mode)
    if best < 0:
        raise ConfigError(field, directory.shown, f"has no checkpoint with a measured {metric}", "use RUN@step-N")
    return best


def _trainer_section(directory: RunDirectory) -> Mapping[str, Any]:
    from engine.config.loading import read_yaml

    tree = read_yaml(directory.config, "config") if directory.config.exists() else None
    return (tree.get("trainer") or {}) if isinstance(tree, dict) else {}


def _asked(directory: RunDirectory, field: str) -> tuple[str, str]:
    best = _trainer_section(directory).get("keep_best")
    if not best:
        law = "keeps no best checkpoint: trainer.keep_best is not set"
        raise ConfigError(field, directory.shown, law, "name a checkpoint by its steps: RUN@step-N")
    return str(best["metric"]), str(best.get("mode", "max"))
