"""Messages from the scheduler actor to the launching process."""

from dataclasses import dataclass

from engine.errors import RunFailed
from engine.metrics.status import Status


class RelaunchNeeded(RunFailed):
    """The run cannot continue in its current processes, but can be relaunched from its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A status of the run. `last`: it is the final one. `relaunch`: why the run must be relaunched from its record;
    empty if it need not be."""

    number: int
    status: Status
    last: bool
    relaunch: str = ""
    end_requested: bool = False
    """A user has asked the run to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Number of calls between the actors so far, for benchmarks."""

    reports: int
    calls: int
    events: int
    decisions_s: tuple[float, ...]
    """Seconds from the arrival of a report until its events were recorded and the resulting commands were sent, for the
    newest reports."""
