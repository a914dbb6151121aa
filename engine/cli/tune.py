"""`engine tune`: searches the settings that train the most groups per second, in simulated runs.

Called by the command line. `--verify` is the only part that starts real runs.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from engine.cli.interrupts import page_console
from engine.cli.json_output import print_json, takes_json
from engine.cli.recorded_run import history_of, writable
from engine.cli.what_if import STEPS, calibration_lines, notes_of_change, opened
from engine.errors import ConfigError, visible
from engine.metrics.journal import step_rows

if TYPE_CHECKING:
    from engine.config.workload import Workload
    from engine.simulation.tuning import Search, Tried
    from engine.simulation.what_if import Calibration

FEWEST_VERIFIED = 16
"""Train steps of a real run with which something can be compared."""


def add_command(commands: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="find faster settings of a run or a workload, in simulated runs",
        description="Find the settings of the schedule that train the most groups per second within a staleness "
        "bound. Replicas, ranks and over-sampling change only if their bound is given. Ctrl-C keeps the best so far.",
    )
    parser.add_argument(
        "directory", metavar="RUN|WORKLOAD", help="the directory of a run, its name, or a workload file"
    )
    parser.add_argument("--extensions", action="store_true", help="import the extensions named in the configuration")
    for option, least, text in (
        ("--staleness", 0, "largest S to try (default: 4, or that of the run if it is larger)"),
        ("--gpus", 1, "GPUs, or processes on CPUs, to divide among replicas and trainer ranks"),
        ("--most-replicas", 1, "largest number of replicas to try"),
        ("--trials", 1, "settings to try in the search (default: so many that two cores take about a minute)"),
        ("--seed", 0, "seed of the search (default: 0)"),
        ("--verify", 1, "also run the original and the best N settings for real (default: 3), and compare"),
        ("--verify-steps", FEWEST_VERIFIED, "train steps of these runs (default: 64)"),
    ):
        optional: dict[str, Any] = {"nargs": "?", "const": 3} if option == "--verify" else {}
        default = {"--seed": 0, "--verify-steps": 64}.get(option)
        parser.add_argument(option, type=_at_least(least), metavar="N", help=text, default=default, **optional)
    parser.add_argument(
        "--most-over-sample", type=float, metavar="X", help="largest over_sample; surplus groups are lost"
    )
    parser.add_argument("--out", default="tuned.yaml", metavar="FILE", help="the configuration (default: tuned.yaml)")
    parser.add_argument("--picture", metavar="FILE", help="draw groups per second over staleness as SVG")
    takes_json(parser)
    parser.set_defaults(run=tune)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, {least} or more")
        return int(text)

    return number


class TuningSubject(NamedTuple):
    """What is tuned."""

    shown: str
    tree: Mapping[str, Any]
    """The plain data of its configuration."""
    workload: "Callable[[int], Workload]"
    """For a seed."""
    calibration: "Calibration | None" = None
    """None: it is a workload file."""


def subject_of(arguments: argparse.Namespace) -> TuningSubject:
    """The run or workload that the arguments name. Raises: `ConfigError`, `RecordError`."""
    from engine.config.loading import apply_overrides
    from engine.simulation.schedule import recorded_schedule
    from engine.simulation.what_if import calibrated

    path = Path(arguments.directory)
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        workload, schedule = opened(path, None, [])
        return TuningSubject(str(path), schedule.config, lambda seed: workload)
    run, history = history_of(arguments)
    if not history.config:
        law = "has no configuration in its record: a Session made it"
        raise ConfigError("RUN", run.shown, law, "write a workload file and tune that")
    tree = deepcopy(dict(history.config))
    apply_overrides(tree, [f"{setting}={value}" for _, setting, value in history.settings])
    rows = step_rows(run.metrics) if run.metrics.exists() else []
    calibration = calibrated(history, recorded_schedule(history), steps=STEPS, rows=rows)
    return TuningSubject(str(run.shown), tree, calibration.workload, calibration)


def tune(arguments: argparse.Namespace) -> int:
    """`engine tune RUN|WORKLOAD`. Raises: `ConfigError` for bounds that nothing can meet, and a record that is too
    short; `ModuleNotFoundError` without optuna."""
    import optuna  # noqa: F401  an optional package; say so before anything else

    from engine.cli.front_picture import front_picture
    from engine.config import parse_config
    from engine.record.files import write_private
    from engine.simulation.schedule import configured_schedule
    from engine.simulation.tuning import FINALISTS, SEEDS, SearchSpace, Simulator, usual_trials, with_settings
    from engine.simulation.tuning import tune as search_settings

    subject = subject_of(arguments)
    if arguments.verify and subject.calibration is None:
        raise ConfigError("--verify", arguments.verify, "is only for a run, and this is a workload", "give a run")
    known = subject.tree if arguments.extensions else with_settings(subject.tree, [("run.extensions", [])])
    space = SearchSpace.of(
        parse_config(known), staleness=arguments.staleness, replicas=arguments.most_replicas, gpus=arguments.gpus,
        over_sample=arguments.most_over_sample,
    )  # fmt: skip
    for option, file in (("--out", arguments.out), ("--picture", arguments.picture)):
        with writable(option, Path(file or os.devnull)), open(file or os.devnull, "a"):
            pass  # before the search, whose result would be lost
    if subject.calibration is not None and not arguments.json:
        print("\n".join(visible(line) for line in calibration_lines(subject.calibration)))
    trials = arguments.trials or usual_trials(space.batch)
    with _progress(trials + 2 * FINALISTS, shown=not arguments.json) as advance:
        search = search_settings(
            Simulator(known, [subject.workload(seed) for seed in range(SEEDS)]), space, trials=trials,
            seed=arguments.seed, progress=advance, processes=len(os.sched_getaffinity(0)),
        )  # fmt: skip
    best = search.recommended()
    write_private(Path(arguments.out), _config_yaml(subject, best))
    if arguments.picture is not None:
        write_private(Path(arguments.picture), front_picture(search, f"engine tune {subject.shown}"))
    verified = []
    if arguments.verify and not search.stopped:
        changed = [one for one in search.front() if one.settings]
        verified = _verify(subject, [search.base, *changed[: arguments.verify]], arguments.verify_steps)
    if arguments.json:
        print_json("tune", subject.shown, _plain(search, subject.calibration, verified) | {"out": arguments.out})
    else:
        _print_found(search, verified)
        if subject.calibration is not None:
            before, after = (configured_schedule(parse_config(with_settings(known, p))) for p in ((), best.settings))
            for note in notes_of_change(subject.calibration, before, after):
                print(f"note: {note}")
        print(f"{arguments.out} has the recommended configuration; test it with `engine check {arguments.out}`")
    return 0


def _config_yaml(subject: TuningSubject, one: "Tried", settings: Iterable[tuple[str, Any]] = ()) -> str:
    """The configuration with the settings that were found, and others."""
    from engine.simulation.tuning import with_settings

    tree = with_settings(subject.tree, [*one.settings, *settings])
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120))


# -- real runs ---------------------------------------------------------------------------------------------------------


def _verify(subject: TuningSubject, chosen: "Sequence[Tried]", steps: int) -> "list[tuple[Tried, float]]":
    """(settings, measured groups per second) of real runs. Raises: `ConfigError` if one fails."""
    from engine.inspect.history_reader import read_history
    from engine.simulation.calibration import window_of
    from engine.simulation.what_if import figures_of

    directory, found = Path(mkdtemp(prefix="engine-tune-")), []
    print(f"real runs of {steps} train steps, in {directory}:", file=sys.stderr)
    only_training = {"trainer.checkpoint_every": 0, "trainer.keep_best": None, "validation.every": 0}
    for number, one in enumerate(chosen):
        config, log, run = (directory / f"{number}{suffix}" for suffix in (".yaml", ".log", ""))
        config.write_text(_config_yaml(subject, one, {**only_training, "run.max_steps": steps}.items()))
        command = [sys.executable, "-m", "engine", "run", str(config), "--plain", "--run-dir", str(run)]
        with log.open("w") as output:
            code = subprocess.run(command, stdout=output, stderr=output).returncode
        if code:
            raise ConfigError("--verify", _words(one), f"the run ended with exit code {code}", f"see {log}")
        found.append((one, figures_of(window_of(read_history(run), steps * 2 // 3)).groups_per_s))
        print(f"  {_words(one)}: {found[-1][1]:.2f} groups/s", file=sys.stderr)
    return found


# -- what is shown -----------------------------------------------------------------------------------------------------


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[int], object]]:
    from rich.progress import Progress

    with Progress(console=page_console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("simulating; Ctrl-C keeps the best so far", total=total)
        yield lambda done: bar.advance(task, done)


def _words(one: "Tried") -> str:
    return visible(" ".join(f"{path.partition('.')[2]}={value}" for path, value in one.settings)) or "as the run"


def _print_found(search: "Search", verified: "list[tuple[Tried, float]]") -> None:
    from rich.table import Table

    best, front, console = search.recommended(), search.front(), page_console()
    if search.stopped:
        print("stopped early; this is the best so far, from short simulations of one seed")
    table = Table("settings that differ", "groups/s (range of seeds)", "ratio", "staleness mean, max", box=None)
    for one in [*front, *([] if any(not one.settings for one in front) else [search.base])]:
        speed, mark = one.speed, " (recommended)" if one is best else ""
        figures = f"{speed.median:.2f} ({speed.low:.2f} to {speed.high:.2f})"
        table.add_row(_words(one) + mark, figures, f"{_ratio(search, one):.2f}", f"{one.staleness:.2f}, {one.oldest}")
    console.print(table)
    if verified:
        table = Table("real runs", "groups/s predicted", "measured", "of the best", box=None)
        fastest = max(measured for _, measured in verified)
        for one, measured in verified:
            table.add_row(_words(one), f"{one.speed.median:.2f}", f"{measured:.2f}", f"{measured / fastest:.2f}")
        console.print(table)


def _ratio(search: "Search", one: "Tried") -> float:
    return one.speed.median / search.base.speed.median


def _plain(
    search: "Search", calibration: "Calibration | None", verified: "list[tuple[Tried, float]]"
) -> dict[str, Any]:  # fmt: skip
    def plain(one: "Tried") -> dict[str, Any]:
        return {
            "settings": dict(one.settings), "groups_per_s": asdict(one.speed), "ratio": _ratio(search, one),
            "staleness": one.staleness, "oldest": one.oldest,
        }  # fmt: skip

    return {
        "calibration": calibration and {
            "recorded": asdict(calibration.recorded), "simulated": asdict(calibration.simulated),
        },
        "base": plain(search.base), "front": [plain(one) for one in search.front()],
        "recommended": dict(search.recommended().settings), "tried": len(search.searched), "stopped": search.stopped,
        "verified": [{**plain(one), "measured_groups_per_s": measured} for one, measured in verified],
    }  # fmt: skip
