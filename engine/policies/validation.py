"""Validation: which weights versions are validated during the run."""

from engine.ids import Version
from engine.policies.registry import register
from engine.states.view import View


@register("validation", "every")
class Every:
    """Each version that is the first to complete another `validation.every` train steps; version 0 if `at_start`."""

    def due(self, view: View, version: Version, steps_before: int, steps: int) -> bool:
        limits = view.limits.validation
        if limits is None:
            return False
        if version == 0:
            return limits.at_start
        return limits.every > 0 and steps // limits.every > steps_before // limits.every
