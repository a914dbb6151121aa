"""Breakpoints of the debugger: `group=17`, `state=aborted`, `staleness>=2`, `command=StartGroup`.

Called by `cursor` and `engine debug`. Pure. `TickContents` say what a tick, or a range of ticks, has to do with; a
breakpoint that does not hold for the contents of a range holds for none of its ticks.
"""

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache

from engine.commands import COMMANDS, Command, TrainStep
from engine.errors import ConfigError, choice
from engine.events import EVENTS, Event, PromptsDrawn
from engine.inspect.machines import MACHINES
from engine.record import Tick
from engine.states.process import REPLICA

NUMBERS = {"group": "groups", "replica": "replicas", "step": "steps", "version": "versions"}
"""Subjects that have a number, and their field in `TickContents`."""
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    ">=": operator.ge, "<=": operator.le, "=": operator.eq, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
FORM = re.compile(r"\s*(\w+)\s*(>=|<=|=|>|<)\s*([\w.-]+)\s*")
EXAMPLES = "group=17, replica=0, step=3, version=2, state=aborted, staleness>=2, command=StartGroup, event=GroupFailed"


@dataclass(slots=True)
class TickContents:
    """What a tick, or a range of ticks, has to do with."""

    groups: set[int]
    replicas: set[int]
    steps: set[int]
    versions: set[int]
    staleness: set[int]
    """Of the groups in batches that are trained."""
    commands: set[str]
    events: set[str]
    states: set[str]
    """States that a record entered."""

    @staticmethod
    def none() -> "TickContents":
        return TickContents(*(set() for _ in fields(TickContents)))

    def update(self, other: "TickContents") -> None:
        for field in fields(self):
            getattr(self, field.name).update(getattr(other, field.name))

    def add(self, tick: Tick, states: Iterable[str]) -> None:
        """Add those of a tick. `states`: the states that records entered in it."""
        self.states.update(states)
        for event in tick.events:
            self.events.add(type(event).__name__)
            self._add_numbers(event)
        for command in tick.commands:
            self.commands.add(type(command).__name__)
            self._add_numbers(command)
            if type(command) is TrainStep:
                self.staleness.update(command.staleness)

    def _add_numbers(self, item: Event | Command) -> None:
        for name, target in _numbers_of(type(item)):
            getattr(self, target).add(getattr(item, name))
        if isinstance(item, PromptsDrawn):
            self.groups.update(range(item.first, item.first + item.count))
        elif getattr(item, "kind", None) == REPLICA:
            self.replicas.add(getattr(item, "index", -1))
        groups = getattr(item, "groups", None)
        if isinstance(groups, tuple):
            self.groups.update(groups)


@cache
def _numbers_of(cls: type[Event | Command]) -> tuple[tuple[str, str], ...]:
    """(field, field of `TickContents`) of each field of an event or command that numbers a subject."""
    return tuple((name, target) for name, target in NUMBERS.items() if name in cls.__struct_fields__)


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A condition on the contents of a tick."""

    text: str
    field: str
    relation: str
    value: int | str

    def holds(self, contents: TickContents) -> bool:
        found = getattr(contents, self.field)
        if isinstance(self.value, str) or self.relation == "=":
            return self.value in found
        return any(RELATIONS[self.relation](one, self.value) for one in found)


def parse_breakpoint(text: str, added_states: Iterable[str] = ()) -> Breakpoint:
    """`added_states`: states of groups that the run adds. Raises: `ConfigError` that says what is allowed."""
    match = FORM.fullmatch(text)
    if match is None:
        raise ConfigError("breakpoint", text, "must be NAME=VALUE", f"for example {EXAMPLES}")
    name, relation, value = match.groups()
    if name in NUMBERS or name == "staleness":
        if not value.isdecimal():
            raise ConfigError("breakpoint", text, f"must have a whole number as {name}", f"for example {EXAMPLES}")
        return Breakpoint(text.strip(), NUMBERS.get(name, name), relation, int(value))
    known = {
        "command": [cls.__name__ for cls in COMMANDS],
        "event": [cls.__name__ for cls in EVENTS],
        "state": sorted({*added_states, *(state for machine in MACHINES for state in machine.states)}),
    }
    if name not in known:
        names = [*NUMBERS, "staleness", *known]
        raise ConfigError("breakpoint", text, f"has an unknown name: {name}", f"use one of {', '.join(names)}")
    if relation != "=":
        raise ConfigError("breakpoint", text, f"must be {name}=VALUE: only numbers have an order", "")
    if value not in known[name]:
        fix = choice(value, known[name], prefix=f"{name}=")
        raise ConfigError("breakpoint", text, f"names a {name} that does not exist", fix)
    return Breakpoint(text.strip(), f"{name}s", "=", value)
