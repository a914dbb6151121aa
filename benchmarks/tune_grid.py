"""How good is the recommendation of `engine tune`? Compares it with the best of twelve real runs of a grid.

    python benchmarks/tune_grid.py --runs DIR [--workloads rewards,tools] [--repeat 3]

Two workloads that `engine tune` was not developed on (benchmarks/tune), on the cores of this machine. One run of each
is recorded; `engine tune` finds settings from this record alone. Every point of the grid, and the settings found, then
run for real. The best point and the settings found are measured several times in turn, because the best of twelve
runs is also a lucky one. Real runs take less than a minute each and are kept in DIR, so that an interrupted benchmark
continues. Run it on a quiet machine.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from engine.inspect.history_reader import read_history
from engine.simulation.calibration import window_of
from engine.simulation.what_if import ScheduleFigures, figures_of

CONFIGS = Path(__file__).resolve().parent / "tune"
WORKLOADS = ("rewards", "tools")
MOST_STALENESS, MOST_REPLICAS = 4, 2
GRID = [
    [f"rollout.replicas={replicas}", f"rollout.slots={slots}",
     f"scheduler.max_staleness_steps={staleness}", "scheduler.max_concurrent_groups=0"]
    for replicas, slots, staleness in product((1, MOST_REPLICAS), (4, 16), (1, 2, MOST_STALENESS))
]  # fmt: skip
"""K is the largest that S allows."""
STEPS = 48
"""Train steps at the end of a run that are measured."""


def run(directory: Path, name: str, config: Path, settings: Sequence[str] = ()) -> Path:
    """The directory of a real run; it is made once."""
    known = directory / f"{name}.path"
    if not known.exists():
        settings = [*settings, f"run.dir={directory}", f"run.name={name}"]
        if config.parent == CONFIGS and "project/" in config.read_text():
            settings += [f"model.path={directory}/project/model", f"data.path={directory}/project/data.jsonl"]
        flags = [part for one in settings for part in ("--set", one)]
        with (directory / f"{name}.log").open("w") as log:
            command = [sys.executable, "-m", "engine", "run", str(config), "--plain", *flags]
            subprocess.run(command, stdout=log, stderr=log, check=True)
        newest = max(directory.glob(f"*-{name}"), key=lambda path: path.stat().st_mtime)
        known.write_text(str(newest))
    return Path(known.read_text())


def make_project(directory: Path) -> None:
    """The model and data of the workload `rewards`."""
    if not (directory / "project").exists():
        subprocess.run([sys.executable, "-m", "engine", "init", str(directory / "project")], check=True)


def measured(directory: Path, name: str, config: Path, settings: Sequence[str] = ()) -> ScheduleFigures:
    return figures_of(window_of(read_history(run(directory, name, config, settings)), STEPS))


def tuned(directory: Path, workload: str) -> tuple[Path, dict[str, Any]]:
    """The configuration that `engine tune` recommends from one recorded run, and what it says; made once."""
    recorded = run(directory, workload, CONFIGS / f"{workload}.yaml")
    config, said = directory / f"{workload}-tuned.yaml", directory / f"{workload}-tuned.json"
    if not said.exists():
        command = [
            sys.executable, "-m", "engine", "tune", str(recorded), "--staleness", str(MOST_STALENESS),
            "--most-replicas", str(MOST_REPLICAS), "--out", str(config), "--json",
        ]  # fmt: skip
        said.write_text(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    return config, json.loads(said.read_text())


def compare(directory: Path, workload: str, repeat: int) -> float:
    """Measured groups/s of the recommendation, as a share of those of the best point of the grid."""
    base = CONFIGS / f"{workload}.yaml"
    config, said = tuned(directory, workload)
    print(f"\n{workload}: recommended {json.dumps(said['recommended'])}")
    print("| settings | groups/s measured | staleness |\n|---|---:|---:|")
    found = {}
    for number, settings in enumerate(GRID):
        found[number] = measured(directory, f"{workload}-grid-{number}", base, settings)
        print(_row(" ".join(one.rpartition(".")[2] for one in settings[:3]), found[number]), flush=True)
    best = max(found, key=lambda number: found[number].groups_per_s)
    turns: dict[str, list[float]] = {"best of the grid": [], "recommended": []}
    for turn in range(repeat):
        for name, its_config, settings in (
            ("best of the grid", base, GRID[best]), ("recommended", config, [])
        ):  # fmt: skip
            key = f"{workload}-{name.replace(' ', '-')}-{turn}"
            turns[name].append(measured(directory, key, its_config, settings).groups_per_s)
    medians = {name: median(values) for name, values in turns.items()}
    share = medians["recommended"] / medians["best of the grid"]
    for name, values in turns.items():
        print(f"{name}: {medians[name]:.2f} groups/s ({', '.join(f'{value:.2f}' for value in values)})")
    print(f"recommended / best of the grid: {share:.3f} (target 0.95)", flush=True)
    return share


def _row(name: str, figures: ScheduleFigures) -> str:
    return f"| {name} | {figures.groups_per_s:.2f} | {figures.staleness:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("build/tune_grid"), help="directory of the real runs")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=3, help="runs of the recommendation, and of the best point")
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    make_project(arguments.runs.resolve())
    for workload in arguments.workloads.split(","):
        compare(arguments.runs.resolve(), workload, arguments.repeat)


if __name__ == "__main__":
    main()
