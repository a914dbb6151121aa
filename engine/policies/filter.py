"""Filter: whether a generated group is used for training. A filtered group frees its place, so another one starts."""

from engine.events import GroupGenerated
from engine.policies.registry import register
from engine.states.view import View

SPREAD = 1e-6
"""Rewards that differ by less than this count as equal."""


@register("filter", "none")
class KeepAll:
    """Use every group for training."""

    def keep(self, view: View, outcome: GroupGenerated) -> bool:
        return True


@register("filter", "zero-variance")
class ZeroVariance:
    """Drop groups of several live trajectories with equal rewards: all their group-relative advantages are zero."""

    def keep(self, view: View, outcome: GroupGenerated) -> bool:
        return outcome.live <= 1 or outcome.reward_spread > SPREAD
