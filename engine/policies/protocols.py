"""The protocols of policies, one per decision. A policy sees the read-only `View`, returns a decision and changes
nothing.

The built-in policies and users' policies implement them. `scheduling/` calls them, and checks every answer against the
laws before it acts on it. An answer depends only on the view, the arguments and the policy's declared `memory`: no
clock, no randomness, no other memory (law 8). A class that declares

    memory: dict[str, Any]

gets an empty dictionary for each run, or keeps the values that its `__init__` put there. Values must be plain values
that msgpack can store. The memory belongs to the scheduler's state: it is part of every snapshot, is restored when an
answer is rejected, and is rebuilt by replay, so that a resumed run has it too.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from engine.events import GroupGenerated
from engine.ids import GroupId, ReplicaId, Version
from engine.states.view import GroupView, ReplicaView, StepView, View


class AdmissionPolicy(Protocol):
    def admit(self, view: View, legal: int) -> int:
        """How many new groups may start now: from 0 to `legal`, the maximum that K and the staleness bound allow."""


class DispatchPolicy(Protocol):
    def choose(self, view: View, oldest: Version, group: GroupId) -> ReplicaId | None:
        """The replica that a group starts or resumes on: ready, with a free slot, at version `oldest` or newer. None:
        the group waits."""


class ConcurrencyPolicy(Protocol):
    def limit(self, view: View, replica: ReplicaView) -> int:
        """How many groups may run on a replica at once from now on, from 1 to its slots; those that run stay. Asked
        when it joins and after each report of its KV cache."""


class BatchingPolicy(Protocol):
    def select(self, view: View, size: int) -> Sequence[GroupId] | None:
        """`size` ready groups for step `view.step`. None: the step waits, because a binding deadline does not have
        enough ready groups.

        Legal if, for every (d, must, _) of `view.requirements()`, at least `must` of the groups have a deadline ≤ d.
        """


class DeadlinePolicy(Protocol):
    acts: bool
    """False: `decide` is never called, and no timer is set."""

    def decide(self, view: View, stragglers: Sequence[GroupView]) -> str:
        """What to do with the groups that are not ready at a binding deadline: `wait`, `truncate`, `drop` or
        `shrink`."""


class SyncPolicy(Protocol):
    def pause(self, view: View, staged: Sequence[ReplicaId], busy: int) -> Sequence[ReplicaId]:
        """Which of the replicas that have staged the newest version may pause to install it now. `busy`: number of
        replicas that are already in a sync."""


class FilterPolicy(Protocol):
    def keep(self, view: View, outcome: GroupGenerated) -> bool:
        """Whether a generated group is used for training."""


class RetryPolicy(Protocol):
    def retry(self, view: View, group: GroupView, cause: str) -> bool:
        """Whether a group whose attempt failed for `cause` (`infrastructure` or `data`) gets another one."""


class ResumePolicy(Protocol):
    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        """Numbers that order parked groups: the smallest resumes first; if equal, the group drawn first. Called once
        each time a group is parked, with the group as it is then. Law 3 says on which replicas it may resume."""


class ValidationPolicy(Protocol):
    def due(self, view: View, version: Version, steps_before: int, steps: int) -> bool:
        """Whether to validate a version that contains `steps` train steps; the version before it contains
        `steps_before`. For version 0, the initial weights, both are 0. If `view.limits.validation.at_end` is set, the
        last version is always validated."""


class StepStatePolicy(Protocol):
    """An added state of train steps: it inspects batches before they are trained, or weights before replicas get
    them."""

    def enters(self, view: View, step: StepView) -> bool:
        """Whether a batch or a version is inspected; if not, it passes."""

    async def work(self, given: Any) -> str | None:
        """Inspect a `protocols.Batch` or `protocols.PublishedWeights`. None: it passes. A text: it is refused for this
        reason, and the run ends; it can be resumed. Changes are lost. After an exception it is inspected again."""


class StatePolicy(Protocol):
    def enters(self, view: View, group: GroupView) -> bool:
        """Whether a group enters the added state (`policies.add_state`): when its prompt was drawn or after its last
        token, or after the added state before this one.

        The class may also have `async def work(self, group: TrajectoryGroup) -> TrajectoryGroup`: the work on such a
        group. It runs in its own instance and its own process. It may change only rewards, or before generation only
        the prompt. `DataFailure` counts against the group's `data` budget, any other exception against its
        `infrastructure` budget.
        """
