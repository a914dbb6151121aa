"""Checks that the trajectory store on disk holds the groups that the record of a run refers to.

Used by `past` when a run is resumed. A batch that no checkpoint contains cannot be generated again, so an incomplete
batch is refused by name. A group that is not in a batch yet begins again. It must never write to the store before it
has accepted all batches.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from engine.errors import RecordError, RunDamaged
from engine.hosts.durable import DurableStore
from engine.hosts.packed import unpack_group
from engine.hosts.segments import segment_numbers
from engine.ids import GroupId, StepId, Version
from engine.runtime.plan import Plan
from engine.schedule import Recovered
from engine.schedule.store import Torn
from engine.states.group import phase_of
from engine.states.machine import Phase

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
