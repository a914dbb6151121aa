"""A run that draws from several sources by what it has learned. An interrupted run draws the rows of a whole one."""

import asyncio
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import engine.runtime.local
from engine.commands import EnterState, StartGroup
from engine.events import GroupGenerated, ProcessLost, StateLeft
from engine.protocols import Batch, GroupWork
from engine.record import read
from engine.runtime.local import SimpleGenerator, SimpleTrainer, response
from engine.runtime.prompt_sources import MixedPrompts
from engine.states.limits import Limits
from engine.tasks.dataset import Dataset
from engine.tasks.mixture import Mixture, Source
from engine.tasks.source_files import Curriculum, CurriculumStage, PassRate
from engine.trajectory import Trajectory

STEPS, BATCH = 16, 4


class Learner(SimpleGenerator):
    """Solves more rows as the weights learn; groups end in any order."""

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        for _ in range(random.randrange(20)):
            await asyncio.sleep(0)
        solved = work.prompt.row * (4 if work.prompt.source == "hard" else 1) < (weights or 0)
        return [response([1, 2], reward=float(solved), version=version) for _ in range(work.samples)]


class Remembering(SimpleTrainer):
    """Its state is the rows that it was trained on. At step `copy_at` it copies the run as a crash would leave it."""

    def __init__(self, run_dir: Path, copy_at: int = -1) -> None:
        self.steps: list[list[tuple[str, int]]] = []
        self.rows: dict[int, tuple[str, int]] = {}
        """By group."""
        self.run_dir, self.copy_at = run_dir, copy_at

    def train(self, batch: Batch) -> dict[str, float]:
        if batch.step == self.copy_at:
            shutil.copytree(self.run_dir, f"{self.run_dir}-copy")
        self.rows |= {group.group: (group.prompt.source, group.prompt.row) for group in batch.groups}
        self.steps.append(sorted((group.prompt.source, group.prompt.row) for group in batch.groups))
        return {}

    def weights(self) -> Any:
        return len(self.steps)

    def save(self, directory: str, step: int) -> None:
        Path(directory, "steps.json").write_text(json.dumps(self.steps))

    def load(self, directory: str) -> None:
        self.steps = [[tuple(row) for row in step] for step in json.loads(Path(directory, "steps.json").read_text())]


def learning(directory: Path) -> MixedPrompts:
    sources = []
    for name, rows in (("easy", 10), ("hard", 12)):
        file = directory / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"prompt": f"{name} {row}"}) + "\n" for row in range(rows)))
        sources.append(Source(name=name, data=Dataset.load(file), rest=PassRate(max=0.9, rest_passes=2)))
    stages = (
        CurriculumStage(weights=(1.0, 0.0), until=0.3),
        CurriculumStage(weights=(1.0, 3.0), until=0.6),
        CurriculumStage(weights=(1.0, 1.0)),
    )
    return MixedPrompts(Mixture(sources, seed=3, curriculum=Curriculum(stages=stages, by_accuracy=True, window=8)))


def trained(directory: Path, name: str, copy_at: int = -1, staleness: int = 0, **others: Any) -> Remembering:
    run_dir = directory / name
    trainer = Remembering(run_dir, copy_at)
    limits = Limits(
        train_batch_size=BATCH, max_staleness_steps=staleness, max_concurrent_groups=BATCH * (staleness + 1),
        checkpoint_every=3,
        max_steps=STEPS,
    )  # fmt: skip
    result = engine.runtime.local.run(
        generators=lambda replica: Learner(), replicas=2, slots=1, trainer=trainer, prompts=learning(directory),
        limits=limits, samples=2, run_dir=run_dir, **others,
    )  # fmt: skip
    assert result.outcome == "finished" and len(trainer.steps) == STEPS
    return trainer


@pytest.mark.parametrize("trajectories", ["disk", "memory"], ids=["kept", "branched"])
@pytest.mark.parametrize("step", [2, 10])
def test_an_interrupted_run_draws_the_rows_of_a_whole_one(tmp_path: Path, step: int, trajectories: str) -> None:
    whole = trained(tmp_path, "whole", copy_at=step, trajectories=trajectories)
    names = [{name for name, _ in rows} for rows in whole.steps]
    assert names[0] == {"easy"} and {"easy", "hard"} in names, "the curriculum has moved on"
    resumed = trained(tmp_path, "whole-copy", resume=True, trajectories=trajectories)
    assert resumed.steps == whole.steps


def test_asynchronous_runs_keep_their_rows_and_the_record_tells_them(tmp_path: Path) -> None:
    """Timing decides what a group sees, and the record has it: whoever reads it chooses the same rows."""
    interrupted = trained(tmp_path, "run", copy_at=6, staleness=2)
    resumed = trained(tmp_path, "run-copy", staleness=2, resume=True)
    for run, trainer in (("run", interrupted), ("run-copy", resumed)):
        again = learning(tmp_path)
        for tick in read(tmp_path / run / "schedule").ticks():
            again.watch(tick.events, tick.commands)
        prompts = {group: again.prompt(group) for group in trainer.rows}
        assert {group: (prompt.source, prompt.row) for group, prompt in prompts.items()} == trainer.rows


@pytest.fixture
def resting(tmp_path: Path) -> MixedPrompts:
    """Prompts of one source, whose rows rest once they are solved."""
    source = Source(name="a", data=learning(tmp_path).mixture.sources[0].data, rest=PassRate(max=0.5))
    return MixedPrompts(Mixture([source], seed=0))


FIGURES: dict[str, Any] = {"group": 0, "trainable": 2, "reward_mean": 1.0, "reward_spread": 0.0}
LIFE = {"attempt": 1, "replica": 0, "incarnation": 1}
START = StartGroup(group=0, **LIFE, cause=0)
MADE = GroupGenerated(**FIGURES, **LIFE, tokens=4, oldest_version=0, newest_version=0)


def test_rewards_that_come_late_count_when_they_are_there(resting: MixedPrompts) -> None:
    """A group whose reward an added state computes, and late reports of attempts that have ended."""
    resting.watch([MADE], [START])
    resting.watch([MADE], [EnterState(group=0, attempt=2, state="rewarding", cause=1)])
    assert not resting.mixture._pending, "its reward is not there yet"
    resting.watch([MADE], [])
    assert not resting.mixture._pending, "an echo of an attempt that has ended"
    resting.watch([StateLeft(**FIGURES, attempt=2, state="rewarding")], [])
    assert resting.mixture._pending == {0}


def test_a_late_reward_of_a_replica_that_is_lost_in_the_same_tick_does_not_count(resting: MixedPrompts) -> None:
    resting.watch([], [START])
    resting.watch([ProcessLost(kind="replica", index=0, incarnation=1, reason="ended"), MADE], [])
    assert not resting.mixture._pending


def test_the_figures_of_a_run_tell_its_sources(tmp_path: Path) -> None:
    trained(tmp_path, "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]["sources"]
    assert set(last) == {"easy", "hard"} and sum(one["groups"] for one in last.values()) == BATCH
    assert sum(one["drawn"] for one in last.values()) >= STEPS * BATCH and last["easy"]["rested"] > 0
    assert rows[0]["sources"]["hard"]["groups"] == 0 and rows[0]["sources"]["easy"]["share"] == 1.0
