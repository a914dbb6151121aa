"""The counters of `collector.RunMetrics`: groups by state, generated groups, figures of replicas; and the histogram.

`collector` updates them once in each tick, and `export` reads them at each scrape, on another thread: a reader must
copy a mapping before it iterates over it. They must not read a clock.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence

from engine.commands import PauseReplica, ResumeGroup, ResumeReplica
from engine.events import GroupAborted, GroupFailed, GroupGenerated, ProcessLost, SyncFailed, WeightsInstalled
from engine.ids import GroupId, ReplicaId
from engine.metrics.names import GROUP_BUCKETS, LIVE_GROUP_STATES, STALENESS_BUCKETS, SYNC_BUCKETS, TOKEN_BUCKETS
from engine.states.group import GROUP
from engine.states.limits import SYNC_MODES
from engine.states.machine import Moves
from engine.states.process import REPLICA
from engine.states.state import State

# -- histograms --------------------------------------------------------------------------------------------------------


class Histogram:
    """Counts values by the smallest bucket bound that they do not exceed, and keeps an exemplar for each bucket."""

    __slots__ = ("bounds", "counts", "examples", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts: Counter[int] = Counter()
        """By place of the bucket among `bounds`; the last bucket has no bound."""
        self.examples: dict[int, tuple[float, GroupId]] = {}
        """(value, group) of the newest value in a bucket, if given."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.add(value, 1)

    def observe_groups(self, values: Sequence[float], groups: Sequence[GroupId]) -> None:
        """Count a value of each group, oldest first."""
        buckets = [bisect_left(self.bounds, value) for value in values]
        self.counts.update(buckets)
        self.total += sum(values)
        for bucket, place in dict(zip(buckets, range(len(buckets)), strict=True)).items():
            self.examples[bucket] = (values[place], groups[place])

    def add(self, value: float, count: int, group: GroupId | None = None) -> None:
        """Count a value as often as `count` says. `group`: the newest group that it belongs to."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += count
        self.total += value * count
        if group is not None:
            self.examples[bucket] = (value, group)

    def cumulative(self) -> list[tuple[str, float, tuple[float, GroupId] | None]]:
        """(upper bound, number of values up to it, exemplar) of each bucket, as Prometheus counts; the last bound is
        `+Inf`."""
        rows, running = [], 0
        for bucket, bound in enumerate((*map(repr, self.bounds), "+Inf")):
            running += self.counts[bucket]
            rows.append((bound, float(running), self.examples.get(bucket)))
        return rows


# -- replicas ----------------------------------------------------------------------------------------------------------


class ReplicaCounts:
    """Figures by replica over all its restarts, besides its own record, and the duration of weight syncs."""

    def __init__(self) -> None:
        self.resumed: Counter[ReplicaId] = Counter()
        self.aborted: Counter[ReplicaId] = Counter()
        self.failed: Counter[ReplicaId] = Counter()
        self.pause_s: dict[str, dict[ReplicaId, float]] = {mode: {} for mode in SYNC_MODES}
        self.sync_s = {mode: Histogram(SYNC_BUCKETS) for mode in SYNC_MODES}
        self._pausing: dict[ReplicaId, tuple[float, str]] = {}

    def on_abort(self, event: GroupAborted) -> None:
        self.aborted[event.replica] += 1

    def on_failure(self, event: GroupFailed) -> None:
        self.failed[event.replica] += 1

    def on_resume_group(self, command: ResumeGroup, at: float) -> None:
        self.resumed[command.replica] += 1

    def on_resume(self, command: ResumeReplica, at: float) -> None:
        """The pause was not for new weights."""
        self._pausing.pop(command.replica, None)

    def on_pause(self, command: PauseReplica, at: float) -> None:
        if command.mode != "sleep":  # time asleep counts as idle slot time
            self._pausing[command.replica] = (at, command.mode)

    def on_install(self, event: WeightsInstalled) -> None:
        paused = self._unpause(event.replica, event.at)
        if paused is not None:
            mode, seconds = paused
            self.sync_s[mode].observe(seconds)

    def on_revert(self, event: SyncFailed) -> None:
        self._unpause(event.replica, event.at)

    def on_loss(self, event: ProcessLost) -> None:
        if event.kind == REPLICA:
            self._pausing.pop(event.index, None)

    def _unpause(self, replica: ReplicaId, at: float) -> tuple[str, float] | None:
        began = self._pausing.pop(replica, None)
        if began is None:
            return None
        since, mode = began
        self.pause_s[mode][replica] = self.pause_s[mode].get(replica, 0.0) + at - since
        return mode, at - since


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
        self._samples: deque[tuple[float, int]] = deque([(state.now, self.tokens)], maxlen=256)

    @property
    def tokens(self) -> int:
        """Response tokens of all groups of the run."""
        return sum([replica.tokens for replica in list(self._state.replicas.by_id.values())])

    def count(self, events: Sequence[GroupGenerated], at: float) -> None:
        """Count the groups that were generated in a tick."""
        live, ids = self._state.groups.live, [event.group for event in events]
        self.response_tokens.observe_groups([event.tokens / (event.trainable or 1) for event in events], ids)
        kept = [live[id] for id in ids if id in live]
        self.seconds.observe_groups([at - group.started_at for group in kept], [group.id for group in kept])
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
        groups = sum(list(self.staleness.counts.values()))
        return self.staleness.total / groups if groups else None

    def count(self, groups: Sequence[GroupId], staleness: Sequence[int], tokens: int) -> None:
        """Count the groups of a step, with the staleness of each."""
        self.tokens += tokens
        if not staleness:
            return
        newest = dict(zip(staleness, groups, strict=True))
        for value, count in Counter(staleness).items():
            self.staleness.add(value, count, newest[value])
        values = (*self.range, *newest)
        self.newest, self.range = tuple(staleness), (min(values), max(values))


# -- groups by state ---------------------------------------------------------------------------------------------------


def entered(moves: Moves, machine: str, state: str) -> int:
    """Number of times that any record entered a state. Safe on any thread."""
    return sum(n for (name, _, target), n in list(moves.items()) if name == machine and target == state)


def group_counts(state: State) -> dict[str, int]:
    """Number of groups aborted, resumed, filtered and failed so far, for the row of a step."""
    names = ("aborted", "resumed", "filtered", "failed")
    return {f"groups_{name}": entered(state.moves, "group", name) for name in names}


class GroupCounts:
    """Number of groups by state. Safe to read from another thread."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._live = (*LIVE_GROUP_STATES, *state.groups.stages.by_name)
        self.begin()

    def begin(self) -> None:
        """Visit all groups. Call it again after a resume, which changes states of groups without triggers."""
        counts = Counter(group.state for group in self._state.groups.live.values())
        self._before = {state: counts[state] - self._net(state) for state in self._live}
        """Groups by present state, minus what the moves count already."""
        self._drawn_before = self._state.groups.ledger.drawn

    def by_state(self) -> dict[str, int]:
        """Number of groups that have not ended, by state."""
        counts = {state: self._before[state] + self._net(state) for state in self._live}
        counts["queued"] += self._state.groups.ledger.drawn - self._drawn_before
        return {state: max(0, count) for state, count in counts.items()}

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

    def _net(self, state: str) -> int:
        """Moves of groups into a state, minus those out of it."""
        moves = list(self._state.moves.items())
        return sum(n * ((to == state) - (source == state)) for (name, source, to), n in moves if name == "group")


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

    def started_at(self) -> float | None:
        """When the oldest such group started; None if there is none."""
        groups, drawn = self._state.groups.live, self._state.groups.ledger.drawn
        branch = self._state.recoveries["branched"]
        if branch != self._branch:
            self._first, self._branch = 0, branch
        for id in range(self._first, min(drawn, self._first + AT_ONCE)):
            self._first = id
            group = groups.get(id)
            if group is not None and group.state != "batched":
                break
        near = [groups.get(id) for id in range(self._first, min(drawn, self._first + BEHIND))]
        return min((g.started_at for g in near if g is not None and g.state not in ("queued", "batched")), default=None)
