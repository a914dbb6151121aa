"""The built-in policies, decision by decision. docs/EXTENDING.md shows how to add another."""

from collections.abc import Iterable, Sequence
from itertools import islice

from engine.events import GroupGenerated
from engine.ids import NO_VERSION, GroupId, ReplicaId, StepId, Version
from engine.policies.registry import register
from engine.states.view import GroupView, ReplicaView, View

# -- admission: how many new groups start now --------------------------------------------------------------------------


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


# -- dispatch: which replica a group starts or resumes on --------------------------------------------------------------


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


# -- concurrency: how many groups may run on a replica at once ---------------------------------------------------------


@register("concurrency", "slots")
class Slots:
    """As many as it has slots."""

    def limit(self, view: View, replica: ReplicaView) -> int:
        return replica.slots


GROW, TRIM, CUT = 0.6, 0.8, 0.9
"""Shares of the KV cache in use: below the first, a limit grows; above the second, it shrinks; above the third, it is
halved."""


@register("concurrency", "kv-cache")
class KvCache:
    """As many as fit into its KV cache. All slots at first. After a report below 60 %, a quarter more (at least one) if
    as many groups run as the limit allows; from 60 to 80 %, the same; above 80 %, one less than run now; above 90 %,
    half of those that run now. While more groups run than the limit allows, it does not shrink further."""

    def limit(self, view: View, replica: ReplicaView) -> int:
        used, running, limit = replica.cache_used, replica.running, replica.limit
        if not limit:
            return replica.slots
        if used < GROW:
            return min(replica.slots, limit + max(1, limit // 4)) if running >= limit else limit
        if used <= TRIM or running > limit:
            return limit
        return max(1, running // 2 if used > CUT else running - 1)


# -- filter: whether a generated group is used for training ------------------------------------------------------------
# A filtered group frees its place, so another one starts.

SPREAD = 1e-6
"""Rewards that differ by less than this count as equal."""


@register("filter", "none")
class KeepAll:
    """Use every group for training."""

    def keep(self, view: View, outcome: GroupGenerated) -> bool:
        return True


@register("filter", "zero-variance")
class ZeroVariance:
    """Drop groups of several trainable trajectories with equal rewards: all group-relative advantages are zero."""

    def keep(self, view: View, outcome: GroupGenerated) -> bool:
        return outcome.trainable <= 1 or outcome.reward_spread > SPREAD


# -- resume: which parked group resumes first when a slot is free ------------------------------------------------------

NOTHING_STORED = 2**31
"""Used as the number of unfinished trajectories of a group that has nothing stored: more than any other group has."""


@register("resume", "deadline")
class EarliestDeadline:
    """The group with the earliest deadline first."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        return (group.deadline,)


@register("resume", "fewest-unfinished")
class FewestUnfinished:
    """The group with the fewest unfinished trajectories first: it is ready soonest."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        return (group.unfinished or NOTHING_STORED,)


@register("resume", "longest")
class Longest:
    """The group with the most tokens first: most work has gone into it."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        return (-group.tokens,)


@register("resume", "stalest")
class Stalest:
    """The group with the oldest token first. A group without tokens counts by the version it was admitted at."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        return (group.admitted_version if group.oldest_version == NO_VERSION else group.oldest_version,)


@register("resume", "nearest-end")
class NearestEnd:
    """Fewest unfinished, then longest, then stalest."""

    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        parts = (FewestUnfinished(), Longest(), Stalest())
        return tuple(number for part in parts for number in part.key(view, group))


# -- retry: whether a group whose attempt failed gets another one ------------------------------------------------------


@register("retry", "budgets")
class Budgets:
    """One budget per cause: few attempts for a bad prompt, more for a bad machine."""

    def retry(self, view: View, group: GroupView, cause: str) -> bool:
        if cause == "data":
            return group.data_failures < view.limits.data_attempts
        return group.infrastructure_failures < view.limits.infrastructure_attempts


# -- batching: which ready groups a train step takes -------------------------------------------------------------------
# docs/STALENESS.md derives the rule: for every deadline d, step t must take at least U(d) − (d − t)·B groups with
# deadline ≤ d. The policies differ only in the order in which they take groups within this rule.


def select_in_order(
    candidates: Iterable[tuple[GroupId, StepId]], requirements: Sequence[tuple[StepId, int, int]], size: int
) -> list[GroupId] | None:
    """Take candidates (group, deadline) in order. Skip one only if its place is needed for an earlier deadline.

    `outstanding[d]` is the number of groups that deadline d still needs. Requirements are cumulative, so the places
    that are still needed are the largest of these numbers. Returns None if a deadline does not have enough ready
    groups.
    """
    if any(must > ready for _, must, ready in requirements):
        return None
    outstanding = {deadline: must for deadline, must, _ in requirements}
    chosen: list[GroupId] = []
    for group, deadline in candidates:
        left = size - len(chosen)
        if not left:
            break
        need = max(outstanding.values(), default=0)
        if need == left and any(must == need and d < deadline for d, must in outstanding.items()):
            continue
        chosen.append(group)
        for d in outstanding:
            if d >= deadline:
                outstanding[d] -= 1
    return chosen


@register("batching", "deadline-first")
class DeadlineFirst:
    """Take groups in the order in which they became ready, as long as every deadline can still be met."""

    def select(self, view: View, size: int) -> Sequence[GroupId] | None:
        requirements = view.requirements()
        if not requirements:
            return list(islice(view.ready_ids(), size))
        return select_in_order(view.ready_deadlines(), requirements, size)


@register("batching", "freshest")
class Freshest:
    """Latest deadline first: the least stale batch that the laws allow. Older groups wait until a deadline binds."""

    def select(self, view: View, size: int) -> Sequence[GroupId] | None:
        requirements = view.requirements()
        if any(must > ready for _, must, ready in requirements):
            return None  # check before sorting: this is called in every tick
        return select_in_order(sorted(view.ready_deadlines(), key=lambda c: -c[1]), requirements, size)


TAKEN_OR_WAITING = ("queued", "generated", "batched")
"""States of a group for which strict order does not wait. In all other open states the group is in progress."""


@register("batching", "strict-order")
class StrictOrder:
    """In the order drawn: a step waits until every group drawn before the newest group of its batch is finished."""

    def select(self, view: View, size: int) -> Sequence[GroupId] | None:
        finished: list[tuple[GroupId, StepId]] = []
        """Those drawn before the first group in progress. None drawn later may be taken."""
        for group in view.groups():
            if group.state == "generated":
                finished.append((group.id, group.deadline))
            elif group.state not in TAKEN_OR_WAITING:
                break
        chosen = select_in_order(finished, view.requirements(), size) if len(finished) >= size else None
        return chosen if chosen is not None and len(chosen) == size else None


# -- deadline: what to do with stragglers when a step waits only for them ----------------------------------------------
# Every policy except `wait` biases the data against long or hard prompts. The metric `engine_groups_ended_total` counts
# the dropped groups.

DECISIONS = ("wait", "truncate", "drop", "shrink")


class _Always:
    """The same decision for all stragglers."""

    acts = True
    decision = "wait"

    def decide(self, view: View, stragglers: Sequence[GroupView]) -> str:
        return self.decision


@register("deadline", "wait")
class WaitForGroups(_Always):
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


# -- sync: which replicas install new weights, and when ----------------------------------------------------------------


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


# -- validation: which weights versions are validated during the run ---------------------------------------------------


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
