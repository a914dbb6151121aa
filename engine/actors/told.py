"""What the scheduler actor tells the process that launched the run."""

from dataclasses import dataclass

from engine.errors import RunFailed
from engine.metrics.status import Status


class BeginAgain(RunFailed):
    """The run cannot go on where it is; it can begin again from its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A status on its way to whoever shows the run. `last`: nothing follows it. `relaunch`: why the run is to be
    started again from its record, if it is."""

    number: int
    status: Status
    last: bool
    relaunch: str = ""
    told: bool = False
    """Somebody has told the run to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Calls between the actors so far, for benchmarks."""

    reports: int
    calls: int
    events: int
    decisions_s: tuple[float, ...]
    """Of the newest slices of reports: from the report's arrival until what they led to was recorded and sent."""
