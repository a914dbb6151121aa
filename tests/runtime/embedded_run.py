"""A program that embeds the engine: `python embedded.py RUN_DIR KILL_AT TRAJECTORIES` kills itself at step KILL_AT."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine.runtime.local
from engine.protocols import Batch, GroupWork
from engine.runtime.local import SimpleGenerator, SimpleTrainer, response
from engine.states.limits import Limits
from engine.trajectory import Trajectory

PROMPTS = 64
FIGURES: dict[str, Any] = {
    "train_batch_size": 4, "max_staleness_steps": 2, "max_concurrent_groups": 12, "checkpoint_every": 3,
}  # fmt: skip


class Quick(SimpleGenerator):
    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        await asyncio.sleep(0)
        return [response([1, 2], reward=float(i % 2), version=version) for i in range(work.samples)]


class Saving(SimpleTrainer):
    """Its state is the list of groups that it was trained on."""

    def __init__(self, kill_at: int = -1) -> None:
        self.groups: list[int] = []
        self.kill_at = kill_at

    def train(self, batch: Batch) -> dict[str, float]:
        if batch.step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.groups += [group.group for group in batch.groups]
        return {}

    def weights(self) -> Any:
        return len(self.groups)

    def save(self, directory: str, step: int) -> None:
        Path(directory, "groups.json").write_text(json.dumps(self.groups))

    def load(self, directory: str) -> None:
        self.groups = json.loads(Path(directory, "groups.json").read_text())


def options(run_dir: Path, trainer: SimpleTrainer, **others: Any) -> dict[str, Any]:
    """Of `engine.runtime.local.run`."""
    return {
        "generators": lambda replica: Quick(),
        "replicas": 2,
        "trainer": trainer,
        "prompts": [f"question {n}" for n in range(PROMPTS)],
        "limits": Limits(**FIGURES),
        "samples": 2,
        "slots": 6,
        "run_dir": run_dir,
        **others,
    }


if __name__ == "__main__":
    run_dir, kill_at, trajectories = sys.argv[1:]
    engine.runtime.local.run(**options(Path(run_dir), Saving(int(kill_at)), trajectories=trajectories))
