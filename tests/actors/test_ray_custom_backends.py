"""A custom trainer, the generator of the example and states of train steps on Ray: killed, restarted and resized like
the built-in ones. `test_custom_backends.py` resumes such a run."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_plans import check_record, events_of
from test_ray_lives import kill, until_step

from engine import cli
from engine.actors.launch import launch
from engine.config.loading import parse_config
from engine.control.address_file import FILE
from engine.events import InspectionFailed, ProcessLost, StepInspected, WeightsInstalled
from engine.policies import state_registry

sys.path.append(str(Path(__file__).resolve().parents[1]))
from chat_tokenizers import save_chat_model, write_rows
from http_service_thread import EXAMPLES, http_service

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(600)]


COUNTER = """
from pathlib import Path
import torch


class Counter:
    def __init__(self, setup):
        self.steps = 0

    def train(self, batch):
        assert batch.step == self.steps
        self.steps += 1

    def weights(self):
        return {"steps": torch.tensor([self.steps])}

    def save(self, directory, step):
        Path(directory, "steps").write_text(str(self.steps))

    def load(self, directory):
        self.steps = int(Path(directory, "steps").read_text())
"""
"""Needs no model, so that its process starts fast."""
SENTRIES = """
import os
import signal
from pathlib import Path

from engine import policies


class Sentry:
    def enters(self, view, step):
        return True

    async def work(self, given):
        marker = Path(__file__).with_name("sentry-died")
        if getattr(given, "step", -1) == 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if hasattr(given, "weights") and int(given.weights["steps"]) != given.steps:
            return "these are other weights"


policies.add_state(machine="step", state="sentry-batch", between=("scoring", "training"), policy=Sentry)
policies.add_state(machine="step", state="sentry-weights", between=("publishing", "finished"), policy=Sentry)
"""
"""Its process dies once, while it inspects the batch of step 2."""


def tree(folder: Path, url: str) -> dict[str, Any]:
    rows = [{"prompt": f"{n}+2?", "answer": f"{n + 2}"} for n in range(8)]
    return {
        "run": {"dir": str(folder), "epochs": None, "max_steps": 1000, "code_dir": str(folder),
                "extensions": ["sentries"]},
        "model": {"path": save_chat_model(folder / "model", "chatml", context=64)},
        "data": {"path": write_rows(folder / "rows.jsonl", *rows)},
        "reward": {"function": "engine.tasks.rewards:exact_match"},
        "scheduler": {"train_batch_size": 2, "samples_per_prompt": 2, "max_staleness_steps": 1,
                      "states": ["sentry-batch", "sentry-weights"]},
        "rollout": {
            "backend": "http_generator:HttpGenerator",
            "arguments": {"url": url, "weights_dir": str(folder / "weights")},
            "replicas": 1, "slots": 2, "max_tokens": 4, "device": "cpu",
        },
        "trainer": {"backend": "counter:Counter", "device": "cpu", "checkpoint_every": 4, "threads": 1},
        "validation": {"at_start": False, "at_end": False},
        "control": {"port": 0},
    }  # fmt: skip


@pytest.fixture
def states() -> Iterator[None]:
    before = {*state_registry.registered()}
    yield
    state_registry.forget({*state_registry.registered()} - before)
    sys.modules.pop("sentries", None)


@pytest.mark.usefixtures("states")
def test_custom_classes_and_states_of_steps_are_restarted_and_resized(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (tmp_path / "counter.py").write_text(COUNTER, encoding="utf-8")
    (tmp_path / "sentries.py").write_text(SENTRIES, encoding="utf-8")
    shutil.copy(EXAMPLES / "http_generator.py", tmp_path)
    with http_service() as url:
        config = parse_config(tree(tmp_path, url))
        with launch(config, run_dir) as run:
            until_step(run, 5)
            kill("TrainerAct")
            kill("RolloutAct")
            assert cli.main(["scale", str(run_dir), "--replicas", "2"]) == 0
            for status in run.updates():
                installed = {event.replica for event in events_of(run_dir, WeightsInstalled)}
                if status.step > 6 and len(installed) == 2 and not run.end_requested:
                    assert cli.main(["drain", str(run_dir)]) == 0
            assert (status.outcome, status.reason) == ("stopped", "asked by engine drain") and run.end_requested
    assert not (run_dir / FILE).exists(), "nobody listens any more"
    assert check_record(run_dir).state.training.steps_trained > 6, "the restarted trainer has loaded its checkpoint"
    lost = {event.kind for event in events_of(run_dir, ProcessLost)}
    assert {"trainer", "replica", "added states"} <= lost
    passed = {event.state for event in events_of(run_dir, StepInspected)}
    assert passed == {"sentry-batch", "sentry-weights"} and not events_of(run_dir, InspectionFailed)
