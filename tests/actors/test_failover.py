"""How a scheduler that Ray has started again takes hold of actors, without Ray."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.actors.detached_actors import RunningActors
from engine.actors.failover import attach_actors, recovery_of
from engine.errors import EngineError
from engine.record import Header, Recorder
from engine.record.reader import Record
from engine.simulation.world import Setting, World
from engine.states.limits import Limits


class Actor:
    """A handle: it takes the new epoch, or is silent, as one is for which no node has room."""

    def __init__(self, silent: bool = False) -> None:
        self.silent = silent
        self.epochs: list[int] = []
        self.attach = SimpleNamespace(remote=self._attach)

    def _attach(self, epoch: int) -> "asyncio.Future[None]":
        self.epochs.append(epoch)
        answer = asyncio.get_running_loop().create_future()
        if not self.silent:
            answer.set_result(None)
        return answer


def test_listed_lives_take_the_new_epoch_and_one_that_starts_is_not_waited_for() -> None:
    lives = [("rollout-0", 1), ("rollout-1", 2), ("trainer", 1), ("rollout-0", 2), ("weights", 1)]
    actors = {life: Actor(silent=life == ("rollout-1", 2)) for life in lives}
    listed = {("rollout-0", 1): True, ("rollout-1", 2): False, ("trainer", 1): True, ("rollout-9", 1): True}

    async def story() -> dict[str, str]:
        known = RunningActors(actors=actors, epoch=33)
        return await asyncio.wait_for(attach_actors(known, listed, 3600.0), 60.0)

    assert asyncio.run(story()) == {}
    assert [actor.epochs for actor in actors.values()] == [[33], [33], [33], [], []]


def test_one_that_was_up_and_gives_no_sign_of_life_is_silent() -> None:
    lives = [("rollout-0", 1), ("trainer", 1)]
    known = RunningActors(actors={life: Actor(silent=True) for life in lives}, epoch=33)
    silent = asyncio.run(attach_actors(known, dict.fromkeys(lives, True), 0.01))
    assert set(silent) == {"rollout-0", "trainer"} and "no sign of life" in silent["trainer"]


def test_orders_to_repeat_are_in_the_newest_snapshot_and_no_older_frame_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(train_batch_size=4, max_staleness_steps=1, max_concurrent_groups=8, max_steps=12)
    recorder = Recorder(tmp_path / "schedule", Header(run="any", limits=limits.to_plain()))
    setting = Setting(limits=limits, replicas=2, slots=4, prompts=48, seed=3)
    world = World(setting, None, recorder, snapshot_every=40)
    with pytest.raises(EngineError):
        world.run(events=130)
    recorder.close()
    state = world.scheduler.state
    monkeypatch.setattr(Record, "frames", None)
    recovery = recovery_of(tmp_path)
    recovery.lock.release()
    assert recovery.recovered.began_at is not None and recovery.recovered.began_at.position >= 80
    again = recovery.recovered.scheduler.state.orders.reissued(recovery.recovered.at)
    assert again == state.orders.reissued(state.facts.now) != []
