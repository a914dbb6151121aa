"""Validation rows on a replica: counted once, under the version that was asked for, and whose fault it is when not."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from event_loops import played
from msgspec.structs import replace
from test_replica_worker import WHO, Stage
from worker_bench import AT_ONCE

from engine.commands import InstallWeights, MeasureRows, PauseReplica, ResumeReplica, StageWeights, StopMeasuring
from engine.errors import DataFailure, EngineError
from engine.events import NO_ANSWER, Event, OrderProgressed, ReplicaPaused, RowsFailed, RowsMeasured
from engine.protocols import Generated, GroupWork
from engine.runtime.local import SimpleGenerator, response
from engine.states.limits import ValidationLimits, ValidationSet
from engine.trajectory import Prompt, Trajectory
from engine.workers.measurement import answer_number, held_out_group
from engine.workers.plan import Rollout

PROMPTS = [Prompt(row=row, text=f"{row} + 1") for row in range(6)]


class Answering(SimpleGenerator):
    """Rows that 3 divides are right; row 5 cannot be judged. Answers when it is let."""

    def __init__(self, reward: Callable[[int], float | None] = lambda row: float(row % 3 == 0)) -> None:
        super().__init__()
        self.reward = reward
        self.let = asyncio.Event()
        self.works: list[GroupWork] = []
        self.parts: dict[int, dict[str, float]] = {}
        """Of the reward, by row."""

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        self.works.append(work)
        await self.let.wait()
        if work.prompt.row == 5:
            raise DataFailure("no answer is known")
        judged = response([1, 2], reward=0.0, version=version)
        judged.reward = self.reward(work.prompt.row)
        judged.reward_parts = dict(self.parts.get(work.prompt.row, {}))
        return [judged]


async def stage(generator: Any, held_out: bool = True, sets: Sequence[ValidationSet] = (), **changes: Any) -> Stage:
    """A worker whose generator answers validation prompts too."""
    if not held_out:
        return await Stage(generator).open()
    limits = {"validation": ValidationLimits(rows=len(PROMPTS), sets=tuple(sets)), **changes.pop("limits", {})}
    return await Stage(generator, held_out=PROMPTS, limits=limits, **changes).open()


def measure(chunk: int = 0, first: int = 0, count: int = 3, attempt: int = 1, version: int = 0, validation: int = 2):  # type: ignore[no-untyped-def]
    """A repeat has the same number as the first order, and a later order a higher one."""
    return MeasureRows(
        validation=validation, chunk=chunk, attempt=attempt, version=version, first=first, count=count,
        number=100 * validation + 10 * attempt + chunk, **WHO,
    )  # fmt: skip


def news(stage: Stage, *kinds: type[Event]) -> list[Any]:
    return [event for event in stage.events if isinstance(event, kinds)]


@played
async def test_rows_are_counted_and_those_at_fault_are_not() -> None:
    on = await stage(Answering())
    on.generator.let.set()
    on.worker.carry_out(measure(0, 0, 3))
    on.worker.carry_out(measure(1, 3, 3))
    await on.until(2)
    said = {e.chunk: (e.version, e.measured, e.right, e.reward) for e in news(on, RowsMeasured)}
    assert said == {0: (0, 3, 1, 1.0), 1: (0, 2, 1, 1.0)}
    assert all(work.held_out and work.samples == 1 and work.group < 0 for work in on.generator.works)
    groups = [work.group for work in on.generator.works]
    assert groups == [held_out_group(2, 6, row) for row in range(6)]
    assert not set(groups) & {held_out_group(3, 6, row) for row in range(6)}


@played
async def test_each_row_that_ends_is_reported_as_progress_of_its_chunk() -> None:
    class OneByOne(Answering):
        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            self.works.append(work)
            await ends[work.prompt.row].wait()
            return [response([1], reward=1.0, version=version)]

    ends = [asyncio.Event() for _ in range(3)]
    on = await stage(generator := OneByOne(), limits={"timeouts": AT_ONCE})
    on.worker.carry_out(replace(measure(), number=9))
    for row in range(2):
        ends[row].set()
        assert await on.until(row + 1) == [OrderProgressed(order=9)] * (row + 1)
    ends[2].set()
    while not news(on, RowsMeasured):
        await on.until(len(on.events) + 1)
    generator.works[0].progress()
    await on.settle()
    assert isinstance(on.events[-1], RowsMeasured), "the chunk has ended"


@played
async def test_a_repeated_order_is_carried_out_once_and_a_newer_attempt_again() -> None:
    on = await stage(Answering())
    on.generator.let.set()
    for order in (measure(), measure(), measure(attempt=2), measure(attempt=1), measure(5, validation=1)):
        on.worker.carry_out(order)
    await on.settle()
    assert [(e.validation, e.attempt) for e in news(on, RowsMeasured)] == [(2, 2)]


@played
async def test_a_repeat_of_an_order_that_was_answered_is_not_answered_again() -> None:
    on = await stage(Answering())
    on.generator.let.set()
    on.worker.carry_out(measure())
    await on.until(1)
    on.worker.carry_out(measure())
    await on.settle()
    assert len(news(on, RowsMeasured)) == 1 and len(on.generator.works) == 3


@played
async def test_what_is_the_replica_s_fault_fails_the_chunk() -> None:
    class Broken(Answering):
        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            raise EngineError("out of memory")

    on = await stage(Broken())
    on.worker.carry_out(measure())
    on.worker.carry_out(measure(1, 3, 9))
    lost = await stage(Answering(), held_out=False)
    lost.worker.carry_out(measure())
    await on.until(2)
    await lost.until(1)
    by_chunk = {event.chunk: event.reason for event in news(on, RowsFailed)}
    reasons = [by_chunk[0], by_chunk[1], news(lost, RowsFailed)[0].reason]
    words = ("out of memory", "there are 6 validation", "no evaluator")
    assert [word in reason for word, reason in zip(words, reasons, strict=True)] == [True] * 3


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, "high", 10**400])
@played
async def test_a_response_without_a_finite_reward_is_not_measured(
    reward: Any, caplog: pytest.LogCaptureFixture
) -> None:
    on = await stage(Answering(reward=lambda row: reward))
    on.generator.let.set()
    on.worker.carry_out(measure())
    await on.until(1)
    (event,) = news(on, RowsMeasured)
    assert (event.measured, event.right, event.reward) == (0, 0, 0.0)
    (said,) = caplog.messages
    assert said.startswith("validation row 0 cannot be") and said.endswith("further rows are not measured either")


@played
async def test_a_response_with_a_malformed_part_of_its_reward_is_not_measured() -> None:
    on = await stage(Answering())
    on.generator.parts = {0: {"right": math.nan}, 1: {"right": "high"}, 2: {"right": 1.0}}
    on.generator.let.set()
    on.worker.carry_out(measure())
    await on.until(1)
    (event,) = news(on, RowsMeasured)
    assert event.rows == (2,)


@pytest.mark.parametrize("wrong", ["text", None, Generated(group=None)])  # type: ignore[arg-type]
@played
async def test_an_answer_of_another_kind_fails_the_chunk_by_name(wrong: Any) -> None:
    class Odd(Answering):
        async def generate(self, work: GroupWork) -> Any:
            return wrong

    on = await stage(Odd())
    on.worker.carry_out(measure())
    await on.until(1)
    (event,) = news(on, RowsFailed)
    assert "validation row 0: generate() must return Generated(group=TrajectoryGroup(...))" in event.reason


@played
async def test_rows_with_rewards_too_large_to_add_up_are_not_measured() -> None:
    on = await stage(Answering(reward=lambda row: 1e308 if row else 1.0))
    on.generator.let.set()
    on.worker.carry_out(measure())
    await on.until(1)
    (event,) = news(on, RowsMeasured)
    assert event.rewards == (1.0,)


@played
async def test_another_version_is_never_measured_in_its_place() -> None:
    on = await stage(Answering())
    on.worker.carry_out(measure(version=1))
    await on.until(1)
    assert "version 0, but version 1 must" in news(on, RowsFailed)[0].reason
    on.worker.carry_out(measure(1))
    await on.settle()
    on.worker._weights.version = 1  # as if an install had come in between
    on.generator.let.set()
    await on.until(2)
    assert "version 1, but version 0 must" in news(on, RowsFailed)[1].reason


@played
async def test_rows_wait_for_the_weights_that_were_ordered_before_them() -> None:
    class Slow(Answering):
        async def install(self, version: int) -> None:
            await self.installed.wait()
            await super().install(version)

    on = await stage(Slow())
    on.generator.installed = asyncio.Event()
    on.weights.store.put(1, "w")
    on.generator.let.set()
    for order in (
        StageWeights(version=1, attempt=1, **WHO),
        PauseReplica(version=1, mode="keep", attempt=1, **WHO),
        InstallWeights(version=1, attempt=1, **WHO),
        ResumeReplica(attempt=1, number=0, **WHO),
        measure(version=1),
    ):
        on.worker.carry_out(order)
    await on.settle()
    assert not news(on, RowsMeasured, RowsFailed)
    on.generator.installed.set()
    await on.settle()
    assert [e.version for e in news(on, RowsMeasured)] == [1]


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
@played
async def test_stopped_measuring_reports_nothing_and_samples_nothing_in_a_paused_replica(mode: str) -> None:
    on = await stage(Answering())
    on.worker.carry_out(measure())
    on.worker.carry_out(measure(1, 3, 3))
    await on.settle()
    assert len(on.generator.works) == 6
    on.worker.carry_out(StopMeasuring(validation=2, number=219, **WHO))
    on.worker.carry_out(PauseReplica(version=1, mode=mode, attempt=1, **WHO))
    await on.until(1)
    assert [type(e) for e in on.events] == [ReplicaPaused]
    assert not on.generator._sampling


@played
async def test_rows_tell_the_parts_of_their_rewards_and_whether_they_are_right() -> None:
    generator = Answering()
    generator.parts = {0: {"acc": 0.0, "fmt": 1.0}, 1: {"acc": 1.0}, 2: {"fmt": 1.0}}
    both = ValidationSet(name="both", prompts=3, parts=("fmt", "acc"), correct=("acc",))
    on = await stage(generator, sets=[both, ValidationSet(name="plain", prompts=3)])
    generator.let.set()
    on.worker.carry_out(measure(0, 0, 4))
    await on.until(1)
    (event,) = news(on, RowsMeasured)
    assert (event.rewards, event.right, event.right_rows) == ((1.0, 0.0, 0.0, 1.0), 2, (1, 3))
    assert (event.part_rows, event.part_places) == ((0, 0, 1, 2), (0, 1, 1, 0))
    assert event.part_values == (1.0, 0.0, 1.0, 1.0)


@played
async def test_rows_tell_their_rewards_and_answers_and_each_set_its_name() -> None:
    class Saying(Answering):
        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            (said,) = await super().sample(work, weights, version)
            said.text = "no answer" if work.prompt.row == 1 else f"it is {work.prompt.row % 2}"
            return [said]

    def extract(prompt: Prompt, trajectory: Trajectory) -> str | None:
        assert prompt.row != 2, "a defect of the user's"
        return trajectory.text.removeprefix("it is ") if trajectory.text.startswith("it") else None

    generator = Saying()
    sets = [ValidationSet(name="voting", prompts=2, samples=2), ValidationSet(name="plain", prompts=2)]
    rollout = Rollout(generator=generator, evaluator=generator, answers={"voting": extract})
    on = await stage(generator, sets=sets, make_rollout=lambda replica: rollout)
    generator.let.set()
    on.worker.carry_out(measure(0, 0, 6))
    await on.until(1)
    (event,) = news(on, RowsMeasured)
    assert (event.rows, event.rewards) == ((0, 1, 2, 3, 4), (1.0, 0.0, 0.0, 1.0, 0.0)), "row 5 is not measured"
    zero, none, broken, one, plain = event.answers
    assert (none, broken, plain) == (NO_ANSWER,) * 3 and NO_ANSWER != zero != one != NO_ANSWER
    assert zero == answer_number("0") and one == answer_number("1")
    assert [work.validation_set for work in generator.works] == ["voting"] * 4 + ["plain"] * 2
