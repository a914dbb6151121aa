"""Whole runs in one process: what a user's generators, trainer and prompts may do, and what comes of it."""

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from token_generator import TokenGenerator

import engine.runtime.local
from engine.commands import StartProcess
from engine.errors import DataFailure, RunFailed
from engine.events import DrawFailed, GroupFailed, GroupGenerated, ProcessLost
from engine.protocols import Batch, Generated, GroupWork
from engine.record import read, replay
from engine.runtime.local import RunResult, SimpleGenerator, SimpleTrainer, response
from engine.runtime.prompt_sources import CountedPrompts
from engine.scheduling import lifetimes
from engine.states.limits import Limits
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup


class Steady(SimpleGenerator):
    """Two tokens a trajectory; odd samples are right."""

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        await asyncio.sleep(0)
        return [response([1, 2], reward=float(i % 2), version=version) for i in range(work.samples)]


class Counting(SimpleTrainer):
    """Sees each group it is given, and publishes how many steps it has done."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.steps = 0
        self.staleness: list[int] = []

    def train(self, batch: Batch) -> dict[str, float]:
        self.groups += [group.group for group in batch.groups]
        self.staleness += batch.staleness
        for group, stale in zip(batch.groups, batch.staleness, strict=True):
            oldest = min(s.version for t in group.trajectories for s in t.spans)
            assert stale == batch.step - oldest, "one version a step here"
        self.steps += 1
        return {"loss": 1.0 / self.steps}

    def weights(self) -> Any:
        return self.steps

    def save(self, directory: str, step: int) -> None:
        Path(directory, "steps").write_text(str(step))


def limits(**changes: Any) -> Limits:
    figures = {"train_batch_size": 4, "max_staleness_steps": 2, "max_concurrent_groups": 12, **changes}
    return Limits(**figures)


def events_of(result: RunResult, kind: type[Any]) -> list[Any]:
    return [event for event in read(result.record).events() if isinstance(event, kind)]


def orders_of(result: RunResult, kind: type[Any]) -> list[Any]:
    return [command for tick in read(result.record).ticks() for command in tick.commands if isinstance(command, kind)]


def run(**options: Any) -> RunResult:
    defaults: dict[str, Any] = {
        "generators": [Steady(), Steady()],
        "trainer": Counting(),
        "prompts": [f"question {n}" for n in range(30)],
        "limits": limits(),
        "samples": 2,
        "slots": 6,
    }
    return engine.runtime.local.run(**{**defaults, **options})


def test_every_prompt_is_trained_once_the_tail_included_and_the_record_replays() -> None:
    trainer = Counting()
    result = run(trainer=trainer)
    assert (result.outcome, result.steps, result.version) == ("finished", 8, 8)
    assert sorted(trainer.groups) == list(range(30))
    assert result.groups == {"consumed": 30, "filtered": 0, "dropped": 0, "failed": 0}
    assert result.staleness_max == max(trainer.staleness) <= 2
    assert [row["step"] for row in result.metrics] == list(range(8))
    assert replay(read(result.record)).identical


class Remote(Counting):
    """The client of a trainer elsewhere: its calls are coroutines."""

    busy = False

    async def train(self, batch: Batch) -> dict[str, float]:  # type: ignore[override]
        assert not self.busy
        self.busy = True
        await asyncio.sleep(0)
        self.busy = False
        return super().train(batch)

    async def weights(self) -> Any:
        assert not self.busy
        return self.steps


def test_a_trainer_may_be_made_of_coroutines() -> None:
    trainer = Remote()
    result = run(trainer=trainer)
    assert (result.outcome, result.steps, result.version) == ("finished", 8, 8)
    assert sorted(trainer.groups) == list(range(30))


def test_prompts_in_memory_may_hold_any_object() -> None:
    trainer = Counting()
    run(trainer=trainer, prompts=[Prompt(row=n, text="", fields={"image": object()}) for n in range(8)])
    assert sorted(trainer.groups) == list(range(8))


def test_what_a_generator_changes_after_it_has_returned_is_not_trained_on() -> None:
    class Reusing(SimpleGenerator):
        """Fills one set of trajectory objects again for each group."""

        def __init__(self) -> None:
            super().__init__()
            self.kept = [response([], reward=0.0, version=0) for _ in range(2)]

        async def generate(self, work: GroupWork) -> Generated:
            for trajectory in self.kept:
                trajectory.token_ids[:] = [work.group]
                trajectory.logprobs[:], trajectory.loss_mask[:] = [0.0], [1]
                trajectory.spans[:] = [Span(0, 1, self.version)]
                trajectory.reward = float(work.group)
            return Generated(group=TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=self.kept))

    class Reading(Counting):
        def train(self, batch: Batch) -> dict[str, float]:
            for group in batch.groups:
                assert [t.token_ids for t in group.trajectories] == [[group.group]] * 2
                assert [t.reward for t in group.trajectories] == [float(group.group)] * 2
            return super().train(batch)

    assert run(generators=[Reusing()], trainer=Reading()).groups["consumed"] == 30


def test_a_retry_gets_the_fields_of_its_prompt_as_they_were() -> None:
    class Changing(Steady):
        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            seen.append(json.dumps(dict(work.prompt.fields)))
            work.prompt.fields["messages"].append("spoiled")
            work.prompt.fields["answer"] = None  # type: ignore[index]
            if work.attempt == 1 and not work.held_out:
                raise ConnectionError("reset by peer")
            return await super().sample(work, weights, version)

    seen: list[str] = []
    prompts = [Prompt(row=n, text="?", fields={"answer": "4", "messages": ["2 + 2"]}) for n in range(4)]
    result = run(generators=[Changing()], prompts=prompts, held_out=prompts, limits=limits(max_steps=1))
    assert result.steps == 1 and len(result.validations) == 2
    assert len(seen) == 4 + 4 + 2 * 4 and set(seen) == {'{"answer": "4", "messages": ["2 + 2"]}'}


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_weights_reach_generators_that_keep_the_whole_protocol(mode: str) -> None:
    class Paced(TokenGenerator):
        async def generate(self, work: GroupWork) -> Generated:
            self.length = 4 + 8 * (work.group % 3)
            return await super().generate(work)

    generators = [Paced(free=True), Paced(free=True)]
    result = run(generators=generators, limits=limits(sync_mode=mode, max_steps=12), epochs=2)
    assert (result.outcome, result.steps) == ("finished", 12)
    assert all(f"pause {mode}" in generator.calls for generator in generators)
    assert all(generator.calls[-1] == "close" for generator in generators)
    versions = [e.newest_version for e in events_of(result, GroupGenerated)]
    assert max(versions) >= 8, "new weights are sampled from"
    assert replay(read(result.record)).identical


def test_simple_generators_are_cancelled_by_abort_and_begin_again() -> None:
    class Slow(SimpleGenerator):
        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            await asyncio.sleep(0.002 * (work.group % 4))
            return [response([version], reward=1.0, version=version) for _ in range(work.samples)]

    result = run(generators=[Slow(), Slow()], limits=limits(sync_mode="abort"))
    assert result.outcome == "finished"
    assert result.groups["consumed"] == 30


def test_one_prompt_that_always_fails_costs_only_itself() -> None:
    class Picky(Steady):
        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            if work.group == 5:
                raise DataFailure(f"row {work.prompt.row} has no answer")
            if work.group == 6:
                return [response([1], reward=math.nan, version=version)] * work.samples
            if work.group == 7 and work.attempt < 3:
                raise ConnectionError("reset by peer")
            return await super().sample(work, weights, version)

    result = run(generators=[Picky()], slots=12)
    assert (result.groups["consumed"], result.groups["failed"]) == (28, 2)
    failures = events_of(result, GroupFailed)
    assert [(e.group, e.cause) for e in failures].count((5, "data")) == 2
    assert [(e.group, e.cause) for e in failures].count((6, "data")) == 2
    assert [(e.group, e.cause) for e in failures].count((7, "infrastructure")) == 2


def test_a_prompt_that_cannot_be_read_fails_its_group_alone() -> None:
    def prompt(group: int) -> Prompt:
        if group == 3:
            raise ValueError("line 4 is damaged")
        return Prompt(row=group, text="?")

    result = run(prompts=CountedPrompts(10, prompt))
    assert (result.groups["consumed"], result.groups["failed"]) == (9, 1)
    assert "its prompt cannot be read: ValueError: line 4 is damaged" in events_of(result, GroupFailed)[0].reason


def test_a_step_whose_metrics_have_a_wrong_type_is_not_trained_twice() -> None:
    class Wrong(Counting):
        def train(self, batch: Batch) -> Any:
            return list(super().train(batch).items())

    trainer = Wrong()
    with pytest.raises(RunFailed, match=r"train\(\) must return a dict of metrics or None, not list"):
        run(trainer=trainer)
    assert trainer.steps == 1


class Sometimes(CountedPrompts):
    """Of 30 prompts; each third answer has too many."""

    def __init__(self) -> None:
        super().__init__(30, lambda group: Prompt(row=group, text="?"))
        self.calls = 0

    def draw(self, first: int, count: int) -> tuple[int, bool]:
        self.calls += 1
        if self.calls % 3 == 2:
            return 99, False
        return super().draw(first, min(count, 2))


def test_a_data_source_that_fails_now_and_then_costs_no_prompt() -> None:
    trainer = Counting()
    source = Sometimes()
    result = run(prompts=source, trainer=trainer)
    assert sorted(trainer.groups) == list(range(30)) and result.outcome == "finished"
    assert len(events_of(result, DrawFailed)) == len(range(2, source.calls + 1, 3)) > 3
    assert replay(read(result.record)).identical


def test_metrics_that_cannot_be_used_lose_no_step(tmp_path: Path) -> None:
    class Odd(Counting):
        def train(self, batch: Batch) -> Any:
            return {**super().train(batch), "large": 10**400, 7: 0.5, "step": 99, "optimizer_steps": math.nan}

    (tmp_path / "logs").mkdir()
    (tmp_path / "logs").chmod(0o755)
    result = run(trainer=Odd(), run_dir=tmp_path)
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o755, "it is the user's"
    assert result.groups["consumed"] == 30
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [row["step"] for row in result.metrics] == list(range(8))
    assert rows[1]["loss"] == result.metrics[1]["loss"] == 0.5
    assert not {"large", "7"} & set(rows[1]) and 7 not in result.metrics[1]


def test_a_factory_that_leaves_the_process_makes_no_replica_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifetimes, "FIRST_DELAY_S", 0.001)  # of the start after the one that failed
    made: list[int] = []

    class Fragile(Steady):
        async def resume(self) -> None:
            raise RuntimeError("frozen for good")

    class Patient(Steady):
        """Answers once both losses of replica 0 are known: its last life has been ordered."""

        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            while len(made) < 4:
                await asyncio.sleep(0)
            return await super().sample(work, weights, version)

    def make(replica: int) -> SimpleGenerator:
        made.append(replica)
        if len(made) > 2:
            raise SystemExit("no licence left")
        return Fragile() if replica == 0 else Patient()

    result = run(generators=make, replicas=2, replacements=2)
    assert result.groups["consumed"] == 30
    frozen, unmade, *_ = events_of(result, ProcessLost)  # the run may end before the loss of the last life is known
    assert "frozen for good" in frozen.reason
    assert (unmade.index, unmade.life, unmade.final) == (0, 2, False)
    assert "could not be started" in unmade.reason and "no licence left" in unmade.reason


class Mortal(Steady):
    """Ends after so many groups, or when it is first given one."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.over = asyncio.Event()

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        self.groups -= 1
        if self.groups < 0:
            self.over.set()
            await asyncio.Event().wait()
        return await super().sample(work, weights, version)

    async def failed(self) -> str:
        await self.over.wait()
        return "its engine ended"


def test_a_replica_that_only_dies_is_replaced_so_many_times() -> None:
    made: list[int] = []

    def make(replica: int) -> SimpleGenerator:
        made.append(replica)
        return Mortal(0)

    with pytest.raises(RunFailed, match=r"no replica is left.*its engine ended"):
        run(generators=make, replacements=2)
    assert len(made) == 3
    with pytest.raises(RunFailed, match=r"no replica is left.*its engine ended"):
        run(generators=make, limits=limits(replica_restarts=1))
    assert len(made) == 3 + 2


def test_a_factory_that_raises_is_asked_again_after_the_ordered_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetimes, "FIRST_DELAY_S", 0.001)
    made: list[int] = []

    def make(replica: int) -> SimpleGenerator:
        made.append(replica)
        if 1 < len(made) < 4:
            raise RuntimeError("no memory")
        return Mortal(0) if len(made) == 1 else Steady()

    result = run(generators=make, replacements=5)
    assert result.outcome == "finished" and len(made) == 4
    delays = [order.delay_s for order in orders_of(result, StartProcess)]
    assert delays == [0.0, 0.0, 0.002, 0.004]


@pytest.mark.parametrize("turns", range(16))
def test_a_replica_that_is_given_up_and_fails_by_itself_is_lost_once(turns: int) -> None:
    class Broken(SimpleGenerator):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.over = asyncio.Event()

        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            self.calls += 1
            if self.calls == 2:
                self.over.set()  # with this failure the replica is given up
            raise ValueError("burnt")

        async def failed(self) -> str:
            await self.over.wait()
            for _ in range(turns):  # of the event loop: before, while and after it is given up
                await asyncio.sleep(0)
            return "its engine ended"

    result = engine.runtime.local.run(
        generators=[Steady(), Broken()],
        trainer=Counting(),
        prompts=[f"question {n}" for n in range(16)],
        limits=limits(infrastructure_attempts=2),
        samples=2,
        slots=4,
    )
    assert result.outcome == "finished"
    assert len(events_of(result, ProcessLost)) == 1


def test_a_generator_that_is_not_whole_says_what_is_missing() -> None:
    with pytest.raises(RunFailed, match=r"no group could be trained on.* NotImplementedError: SimpleGenerator must"):
        run(generators=[SimpleGenerator()], prompts=["a"], limits=limits(), trainer=Counting())


def test_cancelling_stops_the_run_and_closes_its_record(tmp_path: Path) -> None:
    class Endless(TokenGenerator):
        pass

    generator = Endless()

    async def scene() -> None:
        task = asyncio.create_task(
            engine.runtime.local.run_async(
                generators=[generator],
                trainer=Counting(),
                prompts=["a"] * 9,
                limits=limits(),
                samples=1,
                run_dir=tmp_path,
            )
        )
        while not generator.works:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())
    frames = list(read(tmp_path / "schedule").frames())
    assert frames[-1].commands[-1].outcome == "stopped"
    assert generator.calls == ["close"]
