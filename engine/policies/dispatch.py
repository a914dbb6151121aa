"""Dispatch: which replica a group starts or resumes on."""

from engine.ids import GroupId, ReplicaId, Version
from engine.policies.registry import register
from engine.states.view import View


@register("dispatch", "least-loaded")
class LeastLoaded:
    """The replica with the smallest share of busy slots, then the smallest id. Avoids the replica that the group failed
    on, if possible."""

    def choose(self, view: View, oldest: Version, group: GroupId) -> ReplicaId | None:
        return view.least_loaded(oldest, avoid=view.failed_on(group))


@register("dispatch", "newest-weights")
class NewestWeights:
    """The replica with the newest weights, then the least loaded. Tokens are fresher, but the load is uneven during a
    rolling sync."""

    def choose(self, view: View, oldest: Version, group: GroupId) -> ReplicaId | None:
        return view.newest_weights(oldest, avoid=view.failed_on(group))
