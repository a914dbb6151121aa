"""Names, finds and ends the actors that survive the scheduler's process.

Ray ends an actor's children with its process unless they are detached. In a run with a record they are detached and
named, so that a restarted scheduler finds them. They end by themselves when the scheduler is gone for good. Without a
record nothing can be recovered, and they end with their parent.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from engine.actors.failures import failure_reason
from engine.actors.placement import free_places
from engine.actors.process import PackedPlan
from engine.ids import Incarnation
from engine.private_files import write_private

log = logging.getLogger(__name__)

NAMESPACE = "step-engine"
LAUNCH = "launch.txt"
"""File in the run's directory with the prefix of the newest launch's actor names, and the directory's inode."""


def lasting(packed: PackedPlan, source: str, incarnation: Incarnation = 1) -> dict[str, Any]:
    """Ray options of an actor that survives its parent under a name; none if the run has no record."""
    if not packed.lasts:
        return {}
    name = f"{packed.launch}/{source}/{incarnation}"
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Living:
    """The actors of a launch that a restarted scheduler finds."""

    actors: Mapping[tuple[str, Incarnation], Any]
    epoch: int
    """The epoch of that scheduler; they refuse orders of lower ones."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Why an actor could not be taken over, by its source."""

    def newest(self, source: str) -> tuple[Incarnation, Any] | None:
        """The newest incarnation of an actor, if it exists."""
        lives = [life for name, life in self.actors if name == source]
        return (max(lives), self.actors[source, max(lives)]) if lives else None


def find_living(launch: str) -> dict[tuple[str, Incarnation], Any]:
    """Find the actors of a launch, by source and incarnation. Blocks."""
    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = entry["name"].split("/")
        if entry["namespace"] != NAMESPACE or len(name) != 3 or name[0] != launch:
            continue
        try:
            found[name[1], int(name[2])] = ray.get_actor(entry["name"], namespace=NAMESPACE)
        except ValueError:
            log.info("%s has just ended", entry["name"])
    return found


def end_living(launch: str) -> None:
    """Kill all remaining actors of a launch, and free their placement groups. Blocks."""
    for actor in find_living(launch).values():
        ray.kill(actor)
    free_places(launch)


def end_earlier(run_dir: Path) -> None:
    """Kill the actors of an earlier launch of the same run in this cluster that have not noticed yet that their
    scheduler is gone, because they would still write. The caller must hold the run's record. Blocks."""
    earlier = noted_launch(run_dir)
    if earlier is not None:
        end_living(earlier)


def noted_launch(run_dir: Path) -> str | None:
    """The prefix of the newest launch's actor names; None if there is none, or it belongs to another run, because the
    directory is a copy."""
    try:
        launch, _, number = (run_dir / LAUNCH).read_text(encoding="utf-8").strip().rpartition(" ")
        return launch if launch and number == str(run_dir.stat().st_ino) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read: %s", run_dir / LAUNCH, error)
        return None


def note_launch(run_dir: Path, launch: str) -> None:
    """Write the prefix for `end_earlier`. Call it before the launch makes its first actor. If it fails, the run
    continues."""
    try:
        write_private(run_dir / LAUNCH, f"{launch} {run_dir.stat().st_ino}\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", run_dir / LAUNCH, error)


def end_when_orphaned(packed: PackedPlan, scheduler: Any) -> None:
    """Make this actor end `orphan_s` seconds after the scheduler has ended for good. Call it when the actor is made.

    It calls `SchedulerActor.here`, which returns only at the end of the run; Ray repeats the call after each restart of
    the scheduler. The call waits on a separate thread, so a blocked event loop cannot keep the actor alive.
    """
    if packed.lasts:
        me = ray.get_runtime_context().current_actor
        threading.Thread(target=_outlive, args=(me, scheduler, packed), name="orphan", daemon=True).start()


def _outlive(me: Any, scheduler: Any, packed: PackedPlan) -> None:
    reason = "it has taken the run down"
    try:
        ray.get(scheduler.here.remote())
    except RayError as error:
        reason = failure_reason(error)
    log.warning("the scheduler is gone, so this process ends in %g s: %s", packed.orphan_s, reason)
    threading.Event().wait(packed.orphan_s)
    try:
        free_places(packed.launch)  # they are detached, too, so nothing else frees them
    finally:
        ray.kill(me)
