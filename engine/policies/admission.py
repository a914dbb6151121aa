"""Admission: how many new groups start now."""

from engine.policies.registry import register
from engine.states.view import View


@register("admission", "bounds")
class Bounds:
    """As many as the laws allow: slots are kept busy, staleness is kept by the bound alone."""

    def admit(self, view: View, legal: int) -> int:
        return legal
