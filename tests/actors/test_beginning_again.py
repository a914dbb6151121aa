"""When the launching process begins a run again from its record."""

from pathlib import Path

import pytest
import ray
from clockwork import clockwork
from ray_plans import plan

from engine import events as fact
from engine.actors.run import Launched, RunHandle
from engine.actors.told import Update
from engine.errors import EngineError


def test_a_run_that_was_told_to_end_does_not_begin_again(tmp_path: Path) -> None:
    """Also where its scheduler is gone for good before it could say that it was told."""
    run = RunHandle(plan(tmp_path), Launched(actor=None, launch="", metrics_url=None), False)
    run.told = True
    assert not run._begin_again("the scheduler is gone", 3)


@ray.remote(num_cpus=0)
class Ending:
    """A scheduler that says these things one after the other."""

    def __init__(self, said: list[Update]) -> None:
        self.said = said

    def next_update(self, since: int) -> Update:
        return self.said.pop(0)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("told", [False, True])
def test_what_a_scheduler_said_before_it_died_at_the_end_holds_for_the_next(tmp_path: Path, told: bool) -> None:
    """That which Ray starts in its place, when everything is being taken down, knows of the record alone."""
    world = clockwork().run(lambda world: world.scheduler.state.ledger.running == 4)
    world.driver.deliver(fact.StopRequested(reason="the weights store is lost"))
    status = world.metrics.status()
    before = Update(number=7, status=status, last=False, relaunch="the weights store is lost", told=told)
    actor = Ending.remote([before, Update(number=1, status=status, last=True)])
    run = RunHandle(plan(tmp_path / "run"), Launched(actor=actor, launch="ending", metrics_url=None), False)
    said: list[str] = []
    run.note = said.append
    if told:
        assert run.wait().outcome == "stopped" and run.told
    else:
        with pytest.raises(EngineError, match="schedule"):  # it does begin again, and there is no record
            run.wait()
    assert len(said) == (not told)
    assert all("the weights store is lost; the run begins again from its record" in line for line in said)
