"""The record of a run: how events and commands are encoded, stored, read and replayed.

`Recorder` writes the driver's events and commands, `read` reads them, and `replay` gives the events to a new scheduler.
Nothing here decides anything, and nothing is ever unpickled.
"""

from engine.record.codec import CodecError
from engine.record.frames import FORMAT_VERSION, Header, Rejected, Tick
from engine.record.reader import Record, read
from engine.record.recorder import MemoryRecorder, NullRecorder, RecordEnd, Recorder
from engine.record.recovery import Recovered, recover
from engine.record.replayer import ReplayReport, replay

__all__ = [
    "FORMAT_VERSION",
    "RecordEnd",
    "CodecError",
    "Header",
    "MemoryRecorder",
    "NullRecorder",
    "Record",
    "Recorder",
    "Recovered",
    "Rejected",
    "ReplayReport",
    "Tick",
    "read",
    "recover",
    "replay",
]
