"""How events and commands are written for people. Called by the other modules of this package."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from engine.commands import Command
from engine.events import Event

SHOWN = 8
"""Entries of a long list that are shown."""


def worded(item: Event | Command, without: tuple[str, ...] = ()) -> str:
    """`StartGroup(group=3, attempt=1, ...)`, without stamps; long tuples are cut."""
    left_out = (*(("id", "at") if isinstance(item, Event) else ("cause",)), *without)
    said = [f"{f.name}={_value(getattr(item, f.name))}" for f in fields(item) if f.name not in left_out]
    return f"{type(item).__name__}({', '.join(said)})"


def stamped(event: Event) -> str:
    """`t=1.234 s  #57 PromptsDrawn(...)`."""
    return f"t={event.at:.3f} s  #{event.id} {worded(event)}"


def few(things: Iterable[Any]) -> str:
    """The first of a list, and how many there are."""
    listed = [str(thing) for thing in things]
    if not listed:
        return "none"
    more = f", … {len(listed)} in all" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({few(value) if value else ''})"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
