"""`engine runs`, `show` and `compare`: a list of runs, one run on a page, and two runs side by side.

Called by the CLI. They read the directory of a run, also while it is running, and need neither Ray nor torch. A run
that cannot be read must never hide the others.
"""

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.interrupts import page_console
from engine.cli.json_output import print_json, takes_json
from engine.cli.run_state import (
    ENDED,
    FAILED,
    FINISHED,
    NOT_STARTED,
    STARTING,
    RunState,
    listed_state_of,
    not_begun,
    start_again,
    state_of,
)
from engine.errors import ConfigError, EngineError, RecordNotBegun, visible
from engine.errors.redaction import without_secrets
from engine.metrics.health import HealthFinding, failed_responses, findings
from engine.metrics.journal import last_row, rows_of, step_rows
from engine.storage.checkpoints import list_checkpoints
from engine.storage.run_directory import RunDirectory, open_run

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from engine.inspect.run_figures import Curve
    from engine.record import Record

PARENT = "runs"
DAMAGED = "damaged"
WIDEST_CURVE = 60
"""Maximum number of characters of a curve."""
NARROWEST_CURVE = 8
INDENT = 2
"""Of the parts of a page."""
NAMED = re.compile(r"(\d{8}-\d{6})-(.+)")


def add_commands(commands: Any) -> None:
    """Add the commands to the parsers of the command line."""
    runs: argparse.ArgumentParser = commands.add_parser("runs", help="list the runs in a directory, newest first")
    runs.add_argument("directory", nargs="?", default=PARENT, metavar="DIR", help=f"default: {PARENT}/")
    takes_json(runs)
    runs.set_defaults(run=_runs)
    show: argparse.ArgumentParser = commands.add_parser(
        "show", help="show configuration, figures, curves, checkpoints and the end of a run on one page"
    )
    show.add_argument("directory", metavar="RUN", help="the directory of a run, or its name under runs/")
    takes_json(show)
    show.set_defaults(run=_show)
    compare: argparse.ArgumentParser = commands.add_parser(
        "compare", help="compare configuration, figures, curves and schedules of two runs"
    )
    compare.add_argument("one", metavar="RUN", help="the directory of a run, or its name under runs/")
    compare.add_argument("other", metavar="RUN2", help="another run")
    takes_json(compare)
    compare.set_defaults(run=_compare)


class RunFiles:
    """What the files of one run say."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """The plain data of `config.yaml`, with the figures, not the policies, that were changed since; without it,
        that of the record, or its limits. Secrets are hidden. Raises: `EngineError`."""
        from engine.config.loading import read_yaml
        from engine.record import read

        path = self.directory.config
        tree = read_yaml(path, "RUN") if path.exists() else None
        try:
            record = read(self.directory.schedule)
        except RecordNotBegun:
            return without_secrets(tree) if isinstance(tree, dict) else {}
        if tree is None and not record.header.config:
            return {"limits": dict(record.header.limits)}
        tree = without_secrets(record.header.config if tree is None else tree)
        return _with_changes(tree, record) if isinstance(tree, dict) else {}

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of train steps, in order."""
        return step_rows(self.directory.metrics)

    @cached_property
    def validations(self) -> list[dict[str, Any]]:
        return [row for row in rows_of(self.directory.metrics) if "validation" in row]

    @property
    def health(self) -> list[HealthFinding]:
        return [*findings(self.rows), *failed_responses(self.validations)]

    @property
    def figures(self) -> dict[str, float | int | None]:
        """A figure is None if it is unknown. All are None if the run keeps no metrics."""
        from engine.inspect.run_figures import figures

        found = figures(self.rows, self.validations)
        return found if self.directory.metrics.exists() else dict.fromkeys(found)

    @property
    def curves(self) -> dict[str, "Curve"]:
        from engine.inspect.run_figures import curves

        return curves(self.rows)

    @property
    def model(self) -> str:
        section = self.configuration.get("model")
        section = section if isinstance(section, dict) else {}
        return str(section.get("path") or section.get("make") or "-")

    @property
    def started(self) -> str:
        """The time at which the directory was made, in UTC."""
        match = NAMED.fullmatch(self.directory.path.resolve().name)
        with suppress(ValueError):  # the name has digits that are no date
            return f"{datetime.strptime(match[1] if match else '', '%Y%m%d-%H%M%S'):%Y-%m-%d %H:%M}"
        made = (self.directory.config if self.directory.config.exists() else self.directory.schedule).stat().st_mtime
        return f"{datetime.fromtimestamp(made, UTC):%Y-%m-%d %H:%M}"


def _with_changes(tree: dict[str, Any], record: "Record") -> dict[str, Any]:
    """A configuration with the settings that a resume or `engine set` changed."""
    from engine.scheduling.settings import FIGURES
    from engine.states.limits import Limits

    try:
        before, now = Limits.from_plain(dict(record.header.limits)), record.limits()
    except (ConfigError, TypeError, ValueError):
        return tree  # another engine version, with other limits, wrote the record
    for path, field in FIGURES.items():
        value = attrgetter(field)(now)
        section, _, name = path.rpartition(".")
        if value != attrgetter(field)(before) and isinstance(tree.get(section, {}), dict):
            tree = {**tree, section: {**tree.get(section, {}), name: value}}
    return tree


# -- engine runs -------------------------------------------------------------------------------------------------------


def _runs(arguments: argparse.Namespace) -> int:
    """`engine runs [DIR]`. Raises: `ConfigError` if it is not a directory of runs."""
    parent = Path(arguments.directory)
    if not parent.is_dir():
        fix = "start a run with `engine run`, or give the directory with the runs"
        raise ConfigError("DIR", arguments.directory, "is not a directory", fix)
    if (parent / "schedule").is_dir():
        law = "is one run, but must be a directory of runs"
        raise ConfigError("DIR", arguments.directory, law, f"use `engine show {arguments.directory}`")
    rows = sorted(map(_listed, runs_in(parent)), key=lambda row: (row["started"], row["name"]), reverse=True)
    if arguments.json:
        print_json("runs", None, {"directory": arguments.directory, "runs": rows})
        return 0
    if not rows:
        print(f"{arguments.directory} has no run")
        return 0
    console = page_console()
    _print_list(rows, console)
    _print_line(console, f"more: engine show {parent / rows[0]['name']}")
    return 0


def runs_in(parent: Path) -> Iterator[RunDirectory]:
    """The runs under a directory, without links such as `latest`."""
    for path in sorted(parent.iterdir()):
        if (path / "schedule").is_dir() and not path.is_symlink():
            yield RunDirectory(path)


def _listed(directory: RunDirectory) -> dict[str, Any]:
    """The row of a run, also of one that cannot be read."""
    run = RunFiles(directory)
    first: Mapping[str, Any] = {}
    last: Mapping[str, Any] = {}
    try:
        first = next((row for row in rows_of(directory.metrics) if "step" in row), {})
        last = last_row(directory.metrics, "step") or first
        state, model, most = listed_state_of(directory), run.model, _section(run, "run").get("max_steps")
    except EngineError as error:
        state, model, most = RunState(FAILED, f"{DAMAGED}: {error}"), "-", None
    trained = int(last["step"]) + 1 if last else 0
    return {
        "name": directory.path.name,
        "state": state.word,
        "model": model,
        "steps": trained if directory.metrics.exists() else None,
        "max_steps": most,
        "reward_first": first.get("reward_mean"),
        "reward_last": last.get("reward_mean"),
        "groups_failed": last.get("groups_failed"),
        "started": run.started,
        "seconds": last.get("elapsed_s"),
        "why": state.text,
    }


def _section(run: RunFiles, name: str) -> Mapping[str, Any]:
    section = run.configuration.get(name)
    return section if isinstance(section, dict) else {}


STYLES = {"finished": "green", "running": "cyan", "waiting": "yellow", "failed": "red", DAMAGED: "red"}


def _print_list(rows: Sequence[Mapping[str, Any]], console: "Console") -> None:
    """For each run a line with its figures, then its model, its time and why it ended."""
    from rich.text import Text

    from engine.cli.run_view import clock, figure

    names = [visible(row["name"]) for row in rows]
    wide = max(map(len, names))
    head = f"{'run':<{wide}}  {'state':<11}  {'steps':>9}  {'reward':>14}  {'time':>7}"
    console.print(Text(head, style="dim"), soft_wrap=True)
    for name, row in zip(names, rows, strict=True):
        steps = figure(row["steps"], "d") + (f"/{row['max_steps']}" if row["max_steps"] is not None else "")
        reward = f"{figure(row['reward_first'], '.3f')} → {figure(row['reward_last'], '.3f')}"
        line = Text(f"{name:<{wide}}  ", style="bold")
        line.append(f"{row['state']:<11}  ", style=f"not bold {STYLES.get(row['state'], 'yellow')}")
        line.append(f"{steps:>9}  {reward:>14}  {clock(row['seconds']):>7}", style="not bold")
        if row["groups_failed"]:
            line.append(f"  last reward without {row['groups_failed']} failed", style="not bold yellow")
        console.print(line, soft_wrap=True)
        why = row["why"].partition(": ")[2] or row["why"]
        about = f"  {_short(row['model'])}, started {row['started']} UTC: {why}"
        console.print(Text(visible(about), style="dim"), soft_wrap=True)


def _short(model: str) -> str:
    """The last part of a path."""
    return Path(model).name if model.startswith("/") else model


# -- engine show -------------------------------------------------------------------------------------------------------


def _show(arguments: argparse.Namespace) -> int:
    """`engine show RUN`. Raises: `ConfigError` if there is no run, `RecordError` if its record is damaged."""
    from engine.config.differences import changed_fields

    run = RunFiles(open_run(arguments.directory))
    state = state_of(run.directory)
    changed = changed_fields(run.configuration)
    checkpoints = [steps for steps, _ in list_checkpoints(run.directory.checkpoints)]
    commands = next_commands(run, state, checkpoints)
    if arguments.json:
        fields = {
            "state": state.word, "why": state.text, "model": run.model, "started": run.started,
            "health": {one.check: one.text for one in run.health},
            "configuration": {path: {"value": value, "default": default} for path, (value, default) in changed.items()},
            "figures": run.figures, "curves": _plain_curves(run), "validations": run.validations,
            "checkpoints": checkpoints, "next": commands,
        }  # fmt: skip
        print_json("show", run.directory.shown, fields)
        return 0
    from rich.text import Text

    console = page_console()
    style = STYLES.get(state.word, "yellow")
    console.print(Text(visible(run.directory.shown), style="bold").append(f"  {_about(run)}", "dim"))
    console.print(Text(visible(state.text), style=style))
    for finding in run.health:
        console.print(Text(visible(finding.text), style="yellow"))
    _print_part(console, "figures", _figure_table([run]))
    _print_part(console, "curves over train steps", _curve_table([run], console.width))
    _print_part(console, "configuration, where it differs from the defaults", _fields_table(changed, "run", "default"))
    if checkpoints:
        console.print(Text("\ncheckpoints", style="bold"))
        _print_line(console, "  " + ", ".join(f"step-{steps}" for steps in checkpoints))
    console.print(Text("\nnext", style="bold"))
    for command in commands:
        _print_line(console, f"  {command}")
    return 0


def next_commands(run: RunFiles, state: RunState, checkpoints: Sequence[int]) -> list[str]:
    """What a user may type next."""
    from engine.cli.recorded_run import names_extensions

    shown = shlex.quote(run.directory.shown)
    if state.code == STARTING:
        return [f"engine status {shown}"]
    if state.code == NOT_STARTED:
        return [start_again(run.directory)]
    named = " --extensions" if names_extensions(run.directory.path) else ""
    if state.is_running:
        return [f"engine {command}" for command in (f"top {shown}", f"waits {shown}", f"explain {shown}{named}")]
    found = [f"engine resume {shown}"] if state.code in (ENDED, FAILED) else []
    found += [f"engine samples {shown}", *(f"engine {command} {shown}{named}" for command in REPLAYING)]
    if checkpoints:
        newest = shlex.quote(f"{run.directory.shown}@step-{checkpoints[-1]}")
        found.append(f"engine evaluate {newest}")
        if state.code == FINISHED:
            found.append(f"engine export {newest} --to MODEL")
    return found


REPLAYING = ("explain", "report", "debug")
"""Commands that need the extensions of a run."""


def _plain_curves(run: RunFiles) -> dict[str, Any]:
    return {label: {"steps": curve.steps, "values": curve.values} for label, curve in run.curves.items()}


# -- engine compare ----------------------------------------------------------------------------------------------------


def _compare(arguments: argparse.Namespace) -> int:
    """`engine compare RUN1 RUN2`. Raises: `ConfigError` if a run does not exist, `RecordError` if a record cannot be
    read."""
    from engine.config.differences import differing_fields
    from engine.inspect import open_record
    from engine.inspect.schedule_difference import schedule_difference

    runs = [RunFiles(open_run(name)) for name in (arguments.one, arguments.other)]
    differing = differing_fields(*(run.configuration for run in runs))
    for run in runs:
        if not run.directory.has_record:
            raise not_begun(run.directory)
    parting = schedule_difference(*(open_record(run.directory.path) for run in runs))
    if arguments.json:
        fields = {
            "other": runs[1].directory.shown,
            "configuration": {path: list(pair) for path, pair in differing.items()},
            "figures": [run.figures for run in runs],
            "curves": [_plain_curves(run) for run in runs],
            "schedule": None if parting is None else parting.to_plain(),
        }
        print_json("compare", runs[0].directory.shown, fields)
        return 0
    from rich.text import Text

    console = page_console()
    for letter, run in zip("AB", runs, strict=True):
        about = f"{visible(run.directory.shown)}  {_about(run)}"
        console.print(Text(f"{letter}  ", style="bold").append(about, style="not bold"))
    _print_part(console, "configuration, where it differs", _fields_table(differing, "A", "B"))
    _print_part(console, "figures", _figure_table(runs))
    _print_part(console, "curves over train steps, on one scale", _curve_table(runs, console.width))
    console.print(Text("\nschedule", style="bold"))
    if parting is None:
        console.print("  the schedules are the same in every tick")
        return 0
    console.print(Text(f"  {parting}"))
    for letter, text in zip("AB", parting.texts, strict=True):
        console.print(Text(f"  {letter}: {visible(text) or 'nothing'}"))
    return 0


# -- parts of a page ---------------------------------------------------------------------------------------------------


def _print_line(console: "Console", text: str) -> None:
    """Print a line that a user may copy: never wrapped, and not markup."""
    from rich.text import Text

    console.print(Text(visible(text)), soft_wrap=True)


def _about(run: RunFiles) -> str:
    return visible(f"{run.model}, started {run.started} UTC")


def _print_part(console: "Console", title: str, part: "RenderableType | None") -> None:
    from rich.padding import Padding
    from rich.text import Text

    if part is not None:
        console.print(Text(f"\n{title}", style="bold"))
        console.print(Padding(part, (0, 0, 0, INDENT)))


def _grid(*columns: str, right: Sequence[str] = ()) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=any(columns), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _fields_table(pairs: Mapping[str, tuple[Any, Any]], one: str, other: str) -> "Table | None":
    from rich.text import Text

    if not pairs:
        return _grid("nothing differs")
    table = _grid("field", one, other)
    for path, values in pairs.items():
        table.add_row(Text(path), *(Text(visible(_value(value))) for value in values))
    return table


def _value(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _figure_table(runs: Sequence[RunFiles]) -> "Table | None":
    """The figures of one run, or of two with their difference; None if no figure is known."""
    found = [run.figures for run in runs]
    two = len(runs) == 2
    table = _grid("figure", *("A", "B", "B - A") if two else ("value",), right=("A", "B", "B - A", "value"))
    for name in found[0]:
        values = [figures[name] for figures in found]
        if any(value is not None for value in values):
            known = [value for value in values if value is not None]
            change = [_number(known[1] - known[0])] if len(known) == 2 else [""] if two else []
            table.add_row(name.replace("_", " "), *map(_number, values), *change)
    return table if table.row_count else None


def _curve_table(runs: Sequence[RunFiles], width: int) -> "Table | None":
    """A line for each curve of each run; the lines of a figure have one scale and the same steps."""
    from engine.cli.run_view import bars

    found = [run.curves for run in runs]
    labels = list(dict.fromkeys(label for curves in found for label in curves))
    steps = [step for curves in found for curve in curves.values() for step in curve.steps]
    if not steps:
        return None
    heads = ("figure", *[""] * (len(runs) > 1), "first", "last", "lowest", "highest")
    lines: list[tuple[list[str], Curve | None]] = []
    for label in labels:
        for place, (letter, curves) in enumerate(zip("AB", found, strict=False)):
            curve = curves.get(label)
            ends: list[float | None] = [None] * 4
            if curve is not None:
                ends = [curve.values[0], curve.values[-1], min(curve.values), max(curve.values)]
            own = [letter] if len(runs) > 1 else []
            lines.append(([label if place == 0 else "", *own, *map(_number, ends)], curve))
    beside = sum(2 + max(map(len, column)) for column in zip(heads, *(cells for cells, _ in lines), strict=True))
    room = max(NARROWEST_CURVE, min(WIDEST_CURVE, width - INDENT - beside))
    table = _grid(*heads, "curve", right=("first", "last", "lowest", "highest"))
    for place, (cells, curve) in enumerate(lines):
        label = labels[place // len(runs)]
        values = [value for curves in found if label in curves for value in curves[label].values]
        drawn = curve.binned(room, min(steps), max(steps)) if curve is not None else []
        table.add_row(*cells, bars(drawn, min(values), max(values)))
    return table


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
