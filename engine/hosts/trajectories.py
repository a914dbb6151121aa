"""The trajectory store: finished groups and the partial ones that aborts leave behind, until the scheduler discards
them.

Held in process by `local` and in an actor of its own by `actors`, so that it outlives the replicas. It never looks
into what it keeps: `local` puts groups, `actors` puts packed bytes. `durable.DurableStore` keeps these on disk.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from engine.errors import EngineError
from engine.hosts.scores import ScoreRow
from engine.ids import GroupId, StepId
from engine.trajectory import TrajectoryGroup

Payload = TypeVar("Payload")


class Trajectories(Protocol):
    """A trajectory store as the hosts use it, wherever it is."""

    async def put(self, group: TrajectoryGroup, attempt: int) -> None:
        """Keep a group; returns once it is kept. What a later attempt left there stays."""

    async def replace(self, group: TrajectoryGroup, attempt: int) -> None:
        """Put a group in the place of what is kept of it; one that was forgotten stays so."""

    async def partial(self, group: GroupId) -> TrajectoryGroup | None:
        """What an earlier attempt left behind, for the caller to change as it likes; None if there is nothing."""

    async def get(self, groups: Sequence[GroupId]) -> list[TrajectoryGroup]:
        """The groups of a batch, in order. Raises `EngineError` naming those that are not there."""

    async def put_scores(
        self, step: StepId, task: str, groups: Sequence[GroupId], scores: Sequence[Sequence[ScoreRow]]
    ) -> None:
        """Keep what a task of a step made of groups: for each, a row of log-probs for each of its trajectories."""

    async def scores(self, step: StepId, task: str, groups: Sequence[GroupId]) -> list[list[ScoreRow]]:
        """As put last for that step. Raises `EngineError` naming the groups that have none."""

    async def discard(self, groups: Sequence[GroupId], attempt: int | None = None) -> None:
        """Forget groups; unknown ones are ignored. With `attempt`, what a later attempt left there stays."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """How much a store holds."""

    groups: int
    bytes: int
    disk_bytes: int = 0
    """What it takes on disk, groups that are discarded and not yet cleared away included."""


def require_kept(groups: Sequence[GroupId], kept: Container[GroupId]) -> None:
    """Raises: `EngineError`, naming the groups that are not there."""
    missing = [group for group in groups if group not in kept]
    if missing:
        story = f"the trajectory store does not hold groups {missing[:8]} ({len(missing)} in all)"
        raise EngineError(story, groups=missing)


def require_scored(groups: Sequence[GroupId], scored: Container[GroupId], task: str, step: StepId) -> None:
    """Raises: `EngineError`, naming the groups that were not scored for that step."""
    missing = [group for group in groups if group not in scored]
    if missing:
        story = f"the trajectory store holds no {task} of step {step} for groups {missing[:8]}"
        raise EngineError(f"{story} ({len(missing)} in all)", groups=missing)


class TrajectoryStore(Generic[Payload]):
    """One payload per group: that of its latest attempt."""

    def __init__(self) -> None:
        self._kept: dict[GroupId, tuple[int, Payload, int]] = {}
        self._scores: dict[GroupId, dict[str, tuple[StepId, bytes]]] = {}
        self._bytes = 0

    def put(self, group: GroupId, attempt: int, payload: Payload, bytes: int) -> bool:
        """Keep a payload unless one of a later attempt is here: the echo of an attempt already over changes nothing."""
        kept = self._kept.get(group)
        if kept is not None:
            if kept[0] > attempt:
                return False
            self._bytes -= kept[2]
        self._kept[group] = (attempt, payload, bytes)
        self._bytes += bytes
        return True

    def replace(self, group: GroupId, attempt: int, payload: Payload, bytes: int) -> bool:
        """See `Trajectories.replace`."""
        return group in self._kept and self.put(group, attempt, payload, bytes)

    def partial(self, group: GroupId) -> Payload | None:
        kept = self._kept.get(group)
        return None if kept is None else kept[1]

    def get(self, groups: Sequence[GroupId]) -> list[Payload]:
        """Raises: `EngineError`, naming the groups that are not here."""
        require_kept(groups, self._kept)
        return [self._kept[group][1] for group in groups]

    def put_scores(self, step: StepId, task: str, groups: Sequence[GroupId], packed: Sequence[bytes]) -> None:
        """Keep each group's packed scores as long as the group itself; of one that is gone nobody wants them."""
        for group, data in zip(groups, packed, strict=True):
            if group in self._kept:
                self._forget_scores(group, task)
                self._scores.setdefault(group, {})[task] = (step, data)
                self._bytes += len(data)

    def scores(self, step: StepId, task: str, groups: Sequence[GroupId]) -> list[bytes]:
        """Raises: `EngineError`, naming the groups that were not scored for that step."""
        found = [self._scores.get(group, {}).get(task, (-1, b"")) for group in groups]
        scored = [group for group, (mark, _) in zip(groups, found, strict=True) if mark == step]
        require_scored(groups, scored, task, step)
        return [data for _, data in found]

    def discard(self, groups: Sequence[GroupId], attempt: int | None = None) -> None:
        """See `Trajectories.discard`."""
        for group in groups:
            kept = self._kept.get(group)
            if kept is not None and (attempt is None or kept[0] <= attempt):
                del self._kept[group]
                self._bytes -= kept[2]
                for task in list(self._scores.get(group, ())):
                    self._forget_scores(group, task)
                self._scores.pop(group, None)

    def _forget_scores(self, group: GroupId, task: str) -> None:
        _, data = self._scores.get(group, {}).pop(task, (0, b""))
        self._bytes -= len(data)

    def flush(self) -> None:
        """What was put is kept, as far as it can be here."""

    def close(self) -> None:
        """Nothing is held open."""

    def stats(self) -> StoreStats:
        return StoreStats(groups=len(self._kept), bytes=self._bytes)


def copy_group(group: TrajectoryGroup) -> TrajectoryGroup:
    """A group whose trajectories, their lists and the prompt's fields are its own; the values of fields are shared."""
    prompt = replace(group.prompt, fields=dict(group.prompt.fields))
    return TrajectoryGroup(group=group.group, prompt=prompt, trajectories=[t.copy() for t in group.trajectories])


def size_of(group: TrajectoryGroup) -> int:
    """About how many bytes a group takes in memory: lists of numbers, and text."""
    return sum(
        256 + 8 * len(t.prompt_ids) + 24 * len(t.token_ids) + 72 * len(t.spans) + len(t.text)
        for t in group.trajectories
    )
