"""Reads a recorded schedule: checks whether this engine makes the same decisions, and shows the state at an event with
its causes.

`history_reader` gives what happened in the whole run as plain values; `timeline`, `timeline_files` and `report` show
them. Called by the command line. Must not write, except
`timeline_files` to the file that the user names, and `history_reader` the history log of a run that has ended.
"""

from engine.inspect.machines import machines_plain, machines_text
from engine.inspect.moment import Moment, open_record, recorded_waits, replayed, state_at
from engine.inspect.story import Story

__all__ = [
    "Moment",
    "Story",
    "machines_plain",
    "machines_text",
    "open_record",
    "recorded_waits",
    "replayed",
    "state_at",
]
