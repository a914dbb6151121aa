"""When the launching process begins a run again from its record, as far as no cluster is needed to know it."""

from pathlib import Path

from ray_plans import plan

from engine.actors.run import Launched, RunHandle


def test_a_run_that_was_told_to_end_does_not_begin_again(tmp_path: Path) -> None:
    """Also where its scheduler is gone for good before it could say that it was told."""
    run = RunHandle(plan(tmp_path), Launched(actor=None, launch="", metrics_url=None), False)
    run.told = True
    assert not run._begin_again("the scheduler is gone", 3)
