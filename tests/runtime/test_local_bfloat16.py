"""A run of a bfloat16 model in one process: float32 masters, and bfloat16 weights published to bfloat16 samplers."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from digested_weights import Digested, note_installs
from ray_plans import SMALLEST, check_record, events_of
from reference_sync import digest
from transformers import AutoModelForCausalLM

from engine.config.loading import parse_config
from engine.events import WeightsInstalled
from engine.plans.configured_plan import plan_of
from engine.runtime.local import RunResult, run_plan
from engine.tasks.quickstart import Quickstart, prepare
from engine.training.model_trainer import ModelTrainer

HALF, STEPS = 2, 4
"""Train steps before the resume, and in all."""


def halved(folder: Path) -> dict[str, Any]:
    """The smallest model in bfloat16, with its data, as sections of a configuration."""
    made = prepare(folder, Quickstart(**SMALLEST))
    AutoModelForCausalLM.from_pretrained(made.model_path, dtype=torch.bfloat16).save_pretrained(made.model_path)
    return {
        "model": {"path": made.model_path},
        "data": {"path": made.training_path},
        "reward": {"function": made.reward},
    }


def test_replicas_sample_from_the_bfloat16_weights_that_masters_were_rounded_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = halved(tmp_path / "made")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    installed, trainers = note_installs(monkeypatch), []

    def make_trainer(*arguments: Any) -> Digested:
        trainers.append(Digested(*arguments))
        return trainers[-1]

    def run(steps: int, *, resume: bool) -> RunResult:
        config = {
            **sections,
            "run": {"dir": str(tmp_path), "max_steps": steps, "seed": 3},
            "scheduler": {"train_batch_size": 4, "samples_per_prompt": 4, "max_staleness_steps": 1},
            "rollout": {"replicas": 2, "slots": 4, "max_tokens": 40, "device": "cpu"},
            "trainer": {
                "bf16": "on", "learning_rate": 1e-3, "checkpoint_every": HALF, "threads": 1, "device": "cpu",
                "overlong_cache_tokens": 39,  # length alone makes advantages
            },
            "validation": {"at_start": False, "at_end": False},
        }  # fmt: skip
        planned = plan_of(parse_config(config), run_dir)
        model, settings = planned.make_trainer.args[:2]  # type: ignore[attr-defined]
        planned = replace(planned, make_trainer=partial(make_trainer, model, settings), resume=resume)
        return run_plan(replace(planned, settings=(("run.max_steps", str(steps)),) if resume else ()))

    assert run(HALF, resume=False).outcome == "finished"
    [first] = trainers
    assert first.policy.masters.split, "it trains float32 masters"
    trained = digest(ModelTrainer.weights(first))
    result = run(STEPS, resume=True)
    assert (result.outcome, result.steps) == ("finished", STEPS)
    assert result.resumed.startswith(f"resumed from step-{HALF:06}")
    check_record(run_dir)
    resumed = trainers[-1]
    assert first.kinds == resumed.kinds == {torch.bfloat16}, "2 bytes a parameter"
    assert resumed.digests[0] == trained, "the resumed run begins with the weights that were trained before"
    published = dict(enumerate([*first.digests, *resumed.digests], start=1))
    assert len(set(published.values())) >= STEPS - 1
    assert len(installed) >= len(reported_installs(run_dir)) and all(
        found == published[version] for version, found in installed
    )
    assert {replica for replica, _ in reported_installs(run_dir)} == {0, 1}


def reported_installs(run_dir: Path) -> set[tuple[int, int]]:
    """Replicas and the versions that they reported as installed."""
    return {(event.replica, event.version) for event in events_of(run_dir, WeightsInstalled) if event.version}
