"""Figures about recoveries, users' requests, drains, parked groups and checkpoints.

Updated by `collector.RunMetrics` for each event and command, in O(1).
"""

from engine.commands import ParkGroup
from engine.events import CheckpointSaved, Event, RunResumed
from engine.metrics.labels import PARKED_REASONS, REQUESTS
from engine.metrics.transitions import Transitions
from engine.states.state import State


class GoingOn:
    """Counts since this process started or resumed the run. `state` and `transitions` have counts of the whole run."""

    def __init__(self, state: State, transitions: Transitions) -> None:
        self._state = state
        self._transitions = transitions
        self.requests = dict.fromkeys(REQUESTS.values(), 0)
        self.parked = dict.fromkeys(PARKED_REASONS, 0)
        """Running groups that were parked, by reason."""
        self.checkpoint_at = 0.0
        """When the last checkpoint was saved, or the run was resumed; seconds since the run began."""

    @property
    def recoveries(self) -> dict[str, int]:
        """Number of recoveries, by kind (`labels.RECOVERY_KINDS`)."""
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
        """Seconds since the current drain began; 0 if the run is not draining."""
        since = self._transitions.draining_since
        return max(0.0, now - since) if self._state.draining and since is not None else 0.0

    @property
    def replicas_wanted(self) -> int:
        """Number of generating replicas that the run should have, including those that are down."""
        return sum(replica.process.wanted for replica in list(self._state.fleet.rollouts()))

    @property
    def slow(self) -> list[int]:
        """Ids of replicas that are slower than the others by more than `rollout.straggler_factor`."""
        return [r.id for r in list(self._state.fleet.replicas.values()) if r.slow and r.state != "down"]
