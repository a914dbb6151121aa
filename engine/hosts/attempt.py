"""The state of one attempt to generate a group, for its replica's host. Used only by `replica.py`."""

import asyncio
from dataclasses import dataclass, field

from engine.ids import GroupId
from engine.trajectory import TrajectoryGroup

PARK_S = 10.0
"""Seconds that a generator has to give up a group that is being parked; then its work on the group is canceled."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One order to generate a group, from its arrival to its report."""

    group: GroupId
    number: int
    unwanted: bool = False
    """Its outcome must not be reported."""
    truncate: bool = False
    park: bool = False
    """It must end now, unfinished, with the tokens it has."""
    begun: bool = False
    """`generate` has been called."""
    unsaved: TrajectoryGroup | None = None
    """The newest prefix that is not in the trajectory store yet."""
    saving: asyncio.Task[None] | None = None
    task: asyncio.Task[None] = field(init=False)
