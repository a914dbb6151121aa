"""A machine is a table; `transitions` runs it; a ledger's phases hang on it.

Called by the record modules of this package, which each hold one table. One shared `transitions.Machine` drives every
record of a kind as a flyweight: adding a model per record would cost ~190 µs and attach methods no reader can find.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

from transitions import Event as LibraryEvent
from transitions import Machine, MachineError

from engine.errors import IllegalTransition

Observer = Callable[[str, Any, str, str], None]
"""Called as (machine, record, source state, trigger) after every change of state."""
Moves = dict[tuple[str, str, str], int]
"""Number of changes of state, by (machine, old state, new state)."""


class Phase(IntEnum):
    """What a state means to the ledger."""

    WAITING = 0
    """No place held."""
    RUNNING = 1
    """A place and a slot held."""
    PARKED = 2
    """A place held, no slot."""
    READY = 3
    """Generated, a place held until a step takes it."""
    BATCHED = 4
    """In the batch of a step."""
    CONSUMED = 5
    """Trained on."""
    RELEASED = 6
    """Ended without being trained on; its place is given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    trigger: str
    sources: tuple[str, ...]
    target: str
    why: str
    """When it happens, for the docs."""


def transitions(*rows: tuple[str, str, str, str]) -> tuple[Transition, ...]:
    """Rows of a table: (trigger, sources separated by blanks, target, why)."""
    return tuple(
        Transition(trigger=trigger, sources=tuple(sources.split()), target=target, why=why)
        for trigger, sources, target, why in rows
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """States × triggers of one machine. The first state is the initial one. `phases` only where a ledger counts
    them."""

    name: str
    states: tuple[str, ...]
    transitions: tuple[Transition, ...]
    terminal: tuple[str, ...]
    phases: dict[str, Phase] | None = None

    @property
    def initial(self) -> str:
        return self.states[0]

    def target(self, source: str, trigger: str) -> str | None:
        """Where a trigger leads from a state; None where the table has no such row."""
        return next((t.target for t in self.transitions if t.trigger == trigger and source in t.sources), None)


class _Trigger(LibraryEvent):
    """A trigger of a table, at the library's extension point for events: the library has checked and keeps the rows.
    No row has a condition or a callback and no trigger waits for another, so that all there is to do is the change of
    state. The library's way through its empty lists of callbacks takes some sixty times as long."""

    def trigger(self, model: Any, *args: Any, **kwargs: Any) -> bool:
        """Raises: `MachineError` where no row leads from the record's state."""
        row = self.transitions.get(model.state)
        if not row:
            raise MachineError(f"no row leads from {model.state} by {self.name}")
        model.state = row[0].dest
        return True


class _TableMachine(Machine):
    event_cls = _Trigger


@lru_cache
def _machine(table: Table) -> Machine:
    """The one `transitions` machine of a table in this process; building one costs a millisecond."""
    return _TableMachine(
        model=None,
        states=list(table.states),
        initial=table.initial,
        transitions=[{"trigger": t.trigger, "source": list(t.sources), "dest": t.target} for t in table.transitions],
        auto_transitions=False,
        send_event=False,
    )


def entered(moves: Moves, machine: str, state: str) -> int:
    """Number of times that any record entered a state. Safe on any thread."""
    return sum(n for (name, _, target), n in list(moves.items()) if name == machine and target == state)


class SharedMachine:
    """Runs a table over slotted records that have `id` and `state`.

    `fire` is the only way a state changes. It counts each change in `moves`, then calls
    `observe(machine, record, source, trigger)`, if given.
    """

    def __init__(self, table: Table, moves: Moves, observe: Observer | None = None) -> None:
        self.table = table
        self.moves = moves
        self.observe = observe
        self._name = table.name
        self._triggers = {name: event.trigger for name, event in _machine(table).events.items()}

    def fire(self, record: Any, trigger: str) -> None:
        """Change the state of a record. Raises `IllegalTransition` where the table has no such trigger from its
        state."""
        source = record.state
        try:
            self._triggers[trigger](record)
        except (MachineError, KeyError):
            raise IllegalTransition(self._name, record.id, source, trigger) from None
        move = (self._name, source, record.state)
        try:
            self.moves[move] += 1
        except KeyError:
            self.moves[move] = 1
        if self.observe is not None:
            self.observe(self._name, record, source, trigger)
