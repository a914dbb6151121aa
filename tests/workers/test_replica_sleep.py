"""A replica that sleeps: what is reported and in what order, and that a failure leaves it of use."""

import asyncio
from typing import Any

import pytest
from event_loops import played
from test_replica_worker import WHO, Stage
from token_generator import TokenGenerator

from engine.commands import InstallWeights, ResumeReplica, StageWeights
from engine.events import GroupAborted, GroupGenerated, ReplicaPaused, SyncFailed, WeightsInstalled, WeightsStaged


class Sleepy(TokenGenerator):
    """Counts as asleep between `sleep` and `wake`; raises in the calls that `fails` names."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fails: set[str] = set()

    async def _named(self, call: str) -> None:
        self.calls.append(call)
        await asyncio.sleep(0)
        if call in self.fails:
            raise RuntimeError(f"{call} broke")

    async def sleep(self) -> None:
        await self._named("sleep")

    async def wake(self) -> None:
        await self._named("wake")


def resumed(attempt: int = 1) -> ResumeReplica:
    return ResumeReplica(attempt=attempt, number=0, **WHO)


@played
async def test_groups_are_parked_before_the_replica_sleeps() -> None:
    stage = await Stage(Sleepy(length=4)).open()
    stage.start(0)
    await stage.settle()
    stage.generator.tick(2)
    stage.pause("sleep")
    aborted, paused = await stage.until(2)
    assert isinstance(aborted, GroupAborted) and aborted.tokens == 4
    assert isinstance(paused, ReplicaPaused)
    assert stage.generator.calls == ["pause abort", "sleep"]
    (kept,) = await stage.trajectories.get([0])
    assert [len(t.token_ids) for t in kept.trajectories] == [2, 2]
    stage.start(1)
    assert isinstance((await stage.until(3))[-1], GroupAborted), "nothing is begun while it sleeps"
    assert len(stage.generator.works) == 1
    stage.worker.carry_out(resumed())
    stage.resume(0, attempt=2)
    await stage.settle()
    stage.generator.tick(2)
    assert isinstance((await stage.until(4))[-1], GroupGenerated)
    assert stage.generator.calls[2:] == ["wake", "resume"]


@played
async def test_weights_are_staged_while_it_sleeps_and_installed_straight_from_there() -> None:
    stage = await Stage(Sleepy(length=1, free=True)).open()
    stage.pause("sleep", version=0)
    await stage.until(1)
    stage.weights.store.put(1, "weights 1")
    stage.worker.carry_out(StageWeights(version=1, attempt=2, **WHO))
    stage.worker.carry_out(InstallWeights(version=1, attempt=2, **WHO))
    stage.worker.carry_out(resumed(2))
    _, staged, installed = await stage.until(3)
    await stage.settle()
    assert isinstance(staged, WeightsStaged) and isinstance(installed, WeightsInstalled)
    assert stage.generator.calls == ["pause abort", "sleep", "stage 1", "wake", "install 1", "resume"]
    stage.start()
    assert (await stage.until(4))[-1].oldest_version == 1  # type: ignore[attr-defined]


@played
async def test_a_repeated_order_to_sleep_changes_nothing_and_a_newer_one_is_answered() -> None:
    stage = await Stage(Sleepy()).open()
    for attempt in (1, 1, 2):
        stage.pause("sleep", attempt=attempt)
    await stage.until(2)
    await stage.settle()
    assert [event.attempt for event in stage.events] == [1, 2]  # type: ignore[attr-defined]
    assert stage.generator.calls == ["pause abort", "sleep", "pause abort"]


@played
async def test_a_generator_that_cannot_sleep_is_paused() -> None:
    stage = await Stage(TokenGenerator(length=1, free=True)).open()
    stage.pause("sleep")
    assert isinstance((await stage.until(1))[0], ReplicaPaused)
    stage.worker.carry_out(resumed())
    stage.start()
    assert isinstance((await stage.until(2))[-1], GroupGenerated)


@pytest.mark.parametrize("call", ["sleep", "wake"])
@played
async def test_a_failure_to_sleep_or_to_wake_is_a_failed_sync_and_the_replica_goes_on(call: str) -> None:
    stage = await Stage(Sleepy(length=1, free=True)).open()
    stage.generator.fails = {call}
    stage.pause("sleep", version=0)
    await stage.until(1)
    stage.weights.store.put(1, "weights 1")
    stage.worker.carry_out(StageWeights(version=1, attempt=2, **WHO))
    stage.worker.carry_out(InstallWeights(version=1, attempt=2, **WHO))
    await stage.until(3)
    failed = stage.events[0 if call == "sleep" else 2]
    assert isinstance(failed, SyncFailed) and f"{call} broke" in failed.reason
    stage.generator.fails = set()
    stage.worker.carry_out(InstallWeights(version=1, attempt=3, **WHO))
    assert isinstance((await stage.until(4))[-1], WeightsInstalled)
    stage.worker.carry_out(resumed(3))
    stage.start()
    assert isinstance((await stage.until(5))[-1], GroupGenerated)
    assert not stage.worker.broken


@played
async def test_a_replica_that_cannot_be_woken_to_sample_is_broken() -> None:
    stage = await Stage(Sleepy()).open()
    stage.generator.fails = {"wake"}
    stage.pause("sleep")
    await stage.until(1)
    stage.worker.carry_out(resumed())
    await stage.settle()
    reason = stage.worker.broken
    assert reason.startswith("resuming failed: RuntimeError: wake broke (")
