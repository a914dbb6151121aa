"""Contracts: test classes for your own generator, trainer, policy and added state, to run in your pytest.

    from engine.testing import GeneratorContract

    class TestMyGenerator(GeneratorContract):
        def make(self):
            return MyGenerator()

Each class tests what the engine relies on, with the checks that a run makes. Override the attributes and methods that
your class needs, such as prompts that it can answer. The tests of the engine run them for its own classes. Needs no
pytest: a failure is an `AssertionError` that says what is required. docs/API.md shows their use.
"""

import asyncio
import inspect
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import Config, load_config
from engine.errors import ConfigError, reason_of
from engine.inspect import open_record
from engine.policies import PolicySet, added_states
from engine.protocols import (
    Batch,
    Closable,
    Generated,
    Generator,
    GroupWork,
    PublishedWeights,
    Restorable,
    Trainer,
)
from engine.record import replay
from engine.scheduling.scheduler import Scheduler
from engine.simulation.order_answers import GivenPrompts
from engine.simulation.proof import prove
from engine.states.limits import BOUNDS, PUBLISHING, QUEUED, SCORING, Limits
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup
from engine.workers.added_states import check_inspected, check_prepared, check_worked
from engine.workers.group_reports import Versions, check_generated

__all__ = ["GeneratorContract", "PolicyContract", "StateContract", "TrainerContract", "assert_same_schedule"]

LIMIT_S = 120.0
"""Time limit of one test of a generator or of a state's work."""


def require(holds: object, law: str) -> None:
    """Raises: `AssertionError`, also under `python -O`."""
    if not holds:
        raise AssertionError(law)


def response_group(number: int = 0, rewards: tuple[float, ...] = (1.0, 0.0)) -> TrajectoryGroup:
    """A finished group for a trainer or a state: responses of 3, 4, … tokens with ids from 2 to 9."""
    trajectories = []
    for index, reward in enumerate(rewards):
        ids = [2 + (number + index + place) % 8 for place in range(3 + index)]
        trajectory = Trajectory(prompt_ids=[2, 3], text="a response", finish_reason="stop", reward=reward)
        trajectory.extend(ids, [-1.0] * len(ids), [Span(0, len(ids), 0)])
        trajectories.append(trajectory)
    return TrajectoryGroup(group=number, prompt=Prompt(row=number, text="a prompt"), trajectories=trajectories)


# -- a generator -------------------------------------------------------------------------------------------------------


class GeneratorContract:
    """What a run relies on in an `engine.protocols.Generator`."""

    samples = 2
    """Number of trajectories of each group."""

    def make(self) -> Generator:
        """A new generator, at weights version 0. Called once for each test, outside of an event loop."""
        raise NotImplementedError(f"{type(self).__name__} must define: def make(self)")

    def prompt(self, row: int) -> Prompt:
        """A prompt that the generator can answer with a finite reward."""
        return Prompt(row=row, text=f"prompt {row}", fields={"answer": "1"})

    def weights(self, version: int) -> Any:
        """Weights that `stage` accepts, as the trainer's `weights` returns them."""
        return None

    def test_it_generates_a_whole_group(self) -> None:
        async def scenario(generator: Generator) -> None:
            work = self._work(1)
            self._check(work, await generator.generate(work))

        self._run(scenario)

    def test_it_generates_several_groups_at_once(self) -> None:
        async def scenario(generator: Generator) -> None:
            works = [self._work(group) for group in (1, 2, 3)]
            for work, found in zip(works, await asyncio.gather(*map(generator.generate, works)), strict=True):
                self._check(work, found)

        self._run(scenario)

    def test_an_aborted_group_resumes_from_its_prefix(self) -> None:
        async def scenario(generator: Generator) -> None:
            work = self._work(1)
            task = asyncio.ensure_future(generator.generate(work))
            await asyncio.wait([task], timeout=0)  # it begins
            await generator.abort([1, 99])  # unknown ids are ignored
            cut = await task
            self._check(work, cut)
            if not cut.aborted:
                return
            again = self._work(1, attempt=2, partial=deepcopy(cut.group))
            found = await generator.generate(again)
            self._check(again, found)
            require(not found.aborted, "generate() must not be aborted again after an abort of an earlier attempt")
            for old, new in zip(cut.group.trajectories, found.group.trajectories, strict=False):
                same = new.token_ids[: len(old.token_ids)] == old.token_ids
                require(same, "generate() must keep the tokens of GroupWork.partial and continue from them")

        self._run(scenario)

    def test_a_truncated_group_ends(self) -> None:
        async def scenario(generator: Generator) -> None:
            work = self._work(1)
            task = asyncio.ensure_future(generator.generate(work))
            await asyncio.wait([task], timeout=0)  # it begins
            await generator.truncate([1, 99])
            found = await task
            require(not found.aborted, "truncate() must finish the group, not abort it")
            self._check(work, found)

        self._run(scenario)

    def test_it_samples_again_after_each_mode_of_pause(self) -> None:
        async def scenario(generator: Generator) -> None:
            for number, mode in enumerate(("keep", "abort", "wait"), start=1):
                work = self._work(number)
                task = asyncio.ensure_future(generator.generate(work))
                await asyncio.wait([task], timeout=0)  # it begins
                await generator.pause(mode)
                await generator.resume()
                self._check(work, await task)
                later = self._work(number + 10)
                self._check(later, await generator.generate(later))

        self._run(scenario)

    def test_new_weights_mark_the_tokens_that_they_sample(self) -> None:
        async def scenario(generator: Generator) -> None:
            for version in (1, 3):  # versions may be skipped
                await generator.stage(version, self.weights(version))
                await generator.pause("wait")
                await generator.install(version)
                await generator.resume()
                work = self._work(version)
                self._check(work, await generator.generate(work), version)

        self._run(scenario)

    def _work(self, group: int, **changes: Any) -> GroupWork:
        given: dict[str, Any] = {"attempt": 1, "prompt": self.prompt(group), "samples": self.samples}
        return GroupWork(group=group, **(given | changes))

    def _check(self, work: GroupWork, found: Generated, version: int = 0) -> None:
        """As a replica checks it."""
        _checked(check_generated, work, found, Versions(admitted=version, oldest=version, newest=version))

    def _run(self, scenario: Callable[[Generator], Awaitable[None]]) -> None:
        generator = self.make()

        async def whole() -> None:
            try:
                await asyncio.wait_for(scenario(generator), LIMIT_S)
            finally:
                await generator.close()

        asyncio.run(whole())


# -- a trainer ---------------------------------------------------------------------------------------------------------


class TrainerContract:
    """What a run relies on in an `engine.protocols.Trainer`."""

    def make(self) -> Trainer:
        """A new trainer. Two of them begin with the same weights."""
        raise NotImplementedError(f"{type(self).__name__} must define: def make(self)")

    def batch(self, step: int) -> Batch:
        """A batch that changes the weights; another one for each step."""
        groups = [response_group(2 * step + index) for index in range(2)]
        return Batch(step=step, groups=groups, staleness=[0] * len(groups))

    def test_train_returns_metrics(self) -> None:
        trainer = self.make()
        metrics = _result(trainer.train(self.batch(0)))
        what = f"train() must return a dict of metrics or None, not {type(metrics).__name__}"
        require(metrics is None or isinstance(metrics, Mapping), what)
        for name, value in (metrics or {}).items():
            require(isinstance(name, str), f"the name of a metric must be a str, not {name!r:.80}")
            require(isinstance(value, int | float), f"the metric {name!r} must be a number, not {value!r:.80}")
        _close(trainer)

    def test_a_batch_can_be_scored_before_it_is_trained(self) -> None:
        trainer = self.make()
        if not hasattr(trainer, "score"):
            return  # a trainer of `trainer.backend` needs none
        _result(trainer.score(self.batch(0), "old_logprobs"))
        _result(trainer.train(self.batch(0)))
        _close(trainer)

    def test_weights_are_a_named_copy(self) -> None:
        trainer = self.make()
        weights = _result(trainer.weights())
        for name in weights if isinstance(weights, Mapping) else ():
            require(isinstance(name, str) and name, f"weights() must name each tensor by a text, not {name!r:.80}")
        before = _copied(weights)
        _result(trainer.train(self.batch(0)))
        require(_equal(weights, before), "weights() must return a copy: training has changed what it returned earlier")
        changed = not _equal(_result(trainer.weights()), before)
        require(changed, "train() must change the weights with each batch of the contract; override batch()")
        _close(trainer)

    def test_a_checkpoint_restores_the_weights_and_the_next_step(self) -> None:
        trainer = self.make()
        if not isinstance(trainer, Restorable):
            _close(trainer)
            return  # it has no checkpoints
        _result(trainer.train(self.batch(0)))
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / "step-1"
            directory.mkdir()
            trainer.save(str(directory), 1)
            require(any(directory.iterdir()), "save() must write its files into the directory")
            restored: Any = self.make()
            restored.load(str(directory))
        for step in (1, 2):
            same = _equal(_copied(_result(restored.weights())), _copied(_result(trainer.weights())))
            require(same, f"after load(), the weights must be those of the saved trainer, also after {step} steps")
            for one in (trainer, restored):
                _result(one.train(self.batch(step)))
        for one in (trainer, restored):
            _close(one)


def _result(value: Any) -> Any:
    """What a method returned, or the result of its coroutine."""

    async def awaited() -> Any:
        return await value

    return asyncio.run(awaited()) if inspect.isawaitable(value) else value


def _close(trainer: Any) -> None:
    if isinstance(trainer, Closable):
        trainer.close()


def _copied(weights: Any) -> Any:
    if isinstance(weights, Mapping):
        return {name: _copied(value) for name, value in weights.items()}
    return weights.clone() if hasattr(weights, "clone") else deepcopy(weights)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    same = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


# -- a policy and a state ----------------------------------------------------------------------------------------------


class PolicyContract:
    """Simulated runs with a registered policy, in which anything can happen in any order: every law is checked after
    every tick, and each run is replayed."""

    decision: str
    """The decision, such as `admission`."""
    name: str
    """The name under which the policy is registered."""
    worlds = 30
    """Number of simulated runs; `engine check` makes 100."""

    def limits(self) -> Limits:
        """The limits of the simulated runs, which are scaled down to at most four groups per step."""
        return Limits(
            train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=6,
            max_filtered_in_a_row=1000,
        )  # fmt: skip

    def test_simulated_runs_keep_every_law(self) -> None:
        _checked(prove, self.limits(), {self.decision: self.name}, self.worlds, GivenPrompts(described=()))


class StateContract:
    """Simulated runs with a registered state, and one call of its work."""

    state: str
    """The name of the state."""
    worlds = 30

    def work(self) -> Any:
        """What does the work: an instance of the class that `add_state` got as `policy`, or another object with the
        method `work`; None: groups pass unchanged."""
        return None

    def group(self) -> TrajectoryGroup:
        """A group for the work; without its trajectories if the state lies before generation."""
        return response_group()

    def batch(self) -> Batch:
        """A batch for the work of a state before training."""
        return Batch(step=0, groups=[response_group(0), response_group(1)], staleness=[0, 0])

    def weights(self) -> Any:
        """Weights for the work of a state before replicas get them, as your trainer's `weights` returns them."""
        return {}

    def limits(self) -> Limits:
        """As in `PolicyContract`; the state is added to them."""
        return Limits(train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=6)

    def test_simulated_runs_keep_every_law(self) -> None:
        limits = replace(self.limits(), added_states=_checked(added_states, (self.state,)))
        _checked(prove, limits, {}, self.worlds, GivenPrompts(described=()))

    def test_work_changes_only_what_it_may(self) -> None:
        work = self.work()
        if work is None:
            return
        group, (added,) = self.group(), _checked(added_states, (self.state,))
        if added.place in (SCORING, PUBLISHING):
            published = PublishedWeights(version=1, steps=1, weights=self.weights())
            given = self.batch() if added.place == SCORING else published
            _checked(check_inspected, self.state, asyncio.run(asyncio.wait_for(work.work(given), LIMIT_S)))
            return
        check = check_worked
        if added.place == QUEUED:
            group, check = replace(group, trajectories=[]), check_prepared
        found = asyncio.run(asyncio.wait_for(work.work(deepcopy(group)), LIMIT_S))
        _checked(check, self.state, group, found)


# -- a golden schedule -------------------------------------------------------------------------------------------------


LIVE = {"timeouts", *(name for name, bound in BOUNDS.items() if bound.live)}
"""The fields of `Limits` that may change while a run is running, and so between a record and a configuration."""
NOT_CONFIGURED = [name for name, bound in BOUNDS.items() if bound.path.startswith("limits.")] + ["keeps_batches"]
"""Fields of `Limits` that no configuration has: how the run was started says them."""
FROM_DATA = ("rows", "sets")
"""The fields of `ValidationLimits` that depend on the rows of the data."""


def assert_same_schedule(record: str | Path, config: str | Path | Config | None = None) -> None:
    """Replay a golden schedule, and fail at the first decision that differs: after an upgrade of the engine, or with
    the policies and settings of a changed configuration. The words of reasons are not compared.

    Args: `record`: the directory of a run, or a file of `engine bug RUN --whole`. `config`: a YAML file or a
    configuration; it may differ from the recorded one in all that the scheduler does not read, in policies but that of
    concurrency, and in settings that `engine set` can change. None: the recorded limits and policies.
    Raises: `AssertionError` with the tick, the expected and the found commands; `ConfigError` for a configuration that
    differs in another figure, or a file that lacks the first events; `RecordError` for an unreadable record.
    """
    golden = open_record(record)
    if golden.begin is not None:
        law = f"begins at tick {golden.begin.ticks}, but a golden schedule needs the first events"
        raise ConfigError("record", str(record), law, "write it again with `engine bug RUN --whole --out FILE`")
    limits, names = Limits.from_plain(dict(golden.header.limits)), dict(golden.header.policies)
    if config is not None:
        loaded = config if isinstance(config, Config) else load_config(config)
        limits, names = _golden_limits(limits, loaded), _golden_policies(names, loaded)
    scheduler = Scheduler(limits, PolicySet.from_names(names))
    report = replay(golden, build=lambda _: scheduler, compare_snapshots=False, compare_reasons=False)
    require(report.identical, f"the schedule differs from {record}: {report.divergence}")


def _golden_limits(recorded: Limits, config: Config) -> Limits:
    """The recorded limits with the live settings of a configuration. Raises: `ConfigError` if others differ."""
    then, now = recorded.to_plain(), config.limits.to_plain()
    for limits in (then, now):
        if limits["validation"] is not None:
            limits["validation"] = {k: v for k, v in limits["validation"].items() if k not in FROM_DATA}
    for name in then:
        if name not in (*LIVE, *NOT_CONFIGURED) and then[name] != now[name]:
            field = BOUNDS[name].path if name in BOUNDS else f"limits.{name}"
            law = f"must be {then[name]!r}, as in the golden schedule: its events follow from it"
            raise ConfigError(field, now[name], law, "set it back, or record a new golden schedule")
    return replace(recorded, **{name: getattr(config.limits, name) for name in LIVE})


def _golden_policies(recorded: dict[str, str], config: Config) -> dict[str, str]:
    """The policies of a configuration. Raises: `ConfigError` for another policy of concurrency: with some, replicas
    report their KV caches."""
    chosen = dict(config.policies().names)
    if chosen["concurrency"] != recorded.get("concurrency", chosen["concurrency"]):
        law = f"must be {recorded['concurrency']}, as in the golden schedule: its events follow from it"
        field = "scheduler.policies.concurrency"
        raise ConfigError(field, chosen["concurrency"], law, "set it back, or record a new golden schedule")
    return chosen


def _checked(check: Callable[..., Any], *given: Any) -> Any:
    """The result of a check that a run makes. Raises: `AssertionError`."""
    try:
        return check(*given)
    except Exception as error:  # user's code, which the check may call, can raise anything
        raise AssertionError(reason_of(error)) from error
