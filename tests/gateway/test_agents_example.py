"""The agents' example as its users run it, cut to a few steps: model, agent, gateway, training, record."""

import importlib
import json
from pathlib import Path

import pytest

import engine.training.warmup as warmup
from engine.record import read, replay

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.ray
@pytest.mark.usefixtures("cluster", "own_signals")
def test_the_calculator_agent_trains_through_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    whole = warmup.WarmUp
    monkeypatch.setattr(warmup, "WarmUp", lambda **given: whole(**{**given, "steps": 12}))  # of 500
    changes = ("run.max_steps=3", "validation.at_start=false", "validation.prompts=8", "rollout.replicas=1")
    main = importlib.import_module("multi_turn_agent").main
    assert main([word for change in changes for word in ("--set", change)]) == 0
    run_dir = tmp_path / "runs" / "latest"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step" in row]
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert all(row["groups"] == 8 for row in steps)
    assert [row["outcome"] for row in rows if "validation" in row] == ["reported"]
    assert replay(read(run_dir / "schedule")).identical
