"""Plans for tests: tiny generators and trainers, some of which die, and what to ask of the record they leave."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.protocols import Batch, GroupWork
from engine.record import read
from engine.record.replayer import build_scheduler, replay
from engine.runtime.local import SimpleGenerator, SimpleTrainer, response
from engine.runtime.prompt_sources import listed
from engine.states.laws import check_all
from engine.states.limits import Limits
from engine.trajectory import Trajectory
from engine.workers.plan import Plan, Restore, Rollout

sys.path.extend(str(Path(__file__).resolve().parent.parent / folder) for folder in ("workers", "storage"))
from token_generator import TokenGenerator

PROMPTS = 40

SMALLEST = {
    "train_prompts": 200, "validation_prompts": 8, "warmup_steps": 12, "hidden_size": 16, "layers": 1, "heads": 2,
}  # fmt: skip
"""Sizes of the smallest model that `model.make` can make, hardly trained: its responses are of any length."""


TRAIN_STEPS, TRAIN_BATCH = 8, 4


def training(made: Path, **rollout: Any) -> dict[str, Any]:
    """A configuration of the smallest model there can be, hardly trained, so that its responses are of any length."""
    return {
        "run": {"dir": str(made), "max_steps": TRAIN_STEPS, "seed": 3},
        "model": {"make": "arithmetic", "arithmetic": SMALLEST},
        "scheduler": {"train_batch_size": TRAIN_BATCH, "samples_per_prompt": 4, "max_staleness_steps": 2},
        "rollout": {"replicas": 2, "slots": 6, "max_tokens": 150, **rollout},
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": 3, "keep_checkpoints": 2, "threads": 1},
        "validation": {"prompts": 8, "every": 4},
        "metrics": {"port": 0},
    }


class Quick(SimpleGenerator):
    """Two tokens at once. `deadly`: the group whose first attempt takes the whole process with it. `steps`: train steps
    a version."""

    def __init__(self, deadly: int = -1, steps: int = 1) -> None:
        super().__init__()
        self.deadly = deadly
        self.steps = steps

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        assert (weights or 0) == version * self.steps, "the weights that the trainer published as this version"
        if work.group == self.deadly and work.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0)
        return [response([1, 2], reward=float(i % 2), version=version) for i in range(work.samples)]


class Counter(SimpleTrainer):
    """Weights are the number of steps done. Dies in the step that `dies_in` names, once for each marker file."""

    def __init__(self, dies_in: int = -1, marker: str = "") -> None:
        self.steps = 0
        self.dies_in = dies_in
        self.marker = marker

    def train(self, batch: Batch) -> dict[str, float]:
        if batch.step == self.dies_in and not os.path.exists(self.marker):
            Path(self.marker).write_text("died")
            os.kill(os.getpid(), signal.SIGKILL)
        assert batch.step == self.steps, "a step was lost or done twice"
        self.steps += 1
        return {"loss": 1.0 / self.steps, "optimizer_steps": 2.0}

    def weights(self) -> int:
        return self.steps


def restore_counter(trainer: Any, restore: Restore) -> None:
    trainer.steps = restore.weights
    assert trainer.steps == restore.steps
    assert restore.optimizer_steps == 2 * restore.steps


class Mortal(Counter):
    """Dies once in each of the steps named; saves how far it is, and writes down what it trains."""

    def __init__(self, directory: Path, deaths: Sequence[int]) -> None:
        super().__init__()
        self.directory = directory
        self.deaths = deaths

    def train(self, batch: Batch) -> dict[str, float]:
        if batch.step in self.deaths:
            self.dies_in, self.marker = batch.step, str(self.directory / f"died-{batch.step}")
        said = super().train(batch)
        with (self.directory / "trained").open("a") as file:
            file.write(f"{batch.step} ")
        return said

    def save(self, directory: str, step: int) -> None:
        assert step == self.steps
        Path(directory, "steps").write_text(str(step))


def restore_mortal(trainer: Any, restore: Restore) -> None:
    trainer.steps = int(Path(str(restore.checkpoint), "steps").read_text())
    assert trainer.steps == restore.steps and restore.optimizer_steps == 2 * restore.steps


def refused(replica: int) -> Rollout:
    raise ConfigError("rollout.device", "cuda:9", "this machine has none", "cpu")


def exhausted(replica: int) -> Rollout:
    return next(iter([]))


def plan(run_dir: Path, generator: Callable[[int], Any] = lambda replica: Quick(), **changes: Any) -> Plan:
    """Two replicas of six slots, batches of four, S = 2."""
    return replace(
        Plan(
            limits=Limits(train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12),
            samples=2,
            replicas=2,
            slots=6,
            make_rollout=lambda replica: Rollout(generator=generator(replica)),
            make_trainer=Counter,
            make_prompts=lambda: listed([f"question {n}" for n in range(PROMPTS)]),
            run_dir=run_dir,
        ),
        **changes,
    )


def limited(plan: Plan, **limits: Any) -> Plan:
    """The same plan under other limits."""
    return replace(plan, limits=replace(plan.limits, **limits))


def paced(replica: int) -> TokenGenerator:
    """A generator of the whole protocol, a third of whose responses are long enough to be swapped under."""
    return TokenGenerator(length=10, free=True, pace_s=0.002, stretch=100)


def slow(replica: int) -> TokenGenerator:
    """As `paced`, for runs that continue while a test does something else: a few steps a second."""
    return TokenGenerator(length=10, free=True, pace_s=0.05, stretch=20)


def endless(replica: int) -> TokenGenerator:
    """Generates for as long as it is let."""
    return TokenGenerator(length=10**9, free=True, pace_s=0.002)


def events_of(run_dir: Path, *kinds: type[Any]) -> list[Any]:
    return [event for event in read(run_dir / "schedule").events() if isinstance(event, kinds)]


def check_record(run_dir: Path) -> Any:
    """Replay a record, with every law after every event; the scheduler as it was at the end."""
    record = read(run_dir / "schedule")
    scheduler = build_scheduler(record.header)
    report = replay(record, build=lambda header: scheduler, watch=lambda frame: check_all(scheduler.state))
    assert report.identical, str(report)
    assert report.torn is None
    assert report.rejected == ()
    return scheduler
