"""When the launching process begins a run again from its record."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import ray
from clockwork import clockwork
from ray_plans import plan

from engine import events as fact
from engine.actors import run as running
from engine.actors.plan import Plan
from engine.actors.ray_node import RayNode
from engine.actors.run import Launched, RunHandle
from engine.actors.told import Update
from engine.errors import ConfigError, EngineError, RecordError, RecordHeld, RunFailed, StorageFull

NO_MEMORY = "RolloutActor died: CUDA out of memory"
NO_RAY = RayNode(own=False, run_dir=None, processes={})


class Starts:
    """Stands where Ray does: starts of a run that come to these ends, one after the other; then one that is up."""

    def __init__(self, ends: Sequence[BaseException], monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
        self.ends = [*ends]
        self.tried = 0
        self.said: list[str] = []
        self.run = RunHandle(plan(run_dir), Launched(actor=None, launch="first", metrics_url=None), NO_RAY)
        self.run.note = self.said.append
        monkeypatch.setattr(running, "RESPITE_S", 0.0)
        monkeypatch.setattr(Launched, "of", self.start)
        monkeypatch.setattr(Launched, "end", lambda launched: None)

    def start(self, begun: Plan, node: RayNode) -> Launched:
        assert begun.resume
        self.tried += 1
        if self.ends:
            raise self.ends.pop(0)
        return Launched(actor=None, launch="again", metrics_url=None)


def test_a_run_that_was_told_to_end_does_not_begin_again(tmp_path: Path) -> None:
    """Also where its scheduler is gone for good before it could say that it was told."""
    run = RunHandle(plan(tmp_path), Launched(actor=None, launch="", metrics_url=None), NO_RAY)
    run.told = True
    assert not run._begin_again("the scheduler is gone", 3)


def test_a_start_that_fails_for_a_passing_reason_takes_one_of_the_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = RecordHeld(str(tmp_path), 0, "another process is writing this record")
    starts = Starts([RunFailed(NO_MEMORY), held], monkeypatch, tmp_path)
    assert starts.run._begin_again("the trajectory store is lost", 3)
    assert starts.tried == 3 and starts.run._launched.launch == "again"
    assert starts.said == [
        f"{why}; the run begins again from its record ({number} of 5)"
        for number, why in enumerate(
            ("the trajectory store is lost", f"it could not begin again: {NO_MEMORY}",
             f"it could not begin again: {held}"),
            1,
        )
    ]  # fmt: skip


def test_the_last_failure_is_raised_when_no_attempt_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts([RunFailed(f"{NO_MEMORY}, {number}") for number in range(9)], monkeypatch, tmp_path)
    with pytest.raises(RunFailed, match=f"{NO_MEMORY}, 4"):
        starts.run._begin_again("the trajectory store is lost", 3)
    assert starts.tried == 5 and len(starts.said) == 5 and "(5 of 5)" in starts.said[-1]
    assert not starts.run._begin_again("the scheduler is gone", 3)
    assert starts.tried == 5, "there is no further start without a train step in between"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("trainer.optimizer", "Adan", "there is no such optimizer"),
        RecordError("000001.seg", 77, "a frame claims 9 bytes"),
        StorageFull("runs/one", 0, "no space is left"),
        KeyboardInterrupt(),
    ],
    ids=["config", "record", "full", "interrupted"],
)
def test_what_no_further_start_could_mend_is_raised_at_once(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts([RunFailed(NO_MEMORY), error], monkeypatch, tmp_path)
    with pytest.raises(type(error)):
        starts.run._begin_again("the trajectory store is lost", 3)
    assert starts.tried == 2 and len(starts.said) == 2


def test_a_run_that_is_told_to_end_between_two_starts_is_started_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts([RunFailed(NO_MEMORY)], monkeypatch, tmp_path)
    begin = starts.start

    def told(begun: Plan, node: RayNode) -> Launched:
        starts.run.told = True
        return begin(begun, node)

    monkeypatch.setattr(Launched, "of", told)
    with pytest.raises(RunFailed, match=NO_MEMORY):
        starts.run._begin_again("the trajectory store is lost", 3)
    assert starts.tried == 1 and len(starts.said) == 1


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
    run = RunHandle(plan(tmp_path / "run"), Launched(actor=actor, launch="ending", metrics_url=None), NO_RAY)
    said: list[str] = []
    run.note = said.append
    if told:
        assert run.wait().outcome == "stopped" and run.told
    else:
        with pytest.raises(EngineError, match="schedule"):  # it does begin again, and there is no record
            run.wait()
    assert len(said) == (not told)
    assert all("the weights store is lost; the run begins again from its record" in line for line in said)
