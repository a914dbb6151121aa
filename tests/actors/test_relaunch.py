"""When the launching process begins a run again from its record."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from ray_plans import plan

from engine.actors import launch as running
from engine.actors.launch import Launched, RunHandle
from engine.actors.launcher_watch import RayNode
from engine.actors.scheduler_actor import RelaunchNeeded
from engine.errors import ConfigError, RecordError, RunFailed, RunFinished, StorageFull
from engine.events import RunInterrupted, StopRequested
from engine.record.segment_log import Index, store_index
from engine.workers.plan import Plan
from tests.core.test_recovery import busy

NO_MEMORY = "RolloutActor died: CUDA out of memory"
NO_RAY = RayNode(own=False, run_dir=None, processes={})


class Starts:
    """Stands where Ray does: launches of a run that come to these ends, one after the other; then one that is up."""

    def __init__(self, ends: Sequence[BaseException], monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
        self.ends = [*ends]
        self.tried: list[RunInterrupted | None] = []
        """Of each launch: what it says about why the run was interrupted."""
        self.said: list[str] = []
        self.run = RunHandle(plan(run_dir), Launched(actor=None, launch="first", metrics_url=None), NO_RAY)
        self.run.note = self.said.append
        monkeypatch.setattr(running, "RELAUNCH_DELAY_S", 0.0)
        monkeypatch.setattr(Launched, "of", self.start)
        monkeypatch.setattr(Launched, "end", lambda launched: None)

    def start(self, begun: Plan, node: RayNode, show: Callable[[str], None]) -> Launched:
        assert begun.resume and begun.resumption.again
        self.tried.append(begun.resumption.interrupted)
        if self.ends:
            raise self.ends.pop(0)
        return Launched(actor=None, launch="again", metrics_url=None)


def test_a_run_that_was_asked_to_end_does_not_restart(tmp_path: Path) -> None:
    """Even if its scheduler is lost for good before it could report the request."""
    run = RunHandle(plan(tmp_path), Launched(actor=None, launch="", metrics_url=None), NO_RAY)
    run.end_requested = True
    assert not run._relaunch_run("the scheduler is gone", recorded=False)


@pytest.mark.parametrize("recorded", [True, False])
def test_each_launch_says_what_its_record_does_not(
    recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is another launch is decided from the record: `tests/core/test_restarts.py`."""
    starts = Starts([RelaunchNeeded(NO_MEMORY)] * 7, monkeypatch, tmp_path)
    assert starts.run._relaunch_run("the trajectory store is lost", recorded=recorded)
    reason = f"the run could not restart: {NO_MEMORY}"
    failed = RunInterrupted(reason=reason, launch=True)
    first = None if recorded else RunInterrupted(reason="the trajectory store is lost")
    assert starts.tried == [first, *[failed] * 7] and starts.run._launched.launch == "again"
    assert starts.said == [
        f"{why}; the run restarts from its record" for why in ("the trajectory store is lost", *[reason] * 7)
    ]


def test_a_launch_whose_scheduler_decides_against_it_shows_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = busy()
    stopped.driver.deliver(StopRequested(reason="enough"))
    (tmp_path / "schedule").mkdir()
    (tmp_path / "schedule" / "00000000.seg").write_bytes(stopped.recorder.to_bytes())
    store_index(tmp_path / "schedule", Index([None]))
    starts = Starts([RunFinished("RUN", str(tmp_path), "has ended")], monkeypatch, tmp_path)
    assert starts.run._relaunch_run("the scheduler is gone", recorded=False)
    assert starts.run.wait().reason == "enough"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("trainer.optimizer", "Adan", "there is no such optimizer"),
        RecordError("000001.seg", 77, "a frame claims 9 bytes"),
        RunFailed("SchedulerActor died"),
        StorageFull("runs/one", 0, "no space is left"),
        KeyboardInterrupt(),
    ],
    ids=["config", "record", "died", "full", "interrupted"],
)
def test_what_no_further_start_could_mend_is_raised_at_once(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts([RelaunchNeeded(NO_MEMORY), error], monkeypatch, tmp_path)
    with pytest.raises(type(error)):
        starts.run._relaunch_run("the trajectory store is lost", recorded=True)
    assert len(starts.tried) == len(starts.said) == 2


def test_a_run_asked_to_end_between_two_starts_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts([RelaunchNeeded(NO_MEMORY)], monkeypatch, tmp_path)
    begin = starts.start

    def start_after_request(begun: Plan, node: RayNode, show: Callable[[str], None]) -> Launched:
        starts.run.end_requested = True
        return begin(begun, node, show)

    monkeypatch.setattr(Launched, "of", start_after_request)
    with pytest.raises(RunFailed, match=NO_MEMORY):
        starts.run._relaunch_run("the trajectory store is lost", recorded=True)
    assert len(starts.tried) == len(starts.said) == 1


@pytest.mark.parametrize("shown", [True, False])
def test_what_a_start_waits_for_is_said_once(
    shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To the caller if it shows progress, and in the log otherwise."""

    def launched(begun: Plan, node: RayNode, show: Callable[[str], None]) -> Launched:
        show("it waits")
        raise KeyboardInterrupt

    said: list[str] = []
    monkeypatch.setattr(running, "connect", lambda size: None)
    monkeypatch.setattr(running, "ray_processes", dict)
    monkeypatch.setattr(running, "with_gpus", lambda plan: (plan, ("1 GPU is idle",)))
    monkeypatch.setattr(Launched, "of", launched)
    with pytest.raises(KeyboardInterrupt):
        running.start(plan(tmp_path), (lambda share, text: said.append(text)) if shown else None)
    assert (said if shown else caplog.messages)[-2:] == ["1 GPU is idle", "it waits"]
    assert not (shown and caplog.messages)
