"""What every handler and reaction works on: the state of a run, the commands of this tick, and the policies."""

from dataclasses import dataclass

from engine.ids import Version
from engine.scheduling.decisions import Decisions
from engine.scheduling.issued_commands import Orders
from engine.states.state import State


@dataclass(eq=False, slots=True)
class Core:
    """One scheduler. Handlers and reactions are functions over it; no other code changes the state."""

    state: State
    orders: Orders
    decisions: Decisions
    searched: tuple[Version, list[int]] | None = None
    """The newest version of an idle replica and the newest order of each slow one, at the last search that found room
    for all groups to move: it need not be repeated before one of these changes."""
