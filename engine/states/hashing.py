"""The state hash: the figures of `State`, the groups and the replicas, each record's part kept as it changes, and the
few other records.

Called by `state.py`. An event costs what it touches, however many groups and replicas there are.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.states.census import digest_replicas
from engine.states.group import Group
from engine.states.tree import MASK, digest, digest_of, hashed, hashed_values

if TYPE_CHECKING:
    from engine.states.state import State


_values = hashed(Group)


class StateHash:
    """64 bits of the whole state, brought up to date after every event with what the event changed."""

    def __init__(self, state: "State") -> None:
        self._state = state
        self.begin(())

    def begin(self, groups: Iterable[Group]) -> None:
        """Make it anew; these groups have a part in it."""
        self.touched = dict.fromkeys(groups)
        """Groups of which a field changed."""
        self._sum = 0
        self.others: int | None = None
        """The part of steps, versions and the other records that there are few of; None once one of them changed."""

    def settle(self) -> None:
        """Take in the groups that this event touched."""
        live = self._state.groups
        for group in self.touched:
            new = digest(_values(group)) if group.id in live and group.begun else 0
            self._sum += new - group._digest
            group._digest = new
        self.touched.clear()

    def value(self) -> int:
        if self.others is None:
            self.others = self._digest_others()
        return self._total(self._sum + self._state.census.digests + self._state.orders.digest, self.others)

    def from_scratch(self) -> int:
        """The same figure from the records alone; differs from `value` only by a defect."""
        state = self._state
        groups = sum(digest_of(group) for group in state.groups.values() if group.begun)
        kept = groups + digest_replicas(state) + state.orders.digest_from_scratch()
        return self._total(kept, self._digest_others())

    def _digest_others(self) -> int:
        return digest(list(map(hashed_values, self._state.small_records())))

    def _total(self, kept: int, others: int) -> int:
        state = self._state
        figures = (hashed_values(state), state.ledger.drawn, state.ledger.count, state.orders.next_number)
        return (kept + others + digest(figures) + state.policy_books) & MASK
