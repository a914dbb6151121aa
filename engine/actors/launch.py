"""Starts a run over Ray, watches it without polling, and ends it with everything that it started.

The command line calls it, and users with a custom plan. The scheduler actor is a child of this process and ends with
it; the other actors end soon after. If the scheduler asks for it, or has ended for good, this process resumes the run
from its record; in the second case the next scheduler decides whether it continues (`scheduling/issued_commands.py`).
"""

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from engine.actors.cluster import initialize_ray, join_cluster, require_shared_files
from engine.actors.configured_plan import Progress, plan_of
from engine.actors.detached_actors import PackedPlan, end_living
from engine.actors.failover import status_at_end
from engine.actors.failures import Pulse, raised, unwrapped
from engine.actors.launcher_watch import RayNode, SchedulerWatch, sessions_of_their_own
from engine.actors.placement import beside_the_run, with_gpus
from engine.actors.scheduler_actor import SchedulerActor
from engine.config import Config
from engine.config.inputs import LEAST_STORE_BYTES
from engine.control.requests import Drain, Operation, Stop
from engine.errors import EngineError, RunFailed, RunFinished, clean
from engine.events import RunInterrupted
from engine.hardware import object_store_limit
from engine.metrics.status import Status
from engine.runtime.metrics_endpoint import leave_no_word
from engine.runtime.plan import Plan
from engine.runtime.updates import BeginAgain, Traffic, Update

log = logging.getLogger(__name__)

NICENESS = "RAY_worker_niceness"
"""A setting of Ray, 15 by default: beside other programs, actors would hardly run and miss heartbeats."""
OBJECT_STORE_BYTES = 256 << 20
"""Of a cluster of this process' own, where nothing says what it must hold."""
GOODBYE_S = 10.0
"""Seconds that actors get to end by themselves."""
RESPITE_S = 5.0
"""Seconds between two launches of a run that begins again: memory of ended processes is freed some time after Ray
reports their end."""


def launch(
    config: Config,
    run_dir: str | Path,
    *,
    progress: Progress | None = None,
    resume: bool = False,
    force_from: str | None = None,
    settings: Sequence[tuple[str, str]] = (),
) -> "RunHandle":
    """Start the run of a configuration, in a directory that `storage.run_directory.create` has made; `resume`: continue
    the one it holds, from the checkpoint `force_from` if that is given, under `settings` of the scheduler as (path,
    value).

    It joins the cluster that the configuration or `RAY_ADDRESS` names, and stays connected after the run.
    `progress(share, text)` is told while model and data are being made. Returns when every actor is up and the first
    prompts are drawn.
    Raises: `ConfigError` for what cannot run, before any actor starts where it can be known then.
    """
    join_cluster(config, log.info)
    plan = plan_of(config, Path(run_dir), progress)
    if ray.is_initialized():
        require_shared_files(config, str(plan.run_dir))
    return start(dataclasses.replace(plan, resume=resume, force_from=force_from, settings=tuple(settings)))


def start(plan: Plan) -> "RunHandle":
    """Start the run of a plan. In a process without Ray a local cluster is started, and ended with the run."""
    plan.require_scorers()
    if plan.run_dir is None:  # there is no record to begin again from
        plan = dataclasses.replace(plan, limits=dataclasses.replace(plan.limits, run_restarts=0))
    own = not ray.is_initialized()
    node = None
    try:
        if own:
            connect(plan.object_store_bytes)
        node = RayNode.joined(own, plan.run_dir)
        plan = with_gpus(plan)
        return RunHandle(plan, Launched.of(plan, node), node)
    except BaseException:
        if node is not None:
            node.close()
        elif own:
            ray.shutdown()
        raise


@dataclass(frozen=True, slots=True)
class Launched:
    """A started run: its scheduler actor, and the prefix of its actors' names."""

    actor: Any
    launch: str
    metrics_url: str | None
    process: int = 0
    """Process id of the scheduler, on this node; 0 if unknown."""

    @classmethod
    def of(cls, plan: Plan, node: RayNode) -> "Launched":
        """Start every actor of a plan. If that fails, no actor remains."""
        packed = PackedPlan.of(plan)
        restarts = plan.scheduler_restarts if packed.lasts else 0
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 100_000, "enable_task_events": False}
        options |= {"max_restarts": restarts, **beside_the_run()}
        actor = ray.remote(SchedulerActor).options(**options).remote(packed)
        try:
            url = node.answer(actor.open.remote())
            process = node.answer(actor.beat.remote())
            node.answer(actor.begin.remote())
        except BaseException as error:
            if node.takes_orders:
                ray.kill(actor)
                end_living(packed.launch)
            if isinstance(error, RayError):
                raise raised(error) from None
            raise
        return cls(actor, packed.launch, url, process)

    def end(self) -> None:
        """End every process of it."""
        ray.kill(self.actor)
        end_living(self.launch)


def connect(object_store_bytes: int | None = OBJECT_STORE_BYTES) -> None:
    """A local cluster of this process' own. Actors ask for no CPU, so that any plan fits; Ray starts as many processes
    at once as there are. The object store gets what is asked for, or as much as may be."""
    limit = max(LEAST_STORE_BYTES, object_store_limit())
    os.environ.setdefault(NICENESS, "0")
    with sessions_of_their_own():
        initialize_ray(
            address="local",
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            object_store_memory=limit if object_store_bytes is None else min(limit, object_store_bytes),
        )


class RunHandle:
    """A run in other processes."""

    def __init__(self, plan: Plan, launched: Launched, node: RayNode) -> None:
        self.note: Callable[[str], None] = log.warning
        """Receives one line when the run begins again from its record, or a hung scheduler was killed; the latter on
        another thread."""
        self.told = False
        """Whether this process, or a user through `updates`, asked the run to end."""
        self._plan = plan
        self._launched = launched
        self._node = node
        self._seen = 0
        self._last: Status | None = None
        self._found: Status | None = None
        """The end of a run that was to begin again and did not."""
        self._closed = False
        self._watch = self._begin_watch()

    def _begin_watch(self) -> SchedulerWatch:
        launched, pulse = self._launched, Pulse.of(self._plan)
        watch = SchedulerWatch(
            launched.actor, launched.process, pulse, self._node, self._plan.run_dir, launched.launch,
            lambda line: self.note(line),
        )  # fmt: skip
        watch.begin()
        return watch

    @property
    def metrics_url(self) -> str | None:
        return self._launched.metrics_url

    def updates(self) -> Iterator[Status]:
        """The status of the run after each change, at most a few times a second; the last one is the final status.

        Raises: the defect that ended the run: `PolicyError`, `InvariantViolated`, `RecordError`, …; `RayProcessEnded`
        as soon as Ray ends on this node.
        """
        while self._last is None:
            try:
                update = self._next_update()
            except RayError as error:
                story = self._story(error)
                lost = isinstance(error, RayActorError) or isinstance(story, BeginAgain)
                if not lost or not self._begin_again(str(story), recorded=False):
                    raise story from unwrapped(error)
                continue
            self._seen = update.number
            self.told |= update.told
            if update.last and update.relaunch and self._begin_again(update.relaunch, recorded=True):
                continue
            if update.last:
                self._last = update.status
                self._watch.stop()
            yield update.status

    def _next_update(self) -> Update:
        """Raises: `RayError`, `RayProcessEnded`."""
        if self._found is not None:
            return Update(number=0, status=self._found, last=True)
        update: Update = self._node.answer(self._launched.actor.next_update.remote(self._seen))
        return update

    def _story(self, error: RayError) -> EngineError:
        """The error to report; for a scheduler that was killed because it hung, that reason."""
        killed = self._watch.killed if isinstance(error, RayActorError) else ""
        return RunFailed(killed) if killed else raised(error)

    def _begin_again(self, reason: str, *, recorded: bool) -> bool:
        """Resume the run from its record, unless a user asked it to end or there is no record. `recorded`: the record
        says why. If the scheduler decides otherwise, or the run had finished, `_found` is how it ended.

        Raises: the reason why it cannot be launched.
        """
        if self._plan.run_dir is None or self.told:
            return False
        interrupted = None if recorded else RunInterrupted(reason=clean(reason))
        self._node.require_ray()
        self._watch.stop()
        self._launched.end()
        while True:
            self.note(f"{reason}; the run begins again from its record")
            try:
                self._start_again(self._plan.run_dir, interrupted)
                return True
            except BeginAgain as error:
                reason = f"it could not begin again: {error}"
                interrupted = RunInterrupted(reason=clean(reason), launch=True)
            threading.Event().wait(RESPITE_S)
            if self.told:
                raise RunFailed(reason)

    def _start_again(self, run_dir: Path, interrupted: RunInterrupted | None) -> None:
        again = dataclasses.replace(
            self._plan, resume=True, again=True, interrupted=interrupted, force_from=None, settings=()
        )
        try:
            self._launched = Launched.of(again, self._node)
        except RunFinished:
            leave_no_word(self._plan)
            self._found = status_at_end(run_dir)
        else:
            self._watch = self._begin_watch()
        self._seen = 0

    def wait(self) -> Status:
        """Wait for the end of the run and return its final status. Raises like `updates`."""
        for _ in self.updates():
            pass
        assert self._last is not None
        return self._last

    def drain(self, reason: str) -> None:
        """Drain the run: the current batch is trained, a checkpoint is written, and the run stops and can be resumed.
        `updates` then ends."""
        self._tell(Drain(reason=reason))

    def stop(self, reason: str) -> None:
        """Stop the run at once; it can be resumed. `updates` then ends."""
        self._tell(Stop(reason=reason))

    def _tell(self, asked: Operation) -> None:
        self.told = True  # known here, too: the scheduler may be gone before its next update says so
        try:
            self._node.answer(self._launched.actor.tell.remote(asked))
        except RayError as error:
            raise raised(error) from unwrapped(error)

    def past(self) -> str:
        """What a resumed run continues from, in words; empty for a new run."""
        told: str = self._node.answer(self._launched.actor.past.remote())
        return told

    def traffic(self) -> Traffic:
        """Number of calls between the actors so far."""
        traffic: Traffic = self._node.answer(self._launched.actor.traffic.remote())
        return traffic

    def close(self) -> None:
        """End every process of the run, in any state."""
        if self._closed:
            return
        self._closed = True
        self._watch.stop()
        if self._node.takes_orders:
            if self._last is None:
                try:
                    ray.get(self._launched.actor.close.remote(), timeout=GOODBYE_S)
                except (RayError, GetTimeoutError):
                    log.warning("the run did not close in time and is killed")
            self._launched.end()
        self._node.close()

    def __enter__(self) -> "RunHandle":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
