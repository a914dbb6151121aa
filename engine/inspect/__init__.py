"""Reads a recorded schedule: checks whether this engine makes the same decisions, and shows the state at an event with
its causes.

Called by the command line. Must not write.
"""

from engine.inspect.machines import machines_text
from engine.inspect.moment import Moment, at_text, open_record, replay_text, state_at, waits_text
from engine.inspect.story import Story

__all__ = ["Moment", "Story", "at_text", "machines_text", "open_record", "replay_text", "state_at", "waits_text"]
