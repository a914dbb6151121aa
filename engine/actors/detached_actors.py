"""Names, finds and ends the actors that survive the scheduler's process.

Ray ends an actor's children with its process unless they are detached. In a run with a record they are detached and
named, so that a restarted scheduler finds them. They end by themselves when the scheduler is gone for good. Without a
record nothing can be recovered, and they end with their parent.
"""

import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from engine.actors.failures import failure_reason
from engine.actors.placement import free_places
from engine.control.proxies import exempt_own_servers
from engine.errors import visible
from engine.ids import LifeNumber
from engine.protocols.user_code import CALLS
from engine.record.files import UMASK, make_directory, make_run_private, private_opener, write_private
from engine.runtime.stacks import register_stacks, stacks_file
from engine.runtime.temporary_paths import shorten_temporary_paths
from engine.workers.plan import Plan

# -- the process of an actor -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """A pickled plan, with the paths that other processes need to import the user's functions in it."""

    directory: str
    path: tuple[str, ...]
    data: bytes
    launch: str
    """Prefix of the names of this launch's actors, unique to it."""
    orphan_s: float
    """Seconds after which they end if the scheduler is not restarted."""
    run_dir: Path | None
    """Absolute path, for actors that do not unpack the plan."""
    trainer_shares: bool = False
    """Whether the trainer uses GPUs that Ray gives to replicas."""

    @classmethod
    def of(cls, plan: Plan) -> "PackedPlan":
        path = tuple(os.path.abspath(place) for place in sys.path)
        launch = f"{plan.run_dir.name if plan.run_dir is not None else 'run'}-{uuid4().hex}"
        run_dir = None if plan.run_dir is None else plan.run_dir.absolute()
        return cls(
            os.getcwd(), path, cloudpickle.dumps(plan), launch, plan.liveness.orphan_s, run_dir, bool(plan.guests)
        )

    @property
    def detached(self) -> bool:
        """Whether the other actors survive the scheduler's process, so that a restarted scheduler can take them
        over."""
        return self.run_dir is not None

    def register_stacks(self, name: str) -> None:
        """Register the file for the stacks, in an actor that does not call `prepare_process`."""
        if self.run_dir is not None:
            register_stacks(stacks_file(self.run_dir, name))

    def enter(self) -> None:
        """Give this process the working directory and the module path of the launching one."""
        if os.path.isdir(self.directory):
            os.chdir(self.directory)
        sys.path.extend(place for place in self.path if place not in sys.path)

    def unpack(self) -> Plan:
        """The plan, after `enter`."""
        self.enter()
        plan: Plan = cloudpickle.loads(self.data)
        return plan


def hide_gpus() -> None:
    """Hide all GPUs from this process if Ray gave its actor none: Ray leaves them visible. Call it first in an actor,
    before anything imports torch. vLLM's own Ray workers, which get their GPUs from Ray, are not affected."""
    if ray.is_initialized() and not ray.get_gpu_ids():  # outside an actor, asking would start a cluster
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def let_blocks_grow() -> None:
    """Have torch's allocator of GPU memory grow its blocks, unless the user has configured it: each pass has new
    sizes, which would fragment blocks of fixed sizes. Call it before torch is imported. Child processes inherit it."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the former name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def prepare_process(name: str, run_dir: Path | None, threads: int | None = None, *, private: bool = False) -> None:
    """Set up variables, threads, logs and stacks. Call it before torch is imported. `threads`: for OpenMP and MKL; 0:
    one per core; None: unchanged. `private`: remove the permissions of others in the run's directory, and for the files
    that this process writes."""
    if threads is not None:
        count = str(threads or os.cpu_count() or 1)
        os.environ.update(OMP_NUM_THREADS=count, MKL_NUM_THREADS=count)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    exempt_own_servers()
    shorten_temporary_paths()
    if run_dir is None:
        return
    failure = make_run_private(run_dir) if private else None
    umask = os.umask(UMASK)
    if not private:
        os.umask(umask & UMASK)  # unchanged, except that this user keeps all permissions
    directory = run_dir / "logs"
    make_directory(directory)
    handler = RunLog(directory / f"{name}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("engine")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    register_stacks(stacks_file(run_dir, name))
    CALLS.write_to(calls_file(run_dir, name))
    if failure is not None:
        logger.warning("other users may be able to read the run's files: %s", failure)


def calls_file(run_dir: Path, name: str) -> Path:
    """The file, beside a process's log, that names the user's function it is calling."""
    return run_dir / "logs" / f"{name}.calls"


LOG_BYTES = 16 << 20
"""Size of a log file. Each process keeps two."""


class RunLog(RotatingFileHandler):
    """The log file of a process in the run's directory, readable only by its user. At `LOG_BYTES`, it replaces the file
    before it. If it cannot be written, records go to stderr. Must never raise. Control characters are escaped: a
    terminal that shows the file would obey them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LOG_BYTES, backupCount=1, delay=True)

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            print(self.format(record), file=sys.stderr)
        else:
            super().handleError(record)

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=private_opener)


# -- names and ends of actors ------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

NAMESPACE = "step-engine"
LAUNCH = "launch.txt"
"""File in the run's directory with the prefix of the newest launch's actor names, and the directory's inode."""


def detached_options(packed: PackedPlan, source: str, life: LifeNumber = 1) -> dict[str, Any]:
    """Ray options of an actor that survives its parent under a name; none if the run has no record."""
    if not packed.detached:
        return {}
    name = f"{packed.launch}/{source}/{life}"
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningActors:
    """The actors of a launch that a restarted scheduler finds."""

    actors: Mapping[tuple[str, LifeNumber], Any]
    epoch: int
    """The epoch of that scheduler; they refuse orders of lower ones."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Why an actor could not be taken over, by its source."""

    def newest(self, source: str) -> tuple[LifeNumber, Any] | None:
        """The newest life of an actor, if it exists."""
        lives = [life for name, life in self.actors if name == source]
        return (max(lives), self.actors[source, max(lives)]) if lives else None


def find_actors(launch: str) -> dict[tuple[str, LifeNumber], Any]:
    """Find the actors of a launch, by source and life. Blocks."""
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


def end_actors(launch: str) -> None:
    """Kill all remaining actors of a launch, and free their placement groups. Blocks."""
    for actor in find_actors(launch).values():
        ray.kill(actor)
    free_places(launch)


def end_earlier(run_dir: Path) -> None:
    """Kill the actors of an earlier launch of the same run in this cluster. They could still write files until they
    notice that their scheduler has ended. The caller must hold the lock on the run's record. Blocks."""
    earlier = noted_launch(run_dir)
    if earlier is not None:
        end_actors(earlier)


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
    if packed.detached:
        me = ray.get_runtime_context().current_actor
        threading.Thread(target=_end_after_scheduler, args=(me, scheduler, packed), name="orphan", daemon=True).start()


def _end_after_scheduler(me: Any, scheduler: Any, packed: PackedPlan) -> None:
    reason = "it has ended the run"
    try:
        ray.get(scheduler.here.remote())
    except RayError as error:
        reason = failure_reason(error)
    log.warning("the scheduler has ended, so this process ends in %g s: %s", packed.orphan_s, reason)
    threading.Event().wait(packed.orphan_s)
    try:
        free_places(packed.launch)  # the placement groups are also detached, so nothing else removes them
    finally:
        ray.kill(me)
