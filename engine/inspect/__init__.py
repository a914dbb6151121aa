"""Readers of a recorded schedule: whether this engine decides the same, and the state at an event with its causes.

Called by the command line. Nothing here writes.
"""

from engine.inspect.machines import machines_text
from engine.inspect.moment import Moment, at_text, open_record, replay_text, state_at
from engine.inspect.story import Story

__all__ = ["Moment", "Story", "at_text", "machines_text", "open_record", "replay_text", "state_at"]
