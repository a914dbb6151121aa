"""Number of prompt groups by state, from counters instead of iterating over groups.

Used by `collector.RunMetrics`. Groups are counted once, when a run starts or resumes.
"""

from collections import Counter
from collections.abc import Iterable

from engine.events import RunResumed
from engine.ids import GroupId
from engine.metrics.labels import LIVE_GROUP_STATES
from engine.metrics.transitions import RELEASED, Transitions
from engine.states.state import State


class GroupCounts:
    """Number of groups by state. Safe to read from another thread."""

    def __init__(self, state: State, transitions: Transitions) -> None:
        self._state = state
        self._transitions = transitions
        self._live = (*LIVE_GROUP_STATES, *state.stages.by_name)
        self._undone = dict(transitions.undone)
        """Groups by final state, of those that ended after the point from which a resumed run continued."""
        self._undo(id for id in transitions.released or () if id in state.groups)
        self._begin()

    def resumed(self, event: RunResumed) -> None:
        """Count again: a resume changed states of groups without triggers."""
        self._undo(event.released)
        self._begin()

    def by_state(self) -> dict[str, int]:
        """Number of groups that have not ended, by state."""
        drawn = self._state.ledger.drawn - self._drawn_before
        net = self._transitions.net
        counts = {state: self._before[state] + net("group", state) for state in self._live}
        counts["queued"] += drawn
        return {state: max(0, count) for state, count in counts.items()}

    def ended(self) -> dict[str, int]:
        """Number of groups by final state, without those that ended after the point where a resumed run continues."""
        entered = self._transitions.entered
        released = {state: entered("group", state) - self._undone[state] for state in RELEASED}
        return {"consumed": self._state.ledger.consumed, **released}

    def _begin(self) -> None:
        """Groups by present state, minus what `transitions` has counted already."""
        counts = Counter(group.state for group in self._state.groups.values())
        self._before = {state: counts[state] - self._transitions.net("group", state) for state in self._live}
        self._drawn_before = self._state.ledger.drawn

    def _undo(self, groups: Iterable[GroupId]) -> None:
        """Take back the end of these groups. If they ended before the snapshot at which the replay began, their final
        state is unknown: the sum is exact, and the most frequent state is assumed."""
        known, undone = self._transitions.released or {}, self._undone
        for id in groups:
            if id in known:
                undone[known[id]] += 1
        counts = {state: self._transitions.entered("group", state) - undone[state] for state in RELEASED}
        rest = sum(counts.values()) - self._state.ledger.released
        for state in sorted(counts, key=lambda state: -counts[state]):
            share = max(0, min(rest, counts[state]))
            undone[state] += share
            rest -= share


BEHIND = 64
"""Number of groups that are checked after the oldest one: a group drawn later may have started earlier."""
AT_ONCE = 20_000


class OldestGroup:
    """Finds the oldest started group that is not in a batch, nearly always exactly. A search continues where the last
    one ended, because a group that was taken or has ended stays so until the run branches."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._first = 0
        self._branch = 0

    def started_at(self, branch: int) -> float | None:
        """When the oldest such group started; None if there is none. `branch`: how often the run has branched."""
        groups, drawn = self._state.groups, self._state.ledger.drawn
        if branch != self._branch:
            self._first, self._branch = 0, branch
        for id in range(self._first, min(drawn, self._first + AT_ONCE)):
            self._first = id
            group = groups.get(id)
            if group is not None and group.state != "batched":
                break
        near = [groups.get(id) for id in range(self._first, min(drawn, self._first + BEHIND))]
        return min((g.started_at for g in near if g is not None and g.state not in ("queued", "batched")), default=None)
