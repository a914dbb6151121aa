"""`TrainerWorker`: one call at a time, in order, and every failure under its own name."""

import asyncio
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import worker_bench
from event_loops import played
from msgspec.structs import replace
from worker_bench import AT_ONCE, plan_of

from engine.commands import Command, DeleteCheckpoint, PublishWeights, SaveCheckpoint, ScoreBatch, TrainStep
from engine.errors import EngineError, TrainerSpoiled
from engine.events import (
    BatchScored,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    OrderDone,
    OrderProgressed,
    PublishFailed,
    StepFailed,
    StepTrained,
    WeightsPublished,
)
from engine.protocols import Batch
from engine.reward_histogram import HISTOGRAMS
from engine.runtime.local import SimpleTrainer, response
from engine.runtime.local.local_processes import LocalTrajectories
from engine.states.timeouts import Timeouts
from engine.storage.checkpoints import list_checkpoints
from engine.storage.trajectories import copy_group
from engine.trajectory import Prompt, TrajectoryGroup
from engine.workers.clock import VirtualLoop
from engine.workers.plan import Redo, Restore
from engine.workers.trainer import TrainerWorker, figure_of

NAMES = ("accuracy", "truncated_share", "empty_share", "repeated_share", "unparsable_share")
"""All figures of responses."""


class Scribe(SimpleTrainer):
    """Writes down what it is asked, and fails where `fails` says so."""

    def __init__(self, fails: str = "", error: BaseException | None = None) -> None:
        self.fails = fails
        self.error = error or RuntimeError("no memory")
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.running = 0

    def _note(self, call: str) -> None:
        self.running += 1
        assert self.running == 1, "two calls at once"
        self.threads.add(threading.current_thread().name)
        self.calls.append(call)
        self.running -= 1
        if call.startswith(self.fails or "-"):
            raise self.error

    def score(self, batch: Batch, task: str) -> None:
        self._note(f"score {task} {[g.group for g in batch.groups]}")

    def train(self, batch: Batch) -> dict[str, float]:
        self._note(f"train {[g.group for g in batch.groups]} {batch.staleness}")
        return {"loss": 0.5}

    def weights(self) -> Any:
        self._note("weights")
        return {"w": 1}

    def save(self, directory: str, step: int) -> None:
        Path(directory, "model").write_text("half")
        self._note(f"save {step}")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Those of a run in `tmp_path`."""
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


class Bench(worker_bench.Bench):
    def __init__(self, trainer: Any, checkpoints: Path | None = None, **limits: Any) -> None:
        self.responses: dict[str, Any] = {}
        """Figures of the responses of the newest step."""
        self._numbers: dict[Command, int] = {}
        run_dir = None if checkpoints is None else checkpoints.parent
        super().__init__(TrainerWorker, plan_of(trainer=trainer, limits=limits, run_dir=run_dir))

    def note(self, step: int, figures: Mapping[str, Any]) -> None:
        """Keep the trainer's own figures."""
        known = (*NAMES, HISTOGRAMS)
        self.responses = {name: figure for name, figure in figures.items() if name in known}
        super().note(step, {name: figure for name, figure in figures.items() if name not in known})

    async def answer(self, *commands: Command) -> list[Event]:
        """Give orders; the events that answer them."""
        before = len(self.events)
        for command in commands:
            self.carry_out(command)
        while len(self.events) < before + len(commands):
            await self.news()
        return self.events[before:]

    def carry_out(self, command: Any) -> None:
        """Give an order the next number of the order book; a repeat has the number of the first."""
        number = self._numbers.setdefault(command, len(self._numbers))
        self.worker.carry_out(replace(command, number=number))

    async def fill(self, *groups: int) -> None:
        await fill(self.trajectories, *groups)


async def fill(trajectories: LocalTrajectories, *groups: int) -> None:
    for group in groups:
        kept = TrajectoryGroup(group=group, prompt=Prompt(row=group, text="?"), trajectories=[])
        kept.trajectories.append(response([1], reward=1.0, version=0))
        await trajectories.put(kept, attempt=1)


@played
async def test_a_step_reports_figures_of_its_responses_unless_its_trainer_has_its_own() -> None:
    class Own(SimpleTrainer):
        def train(self, batch: Batch) -> dict[str, float]:
            batch.groups.clear()
            return {"accuracy": 7.0}

    bench = await Bench(Own()).open()
    await bench.fill(2, 4)
    await bench.answer(train())
    figures = {name: 0.0 if name.endswith("_share") else 1.0 for name in NAMES}
    histograms = {"reward": [(1.0, 1.0, 2)]}
    assert bench.responses == figures | {"accuracy": 7.0, HISTOGRAMS: histograms}


def train(step: int = 0, attempt: int = 1) -> TrainStep:
    return TrainStep(step=step, attempt=attempt, groups=(4, 2), staleness=(1, 0), cause=0)


@played
async def test_orders_are_carried_out_one_by_one_in_their_order_off_the_loop(checkpoints: Path) -> None:
    trainer = Scribe()
    bench = await Bench(trainer, checkpoints).open()
    await bench.fill(2, 4)
    events = await bench.answer(
        ScoreBatch(step=0, attempt=1, task="old_logprobs", groups=(4, 2), cause=0),
        train(),
        PublishWeights(version=1, attempt=1, steps=1, cause=0),
        save(1),
    )
    assert events == [
        BatchScored(step=0, attempt=1, task="old_logprobs"),
        StepTrained(step=0, attempt=1),
        WeightsPublished(version=1, attempt=1),
        CheckpointSaved(steps=1),
    ]
    assert trainer.calls == ["score old_logprobs [4, 2]", "train [4, 2] [1, 0]", "weights", "save 1"]
    assert len(trainer.threads) == 1
    assert trainer.threads != {threading.current_thread().name}
    assert bench.figures == [(0, {"loss": 0.5})]
    assert bench.weights.store.get(1) == {"w": 1}
    await bench.worker.close()


class Steady(SimpleTrainer):
    """Progresses twice in each call, and goes on once that is reported."""

    def __init__(self) -> None:
        self.reported = threading.Event()

    def watch_progress(self, progressed: Callable[[], None]) -> None:
        self.progressed = progressed

    def _work(self) -> None:
        for _ in range(2):
            self.progressed()
            assert self.reported.wait(60)
            self.reported.clear()

    def score(self, batch: Batch, task: str) -> None:
        self._work()

    def train(self, batch: Batch) -> dict[str, float]:
        self._work()
        return {}

    def weights(self) -> Any:
        self._work()

    def save(self, directory: str, step: int) -> None:
        self._work()


@pytest.mark.parametrize(
    "order",
    [
        ScoreBatch(step=0, attempt=1, task="old_logprobs", groups=(4, 2), number=7, cause=0),
        replace(train(), number=7),
        PublishWeights(version=1, attempt=1, steps=1, number=7, cause=0),
        SaveCheckpoint(steps=3, number=7, cause=0),
    ],
    ids=lambda order: type(order).__name__,
)
@played
async def test_what_a_trainer_progresses_in_a_call_is_reported_as_progress_of_its_order(
    order: Command, checkpoints: Path
) -> None:
    bench = await Bench(trainer := Steady(), checkpoints, timeouts=AT_ONCE).open()
    await bench.fill(2, 4)
    bench.worker.carry_out(order)
    while isinstance(await bench.news(), OrderProgressed):
        trainer.reported.set()
    *reports, answer = bench.events
    assert len(reports) >= 2 and {*reports} == {OrderProgressed(order=7)}
    assert not isinstance(answer, StepFailed | PublishFailed | CheckpointFailed)
    trainer.progressed()
    await asyncio.sleep(0)
    assert bench.events[-1] is answer, "it works on nothing"
    await bench.worker.close()


def test_a_trainer_that_starts_reports_progress_with_each_step_that_it_trains_again() -> None:
    class Redoing(SimpleTrainer):
        def watch_progress(self, progressed: Callable[[], None]) -> None:
            self.progressed = progressed

        async def train(self, batch: Batch) -> dict[str, float]:  # type: ignore[override]
            await asyncio.sleep(40.0)
            self.progressed()
            await asyncio.sleep(40.0)
            return {}

    async def scene() -> None:
        redo = tuple(Redo(step=step, groups=(4, 2), staleness=(0, 0), reports=False) for step in (1, 2))
        plan = plan_of(
            trainer=Redoing(), restore_trainer=lambda trainer, restore: None,
            limits={"timeouts": Timeouts.every(None, start_s=100.0)},
        )  # fmt: skip
        bench = worker_bench.Bench(TrainerWorker, plan)
        await fill(bench.trajectories, 2, 4)
        await bench.worker.open(Restore(steps=1, order=11, redo=redo))
        assert bench.events == [OrderProgressed(order=11)] * 4
        await asyncio.sleep(1000.0)
        assert len(bench.events) == 4, "it has started"
        await bench.worker.close()

    loop = VirtualLoop()
    loop.run_until_complete(scene())
    loop.close()


@played
async def test_a_scorer_gets_an_error_from_a_trainer_that_ends_before_it_has_started() -> None:
    trainer = worker_bench.Bench(TrainerWorker, plan_of()).worker
    asked = asyncio.create_task(trainer.hand_over(1))
    await asyncio.sleep(0)
    await trainer.close()
    with pytest.raises(EngineError, match="the trainer ended before it had started"):
        await asyncio.wait_for(asked, 1.0)


@played
async def test_a_repeated_order_is_carried_out_once() -> None:
    trainer = Scribe()
    bench = await Bench(trainer).open()
    await bench.fill(2, 4)
    await bench.answer(train(), train(attempt=2))
    bench.carry_out(train())
    await bench.answer(PublishWeights(version=1, attempt=1, steps=1, cause=0))
    assert [c.split()[0] for c in trainer.calls] == ["train", "train", "weights"]
    await bench.worker.close()


@pytest.mark.parametrize(
    ("call", "command", "failed"),
    [
        ("score", ScoreBatch(step=0, attempt=1, task="t", groups=(2,), cause=0), StepFailed),
        ("train", train(), StepFailed),
        ("weights", PublishWeights(version=1, attempt=1, steps=1, cause=0), PublishFailed),
        ("save", SaveCheckpoint(steps=3, cause=0), CheckpointFailed),
    ],
)
@pytest.mark.parametrize(
    "error",
    [RuntimeError("no memory"), SystemExit("goodbye"), StopIteration("no more"), CancelledError("given up")],
    ids=["raises", "exits", "stops", "cancels"],
)
@played
async def test_a_failing_call_is_reported_and_the_next_one_is_carried_out(
    checkpoints: Path, call: str, command: Command, failed: type[Event], error: BaseException
) -> None:
    trainer = Scribe(fails=call, error=error)
    bench = await Bench(trainer, checkpoints).open()
    await bench.fill(2, 4)
    (event,) = await bench.answer(command)
    assert isinstance(event, failed)
    assert type(error).__name__ in event.reason and str(error) in event.reason
    assert list_checkpoints(checkpoints) == [], "nothing half written is visible"
    trainer.fails = ""
    assert isinstance((await bench.answer(train(step=7)))[0], StepTrained)
    await bench.worker.close()


@played
async def test_a_trainer_that_changes_its_batch_gets_the_recorded_one_at_the_retry() -> None:
    class Spoiler(Scribe):
        def score(self, batch: Batch, task: str) -> None:
            self.spoil(batch)

        def train(self, batch: Batch) -> dict[str, float]:
            seen.append([copy_group(group) for group in batch.groups])
            self.spoil(batch)
            raise RuntimeError("no memory")

        def spoil(self, batch: Batch) -> None:
            batch.staleness[0] = 9
            for group in batch.groups:
                group.prompt.fields["answer"] = None  # type: ignore[index]
                trajectory = group.trajectories[0]
                trajectory.token_ids.append(99)
                trajectory.logprobs[0], trajectory.loss_mask[0], trajectory.reward = 5.0, 0, None
                group.trajectories.append(trajectory)
            batch.groups.reverse()

    seen: list[list[TrajectoryGroup]] = []

    bench = await Bench(Spoiler()).open()
    for number in (4, 2):
        prompt = Prompt(row=number, text="?", fields={"answer": str(number)})
        trajectories = [response([1, 2], reward=1.0, version=0)]
        await bench.trajectories.put(TrajectoryGroup(group=number, prompt=prompt, trajectories=trajectories), 1)
    await bench.answer(ScoreBatch(step=0, attempt=1, task="old_logprobs", groups=(4, 2), cause=0))
    await bench.answer(train(attempt=1), train(attempt=2))
    first, second = seen
    assert first == second
    assert [(g.group, g.prompt.fields, g.trajectories) for g in first] == [
        (number, {"answer": str(number)}, [response([1, 2], reward=1.0, version=0)]) for number in (4, 2)
    ]
    await bench.worker.close()


@played
async def test_a_batch_whose_groups_are_gone_fails_the_step() -> None:
    bench = await Bench(Scribe()).open()
    (failed,) = await bench.answer(train())
    assert "does not hold groups [4, 2]" in failed.reason
    await bench.worker.close()


class Hostile:
    def item(self) -> float:
        raise SystemExit("not now")


class Scalar:
    """As those of numpy and torch."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value


class Unreadable(Mapping[str, float]):
    def __getitem__(self, name: str) -> float:
        raise KeyError(name)

    def __iter__(self) -> Any:
        raise SystemExit("not now")

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("loss", 10**400, "the metric 'loss' as a int, which is not a real number that fits a float"),
        ("loss", -(10**400), "the metric 'loss' as a int"),
        ("loss", None, "the metric 'loss' as a NoneType"),
        ("loss", {"mean": 1.0}, "the metric 'loss' as a dict"),
        ("loss", [0.5], "the metric 'loss' as a list"),
        ("loss", "0.5", "the metric 'loss' as a str"),
        ("loss", "x" * 2**20, "the metric 'loss' as a str"),
        ("loss", 1j, "the metric 'loss' as a complex"),
        ("loss", Hostile(), "the metric 'loss' as a Hostile"),
        ("loss", Scalar("0.5"), "the metric 'loss' as a Scalar"),
        (7, 0.5, "a metric named 7, a int; a name must be a str"),
        (None, 0.5, "a metric named None, a NoneType"),
        (("loss", 1), 0.5, r"a metric named ('loss', 1), a tuple"),
        ("x" * 2**20, 0.5, "which must have 1 to 200 printable characters"),
        ("", 0.5, "which must have 1 to 200 printable characters"),
        ("\ud800", 0.5, "which must have 1 to 200 printable characters"),
        ("sources", 0.5, "a metric named 'sources', a name that the engine uses"),
        ("validation", 0.5, "a metric named 'validation', a name that the engine uses"),
        ("optimizer_steps", 1e30, "the metric 'optimizer_steps' as 1e+30, which must be from 0 to 2147483647"),
        ("optimizer_steps", -1, "the metric 'optimizer_steps' as -1, which must be"),
        ("optimizer_steps", math.nan, "the metric 'optimizer_steps' as nan, which must be"),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
@played
async def test_a_metric_that_cannot_be_used_is_left_out_and_reported_once(
    name: Any, value: Any, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Scribe):
        def train(self, batch: Batch) -> Any:
            return {name: value, "kept": 0.25}

    caplog.set_level("WARNING")
    bench = await Bench(Odd()).open()
    await bench.fill(2, 4)
    assert await bench.answer(train(), train(step=1)) == [StepTrained(step=s, attempt=1) for s in (0, 1)]
    assert bench.figures == [(0, {"kept": 0.25}), (1, {"kept": 0.25})]
    await bench.worker.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert expected in said and "step 0" in said and len(said) < 500


@played
async def test_metrics_that_can_be_used_are_plain_numbers(caplog: pytest.LogCaptureFixture) -> None:
    class Array(Scribe):
        def train(self, batch: Batch) -> Any:
            given = {"a": True, "b": Scalar(3), "c": Scalar(0.5), "d": Fraction(1, 4), "e": 2**70, "f": math.inf}
            return given if batch.step else Unreadable()

    caplog.set_level("WARNING")
    bench = await Bench(Array()).open()
    await bench.fill(2, 4)
    await bench.answer(train(), train(step=1))
    (_, first), (_, second) = bench.figures
    assert first == {}
    assert second == {"a": 1, "b": 3, "c": 0.5, "d": 0.25, "e": float(2**70), "f": math.inf}
    assert [type(value) for value in second.values()] == [int, int, float, float, float, float]
    await bench.worker.close()
    assert "metrics that cannot be read (SystemExit: not now (test_trainer_worker.py:" in caplog.text


def save(steps: int) -> SaveCheckpoint:
    return SaveCheckpoint(steps=steps, cause=0)


def delete(steps: int) -> DeleteCheckpoint:
    return DeleteCheckpoint(steps=steps, cause=0)


@played
async def test_checkpoints_stay_until_they_are_to_be_deleted_and_nothing_half_done_does(checkpoints: Path) -> None:
    bench = await Bench(Scribe(), checkpoints).open()
    (checkpoints / ".step-000003.saving").mkdir()
    (checkpoints / ".step-000003.saving" / "weights").write_text("half of them")
    (checkpoints / ".step-000012-left-1").mkdir()
    await bench.answer(*(save(steps) for steps in (2, 4, 10)))
    assert await bench.answer(delete(2)) == [OrderDone(orders=(3,))]
    left = sorted(path.name for path in checkpoints.iterdir())
    assert left == [".step-000012-left-1", "step-000004", "step-000010"]
    await bench.worker.close()
    failing = await Bench(Scribe(fails="save"), checkpoints).open()
    assert isinstance((await failing.answer(save(12)))[0], CheckpointFailed)
    assert sorted(path.name for path in checkpoints.iterdir()) == left
    await failing.worker.close()


@played
async def test_a_checkpoint_of_an_earlier_life_is_written_again(checkpoints: Path) -> None:
    trainer = Scribe()
    bench = await Bench(trainer, checkpoints).open()
    await bench.answer(save(10))
    again = await Bench(trainer, checkpoints).open()
    assert await again.answer(save(10)) == [CheckpointSaved(steps=10)]
    assert trainer.calls == ["save 10", "save 10"]
    await bench.worker.close()
    await again.worker.close()


@played
async def test_a_checkpoint_that_is_gone_already_is_deleted_and_so_is_the_rest_of_one(checkpoints: Path) -> None:
    bench = await Bench(Scribe(), checkpoints).open()
    await bench.answer(save(2))
    half = checkpoints / ".step-000002.saving"
    half.mkdir()
    (half / "weights").write_text("the rest of an earlier one")
    again = replace(delete(2), cause=1)
    assert await bench.answer(delete(2), again, delete(9)) == [OrderDone(orders=(n,)) for n in (1, 2, 3)]
    assert list(checkpoints.iterdir()) == []
    await bench.worker.close()
    nowhere = await Bench(Scribe()).open()
    assert await nowhere.answer(delete(2)) == [OrderDone(orders=(0,))]
    await nowhere.worker.close()


@played
async def test_a_checkpoint_is_deleted_in_its_turn_off_the_loop(checkpoints: Path) -> None:
    bench = await Bench(Scribe(), checkpoints).open()
    answers = [CheckpointSaved(steps=2), OrderDone(orders=(1,)), CheckpointSaved(steps=4)]
    assert await bench.answer(save(2), delete(2), save(4)) == answers
    assert [steps for steps, _ in list_checkpoints(checkpoints)] == [4]
    await bench.worker.close()


@played
async def test_a_checkpoint_that_cannot_be_deleted_stays_and_is_named_once(
    checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    place = checkpoints / "checkpoints"
    bench = await Bench(Scribe(), place).open()
    await bench.answer(save(2))
    (place / ".step-000002.saving").write_text("a file where the directory would have to go")
    assert await bench.answer(delete(2)) == [OrderDone(orders=(1,))]
    assert [steps for steps, _ in list_checkpoints(place)] == [2]
    await bench.worker.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "step-000002 cannot be deleted and stays: " in said


@played
async def test_a_trained_step_says_how_many_updates_the_optimizer_made() -> None:
    class Counting(Scribe):
        def train(self, batch: Batch) -> dict[str, float]:
            return {"optimizer_steps": 4.0}

    bench = await Bench(Counting()).open()
    await bench.fill(2, 4)
    assert await bench.answer(train()) == [StepTrained(step=0, attempt=1, updates=4)]
    await bench.worker.close()


@pytest.mark.parametrize(("value", "figure"), [(2**63 - 1, int), (1 - 2**63, int), (2**63, float), (True, int)])
def test_a_metric_is_an_int_where_it_fits_64_bits(value: int, figure: type) -> None:
    found = figure_of(value)
    assert found == value and type(found) is figure


def raise_spoiled() -> None:
    raise TrainerSpoiled("out of memory")


WRONG = "train() must return a dict of metrics or None, not {}; its weights may already contain train step 0"


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (raise_spoiled, "train() failed and spoiled the trainer: out of memory"),
        (lambda: [0.5], WRONG.format("list")),
        (lambda: (yield), WRONG.format("generator")),
        (
            lambda: dict.fromkeys(map(str, range(300_000)), 1.0),
            "train() returned 300000 metrics; at most 10000 are allowed; its weights may already contain train step 0",
        ),
    ],
    ids=["says so", "returns a list", "yields", "returns too many metrics"],
)
@played
async def test_a_spoiled_trainer_is_replaced_and_its_step_is_not_answered(
    result: Callable[[], Any], reason: str
) -> None:
    class Spoiled(Scribe):
        def train(self, batch: Any) -> Any:
            return result()

    bench = await Bench(Spoiled()).open()
    await bench.fill(2, 4)
    bench.carry_out(train())
    bench.carry_out(PublishWeights(version=1, attempt=1, steps=1, cause=0))
    while not ((bench.worker.broken or bench.events) and bench.worker._orders.empty()):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bench.worker.broken == reason
    assert bench.events == [] and bench.weights.store.newest == 0, "spoiled weights are not published"
    await bench.worker.close()
