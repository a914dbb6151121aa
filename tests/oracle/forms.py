"""Events and commands as the oracle stores them: by the names of classes and fields, independent of tags."""

from dataclasses import fields
from typing import Any

from engine.commands import Command
from engine.events import Event

Plain = tuple[str, dict[str, Any]]
"""(name of the class, fields)."""
STAMP = ("id", "at")
"""Fields of events that are stored separately."""


def plain(item: Event | Command) -> Plain:
    """A command, or an event without its stamp."""
    values = {f.name: getattr(item, f.name) for f in fields(item) if f.name not in STAMP}
    return type(item).__name__, {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
