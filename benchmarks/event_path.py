"""Counts the files of `engine/` through which one group's event passes, until the generator gets its next order.

    python benchmarks/event_path.py [--list]

The run is in one process, with its record, stores and metrics. It has one replica with one slot, so nothing else
happens meanwhile. `sys.setprofile` sees every call in the run's thread from when `sample` returns a group until
`sample` gets the next one. The program prints the median over several groups in the middle of a step. `--list` prints
the files in the order of their first calls.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import engine.runtime.local
from engine.protocols import Batch, GroupWork
from engine.runtime.local import SimpleGenerator, SimpleTrainer, response
from engine.states.limits import Limits
from engine.trajectory import Trajectory

ENGINE = str(Path(engine.__file__).parent)
BATCH, STEPS = 16, 3


class Watched(SimpleGenerator):
    """Notes the engine's calls between two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.paths: list[list[str]] = []
        """For each group: the file of each call, in order."""

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ENGINE):
            self.calls.append(file[len(ENGINE) + 1 :])

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        sys.setprofile(None)
        self.paths.append(self.calls)
        await asyncio.sleep(0.02)  # whatever follows the answer has ended
        self.calls = []
        made = [response([1, 2], reward=float(i), version=version) for i in range(work.samples)]
        sys.setprofile(self.note)
        return made


class Idle(SimpleTrainer):
    def train(self, batch: Batch) -> dict[str, float]:
        return {}

    def weights(self) -> Any:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Files of engine/ that one group's event passes.")
    parser.add_argument("--list", action="store_true", help="print the files in the order of their first calls")
    chosen = parser.parse_args()
    watched = Watched()
    limits = Limits(train_batch_size=BATCH, max_staleness_steps=2, max_concurrent_groups=BATCH)
    with tempfile.TemporaryDirectory() as directory:
        engine.runtime.local.run(
            generators=lambda replica: watched, trainer=Idle(), prompts=["question"] * (BATCH * STEPS), limits=limits,
            samples=2, slots=1, run_dir=directory, metrics_port=0,
        )  # fmt: skip
    sys.setprofile(None)
    inner = [calls for number, calls in enumerate(watched.paths) if number % BATCH in range(4, BATCH - 4)]
    files = int(statistics.median(len(set(calls)) for calls in inner))
    print(f"{files} files, {int(statistics.median(map(len, inner)))} calls")
    if chosen.list:
        path = next(calls for calls in inner if len(set(calls)) == files)
        print("\n".join(dict.fromkeys(path)))


if __name__ == "__main__":
    main()
