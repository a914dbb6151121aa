"""`run`: runs a user's generators and trainer in this process until the run ends, and returns the result.

Called by users. It makes a plan from the arguments, and runs it with all processes in this process. Must never
leave anything open, however the run ends.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.commands import FinishRun
from engine.control.listening_address import check_addresses
from engine.control.proxies import exempt_own_servers
from engine.control.requests import MOST_REPLICAS
from engine.errors import ConfigError, EngineError, RunFailed, counted, describe_error
from engine.events import StopRequested
from engine.ids import ReplicaId, StepId
from engine.input_identity import InputIdentity, as_ids, describe_changes, row_ids
from engine.policies import PolicySet
from engine.policies.registry import DEFAULTS, is_built_in
from engine.protocols import Generator, Prompts, Restorable, Scorer, Trainer
from engine.record import MemoryRecorder, Recorder, read
from engine.record.files import make_run_directory, make_run_private
from engine.runtime.local.arguments import GENERATOR, SCORER, check_arguments, has_methods, shown
from engine.runtime.local.local_processes import LocalProcesses, LocalStores, LocalTrajectories, LocalWeights
from engine.runtime.prompt_sources import as_prompts, catch_up, listed
from engine.runtime.run_history import history_of
from engine.runtime.run_parts import RunParts, Watchers, header_of, recorder_of
from engine.runtime.trajectory_service import TrajectoryService
from engine.scheduling.settings import MAX_STEPS
from engine.states.group import GROUP
from engine.states.limits import Limits, ValidationLimits
from engine.states.machine import entered
from engine.storage.checkpoints import list_checkpoints
from engine.storage.input_files import read_inputs, write_inputs
from engine.storage.samples import SamplePolicy, lacks_pyarrow
from engine.trajectory import Prompt
from engine.workers.plan import Plan, Restore, Resumption, Rollout, ServerAddress, Work
from engine.workers.threads import contained
from engine.workers.worker import end_tasks

log = logging.getLogger(__name__)

Generators = Sequence[Generator] | Callable[[ReplicaId], Generator]
Tasks = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run."""

    outcome: str
    """`finished` or `stopped`; a failed run raises instead."""
    reason: str
    steps: int
    """Number of finished train steps."""
    version: int
    """Newest published weights version."""
    groups: dict[str, int]
    """Number of prompt groups by final state: consumed, filtered, dropped, failed."""
    staleness_mean: float
    staleness_max: int
    """Staleness of the trained groups, in train steps."""
    tokens: int
    """Response tokens trained on."""
    events: int
    seconds: float
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """The trainer's metrics of each step, with `step`."""
    validations: list[dict[str, Any]] = field(default_factory=list)
    """Each ended validation, with the fields of its line in `metrics.jsonl`: `version`, `steps`, `outcome`,
    `accuracy`, `reward_mean` and so on."""
    resumed: str = ""
    """A description of what a resumed run continued from; empty for a new run."""
    record: MemoryRecorder | Path | None = None
    """The schedule's record, or its directory if it is on disk. `engine.record.read` accepts either."""


def run(**options: Any) -> RunResult:
    """`run_async` for a program without an event loop. Ctrl-C stops the run; it can be resumed."""
    return asyncio.run(_to_the_end(run_async(**options)))


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
    make_scorer: Callable[[Tasks], Scorer] | None = None,
    works: Mapping[str, Work] | None = None,
    policy_fields: Sequence[str] = (),
    state_timeout_s: float | None = None,
    resume: bool = False,
    force_from: str | None = None,
    trajectories: str = "disk",
    sample_policy: SamplePolicy | None = None,
    metrics_port: int | None = None,
    control_port: int | None = None,
) -> RunResult:
    """Run until the run ends, on the current event loop.

    `generators`: a generator for each replica, or a function that makes them (on a thread, one at a time); then there
    are `replicas`, and a lost one is replaced, up to `replacements` times without a train step in between (None:
    `limits.replica_restarts` times). `samples`: trajectories per prompt. `slots`: concurrent groups per replica.
    `prefix_every_tokens`: tokens between two prefixes that a generator may save; 0: none. `epochs`: passes over a list
    of prompts. `policies`: names by decision. `held_out`: prompts to measure, with one response each
    (`GroupWork.held_out`), as `limits.validation` says, or before and after training. `make_scorer`: makes the scorer
    of tasks that `limits.pools` separates from `train`. `works`: the work of `limits.added_states`, in place of that of
    their policies; it has `state_timeout_s` for each group. `policy_fields`: columns of a prompt's `fields` that added
    states and a custom filter see.

    `run_dir`: directory of the record, `metrics.jsonl`, checkpoints and trajectories (`trajectories`: `disk` or
    `memory`); None: all stay in memory. `resume`: continue the run in it, with the same limits and a trainer in its
    initial state, which has `load` (`protocols.Restorable`) if there is a checkpoint; a larger `max_steps` also extends
    a finished run. `force_from`: an older checkpoint to go back to, or `initial`. `sample_policy`: responses kept for
    `engine samples`, if pyarrow is installed. `metrics_port`, `control_port`: for `engine top`, `waits`, `drain` etc.

    Raises: `ConfigError` for invalid arguments, `RunFailed` with the cause if the run fails, `EngineError` for defects.
    """
    check_arguments(locals())
    _require_together(trainer, limits, run_dir, needs_directory=resume or control_port is not None)
    durable = run_dir is not None and trajectories == "disk"
    limits = _for_one_process(_with_held_out(limits, held_out, samples), replacements, durable)
    given = _Arguments(generators, replicas + len(limits.validators()), trainer, make_scorer, works or {})
    plan = given.plan(
        limits,
        samples=samples,
        make_prompts=lambda: listed(prompts, epochs) if isinstance(prompts, Sequence) else prompts,
        slots=slots,
        prefix_every_tokens=prefix_every_tokens,
        described=_described(limits, policies or {}, policy_fields),
        state_timeout_s=state_timeout_s,
        policies=policies or {},
        run_dir=None if run_dir is None else Path(run_dir),
        held_out=as_prompts(held_out),
        resume=resume,
        resumption=Resumption(force_from=force_from),
        trajectories=trajectories,
        sample_policy=sample_policy or SamplePolicy(),
        metrics=None if metrics_port is None else ServerAddress(port=metrics_port),
        control=None if control_port is None else ServerAddress(port=control_port),
    )
    return await _opened(plan, given, prompts, held_out).to_end()


def _opened(
    plan: Plan, given: "_Arguments", prompts: Sequence[Prompt | str] | Prompts, held_out: Sequence[Prompt | str]
) -> "LocalRun":
    """The run of a plan. Its directory keeps the ids of listed prompts, for a resume."""
    lists = {"prompts": prompts if isinstance(prompts, Sequence) else (), "held_out": held_out}
    rows = {name: row_ids([one.text, one.fields] for one in as_prompts(items)) for name, items in lists.items()}
    run = LocalRun(_as_recorded(plan, given.trainer, rows) if plan.resume else plan, given.can_make)
    if plan.run_dir is not None and not plan.resume:
        write_inputs(plan.run_dir, 0, InputIdentity(rows=rows))
    return run


def run_plan(plan: Plan) -> RunResult:
    """Run a `Plan` in this process, as `actors.launch.start` does over Ray. Resume it with `replace(plan,
    resume=True)`.

    Raises: as `run_async`.
    """

    async def to_end() -> RunResult:
        return await LocalRun(replace(plan, limits=replace(plan.limits, run_restarts=0)), lambda replica: True).to_end()

    plan.require_scorers()
    return asyncio.run(_to_the_end(to_end()))


async def _to_the_end(work: Coroutine[Any, Any, RunResult]) -> RunResult:
    """Await a run. Code of the user that never ends must not keep `asyncio.run` from returning: no task is left for it
    to wait for, nor a thread of `asyncio.to_thread`."""
    asyncio.get_running_loop().set_default_executor(_Threads())
    try:
        return await work
    finally:
        for task in await end_tasks(asyncio.all_tasks() - {asyncio.current_task()}, "the run"):
            asyncio.tasks._unregister_task(task)


class _Threads(ThreadPoolExecutor):
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def _load(trainer: Trainer, restore: Restore) -> None:
    assert isinstance(trainer, Restorable) and restore.checkpoint is not None
    trainer.load(restore.checkpoint)


class LocalRun:
    """A run whose processes are all in this process."""

    def __init__(self, plan: Plan, can_make: Callable[[ReplicaId], bool]) -> None:
        """`can_make`: whether another life of a replica can be made."""
        exempt_own_servers()
        servers = {"metrics": plan.metrics, "control": plan.control}
        check_addresses((section, one.host, one.port) for section, one in servers.items() if one is not None)
        if plan.run_dir is not None:
            (make_run_private if plan.resume else make_run_directory)(plan.run_dir)
            _tell_missing_package(plan)
        self.history = history_of(plan) if plan.resume else None
        directory = plan.trajectories_dir
        self._reports: list[dict[str, Any]] = []
        with ExitStack() as opened:
            if self.history is not None:
                opened.callback(self.history.lock.release)
            prompts = plan.make_prompts()
            if self.history is not None:
                catch_up(prompts, self.history.recovered)
            self._store = (
                LocalTrajectories()
                if directory is None
                else TrajectoryService(directory, plan.store_policy, fresh=not plan.resume)
            )
            self.recorder: Any = (
                MemoryRecorder(header_of(plan)) if plan.run_dir is None else recorder_of(plan, self.history)
            )
            opened.callback(self.recorder.close)
            self.parts = parts = RunParts(plan, self.recorder, Watchers(), self.history)
            parts.take_settings()
            weights = LocalWeights()
            processes = LocalProcesses(plan, self._store, weights, parts.driver.post, self._report, can_make)
            parts.connect(prompts, processes, LocalStores(self._store, weights), self._store.stats)
            opened.pop_all()

    async def to_end(self) -> RunResult:
        """Run until the run ends, then close everything. Raises: `RunFailed` with the cause, `EngineError` for a
        defect of the engine."""
        parts = self.parts
        try:
            await parts.control.open()
            await parts.supervisor.open(None if self.history is None else self.history.restore)
            parts.begin(self.history)
            finish = await asyncio.shield(parts.over)
        except asyncio.CancelledError:
            if parts.driver.events_handled:
                parts.driver.deliver(StopRequested(reason="interrupted"))
            raise
        finally:
            await asyncio.shield(asyncio.ensure_future(self._close()))
        if finish.outcome == "failed":
            raise RunFailed(finish.reason, steps=parts.scheduler.state.training.steps_trained)
        return self._result(finish)

    async def _close(self) -> None:
        """Close everything, the record last. A failure is logged: it must not hide why the run ended."""
        parts = self.parts
        parts.stop()
        try:
            for close in (parts.control.close, parts.supervisor.close, self._store.close):
                try:
                    await close()
                except Exception:
                    log.exception("the run could not be closed completely")
        finally:
            parts.close()
            begun = parts.driver.events_handled or parts.driver.failure is not None
            if isinstance(self.recorder, Recorder) and not begun:
                shutil.rmtree(self.recorder.directory)  # the record of a run that never began would block the next run

    def _report(self, step: StepId, figures: Mapping[str, Any]) -> None:
        self._reports.append({"step": step} | dict(figures) | {"step": step})
        self.parts.metrics.report(step, figures)

    def _result(self, finish: FinishRun) -> RunResult:
        parts = self.parts
        metrics, state = parts.metrics, parts.scheduler.state
        return RunResult(
            outcome=finish.outcome,
            reason=finish.reason,
            steps=state.training.steps_trained,
            version=state.training.latest_version,
            groups={name: entered(state.moves, "group", name) for name in GROUP.terminal},
            staleness_mean=metrics.trained.mean or 0.0,
            staleness_max=max(metrics.trained.range, default=0),
            tokens=metrics.trained.tokens,
            events=parts.driver.events_handled,
            seconds=parts.driver.clock.now(),
            metrics=self._reports,
            validations=metrics.validations,
            resumed="" if self.history is None else str(self.history),
            record=self.recorder.directory if isinstance(self.recorder, Recorder) else self.recorder,
        )


@dataclass
class _Arguments:
    """The user's arguments: generators or a function that makes them, a trainer, scorers, works."""

    generators: Generators
    replicas: int
    trainer: Trainer
    make_scorer: Callable[[Tasks], Scorer] | None
    works: Mapping[str, Work]

    def __post_init__(self) -> None:
        self._left: dict[ReplicaId, Generator] | None = None
        """The given generators that no replica has yet; None: a function makes them."""
        if isinstance(self.generators, Sequence):
            if not self.generators:
                raise ConfigError("generators", "[]", "there must be at least one", "give a generator")
            self._left = dict(enumerate(self.generators))
            self.replicas = len(self._left)

    def plan(self, limits: Limits, **settings: Any) -> Plan:
        """Raises: `ConfigError`."""
        made = Plan(
            limits=limits,
            make_rollout=self._rollout,
            make_trainer=lambda: self.trainer,
            replicas=self.replicas - len(limits.validators()),
            make_scorer=None if self.make_scorer is None else self._scorer,
            make_work=self.works.get,
            most_replicas=MOST_REPLICAS if self._left is None else self.replicas,
            restore_trainer=_load if isinstance(self.trainer, Restorable) else None,
            **settings,
        )
        made.require_scorers()
        return made

    def _rollout(self, replica: ReplicaId) -> Rollout:
        """Make the generator of a replica's next life. Raises what the user's function raises."""
        if not isinstance(self.generators, Sequence):
            try:
                generator = contained(self.generators, replica)
            except (AttributeError, TypeError) as error:
                law = f"cannot make the generator of replica {replica}: {describe_error(error)}"
                fix = "give a function that makes a generator from the number of its replica"
                raise ConfigError("generators", shown(self.generators), law, fix) from error
            GENERATOR(f"generators({replica})", generator)
        elif self._left and replica in self._left:
            generator = self._left.pop(replica)
        else:
            raise EngineError("no generator is left; to add or replace replicas, pass a function as `generators`")
        return Rollout(generator=generator, evaluator=generator)

    def _scorer(self, tasks: Tasks) -> Scorer:
        assert self.make_scorer is not None
        scorer = contained(self.make_scorer, tasks)
        SCORER(f"make_scorer({tasks})", scorer)
        return scorer

    def can_make(self, replica: ReplicaId) -> bool:
        return self._left is None or replica in self._left


def _described(limits: Limits, policies: Mapping[str, str], columns: Sequence[str]) -> tuple[str, ...] | None:
    """The value of `Plan.described`."""
    asks = limits.added_states or columns or not is_built_in("filter", policies.get("filter", DEFAULTS["filter"]))
    return tuple(columns) if asks else None


def _tell_missing_package(plan: Plan) -> None:
    policy = plan.sample_policy
    if (policy.per_step or policy.validation) and lacks_pyarrow():
        log.warning("the package pyarrow is not installed, so no samples are kept; `pip install pyarrow` adds it")


def _for_one_process(limits: Limits, replacements: int | None, durable: bool) -> Limits:
    """The limits without automatic restarts of the run. `durable`: trajectories are on disk; then batches that no
    checkpoint contains are kept."""
    restarts = limits.replica_restarts if replacements is None else replacements
    keeps = durable and limits.checkpoint_every > 0
    return replace(limits, replica_restarts=restarts, run_restarts=0, keeps_batches=keeps)


def _as_recorded(plan: Plan, trainer: Trainer, rows: Mapping[str, bytes]) -> Plan:
    """The plan with the recorded limits. Another `max_steps` becomes a setting. `rows`: the ids of its prompts.

    Raises: `ConfigError` if the recorded run has other limits or prompts or was started from a configuration, or if the
    trainer cannot load its checkpoints.
    """
    assert plan.run_dir is not None
    header = read(plan.run_dir / "schedule", missing_end=plan.resumption.force_from is not None).header
    if header.config:
        law = "holds a run that was started from a configuration"
        raise ConfigError("run_dir", str(plan.run_dir), law, f"use: engine resume {plan.run_dir}")
    if plan.restore_trainer is None and list_checkpoints(plan.run_dir / "checkpoints"):
        law = "has no load(directory), but the run has a checkpoint"
        raise ConfigError("trainer", type(trainer).__name__, law, "define it as in engine.protocols.Restorable")
    names = PolicySet.from_names(plan.policies).names
    if dict(header.policies) != dict(names):
        changed = {decision: name for decision, name in names.items() if header.policies.get(decision) != name}
        law = f"are not the policies that the run in {plan.run_dir} began with"
        raise ConfigError("policies", changed, law, "resume it with the same policies")
    kept = read_inputs(plan.run_dir)
    for name, ids in rows.items() if kept else ():
        if words := describe_changes(kept[0].ids(name), as_ids(ids)):
            law = f"has changed since the run in {plan.run_dir} began: {words}"
            raise ConfigError(name, counted(len(ids) // 8, "prompt"), law, "resume it with the same prompts")
    recorded = Limits.from_plain(dict(header.limits))
    if recorded.max_steps != plan.limits.max_steps:
        steps = plan.limits.max_steps
        setting = (MAX_STEPS, "null" if steps is None else str(steps))
        limits = replace(plan.limits, max_steps=recorded.max_steps)
        plan = replace(plan, limits=limits, resumption=replace(plan.resumption, settings=(setting,)))
    then, now = recorded.to_plain(), plan.limits.to_plain()
    for name, value in then.items():
        if now[name] != value:
            law = f"was {value!r} when the run in {plan.run_dir} began"
            argument = {"replica_restarts": "limits.replica_restarts or replacements", "keeps_batches": "trajectories"}
            field = argument.get(name, f"limits.{name}")
            raise ConfigError(field, now[name], law, "resume it with the same limits")
    return plan


def _with_held_out(limits: Limits, held_out: Sequence[Prompt | str], samples: int) -> Limits:
    """The limits with the number of validation prompts, if they do not have it."""
    if limits.validation is not None or not held_out:
        return limits
    return replace(limits, validation=ValidationLimits(rows=len(held_out), rows_per_slot=samples))


def _require_together(trainer: Trainer, limits: Limits, run_dir: Any, *, needs_directory: bool) -> None:
    """Raises: `ConfigError` if the directory or a method of the trainer is missing that only some runs need."""
    if limits.checkpoint_every and run_dir is None:
        raise ConfigError("limits.checkpoint_every", limits.checkpoint_every, "checkpoints need a run_dir", "use 0")
    if needs_directory and run_dir is None:
        raise ConfigError("run_dir", None, "is required by resume and control_port", "set run_dir")
    needed = ["save"] if limits.checkpoint_every else []
    if {*limits.scoring_tasks} - {*limits.scored_apart}:
        needed.append("score")
    has_methods(Trainer, *needed, "train")("trainer", trainer)
