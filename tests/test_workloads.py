"""The workloads that come with the engine."""

from pathlib import Path

import pytest

from engine.config.workload import load_workload
from engine.simulation.schedule import configured_schedule
from engine.simulation.what_if import simulate

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted((ROOT / "configs" / "workloads").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_workload_names_its_source_and_simulates(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")
    workload = load_workload(path)
    assert workload.about
    history = simulate(configured_schedule(workload.config()), workload, seed=0, steps=3).history
    assert [step.step for step in history.trained] == [0, 1, 2]
