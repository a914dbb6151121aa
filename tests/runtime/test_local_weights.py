"""Weights that are swapped under running groups, in one process."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.events import GroupAborted, GroupGenerated, WeightsInstalled
from engine.runtime.local import run_plan

sys.path.append(str(Path(__file__).resolve().parent.parent / "actors"))
from ray_plans import PROMPTS, check_record, events_of, paced, plan, spanning


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_weights_are_swapped_under_running_groups(tmp_path: Path, mode: str) -> None:
    limits = replace(plan(tmp_path).limits, sync_mode=mode)
    assert run_plan(plan(tmp_path, spanning, limits=limits)).outcome == "finished"
    scheduler = check_record(tmp_path)
    assert scheduler.state.ledger.consumed == PROMPTS
    assert events_of(tmp_path, WeightsInstalled)
    generated = events_of(tmp_path, GroupGenerated)
    assert all(e.tokens == 2 * paced(0).length_of(e.group) for e in generated), (
        "whatever was cut continued to its full length"
    )
    mixed = {e.group for e in generated if e.oldest_version < e.newest_version}
    aborted = {e.group for e in events_of(tmp_path, GroupAborted) if e.tokens}
    assert mixed, "the first long groups end under newer weights"
    assert bool(mixed & aborted) == (mode == "abort")
