"""Restores a run from its directory: replays its record and chooses the checkpoint to resume from.

Called when a run resumes, before any process starts. It checks everything before it changes anything, and names what is
missing or damaged. Only `Plan.force_from` resumes with missing data; it sets aside, and must never delete, what came
after the checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from engine.errors import ConfigError, RecordError, RunDamaged, RunFinished
from engine.events import RunInterrupted, RunResumed
from engine.ids import GroupId, StepId, Version
from engine.metrics.journal import cut_rows
from engine.metrics.step_rows import ReplayedRows, StepRows
from engine.metrics.transitions import Transitions
from engine.record import After, Recorder, Recovered, read, recover
from engine.record.files import RecordLock, require_regular
from engine.record.log import Torn
from engine.runtime.plan import Plan, Redo, Restore
from engine.states.group import phase_of
from engine.states.machine import Phase
from engine.states.waits import are
from engine.storage.checkpoints import checkpoint_path, list_checkpoints, name_aside, put_aside, verify_checkpoint
from engine.storage.durable_trajectories import DurableStore
from engine.storage.group_codec import unpack_group
from engine.storage.segments import put_store_aside, segment_numbers

# -- groups that the record refers to ----------------------------------------------------------------------------------


INITIAL = "initial"
"""The name of the initial weights in `--force-from`."""


def way_back(usable: Sequence[StepId]) -> str:
    """The advice to resume from older weights. `usable`: the train steps of the existing checkpoints."""
    name = f"step-{usable[-1]:06d}" if usable else INITIAL
    return f"go back with engine resume RUN --force-from {name}, which sets later data aside"


def missing_groups(plan: Plan, recovered: Recovered, steps: StepId) -> tuple[tuple[GroupId, ...] | None, Torn | None]:
    """(groups that begin again although they had trajectories, the store's torn end).

    The groups are None if the run never kept trajectories: the trainer then cannot retrain the steps after the
    checkpoint. `steps`: the number of train steps in that checkpoint.

    Raises: `RunDamaged` if trajectories of a batch are missing, `RecordError` if the store is damaged.
    """
    directory = plan.trajectories_dir
    if directory is None:
        return None, None
    hint = f"restore it from a copy, or {way_back([steps] if steps else [])}"
    if not segment_numbers(directory):
        if not _needs_store(recovered, steps):
            return (), None
        if _were_in_memory(recovered):
            return None, None
        there = "holds no trajectories" if directory.is_dir() else "is missing"
        raise RunDamaged(str(directory), f"{there}, but the record refers to some; {hint}")
    try:
        store = DurableStore(directory, plan.store_policy, fresh=False)
    except RunDamaged:
        raise
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
    if steps < state.steps_trained or state.formed_steps:
        return True
    return any(phase_of(group.state) is Phase.READY or group.kept for group in state.groups.values())


def _were_in_memory(recovered: Recovered) -> bool:
    """Whether the run began with its trajectories in memory, or kept none of its batches."""
    kept = recovered.header.config.get("durability", {})
    return kept.get("trajectories") == "memory" or not recovered.scheduler.state.limits.keeps_batches


def _lacking(store: DurableStore, recovered: Recovered, steps: StepId) -> Iterator[str]:
    """The items that the store lacks: of the steps after the first `steps`, and of the formed batches."""
    state, attempts = recovered.scheduler.state, store.attempts
    batches = {batch.step: batch for batch in recovered.batches(steps)}
    for step in range(steps, state.steps_trained):
        if step not in batches:
            yield f"train step {step}, whose batch is no longer known"
            continue
        for group in batches[step].groups:
            if not _is_whole(store, group):
                yield f"group {group} of train step {step}, which no checkpoint contains"
            for task in state.limits.scored_apart:
                if not store.is_scored(group, task, step):
                    yield f"the scores {task} of group {group} of train step {step}, which no checkpoint contains"
    for formed in state.formed_steps:
        for group in formed.groups if formed.id >= state.steps_trained else ():
            if attempts.get(group) != state.groups[group].attempt or not _is_whole(store, group):
                yield f"group {group} of the batch that is formed for train step {formed.id}"


def _discard_unwanted(store: DurableStore, recovered: Recovered) -> None:
    """Discard groups that the ended processes had yet to discard, and attempts that a power cut removed from the
    record. New attempts would not replace those."""
    state = recovered.scheduler.state
    kept = {*chain.from_iterable(state.checkpoints.kept.values())}
    last = {group.id: group.attempt for group in state.groups.values()}
    wanted = {group for group, attempt in store.attempts.items() if group in kept or attempt <= last.get(group, -1)}
    store.discard([group for group in store.attempts if group not in wanted])
    store.flush()


def _missing(store: DurableStore, recovered: Recovered) -> tuple[GroupId, ...]:
    """Groups with trajectories in the state that the store does not hold, or holds in another form."""
    state, attempts = recovered.scheduler.state, store.attempts
    missing = []
    for group in state.groups.values():
        phase = phase_of(group.state)
        if group.state in state.stages.by_name:  # each work order is an attempt; it stores nothing before it is done
            there = attempts.get(group.id, group.attempt + 1) <= group.attempt and _is_whole(store, group.id)
        elif phase is Phase.READY:
            there = attempts.get(group.id) == group.attempt and _is_whole(store, group.id)
        else:
            goes_on = phase in (Phase.RUNNING, Phase.PARKED) and group.kept
            there = not goes_on or _is_known(store, group.id, state.latest_version)
        if not there:
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


@dataclass(frozen=True, slots=True)
class Past:
    """`lock`: holds the record for the recorder that continues it. `missing`: groups that are generated again although
    they had trajectories; None: the run branches."""

    recovered: Recovered
    lock: RecordLock
    restore: Restore
    missing: tuple[GroupId, ...] | None = None
    rows: StepRows | None = None
    """Rows of steps that are not finished."""
    torn: Torn | None = None
    """The torn end that was cut off the trajectory store."""
    damaged: tuple[str, ...] = ()
    """Files of the run that were left out because they are unreadable, or missing but not needed."""
    aside: tuple[Path, ...] = ()
    """New names of the files that were set aside."""

    def __str__(self) -> str:
        event = self.event(0)
        source = "the initial weights" if self.restore.checkpoint is None else Path(self.restore.checkpoint).name
        told = [f"resumed from {source}, after {self.recovered.events} events"]
        if self.missing is not None:
            told += (
                [f"{are(len(self.restore.redo), 'step')} trained again from what was recorded"]
                if self.restore.redo
                else []
            )
            told += [f"{are(len(self.missing), 'group')} not in the store, to begin again"] if self.missing else []
        told += [f"{are(len(event.consumed), 'group')} trained on again"] if event.consumed else []
        cut = [f"cut: {torn}" for torn in (self.recovered.torn, self.torn) if torn]
        aside = [f"put aside: {', '.join(path.name for path in self.aside)}"] if self.aside else []
        return "; ".join([*told, *cut, *self.damaged, *aside])

    @property
    def after(self) -> After:
        """Where the record continues."""
        return After(events=self.recovered.events, torn=self.recovered.torn)

    def event(self, replicas: int, again: bool = False) -> RunResumed:
        """The event that resumes the run."""
        if self.missing is not None:
            event = self.recovered.kept(replicas=replicas, missing=self.missing, checkpoint=self.restore.steps)
        else:
            event = self.recovered.resumed(steps=self.restore.steps, replicas=replicas)
        return replace(event, again=again)


def past_of(plan: Plan, transitions: Transitions, end_earlier: Callable[[Path], None] = lambda run_dir: None) -> Past:
    """Take over the unfinished run in a plan's directory. `end_earlier(run_dir)` ends processes of earlier launches,
    which would still write.

    Raises: `RecordError` if its record or trajectories are damaged or another process writes them, `RunDamaged` if
    something that the record refers to is missing, `RunFinished` if the run has finished, `ConfigError` if its newest
    checkpoint is damaged or cannot be used.
    """
    assert plan.run_dir is not None
    schedule = plan.run_dir / "schedule"
    record = read(schedule, missing_end=plan.force_from is not None)
    lock = RecordLock(schedule, waits=plan.again)  # the scheduler before was killed, and may not have ended yet
    try:
        rows = ReplayedRows(transitions)
        recovered = recover(
            record,
            transitions.changed,
            books=transitions,
            replayed=lambda frame, state: rows.watch(frame.event, frame.commands, state),
        )
        if plan.interrupted is not None:
            lock = _record_interruption(recovered, plan.interrupted, schedule, lock)
        outcome = recovered.scheduler.state.outcome
        if outcome is not None and (outcome.outcome == "finished" or (plan.again and not outcome.again)):
            law = f"has finished ({outcome.reason}) and cannot be resumed"
            raise RunFinished("RUN", str(plan.run_dir), law)
        end_earlier(plan.run_dir)
        return _taken_up(plan, recovered, lock, rows, {ended.id for ended in transitions.ended})
    except BaseException:
        lock.release()
        raise


def _record_interruption(recovered: Recovered, event: RunInterrupted, schedule: Path, lock: RecordLock) -> RecordLock:
    """Record that the run was interrupted, and the scheduler's decision. Returns the lock on the record."""
    after = After(events=recovered.events, torn=recovered.torn)
    answer = recovered.interrupt(event)
    if not answer:
        return lock
    with closing(Recorder(schedule, after, lock=lock)) as recorder:
        recorder.write(event, answer, recovered.scheduler.state_hash)
    return RecordLock(schedule)


def _taken_up(
    plan: Plan, recovered: Recovered, lock: RecordLock, rows_open: ReplayedRows, validations: set[int]
) -> Past:
    """Check everything that the run needs to resume, then set later data aside."""
    assert plan.run_dir is not None
    state = recovered.scheduler.state
    saved = list_checkpoints(plan.run_dir / "checkpoints")
    steps, checkpoint = _chosen(plan, saved, recovered)
    if checkpoint is not None:
        if plan.restore_trainer is None:
            law = "cannot be loaded by this plan"
            raise ConfigError(
                "Plan.restore_trainer", None, f"{checkpoint.name} {law}", "set a function that restores the trainer"
            )
        try:
            verify_checkpoint(checkpoint)
        except OSError as error:
            raise RecordError(str(checkpoint), 0, f"cannot be read: {error.strerror or error}") from None
    metrics = plan.run_dir / "metrics.jsonl"
    if metrics.exists():
        require_regular(metrics)
    missing, torn = (None, None) if plan.force_from is not None else missing_groups(plan, recovered, steps)
    # nothing has been changed so far
    aside = [] if missing is not None else [put_store_aside(plan.run_dir / "trajectories")]
    aside += [put_aside(path) for later, path in saved if later > steps]
    open_steps, copied = set(state.steps), name_aside(metrics)
    damaged = _not_needed(plan, saved, recovered)
    reached = steps if missing is None else state.steps_trained
    rows = cut_rows(metrics, reached, damaged.append, open_steps, validations, copied)
    told = {row["step"] for row in rows if "step" in row}
    redo = [
        Redo(step=batch.step, groups=batch.groups, staleness=batch.staleness, reports=batch.step not in told)
        for batch in (recovered.batches(steps) if missing is not None else ())
    ]
    restore = Restore(
        steps=steps,
        optimizer_steps=state.updates_in[steps],
        checkpoint=None if checkpoint is None else str(checkpoint),
        redo=tuple(redo),
    )
    aside += [copied] if copied.exists() else []
    return Past(
        recovered, lock, restore, missing, None if missing is None else rows_open.rows, torn, tuple(damaged),
        tuple(path for path in aside if path is not None),
    )  # fmt: skip


def _chosen(plan: Plan, saved: list[tuple[StepId, Path]], recovered: Recovered) -> tuple[StepId, Path | None]:
    """The checkpoint that the user named, otherwise the newest one. Raises: `RunDamaged` if that is not the
    newest in the record, `ConfigError` if no checkpoint has the given name."""
    state = recovered.scheduler.state
    trained = state.steps_trained
    usable = [(steps, path) for steps, path in saved if steps <= trained and steps in state.updates_in]
    if plan.force_from is None:
        _require_newest(plan, saved, recovered)
        return usable[-1] if usable else (0, None)
    name = Path(plan.force_from).name
    if name == INITIAL:
        return 0, None
    for steps, path in usable:
        if path.name == name:
            return steps, path
    there = ", ".join([*(path.name for _, path in usable), INITIAL])
    law = "is not a complete checkpoint of this run's current branch"
    raise ConfigError("--force-from", plan.force_from, law, f"use one of: {there}")


def _require_newest(plan: Plan, saved: list[tuple[StepId, Path]], recovered: Recovered) -> None:
    """Raises: `RunDamaged` if the checkpoints are behind the record, or the record is behind the checkpoints."""
    assert plan.run_dir is not None
    state, there = recovered.scheduler.state, saved[-1][0] if saved else 0
    usable = [steps for steps, _ in saved if steps <= state.steps_trained]
    if there > state.steps_trained:
        reason = (
            f"ends after {state.steps_trained} train steps, but {saved[-1][1].name} holds {there}: "
            f"the newest events are missing; restore them from a copy, or {way_back(usable)}"
        )
        raise RunDamaged(str(plan.run_dir / "schedule"), reason)
    if there < state.checkpoints.newest:
        reason = f"is missing, but the record says that it was saved; restore it from a copy, or {way_back(usable)}"
        raise RunDamaged(str(checkpoint_path(plan.run_dir / "checkpoints", state.checkpoints.newest)), reason)


def _not_needed(plan: Plan, saved: list[tuple[StepId, Path]], recovered: Recovered) -> list[str]:
    """Missing checkpoints that are older than the newest one."""
    if plan.force_from is not None:
        return []
    state, there = recovered.scheduler.state, {steps for steps, _ in saved}
    deleted = {*state.checkpoints.surplus(state.limits), *state.orders.open("delete")}
    gone = [steps for steps in state.checkpoints.steps if steps not in there and steps not in deleted]
    return [f"step-{steps:06d} was saved and is missing, but it is not needed" for steps in gone]
