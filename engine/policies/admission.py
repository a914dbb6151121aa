"""Admission: how many new groups start now."""

from engine.policies.registry import register
from engine.states.view import View


@register("admission", "bounds")
class Bounds:
    """As many as the laws allow: slots are kept busy, staleness is kept by the bound alone."""

    def admit(self, view: View, legal: int) -> int:
        return legal


@register("admission", "whole-batches")
class WholeBatches:
    """Batch by batch: a new one is begun only where all of it may start, and is then filled as slots come free."""

    def admit(self, view: View, legal: int) -> int:
        batch = view.limits.train_batch_size
        rest = -view.held % batch
        if legal <= rest:
            return legal
        count = rest + (legal - rest) // batch * batch
        last = view.exhausted and view.waiting - count < batch
        return legal if last else count
