"""Runs in one process whose user code never ends: the run ends all the same, and says what it was."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
from test_local_runs import Steady

import engine.runtime.local
from engine.errors import RunFailed
from engine.protocols import Batch, Generated, GroupWork
from engine.runtime.local import RunResult, SimpleTrainer, local_processes
from engine.states.limits import REWARDING, AddedState, Limits, Pool
from engine.states.timeouts import Timeouts
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup
from engine.workers import worker


class Learner(SimpleTrainer):
    def train(self, batch: Batch) -> Any:
        return {}

    def weights(self) -> Any:
        return {}


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "END_S", 0.05)
    monkeypatch.setattr(local_processes, "CLOSE_S", 0.2)
    monkeypatch.setattr(local_processes.LocalProcesses, "goodbye_s", 0.2)


@pytest.fixture
def freed() -> Iterator[threading.Event]:
    """Set at the end of a test, for the threads that it leaves behind."""
    event = threading.Event()
    yield event
    event.set()


async def ignore_cancellation() -> Any:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


LIMITS: dict[str, Any] = {
    "train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4, "max_steps": 2,
    "timeouts": Timeouts.every(None),
}  # fmt: skip


def limited(*kinds: str) -> dict[str, Any]:
    """Only orders that a test leaves unanswered have time limits: on a busy machine, others exceed such short ones."""
    return {"timeouts": Timeouts.every(None, **dict.fromkeys(kinds, 0.2), cut_s=0.2)}


def run(limits: dict[str, Any] | None = None, **options: Any) -> RunResult:
    """`engine.runtime.local.run`, on a thread: if it hangs, only the test fails."""
    defaults: dict[str, Any] = {
        "generators": lambda replica: Steady(), "trainer": Learner(), "samples": 2, "replacements": 1,
        "prompts": [f"question {n}" for n in range(8)], "limits": Limits(**{**LIMITS, **(limits or {})}),
    }  # fmt: skip
    outcome: list[RunResult | BaseException] = []

    def work() -> None:
        try:
            outcome.append(engine.runtime.local.run(**{**defaults, **options}))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert outcome, "the run hangs"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


class Deaf(Steady):
    """Never answers for its second group. Its `close` notes its version."""

    def __init__(self, closed: list[int]) -> None:
        super().__init__()
        self._closed = closed

    async def generate(self, work: GroupWork) -> Generated:
        return await ignore_cancellation() if work.group == 1 else await super().generate(work)  # type: ignore[no-any-return]

    async def close(self) -> None:
        self._closed.append(self.version)


def test_a_generator_that_ignores_cancellation_ends_the_run_with_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[int] = []
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RunFailed, match=r"replica 0 exceeded its time limit .* in ParkGroup \(group 1\)"),
    ):
        run(limited("group_s"), generators=lambda replica: Deaf(closed))
    assert len(closed) == 2, "it is closed all the same, and so is its successor"
    story = "a task of replica 0 ignores its cancellation and is left behind: ReplicaWorker._run → "
    assert story in caplog.text and " → Deaf.generate → ignore_cancellation → " in caplog.text


def test_a_group_in_a_thread_that_never_ends_does_not_keep_a_run_from_ending(freed: threading.Event) -> None:
    class Threaded(Steady):
        async def generate(self, work: GroupWork) -> Generated:
            if work.group == 1:
                await asyncio.to_thread(freed.wait)
            return await super().generate(work)

    with pytest.raises(RunFailed, match=r"replica 0 exceeded its time limit .* in ParkGroup \(group 1\)"):
        run(limited("group_s"), generators=lambda replica: Threaded())


def test_a_trainer_that_ignores_cancellation_ends_the_run_with_the_cause() -> None:
    class Remote(Learner):
        async def train(self, batch: Batch) -> Any:
            await ignore_cancellation()

    with pytest.raises(RunFailed, match=r"the trainer exceeded its time limit of 0\.2 s \(timeouts\.train_s\)"):
        run(limited("train_s"), trainer=Remote())


REWARDED = {"added_states": (AddedState(name=REWARDING, concurrency=2),)}


class Closing:
    """Its `close` ends when it is `freed`, or never."""

    def __init__(self, freed: threading.Event) -> None:
        super().__init__()
        self._freed = freed

    def close(self) -> None:
        self._freed.wait()


class ClosingLearner(Closing, Learner): ...


class ClosingWork(Closing):
    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
        return group


class ClosingGenerator(Steady):
    async def close(self) -> None:
        await ignore_cancellation()


@pytest.mark.parametrize(
    ("limits", "options"),
    [
        ({}, lambda freed: {"generators": lambda replica: ClosingGenerator()}),
        ({}, lambda freed: {"trainer": ClosingLearner(freed)}),
        (REWARDED, lambda freed: {"works": {REWARDING: ClosingWork(freed)}}),
    ],
    ids=["generator", "trainer", "state"],
)
def test_user_code_whose_close_never_returns_does_not_keep_a_run_from_ending(
    limits: dict[str, Any], options: Callable[[threading.Event], dict[str, Any]], freed: threading.Event
) -> None:
    assert run(limits, **options(freed)).steps == 2


def test_the_work_of_a_state_that_never_returns_ends_the_run_with_the_cause() -> None:
    async def work(group: TrajectoryGroup) -> TrajectoryGroup:
        return await ignore_cancellation()  # type: ignore[no-any-return]

    with pytest.raises(RunFailed, match=r"the state rewarding exceeded its time limit .* in EnterState \(group \d\)"):
        run(REWARDED | limited("state_s"), works={REWARDING: work}, state_timeout_s=0.1)


def test_a_run_whose_generator_reports_on_its_own_threads_ends() -> None:
    class Threaded(Steady):
        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            await asyncio.to_thread(work.finished, work.samples)
            return await super().sample(work, weights, version)

    assert run(generators=lambda replica: Threaded()).steps == 2


def test_a_trainer_that_cancels_its_own_task_ends_the_run_with_the_cause() -> None:
    class Cancelling(Learner):
        async def train(self, batch: Batch) -> Any:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    with pytest.raises(RunFailed, match=r"the trainer is lost: a task of its worker failed: CancelledError"):
        run(trainer=Cancelling())


@pytest.mark.parametrize("hangs", ["generators", "make_scorer"])
def test_a_factory_that_hangs_at_the_launch_ends_the_run_with_its_limit(hangs: str, freed: threading.Event) -> None:
    def hang(which: Any) -> Any:
        freed.wait()

    name, limits = "replica 0", limited("start_s")
    if hangs == "make_scorer":
        name, limits["scoring_tasks"] = "scorer 0", ("ref_logprobs",)
        limits["pools"] = (
            Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train",)), Pool(tasks=("ref_logprobs",))
        )  # fmt: skip
    with pytest.raises(RunFailed, match=rf"^{name} exceeded the time limit of 0.2 s to start \(timeouts.start_s\)"):
        run(limits, **{hangs: hang})


@pytest.mark.parametrize("factory", ["generators", "make_scorer"])
def test_a_factory_that_raises_at_the_launch_is_named(factory: str) -> None:
    def wrong(which: Any) -> Any:
        raise ValueError("no service")

    name, limits = "replica 0", limited("start_s")
    if factory == "make_scorer":
        name, limits["scoring_tasks"] = "scorer 0", ("ref_logprobs",)
        limits["pools"] = (
            Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train",)), Pool(tasks=("ref_logprobs",))
        )  # fmt: skip
    with pytest.raises(RunFailed, match=rf"^{name} could not be started: ValueError: no service \(test_local_hangs.py"):
        run(limits, **{factory: wrong})


def test_a_prompt_that_is_never_returned_stops_the_run_with_its_limit(freed: threading.Event) -> None:
    class Source:
        def draw(self, first: int, count: int) -> tuple[int, bool]:
            return count, False

        def prompt(self, group: int) -> Prompt:
            if group == 1:
                freed.wait()
            return Prompt(row=group, text="question")

    result = run(limited("draw_s"), prompts=Source())
    assert (result.outcome, result.reason) == ("stopped", "Source.prompt(1) exceeded 0.2 s (timeouts.draw_s)")
    assert result.groups["failed"] == 0, "so that a resume reads it again"


def test_every_prompt_is_read_on_one_thread() -> None:
    """A source may have a connection to a database, which only the thread that made it can use."""

    class Source:
        threads: ClassVar[set[int]] = set()

        def draw(self, first: int, count: int) -> tuple[int, bool]:
            return count, False

        def prompt(self, group: int) -> Prompt:
            self.threads.add(threading.get_ident())
            return Prompt(row=group, text="question")

    run(prompts=Source())
    assert len(Source.threads) == 1 and threading.get_ident() not in Source.threads
