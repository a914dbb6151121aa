"""The growth of a running group since it was last stored. Only this growth is checked and written.

`workers.replica` compares each saved prefix with the one before; `group_codec` packs the difference, and the trajectory
store appends it. Must never report growth for a group whose stored part has changed.
"""

from dataclasses import dataclass, fields

from engine.trajectory import Trajectory, TrajectoryGroup

OF_TOKENS = ("token_ids", "logprobs", "loss_mask")
OTHERS = tuple(one.name for one in fields(Trajectory) if one.name not in OF_TOKENS)


@dataclass(frozen=True, slots=True)
class Growth:
    """A group that contains a stored group."""

    group: TrajectoryGroup
    known: tuple[int, ...]
    """For each trajectory, how many of its first tokens are stored at its place. 0: none of it is stored."""
    changed: tuple[int, ...]
    """The places of the trajectories that differ from their stored forms."""


def growth_of(stored: TrajectoryGroup, group: TrajectoryGroup) -> Growth | None:
    """What `group` has and `stored` does not; None if it does not contain `stored`, or shares its lists."""
    before, now = stored.trajectories, group.trajectories
    if stored.prompt != group.prompt or len(now) < len(before):
        return None
    if any(one.token_ids is other.token_ids for one, other in zip(before, now, strict=False)):
        return None
    known = [_known(one, other) for one, other in zip(before, now, strict=False)]
    known += [0] * (len(now) - len(before))
    same = {
        place
        for place, (one, other) in enumerate(zip(before, now, strict=False))
        if known[place] == len(other.token_ids) and all(getattr(one, name) == getattr(other, name) for name in OTHERS)
    }
    return Growth(group, tuple(known), tuple(place for place in range(len(now)) if place not in same))


def _known(stored: Trajectory, trajectory: Trajectory) -> int:
    count = len(stored.token_ids)
    if stored.prompt_ids != trajectory.prompt_ids:
        return 0
    routes = trajectory.routes[: routes_before(trajectory, count)]
    if stored.routes != routes:
        return 0
    return count if all(getattr(trajectory, name)[:count] == getattr(stored, name) for name in OF_TOKENS) else 0


def routes_before(trajectory: Trajectory, known: int) -> int:
    """Number of routes of a trajectory's prompt and its `known` first tokens: the last of them has none."""
    return max(0, len(trajectory.prompt_ids) + known - 1)
