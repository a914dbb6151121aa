"""Deadline: what becomes of stragglers that alone keep a step from forming.

All but `wait` bias the data against long or hard prompts; what they did is counted (`groups_dropped`,
`groups_truncated`).
"""

from collections.abc import Sequence

from engine.policies.registry import register
from engine.states.view import GroupView, View

DECISIONS = ("wait", "truncate", "drop", "shrink")


class _Always:
    """One decision, whatever the stragglers."""

    acts = True
    decision = "wait"

    def decide(self, view: View, stragglers: Sequence[GroupView]) -> str:
        return self.decision


@register("deadline", "wait")
class Wait(_Always):
    """The step waits: no bias."""

    acts = False


@register("deadline", "truncate")
class Truncate(_Always):
    """Finish them with the tokens they have."""

    decision = "truncate"


@register("deadline", "drop")
class Drop(_Always):
    """Drop them; other groups fill the batch."""

    decision = "drop"


@register("deadline", "shrink")
class Shrink(_Always):
    """Drop them and train the step on fewer groups."""

    decision = "shrink"
