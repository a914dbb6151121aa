"""Events and commands as the oracle keeps them: by the names of classes and fields, whatever their tags."""

from dataclasses import fields
from typing import Any

from engine.commands import Command
from engine.events import Event

Plain = tuple[str, dict[str, Any]]
"""Name of the class, and the fields."""
STAMP = ("id", "at")
"""Of events, kept beside them."""


def plain(item: Event | Command) -> Plain:
    """A command, or an event without its stamp."""
    values = {f.name: getattr(item, f.name) for f in fields(item) if f.name not in STAMP}
    return type(item).__name__, {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
