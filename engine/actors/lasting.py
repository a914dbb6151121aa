"""Actors that outlive the scheduler's process: how they are named, found again, and ended when nobody wants them.

Ray ends an actor's children with its process unless they are detached. Those of a run that keeps a record are, each
under a name of its own, so that a scheduler that Ray has started again finds them. They end by themselves once the
scheduler is gone for good; where there is no record nothing can be found again, and they go with their parent.
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
"""In the run's directory: what the names of the newest launch's actors begin with, and the directory's inode."""


def lasting(packed: PackedPlan, source: str, incarnation: Incarnation = 1) -> dict[str, Any]:
    """Options of an actor: its name, and that it outlives its parent; none where nothing is recorded."""
    if not packed.lasts:
        return {}
    name = f"{packed.launch}/{source}/{incarnation}"
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Living:
    """The actors of a launch that a restarted scheduler finds."""

    actors: Mapping[tuple[str, Incarnation], Any]
    epoch: int
    """Of that scheduler. They refuse orders of lower ones."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Why an actor did not let itself be taken over, by its source."""

    def newest(self, source: str) -> tuple[Incarnation, Any] | None:
        """The last life of an actor, if it is there."""
        lives = [life for name, life in self.actors if name == source]
        return (max(lives), self.actors[source, max(lives)]) if lives else None


def find_living(launch: str) -> dict[tuple[str, Incarnation], Any]:
    """Handles of what lives of a launch, by source and incarnation. Blocks."""
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
    """Kill whatever is left of a launch, and give back what was set aside for it. Blocks."""
    for actor in find_living(launch).values():
        ray.kill(actor)
    free_places(launch)


def end_earlier(run_dir: Path) -> None:
    """Kill what a launch of the same run left in this cluster, which has not noticed yet that its scheduler is gone: it
    would still write. To be called by whoever holds the run's record. Blocks."""
    earlier = noted_launch(run_dir)
    if earlier is not None:
        end_living(earlier)


def noted_launch(run_dir: Path) -> str | None:
    """What the names of its newest launch's actors begin with; None where none is noted, or it is another run's: in a
    copy of a run that may be going on."""
    try:
        launch, _, number = (run_dir / LAUNCH).read_text(encoding="utf-8").strip().rpartition(" ")
        return launch if launch and number == str(run_dir.stat().st_ino) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read: %s", run_dir / LAUNCH, error)
        return None


def note_launch(run_dir: Path, launch: str) -> None:
    """For `end_earlier`. To be called before the first of the launch's actors is there. Where that fails the run goes
    on."""
    try:
        write_private(run_dir / LAUNCH, f"{launch} {run_dir.stat().st_ino}\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", run_dir / LAUNCH, error)


def end_when_orphaned(packed: PackedPlan, scheduler: Any) -> None:
    """To be called as an actor is made: it ends by itself `orphan_s` after the scheduler is gone for good.

    That is known by a call that is answered at the end only, which Ray repeats for as long as it starts the scheduler
    again. It waits on a thread of its own, so that no event loop that is busy or stuck can keep the actor alive.
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
        free_places(packed.launch)  # they are detached, too: nobody else gives them back
    finally:
        ray.kill(me)
