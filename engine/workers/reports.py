"""Builds the events about prompt groups: lengths, versions and rewards, never tokens.

`replica.ReplicaWorker` calls it with groups that `group_checks` has accepted.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.events import GroupAborted, GroupGenerated, OrderDone, PrefixStored
from engine.ids import NO_VERSION, Incarnation, ReplicaId
from engine.trajectory import TrajectoryGroup

# -- acknowledgments ---------------------------------------------------------------------------------------------------


class DoneOrders:
    """Batches acknowledgments. `emit` receives the events."""

    def __init__(self, emit: Callable[[OrderDone], None]) -> None:
        self._emit = emit
        self._numbers: list[int] = []

    def add(self, *numbers: int) -> None:
        """Acknowledge executed orders."""
        if not self._numbers:
            asyncio.get_running_loop().call_soon(self._send)
        self._numbers += numbers

    async def add_after(self, work: Callable[[], Awaitable[object]], numbers: Sequence[int]) -> None:
        """Acknowledge orders once `work()` has returned. If it raises, this raises the same and they stay open."""
        await work()
        self.add(*numbers)

    def _send(self) -> None:
        numbers, self._numbers = self._numbers, []
        self._emit(OrderDone(orders=tuple(numbers)))


# -- events about groups -----------------------------------------------------------------------------------------------


def generated_event(
    group: TrajectoryGroup, attempt: int, replica: ReplicaId, incarnation: Incarnation
) -> GroupGenerated:
    """The `GroupGenerated` event of a group. Its rewards come from `reward_figures`."""
    oldest, newest = group.versions() or (NO_VERSION, NO_VERSION)
    live, mean, spread = reward_figures(group)
    return GroupGenerated(
        group=group.group,
        attempt=attempt,
        replica=replica,
        incarnation=incarnation,
        tokens=group.tokens,
        oldest_version=oldest,
        newest_version=newest,
        live=live,
        reward_mean=mean,
        reward_spread=spread,
    )


def reward_figures(group: TrajectoryGroup) -> tuple[int, float, float]:
    """Number of rollouts with tokens to train on, and the mean and spread of their rewards; 0 if there are none."""
    rewards = [float(r[0].reward or 0.0) for r in group.rollouts if any(1 in t.loss_mask for t in r)]
    if not rewards:
        return 0, 0.0, 0.0
    return len(rewards), sum(rewards) / len(rewards), max(rewards) - min(rewards)


def aborted_event(group: TrajectoryGroup, attempt: int, replica: ReplicaId, incarnation: Incarnation) -> GroupAborted:
    return GroupAborted(attempt=attempt, replica=replica, incarnation=incarnation, **_figures(group))


def prefix_event(group: TrajectoryGroup, attempt: int, replica: ReplicaId, incarnation: Incarnation) -> PrefixStored:
    return PrefixStored(attempt=attempt, replica=replica, incarnation=incarnation, **_figures(group))


def _figures(group: TrajectoryGroup) -> dict[str, Any]:
    oldest, newest = group.versions() or (NO_VERSION, NO_VERSION)
    unfinished = sum(not rollout[-1].finished for rollout in group.rollouts)
    return {
        "group": group.group,
        "tokens": group.tokens,
        "oldest_version": oldest,
        "newest_version": newest,
        "unfinished": unfinished,
    }
