"""What would end a process, raised by a user's own code, costs one attempt like any other exception."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from event_loops import played
from worker_bench import Bench, plan_of

from engine.commands import (
    Command,
    EnterState,
    MeasureRows,
    PauseReplica,
    ScoreBatch,
    StageWeights,
    TrainStep,
)
from engine.environments.calls import EpisodeCalls, FunctionTool, ToolError
from engine.errors import DataFailure, EngineError, reason_of
from engine.events import Event, RowsFailed
from engine.gateway.runners import FunctionRunner
from engine.protocols import Batch, Generated, GroupWork
from engine.protocols.user_code import HangingCalls, awaited
from engine.record.codec import CodecError
from engine.runtime.local import SimpleGenerator, SimpleTrainer, response
from engine.states.limits import AddedState, Pool, ValidationLimits
from engine.trajectory import Prompt, TrajectoryGroup
from engine.workers.added_states import StateWorker
from engine.workers.replica import ReplicaWorker
from engine.workers.scorer import ScorerWorker
from engine.workers.trainer import TrainerWorker
from engine.workers.worker import Worker

PROMPT = Prompt(row=3, text="2 + 2")
WHO = {"replica": 0, "life": 1, "cause": 0}


class Rude(BaseException):
    """Not an `Exception`, and it has no message."""

    def __str__(self) -> str:
        raise SystemExit("not even that")


EXITS = [SystemExit(3), KeyboardInterrupt("stop"), GeneratorExit("enough"), asyncio.CancelledError("mine"), Rude()]
exits = pytest.mark.parametrize("error", EXITS, ids=lambda error: type(error).__name__)


class Stage(Bench):
    async def breaks(self) -> str:
        """Wait until the worker is broken; returns why."""
        return await asyncio.wait_for(self.worker.breakdown(), 60)


@exits
@played
async def test_a_generator_that_exits_while_watched_or_closed_breaks_only_its_replica(error: BaseException) -> None:
    class Watched(SimpleGenerator):
        async def failed(self) -> str:
            raise error

        async def close(self) -> None:
            raise error

    stage = await Stage(ReplicaWorker, plan_of(Watched())).open()
    stage.worker.join()
    assert type(error).__name__ in await stage.breaks()
    await stage.worker.close()


@exits
@played
async def test_an_evaluator_that_leaves_fails_its_rows(error: BaseException) -> None:
    class Leaving(SimpleGenerator):
        async def generate(self, work: GroupWork) -> Generated:
            raise error

    plan = plan_of(Leaving(), held_out=[PROMPT], limits={"validation": ValidationLimits(rows=1)})
    stage = await Stage(ReplicaWorker, plan).open()
    stage.worker.carry_out(MeasureRows(validation=0, chunk=0, attempt=1, version=0, first=0, count=1, number=0, **WHO))
    failed = await stage.news()
    assert isinstance(failed, RowsFailed) and type(error).__name__ in failed.reason
    await stage.worker.close()


@played
async def test_an_exception_outside_the_handling_of_an_order_breaks_its_worker() -> None:
    """Whatever raises: here the worker's report."""

    class Coming(SimpleTrainer):
        def train(self, batch: Batch) -> dict[str, float]:
            return {}

        score = load = lambda self, *given: []  # type: ignore[assignment]

    async def praise(group: TrajectoryGroup) -> TrajectoryGroup:
        return group

    class Unable(Stage):
        def take(self, event: Event) -> None:
            raise CodecError("it does not fit")

    pools = (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train",)), Pool(tasks=("ref_logprobs",)))
    limits = {
        "pools": pools, "scoring_tasks": ("ref_logprobs",), "added_states": (AddedState(name="judging", concurrency=1),)
    }  # fmt: skip
    plan = plan_of(trainer=Coming(), limits=limits, make_scorer=lambda tasks: Coming(), make_work=lambda name: praise)
    orders: list[tuple[type[Worker], Command]] = [
        (TrainerWorker, TrainStep(step=0, attempt=1, groups=(), staleness=(), number=0, cause=0)),
        (ScorerWorker, ScoreBatch(step=0, attempt=1, task="ref_logprobs", groups=(), number=0, cause=0)),
        (StateWorker, EnterState(group=0, attempt=1, state="judging", cause=0)),
        (ReplicaWorker, StageWeights(version=1, attempt=1, **WHO)),
    ]
    for kind, order in orders:
        stage = await Unable(kind, plan).open()
        group = TrajectoryGroup(group=0, prompt=PROMPT, trajectories=[response([1], reward=0.0, version=0)])
        await stage.trajectories.put(group, attempt=1)
        stage.worker.carry_out(order)
        assert await stage.breaks() == "a task of its worker failed: it does not fit"
        await stage.worker.close()


@played
async def test_an_order_that_cannot_be_started_breaks_its_worker() -> None:
    stage = Stage(TrainerWorker, plan_of())
    stage.worker.carry_out(StageWeights(version=1, attempt=1, **WHO))
    await stage.open()
    why = "its worker cannot start StageWeights: the trainer cannot execute StageWeights"
    assert await stage.breaks() == why
    stage.worker.carry_out(PauseReplica(version=1, mode="keep", attempt=1, **WHO))
    assert stage.worker.broken == why, "the first reason counts"
    await stage.worker.close()


@played
async def test_code_that_cancels_the_task_that_calls_it_breaks_its_worker() -> None:
    async def cancel(*given: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    class Learner(SimpleTrainer):
        train = cancel  # type: ignore[assignment]

    class Sampler(SimpleGenerator):
        stage = cancel  # type: ignore[assignment]

    plan = plan_of(Sampler(), Learner())
    orders: list[tuple[type[Worker], Command]] = [
        (TrainerWorker, TrainStep(step=0, attempt=1, groups=(), staleness=(), number=0, cause=0)),
        (ReplicaWorker, StageWeights(version=1, attempt=1, **WHO)),
    ]
    for kind, order in orders:
        stage = await Stage(kind, plan).open()
        stage.weights.store.put(1, "w")
        stage.worker.carry_out(order)
        assert await stage.breaks() == "a task of its worker failed: CancelledError: canceled by other code"
        await stage.worker.close()


@exits
@played
async def test_an_agent_that_leaves_is_the_fault_of_its_prompt_and_others_run_on(error: BaseException) -> None:
    async def agent(base_url: str, key: str, prompt: Prompt) -> float | None:
        if prompt.row == 3:
            raise error
        return 0.5

    runner = FunctionRunner(agent)
    with pytest.raises(DataFailure, match=rf"on prompt row 3: .*{type(error).__name__}"):
        await runner.run("http://localhost", "key", PROMPT)
    assert (await runner.run("http://localhost", "key", Prompt(row=4, text="?"))).reward == 0.5
    runner.close()


@pytest.mark.parametrize("place", ["sample", "train"])
def test_a_forked_child_that_returns_ends_and_the_run_goes_on(place: str) -> None:
    program = Path(__file__).with_name("forking_run.py")
    ended = subprocess.run([sys.executable, program, place], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "parent finished 2\n"
    assert "a process that user code forked came back to the engine and is ended" in ended.stderr


@played
async def test_our_own_cancellation_is_no_failure() -> None:
    async def fails(words: str) -> Generated:
        raise ValueError(words)

    began = asyncio.Event()

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(awaited(work))
    await began.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.0):
            await awaited(work)
    with pytest.raises(ValueError, match="as it is"):
        await awaited(fails, "as it is")


def test_an_exception_without_a_message_is_named_by_its_kind() -> None:
    class Mute(DataFailure):
        def __init__(self) -> None:
            pass

    assert reason_of(Mute()) == "(its message cannot be shown)"
    assert reason_of(Rude()) == "Rude: (its message cannot be shown)"
    assert reason_of(EngineError("it broke")) == "it broke"


def test_a_reason_ends_with_the_line_of_user_code_and_generated_code_has_none() -> None:
    def fails(how: str) -> str:
        with pytest.raises(ValueError) as caught:
            exec(how, {"error": ValueError("x" * 2000)}) if how else (_ for _ in ()).throw(ValueError("x" * 2000))
        return reason_of(caught.value)

    assert len(fails("")) == 1000
    assert re.fullmatch(r"ValueError: x+… \(test_user_exits\.py:\d+, in <genexpr>\)", fails(""))
    assert "<string>" not in fails("raise error")


@played
async def test_what_the_model_reads_of_a_tool_has_no_line_of_user_code() -> None:
    def ends() -> str:
        """End."""
        raise StopIteration

    calls = EpisodeCalls(20.0, HangingCalls())
    with pytest.raises(ToolError) as caught:
        await FunctionTool(ends).call({}, calls.call)
    calls.end()
    assert ".py" not in str(caught.value) and "raised StopIteration" in str(caught.value)
