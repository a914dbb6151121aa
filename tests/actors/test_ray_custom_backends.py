"""A trainer of the user and the generator of the example on Ray: killed, restarted, resized like the built-in ones."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from ray_plans import check_record, events_of
from test_ray_lives import kill, until_step

from engine.actors.launch import launch
from engine.config.loading import parse_config
from engine.control.requests import Scale
from engine.events import ProcessLost, WeightsInstalled

sys.path.append(str(Path(__file__).resolve().parents[1]))
from chat_tokenizers import save_chat_model, write_rows
from http_service_thread import EXAMPLES, http_service

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(300)]


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


def tree(folder: Path, url: str) -> dict[str, Any]:
    rows = [{"prompt": f"{n}+2?", "answer": f"{n + 2}"} for n in range(8)]
    return {
        "run": {"dir": str(folder), "epochs": None, "max_steps": 1000, "code_dir": str(folder)},
        "model": {"path": save_chat_model(folder / "model", "chatml", context=64)},
        "data": {"path": write_rows(folder / "rows.jsonl", *rows)},
        "reward": {"function": "engine.tasks.rewards:exact_match"},
        "scheduler": {"train_batch_size": 2, "samples_per_prompt": 2, "max_staleness_steps": 1},
        "rollout": {
            "backend": "http_generator:HttpGenerator",
            "arguments": {"url": url, "weights_dir": str(folder / "weights")},
            "replicas": 1, "slots": 2, "max_tokens": 4, "device": "cpu",
        },
        "trainer": {"backend": "counter:Counter", "device": "cpu", "checkpoint_every": 4, "threads": 1},
        "validation": {"at_start": False, "at_end": False},
        "control": {"enabled": False},
    }  # fmt: skip


def test_classes_of_the_user_are_restarted_and_resized(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (tmp_path / "counter.py").write_text(COUNTER, encoding="utf-8")
    shutil.copy(EXAMPLES / "http_generator.py", tmp_path)
    with http_service() as url:
        config = parse_config(tree(tmp_path, url))
        with launch(config, run_dir) as run:
            until_step(run, 3)
            kill("TrainerAct")
            run._tell(Scale(replicas=2))
            for status in run.updates():  # noqa: B007
                if len({event.replica for event in events_of(run_dir, WeightsInstalled)}) == 2:
                    run.drain("enough")
            assert status.outcome == "stopped"
    assert check_record(run_dir).state.steps_trained > 3
    lost = [event.kind for event in events_of(run_dir, ProcessLost)]
    assert lost[0] == "trainer"
