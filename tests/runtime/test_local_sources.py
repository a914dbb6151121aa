"""A run that draws from several sources by what it has learned. An interrupted run draws the rows of a whole one."""

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from remembering_trainer import Remembering

import engine.runtime.local
from engine.protocols import GroupWork
from engine.record import read, recover
from engine.runtime.local import SimpleGenerator, response
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


def trained(directory: Path, name: str, copies: Sequence[int] = (), staleness: int = 0, **others: Any) -> Remembering:
    run_dir = directory / name
    trainer = Remembering(run_dir, copies)
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
    whole = trained(tmp_path, "whole", copies=[step], trajectories=trajectories)
    names = [{text.split()[0] for text in rows} for rows in whole.steps]
    assert names[0] == {"easy"} and {"easy", "hard"} in names, "the curriculum has moved on"
    resumed = trained(tmp_path, f"whole-{step}", resume=True, trajectories=trajectories)
    assert resumed.steps == whole.steps


def test_asynchronous_runs_keep_their_rows_and_the_record_tells_them(tmp_path: Path) -> None:
    """Timing decides what a group sees, and the record has it: whoever reads it chooses the same rows."""
    interrupted = trained(tmp_path, "run", copies=[6], staleness=2)
    resumed = trained(tmp_path, "run-6", staleness=2, resume=True)
    for run, trainer in (("run", interrupted), ("run-6", resumed)):
        again = learning(tmp_path)
        recover(read(tmp_path / run / "schedule")).replay_all(again.watch)
        prompts = {group: again.prompt(group) for group in trainer.by_group}
        assert {group: prompt.text for group, prompt in prompts.items()} == trainer.by_group


def test_the_figures_of_a_run_tell_its_sources(tmp_path: Path) -> None:
    trained(tmp_path, "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]["sources"]
    assert set(last) == {"easy", "hard"} and sum(one["groups"] for one in last.values()) == BATCH
    assert sum(one["drawn"] for one in last.values()) >= STEPS * BATCH and last["easy"]["rested"] > 0
    assert rows[0]["sources"]["hard"]["groups"] == 0 and rows[0]["sources"]["easy"]["share"] == 1.0
