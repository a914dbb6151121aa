"""Random limits and policies for the oracle's worlds: any that the laws allow, and custom policies that break the laws.

Importing this module registers the policies and states that recorded worlds name.
"""

from collections.abc import Sequence
from math import floor
from random import Random
from typing import Any

from engine.policies import DEFAULTS, register
from engine.states.limits import CONFLICTS, SYNC_MODES, AddedState, Limits, Pool, ValidationLimits
from engine.states.timeouts import Timeouts
from tests.core.added_states import CHECKING, FETCHING, GATING, PROVING, SIFTING, WEIGHING
from tests.shipped_policies import SHIPPED

STEPS = 10
"""Maximum train steps of a world that has a limit."""
LAYOUTS: tuple[tuple[Pool, ...], ...] = (
    (),
    (),
    (Pool(tasks=("rollout",), replicas=(0, 1)), Pool(tasks=("train", "old_logprobs", "ref_logprobs"))),
    (Pool(tasks=("rollout",), replicas=(0, 1)), Pool(tasks=("train", "old_logprobs")), Pool(tasks=("ref_logprobs",))),
    (Pool(tasks=("rollout", "train", "old_logprobs", "ref_logprobs"), replicas=(0, 1)),),
    (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("rollout", "train"), replicas=(1,))),
    (Pool(tasks=("rollout", "ref_logprobs"), replicas=(0, 1)), Pool(tasks=("train", "old_logprobs"))),
)

ADDED = (
    (), (), (WEIGHING,), (WEIGHING, CHECKING), (FETCHING,), (FETCHING, CHECKING),
    (AddedState(name="rewarding", concurrency=2),), (GATING,), (PROVING,), (CHECKING, GATING, SIFTING, PROVING),
)  # fmt: skip
"""Added states of a run."""


def any_limits(random: Random) -> Limits:
    """Random small limits that the laws allow."""
    one = random.choice
    batch, staleness, pools = random.randint(1, 4), random.randint(0, 3), one(LAYOUTS)
    shared = any(pool.shared and "train" in pool.tasks for pool in pools)
    k = one([1, 1, random.randint(1, staleness + 1)])
    ratio = one([None, None, random.uniform(k - 1, staleness)])
    over = one([0.0, 0.0, 0.25, 0.5, 1.5])
    most = floor((staleness + 1 if ratio is None else 1 + ratio) * batch + 1e-9) + floor(over * batch + 1e-9)
    every = random.randint(0, 2)
    validation = ValidationLimits(
        rows=random.randint(1, 20), rows_per_slot=random.randint(1, 8), at_start=one([True, False]),
        every=random.randint(0, 3), at_end=one([True, False]), replicas=random.randint(1, 3), own_from=one([None, 2]),
        conflict=one(CONFLICTS),
    )  # fmt: skip
    return Limits(
        train_batch_size=batch, max_staleness_steps=staleness, max_concurrent_groups=random.randint(batch, most),
        sync_every=k, async_ratio=ratio, over_sample=over, max_steps=one([None, STEPS, random.randint(1, STEPS)]),
        sync_mode=one(SYNC_MODES), scoring_tasks=one([(), ("old_logprobs",), ("ref_logprobs", "old_logprobs")]),
        deadline_timeout_s=one([1.0, 10.0, 60.0]), max_drops=random.randint(0, 3),
        infrastructure_attempts=random.randint(1, 5), data_attempts=random.randint(1, 2), checkpoint_every=every,
        validation=one([None, validation]), pools=pools, train_after_sync=not shared and one([True, False, False]),
        added_states=one(ADDED),
        timeouts=Timeouts.every(None, group_s=one([None, None, 40.0])), straggler_factor=one([None, None, 1.1]),
        give_up_s=one([0.0, 5.0]), keeps_batches=every > 0 and one([True, False]),
    )  # fmt: skip


@register("admission", "oracle-halves")
class Halves:
    """Starts half of the allowed groups, so sometimes none. If that would stop the run, the default decides."""

    def admit(self, view: Any, legal: int) -> int:
        return legal // 2


@register("batching", "oracle-newest")
class Newest:
    """Sometimes breaks the law of deadlines."""

    def select(self, view: Any, size: int) -> Sequence[int] | None:
        return sorted(view.ready_ids(), reverse=True)[:size]


@register("retry", "oracle-raises")
class Raises:
    def retry(self, view: Any, group: Any, cause: str) -> bool:
        if cause == "data":
            raise ValueError("a defect of the user's own")
        return bool(group.infrastructure_failures < 2)


@register("validation", "oracle-odd")
class Odd:
    def due(self, view: Any, version: int, steps_before: int, steps: int) -> bool:
        return version % 2 == 1


OWN = {
    "admission": "oracle-halves", "batching": "oracle-newest", "retry": "oracle-raises", "validation": "oracle-odd",
    "on_error": "builtin",
}  # fmt: skip
"""Custom policies that break the rules. The defaults decide instead."""


def any_policies(random: Random, own: float = 0.0) -> dict[str, str]:
    """For each decision the default or any shipped policy, at even odds. `own`: probability of adding `OWN`."""
    named = {d: random.choice(SHIPPED[d]) if random.random() < 0.5 else default for d, default in DEFAULTS.items()}
    return {**named, **OWN} if random.random() < own else named
