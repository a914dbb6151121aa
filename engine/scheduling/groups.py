"""Groups on replicas: drawing, admission, dispatch, abort and resume, failure and retry; and groups in added states.

Called by `scheduler.py` for each event about a group, and once after every event to fill free slots. Changes state only
through `State`'s operations.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Any

from engine.commands import AbortGroup, DrawPrompts, EnterState, ParkGroup, ResumeGroup, StartGroup
from engine.events import (
    DrawFailed,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    GroupProgressed,
    PrefixStored,
    PromptsDrawn,
    StateFailed,
    StateLeft,
    stamp,
)
from engine.ids import NO_VERSION, ReplicaId, Version
from engine.policies.custom_states import build_state
from engine.scheduling.decisions import Decisions
from engine.scheduling.issued_commands import MOST_STARTS, Orders
from engine.scheduling.lifetimes import REASON_LENGTH, Lifetimes
from engine.scheduling.stragglers import PaceScheduling
from engine.states.group import Group
from engine.states.laws import require
from engine.states.orders import KINDS_OF_SUBJECTS
from engine.states.replica import Replica
from engine.states.state import Key, State
from engine.states.timeouts import CUT_SHORT
from engine.states.view import view_group

MOST_DRAWN = 4096
"""Maximum number of prompts in one order."""


class StageScheduling:
    """Moves groups through the added states of a run, in order, first come first served."""

    def __init__(self, state: State, decisions: Decisions, orders: Orders) -> None:
        """Raises: `ConfigError` for a state that is not registered."""
        self.state = state
        self.decisions = decisions
        self.orders = orders
        for name in state.stages.by_name:
            policy = build_state(name)
            decisions.add(f"state {name}", policy, policy.enters)

    def enter(self, group: Group, after: int = -1) -> bool:
        """Move a group into the next state whose policy lets it in, after state number `after`. False if there is
        none."""
        for stage in self.state.stages.by_name.values():
            if stage.number > after and self.decisions.ask(f"state {stage.name}", (view_group(group),), (bool,)):
                if group.replica >= 0:
                    self.state.unseat(group)
                self.state.fire_group(group, stage.name)
                return True
        return False

    def leave(self, event: StateLeft) -> GroupGenerated | None:
        """A group's work is done: it continues to the next state. Where none is left: what came of the group."""
        group = self.state.groups[event.group]
        self.state.update(group, reward_mean=event.reward_mean)
        if self.enter(group, self.state.stages.by_name[event.state].number):
            return None
        outcome = GroupGenerated(
            group=group.id, attempt=group.attempt, replica=-1, incarnation=-1, tokens=group.tokens,
            oldest_version=group.oldest_version, newest_version=group.newest_version, trainable=event.trainable,
            reward_mean=event.reward_mean, reward_spread=event.reward_spread,
        )  # fmt: skip
        stamp(outcome, event.id, event.at)
        return outcome

    def fail(self, event: StateFailed) -> Group | None:
        """The work on a group failed, which is charged as an attempt. Returns the group if it was the last attempt."""
        group = self.state.groups[event.group]
        self.state.last_failure = event.reason
        if not self.decisions.another_attempt(group, event.cause):
            return group
        self.put_back(event.state, group)
        return None

    def put_back(self, name: str, group: Group) -> None:
        """Let a group wait for the work of its state again."""
        self.state.stages.leave(name, group.id)
        self.state.enter_stage(group)

    def advance(self) -> None:
        """Order the work of every state while it may have more in progress."""
        state = self.state
        if not state.started or state.outcome is not None or state.draining:
            return
        for stage in state.stages.by_name.values():
            while stage.waiting and stage.working < stage.concurrency:
                group = state.groups[state.stages.next(stage)]
                state.update(group, attempt=group.attempt + 1)
                self.orders.add(
                    EnterState(group=group.id, attempt=group.attempt, state=stage.name, cause=self.orders.cause)
                )


@dataclass(eq=False)
class RolloutScheduling:
    """Keeps slots busy within the laws."""

    state: State
    decisions: Decisions
    orders: Orders
    stages: StageScheduling
    pace: PaceScheduling
    lifetimes: Lifetimes

    # facts

    def on_prompts_drawn(self, event: PromptsDrawn) -> None:
        state = self.state
        ordered: Any = state.orders.matched[0].command
        require(
            event.first == ordered.first and 0 <= event.count <= ordered.count,
            "law 5: only ordered prompts may be drawn",
            first=event.first, ordered_first=ordered.first, count=event.count, ordered=ordered.count,
        )  # fmt: skip
        require(event.count > 0 or event.exhausted, "law 7: the source returned no prompt and is not exhausted")
        state.failed_draws = 0
        state.exhausted = state.exhausted or event.exhausted
        state.draw(event.first, event.count)

    def on_draw_failed(self, event: DrawFailed) -> None:
        """Order the prompts again. After too many failures in a row the run ends."""
        state = self.state
        state.failed_draws += 1
        if state.failed_draws >= state.limits.infrastructure_attempts:
            times = f"{state.failed_draws} times in a row"
            self.orders.end_run("failed", f"the data source failed {times}; last error: {event.reason[:REASON_LENGTH]}")

    def on_group_generated(self, event: GroupGenerated) -> None:
        group = self.state.groups[event.group]
        self._note_tokens(group, event.tokens, event.oldest_version, event.newest_version)
        replica = self.state.fleet.replicas[event.replica]
        if replica.failed_groups:
            replica.failed_groups = 0
        if group.seated_at and self.state.limits.straggler_factor is not None:
            self.pace.measure(group, replica)
        group.failed_on = -1
        group.reward_mean = event.reward_mean
        if not self.state.stages.by_name or not self.stages.enter(group):
            self._settle(group, event)

    def on_state_left(self, event: StateLeft) -> None:
        outcome = self.stages.leave(event)
        if outcome is not None:
            self._settle(self.state.groups[event.group], outcome)

    def on_state_failed(self, event: StateFailed) -> None:
        spent = self.stages.fail(event)
        if spent is not None:
            self._give_up(spent)

    def _settle(self, group: Group, event: GroupGenerated) -> None:
        """A group is complete, added states included: it is ready, or the filter drops it."""
        self.state.failed_in_a_row = 0
        self.state.note_judged(failed=False)
        group.ready_at = event.at
        keep = self.decisions.ask("filter", (event,), (bool,))
        if group.replica >= 0:
            self.state.unseat(group)
        self.state.fire_group(group, "generate")
        if keep:
            self.state.filtered_in_a_row = 0
        else:
            self.state.filtered_in_a_row += 1
            self.release(group, "filter")

    def on_group_aborted(self, event: GroupAborted) -> None:
        group = self.state.groups[event.group]
        if event.tokens:
            self._note_tokens(group, event.tokens, event.oldest_version, event.newest_version)
            group.kept = True
            group.unfinished = event.unfinished
        unasked = self.state.fleet.replicas[event.replica].state == "ready"
        parks = [order.command for order in self.state.orders.matched if isinstance(order.command, ParkGroup)]
        self.state.unseat(group)
        if parks and parks[0].reason:
            self.park_after_failure(group, "infrastructure", parks[0].reason)
            return
        if parks:
            group.moved, group.failed_on, unasked = True, event.replica, False
        if unasked:  # the replica was not paused: charge an attempt, because this could repeat forever
            self.park_after_failure(group, "infrastructure", "its replica aborted it without an order")
            return
        self._park_uncharged(group)

    def on_prefix_stored(self, event: PrefixStored) -> None:
        if not event.tokens:
            return
        group = self.state.groups[event.group]
        self._note_tokens(group, event.tokens, event.oldest_version, event.newest_version)
        self.state.update(group, kept=True, unfinished=event.unfinished)

    def on_group_progressed(self, event: GroupProgressed) -> None:
        """`match` has restarted the clock of its order. Trajectories that ended make room for others."""
        group = self.state.groups[event.group]
        replica = self.state.fleet.replicas[event.replica]
        require(
            event.finished <= replica.samples, "law 2: more trajectories ended than the group has",
            group=group.id, finished=event.finished, samples=replica.samples,
        )  # fmt: skip
        if event.finished > group.finished:
            self.state.free_trajectories(group, event.finished)

    def on_group_failed(self, event: GroupFailed) -> None:
        group = self.state.groups[event.group]
        if event.cause == "data" and group.kept:
            group.forget_tokens()
        group.failed_on = event.replica
        self.state.unseat(group)
        self.park_after_failure(group, event.cause, event.reason)
        if event.cause == "infrastructure":
            self._blame(self.state.fleet.replicas[event.replica], event)

    def _blame(self, replica: Replica, event: GroupFailed) -> None:
        """A replica on which different groups fail one after another is sick: another life may be better."""
        if replica.failed_group != event.group:
            replica.failed_group = event.group
            replica.failed_groups += 1
        if replica.failed_groups >= self.state.limits.infrastructure_attempts:
            self.stop_replica(
                replica, f"{replica.failed_groups} groups in a row failed on it; last error: {event.reason}"
            )

    def stop_replica(self, replica: Replica, reason: str) -> None:
        """Stop a replica that keeps failing; its next incarnation may succeed."""
        self.lose_replica(replica, reason)
        self.lifetimes.stop(replica.process, reason)

    def lose_replica(self, replica: Replica, reason: str, *, hung: bool = False) -> None:
        """Its process has ended or will be stopped. Park its groups: each is charged one infrastructure attempt and
        keeps its place. If the replica hung, only groups that exceeded their own limit are charged."""
        state = self.state
        hung = hung or any(
            KINDS_OF_SUBJECTS[one.subject] not in CUT_SHORT for one in state.clocks.find_exceeded(replica.id)
        )
        parks = [order.command for order in state.orders.fail(replica.id) if isinstance(order.command, ParkGroup)]
        overdue = {park.group for park in parks if park.reason}
        replica.staged = replica.staging = None
        replica.failed_groups = 0
        state.fire_replica(replica, "lose")
        state.validations.lose(replica, failed=not hung)
        for id in list(replica.groups):
            group = state.groups[id]
            state.unseat(group)
            if not hung or id in overdue:
                self.park_after_failure(group, "infrastructure", reason)
            else:
                self._park_uncharged(group)

    def park_after_failure(self, group: Group, cause: str, reason: str) -> None:
        """An attempt failed: park the group for another one, or fail it. Its slot must be free already."""
        self.state.last_failure = reason
        again = self.decisions.another_attempt(group, cause)
        self.park(group)
        if not again:
            self._give_up(group)
        elif group.truncate and not group.kept:
            self.release(group, "drop")

    def _park_uncharged(self, group: Group) -> None:
        """Park a group without charging it an attempt. Drop it if it must be truncated but has no tokens."""
        self.park(group)
        if group.truncate and not group.kept:
            self.release(group, "drop")

    def _give_up(self, group: Group) -> None:
        """A retry budget is spent."""
        self.release(group, "fail")
        self.state.failed_in_a_row += 1

    def park(self, group: Group) -> None:
        """Park a running group: it keeps its place, and resumes in the order of the resume policy."""
        self.state.fire_group(group, "abort", self.resume_key(group))

    def resume_key(self, group: Group) -> Key:
        """The group's sort key among the parked groups."""
        key: Key = self.decisions.ask("resume", (view_group(group),), (tuple,), _unlawful_key)
        return key

    def release(self, group: Group, trigger: str) -> None:
        """End a group that will not be trained on. Its place becomes free."""
        self.state.fire_group(group, trigger)
        self.orders.discard(group.id)

    def drop(self, group: Group) -> None:
        """End an open group that is in no batch, in whatever state it is."""
        if group.replica >= 0:
            replica = self.state.fleet.replicas[group.replica]
            self.orders.add(
                AbortGroup(group=group.id, attempt=group.attempt, replica=replica.id, incarnation=replica.incarnation,
                           number=self.orders.number, cause=self.orders.cause)
            )  # fmt: skip
            self.state.unseat(group)
        self.release(group, "drop")

    def _note_tokens(self, group: Group, tokens: int, oldest: Version, newest: Version) -> None:
        group.tokens = tokens
        if oldest == NO_VERSION:
            return
        require(
            group.admitted_version <= oldest <= newest <= self.state.latest_version,
            "law 6: a replica reported tokens of versions that the group cannot have",
            group=group.id, admitted=group.admitted_version, oldest=oldest, newest=newest,
            latest=self.state.latest_version,
        )  # fmt: skip
        group.oldest_version = oldest
        group.newest_version = max(newest, group.newest_version)

    # orders

    def advance(self) -> None:
        """Fill free slots, with parked groups first, because they have places and deadlines already, then with new
        ones. Draw prompts ahead."""
        state = self.state
        if not state.started or state.outcome is not None or state.draining:
            return
        left = MOST_STARTS
        if state.ledger.parked:
            left = self._resume(left)
        if state.waiting:
            self._admit(left)
        if not state.exhausted and not state.asked:
            self._draw()

    def _resume(self, most: int) -> int:
        """Resume at most `most` groups. Returns how many more this event may start."""
        state = self.state
        while state.ledger.running < state.limits.max_concurrent_groups:
            newest = state.fleet.newest_open_version()
            group = state.next_parked(newest) if newest >= 0 else None
            if group is None:
                return most
            if not most:
                self.orders.continue_at_once()
                return 0
            replica = self._dispatch(group, group.resumes_from)
            if replica is None:
                return most
            most -= 1
            state.fire_group(group, "resume")
            state.seat(group, replica)
            order = {
                "group": group.id,
                "attempt": group.attempt,
                "replica": replica.id,
                "incarnation": replica.incarnation,
                "admitted_version": group.admitted_version,
            }
            if group.kept:
                self.orders.add(ResumeGroup(**order, truncate=group.truncate, cause=self.orders.cause))
            else:
                self.orders.add(StartGroup(**order, cause=self.orders.cause))
        return most

    def _admit(self, most: int) -> None:
        """Start at most `most` new groups."""
        state = self.state
        limits = state.limits
        legal = min(state.capacity, len(state.waiting))
        if legal <= 0:
            return
        if not most:
            self.orders.continue_at_once()
            return
        law = f"it must return an integer from 0 to {legal}"
        count = self.decisions.ask("admission", (legal,), (int,), lambda n: "" if 0 <= n <= legal else law)
        for started in range(count):
            if started == most:
                self.orders.continue_at_once()
                return
            oldest = self._oldest_admissible()
            group = state.groups[state.waiting[0]]
            replica = None if oldest is None else self._dispatch(group, oldest)
            if replica is None:
                return
            state.waiting.popleft()
            group.admitted_version = replica.version
            group.deadline = state.steps_in[replica.version] + limits.max_staleness_steps
            group.started_at = state.now
            state.fire_group(group, "start")
            state.seat(group, replica)
            self.orders.add(
                StartGroup(group=group.id, attempt=group.attempt, replica=replica.id, incarnation=replica.incarnation,
                           admitted_version=group.admitted_version, cause=self.orders.cause)
            )  # fmt: skip

    def _oldest_admissible(self) -> Version | None:
        """The oldest version with a place left (law 3). Newer versions have one too, because places grow with the
        version."""
        oldest, held = None, self.state.held
        for version in reversed(self.state.steps_in):
            if held >= self.state.places(version):
                break
            oldest = version
        return oldest

    def _dispatch(self, group: Group, oldest: Version) -> Replica | None:
        state = self.state

        def unlawful(id: ReplicaId | None) -> str:
            replica = None if id is None else state.fleet.replicas.get(id)
            if id is None or (
                replica is not None
                and replica.state == "ready"
                and replica.free_slots > 0
                and replica.version >= oldest
            ):
                return ""
            return f"it must choose a ready replica with a free slot and version {oldest} or newer, or None"

        id = self.decisions.ask("dispatch", (oldest, group.id), (int, type(None)), unlawful)
        return None if id is None else state.fleet.replicas[id]

    def _draw(self) -> None:
        """Order prompts while fewer wait than could start now: one batch ahead, but never more than the run needs."""
        state = self.state
        limits = state.limits
        waiting = len(state.waiting)
        if waiting and waiting > limits.max_concurrent_groups - state.ledger.running:
            return
        room = state.capacity
        if waiting > room:
            return
        want = min(MOST_DRAWN, room + limits.train_batch_size - waiting)
        if limits.max_steps is not None:
            most = limits.max_steps * limits.train_batch_size + state.surplus_left
            want = min(want, most - state.held - waiting)
        if want > 0:
            first = self.state.ledger.drawn
            self.orders.add(DrawPrompts(first=first, count=want, number=self.orders.number, cause=self.orders.cause))


def _unlawful_key(key: tuple[Any, ...]) -> str:
    numbers = all(type(part) in (int, float) and isfinite(part) for part in key)
    return "" if key and numbers else "it must be a non-empty tuple of finite numbers"
