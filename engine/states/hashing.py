"""What the state hash is made of beside the groups: the counters, and the few other records.

Called by `state.py`, whose `hash` adds the groups' part, kept as they change.
"""

from itertools import chain
from typing import TYPE_CHECKING, Protocol

from engine.states.digest import digest

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
            state.failed_draws, state.outcome is not None,
        )
    )  # fmt: skip


def digest_records(state: "State") -> int:
    """Of steps, replicas, versions and validations, in their order."""
    records: list[Record] = [
        *state.steps.values(),
        *(state.pools.leases if state.pools.listed else ()),
        *state.fleet.replicas.values(),
        *state.versions.values(),
        state.validations,
        state.kept,
        state.live,
        *state.validations.runs.values(),
    ]
    return digest(tuple(chain.from_iterable(record.identity() for record in records)))
