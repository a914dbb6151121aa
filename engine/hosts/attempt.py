"""One order to generate a group, as its replica's host keeps it. Used by `replica.py` alone."""

import asyncio
from dataclasses import dataclass, field

from engine.ids import GroupId
from engine.trajectory import TrajectoryGroup

PARK_S = 10.0
"""How long a generator may take to give a group up that is to be parked; then what it does for it is cancelled."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One order to generate a group, from its arrival to its report."""

    group: GroupId
    number: int
    unwanted: bool = False
    """Nobody waits for its outcome any more."""
    truncate: bool = False
    park: bool = False
    """It is to end with what it has, unfinished."""
    begun: bool = False
    """`generate` has been called."""
    unsaved: TrajectoryGroup | None = None
    """What it has so far, on its way to the trajectory store."""
    saving: asyncio.Task[None] | None = None
    task: asyncio.Task[None] = field(init=False)
