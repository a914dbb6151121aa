"""How long `engine run` takes until the replicas generate, and the processor seconds of each process until then.

    python benchmarks/start.py [--config configs/quickstart.yaml] [--runs 3] [--dir RUNS] [--engine DIRECTORY ...]

Each run is ended as soon as it has begun: every process is up, and the first prompts are sent. The first token follows
within 0.1 s. The first run of a configuration that makes its model is not counted. With several directories of the
engine's source, their runs alternate.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil

from engine.metrics.address_files import FILE

LOOK_S = 0.02
LEAST_S = 0.05
"""Processes with less processor time are not shown."""


def main() -> None:
    asked = argparse.ArgumentParser(description="Seconds from `engine run` to the first prompts, and who used them.")
    asked.add_argument("--config", default="configs/quickstart.yaml")
    asked.add_argument("--runs", type=int, default=3)
    asked.add_argument("--engine", nargs="+", default=["."], help="directories that contain the package `engine`")
    asked.add_argument("--dir", help="directory of the runs, made if it is not there; a model in it is used again")
    given = asked.parse_args()
    config, engines = Path(given.config).resolve(), [str(Path(place).resolve()) for place in given.engine]
    taken: dict[str, list[tuple[float, dict[str, float]]]] = {engine: [] for engine in engines}
    if given.dir:
        Path(given.dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.dir, prefix="start-") as folder:
        made = Path(given.dir or folder).resolve()
        start(config, engines[0], made, Path(folder) / "making")
        for number in range(given.runs):
            for engine, runs in taken.items():
                runs.append(start(config, engine, made, Path(folder) / f"{engines.index(engine)}-{number}"))
    for engine, runs in taken.items():
        walls, every = [wall for wall, _ in runs], [sum(used.values()) for _, used in runs]
        shown = ", ".join(f"{wall:.1f}" for wall in walls)
        print(f"{engine}: {median(walls):.1f} s ({shown}), {median(every):.1f} processor s")
        for name in sorted(runs[-1][1], key=lambda name: -runs[-1][1][name]):
            print(f"  {median(used.get(name, 0.0) for _, used in runs):6.2f}  {name}")


def start(config: Path, engine: str, made: Path, run_dir: Path) -> tuple[float, dict[str, float]]:
    """Start a run, and end it once it has begun. Wall seconds, and processor seconds by process. `made`: the directory
    of runs, which has the models that runs make."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "engine.cli", "run", str(config), "--plain", "--run-dir", str(run_dir)]
    command += ["--set", f"run.dir={made}", "--set", "metrics.port=0", "--address", "local"]
    clean = os.environ | {"PYTHONPATH": engine}
    with subprocess.Popen(command, cwd=run_dir.parent, env=clean, stdout=subprocess.DEVNULL) as process:
        while not (run_dir / FILE).exists():
            if process.poll() is not None:
                sys.exit(f"the run ended with exit code {process.returncode} before it began")
            time.sleep(LOOK_S)
        wall, used = time.perf_counter() - began, dict(processor_seconds(psutil.Process(process.pid)))
        for _ in range(2):  # the first interrupt drains, the second stops the run
            process.send_signal(signal.SIGINT)
            time.sleep(1.0)
        process.wait()
    return wall, used


def processor_seconds(launcher: psutil.Process) -> Iterator[tuple[str, float]]:
    """Processor seconds of a process and its descendants, by a name that is unique."""
    seen: dict[str, int] = {}
    for process in (launcher, *launcher.children(recursive=True)):
        try:
            times, words = process.cpu_times(), process.cmdline()
        except psutil.Error:
            continue
        if times.user + times.system < LEAST_S:
            continue
        name = "engine run" if process is launcher else shown_name(words)
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name} {seen[name]}", times.user + times.system


def shown_name(words: list[str]) -> str:
    """What a process of Ray calls itself, or its script or program."""
    script = next((word for word in words[1:] if word.endswith(".py")), words[0] if words else "?")
    return words[0].split(".")[0] if words and words[0].startswith("ray::") else Path(script).name


if __name__ == "__main__":
    main()
