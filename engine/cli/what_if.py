"""`engine whatif` and `engine simulate`: how long a run would take with other settings, without running it.

Called by the command line. The figures come from `simulation.what_if`. A record of the simulated run is written, which
every reading command accepts.
"""

import argparse
import shutil
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.cli.json_output import print_json, takes_json
from engine.cli.recorded_run import history_of, takes_run, writable
from engine.errors import ConfigError, visible

if TYPE_CHECKING:
    from engine.config.workload import Workload
    from engine.metrics.history import History
    from engine.simulation.schedule import Schedule
    from engine.simulation.what_if import Calibration, Fate, ScheduleFigures

STEPS, SEEDS = 64, 5
OFF = 0.1
"""A simulated figure that differs by more than this share, or by this share of all time, is marked."""
SECTIONS = ("scheduler", "validation", "pools")
INFORMED = (
    "rollout.replicas", "rollout.slots", "rollout.sync_mode", "rollout.sync_order", "rollout.max_tokens",
    "trainer.ranks", "reward.concurrency",
)  # fmt: skip
"""Sections and fields whose effect on a schedule a record tells."""
WORKLOAD = "workload.yaml"


def add_commands(commands: Any) -> None:
    """Add the commands to the parsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "whatif",
        help="predict how long the train steps of a run would take with other settings",
        description="Simulate a run with the durations of its record: first as it was, to show how far the simulation "
        "can be trusted, then with other settings.",
    )
    takes_run(parser)
    _takes_changes(parser)
    parser.add_argument("--from-step", type=int, default=0, metavar="N", help="as if the run were resumed at step N")
    parser.add_argument("--save", metavar="FILE", help="write the durations of the run as a workload, and stop")
    parser.add_argument(
        "--compare", action="store_true", help="show which groups each of both schedules trains late, cuts or drops"
    )
    parser.set_defaults(run=what_if)
    parser = commands.add_parser(
        "simulate",
        help="simulate a run that nobody has started, from a workload file",
        description="Simulate the settings of a workload, or a configuration with the durations of a workload.",
    )
    parser.add_argument("file", metavar="WORKLOAD|CONFIG", help="a workload, or a configuration with --workload")
    parser.add_argument("--workload", metavar="FILE", help="durations for the configuration")
    _takes_changes(parser)
    parser.set_defaults(run=simulate_file)


def _takes_changes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting")
    parser.add_argument("--steps", type=_positive, default=STEPS, help=f"train steps (default: {STEPS})")
    parser.add_argument("--seeds", type=_positive, default=SEEDS, help=f"simulations of each (default: {SEEDS})")
    parser.add_argument("--out", metavar="DIR", help="where the record of the simulated run is written")
    takes_json(parser)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1")
    return int(text)


# -- what if -----------------------------------------------------------------------------------------------------------


def what_if(arguments: argparse.Namespace) -> int:
    """`engine whatif RUN`. Raises: `ConfigError` for a record that says too little, and settings that it cannot
    inform."""
    from engine.metrics.journal import step_rows
    from engine.simulation.what_if import calibrated

    run, history = history_of(arguments)
    schedule = schedule_of(history, [], extensions=arguments.extensions)
    changed = schedule_of(history, arguments.set, extensions=arguments.extensions)
    rows = step_rows(run.metrics) if run.metrics.exists() else []
    found = calibrated(history, schedule, steps=arguments.steps, first=arguments.from_step, rows=rows)
    if arguments.save is not None:
        with writable("--save", Path(arguments.save)):
            Path(arguments.save).write_text(found.workload().dump_yaml(), encoding="utf-8")
        print(f"wrote {visible(arguments.save)}: use `engine simulate {visible(arguments.save)}`")
        return 0
    resumed = arguments.from_step > 0
    pairs = [
        (found.predict(schedule, seed), found.predict(changed, seed, resumed=resumed))
        for seed in range(arguments.seeds if arguments.set else 0)
    ]
    record = _write_record(arguments.out or f"{run.path.resolve()}-whatif", changed, found.workload(), found.steps)
    if arguments.json:
        print_json("whatif", run.shown, _plain(found, [as_is for as_is, _ in pairs], [new for _, new in pairs]))
        return 0
    for line in (
        *calibration_lines(found),
        *_prediction_lines(arguments.set, pairs, notes_of_change(found, schedule, changed)),
    ):
        print(visible(line))
    if arguments.compare:
        _compare(found.workload(), [("as it was", schedule), ("changed", changed)], found.steps)
    print(visible(f"\nrecord of the simulated run: {record} (engine explain, report, timeline, debug)"))
    return 0


def schedule_of(history: "History", overrides: Sequence[str], *, extensions: bool) -> "Schedule":
    """The schedule of a recorded run after changes. Raises: `ConfigError` for changes that a record cannot inform."""
    from engine.config.loading import apply_overrides, parse_config
    from engine.simulation.schedule import changed_schedule, configured_schedule, recorded_schedule

    recorded = recorded_schedule(history)
    if not history.config:
        for override in overrides:
            setting, _, value = override.partition("=")
            recorded = changed_schedule(recorded, setting.strip(), value.strip())
        return recorded
    if not overrides:
        return recorded
    tree: dict[str, Any] = deepcopy(dict(history.config))
    if not extensions:
        tree["run"] = {**tree.get("run", {}), "extensions": []}
    live = [f"{setting}={value}" for _, setting, value in history.settings]
    apply_overrides(tree, live)
    apply_overrides(tree, overrides)
    given = dict(override.partition("=")[::2] for override in overrides)
    for path, value in given.items():
        if not _is_informed(path.strip()):
            known = ", ".join((*(f"{section}.*" for section in SECTIONS), *INFORMED))
            law = "must stay as it was: the record does not tell how it changes durations"
            raise ConfigError(path.strip(), value.strip(), law, f"change one of {known}")
    schedule = configured_schedule(parse_config(tree))
    return schedule if "rollout.replicas" in given else replace(schedule, replicas=recorded.replicas)


def _is_informed(path: str) -> bool:
    return path in INFORMED or path.partition(".")[0] in SECTIONS


def notes_of_change(found: "Calibration", before: "Schedule", after: "Schedule") -> list[str]:
    """What the record does not tell of a change."""
    notes = []
    seen = found.most_responses
    asked = min(after.slots, after.limits.max_concurrent_groups) * after.samples
    if asked > 1.2 * seen:
        notes.append(
            f"the run never sampled more than {seen} responses at once on a replica, and now there may be {asked}: "
            "the speed beyond is extrapolated; the interval shows how far the record tells it"
        )
    if (after.max_tokens or 0) > (before.max_tokens or 0) > 0:
        notes.append(f"responses beyond {before.max_tokens} tokens were cut, so their length is not known")
    if after.ranks != before.ranks:
        notes.append("each further rank of the trainer is assumed to add 80 % of the speed of the first one")
    return notes


# -- simulate ----------------------------------------------------------------------------------------------------------


def simulate_file(arguments: argparse.Namespace) -> int:
    """`engine simulate WORKLOAD|CONFIG`. Raises: `ConfigError`."""
    from engine.simulation.what_if import predicted

    workload, schedule = opened(Path(arguments.file), arguments.workload, arguments.set)
    figures = [predicted(schedule, workload, seed=seed, steps=arguments.steps) for seed in range(arguments.seeds)]
    out = arguments.out or f"runs/simulated-{Path(arguments.file).stem}"
    record = _write_record(out, schedule, workload, arguments.steps)
    if arguments.json:
        print_json("simulate", arguments.file, {"seeds": [asdict(one) for one in figures]})
        return 0
    print(visible(f"{arguments.file}: {arguments.steps} train steps, {arguments.seeds} seeds"))
    for label, values in _rows(figures):
        print(f"  {label:<36} {_interval(values)}")
    print(visible(f"\nrecord of the simulated run: {record} (engine explain, report, timeline, debug)"))
    return 0


def opened(path: Path, durations: str | None, overrides: Sequence[str]) -> "tuple[Workload, Schedule]":
    """The workload and the settings of a workload file, or of a configuration with the file `durations`.

    Raises: `ConfigError`."""
    from engine.config import load_config
    from engine.config.loading import apply_overrides, parse_config, read_yaml
    from engine.config.workload import PLACEHOLDER, check_lengths, load_workload, workload_of
    from engine.simulation.schedule import configured_schedule

    tree = read_yaml(path, "WORKLOAD")
    if isinstance(tree, dict) and "responses" in tree:
        workload = workload_of(tree, str(path)) if durations is None else load_workload(Path(durations))
        check_lengths(workload)
        settings: dict[str, Any] = {**PLACEHOLDER, **deepcopy(tree.get("settings") or {})}
        apply_overrides(settings, overrides)
        config = parse_config(settings)
    elif durations is None:
        fix = "give a workload, or the durations of a workload with --workload FILE; configs/workloads has some"
        raise ConfigError("WORKLOAD", str(path), "is a configuration, which has no durations", fix)
    else:
        workload, config = load_workload(Path(durations)), load_config(path, overrides)
    return workload, configured_schedule(config)


def _write_record(out: str, schedule: "Schedule", workload: "Workload", steps: int) -> Path:
    """Write the record of a simulated run to a directory, in place of an earlier one of a simulated run."""
    from engine.simulation.what_if import simulate

    directory = Path(out)
    if directory.exists() and not (directory / WORKLOAD).exists():
        raise ConfigError("--out", out, "exists and holds no simulated run", "give another path with --out")
    with writable("--out", directory):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / WORKLOAD).write_text(workload.dump_yaml(), encoding="utf-8")
        simulate(schedule, workload, seed=0, steps=steps, directory=directory)
    return directory


# -- texts -------------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    label: str
    values: list[float]
    is_share: bool


def _rows(figures: "Sequence[ScheduleFigures]") -> Iterator[tuple[str, list[float]]]:
    for label, values, is_share in _figures(figures):
        yield label, [100 * value for value in values] if is_share else values


def _figures(figures: "Sequence[ScheduleFigures]") -> Iterator[_Row]:
    """Each figure with its values, the shares of more than 1 % of the time among them."""
    yield _Row("seconds per train step", [one.step_s for one in figures], False)
    yield _Row("groups per second", [one.groups_per_s for one in figures], False)
    yield _Row("mean staleness, train steps", [one.staleness for one in figures], False)
    yield _Row("largest staleness", [one.oldest for one in figures], False)
    for what, shares in (("trainer", [one.trainer for one in figures]), ("slots", [one.slots for one in figures])):
        for name in dict.fromkeys(name for one in shares for name in one):
            values = [one.get(name, 0.0) for one in shares]
            if max(values) >= 0.01:
                yield _Row(f"{what}: {name.replace('_', ' ')}, %", values, True)


def _interval(values: Sequence[float]) -> str:
    from engine.simulation.what_if import Interval

    found = Interval.of(values)
    around = f" ({found.low:.3g} to {found.high:.3g})" if found.high > found.low else ""
    return f"{found.median:.3g}{around}"


def calibration_lines(found: "Calibration") -> Iterator[str]:
    steps = found.window.steps
    yield f"calibration: train steps {steps[0].step} to {steps[-1].step}, recorded and simulated"
    off = 0
    for label, (recorded, simulated), is_share in _figures([found.recorded, found.simulated]):
        scale = 100 if is_share else 1
        differs = abs(simulated - recorded) > OFF * (1.0 if is_share else max(recorded, 0.1))
        off += differs
        mark = "  <- off by more than 10 %" if differs else ""
        yield f"  {label:<36} {scale * recorded:>9.3g} {scale * simulated:>9.3g}{mark}"
    if off:
        yield f"  {off} figures are off by more than 10 %: trust the direction of a change, not its size"


def _prediction_lines(
    changes: Sequence[str], pairs: "Sequence[tuple[ScheduleFigures, ScheduleFigures]]", notes: Sequence[str]
) -> Iterator[str]:
    if not pairs:
        yield "\nadd --set PATH=VALUE to change settings"
        return
    yield f"\nwhat if {', '.join(changes)}: simulated as it was, and changed; {len(pairs)} seeds"
    both = [one for pair in pairs for one in pair]
    for label, values in _rows(both):
        yield f"  {label:<36} {_interval(values[::2]):<28} {_interval(values[1::2])}"
    ratios = [before.step_s / after.step_s for before, after in pairs]
    yield f"  faster by a factor of {_interval(ratios)}"
    yield from (f"  note: {note}" for note in notes)


def _plain(found: "Calibration", before: Sequence[Any], after: Sequence[Any]) -> dict[str, Any]:
    return {
        "steps": found.steps, "recorded": asdict(found.recorded), "simulated": asdict(found.simulated),
        "as_it_was": [asdict(one) for one in before], "changed": [asdict(one) for one in after],
    }  # fmt: skip


def _compare(workload: "Workload", schedules: "Sequence[tuple[str, Schedule]]", steps: int) -> None:
    """Which groups each schedule loses, on the same draws."""
    from engine.simulation.what_if import fates_of, simulate

    print(f"\n{'groups by their end':<32} {'groups':>7} {'share':>7} {'tokens':>8} {'longest':>8}  sources")
    for label, schedule in schedules:
        fates = fates_of(simulate(schedule, workload, seed=0, steps=steps))
        whole = sum(fate.groups for fate in fates.values())
        for name, fate in fates.items():
            print(visible(f"{label + ': ' + name:<32} {_fate(fate, whole)}"))


def _fate(fate: "Fate", whole: int) -> str:
    sources = ", ".join(f"{name} {count / fate.groups:.0%}" for name, count in fate.sources.items())
    return f"{fate.groups:>7} {fate.groups / whole:>7.1%} {fate.tokens:>8.0f} {fate.longest:>8.0f}  {sources}"
