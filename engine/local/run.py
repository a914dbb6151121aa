"""`run`: schedule a user's generators and trainer to the end of the run, and say what came of it.

Called by users; builds scheduler, driver, recorder and executor, and takes them down whatever happens.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import __version__
from engine.commands import FinishRun
from engine.driver import Driver
from engine.errors import ConfigError, RunFailed
from engine.events import RunStarted, StopRequested
from engine.hosts.added import Work, unchanged
from engine.hosts.clock import WallClock
from engine.hosts.prompts import Prompts, as_prompts, listed
from engine.hosts.turns import taking_turns
from engine.ids import ReplicaId, StepId
from engine.local.executor import LocalExecutor
from engine.metrics.collector import RunMetrics
from engine.metrics.journal import Journal
from engine.metrics.transitions import Transitions
from engine.policies import PolicySet
from engine.policies.added import work_of
from engine.private_files import make_run_private
from engine.roles import Generator, Scorer, Trainer
from engine.schedule import Header, MemoryRecorder, Recorder
from engine.scheduler import Scheduler
from engine.states.group import GROUP
from engine.states.limits import Limits, ValidationLimits
from engine.trajectory import Prompt

Generators = Sequence[Generator] | Callable[[ReplicaId], Generator]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came of a run."""

    outcome: str
    """`finished` or `stopped`; a run that failed raises instead."""
    reason: str
    steps: int
    """Train steps trained."""
    version: int
    """Newest weights version published."""
    groups: dict[str, int]
    """Prompt groups by the state they ended in: consumed, filtered, dropped, failed."""
    staleness_mean: float
    staleness_max: int
    """Of the groups trained on, in train steps."""
    tokens: int
    """Response tokens trained on."""
    events: int
    seconds: float
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """What the trainer returned for each step, with `step`."""
    validations: list[dict[str, Any]] = field(default_factory=list)
    """Each validation that ended: `version`, `steps`, `outcome`, `accuracy`, `reward_mean` and so on, as a line of
    `metrics.jsonl`."""
    record: MemoryRecorder | Path | None = None
    """The schedule's record: where it is on disk, or itself. `engine.schedule.read` takes either."""


def run(**options: Any) -> RunResult:
    """`run_async` to its end, for a program without an event loop of its own. Ctrl-C stops the run resumably."""
    return asyncio.run(run_async(**options))


async def run_async(
    *,
    generators: Generators,
    trainer: Trainer,
    prompts: Sequence[Prompt | str] | Prompts,
    limits: Limits,
    samples: int,
    slots: int = 8,
    prefix_every_tokens: int = 1024,
    replicas: int = 1,
    epochs: int = 1,
    replacements: int | None = None,
    policies: Mapping[str, str] | None = None,
    run_dir: str | Path | None = None,
    held_out: Sequence[Prompt | str] = (),
    make_scorer: Callable[[tuple[str, ...]], Scorer] | None = None,
    works: Mapping[str, Work] | None = None,
    state_timeout_s: float | None = None,
) -> RunResult:
    """Run to the end on the current event loop.

    Args: `generators` is one generator per replica, or a function that makes that of a replica: then there are
    `replicas`, and one that is lost is replaced, up to `replacements` times in a row without a train step in between
    (None: `limits.replica_restarts` times); `samples` trajectories per prompt;
    `slots` groups at once per replica; a generator may save prefixes every `prefix_every_tokens` (0: never); `epochs`
    passes over a list of prompts; `policies` names by decision; `run_dir` takes the record, `metrics.jsonl` and
    checkpoints, which otherwise stay in memory; `held_out` prompts are measured, one response each
    (`GroupWork.held_out`), when `limits.validation` says, else before and after training; `make_scorer` makes what
    scores the tasks that `limits.pools` puts apart from `train`; `works` is what is done in those of
    `limits.added_states` whose policies have no `work` of their own, at most `state_timeout_s` on one group.
    Raises: `ConfigError` for what cannot run, `RunFailed` with the cause that ended the run, `EngineError` for a
    defect.
    """
    _require_counts(limits, samples, slots, run_dir)
    limits = _with_restarts(_with_held_out(limits, held_out, samples), replacements)
    make, first = _lives(generators, replicas + len(limits.validators()))
    _require_numbers(limits, len(first))
    books = Books(limits, PolicySet.from_names(policies or {}), Path(run_dir) if run_dir is not None else None)
    executor = LocalExecutor(
        generators=first,
        make=make,
        trainer=taking_turns(trainer) if limits.trains_in_turns else trainer,
        prompts=listed(prompts, epochs) if isinstance(prompts, Sequence) else prompts,
        samples=samples,
        slots=slots,
        prefix_every_tokens=prefix_every_tokens,
        report=books.report,
        checkpoints=books.directory / "checkpoints" if books.directory else None,
        held_out=as_prompts(held_out),
        scorers=_scorers(limits, make_scorer),
        works={
            state.name: work_of(state.name) or (works or {}).get(state.name, unchanged) for state in limits.added_states
        },
        state_timeout_s=state_timeout_s,
    )
    clock = WallClock()
    executor.driver = Driver(books.scheduler, clock, books.recorder, executor, books.metrics.observe)
    try:
        executor.deliver(RunStarted(replicas=len(first)))
        finish = await asyncio.shield(executor.over)
    except asyncio.CancelledError:
        executor.deliver(StopRequested(reason="interrupted"))
        raise
    finally:
        await executor.close()
        books.close()
    if finish.outcome == "failed":
        raise RunFailed(finish.reason, steps=books.scheduler.state.steps_trained)
    return books.result(finish, executor.driver.events_handled, clock.now())


class Books:
    """The scheduler of a run and all that is written down about it."""

    def __init__(self, limits: Limits, policies: PolicySet, directory: Path | None) -> None:
        self.directory = directory
        if directory is not None:
            make_run_private(directory)
        name = directory.name if directory else "local"
        header = Header(run=name, limits=limits.to_plain(), policies=dict(policies.names), code=__version__)
        self.recorder = MemoryRecorder(header) if directory is None else Recorder(directory / "schedule", header)
        self._transitions = Transitions()
        self.scheduler = Scheduler(limits, policies, observe=self._transitions.changed)
        journal = Journal(directory / "metrics.jsonl") if directory else None
        self.metrics = RunMetrics(self.scheduler, self._transitions, journal)
        self._said: list[dict[str, Any]] = []

    def report(self, step: StepId, figures: Mapping[str, Any]) -> None:
        self._said.append({"step": step} | dict(figures) | {"step": step})
        self.metrics.report(step, figures)

    def close(self) -> None:
        self.metrics.close()
        self.recorder.close()

    def result(self, finish: FinishRun, events: int, seconds: float) -> RunResult:
        staleness = self.metrics.staleness
        return RunResult(
            outcome=finish.outcome,
            reason=finish.reason,
            steps=self.scheduler.state.steps_trained,
            version=self.scheduler.state.latest_version,
            groups={state: self._transitions.entered("group", state) for state in GROUP.terminal},
            staleness_mean=staleness.mean or 0.0,
            staleness_max=int(staleness.largest or 0),
            tokens=self.metrics.tokens_trained,
            events=events,
            seconds=seconds,
            metrics=self._said,
            validations=self.metrics.validations,
            record=self.recorder if isinstance(self.recorder, MemoryRecorder) else self.recorder.directory,
        )


def _scorers(limits: Limits, make: Callable[[tuple[str, ...]], Scorer] | None) -> dict[tuple[str, ...], Scorer]:
    if limits.scorers() and make is None:
        law = f"{', '.join(limits.scorers()[0])} have a pool without train, and nothing there can score"
        raise ConfigError("make_scorer", None, law, "pass a function that makes a roles.Scorer")
    return {tasks: make(tasks) for tasks in limits.scorers() if make is not None}


def _lives(
    generators: Generators, replicas: int
) -> tuple[Callable[[ReplicaId], Generator] | None, Sequence[Generator]]:
    """What makes another life of a replica, if anything does, and the first lives."""
    if isinstance(generators, Sequence):
        if not generators:
            raise ConfigError("generators", "[]", "there must be at least one", "give a generator")
        return None, generators
    if replicas < 1:
        raise ConfigError("replicas", replicas, "must be at least 1", "use 1")
    return generators, [generators(replica) for replica in range(replicas)]


def _with_restarts(limits: Limits, replacements: int | None) -> Limits:
    return limits if replacements is None else dataclasses.replace(limits, replica_restarts=replacements)


def _with_held_out(limits: Limits, held_out: Sequence[Prompt | str], samples: int) -> Limits:
    """The limits with what is to be measured. Raises: `ConfigError` where they and the prompts given disagree."""
    given = len(held_out)
    if limits.validation is None:
        if not given:
            return limits
        return dataclasses.replace(limits, validation=ValidationLimits(rows=given, rows_per_slot=samples))
    if limits.validation.rows != given:
        law = f"there are {given} held_out prompts to measure"
        raise ConfigError("limits.validation.rows", limits.validation.rows, law, f"use {given}" if given else "")
    return limits


def _require_numbers(limits: Limits, generators: int) -> None:
    own = limits.validators()
    limits.require_replicas(generators - len(own))
    if own and (own.start < 1 or own.stop != generators):
        law = f"the last {len(own)} of {generators} generators validate"
        raise ConfigError("limits.validation.own_from", own.start, law, f"use {generators - len(own)}")


def _require_counts(limits: Limits, samples: int, slots: int, run_dir: str | Path | None) -> None:
    for name, value in (("samples", samples), ("slots", slots)):
        if value < 1:
            raise ConfigError(name, value, "must be at least 1", "use 1")
    if limits.checkpoint_every and run_dir is None:
        raise ConfigError("limits.checkpoint_every", limits.checkpoint_every, "checkpoints need a run_dir", "use 0")
