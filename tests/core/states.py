"""The whole state of a scheduler as plain values, to compare two of them."""

from typing import Any

from engine.record.msgpack_values import pack, unpack
from engine.record.snapshots import first_difference, snapshot
from engine.scheduling.scheduler import Scheduler


def state_of(scheduler: Scheduler) -> list[Any]:
    """What a snapshot of the scheduler holds."""
    return [unpack(pack(part)) for part in snapshot(scheduler)]


def require_same_state(one: Scheduler, other: Scheduler) -> None:
    """Fail, and name the first field that differs, unless two schedulers have the same state."""
    difference = first_difference(one, state_of(other))
    assert not difference, difference
