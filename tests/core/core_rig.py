"""What every rig that drives the core shares: a scheduler whose every tick is checked.

`Scripted` feeds it events by hand, `Adversary` has agents answer its orders in any order.
"""

from collections.abc import Sequence
from typing import Any

from engine.commands import Command
from engine.events import Event
from engine.record.codec import pack, unpack
from engine.record.snapshots import first_difference, restore, snapshot
from engine.scheduling.scheduler import Scheduler
from engine.states.laws import check_all
from engine.states.state import State
from engine.states.view import View


def state_of(scheduler: Scheduler) -> list[Any]:
    """What a snapshot of the scheduler holds: its whole state as plain values."""
    return [unpack(pack(part)) for part in snapshot(scheduler)]


def require_same_state(one: Scheduler, other: Scheduler) -> None:
    """Fail, and name the first field that differs, unless two schedulers have the same state."""
    difference = first_difference(one, state_of(other))
    assert not difference, difference


class CoreRig:
    """A scheduler, and the checks that follow each of its ticks."""

    scheduler: Scheduler
    twin: Scheduler | None = None
    """Restored from a snapshot of the scheduler. It must decide as the scheduler does."""
    reacts_again = True
    """Whether to check the law of ticks. A policy of a test may count how often it is asked."""

    @property
    def state(self) -> State:
        return self.scheduler.state

    @property
    def view(self) -> View:
        return self.scheduler.view

    def restore_twin(self) -> None:
        """From now on, a scheduler that was restored from a snapshot handles every tick, too."""
        self.twin = restore(state_of(self.scheduler))
        require_same_state(self.twin, self.scheduler)

    def check_tick(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Check that all laws hold, that reacting again orders nothing, and that the twin decides the same."""
        check_all(self.state)
        assert not self.reacts_again or self.scheduler.tick(()) == (), f"reacting again to {events} orders more"
        if self.twin is not None:
            assert self.twin.tick(events) == tuple(commands), f"restored, it decides otherwise at {events}"
            require_same_state(self.twin, self.scheduler)
            check_all(self.twin.state)
