"""Batching: which ready groups a train step takes.

The rule is derived in docs/STALENESS.md: step t must take, for every deadline d, at least U(d) − (d −
t)·B groups with deadline ≤ d. Within that, `deadline-first` is a matter of order only.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from engine.ids import GroupId, StepId
from engine.policies.registry import register
from engine.states.view import View


def select_in_order(
    candidates: Iterable[tuple[GroupId, StepId]], requirements: Sequence[tuple[StepId, int, int]], size: int
) -> list[GroupId] | None:
    """Take candidates (group, deadline) in order, passing one over only when its place is needed for an earlier
    deadline.

    `outstanding[d]` is what deadline d must still get; the groups still needed are never fewer than the largest of
    them, since requirements are cumulative. None when a deadline lacks ready groups.
    """
    if any(must > ready for _, must, ready in requirements):
        return None
    outstanding = {deadline: must for deadline, must, _ in requirements}
    chosen: list[GroupId] = []
    for group, deadline in candidates:
        left = size - len(chosen)
        if not left:
            break
        need = max(outstanding.values(), default=0)
        if need == left and any(must == need and d < deadline for d, must in outstanding.items()):
            continue
        chosen.append(group)
        for d in outstanding:
            if d >= deadline:
                outstanding[d] -= 1
    return chosen


@register("batching", "deadline-first")
class DeadlineFirst:
    """First ready first, as long as every deadline keeps enough places behind it."""

    def select(self, view: View, size: int) -> Sequence[GroupId] | None:
        requirements = view.requirements()
        if not requirements:
            return list(islice(view.ready_ids(), size))
        return select_in_order(view.ready_deadlines(), requirements, size)


@register("batching", "freshest")
class Freshest:
    """Latest deadline first: the least stale batch the laws allow; older groups wait until their deadline binds."""

    def select(self, view: View, size: int) -> Sequence[GroupId] | None:
        requirements = view.requirements()
        if any(must > ready for _, must, ready in requirements):
            return None  # before the sort, since every event asks again
        return select_in_order(sorted(view.ready_deadlines(), key=lambda c: -c[1]), requirements, size)


TAKEN_OR_WAITING = ("queued", "generated", "batched")
"""States of a live group for which strict order does not wait; in all others it is in progress."""


@register("batching", "strict-order")
class StrictOrder:
    """In the order drawn: a step waits until no group drawn before its batch is unfinished."""

    def select(self, view: View, size: int) -> Sequence[GroupId] | None:
        candidates = sorted(view.ready_deadlines())
        chosen = select_in_order(candidates, view.requirements(), size)
        if not chosen:
            return None
        newest = max(chosen)
        for group in view.groups():
            if group.id > newest:
                return chosen
            if group.state not in TAKEN_OR_WAITING:
                return None
        return chosen
