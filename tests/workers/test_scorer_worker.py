"""`ScorerWorker`: under which weights a batch is scored, where the scores go, and how the trainer comes by them."""

import asyncio
import math
from array import array
from collections.abc import Callable
from typing import Any, Self

import pytest
import worker_bench
from event_loops import played
from test_trainer_worker import Scribe
from worker_bench import plan_of

from engine.commands import ScoreBatch, TrainStep
from engine.errors import EngineError
from engine.events import BatchScored, Event, OrderProgressed, StepFailed, StepTrained
from engine.protocols import Batch, Scores
from engine.runtime.local import response
from engine.states.limits import Pool
from engine.states.timeouts import Timeouts
from engine.storage.trajectories import pack_scores, unpack_scores
from engine.storage.weights import Trained
from engine.trajectory import Prompt, TrajectoryGroup
from engine.workers.clock import VirtualLoop
from engine.workers.plan import Restore
from engine.workers.scorer import ScorerWorker
from engine.workers.trainer import TrainerWorker


class Reader:
    """Scores are the weights that it has; what it is asked is written down."""

    def __init__(self) -> None:
        self.weights = 0.0
        self.calls: list[str] = []
        self.scores: Any = None
        self.fails = ""

    def load(self, weights: Any) -> None:
        self.calls.append(f"load {weights}")
        if self.fails == "load":
            raise RuntimeError("no memory")
        self.weights = float(weights)

    def score(self, batch: Batch, task: str) -> Any:
        self.calls.append(f"score {task} of {batch.step}")
        if self.fails == "score":
            raise RuntimeError("no memory")
        if self.scores is not None:
            return self.scores
        return [[[self.weights] * sum(t.loss_mask) for t in group.trajectories] for group in batch.groups]


class Learner(Scribe):
    """Weights are the number of steps done; keeps the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self.asked = 0
        self.fails_at: range | tuple[int, ...] = ()

    def train(self, batch: Batch) -> dict[str, float]:
        self.batches.append(batch)
        return {}

    def weights(self) -> Any:
        self.asked += 1
        if self.asked in self.fails_at:
            raise RuntimeError("no room")
        return len(self.batches)


POOLS = (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train",)), Pool(tasks=("old_logprobs",)))


class Bench(worker_bench.Bench):
    """A scorer and a trainer over the same stores."""

    def __init__(self, reader: Any = None) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self.reader, self.learner = reader or Reader(), Learner()
        limits = {"scoring_tasks": ("old_logprobs",), "pools": POOLS, "timeouts": Timeouts.every(None, score_s=100.0)}
        plan = plan_of(
            trainer=self.learner, limits=limits, make_scorer=lambda tasks: self.reader,
            restore_trainer=lambda trainer, restore: None,
        )  # fmt: skip
        super().__init__(ScorerWorker, plan)
        self.scorer, self.trainer = self.worker, TrainerWorker(plan, 0, 1, self.worker.peers)

    async def open(self, restore: Restore | None = None) -> Self:
        await self.trainer.open(restore)
        return await super().open()

    async def ask_trainer(self, steps: int) -> None:
        await self.trainer.hand_over(steps)

    async def fill(self) -> None:
        for group in (2, 4):
            kept = TrajectoryGroup(group=group, prompt=Prompt(row=group, text="?"), trajectories=[])
            kept.trajectories += [response([1] * group, reward=1.0, version=0), response([], reward=1.0, version=0)]
            await self.trajectories.put(kept, attempt=1)

    async def score(self, step: int, attempt: int = 1, task: str = "old_logprobs") -> Event:
        number = self._number("score", step, attempt, task)
        self.scorer.carry_out(ScoreBatch(step=step, attempt=attempt, task=task, groups=(4, 2), number=number, cause=0))
        return await self.news()

    async def train(self, step: int, attempt: int = 1) -> Event:
        number = self._number("train", step, attempt)
        self.trainer.carry_out(
            TrainStep(step=step, attempt=attempt, groups=(4, 2), staleness=(0, 0), number=number, cause=0)
        )
        return await self.news()

    def _number(self, *order: object) -> int:
        """In the order book; a repeated order has the number of the first."""
        return self._numbers.setdefault(order, len(self._numbers))


async def filled(restore: Restore | None = None) -> Bench:
    bench = await Bench().open(restore)
    await bench.fill()
    return bench


@played
async def test_each_step_is_scored_under_the_weights_that_it_is_trained_from() -> None:
    bench = await filled()
    for step in range(3):
        assert await bench.score(step) == BatchScored(step=step, attempt=1, task="old_logprobs")
        assert await bench.train(step) == StepTrained(step=step, attempt=1)
    assert bench.reader.calls == [
        "score old_logprobs of 0", "load 1", "score old_logprobs of 1", "load 2", "score old_logprobs of 2",
    ]  # fmt: skip
    for step, batch in enumerate(bench.learner.batches):
        scored = [[list(row) for row in group] for group in batch.scores["old_logprobs"]]
        assert scored == [[[float(step)] * 4, []], [[float(step)] * 2, []]], "in the order of the batch"


@played
async def test_a_step_that_is_scored_again_needs_no_other_weights() -> None:
    bench = await filled()
    await bench.score(0)
    await bench.train(0)
    for attempt in (1, 2):
        assert await bench.score(1, attempt) == BatchScored(step=1, attempt=attempt, task="old_logprobs")
    assert bench.reader.calls[1:] == ["load 1", "score old_logprobs of 1", "score old_logprobs of 1"]


@played
async def test_weights_of_any_other_step_are_never_scored_under() -> None:
    bench = await filled()
    failed = await bench.score(1)
    assert isinstance(failed, StepFailed)
    assert failed.reason.startswith("scoring old_logprobs: ")
    assert "the weights store does not hold the weights after 1 train steps; it holds none" in failed.reason
    await bench.weights.put(Trained(2), 2)
    assert "it holds the weights after 2 train steps" in (await bench.score(1, attempt=2)).reason  # type: ignore[attr-defined]
    assert not any(call.startswith("score") for call in bench.reader.calls)


@played
async def test_weights_that_could_not_be_handed_over_are_when_a_scorer_asks_again() -> None:
    bench = await filled()
    await bench.score(0)
    bench.learner.fails_at = (1,)
    assert isinstance(await bench.train(0), StepTrained)
    assert bench.learner.asked == 1, "the trainer does not repeat it: the scheduler counts attempts"
    assert isinstance(await bench.score(1), BatchScored)
    bench.learner.fails_at = (3, 4)
    assert await bench.train(1) == StepTrained(step=1, attempt=1), "a step that is trained is trained"
    failed = await bench.score(2)
    assert isinstance(failed, StepFailed)
    assert "the weights after 2 train steps cannot be handed over: RuntimeError: no room" in failed.reason
    assert isinstance(await bench.score(2, attempt=2), BatchScored)
    assert isinstance(await bench.score(2, attempt=3), BatchScored)
    asked = bench.learner.asked
    await bench.trainer.hand_over(2)
    await bench.trainer.hand_over(1)
    assert bench.learner.asked == asked == 5, "once they are there nobody owes them"


@played
async def test_the_reference_needs_no_weights_and_a_batch_can_be_scored_ahead() -> None:
    bench = await filled()
    assert isinstance(await bench.score(5, task="ref_logprobs"), BatchScored)
    assert bench.reader.calls == ["score ref_logprobs of 5"]


@played
async def test_an_attempt_that_failed_to_load_is_loaded_anew() -> None:
    bench = await filled()
    await bench.score(0)
    await bench.train(0)
    bench.reader.fails = "load"
    assert "RuntimeError: no memory" in (await bench.score(1)).reason  # type: ignore[attr-defined]
    bench.reader.fails = ""
    assert isinstance(await bench.score(1, attempt=2), BatchScored)
    assert bench.reader.calls[1:] == ["load 1", "load 1", "score old_logprobs of 1"]


@played
async def test_a_repeated_order_is_carried_out_once() -> None:
    bench = await filled()
    await bench.score(0)
    bench.scorer.carry_out(ScoreBatch(step=0, attempt=1, task="old_logprobs", groups=(4, 2), number=0, cause=0))
    await bench.score(0, attempt=2)
    assert bench.reader.calls == ["score old_logprobs of 0"] * 2


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (None, "a list for each of the 2 groups"),
        ([[[0.0] * 4, []]], "a list for each of the 2 groups"),
        ([[[0.0] * 4], [[0.0] * 2, []]], "2 lists for group 4"),
        ([[[0.0] * 3, []], [[0.0] * 2, []]], "trajectory 0 of group 4 has 4 trained tokens, but score() returned 3"),
        ([[["high"] * 4, []], [[0.0] * 2, []]], "TypeError"),
    ],
)
@played
async def test_what_a_scorer_returns_wrong_is_named(scores: Any, words: str) -> None:
    bench = await filled()
    bench.reader.score = lambda batch, task: scores  # type: ignore[method-assign]
    assert words in (await bench.score(0)).reason  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="holds no old_logprobs of step 0"):
        await bench.trajectories.scores(0, "old_logprobs", [4, 2])


@played
async def test_a_step_without_its_scores_is_not_trained() -> None:
    bench = await filled()
    await bench.score(0)
    await bench.train(0)
    failed = await bench.train(1)
    assert isinstance(failed, StepFailed)
    assert "holds no old_logprobs of step 1 for groups [4, 2]" in failed.reason
    assert len(bench.learner.batches) == 1


@played
async def test_scores_are_forgotten_with_their_groups() -> None:
    bench = await filled()
    before = bench.trajectories.store.stats().bytes
    await bench.score(0)
    await bench.score(0, attempt=2)
    assert bench.trajectories.store.stats().bytes == before + 2 * 12 + 4 * 6
    await bench.trajectories.discard([4, 2])
    assert bench.trajectories.store.stats().bytes == 0
    await bench.trajectories.put_scores(0, "old_logprobs", [4], [[array("f", [1.0])]])
    assert bench.trajectories.store.stats().bytes == 0, "what comes late is nobody's"


def test_scores_travel_to_the_bit() -> None:
    rows = [array("f", [-0.1, -math.inf, 1e-30]), array("f"), array("f", [0.0])]
    assert unpack_scores(pack_scores(rows)) == rows
    assert unpack_scores(pack_scores([])) == []


@played
async def test_a_trainer_that_was_restored_hands_over_what_it_has() -> None:
    bench = await filled(Restore(steps=3))
    assert isinstance(await bench.score(3), BatchScored)
    assert bench.learner.asked == 1 and bench.reader.calls == ["load 0", "score old_logprobs of 3"]


def test_a_scorer_that_progresses_reports_it_within_its_time_limit() -> None:
    class Slow:
        def watch_progress(self, progressed: Callable[[], None]) -> None:
            self.progressed = progressed

        async def score(self, batch: Batch, task: str) -> Scores:
            for _ in range(3):
                await asyncio.sleep(60.0)
                self.progressed()
            return [[[0.0] * sum(one.loss_mask) for one in group.trajectories] for group in batch.groups]

        def load(self, weights: Any) -> None: ...

    async def scene() -> None:
        bench = await Bench(Slow()).open()
        await bench.fill()
        bench.worker.carry_out(ScoreBatch(step=0, attempt=1, task="ref_logprobs", groups=(4, 2), number=6, cause=0))
        await asyncio.sleep(1000.0)
        scored = BatchScored(step=0, attempt=1, task="ref_logprobs")
        assert bench.events == [OrderProgressed(order=6), OrderProgressed(order=6), scored]
        await bench.worker.close()

    loop = VirtualLoop()
    loop.run_until_complete(scene())
    loop.close()
