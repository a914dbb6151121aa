"""What may vary: one protocol per decision. A policy sees the read-only `View` and returns a decision; it changes
nothing.

Implemented by the files beside this one and by users; asked by `scheduling/`, which validates every answer against
the laws before it
acts on it. An answer depends on the view, the arguments and the policy's declared `memory` alone: no clock, no
randomness, no memory elsewhere (law 8). A class that declares

    memory: dict[str, Any]

gets an empty one for each run (or keeps what its `__init__` put there): plain values that msgpack can hold. It belongs
to the scheduler: part of the state hash, put back where an answer was refused, rebuilt by replay and so kept over a
resume.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.events import GroupGenerated
from engine.ids import GroupId, ReplicaId, Version
from engine.states.view import GroupView, View


class AdmissionPolicy(Protocol):
    def admit(self, view: View, legal: int) -> int:
        """How many new groups may start now, from 0 to `legal` (what K and the staleness bound leave)."""


class DispatchPolicy(Protocol):
    def choose(self, view: View, oldest: Version, group: GroupId) -> ReplicaId | None:
        """The replica a group starts or resumes on: ready, with a free slot, at version `oldest` or newer; None to
        hold it."""


class BatchingPolicy(Protocol):
    def select(self, view: View, size: int) -> Sequence[GroupId] | None:
        """`size` ready groups for step `view.step`, or None while a deadline that has run out of room lacks ready
        groups.

        Legal when for every (d, must, _) of `view.requirements()` at least `must` of them have a deadline ≤ d.
        """


class DeadlinePolicy(Protocol):
    acts: bool
    """False: never asked, and no timer is set."""

    def decide(self, view: View, stragglers: Sequence[GroupView]) -> str:
        """What becomes of the unready groups of every binding deadline: `wait`, `truncate`, `drop` or `shrink`."""


class SyncPolicy(Protocol):
    def pause(self, view: View, staged: Sequence[ReplicaId], busy: int) -> Sequence[ReplicaId]:
        """Which replicas that have the newest version staged may pause for it now. `busy`: replicas in a sync
        already."""


class FilterPolicy(Protocol):
    def keep(self, view: View, outcome: GroupGenerated) -> bool:
        """Whether a generated group is worth training on."""


class RetryPolicy(Protocol):
    def retry(self, view: View, group: GroupView, cause: str) -> bool:
        """Whether a group whose attempt failed for `cause` (`infrastructure` or `data`) gets another one."""


class ResumePolicy(Protocol):
    def key(self, view: View, group: GroupView) -> tuple[float, ...]:
        """Numbers that order parked groups: the smallest resumes first, of equal ones the group drawn first. Asked once
        each time a group is parked, with the group as it is then; law 3 says on which replicas it may resume."""


class ValidationPolicy(Protocol):
    def due(self, view: View, version: Version, steps_before: int, steps: int) -> bool:
        """Whether to measure a version that was published with `steps` train steps in it, after one with
        `steps_before`; version 0, the initial weights, comes with 0 and 0. The last version is measured where
        `view.limits.validation.at_end` says so, whatever was answered."""


class StatePolicy(Protocol):
    def enters(self, view: View, group: GroupView) -> bool:
        """Whether a group whose last token is there (or that has just left the added state before this one) passes
        through the added state (`policies.add_state`).

        The class may also have `async def work(self, group: TrajectoryGroup) -> TrajectoryGroup`: what is done on such
        a group, in an instance and a process of its own. It may change rewards, and nothing else; `DataFailure` costs
        an attempt of the group's data, any other exception one of infrastructure.
        """
