"""Deadline: what to do with stragglers when a step waits only for them.

Every policy except `wait` biases the data against long or hard prompts. The metric `engine_groups_ended_total` counts
the dropped groups.
"""

from collections.abc import Sequence

from engine.policies.registry import register
from engine.states.view import GroupView, View

DECISIONS = ("wait", "truncate", "drop", "shrink")


class _Always:
    """The same decision for all stragglers."""

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
    """Finish them with the tokens that they have."""

    decision = "truncate"


@register("deadline", "drop")
class Drop(_Always):
    """Drop them; other groups fill the batch."""

    decision = "drop"


@register("deadline", "shrink")
class Shrink(_Always):
    """Drop them and train the step on fewer groups."""

    decision = "shrink"
