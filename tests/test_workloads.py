"""The workloads that come with the engine, and the published runs of the scorecard."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config.workload import load_workload, typical, workload_of
from engine.simulation.schedule import configured_schedule
from engine.simulation.what_if import simulate

ROOT = Path(__file__).resolve().parents[1]
SCORECARD = runpy.run_path(str(ROOT / "benchmarks" / "scorecard.py"))
SHIPPED = sorted((ROOT / "configs" / "workloads").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_workload_names_its_source_and_simulates(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")
    workload = load_workload(path)
    assert workload.about
    history = simulate(configured_schedule(workload.config()), workload, seed=0, steps=3).history
    assert [step.step for step in history.trained] == [0, 1, 2]


def published() -> list[Any]:
    tree = yaml.safe_load(SCORECARD["PUBLISHED"].read_text(encoding="utf-8"))
    return [SCORECARD["Run"](**one) for one in tree["runs"]]


def test_both_sides_of_a_published_run_have_the_same_responses() -> None:
    assert len(published()) > 15
    for run in published():
        sides = [workload_of(run.tree(asynchronous, 1.0)[0], run.setup) for asynchronous in (False, True)]
        assert sides[0].responses == sides[1].responses, run.setup
        assert typical(sides[0].responses.tokens) == pytest.approx(run.length, rel=0.01), run.setup
        assert [configured_schedule(side.config()).limits.max_staleness_steps > 0 for side in sides] == [False, True]


def test_synchronous_generation_takes_as_long_as_published() -> None:
    small = min(published(), key=lambda run: run.groups)
    assert small.seconds(False, 0) == pytest.approx(small.published[0], rel=0.01)
    assert small.seconds(True, 0) < small.seconds(False, 0)
