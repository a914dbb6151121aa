"""What interrupts a run or changes it, and what it could go on from: recoveries, requests, checkpoints.

Kept by `collector.RunMetrics` from events and orders, O(1) each.
"""

from engine.commands import ParkGroup
from engine.events import CheckpointSaved, Event, RunResumed
from engine.metrics.labels import PARKED_REASONS, REQUESTS
from engine.metrics.transitions import Transitions
from engine.states.state import State


class GoingOn:
    """Counts since this process started or resumed the run, except those that the state or `transitions` have."""

    def __init__(self, state: State, transitions: Transitions) -> None:
        self._state = state
        self._transitions = transitions
        self.requests = dict.fromkeys(REQUESTS.values(), 0)
        self.parked = dict.fromkeys(PARKED_REASONS, 0)
        """Running groups that were ordered to be parked, by why."""
        self.checkpoint_at = 0.0
        """When a checkpoint was last complete, or the run went on."""

    @property
    def recoveries(self) -> dict[str, int]:
        """Times the run went on, by how."""
        return self._transitions.recoveries

    def requested(self, kind: type[Event]) -> None:
        self.requests[REQUESTS[kind]] += 1

    def resumed(self, event: RunResumed) -> None:
        self._transitions.heard(event)
        self.checkpoint_at = event.at

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        self.checkpoint_at = event.at

    @property
    def checkpoint_steps(self) -> int:
        """Train steps in the newest complete checkpoint; 0 before the first."""
        return self._state.checkpoints.newest

    def park_ordered(self, command: ParkGroup) -> None:
        self.parked["timeout" if command.reason else "moved"] += 1

    def draining_s(self, now: float) -> float:
        """How long the run has been coming to rest; 0 where nobody asked it to."""
        since = self._transitions.draining_since
        return max(0.0, now - since) if self._state.draining and since is not None else 0.0

    @property
    def replicas_wanted(self) -> int:
        """Replicas that generate and are wanted, also those that are down."""
        return sum(replica.process.wanted for replica in list(self._state.fleet.rollouts()))

    @property
    def slow(self) -> list[int]:
        """Replicas that are slower than the others by more than may be."""
        return [r.id for r in list(self._state.fleet.replicas.values()) if r.slow and r.state != "down"]
