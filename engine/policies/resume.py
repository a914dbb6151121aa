"""Resume: which parked group resumes first when a slot is free."""

from engine.ids import NO_VERSION
from engine.policies.registry import register
from engine.states.view import GroupView, View

NOTHING_STORED = 2**31
"""Stands for the unfinished trajectories of a group of which nothing is stored: more than any other has."""


@register("resume", "deadline")
class EarliestDeadline:
    """The earliest deadline first: whoever binds first is served first."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        return (group.deadline,)


@register("resume", "fewest-unfinished")
class FewestUnfinished:
    """The group that lacks the fewest trajectories first: it is ready soonest."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        return (group.unfinished or NOTHING_STORED,)


@register("resume", "longest")
class Longest:
    """The group with the most tokens first: it has cost most already."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        return (-group.tokens,)


@register("resume", "stalest")
class Stalest:
    """The group with the oldest token first, or of the oldest admission where it has none."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        return (group.admitted_version if group.oldest_version == NO_VERSION else group.oldest_version,)


@register("resume", "partial-rollout")
class PartialRollout:
    """Fewest unfinished, then longest, then stalest: the order of partial rollout."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        parts = (FewestUnfinished(), Longest(), Stalest())
        return tuple(number for part in parts for number in part.key(view, group))
