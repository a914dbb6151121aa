"""Paths in a configuration, made absolute when it is read: every process and a later resume then find the same files.

Called by `loading.py`. A path in a file is relative to the file's directory. One given with `--set` or by a Python
program is relative to the working directory. Reads only whether a path exists.
"""

import os
from collections.abc import Iterator
from typing import Any

from engine.tasks.hub_files import HUB

PATHS = {
    "run.dir": "path",
    "run.code_dir": "path",
    "model.path": "path or hub name",
    "model.checkpoint_path": "path",
    "model.warm_start.path": "path or files on the hub",
    "data.path": "path or files on the hub",
    "data.sources.path": "path or files on the hub",
    "data.validation_path": "path or files on the hub",
    "validation.sets.path": "path or files on the hub",
    "rollout.weights_dir": "path",
    "trainer.reference_path": "path or hub name",
    "metrics.sinks.tensorboard.dir": "path",
    "metrics.sinks.mlflow.uri": "path or address",
    "cluster.runtime_env.working_dir": "path or address",
    "cluster.runtime_env.py_modules": "path or address",
}
"""What each field with a path may contain."""
RUNS = "runs"
"""The default of `run.dir`: a directory in the working directory, where commands look for a run by its name."""


def absolute_paths(value: Any, base: str, field: str = "") -> Any:
    """Return `value`, the plain data of a field or section, with absolute paths. Other data stays as it is."""
    if isinstance(value, dict):
        above = f"{field}." if field else ""
        return {key: absolute_paths(inner, base, f"{above}{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [absolute_paths(inner, base, field) for inner in value]
    if field not in PATHS or not isinstance(value, str) or not value:
        return value
    place = os.path.abspath(os.path.join(base, os.path.expanduser(value)))
    if PATHS[field] == "path or hub name" and _may_be_hub_name(value) and not os.path.exists(place):
        return value
    if PATHS[field] == "path or files on the hub" and value.startswith(HUB):
        return value
    if PATHS[field] == "path or address" and ":" in value:
        return value
    return place


def paths_in(value: Any, field: str = "") -> Iterator[str]:
    """Every path in a configuration, given as plain data; includes hub names and addresses."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths_in(inner, f"{field}.{key}" if field else key)
    elif isinstance(value, list):
        for inner in value:
            yield from paths_in(inner, field)
    elif field in PATHS:
        yield from [value] if value else []


def _may_be_hub_name(value: str) -> bool:
    """`name` or `owner/name`."""
    return not value.startswith(("/", "./", "../", "~")) and value not in (".", "..") and value.count("/") < 2


def moved(field: str, was: Any, now: Any) -> bool:
    """Whether a path changed because its file or directory was moved: only the new path exists."""
    texts = isinstance(was, str) and isinstance(now, str)
    return field in PATHS and texts and not os.path.exists(was) and os.path.exists(now)
