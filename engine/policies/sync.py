"""Sync: which replicas install new weights, and when."""

from collections.abc import Sequence

from engine.ids import ReplicaId
from engine.policies.registry import register
from engine.states.view import View


@register("sync", "together")
class Together:
    """Each replica installs new weights as soon as it has received them."""

    def pause(self, view: View, staged: Sequence[ReplicaId], busy: int) -> Sequence[ReplicaId]:
        return staged


@register("sync", "rolling")
class Rolling:
    """One replica at a time; the others keep generating."""

    def pause(self, view: View, staged: Sequence[ReplicaId], busy: int) -> Sequence[ReplicaId]:
        return () if busy else staged[:1]
