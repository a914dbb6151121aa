"""Resume: which parked group resumes first when a slot is free."""

from engine.ids import NO_VERSION
from engine.policies.registry import register
from engine.states.view import GroupView, View

NOTHING_STORED = 2**31
"""Used as the number of unfinished trajectories of a group that has nothing stored: more than any other group has."""


@register("resume", "deadline")
class EarliestDeadline:
    """The group with the earliest deadline first."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        return (group.deadline,)


@register("resume", "fewest-unfinished")
class FewestUnfinished:
    """The group with the fewest unfinished trajectories first: it is ready soonest."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        return (group.unfinished or NOTHING_STORED,)


@register("resume", "longest")
class Longest:
    """The group with the most tokens first: most work has gone into it."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        return (-group.tokens,)


@register("resume", "stalest")
class Stalest:
    """The group with the oldest token first. A group without tokens counts by the version it was admitted at."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        return (group.admitted_version if group.oldest_version == NO_VERSION else group.oldest_version,)


@register("resume", "partial-rollout")
class PartialRollout:
    """Fewest unfinished, then longest, then stalest: the order of partial rollout."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        parts = (FewestUnfinished(), Longest(), Stalest())
        return tuple(number for part in parts for number in part.key(view, group))
