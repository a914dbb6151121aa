"""The trajectory store: finished groups, and partial ones after an abort, until the scheduler discards them.

`runtime.local` has it in memory. `runtime.trajectory_service` serves it; on Ray, from an actor that survives the
replicas. It must never inspect its payloads, which are groups from `runtime.local` and packed bytes from the service.
`durable_trajectories.DurableStore` is on disk.
"""

from array import array
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from engine.errors import EngineError
from engine.ids import GroupId, StepId
from engine.storage.prefixes import Growth
from engine.trajectory import TrajectoryGroup

# -- scores of a group -------------------------------------------------------------------------------------------------


ScoreRow: TypeAlias = "array[float]"
"""Log-probs of the trained tokens of one trajectory, float32."""


def checked_scores(groups: Sequence[TrajectoryGroup], scores: Any) -> list[list[ScoreRow]]:
    """A scorer's result as float32. Raises: `EngineError` unless it has one number for each trained token."""
    if not isinstance(scores, Sequence) or len(scores) != len(groups):
        raise EngineError(f"score() must return a list for each of the {len(groups)} groups")
    checked = []
    for group, own in zip(groups, scores, strict=True):
        if not isinstance(own, Sequence) or len(own) != len(group.trajectories):
            raise EngineError(f"score() must return {len(group.trajectories)} lists for group {group.group}")
        rows = [array("f", row) for row in own]
        for index, (row, trajectory) in enumerate(zip(rows, group.trajectories, strict=True)):
            if len(row) != sum(trajectory.loss_mask):
                story = f"trajectory {index} of group {group.group} has {sum(trajectory.loss_mask)} trained tokens"
                raise EngineError(f"{story}, but score() returned {len(row)} log-probs")
        checked.append(rows)
    return checked


def pack_scores(rows: Sequence[ScoreRow]) -> bytes:
    """Packs the number of trajectories, their lengths (uint32) and all log-probs (float32), in native byte order."""
    lengths = array("I", [len(rows), *map(len, rows)])
    return lengths.tobytes() + b"".join(row.tobytes() for row in rows)


def unpack_scores(data: bytes) -> list[ScoreRow]:
    """The inverse of `pack_scores`."""
    size = array("I").itemsize
    count = array("I", data[:size])[0]
    first = size * (1 + count)
    values, rows, start = array("f", data[first:]), [], 0
    for length in array("I", data[size:first]):
        rows.append(values[start : start + length])
        start += length
    return rows


# -- the store ---------------------------------------------------------------------------------------------------------


Payload = TypeVar("Payload")


class Trajectories(Protocol):
    """The interface of a trajectory store for the workers."""

    async def put(self, group: TrajectoryGroup, attempt: int, *, urgent: bool = True) -> None:
        """Store a group; returns when it is stored. Does not overwrite the data of a later attempt. If it is not
        `urgent`, it may wait a little for other groups."""

    async def grow(self, growth: Growth, attempt: int) -> None:
        """Store a group of which this attempt has stored an earlier prefix; nothing if that is not stored any more."""

    async def replace(self, group: TrajectoryGroup, attempt: int) -> None:
        """Replace the stored group; a discarded group stays discarded."""

    async def partial(self, group: GroupId) -> TrajectoryGroup | None:
        """The stored group of an earlier attempt, which the caller may change; None if there is none."""

    async def get(self, groups: Sequence[GroupId]) -> list[TrajectoryGroup]:
        """The groups of a batch, in order. Raises: `EngineError` that names the missing ones."""

    async def put_scores(
        self, step: StepId, task: str, groups: Sequence[GroupId], scores: Sequence[Sequence[ScoreRow]]
    ) -> None:
        """Store the scores of a task for the groups of a step: for each group, one row of log-probs for each
        trajectory."""

    async def scores(self, step: StepId, task: str, groups: Sequence[GroupId]) -> list[list[ScoreRow]]:
        """The newest scores for that step. Raises: `EngineError` that names groups without scores."""

    async def discard(self, groups: Sequence[GroupId], attempt: int | None = None) -> None:
        """Delete groups; unknown ones are ignored. With `attempt`, the data of later attempts stays."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """How much a store holds."""

    groups: int
    bytes: int
    disk_bytes: int = 0
    """Bytes on disk, including discarded groups that are not deleted yet."""


def require_kept(groups: Sequence[GroupId], kept: Container[GroupId]) -> None:
    """Raises: `EngineError` that names the missing groups."""
    missing = [group for group in groups if group not in kept]
    if missing:
        story = f"the trajectory store does not hold groups {missing[:8]} ({len(missing)} in total)"
        raise EngineError(story, groups=missing)


def require_scored(groups: Sequence[GroupId], scored: Container[GroupId], task: str, step: StepId) -> None:
    """Raises: `EngineError` that names the groups that were not scored for that step."""
    missing = [group for group in groups if group not in scored]
    if missing:
        story = f"the trajectory store holds no {task} of step {step} for groups {missing[:8]}"
        raise EngineError(f"{story} ({len(missing)} in total)", groups=missing)


class TrajectoryStore(Generic[Payload]):
    """Stores one payload for each group: that of its latest attempt."""

    def __init__(self, size: Callable[[Payload], int]) -> None:
        """`size`: of a payload, in bytes."""
        self._size = size
        self._kept: dict[GroupId, tuple[int, Payload, int]] = {}
        self._scores: dict[GroupId, dict[str, tuple[StepId, bytes]]] = {}
        self._bytes = 0

    def put(self, group: GroupId, attempt: int, payload: Payload) -> bool:
        """Store a payload, unless one of a later attempt is stored."""
        kept = self._kept.get(group)
        if kept is not None:
            if kept[0] > attempt:
                return False
            self._bytes -= kept[2]
        size = self._size(payload)
        self._kept[group] = (attempt, payload, size)
        self._bytes += size
        return True

    def extend(self, group: GroupId, attempt: int, payload: Any) -> bool:
        """Append to the payload that the same attempt has stored."""
        kept: Any = self._kept.get(group)
        if kept is None or kept[0] != attempt:
            return False
        return self.put(group, attempt, kept[1] + payload)

    def replace(self, group: GroupId, attempt: int, payload: Payload) -> bool:
        """See `Trajectories.replace`."""
        return group in self._kept and self.put(group, attempt, payload)

    def partial(self, group: GroupId) -> Payload | None:
        kept = self._kept.get(group)
        return None if kept is None else kept[1]

    def get(self, groups: Sequence[GroupId]) -> list[Payload]:
        """Raises: `EngineError` that names the missing groups."""
        require_kept(groups, self._kept)
        return [self._kept[group][1] for group in groups]

    def put_scores(self, step: StepId, task: str, groups: Sequence[GroupId], packed: Sequence[bytes]) -> None:
        """Store each group's packed scores until the group is discarded. Ignores groups that are not stored."""
        for group, data in zip(groups, packed, strict=True):
            if group in self._kept:
                self._forget_scores(group, task)
                self._scores.setdefault(group, {})[task] = (step, data)
                self._bytes += len(data)

    def scores(self, step: StepId, task: str, groups: Sequence[GroupId]) -> list[bytes]:
        """Raises: `EngineError` that names the groups without scores for that step."""
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
        """Ensure that stored data is as durable as this store can make it."""

    def close(self) -> None:
        """Does nothing: this store has no resources to release."""

    def stats(self) -> StoreStats:
        return StoreStats(groups=len(self._kept), bytes=self._bytes)


def copy_group(group: TrajectoryGroup) -> TrajectoryGroup:
    """A copy of a group with new trajectories, lists and prompt fields."""
    trajectories = [t.copy() for t in group.trajectories]
    return TrajectoryGroup(group=group.group, prompt=group.prompt.copy(), trajectories=trajectories)


def size_of(group: TrajectoryGroup) -> int:
    """Approximate size of a group in memory, in bytes."""
    return sum(
        256 + 8 * len(t.prompt_ids) + 24 * len(t.token_ids) + 72 * len(t.spans) + len(t.text)
        for t in group.trajectories
    )
