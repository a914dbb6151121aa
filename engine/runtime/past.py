"""Restores a run from its directory: replays its record and chooses the checkpoint to resume from.

Called when a run resumes, before any process starts. It checks everything before it changes anything, and names what is
missing or damaged. Only `Plan.force_from` resumes with missing data; it sets aside, and must never delete, what came
after the checkpoint.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from engine.errors import ConfigError, RecordError, RunDamaged, RunFinished
from engine.events import RunInterrupted, RunResumed
from engine.hosts.checkpoints import checkpoint_path, list_checkpoints, name_aside, put_aside, verify_checkpoint
from engine.hosts.segments import put_store_aside
from engine.ids import GroupId, StepId
from engine.metrics.journal import cut_rows
from engine.metrics.steps import ReplayedRows, StepRows
from engine.metrics.transitions import Transitions
from engine.runtime.plan import Plan, Redo, Restore
from engine.runtime.stored_groups import INITIAL, missing_groups, way_back
from engine.schedule import After, Recorder, Recovered, read, recover
from engine.schedule.lock import RecordLock
from engine.schedule.regular import require_regular
from engine.schedule.store import Torn
from engine.states.waiting import are


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
    """The checkpoint that the user names, else the newest. Raises: `RunDamaged` if it is not the newest one in the
    record, `ConfigError` for a name that no checkpoint has."""
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
