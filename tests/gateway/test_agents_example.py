"""The agents' example as its users run it, cut to a few steps: model, agent, gateway, training, record."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.record import read, replay

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import engine.training.warmup as warmup
whole = warmup.WarmUp
warmup.WarmUp = lambda **given: whole(**{**given, "steps": 12})  # of 500
import multi_turn_agent
from forked_workers import MODEL, forked_workers
with forked_workers(*MODEL):
    sys.exit(multi_turn_agent.main(sys.argv[1:]))
"""


def test_the_calculator_agent_trains_through_the_gateway(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    for change in ("run.max_steps=3", "validation.at_start=false", "validation.prompts=8", "rollout.replicas=1"):
        command += ["--set", change]
    folders = [str(ROOT / folder) for folder in ("", "examples", "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "latest"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step" in row]
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert all(row["groups"] == 8 for row in steps)
    assert [row["outcome"] for row in rows if "validation" in row] == ["reported"]
    assert replay(read(run_dir / "schedule")).identical
