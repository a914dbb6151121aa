"""What the state hash is made of: the counters, the groups and the replicas, each record's part kept as it changes, and
the few other records.

Called by `state.py`. An event costs what it touches, however many groups and replicas there are.
"""

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from engine.states.census import digest_replicas
from engine.states.digest import MASK, digest
from engine.states.group import Group

if TYPE_CHECKING:
    from engine.states.state import State


class Record(Protocol):
    """Anything that has a part in the hash."""

    def identity(self) -> tuple[int, ...]:
        """What the hash is made of."""


def digest_figures(state: "State", others: int) -> int:
    """Of the counters; `others` is that of the records."""
    if state.shows_reward and state.step_reward is not None:
        others += digest((), (state.step_reward,))
    return others + digest(
        (
            state.ledger.drawn, *state.ledger.count, state.started, state.exhausted, state.steps_batched,
            state.steps_trained, state.latest_version, state.publishing_attempt, state.publish_failures,
            state.checkpoint_ordered, state.orders.next_number, state.next_timer, state.next_ready,
            state.stale_echoes, state.failed_in_a_row, state.filtered_in_a_row, bool(state.none_left),
            state.failed_draws, state.updates_in[state.steps_trained], state.outcome is not None,
            state.restarts, state.restarted_at,
        )
    )  # fmt: skip


def digest_records(state: "State") -> int:
    """Of steps, versions and validations, in their order: a few records, each of a few numbers."""
    records: list[Record] = [
        *state.steps.values(),
        *(state.pools.leases if state.pools.listed else ()),
        *state.versions.values(),
        state.validations,
        state.kept,
        state.checkpoints,
        state.live,
        state.clocks,
        *state.processes.values(),
        *state.validations.runs.values(),
    ]
    return digest(tuple(chain.from_iterable(record.identity() for record in records)))


class StateHash:
    """64 bits of the whole state, brought up to date after every event with what the event touched."""

    __slots__ = ("_others", "_state", "_sum", "_touched")

    def __init__(self, state: "State") -> None:
        self._state = state
        self.begin(())

    def begin(self, groups: Iterable[Group]) -> None:
        """Make it anew; these groups have a part in it."""
        self._touched = list(groups)
        self._sum = 0
        self._others: int | None = None

    def touch(self, group: Group) -> None:
        """A field of a group changed."""
        self._touched.append(group)

    def disturb(self) -> None:
        """A step, version, validation or something else that there are few of may have changed."""
        self._others = None

    def settle(self) -> None:
        """Take in the groups that this event touched."""
        live = self._state.groups
        for group in self._touched:
            new = digest(group.identity(), group.figures()) if group.id in live and group.begun else 0
            self._sum += new - group.digest
            group.digest = new
        self._touched.clear()

    def value(self) -> int:
        if self._others is None:
            self._others = digest_records(self._state)
        return self._total(self._sum + self._state.census.digests + self._state.orders.digest, self._others)

    def from_scratch(self) -> int:
        """The same figure from the records alone; differs from `value` only by a defect."""
        state = self._state
        groups = sum(digest(g.identity(), g.figures()) for g in state.groups.values() if g.begun)
        kept = groups + digest_replicas(state) + state.orders.digest_from_scratch()
        return self._total(kept, digest_records(state))

    def _total(self, kept: int, others: int) -> int:
        return (kept + digest_figures(self._state, others) + self._state.policy_books) & MASK
