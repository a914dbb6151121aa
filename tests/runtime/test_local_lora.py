"""A run that trains an adapter, in one process: what each replica samples from is what the trainer published."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from digested_weights import Digested, DigestedRanks, note_installs
from safetensors.torch import load_file

from engine.config.loading import parse_config
from engine.events import WeightsInstalled
from engine.plans.configured_plan import plan_of
from engine.runtime.local import run_plan

sys.path.append(str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parent.parent / "actors"))
from ray_plans import SMALLEST, check_record, events_of
from reference_sync import digest

STEPS = 3


@pytest.mark.parametrize("kind", [Digested, DigestedRanks], ids=["one rank", "two ranks"])
def test_the_adapter_at_each_replica_is_the_trainers_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Digested | DigestedRanks]
) -> None:
    config = {
        "run": {"dir": str(tmp_path), "max_steps": STEPS, "seed": 3},
        "model": {"make": "arithmetic", "arithmetic": SMALLEST},
        "scheduler": {"train_batch_size": 4, "samples_per_prompt": 4, "max_staleness_steps": 1},
        "rollout": {"replicas": 2, "slots": 4, "max_tokens": 40},
        "trainer": {
            "lora": {"rank": 4, "alpha": 8}, "learning_rate": 1e-2, "checkpoint_every": STEPS, "threads": 1,
            "ranks": 1 if kind is Digested else 2, "device": "cpu",
            "kl_loss_coef": 0.01, "overlong_cache_tokens": 39,  # length alone makes advantages
        },
        "validation": {"at_start": False, "at_end": False},
    }  # fmt: skip
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    planned = plan_of(parse_config(config), run_dir)
    installed = note_installs(monkeypatch)
    made: list[Digested | DigestedRanks] = []

    def make_trainer(*arguments: Any) -> Digested | DigestedRanks:
        made.append(kind(*arguments))
        return made[-1]

    model, settings = planned.make_trainer.args[:2]  # type: ignore[attr-defined]
    assert run_plan(replace(planned, make_trainer=partial(make_trainer, model, settings))).outcome == "finished"
    check_record(run_dir)
    [trainer] = made
    published = dict(enumerate(trainer.digests, start=1))
    assert len(set(published.values())) == len(published) >= STEPS - 1
    assert all(found == published[version] for version, found in installed)
    reported = {(event.replica, event.version) for event in events_of(run_dir, WeightsInstalled) if event.version}
    assert len(reported) == len(installed) and {replica for replica, _ in reported} == {0, 1}
    saved = load_file(run_dir / "checkpoints" / f"step-{STEPS:06}" / "adapter_model.safetensors")
    assert [digest(saved)] == trainer.saved and all("lora_" in name for name in saved)
