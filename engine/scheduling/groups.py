"""Groups on replicas: drawing, admission, dispatch, abort and resume, failure and retry; and groups in added states.

Called by `scheduler.py` for each event about a group, and once in every tick to fill free slots. Changes state only
through `State`'s operations.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from engine.commands import AbortGroup, DiscardGroups, DrawPrompts, EnterState, ParkGroup, ResumeGroup, StartGroup
from engine.events import (
    CacheMeasured,
    DrawFailed,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    OrderProgressed,
    PrefixStored,
    PromptsDrawn,
    StateFailed,
    StateLeft,
    stamp,
)
from engine.ids import NO_VERSION, EventId, GroupId, ReplicaId, Version
from engine.scheduling.core import Core
from engine.scheduling.lifetimes import REASON_LENGTH, stop_process
from engine.scheduling.stragglers import measure_pace
from engine.states.group import Group
from engine.states.laws import require
from engine.states.limits import GENERATED, QUEUED
from engine.states.orders import KINDS_OF_SUBJECTS, Order, Owner
from engine.states.process import ADDED_STATES
from engine.states.replica import Replica
from engine.states.replicas import FreeSlots
from engine.states.timeouts import CUT_SHORT
from engine.states.view import view_group, view_replica

MOST_DRAWN = 4096
"""Maximum number of prompts in one order."""


def prepare_groups(core: Core, ids: Iterable[GroupId]) -> None:
    """Move groups that were drawn into the added states before generation that let them in."""
    if core.state.groups.state_queues.at[QUEUED]:
        for id in ids:
            enter_added_state(core, core.state.groups.live[id], QUEUED)


def enter_added_state(core: Core, group: Group, place: str, after: int = -1) -> bool:
    """Move a group into the next state in a place whose policy lets it in, after state number `after`. False if there
    is none."""
    groups = core.state.groups
    for queue in groups.state_queues.at[place]:
        if queue.number > after and core.decisions.ask(f"state {queue.name}", (view_group(group),), (bool,)):
            groups.fire(group, queue.name)
            return True
    return False


def put_back_in_state(core: Core, name: str, group: Group) -> None:
    """Let a group wait for the work of its state again."""
    core.state.groups.state_queues.leave(name, group.id)
    core.state.groups.state_queues.enter(name, group.id)


def order_state_work(core: Core) -> None:
    """Order the work of every state while it may have more in progress."""
    state = core.state
    groups = state.groups
    if not state.takes_work:
        return
    for queue in groups.state_queues.by_name.values():
        while queue.waiting and queue.working < queue.concurrency:
            group = groups.live[groups.state_queues.next(queue)]
            group.attempt += 1
            core.state.orders.add(EnterState(group=group.id, attempt=group.attempt, state=queue.name))


# events


def on_prompts_drawn(core: Core, event: PromptsDrawn) -> None:
    state = core.state
    groups = state.groups
    state.ending.failed_draws = 0
    groups.facts.exhausted = groups.facts.exhausted or event.exhausted
    groups.draw(event.first, event.count)
    for place, known in enumerate(json.loads(event.described) if event.described else ()):
        if known is not None:
            groups.live[event.first + place].described = json.dumps(known)
    prepare_groups(core, range(event.first, event.first + event.count))


def on_draw_failed(core: Core, event: DrawFailed) -> None:
    """Order the prompts again. After too many failures in a row the run ends."""
    state = core.state
    ending = state.ending
    ending.failed_draws += 1
    if ending.failed_draws >= state.limits.infrastructure_attempts:
        times = f"{ending.failed_draws} times in a row"
        core.state.end_run("failed", f"the data source failed {times}; last error: {event.reason[:REASON_LENGTH]}")


def on_group_generated(core: Core, event: GroupGenerated) -> None:
    groups = core.state.groups
    group = groups.live[event.group]
    groups.facts.generated_at = event.at
    _note_stored(core, group, event)
    replica = core.state.replicas.by_id[event.replica]
    replica.generated += 1
    replica.tokens += event.tokens
    if replica.failed_groups:
        replica.failed_groups = 0
    if core.state.limits.straggler_factor is not None:
        measure_pace(core, group, replica, _attempt(core, event))
    group.failed_on = -1
    if groups.state_queues.at[GENERATED]:
        group.described, group.reward_mean = event.described, event.reward_mean
        if enter_added_state(core, group, GENERATED):
            return
    _complete_group(core, group, event)


def on_state_left(core: Core, event: StateLeft) -> None:
    """A group's work is done: it enters the next state. If there is none, it may start, or it is complete."""
    state = core.state
    groups = state.groups
    state.process(ADDED_STATES, 0).deaths = 0  # progress
    group, queue = groups.live[event.group], groups.state_queues.by_name[event.state]
    group.described = event.described or group.described
    if queue.place == QUEUED:
        group.prepared = True
        if not enter_added_state(core, group, QUEUED, queue.number):
            groups.fire(group, "prepare")
        return
    group.reward_mean = event.reward_mean
    if enter_added_state(core, group, GENERATED, queue.number):
        return
    outcome = GroupGenerated(
        group=group.id, attempt=group.attempt, replica=-1, life=-1, tokens=group.tokens,
        oldest_version=group.oldest_version, newest_version=group.newest_version,
        trainable=event.trainable, reward_mean=event.reward_mean, reward_spread=event.reward_spread,
        described=group.described,
    )  # fmt: skip
    stamp(outcome, event.id, event.at)
    _complete_group(core, group, outcome)


def on_state_failed(core: Core, event: StateFailed) -> None:
    """The work on a group failed, which is charged as an attempt: it is done again, or the group fails."""
    group = core.state.groups.live[event.group]
    core.state.ending.last_failure = event.reason
    if core.decisions.another_attempt(group, event.cause):
        put_back_in_state(core, event.state, group)
    else:
        _give_up_group(core, group)


def _complete_group(core: Core, group: Group, event: GroupGenerated) -> None:
    """A group is complete, added states included: it is ready, or the filter drops it."""
    ending = core.state.ending
    ending.failed_in_a_row = 0
    ending.note_judged(core.state.limits.failures_in_a_row, failed=False)
    group.described, group.reward_mean, group.ready_at = event.described, event.reward_mean, event.at
    core.state.completed[group.id] = event.reward_mean
    keep = core.decisions.keeps(event)
    core.state.groups.fire(group, "generate")
    if keep:
        ending.filtered_in_a_row = 0
    else:
        ending.filtered_in_a_row += 1
        core.state.filtered.append(group.id)
        release_group(core, group, "filter")


def on_group_aborted(core: Core, event: GroupAborted) -> None:
    group = core.state.groups.live[event.group]
    core.state.replicas.by_id[event.replica].aborted += 1
    if event.tokens:
        _note_stored(core, group, event, event.unfinished)
    commands = [order.command for order in core.state.orders.matched[event.id]]
    park = next((command for command in commands if isinstance(command, ParkGroup)), None)
    if park is not None and park.reason:
        park_after_failure(core, group, _cause_of_hang(core, group, _attempt(core, event).at), park.reason)
    elif park is not None:
        group.moved, group.failed_on = True, event.replica
        _park_uncharged(core, group)
    elif core.state.replicas.by_id[event.replica].state == "ready":  # it was not paused, so this could repeat forever
        park_after_failure(core, group, "infrastructure", "its replica aborted it without an order")
    else:
        _park_uncharged(core, group)


def _attempt(core: Core, event: GroupGenerated | GroupAborted) -> Order:
    """The order that began an attempt that this event ends: its first. Orders to cut it short came later."""
    return min(core.state.orders.matched[event.id], key=lambda order: order.number)


def on_prefix_stored(core: Core, event: PrefixStored) -> None:
    if event.tokens:
        _note_stored(core, core.state.groups.live[event.group], event, event.unfinished)


def on_order_progressed(core: Core, event: OrderProgressed) -> None:
    """Trajectories that ended make room for others. `time_limits.note_matched` restarts the order's time limit."""
    order = core.state.orders.matched[event.id][0]
    if not event.finished or not isinstance(order.command, StartGroup | ResumeGroup):
        return
    group = core.state.groups.live[order.id]
    if event.finished > group.finished:
        core.state.groups.finish_trajectories(group, event.finished)


def on_cache_measured(core: Core, event: CacheMeasured) -> None:
    replica = core.state.replicas.by_id[event.index]
    replica.cache_used = event.used
    limit_replica(core, replica)


def limit_replica(core: Core, replica: Replica) -> None:
    """Let the concurrency policy decide how many groups may run on a replica."""

    def unlawful(limit: int) -> str:
        return "" if 1 <= limit <= replica.slots else f"it must return an integer from 1 to {replica.slots}"

    seen = view_replica(core.state, replica)
    replica.limit = core.decisions.ask("concurrency", (seen,), (int,), unlawful)


def on_group_failed(core: Core, event: GroupFailed) -> None:
    group, replica = core.state.groups.live[event.group], core.state.replicas.by_id[event.replica]
    replica.failed += 1
    if event.cause == "data":
        group.forget_tokens()
    group.failed_on = event.replica
    park_after_failure(core, group, event.cause, event.reason)
    if event.cause == "infrastructure":
        _blame_replica(core, replica, event)


def _blame_replica(core: Core, replica: Replica, event: GroupFailed) -> None:
    """A replica on which different groups fail one after another is sick: another life may be better."""
    if replica.failed_group != event.group:
        replica.failed_group = event.group
        replica.failed_groups += 1
    if replica.failed_groups >= core.state.limits.infrastructure_attempts:
        stop_replica(core, replica, f"{replica.failed_groups} groups in a row failed on it; last error: {event.reason}")


def stop_replica(core: Core, replica: Replica, reason: str) -> None:
    """Stop a replica that keeps failing; its next life may succeed."""
    lose_replica(core, replica, reason)
    stop_process(core, replica.process, reason)


def lose_replica(core: Core, replica: Replica, reason: str, *, hung: bool = False) -> None:
    """Its process has ended or will be stopped. Park its groups: each is charged one infrastructure attempt and
    keeps its place. If the replica hung, only groups that exceeded their own limit are charged."""
    state = core.state
    if replica.state == "down":
        return
    hung = hung or any(
        one.overdue and KINDS_OF_SUBJECTS[one.subject] not in CUT_SHORT for one in state.orders.owned(replica.id)
    )
    state.validations.lose(replica, failed=not hung)
    lost = state.orders.fail(replica.id)
    began = {order.id: order.at for order in lost if order.subject == "group"}
    overdue = {order.id for order in lost if isinstance(order.command, ParkGroup) and order.command.reason}
    replica.next_version = None
    replica.failed_groups = 0
    state.fire_replica(replica, "lose")
    for id, at in began.items():
        group = state.groups.live[id]
        if id in overdue:
            park_after_failure(core, group, _cause_of_hang(core, group, at), reason)
        elif not hung:
            park_after_failure(core, group, "infrastructure", reason)
        else:
            _park_uncharged(core, group)


def _cause_of_hang(core: Core, group: Group, began: float) -> str:
    """The cause that an attempt is charged to after it exceeded its limit: `data` if the prompt hung before and
    other groups were generated meanwhile; otherwise a machine may be the cause."""
    return "data" if group.exceeded > 1 and core.state.groups.facts.generated_at > began else "infrastructure"


def park_after_failure(core: Core, group: Group, cause: str, reason: str) -> None:
    """An attempt failed: park the group for another one, or fail it. Its slot must be free already."""
    core.state.ending.last_failure = reason
    again = core.decisions.another_attempt(group, cause)
    park_group(core, group)
    if not again:
        _give_up_group(core, group)
    elif group.truncate and not group.tokens:
        release_group(core, group, "drop")


def _park_uncharged(core: Core, group: Group) -> None:
    """Park a group without charging it an attempt. Drop it if it must be truncated but has no tokens."""
    park_group(core, group)
    if group.truncate and not group.tokens:
        release_group(core, group, "drop")


def _give_up_group(core: Core, group: Group) -> None:
    """A retry budget is spent."""
    release_group(core, group, "fail")
    core.state.ending.failed_in_a_row += 1


def park_group(core: Core, group: Group) -> None:
    """Park a running group: it keeps its place, and resumes in the order of the resume policy."""
    group.resume_key = resume_key(core, group)
    core.state.groups.fire(group, "abort")


def resume_key(core: Core, group: Group) -> tuple[int | float, ...]:
    """The group's sort key among the parked groups."""
    key: tuple[int | float, ...] = core.decisions.ask("resume", (view_group(group),), (tuple,), _unlawful_key)
    return key


def release_group(core: Core, group: Group, trigger: str) -> None:
    """End a group that will not be trained on. Its place becomes free."""
    core.state.groups.fire(group, trigger)
    core.discards.append(group.id)


def order_discards(core: Core) -> None:
    """Order the deletion of all trajectories that this tick discards."""
    if core.discards:
        core.state.orders.add(DiscardGroups(groups=tuple(core.discards)))
        core.discards = []


def drop_group(core: Core, group: Group) -> None:
    """End an open group that is in no batch, in whatever state it is."""
    replica = core.state.replicas.of_group(group.id)
    if replica is not None:
        core.state.orders.add(AbortGroup(**replica.address_of(group)))
    release_group(core, group, "drop")


def _note_stored(
    core: Core, group: Group, event: GroupGenerated | GroupAborted | PrefixStored, unfinished: int = 0
) -> None:
    oldest, newest = event.oldest_version, event.newest_version
    group.tokens, group.unfinished = event.tokens, unfinished
    if oldest == NO_VERSION:
        return
    if not group.admitted_version <= oldest <= newest <= core.state.training.latest_version:
        require(
            False, "law 6: a replica reported tokens of versions that the group cannot have",
            group=group.id, admitted=group.admitted_version, oldest=oldest, newest=newest,
            latest=core.state.training.latest_version,
        )  # fmt: skip
    group.oldest_version, group.newest_version = oldest, max(newest, group.newest_version)


# orders


def start_groups(core: Core) -> None:
    """Fill free slots, with parked groups first, because they have places and deadlines already, then with new
    ones. Draw prompts ahead."""
    state = core.state
    groups = state.groups
    if not state.takes_work:
        return
    freed = state.orders.ends_by_owner()
    if groups.parked and groups.ledger.running < state.limits.max_concurrent_groups:
        _resume_groups(core, freed)
    if groups.waiting:
        _admit_groups(core, freed)
    state.replicas.starting = None
    if not groups.facts.exhausted and not state.asked:
        _draw_prompts(core)


def _resume_groups(core: Core, freed: Mapping[Owner, EventId]) -> None:
    """Resume parked groups, in the order of the resume policy. `freed`: the event that freed a slot of each replica, if
    one did."""
    state = core.state
    groups, slots = state.groups, state.replicas.start_on()
    if slots.newest_version == NO_VERSION:
        return
    for _, id in sorted((groups.live[id].resume_key, id) for id in groups.parked):
        group, newest = groups.live[id], slots.newest_version
        if newest == NO_VERSION or groups.ledger.running >= state.limits.max_concurrent_groups:
            return
        if group.resumes_from > newest:
            continue
        replica = _dispatch(core, group, slots, group.resumes_from)
        if replica is None:
            return
        groups.fire(group, "resume")
        group.attempt += 1
        group.resumed_tokens = group.tokens if state.limits.straggler_factor is not None else 0
        order = replica.address_of(group) | {"admitted_version": group.admitted_version}
        order["cause"] = freed.get(replica.id, -1)
        if group.tokens:
            core.state.orders.add(ResumeGroup(**order, truncate=group.truncate))
        else:
            core.state.orders.add(StartGroup(**order))


def _admit_groups(core: Core, freed: Mapping[Owner, EventId]) -> None:
    """Start new groups, each on a version with a place left (law 3): on the oldest such version or a newer one, because
    places grow with the version."""
    state = core.state
    groups, limits = state.groups, state.limits
    versions, held = [*state.training.steps_in], state.held
    places = [state.places(version) for version in versions]
    room = min(limits.max_concurrent_groups - groups.ledger.running, places[-1] - held)
    legal = min(room, len(groups.waiting))
    if legal <= 0:
        return
    law = f"it must return an integer from 0 to {legal}"
    count = core.decisions.ask("admission", (legal,), (int,), lambda n: "" if 0 <= n <= legal else law)
    slots = state.replicas.start_on()
    for started in range(count):
        oldest, group = versions[bisect_right(places, held + started)], groups.live[groups.waiting[0]]
        replica = _dispatch(core, group, slots, oldest) if oldest <= slots.newest_version else None
        if replica is None:
            return
        groups.waiting.popleft()
        group.admitted_version = replica.version
        group.deadline = state.training.steps_in[replica.version] + limits.max_staleness_steps
        group.started_at = state.facts.now
        groups.fire(group, "start")
        group.attempt += 1
        cause = freed.get(replica.id, -1)
        order = StartGroup(**replica.address_of(group), admitted_version=replica.version, cause=cause)
        core.state.orders.add(order)


def _dispatch(core: Core, group: Group, slots: FreeSlots, oldest: Version) -> Replica | None:
    """Take a slot for a group, on the replica that the dispatch policy chooses."""

    def unlawful(id: ReplicaId | None) -> str:
        if id is None or slots.version_of(id) >= oldest:
            return ""
        return f"it must choose a ready replica with a free slot and version {oldest} or newer, or None"

    id = core.decisions.ask("dispatch", (oldest, group.id), (int, type(None)), unlawful)
    if id is None:
        return None
    replica = core.state.replicas.by_id[id]
    slots.take(replica)
    return replica


def _draw_prompts(core: Core) -> None:
    """Order prompts while fewer wait than could start now: one batch ahead, but never more than the run needs."""
    state = core.state
    limits = state.limits
    waiting = state.groups.ledger.waiting
    if waiting and waiting > limits.max_concurrent_groups - state.groups.ledger.running:
        return
    room = state.capacity
    if waiting > room:
        return
    want = min(MOST_DRAWN, room + limits.train_batch_size - waiting)
    if limits.max_steps is not None:
        most = limits.max_steps * limits.train_batch_size + state.surplus_left
        want = min(want, most - state.held - waiting)
    if want > 0:
        first = core.state.groups.ledger.drawn
        core.state.orders.add(DrawPrompts(first=first, count=want))


def _unlawful_key(key: tuple[Any, ...]) -> str:
    numbers = all(type(part) in (int, float) and isfinite(part) for part in key)
    return "" if key and numbers else "it must be a non-empty tuple of finite numbers"
