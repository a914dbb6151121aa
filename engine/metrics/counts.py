"""The counters of `collector.RunMetrics`: groups by state, generated groups, figures of replicas; and the histogram.

`collector` updates them once in each tick, and `export` reads them at each scrape, on another thread: a reader must
copy a mapping before it iterates over it. They must not read a clock.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from operator import add

from engine.commands import ResumeGroup
from engine.events import GroupGenerated
from engine.ids import GroupId, ReplicaId
from engine.metrics.names import GROUP_BUCKETS, LIVE_GROUP_STATES, STALENESS_BUCKETS, SYNC_BUCKETS, TOKEN_BUCKETS
from engine.states.group import GROUP
from engine.states.limits import SYNC_MODES
from engine.states.machine import entered
from engine.states.replica import Replica
from engine.states.state import State
from engine.states.step import Step

# -- histograms --------------------------------------------------------------------------------------------------------


TOGETHER = 1024
"""Number of values that are counted together."""


class Histogram:
    """Counts values up to each bucket bound, and keeps a group as the exemplar of a bucket.

    `observe` only keeps the values. They are counted together, which is cheaper, and at each `read`, on any thread.
    """

    __slots__ = ("_kept", "bounds", "examples")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.examples: dict[int, tuple[float, GroupId]] = {}
        """(value, group) by place of the bucket among `bounds`; the last bucket has no bound."""
        self._kept: tuple[tuple[int, ...], float, list[float]] = ((0,) * (len(bounds) + 1), 0.0, [])
        """What `read` returns without the newest values, and these. It is replaced as a whole, so that a reader takes
        each value once."""

    def observe(self, values: Sequence[float], groups: Sequence[GroupId] = ()) -> None:
        """Add values. `groups`: the group that each belongs to; the largest value becomes an exemplar."""
        newest = self._kept[2]
        newest.extend(values)
        if groups:
            largest = max(values)
            self.examples[bisect_left(self.bounds, largest)] = (largest, groups[values.index(largest)])
        if len(newest) >= TOGETHER:
            self._kept = (*self.read(), [])

    def read(self) -> tuple[tuple[int, ...], float]:
        """The number of values up to each bound, then of all values; and their sum."""
        counts, total, newest = self._kept
        values = sorted(newest)
        more = [*(bisect_right(values, bound) for bound in self.bounds), len(values)]
        return tuple(map(add, counts, more)), total + sum(values)


# -- replicas ----------------------------------------------------------------------------------------------------------


PAUSE_ENDS = ("installed", "revert", "lose")
"""Triggers of a replica that end its pause for new weights."""


class ReplicaCounts:
    """Figures by replica over all its restarts, besides its own record, and the duration of weight syncs."""

    def __init__(self) -> None:
        self.resumed: Counter[ReplicaId] = Counter()
        self.pause_s: dict[str, dict[ReplicaId, float]] = {mode: {} for mode in SYNC_MODES}
        self.sync_s = {mode: Histogram(SYNC_BUCKETS) for mode in SYNC_MODES}
        self._pausing: dict[ReplicaId, tuple[float, str]] = {}
        """(since when, sync mode) of each replica that pauses for new weights."""

    def on_resume_group(self, command: ResumeGroup, at: float) -> None:
        self.resumed[command.replica] += 1

    def changed(self, replica: Replica, trigger: str, state: State) -> None:
        """A replica changed its state. Time asleep counts as idle slot time, and not as a pause, and a pause in which
        the replica was lost is none."""
        if trigger == "pause":
            self._pausing[replica.id] = state.facts.now, state.limits.sync_mode
        elif trigger in PAUSE_ENDS and replica.id in self._pausing:
            since, mode = self._pausing.pop(replica.id)
            if trigger != "lose":
                self.pause_s[mode][replica.id] = self.pause_s[mode].get(replica.id, 0.0) + state.facts.now - since
            if trigger == "installed":
                self.sync_s[mode].observe([state.facts.now - since])


# -- generated groups --------------------------------------------------------------------------------------------------


TOKEN_RATE_WINDOW_S = 15.0
TOKEN_SAMPLE_S = 0.25


class GeneratedGroups:
    """Figures of generated groups."""

    def __init__(self, state: State) -> None:
        self.response_tokens = Histogram(TOKEN_BUCKETS)
        self.seconds = Histogram(GROUP_BUCKETS)
        """Of groups that were not released at once."""
        self._state = state
        self._samples: deque[tuple[float, int]] = deque([(state.facts.now, self.tokens)], maxlen=256)

    @property
    def tokens(self) -> int:
        """Response tokens of all groups of the run."""
        return sum([replica.tokens for replica in list(self._state.replicas.by_id.values())])

    def count(self, events: Sequence[GroupGenerated], at: float) -> None:
        """Count the groups that were generated in a tick."""
        live, ids = self._state.groups.live, [event.group for event in events]
        self.response_tokens.observe([event.tokens / (event.trainable or 1) for event in events], ids)
        kept = [id for id in ids if id in live]
        self.seconds.observe([at - live[id].started_at for id in kept], kept)
        if at - self._samples[-1][0] >= TOKEN_SAMPLE_S:
            self._samples.append((at, self.tokens))

    def tokens_per_s(self, now: float) -> float:
        """Response tokens per second, over the newest seconds; 0 before the first."""
        samples = list(self._samples)
        before = [sample for sample in samples[:-1] if sample[0] < now - TOKEN_RATE_WINDOW_S]
        at, tokens = before[-1] if before else samples[0]
        return (self.tokens - tokens) / (now - at) if now > at else 0.0


class TrainedGroups:
    """Figures of the groups of trained steps."""

    def __init__(self) -> None:
        self.tokens = 0
        self.staleness = Histogram(STALENESS_BUCKETS)
        self.range: tuple[int, ...] = ()
        """Smallest and largest staleness; empty before the first step."""
        self.newest: tuple[int, ...] = ()
        """Staleness of the groups of the newest step."""

    @property
    def mean(self) -> float | None:
        """Mean staleness; None before the first step."""
        counts, total = self.staleness.read()
        return total / counts[-1] if counts[-1] else None

    def count(self, step: Step) -> None:
        """Count the groups of a step that was trained."""
        self.tokens += step.tokens
        self.staleness.observe(step.staleness, step.groups)
        values = {*self.range, *step.staleness}
        self.newest, self.range = step.staleness, (min(values), max(values))


# -- groups by state ---------------------------------------------------------------------------------------------------


class GroupCounts:
    """Number of groups by state. Safe to read from another thread."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._live = (*LIVE_GROUP_STATES, *state.groups.state_queues.by_name)

    def by_state(self) -> dict[str, int]:
        """Number of groups that have not ended, by state."""
        counts = Counter(group.state for group in list(self._state.groups.live.values()))
        return {state: counts[state] for state in self._live}

    def oldest_started_at(self) -> float | None:
        """When the oldest started group began that is not in a batch; None if there is none."""
        live = list(self._state.groups.live.values())
        return min((group.started_at for group in live if group.state not in ("queued", "batched")), default=None)

    def by_final_state(self) -> dict[str, int]:
        """Number of groups by final state, without those that ended after the point where a resumed run continues.
        Which states those had is not known: their number is, and the most frequent state is assumed."""
        moves, ledger = self._state.moves, self._state.groups.ledger
        counts = {state: entered(moves, "group", state) for state in GROUP.terminal if state != "consumed"}
        undone = sum(counts.values()) - ledger.released
        for state in sorted(counts, key=lambda state: -counts[state]):
            share = max(0, min(undone, counts[state]))
            counts[state] -= share
            undone -= share
        return {"consumed": ledger.consumed, **counts}
