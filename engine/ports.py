"""What the driver needs from the outside: a clock, a recorder, an executor.

Implemented in production by `actors/`, in one process by `local/`, in simulation by `simulation/world.py` and in
replay by
`schedule/replayer.py`, all under the same driver and scheduler.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.commands import Command
from engine.events import Event


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the run began; never falls."""


class Recorder(Protocol):
    def write(self, event: Event, commands: Sequence[Command], state_hash: int) -> None:
        """Append one frame. It must be in the record before any of its commands leaves."""

    def reject(self, event: Event, reason: str) -> None:
        """Append one frame of an event that the scheduler could not handle."""

    def snapshot(self, payloads: Sequence[bytes]) -> None:
        """Append the whole state after the event written last, as `schedule.frames.encode_snapshot` gave it."""

    def flush(self) -> None:
        """Hand every frame written so far to the operating system."""

    def close(self) -> None: ...


class Executor(Protocol):
    def execute(self, commands: Sequence[Command]) -> None:
        """Begin to carry out commands, in order, and return at once. What comes of them arrives later as events."""
