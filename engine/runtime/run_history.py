"""Restores a run from its directory: replays its record and chooses the checkpoint to resume from.

Called when a run resumes, before any process starts. It checks all files before it changes any, and its errors name the
missing or damaged ones. Only `Resumption.force_from` resumes with missing data. It sets aside the data after the
checkpoint, and must never delete it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import structs

from engine.commands import FinishRun
from engine.errors import ConfigError, RecordError, RunDamaged, RunFinished, are, counted, reason_of
from engine.events import RunInterrupted, RunResumed
from engine.ids import GroupId, StepId, Version
from engine.metrics.history_log import HistoryLog
from engine.metrics.journal import cut_rows
from engine.record import Recorder, Recovered, read, recover
from engine.record.files import RecordLock, require_regular
from engine.record.segment_log import Torn, has_segments
from engine.scheduling.settings import MAX_STEPS, changed_limits, how_to_train_more
from engine.states.machine import Phase
from engine.states.state import State
from engine.storage.checkpoints import (
    checkpoint_path,
    list_checkpoints,
    name_aside,
    put_aside,
    remove_aside,
    verify_checkpoint,
)
from engine.storage.durable_trajectories import DurableStore, put_store_aside
from engine.storage.group_codec import unpack_group
from engine.storage.input_files import begin_inputs, begins_inputs
from engine.storage.samples import FOLDER, put_samples_aside
from engine.workers.plan import Plan, Redo, Restore

# -- groups that the record refers to ----------------------------------------------------------------------------------


METRICS = "metrics.jsonl"
INITIAL = "initial"
"""The name of the initial weights in `--force-from`."""


def way_back(usable: Sequence[StepId]) -> str:
    """The advice to resume from older weights. `usable`: the train steps of the existing checkpoints."""
    name = f"step-{usable[-1]:06d}" if usable else INITIAL
    return f"use `engine resume RUN --force-from {name}`, which sets later data aside"


def missing_groups(plan: Plan, recovered: Recovered, steps: StepId) -> tuple[tuple[GroupId, ...] | None, Torn | None]:
    """(groups that are generated again because their trajectories are missing, the store's torn end).

    The groups are None if the run never kept trajectories: the trainer then cannot retrain the steps after the
    checkpoint. `steps`: the number of train steps in that checkpoint.

    Raises: `RunDamaged` if trajectories of a batch are missing, `RecordError` if the store is damaged.
    """
    directory = plan.trajectories_dir
    if directory is None:
        return None, None
    instead = way_back([steps] if steps else [])
    hint = f"restore it from a copy, or {instead}"
    if not has_segments(directory):
        if not _needs_store(recovered, steps):
            return (), None
        if _were_in_memory(recovered):
            return None, None
        problem = "holds no trajectories" if directory.is_dir() else "is missing"
        raise RunDamaged(str(directory), f"{problem}, but the record refers to some; {hint}")
    try:
        store = DurableStore(directory, plan.store_policy, fresh=False)
    except RunDamaged as error:
        raise RunDamaged(error.details["path"], f"{error.details['reason']}, or {instead}") from None
    except RecordError as error:
        path, offset, reason = (error.details[name] for name in ("path", "offset", "reason"))
        raise RecordError(path, offset, f"{reason}; {hint}") from None
    try:
        lacking = next(_lacking(store, recovered, steps), None)
        if lacking is not None and not recovered.scheduler.state.limits.keeps_batches:
            return None, store.torn
        if lacking is not None:
            raise RunDamaged(str(directory), f"lacks {lacking}; {hint}")
        _discard_unwanted(store, recovered)
        return _missing(store, recovered), store.torn
    finally:
        store.close()


def _needs_store(recovered: Recovered, steps: StepId) -> bool:
    """Whether the record refers to any trajectories that no checkpoint contains."""
    state = recovered.scheduler.state
    if steps < state.training.steps_trained or state.training.formed_steps:
        return True
    return any(
        state.groups.phase_of(group.state) is Phase.READY or group.tokens for group in state.groups.live.values()
    )


def _were_in_memory(recovered: Recovered) -> bool:
    """Whether the run began with its trajectories in memory, or kept none of its batches."""
    kept = recovered.header.config.get("durability", {})
    return kept.get("trajectories") == "memory" or not recovered.scheduler.state.limits.keeps_batches


def _lacking(store: DurableStore, recovered: Recovered, steps: StepId) -> Iterator[str]:
    """The items that the store lacks: of the steps after the first `steps`, and of the formed batches."""
    state, attempts = recovered.scheduler.state, store.attempts
    training = state.training
    batches = {batch.step: batch for batch in recovered.batches(steps)}
    for step in range(steps, training.steps_trained):
        if step not in batches:
            yield f"train step {step}, whose batch is not in the record"
            continue
        for group in batches[step].groups:
            if not _is_whole(store, group):
                yield f"group {group} of train step {step}, which no checkpoint contains"
            for task in state.limits.scored_apart:
                if not store.is_scored(group, task, step):
                    yield f"the scores {task} of group {group} of train step {step}, which no checkpoint contains"
    for formed in training.formed_steps:
        for group in formed.groups if formed.id >= training.steps_trained else ():
            if attempts.get(group) != state.groups.live[group].attempt or not _is_whole(store, group):
                yield f"group {group} of the batch for train step {formed.id}"


def _discard_unwanted(store: DurableStore, recovered: Recovered) -> None:
    """Discard groups that the ended processes had yet to discard, and attempts that a power cut removed from the
    record. New attempts would not replace those."""
    state = recovered.scheduler.state
    kept = {*chain.from_iterable(state.checkpoints.stored_batches.values())}
    last = {group.id: group.attempt for group in state.groups.live.values()}
    wanted = {group for group, attempt in store.attempts.items() if group in kept or attempt <= last.get(group, -1)}
    store.discard([group for group in store.attempts if group not in wanted])
    store.flush()


def _missing(store: DurableStore, recovered: Recovered) -> tuple[GroupId, ...]:
    """Groups with trajectories in the state that the store does not hold, or holds in another form."""
    state, attempts = recovered.scheduler.state, store.attempts
    groups = state.groups
    missing = []
    for group in groups.live.values():
        phase = groups.phase_of(group.state)
        if (
            group.state in groups.state_queues.by_name and phase is Phase.PARKED
        ):  # each work order is an attempt; it stores nothing before it is done
            is_stored = attempts.get(group.id, group.attempt + 1) <= group.attempt and _is_whole(store, group.id)
        elif phase is Phase.READY:
            is_stored = attempts.get(group.id) == group.attempt and _is_whole(store, group.id)
        else:
            continues = phase in (Phase.RUNNING, Phase.PARKED) and group.tokens > 0
            is_stored = not (continues or group.prepared) or _is_known(store, group.id, state.training.latest_version)
        if not is_stored:
            missing.append(group.id)
    return tuple(missing)


def _is_whole(store: DurableStore, group: GroupId) -> bool:
    """Whether the store holds a finished group. After a power cut it may hold only prefixes."""
    packed = store.partial(group)
    return packed is not None and unpack_group(packed).finished


def _is_known(store: DurableStore, group: GroupId, latest: Version) -> bool:
    """Whether the store holds prefixes that a group can resume from. A power cut may remove the publication of a
    version from the record, but leave tokens sampled under it. Later weights will reuse that version number."""
    packed = store.partial(group)
    versions = None if packed is None else unpack_group(packed).versions()
    return packed is not None and (versions is None or versions[1] <= latest)


# -- the state of a run in its directory -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredRun:
    """A run as its record describes it. `lock` holds the record for the recorder that continues it."""

    recovered: Recovered
    lock: RecordLock
    log: HistoryLog
    """Has caught up with the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory(RecoveredRun):
    """The recovered state of a run and its files. `missing`: groups that are generated again because their
    trajectories are missing; None: the run branches."""

    restore: Restore
    missing: tuple[GroupId, ...] | None = None
    torn: Torn | None = None
    """The torn end that was cut off the trajectory store."""
    damaged: tuple[str, ...] = ()
    """Files of the run that were left out because they are unreadable, or missing but not needed."""
    aside: tuple[Path, ...] = ()
    """New names of the files that were set aside."""
    validations: int = 0
    """Number of validations that the run created, including those that its end canceled."""
    changed: bool = False
    """Whether the data has changed."""

    def __str__(self) -> str:
        event = self.event(0)
        source = "the initial weights" if self.restore.checkpoint is None else Path(self.restore.checkpoint).name
        parts = [f"resumed from {source}, after {self.recovered.events} events"]
        parts += [f"the next validation has number {self.validations}"] if self.validations else []
        if self.missing is not None:
            redone = len(self.restore.redo)
            parts += [f"{are(redone, 'step')} trained again from stored trajectories"] if redone else []
            parts += [f"{are(len(self.missing), 'group')} not in the store and generated again"] if self.missing else []
        parts += [f"{are(len(event.consumed), 'group')} trained on again"] if event.consumed else []
        cut = [f"cut: {torn}" for torn in (self.recovered.torn, self.torn) if torn]
        aside = [f"set aside: {', '.join(path.name for path in self.aside)}"] if self.aside else []
        return "; ".join([*parts, *cut, *self.damaged, *aside])

    def event(self, replicas: int, again: bool = False) -> RunResumed:
        """The event that resumes the run."""
        if self.missing is not None:
            event = self.recovered.resume_without_loss(
                replicas=replicas, missing=self.missing, checkpoint=self.restore.steps
            )
        else:
            event = self.recovered.resume_from_checkpoint(steps=self.restore.steps, replicas=replicas)
        return structs.replace(event, again=again, changed=self.changed)


def history_of(plan: Plan, end_earlier: Callable[[Path], None] = lambda run_dir: None) -> RunHistory:
    """Take over the unfinished run in a plan's directory. `end_earlier(run_dir)` ends processes of earlier launches,
    which would still write.

    Raises: `RecordError` if its record or trajectories are damaged or another process writes them, `RunDamaged` if
    something that the record refers to is missing, `RunFinished` if the run has finished, `ConfigError` if its newest
    checkpoint is damaged or cannot be used.
    """
    assert plan.run_dir is not None
    schedule = plan.run_dir / "schedule"
    record = read(schedule, missing_end=plan.resumption.force_from is not None)
    how = plan.resumption
    lock = RecordLock(schedule, waits=how.again)  # the earlier scheduler was killed, but may not have ended yet
    try:
        recovered = recover(record)
        if how.interrupted is not None:
            lock = _record_interruption(recovered, how.interrupted, schedule, lock)
        outcome = recovered.scheduler.state.ending.outcome
        if outcome is not None and (
            (outcome.outcome == "finished" and not _extends(how.settings, recovered))
            or (how.again and not outcome.again)
        ):
            raise _finished(plan.run_dir, outcome, recovered)
        end_earlier(plan.run_dir)
        return apply(check(plan, recovered), lock)
    except BaseException:
        lock.release()
        raise


def require_unfinished(run_dir: Path, settings: Sequence[tuple[str, str]], *, missing_end: bool = False) -> None:
    """Before any process starts, refuse a finished run, and a `run.max_steps` below the number of steps already
    trained. The record is replayed only if the run has finished, or if `run.max_steps` is set without `missing_end`.
    `missing_end`: the run resumes from an older checkpoint.

    Raises: `RunFinished` if the new settings do not let a finished run train more steps, `ConfigError` if
    `run.max_steps` is below the number of steps already trained, `RecordError`.
    """
    record = read(run_dir / "schedule", missing_end=missing_end)
    outcome = record.outcome()
    if outcome is not None and outcome.outcome == "finished":
        recovered = recover(record)
        if not _extends(settings, recovered):
            raise _finished(run_dir, outcome, recovered)
    elif MAX_STEPS in dict(settings) and not missing_end:
        _require_steps_left(run_dir, settings, recover(record))


def _require_steps_left(run_dir: Path, settings: Sequence[tuple[str, str]], recovered: Recovered) -> None:
    """Raises: `ConfigError` if `run.max_steps` is below the number of steps with which the run continues: without
    stored trajectories, those of the newest checkpoint."""
    most, state = _most_steps(settings, recovered), recovered.scheduler.state
    steps = state.training.steps_trained if has_segments(run_dir / "trajectories") else state.checkpoints.newest
    if most is not None and most < steps:
        law = f"must be at least {steps}: the run continues after {counted(steps, 'train step')}"
        raise ConfigError(MAX_STEPS, most, law, f"use {steps} to finish the run, or a larger value to train more")


def _finished(run_dir: Path, outcome: FinishRun, recovered: Recovered) -> RunFinished:
    fix = how_to_train_more(recovered.scheduler.state)
    return RunFinished("RUN", str(run_dir), f"has finished ({outcome.reason})", fix)


def _extends(settings: Sequence[tuple[str, str]], recovered: Recovered) -> bool:
    """Whether new settings let a finished run train more steps."""
    most, state = _most_steps(settings, recovered), recovered.scheduler.state
    return (most is None or most > state.training.steps_trained) and not state.no_more_prompts


def _most_steps(settings: Sequence[tuple[str, str]], recovered: Recovered) -> int | None:
    """The maximum number of train steps with new settings."""
    limits = recovered.scheduler.limits
    for setting, value in settings:
        if setting == MAX_STEPS:
            limits = changed_limits(limits, setting, value)
    return limits.max_steps


def _record_interruption(recovered: Recovered, event: RunInterrupted, schedule: Path, lock: RecordLock) -> RecordLock:
    """Record that the run was interrupted, and the scheduler's decision. Returns the lock on the record."""
    end = recovered.end
    answer = recovered.interrupt(event)
    if not answer:
        return lock
    with closing(Recorder(schedule, end, lock=lock)) as recorder:
        recorder.write((event,), answer)
    return RecordLock(schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a run continues, once every file that it needs has been checked."""

    plan: Plan
    recovered: Recovered
    steps: StepId
    """Number of train steps in the checkpoint."""
    checkpoint: Path | None
    """None: the initial weights."""
    later: tuple[Path, ...]
    """Checkpoints of later steps."""
    missing: tuple[GroupId, ...] | None
    """See `RunHistory`."""
    torn: Torn | None
    changed: bool
    """Whether the data has changed."""
    damaged: tuple[str, ...]

    @property
    def run_dir(self) -> Path:
        assert self.plan.run_dir is not None
        return self.plan.run_dir

    @property
    def state(self) -> State:
        return self.recovered.scheduler.state


def check(plan: Plan, recovered: Recovered) -> Resume:
    """Check everything that the run needs to resume. Sets nothing aside. Raises: see `history_of`."""
    assert plan.run_dir is not None
    saved = list_checkpoints(plan.run_dir / "checkpoints")
    steps, checkpoint = _chosen(plan, saved, recovered)
    if checkpoint is not None:
        _require_usable(plan, checkpoint)
    metrics = plan.run_dir / METRICS
    if metrics.exists():
        require_regular(metrics)
    missing, torn = (None, None) if plan.resumption.force_from is not None else missing_groups(plan, recovered, steps)
    changed = begins_inputs(plan.run_dir, recovered.events, missing is None)
    if changed and missing is not None:  # the rows of groups that have begun may be others
        begun = _unfinished(recovered.scheduler.state, Phase.RUNNING, Phase.PARKED)
        missing = tuple(dict.fromkeys([*missing, *begun]))
    later = tuple(path for number, path in saved if number > steps)
    return Resume(
        plan=plan, recovered=recovered, steps=steps, checkpoint=checkpoint, later=later, missing=missing, torn=torn,
        changed=changed, damaged=tuple(_not_needed(plan, saved, recovered)),
    )  # fmt: skip


def _require_usable(plan: Plan, checkpoint: Path) -> None:
    """Raises: `ConfigError` if the plan cannot load a checkpoint, `RecordError` if it is damaged."""
    if plan.restore_trainer is None:
        law = f"{checkpoint.name} cannot be loaded by this plan"
        raise ConfigError("Plan.restore_trainer", None, law, "set a function that restores the trainer")
    try:
        verify_checkpoint(checkpoint)
    except OSError as error:
        raise RecordError(str(checkpoint), 0, f"cannot be read: {error.strerror or error}") from None


def apply(resume: Resume, lock: RecordLock) -> RunHistory:
    """Set aside what is later than the checkpoint, and cut the metrics, which are written again."""
    run_dir, branches, damaged = resume.run_dir, resume.missing is None, [*resume.damaged]
    aside = [put_store_aside(run_dir / "trajectories")] if branches else []
    aside += map(put_aside, resume.later)
    copied = name_aside(run_dir / METRICS)
    rows = _cut_metrics(resume, copied, damaged)
    aside += [copied] if copied.exists() else []
    aside += [_samples_aside(run_dir / FOLDER, resume.steps, rows, damaged)] if branches else []
    if resume.changed:
        _begin_inputs(resume)
    newest = tuple(path for path in aside if path is not None)
    for directory in (run_dir, run_dir / "checkpoints") if newest else ():
        remove_aside(directory, newest)  # of earlier resumes
    return RunHistory(
        recovered=resume.recovered, lock=lock, log=HistoryLog(run_dir, resume.recovered.events),
        restore=_restore(resume, rows), missing=resume.missing, torn=resume.torn, damaged=tuple(damaged), aside=newest,
        validations=resume.state.validations.facts.created, changed=resume.changed,
    )  # fmt: skip


def _cut_metrics(resume: Resume, copied: Path, damaged: list[str]) -> list[dict[str, Any]]:
    """Remove the rows that will be written again. Returns the others."""
    state = resume.state
    reached = resume.steps if resume.missing is None else state.training.steps_trained
    validations = set(range(state.validations.facts.created)) - state.validations.live.keys()
    metrics, unfinished = resume.run_dir / METRICS, set(state.training.steps)
    return cut_rows(metrics, reached, damaged.append, unfinished, validations, copied)


def _restore(resume: Resume, rows: Sequence[dict[str, Any]]) -> Restore:
    """What the trainer loads, and the batches that it trains on again."""
    reported = {row["step"] for row in rows if "step" in row}
    batches = resume.recovered.batches(resume.steps) if resume.missing is not None else ()
    redo = [
        Redo(step=batch.step, groups=batch.groups, staleness=batch.staleness, reports=batch.step not in reported)
        for batch in batches
    ]
    return Restore(
        steps=resume.steps,
        optimizer_steps=resume.state.training.updates_in[resume.steps],
        checkpoint=None if resume.checkpoint is None else str(resume.checkpoint),
        redo=tuple(redo),
    )


def _unfinished(state: State, *phases: Phase) -> list[GroupId]:
    """The groups in these phases whose prompts are read from the data."""
    found = (group for group in state.groups.live.values() if not group.prepared)  # prepared ones are stored
    return [group.id for group in found if state.groups.phase_of(group.state) in phases]


def _begin_inputs(resume: Resume) -> None:
    """Note at which event a change of the data counts, and which groups are generated after it."""
    state, recovered = resume.state, resume.recovered
    if resume.missing is None:
        event = recovered.resume_from_checkpoint(steps=resume.steps, replicas=0)
        again = {*state.groups.live, *event.consumed, *event.released}
    else:
        again = {*_unfinished(state, Phase.WAITING), *resume.missing}
    begin_inputs(resume.run_dir, recovered.events, state.groups.ledger.drawn, tuple(sorted(again)))


def _samples_aside(directory: Path, steps: StepId, rows: Sequence[dict[str, Any]], damaged: list[str]) -> Path | None:
    """Set samples of later steps and validations aside. A failure is only reported: nothing depends on samples."""
    measured = [row["validation"] for row in rows if "validation" in row]
    try:
        return put_samples_aside(directory, steps, measured)
    except Exception as error:
        damaged.append(f"{directory}: later samples cannot be set aside: {reason_of(error)}")
        return None


def _chosen(plan: Plan, saved: list[tuple[StepId, Path]], recovered: Recovered) -> tuple[StepId, Path | None]:
    """The checkpoint that the user named, otherwise the newest one. Raises: `RunDamaged` if that is not the
    newest in the record, `ConfigError` if no checkpoint has the given name."""
    state = recovered.scheduler.state
    trained = state.training.steps_trained
    usable = [(steps, path) for steps, path in saved if steps <= trained and steps in state.training.updates_in]
    if plan.resumption.force_from is None:
        _require_newest(plan, saved, recovered)
        return usable[-1] if usable else (0, None)
    name = Path(plan.resumption.force_from).name
    if name == INITIAL:
        return 0, None
    for steps, path in usable:
        if path.name == name:
            return steps, path
    choices = ", ".join([*(path.name for _, path in usable), INITIAL])
    law = "is not a complete checkpoint of this run's current branch"
    raise ConfigError("--force-from", plan.resumption.force_from, law, f"use one of: {choices}")


def _require_newest(plan: Plan, saved: list[tuple[StepId, Path]], recovered: Recovered) -> None:
    """Raises: `RunDamaged` if the checkpoints are behind the record, or the record is behind the checkpoints."""
    assert plan.run_dir is not None
    state, newest = recovered.scheduler.state, saved[-1][0] if saved else 0
    usable = [steps for steps, _ in saved if steps <= state.training.steps_trained]
    if newest > state.training.steps_trained:
        reason = (
            f"ends after {state.training.steps_trained} train steps, but {saved[-1][1].name} holds {newest}: "
            f"the newest events are missing; restore them from a copy, or {way_back(usable)}"
        )
        raise RunDamaged(str(plan.run_dir / "schedule"), reason)
    if newest < state.checkpoints.newest:
        reason = f"is missing, but the record says that it was saved; restore it from a copy, or {way_back(usable)}"
        raise RunDamaged(str(checkpoint_path(plan.run_dir / "checkpoints", state.checkpoints.newest)), reason)


def _not_needed(plan: Plan, saved: list[tuple[StepId, Path]], recovered: Recovered) -> list[str]:
    """Missing checkpoints that are older than the newest one."""
    if plan.resumption.force_from is not None:
        return []
    state, present = recovered.scheduler.state, {steps for steps, _ in saved}
    deleted = {*state.checkpoints.surplus(state.limits), *state.orders.open["delete"]}
    gone = [steps for steps in state.checkpoints.steps if steps not in present and steps not in deleted]
    return [f"step-{steps:06d} was saved and is missing, but it is not needed" for steps in gone]
