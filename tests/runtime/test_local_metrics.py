"""Where a run says that its metrics are, and what it does without its sinks."""

import json
import socket
import urllib.request
from pathlib import Path

import pytest
from ray_plans import PROMPTS, Counter, plan

from engine.metrics import sinks
from engine.metrics.address_files import FILE, FOLDER, HOST
from engine.protocols import Batch
from engine.runtime.local import run_plan
from engine.workers.plan import ServerAddress

RUN = "20260101-000000-watched"


def test_a_run_that_ends_is_not_missed(tmp_path: Path) -> None:
    run_dir, endpoints = tmp_path / RUN, tmp_path / FOLDER
    seen: list[str] = []

    class Looking(Counter):
        def train(self, batch: Batch) -> dict[str, float]:
            if batch.step == 2:
                (said,) = json.loads((endpoints / f"{RUN}.json").read_text())
                assert said["labels"] == {"run": RUN, HOST: socket.gethostname()}, "Prometheus drops the second"
                assert json.loads((run_dir / FILE).read_text()) == [said]
                with urllib.request.urlopen(f"http://{said['targets'][0]}/metrics", timeout=60) as answer:
                    seen.append(answer.read().decode())
            return super().train(batch)

    run_plan(plan(run_dir, make_trainer=Looking, metrics=ServerAddress(), endpoints=endpoints))
    assert "engine_train_steps_total 2.0" in seen[0]
    assert list(endpoints.iterdir()) == [] and not (run_dir / FILE).exists()


def test_a_run_continues_without_its_sinks_or_an_announced_metrics_endpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "CLOSE_TIMEOUT_S", 120.0)  # on a busy machine, the import of mlflow takes long
    (tmp_path / "file").write_text("")
    blocked = str(tmp_path / "file" / "folder")
    blocked_sinks = {"mlflow": {"uri": f"file://{blocked}"}, "tensorboard": {"dir": blocked}}
    run_dir = tmp_path / "run"
    assert (
        run_plan(plan(run_dir, metrics=ServerAddress(), endpoints=Path(blocked), sinks=blocked_sinks)).steps
        == PROMPTS // 4
    )
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == PROMPTS // 4
    for name in blocked_sinks:
        assert f"{name} cannot be opened; the run continues without it" in caplog.text
    assert "cannot announce the address of the metrics endpoint" in caplog.text
