"""What earlier lives of a run left behind: its record, replayed, and the checkpoint that the next life goes on from.

Read by the scheduler actor of a run that is resumed, before it starts any other. What the checkpoint does not hold is
put out of the way, so that nothing of it is taken for what comes in its place.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from engine.actors.lasting import end_earlier
from engine.actors.plan import Plan, Redo, Restore
from engine.errors import ConfigError, RecordError, RunFinished
from engine.events import RunResumed
from engine.hosts.checkpoints import list_checkpoints, put_aside, verify_checkpoint
from engine.hosts.durable import DurableStore
from engine.hosts.packed import unpack_group
from engine.hosts.segments import clear
from engine.ids import GroupId, StepId, Version
from engine.metrics.journal import cut_rows
from engine.metrics.steps import ReplayedRows, StepRows
from engine.metrics.transitions import Transitions
from engine.schedule import After, Recovered, read, recover
from engine.schedule.lock import RecordLock
from engine.schedule.store import Torn
from engine.states.group import PHASES
from engine.states.machine import Phase
from engine.states.waiting import are


@dataclass(frozen=True, slots=True)
class Past:
    """`lock` is on the record, for the recorder that goes on with it. `missing`: groups that begin again although they
    had trajectories; None: the run branches, and all that its weights do not hold begins again."""

    recovered: Recovered
    lock: RecordLock
    restore: Restore
    missing: tuple[GroupId, ...] | None = None
    rows: StepRows | None = None
    """Of steps that are under way."""
    torn: Torn | None = None
    """What was cut off the trajectory store's end."""
    damaged: tuple[str, ...] = ()
    """What of the run's files was left out because it could not be read."""

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
        return "; ".join([*told, *cut, *self.damaged])

    @property
    def after(self) -> After:
        """Where the record goes on."""
        return After(events=self.recovered.events, torn=self.recovered.torn)

    def event(self, replicas: int) -> RunResumed:
        """With which the run goes on."""
        if self.missing is not None:
            return self.recovered.kept(replicas=replicas, missing=self.missing)
        return self.recovered.resumed(steps=self.restore.steps, replicas=replicas)


def past_of(plan: Plan, transitions: Transitions) -> Past:
    """Take up the run in a plan's directory that ended before its time.

    Raises: `RecordError` where its record or its trajectories cannot be gone on with or another process writes them,
    `RunFinished` where the run has finished, `ConfigError` where its newest checkpoint is not what was written or
    cannot be used.
    """
    assert plan.run_dir is not None
    schedule = plan.run_dir / "schedule"
    record = read(schedule)
    lock = RecordLock(schedule)
    try:
        rows = ReplayedRows(transitions)
        recovered = recover(
            record,
            transitions.changed,
            books=transitions,
            replayed=lambda frame, state: rows.watch(frame.event, frame.commands, state),
        )
        outcome = recovered.scheduler.state.outcome
        if outcome is not None and outcome.outcome == "finished":
            law = f"has finished ({outcome.reason}): there is nothing to go on with"
            raise RunFinished("RUN", str(plan.run_dir), law)
        end_earlier(plan.run_dir)
        return _taken_up(plan, recovered, lock, rows, {ended.id for ended in transitions.ended})
    except BaseException:
        lock.release()
        raise


def _taken_up(
    plan: Plan, recovered: Recovered, lock: RecordLock, rows_open: ReplayedRows, validations: set[int]
) -> Past:
    """What is gone on from; what does not lead there is put out of the way."""
    assert plan.run_dir is not None
    trained = recovered.scheduler.state.steps_trained
    saved = list_checkpoints(plan.run_dir / "checkpoints")
    steps, checkpoint = _chosen(plan, saved, trained)
    if checkpoint is not None:
        if plan.restore_trainer is None:
            law = "is there, and this plan cannot bring a trainer to it"
            raise ConfigError("Plan.restore_trainer", None, f"{checkpoint.name} {law}", "a function that does")
        verify_checkpoint(checkpoint)
    missing, torn = (None, None) if plan.force_from is not None else _missing_of(plan, recovered, steps)
    if missing is None and plan.trajectories_dir is not None:
        clear(plan.trajectories_dir)
    elif (left := plan.run_dir / "trajectories").is_dir() and plan.trajectories_dir is None:
        put_aside(left)  # a later life that keeps them on disk again would take them for its own
    reached = steps if missing is None else trained
    for later, path in saved:
        if later > steps:
            put_aside(path)
    open_steps = set(recovered.scheduler.state.steps)
    damaged: list[str] = []
    rows = cut_rows(plan.run_dir / "metrics.jsonl", reached, damaged.append, open_steps, validations)
    told = {row["step"] for row in rows if "step" in row}
    redo = [
        Redo(step=batch.step, groups=batch.groups, staleness=batch.staleness, reports=batch.step not in told)
        for batch in (recovered.batches(steps) if missing is not None else ())
    ]
    restore = Restore(
        steps=steps,
        optimizer_steps=sum(
            int(n)
            for row in rows
            if row.get("step", steps) < steps and isinstance(n := row.get("optimizer_steps"), int | float)
        ),
        checkpoint=None if checkpoint is None else str(checkpoint),
        redo=tuple(redo),
    )
    return Past(recovered, lock, restore, missing, None if missing is None else rows_open.rows, torn, tuple(damaged))


def _missing_of(plan: Plan, recovered: Recovered, steps: StepId) -> tuple[tuple[GroupId, ...] | None, Torn | None]:
    """Groups that begin again although they had trajectories, or None where the trainer cannot be brought from the
    first so many steps to where it was; and what was cut off the store. Raises: `RecordError`."""
    if plan.trajectories_dir is None:
        return None, None
    try:
        store = DurableStore(plan.trajectories_dir, plan.store_policy, fresh=False)
        try:
            if not _holds_batches(store, recovered, steps):
                return None, store.torn
            _discard_unwanted(store, recovered)
            return _missing(store, recovered), store.torn
        finally:
            store.close()
    except RecordError as error:
        hint = f"put {plan.trajectories_dir} aside to go on from the newest checkpoint without it"
        raise RecordError(
            error.details["path"], error.details["offset"], f"{error.details['reason']}; {hint}"
        ) from None


def _chosen(plan: Plan, saved: list[tuple[StepId, Path]], trained: StepId) -> tuple[StepId, Path | None]:
    """The checkpoint that the user names, else the newest of the steps that the record knows of."""
    usable = [(steps, path) for steps, path in saved if steps <= trained]
    if plan.force_from is None:
        return usable[-1] if usable else (0, None)
    name = Path(plan.force_from).name
    for steps, path in usable:
        if path.name == name:
            return steps, path
    there = ", ".join(path.name for _, path in usable) or "none"
    law = "is no complete checkpoint of this run's present line of weights"
    raise ConfigError("--force-from", plan.force_from, law, f"there are: {there}")


def _holds_batches(store: DurableStore, recovered: Recovered, steps: StepId) -> bool:
    """Whether every step after the first so many can be trained again, and the batches that are formed trained."""
    state = recovered.scheduler.state
    batches = recovered.batches(steps)
    if [batch.step for batch in batches] != list(range(steps, state.steps_trained)):
        return False
    for batch in batches:
        if not all(_is_whole(store, group) for group in batch.groups):
            return False
        apart = [(group, task) for group in batch.groups for task in state.limits.scored_apart]
        if not all(store.is_scored(group, task, batch.step) for group, task in apart):
            return False
    attempts = store.attempts
    return all(
        attempts.get(group) == state.groups[group].attempt and _is_whole(store, group)
        for formed in state.formed_steps
        if formed.id >= state.steps_trained
        for group in formed.groups
    )


def _discard_unwanted(store: DurableStore, recovered: Recovered) -> None:
    """Let go of what the processes were to let go of when they ended, and of attempts that a power cut has taken from
    the record: those to come would not replace them."""
    state = recovered.scheduler.state
    kept = {*chain.from_iterable(state.kept.by_step.values())}
    last = {group.id: group.attempt for group in state.groups.values()}
    wanted = {group for group, attempt in store.attempts.items() if group in kept or attempt <= last.get(group, -1)}
    store.discard([group for group in store.attempts if group not in wanted])
    store.flush()


def _missing(store: DurableStore, recovered: Recovered) -> tuple[GroupId, ...]:
    """Groups of which the state knows trajectories that the store does not hold, or not as they came to be."""
    state, attempts = recovered.scheduler.state, store.attempts
    missing = []
    for group in state.groups.values():
        phase = PHASES[group.state]
        if group.state in state.stages.by_name:  # each order of its work is an attempt, and stores nothing until done
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
    """A power cut may leave the prefixes that an attempt stored before its end."""
    packed = store.partial(group)
    return packed is not None and unpack_group(packed).finished


def _is_known(store: DurableStore, group: GroupId, latest: Version) -> bool:
    """Whether prefixes are there that a group can go on from. A power cut may take the publication of a version from
    the record and leave what was sampled under it: weights to come will have its number."""
    packed = store.partial(group)
    versions = None if packed is None else unpack_group(packed).versions()
    return packed is not None and (versions is None or versions[1] <= latest)
