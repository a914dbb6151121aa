"""Whether the trajectory store on disk holds what the record of a run says that it holds.

Used by `past` when a run is resumed. A batch that no checkpoint contains cannot be made again, so one that is not whole
is refused by name; a group that is not in a batch yet begins again. The store is written only once nothing is refused.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from engine.actors.plan import Plan
from engine.errors import RecordError, RunDamaged
from engine.hosts.durable import DurableStore
from engine.hosts.packed import unpack_group
from engine.hosts.segments import segment_numbers
from engine.ids import GroupId, StepId, Version
from engine.schedule import Recovered
from engine.schedule.store import Torn
from engine.states.group import phase_of
from engine.states.machine import Phase

INITIAL = "initial"
"""What `--force-from` calls the weights that no step has changed."""


def way_back(usable: Sequence[StepId]) -> str:
    """What goes on with less. `usable`: the train steps of the checkpoints that are there."""
    name = f"step-{usable[-1]:06d}" if usable else INITIAL
    return f"go back with engine resume RUN --force-from {name}, which puts aside what came after"


def missing_groups(plan: Plan, recovered: Recovered, steps: StepId) -> tuple[tuple[GroupId, ...] | None, Torn | None]:
    """Groups that begin again although they had trajectories, or None where trajectories were never kept, so that the
    trainer cannot be brought from the first so many steps to where it was; and the store's torn end.

    Raises: `RunDamaged` where trajectories of a batch are missing, `RecordError` where the store is damaged.
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
    """What the store does not hold of the steps after the first so many, and of the batches that are formed."""
    state, attempts = recovered.scheduler.state, store.attempts
    batches = {batch.step: batch for batch in recovered.batches(steps)}
    for step in range(steps, state.steps_trained):
        if step not in batches:
            yield f"train step {step}, whose batch is not known any more"
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
        phase = phase_of(group.state)
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
