"""Admission: how many new groups start now."""

from engine.policies.registry import register
from engine.states.view import View


@register("admission", "bounds")
class Bounds:
    """Start as many groups as the laws allow: slots stay busy, and only the bound limits staleness."""

    def admit(self, view: View, legal: int) -> int:
        return legal


@register("admission", "whole-batches")
class WholeBatches:
    """Start whole batches: a new batch begins only if all its groups may start. It then fills as slots become free."""

    def admit(self, view: View, legal: int) -> int:
        batch = view.limits.train_batch_size
        rest = -view.held % batch
        if legal <= rest:
            return legal
        count = rest + (legal - rest) // batch * batch
        last = view.exhausted and view.waiting - count < batch
        return legal if last else count
