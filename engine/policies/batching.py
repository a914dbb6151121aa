"""Batching: which ready groups a train step takes.

docs/STALENESS.md derives the rule: for every deadline d, step t must take at least U(d) − (d − t)·B groups with
deadline ≤ d. The policies differ only in the order in which they take groups within this rule.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from engine.ids import GroupId, StepId
from engine.policies.registry import register
from engine.states.view import View


def select_in_order(
    candidates: Iterable[tuple[GroupId, StepId]], requirements: Sequence[tuple[StepId, int, int]], size: int
) -> list[GroupId] | None:
    """Take candidates (group, deadline) in order. Skip one only if its place is needed for an earlier deadline.

    `outstanding[d]` is the number of groups that deadline d still needs. Requirements are cumulative, so the places
    that are still needed are the largest of these numbers. Returns None if a deadline does not have enough ready
    groups.
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
    """Take groups in the order in which they became ready, as long as every deadline can still be met."""

    def select(self, view: View, size: int) -> Sequence[GroupId] | None:
        requirements = view.requirements()
        if not requirements:
            return list(islice(view.ready_ids(), size))
        return select_in_order(view.ready_deadlines(), requirements, size)


@register("batching", "freshest")
class Freshest:
    """Latest deadline first: the least stale batch that the laws allow. Older groups wait until a deadline binds."""

    def select(self, view: View, size: int) -> Sequence[GroupId] | None:
        requirements = view.requirements()
        if any(must > ready for _, must, ready in requirements):
            return None  # check before sorting: this is called after every event
        return select_in_order(sorted(view.ready_deadlines(), key=lambda c: -c[1]), requirements, size)


TAKEN_OR_WAITING = ("queued", "generated", "batched")
"""States of a group for which strict order does not wait. In all other live states the group is in progress."""


@register("batching", "strict-order")
class StrictOrder:
    """In the order drawn: a step waits until every group drawn before the newest group of its batch is finished."""

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
