"""The lives of replicas, as the old and the new code number them.

In the old code, whoever started a life numbered it, and it was known once it had joined. The new scheduler numbers
every life that it orders, also one that never joined: of two lives that a resume orders one after the other, the old
record knows only the second.
"""

from typing import Any

from engine.scheduling.scheduler import Scheduler
from engine.states.process import REPLICA

STALE = 0
"""The number of a life that was over before the new scheduler could know of it."""


class Lives:
    """Numbers of lives in a world, old and new."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._state = scheduler.state
        self._new: dict[tuple[int, int], int] = {}
        self._old: dict[tuple[int, int], int] = {}
        self._newest: dict[int, int] = {}
        """The newest old number of each replica."""

    def to_new(self, name: str, said: dict[str, Any]) -> dict[str, Any]:
        """An old event, with the new number of the life that it tells of."""
        if "incarnation" not in said:
            return said
        replica, old = _replica_of(said), said["incarnation"]
        if (replica, old) not in self._new and name in ("ProcessUp", "ProcessLost"):
            self._meet(replica, old)
        return {**said, "incarnation": self._new.get((replica, old), STALE)}

    def _meet(self, replica: int, old: int) -> None:
        if old < self._newest.get(replica, 0):
            return
        self._newest[replica] = old
        process = self._state.find_process(REPLICA, replica)
        if process is None:
            new = 1
        else:
            new = process.incarnation + (process.state != "starting" or (replica, process.incarnation) in self._old)
        self._new[replica, old] = new
        self._old[replica, new] = old

    def to_old(self, said: dict[str, Any]) -> dict[str, Any]:
        """A new command, with the old number of the life that it is for."""
        if "incarnation" not in said or said.get("kind", REPLICA) != REPLICA:
            return said
        new = said["incarnation"]
        return {**said, "incarnation": self._old.get((_replica_of(said), new), new)}


def _replica_of(said: dict[str, Any]) -> int:
    replica: int = said["index"] if "index" in said else said["replica"]
    return replica
