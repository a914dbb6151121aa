"""The counters of `collector.RunMetrics`: groups by state, figures of replicas and of generated groups, recoveries.

`collector` updates them in O(1) for each event, and `export` reads them at each scrape. They must not read a clock.
"""

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from engine.commands import Command, ParkGroup, PauseReplica, ResumeGroup, ResumeReplica
from engine.events import (
    CheckpointSaved,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    ProcessLost,
    RunResumed,
    SyncFailed,
    WeightsInstalled,
)
from engine.ids import GroupId, ReplicaId
from engine.metrics.names import (
    GROUP_BUCKETS,
    LIVE_GROUP_STATES,
    PARKED_REASONS,
    REPLICA_GROUP_ENDS,
    REQUESTS,
    SYNC_BUCKETS,
    TOKEN_BUCKETS,
)
from engine.metrics.transitions import RELEASED, Transitions
from engine.states.limits import SYNC_MODES
from engine.states.state import State

# -- histograms --------------------------------------------------------------------------------------------------------


class Histogram:
    """Counts values by the smallest bucket bound that they do not exceed, and keeps an exemplar for each bucket."""

    __slots__ = ("bounds", "count", "counts", "examples", "largest", "smallest", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.examples: list[tuple[float, int] | None] = [None] * (len(bounds) + 1)
        """(value, group) of the newest value in each bucket, if given."""
        self.count = 0
        self.total = 0.0
        self.smallest: float | None = None
        self.largest: float | None = None

    def observe(self, value: float, whose: int | None = None) -> None:
        """Count a value. `whose`: the group it belongs to, as exemplar."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        if whose is not None:
            self.examples[bucket] = (value, whose)
        self.count += 1
        self.total += value
        if self.smallest is None or value < self.smallest:
            self.smallest = value
        if self.largest is None or value > self.largest:
            self.largest = value

    def add(self, value: float, count: int) -> None:
        """Count a value as often as `count` says, without sum and extremes."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.count += count

    def observe_all(self, values: Sequence[float], whose: Sequence[int]) -> None:
        """Count many values, oldest first. Faster than one by one, with the same result."""
        if not values:
            return
        bounds, counts, newest = self.bounds, self.counts, dict[int, int]()
        for place, value in enumerate(values):
            bucket = bisect_left(bounds, value)
            counts[bucket] += 1
            newest[bucket] = place
        for bucket, place in newest.items():
            self.examples[bucket] = (values[place], whose[place])
        self.count += len(values)
        self.total += sum(values)
        least, most = min(values), max(values)
        self.smallest = least if self.smallest is None else min(self.smallest, least)
        self.largest = most if self.largest is None else max(self.largest, most)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def cumulative(self) -> list[tuple[str, float, tuple[float, int] | None]]:
        """(upper bound, number of values up to it, exemplar) of each bucket, as Prometheus counts; the last bound is
        `+Inf`."""
        rows, running = [], 0
        for bound, count, example in zip((*map(repr, self.bounds), "+Inf"), self.counts, self.examples, strict=True):
            running += count
            rows.append((bound, float(running), example))
        return rows


# -- replicas ----------------------------------------------------------------------------------------------------------


class ReplicaFigures:
    """The figures of one replica over all its restarts."""

    __slots__ = ("ended", "pause_s", "resumed", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.resumed = 0
        self.ended = dict.fromkeys(REPLICA_GROUP_ENDS, 0)
        self.pause_s = dict.fromkeys(SYNC_MODES, 0.0)


class ReplicaCounts:
    """Figures by replica, and the duration of weight syncs."""

    def __init__(self) -> None:
        self.of: dict[ReplicaId, ReplicaFigures] = {}
        self.sync_s = {mode: Histogram(SYNC_BUCKETS) for mode in SYNC_MODES}
        self._pausing: dict[ReplicaId, tuple[float, str]] = {}

    def on_join(self, replica: ReplicaId) -> None:
        """Add a replica, with all figures 0."""
        self._figures(replica)

    def on_generated(self, replica: ReplicaId, groups: int, tokens: int) -> None:
        figures = self._figures(replica)
        figures.tokens += tokens
        figures.ended["generated"] += groups

    def on_abort(self, event: GroupAborted) -> None:
        self._figures(event.replica).ended["aborted"] += 1

    def on_failure(self, event: GroupFailed) -> None:
        self._figures(event.replica).ended["failed"] += 1

    def on_order(self, command: Command, at: float) -> None:
        """Note an order to a replica."""
        if type(command) is ResumeGroup:
            self._figures(command.replica).resumed += 1
        elif type(command) is ResumeReplica:
            self._pausing.pop(command.replica, None)  # the pause was not for new weights
        elif type(command) is PauseReplica and command.mode != "sleep":  # time asleep counts as idle slot time
            self._pausing[command.replica] = (at, command.mode)

    def on_install(self, event: WeightsInstalled) -> None:
        paused = self._unpause(event.replica, event.at)
        if paused is not None:
            mode, seconds = paused
            self.sync_s[mode].observe(seconds)

    def on_revert(self, event: SyncFailed) -> None:
        self._unpause(event.replica, event.at)

    def on_loss(self, event: ProcessLost) -> None:
        self._pausing.pop(event.index, None)

    def _unpause(self, replica: ReplicaId, at: float) -> tuple[str, float] | None:
        began = self._pausing.pop(replica, None)
        if began is None:
            return None
        since, mode = began
        self._figures(replica).pause_s[mode] += at - since
        return mode, at - since

    def _figures(self, replica: ReplicaId) -> ReplicaFigures:
        figures = self.of.get(replica)
        if figures is None:
            figures = self.of[replica] = ReplicaFigures()
        return figures


# -- generated groups --------------------------------------------------------------------------------------------------


BATCH = 256
TOKEN_RATE_WINDOW_S = 15.0
TOKEN_SAMPLE_S = 0.25


class GeneratedGroups:
    """Figures of generated groups. `catch_up` counts the ones in `waiting`, on any thread."""

    def __init__(self, replicas: ReplicaCounts) -> None:
        self.waiting: deque[tuple[GroupGenerated, float | None]] = deque()
        """(event, time of the group's first start; None if the group was released at once)."""
        self.groups = 0
        self.tokens = 0
        self.response_tokens = Histogram(TOKEN_BUCKETS)
        self.seconds = Histogram(GROUP_BUCKETS)
        self._replicas = replicas
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=256)
        self._counting = threading.Lock()

    def catch_up(self, *, blocking: bool = True) -> None:
        """Count the waiting groups. Never blocks: if another thread counts, it returns at once."""
        if not self._counting.acquire(blocking=blocking):
            return
        try:
            waiting = self.waiting
            batch = [waiting.popleft() for _ in range(len(waiting))]
            if batch:
                self._count(batch)
        finally:
            self._counting.release()

    def tokens_per_s(self, now: float) -> float:
        """Response tokens per second, over the newest seconds; 0 before the first."""
        samples = self._samples
        while len(samples) > 2 and samples[1][0] < now - TOKEN_RATE_WINDOW_S:
            samples.popleft()
        if now <= samples[0][0]:
            return 0.0
        return (self.tokens - samples[0][1]) / (now - samples[0][0])

    def _count(self, batch: list[tuple[GroupGenerated, float | None]]) -> None:
        tokens, sampled_at = self.tokens, self._samples[-1][0]
        lengths, times, ids, timed = [], [], [], []
        groups_of, tokens_of = dict[int, int](), dict[int, int]()
        for event, began in batch:
            here, replica, group, at = event.tokens, event.replica, event.group, event.at
            tokens += here
            groups_of[replica] = groups_of.get(replica, 0) + 1
            tokens_of[replica] = tokens_of.get(replica, 0) + here
            lengths.append(here / (event.trainable or 1))
            ids.append(group)
            if began is not None:
                times.append(at - began)
                timed.append(group)
            if at - sampled_at >= TOKEN_SAMPLE_S:
                sampled_at = at
                self._samples.append((at, tokens))
        self.tokens = tokens
        self.groups += len(batch)
        for replica, groups in groups_of.items():
            self._replicas.on_generated(replica, groups, tokens_of[replica])
        self.response_tokens.observe_all(lengths, ids)
        self.seconds.observe_all(times, timed)


# -- recoveries, requests, drains, parked groups and checkpoints -------------------------------------------------------


class RunProgress:
    """Counts since this process started or resumed the run. `state` and `transitions` have counts of the whole run."""

    def __init__(self, state: State, transitions: Transitions) -> None:
        self._state = state
        self._transitions = transitions
        self.requests = dict.fromkeys(REQUESTS.values(), 0)
        self.parked = dict.fromkeys(PARKED_REASONS, 0)
        """Running groups that were parked, by reason."""
        self.checkpoint_at = 0.0
        """When the last checkpoint was saved, or the run was resumed; seconds since the run began."""

    @property
    def recoveries(self) -> dict[str, int]:
        """Number of recoveries, by kind (`names.RECOVERY_KINDS`)."""
        return self._transitions.recoveries

    def on_request(self, kind: type[Event]) -> None:
        self.requests[REQUESTS[kind]] += 1

    def on_resume(self, event: RunResumed) -> None:
        self._transitions.note_event(event)
        self.checkpoint_at = event.at

    def on_checkpoint_saved(self, event: CheckpointSaved) -> None:
        self.checkpoint_at = event.at

    @property
    def checkpoint_steps(self) -> int:
        """Train steps in the newest complete checkpoint; 0 before the first."""
        return self._state.checkpoints.newest

    def on_park(self, command: ParkGroup) -> None:
        self.parked["timeout" if command.reason else "moved"] += 1

    def draining_s(self, now: float) -> float:
        """Seconds since the current drain began; 0 if the run is not draining."""
        since = self._transitions.draining_since
        return max(0.0, now - since) if self._state.ending.draining and since is not None else 0.0

    @property
    def replicas_wanted(self) -> int:
        """Number of generating replicas that the run should have, including those that are down."""
        return sum(replica.process.wanted for replica in self._state.replicas.rollouts)

    @property
    def slow(self) -> list[int]:
        """Ids of replicas that are slower than the others by more than `rollout.straggler_factor`."""
        return sorted(replica.id for replica in self._state.replicas.slow(self._state.limits.straggler_factor))


# -- groups by state ---------------------------------------------------------------------------------------------------


class GroupCounts:
    """Number of groups by state. Safe to read from another thread."""

    def __init__(self, state: State, transitions: Transitions) -> None:
        self._state = state
        self._transitions = transitions
        self._live = (*LIVE_GROUP_STATES, *state.groups.stages.by_name)
        self._undone = dict(transitions.undone)
        """Groups by final state, of those that ended after the point from which a resumed run continued."""
        self._undo(id for id in transitions.released or () if id in state.groups.live)
        self._begin()

    def on_resume(self, event: RunResumed) -> None:
        """Count again: a resume changed states of groups without triggers."""
        self._undo(event.released)
        self._begin()

    def by_state(self) -> dict[str, int]:
        """Number of groups that have not ended, by state."""
        drawn = self._state.groups.ledger.drawn - self._drawn_before
        net = self._transitions.net
        counts = {state: self._before[state] + net("group", state) for state in self._live}
        counts["queued"] += drawn
        return {state: max(0, count) for state, count in counts.items()}

    def by_final_state(self) -> dict[str, int]:
        """Number of groups by final state, without those that ended after the point where a resumed run continues."""
        entered = self._transitions.entered
        released = {state: entered("group", state) - self._undone[state] for state in RELEASED}
        return {"consumed": self._state.groups.ledger.consumed, **released}

    def _begin(self) -> None:
        """Groups by present state, minus what `transitions` has counted already."""
        counts = Counter(group.state for group in self._state.groups.live.values())
        self._before = {state: counts[state] - self._transitions.net("group", state) for state in self._live}
        self._drawn_before = self._state.groups.ledger.drawn

    def _undo(self, groups: Iterable[GroupId]) -> None:
        """Take back the end of these groups. If they ended before the snapshot at which the replay began, their final
        state is unknown: the sum is exact, and the most frequent state is assumed."""
        known, undone = self._transitions.released or {}, self._undone
        for id in groups:
            if id in known:
                undone[known[id]] += 1
        counts = {state: self._transitions.entered("group", state) - undone[state] for state in RELEASED}
        rest = sum(counts.values()) - self._state.groups.ledger.released
        for state in sorted(counts, key=lambda state: -counts[state]):
            share = max(0, min(rest, counts[state]))
            undone[state] += share
            rest -= share


BEHIND = 64
"""Number of groups that are checked after the oldest one: a group drawn later may have started earlier."""
AT_ONCE = 20_000


class OldestGroup:
    """Finds the oldest started group that is not in a batch, nearly always exactly. A search continues where the last
    one ended, because until the run branches, a group that is in a batch or has ended never returns."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._first = 0
        self._branch = 0

    def started_at(self, branch: int) -> float | None:
        """When the oldest such group started; None if there is none. `branch`: how often the run has branched."""
        groups, drawn = self._state.groups.live, self._state.groups.ledger.drawn
        if branch != self._branch:
            self._first, self._branch = 0, branch
        for id in range(self._first, min(drawn, self._first + AT_ONCE)):
            self._first = id
            group = groups.get(id)
            if group is not None and group.state != "batched":
                break
        near = [groups.get(id) for id in range(self._first, min(drawn, self._first + BEHIND))]
        return min((g.started_at for g in near if g is not None and g.state not in ("queued", "batched")), default=None)
