"""Filter: whether a generated group is worth training on. A filtered group gives its place back, so another one is
admitted."""

from engine.events import GroupGenerated
from engine.policies.registry import register
from engine.states.view import View

SPREAD = 1e-6
"""Rewards closer together than this are equal."""


@register("filter", "none")
class KeepAll:
    """Every group is trained on."""

    def keep(self, view: View, outcome: GroupGenerated) -> bool:
        return True


@register("filter", "zero-variance")
class ZeroVariance:
    """Drops groups of several live trajectories with equal rewards: their group-relative advantages are all zero."""

    def keep(self, view: View, outcome: GroupGenerated) -> bool:
        return outcome.live <= 1 or outcome.reward_spread > SPREAD
