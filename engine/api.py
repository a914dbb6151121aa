"""`engine.train` and `engine.resume`: do from a script or a notebook what `engine run` and `engine resume` do.

`engine` exports these names. docs/API.md shows their use. Must not import Ray or torch before a run starts.
"""

import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from engine.config.paths import RUNS
from engine.errors import ConfigError, RunFailed, suggestion
from engine.extras import require_packages
from engine.record.files import write_private

if TYPE_CHECKING:
    from engine.cli.run import Mode
    from engine.config import Config
    from engine.environments import Environment
    from engine.protocols.named_code import Local
    from engine.storage.run_directory import RunDirectory

Function: TypeAlias = str | Callable[..., Any]
"""A function, or its name "module:function"."""
Part: TypeAlias = Function | tuple[Function, float] | Mapping[str, Any]
"""One of several reward functions: a function, (function, weight), or the fields of an entry of `reward.functions`
without its name."""
Reward: TypeAlias = Function | Sequence[Function] | Mapping[str, Part]
"""One reward function; a list of functions, whose own names are used; or a mapping from names to functions."""
Rows: TypeAlias = Iterable[Mapping[str, Any]]
"""Rows may also be given as a `pandas.DataFrame`, which is not of this type but is converted to such rows."""
NAMING = (
    "function", "class_name", "rollout", "reward", "answer", "tool_parser", "backend",
    "loss", "advantage", "correction", "measure",
)  # fmt: skip
"""The last part of the path of each field whose text names a function or a class."""
Data: TypeAlias = str | Path | Sequence[str | Path] | Rows


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run that has ended, and the results in its directory."""

    run_dir: Path
    outcome: str
    """`finished` or `stopped`; a failed run raises instead."""
    reason: str = ""
    """Why the run was stopped."""

    @property
    def metrics(self) -> Any:
        """A `pandas.DataFrame` with a row for each train step, as in metrics.jsonl (docs/MONITORING.md).

        Raises: `ModuleNotFoundError` without pandas; `steps` needs no package.
        """
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError as error:
            law = "run.metrics is a DataFrame and needs the package pandas: run `pip install pandas`, or use run.steps"
            raise ModuleNotFoundError(law, name="pandas") from error
        return pandas.DataFrame(self.steps)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """One row for each train step, as in metrics.jsonl."""
        from engine.metrics.journal import step_rows

        return step_rows(self._directory.metrics)

    @property
    def validations(self) -> list[dict[str, Any]]:
        """One row for each validation, as in metrics.jsonl."""
        from engine.metrics.journal import validation_rows

        return [*validation_rows(self._directory.metrics)]

    def samples(
        self, *, validation: bool = False, failed: bool = False, filtered: bool = False
    ) -> list[dict[str, Any]]:
        """The stored responses of train steps, of validations, those whose reward failed, or those of groups that the
        filter dropped. docs/INSPECT.md lists the columns."""
        from engine.storage.samples import FAILED, FILTERED, TRAIN, VALIDATION, SampleFiles

        kind = FAILED if failed else FILTERED if filtered else VALIDATION if validation else TRAIN
        return list(SampleFiles(self._directory.samples).rows(kind))

    @property
    def model_path(self) -> Path | None:
        """Directory of the newest checkpoint, which transformers can load; None if there is none."""
        from engine.storage.checkpoints import list_checkpoints

        found = list_checkpoints(self._directory.checkpoints)
        return found[-1][1] if found else None

    @property
    def _directory(self) -> "RunDirectory":
        from engine.storage.run_directory import RunDirectory

        return RunDirectory(self.run_dir)


def train(
    model: str | Path,
    data: Data | None,
    reward: Reward | None = None,
    *,
    environment: str | Callable[..., "Environment"] | None = None,
    validation_data: Data | None = None,
    max_steps: int | None = None,
    run_dir: str | Path | None = None,
    plain: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Train a model on Ray, show the progress, and return the run when it has ended.

    `model`: a directory in Hugging Face format, or a hub name. `data`, `validation_data`: a file, a directory or a
    glob, a list of these (docs/DATA.md), or rows or a DataFrame, which are written to a file under `run.dir`. `data` is
    None if `settings` have `data.sources`. `reward`: a function in any form of docs/REWARDS.md, a list of functions, or
    a mapping from names to functions, (function, weight) or settings; None if an environment or an agent returns one.
    `environment`: a class derived from `Environment`, or a function that returns one. Functions and classes may be
    those of this script or notebook, or names "module:function". `max_steps`: number of train steps, with as many
    passes over the data as they need; None: one pass. `run_dir`: directory of the run; None: `runs/<id>`. `plain`:
    print one line for each train step instead of the live view. `settings`: other fields of the configuration by their
    dotted names, for example `**{"scheduler.train_batch_size": 16}`. Ctrl-C drains the run; a second Ctrl-C stops it.

    Raises: `ConfigError` for an invalid argument or setting, before anything starts; `ModuleNotFoundError` with the
    command that installs what is missing; `RunFailed` if the run fails; and any exception that a bug of the engine
    raises.
    """
    from engine.cli import run as running
    from engine.storage import run_directory

    require_packages(*running.PACKAGES)
    if run_dir is not None:
        _require_path("run_dir", run_dir)
    made: list[Path] = []
    try:
        config, local = configured(model, data, reward, environment, validation_data, max_steps, settings, made)
        _check(config, local)
        running.check_start(config, local)
        running.join(config)
        directory = run_directory.create(
            config.run.dir, config.run.name, config_yaml=config.dump_yaml(), chosen=run_dir, argument="run_dir"
        )
    except BaseException:
        _remove(made)
        raise
    return _watch(config, directory, running.Mode(plain=plain, local=local))


def resume(
    run: str | Path | TrainedRun,
    reward: Reward | None = None,
    *,
    environment: str | Callable[..., "Environment"] | None = None,
    accept_data_change: bool = False,
    plain: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Continue an unfinished run from its newest state, as `engine resume` does, and return it when it has ended.

    `run`: its directory, its name under `runs/`, or a `TrainedRun`. `reward`, `environment`: the functions and classes
    that the run began with, if they belong to this script or notebook and cannot be imported. `settings`: fields that a
    resume may change, by their dotted names, for example `**{"run.max_steps": 100}`, which also extends a finished run.
    `accept_data_change`: continue with changed data, by the content of its rows.

    Raises: see `train`; also `RunFinished` if no step is left.
    """
    from engine.cli import run as running
    from engine.runtime.run_history import require_unfinished
    from engine.storage import run_directory

    require_packages(*running.PACKAGES)
    path = run.run_dir if isinstance(run, TrainedRun) else run
    _require_path("run", path)
    directory = run_directory.open_run(path)
    config, changed, local = resumption(directory, reward, environment, settings)
    require_unfinished(directory.path, changed)
    running.join(config)
    mode = running.Mode(plain=plain, resume=True, settings=changed, accept_data_change=accept_data_change, local=local)
    return _watch(config, directory, mode)


def resumption(
    directory: "RunDirectory", reward: Reward | None, environment: Any, settings: Mapping[str, Any]
) -> tuple["Config", Sequence[tuple[str, str]], "Local"]:
    """The configuration of a resumed run, the new settings of its scheduler, and the functions and classes that cannot
    be imported. Raises: `ConfigError`."""
    from engine.cli.run import resumption_of
    from engine.protocols.named_code import name_of

    functions = {field: value for field, value in settings.items() if callable(value)}
    others = {field: value for field, value in settings.items() if field not in functions}
    given = [f"{field}={json.dumps(_plain_value(value))}" for field, value in others.items()]
    config, changed = resumption_of(directory, directory.config, given)
    began = dict(_named_in(config.model_dump(mode="json")))
    local = {}
    for field, found in _named_in({**_reward_fields(reward, environment), **settings}):
        name, importable = (found, True) if isinstance(found, str) else name_of(found)
        known = began.get(field, "")
        moved = not isinstance(found, str) and name.rpartition(":")[2] == known.rpartition(":")[2]
        if name != known and not moved:  # a script may have become a module
            listed = ", ".join(spec for at, spec in began.items() if at.partition(".")[0] == field.partition(".")[0])
            law = f"is not the function or class that the run began with, {known or listed or None}"
            raise ConfigError(field, name, law, "give the one that it began with")
        if not isinstance(found, str) and (not importable or name != known):
            local[field] = found
    return config, changed, local


def _watch(config: "Config", directory: "RunDirectory", mode: "Mode") -> TrainedRun:
    """Show a run until it ends. Raises: see `train`."""
    from rich.console import Console

    from engine.cli import run as running
    from engine.cli.advice_line import first_advice
    from engine.cli.interrupts import Interrupts
    from engine.cli.run_view import summary

    console = Console(highlight=False)
    start_s = time.monotonic()
    console.print(f"run: {directory.shown}")
    # Install no signal handlers: a script or a notebook raises KeyboardInterrupt by itself.
    status, _ = running.watch(config, directory, console, Interrupts(), mode)
    if status is None or status.outcome not in ("finished", "stopped"):
        raise RunFailed(f"{'no status' if status is None else status.reason}; the run is in {directory.shown}")
    wall_s = time.monotonic() - start_s
    console.print(summary(status, where=directory.shown, wall_s=wall_s, advice=first_advice(directory.path)))
    return TrainedRun(directory.path, status.outcome, status.reason)


def configured(
    model: str | Path,
    data: Data | None,
    reward: Reward | None = None,
    environment: Any = None,
    validation_data: Data | None = None,
    max_steps: int | None = None,
    settings: Mapping[str, Any] | None = None,
    made: list[Path] | None = None,
) -> tuple["Config", "Local"]:
    """The configuration that the arguments of `train` describe, and the functions and classes that cannot be imported.
    The files and directories that are created for rows are added to `made`. Raises: `ConfigError`."""
    from engine.config.loading import parse_config
    from engine.protocols.named_code import name_of

    _require_path("model", model)
    settings, made = settings or {}, [] if made is None else made
    folder = Path(settings.get("run.dir", RUNS)) / ".made"
    arguments: dict[str, Any] = {"model.path": str(model), **_reward_fields(reward, environment)}
    if data is not None:
        arguments["data.path"] = _file_of(data, "data", folder, made)
    if validation_data is not None:
        arguments["data.validation_path"] = _file_of(validation_data, "validation_data", folder, made)
    if max_steps is not None:
        arguments["run.max_steps"] = max_steps
    for field in arguments:
        if field in settings:
            raise ConfigError(field, settings[field], "is also an argument of engine.train", "give only one of them")
    passes = {} if max_steps is None else {"run.epochs": None}
    fields = {**passes, **arguments, **settings}
    functions = {field: found for field, found in _named_in(fields) if not isinstance(found, str)}
    for field, found in functions.items():
        if "arguments" in field.split("."):
            law = "is a function or a class, which cannot be an argument: arguments are recorded"
            raise ConfigError(field, name_of(found)[0], law, "give its name, and import it in your function or class")
    config = parse_config(_tree(fields))
    return config, {field: found for field, found in functions.items() if not name_of(found)[1]}


def _reward_fields(reward: Any, environment: Any) -> dict[str, Any]:
    """The fields of the configuration that describe a reward and an environment. Raises: `ConfigError`."""
    fields: dict[str, Any] = {}
    if isinstance(reward, Mapping):
        fields["reward.functions"] = [{"name": name, **_part(part)} for name, part in reward.items()]
    elif isinstance(reward, Sequence) and not isinstance(reward, str):
        fields["reward.functions"] = [{"name": _part_name(function), "function": function} for function in reward]
    elif reward is None or isinstance(reward, str) or callable(reward):
        fields |= {} if reward is None else {"reward.function": reward}
    else:
        law = "must be a function, its name, a list of functions or a mapping"
        raise ConfigError("reward", reward, law, "pass the function itself")
    if environment is not None:
        fields["environment.class_name"] = environment
    return fields


def _require_path(argument: str, value: Any) -> None:
    if not isinstance(value, str | Path):
        raise ConfigError(argument, value, "must be a text or a path")


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, Mapping):
        return dict(part)
    if isinstance(part, tuple):
        if len(part) != 2:
            raise ConfigError("reward", part, "must be a function and its weight", "give (function, weight)")
        return {"function": part[0], "weight": part[1]}
    return {"function": part}


def _part_name(function: Function) -> str:
    """The name of a function without its module. Raises: `ConfigError` if this cannot be the name of a reward."""
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    name = re.split(r"[:.]", name)[-1].lower()
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        law = f"has a function without a name: {function!r:.80}"
        raise ConfigError("reward", "a list", law, "give a mapping from names to functions")
    return name


def _named_in(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """(field, function, class or name) of every function and class in settings, also of those named as
    `module:name`."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _named_in(inner, f"{field}.{name}" if field else name)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _named_in(inner, f"{field}.{index}")
    elif callable(value) or (isinstance(value, str) and field.rpartition(".")[2] in NAMING):
        yield field, value


def _tree(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values by dotted names to nested sections. Raises: `ConfigError`."""
    from engine.config.loading import nearest_key

    tree: dict[str, Any] = {}
    for field, value in fields.items():
        *sections, last = field.split(".")
        if not sections:
            example = "for example **{'scheduler.train_batch_size': 16}"
            nearest = suggestion(field, signature(train).parameters, nearest_key(field))
            law = "is neither an argument of engine.train nor the dotted name of a field of the configuration"
            raise ConfigError(field, value, law, example if isinstance(value, Mapping) else nearest)
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(field, value, f"{section} is given as a value too", "give only one of them")
        inner[last] = _plain_value(value)
    return tree


def _plain_value(value: Any) -> Any:
    """A value as in a configuration: paths as texts, functions and classes as their names."""
    from engine.protocols.named_code import name_of

    if isinstance(value, Mapping):
        return {name: _plain_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(inner) for inner in value]
    if callable(value):
        return name_of(value)[0]
    return str(value) if isinstance(value, Path) else value


def _file_of(data: Data, argument: str, folder: Path, made: list[Path]) -> str | list[str]:
    """Return paths unchanged. Rows are written to a file named after their content, so that a resumed run finds them.

    Raises: `ConfigError`.
    """
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, list | tuple) and data and all(isinstance(one, str | Path) for one in data):
        return [str(one) for one in data]
    pandas = sys.modules.get("pandas")
    rows: Any = data
    if pandas is not None and isinstance(rows, pandas.DataFrame):
        rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        fix = "give a list with one dictionary for each row"
        raise ConfigError(argument, rows, "must be a list of rows, a DataFrame or a path", fix)
    text = "".join(_line_of(row, f"{argument}[{number}]") for number, row in enumerate(rows))
    path = folder / f"rows-{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    made += [one for one in (*reversed(path.parents), path) if not one.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, text)
    return str(path)


def _line_of(row: Any, name: str) -> str:
    """A row as a line of JSON, with null for NaN, as in a DataFrame. `name`: of the row, for errors. Raises:
    `ConfigError` that names the row and column."""
    fix = "give dictionaries of texts, numbers and lists"
    if not isinstance(row, Mapping):
        raise ConfigError(name, row, "must be a dictionary", fix)
    present = {column: None if value != value else value for column, value in row.items() if type(value) is float}
    try:
        return json.dumps({**row, **present}, ensure_ascii=False, default=_as_list) + "\n"
    except (TypeError, ValueError):
        for column, value in row.items():
            try:
                json.dumps({column: value}, default=_as_list)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{name}[{column!r}]", value, f"is not a JSON value: {error}", fix) from error
        raise


def _as_list(value: Any) -> Any:
    """A numpy array as a list. Raises: `TypeError` for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        raise TypeError(f"{type(value).__name__} {value!r:.60} is not a JSON value")
    return value.tolist()


def _remove(made: Sequence[Path]) -> None:
    """Remove files, and directories that are empty, in the reverse order of their creation."""
    for path in reversed(made):
        with suppress(OSError):  # another run has put files there
            path.rmdir() if path.is_dir() else path.unlink()


def _check(config: "Config", local: "Local") -> None:
    """Run the checks of `engine run`, and print their warnings. Raises: `ConfigError`."""
    from engine.config import check_config
    from engine.config.inputs import check_inputs
    from engine.metrics.sinks import check_sinks

    check_sinks(list(config.metrics.sinks.chosen()))
    for line in (*check_config(config, local), *check_inputs(config, local=local)):
        if not line.startswith("ok:"):
            print(line)
