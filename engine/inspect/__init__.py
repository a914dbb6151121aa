"""Readers of a recorded schedule: did the run decide what this engine would decide, what was the state at an event,
and why.

Called by the command line and by whoever debugs a schedule. Nothing here writes.
"""

from engine.inspect.machines import machines_text
from engine.inspect.moment import Moment, at_text, open_record, replay_text, state_at
from engine.inspect.story import Story

__all__ = ["Moment", "Story", "at_text", "machines_text", "open_record", "replay_text", "state_at"]
