"""How long a new user waits: wall seconds from `engine init` to a rising reward.

    python benchmarks/first_run.py [--rise 0.1] [--window 10]

Creates a project as a user would, checks it and runs it, each command in a separate process. The reward has risen when
the mean of the newest `window` train steps is `rise` above that of the first ones.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

TARGET_S = 600.0
ENGINE = [sys.executable, "-m", "engine.cli"]


def main() -> None:
    asked = argparse.ArgumentParser(description="Seconds from `engine init` to a rising reward.")
    asked.add_argument("--rise", type=float, default=0.1, help="how much the mean reward must rise")
    asked.add_argument("--window", type=int, default=10, help="number of train steps in a mean")
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began, project = time.perf_counter(), Path(folder) / "project"
        for stage, command in (("init", ["init", str(project)]), ("check", ["check", str(project / "config.yaml")])):
            subprocess.run([*ENGINE, *command], check=True, stdout=subprocess.DEVNULL)
            print(f"{stage:>16} {time.perf_counter() - began:8.1f} s", flush=True)
        told = rewards_over_time(project, began)
        print(f"{'first step':>16} {told[0][0]:8.1f} s")
        risen = next((now for now, rewards in told if has_risen(rewards, given.rise, given.window)), None)
        first, last = told[-1][1][: given.window], told[-1][1][-given.window :]
        ended = time.perf_counter() - began
        print(f"{'end of the run':>16} {ended:8.1f} s, reward {fmean(first):.2f} -> {fmean(last):.2f}")
        if risen is None:
            sys.exit(f"the reward never rose by {given.rise:g}")
        print(f"{'rising reward':>16} {risen:8.1f} s, target {TARGET_S:g}: {'met' if risen <= TARGET_S else 'not met'}")


def has_risen(rewards: list[float], rise: float, window: int) -> bool:
    """Whether the means of two windows that do not overlap differ by `rise`."""
    return len(rewards) >= 2 * window and fmean(rewards[-window:]) >= fmean(rewards[:window]) + rise


def rewards_over_time(project: Path, began: float) -> list[tuple[float, list[float]]]:
    """Run the project. Returns (seconds since `began`, mean reward of each step so far) for each line about a step."""
    told: list[tuple[float, list[float]]] = []
    command = [*ENGINE, "run", "config.yaml", "--plain", "--run-dir", "run"]
    clean = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=project, env=clean, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step="):
                told.append((time.perf_counter() - began, step_rewards(project / "run" / "metrics.jsonl")))
    if process.returncode or not told:
        sys.exit("the run failed")
    return told


def step_rewards(journal: Path) -> list[float]:
    rows = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
    return [row["reward_mean"] for row in rows if "validation" not in row]


if __name__ == "__main__":
    main()
