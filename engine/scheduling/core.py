"""What every handler and reaction works on: the state of a run, and the policies."""

from dataclasses import dataclass, field

from engine.events import TimerFired
from engine.ids import GroupId
from engine.scheduling.decisions import Decisions
from engine.states.state import State


@dataclass(eq=False, slots=True)
class Core:
    """One scheduler. Handlers and reactions are functions over it; no other code changes the state."""

    state: State
    decisions: Decisions
    fired: dict[str, TimerFired] = field(default_factory=dict)
    """The timers that fired in this tick and were not acted on, by name."""
    discards: list[GroupId] = field(default_factory=list)
    """The groups whose trajectories are to be discarded at the end of this tick."""
