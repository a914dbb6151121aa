"""Starts a run on Ray, watches it without polling, and ends it with all processes that it started.

The command line and users with a custom plan call it. The scheduler actor is a child of this process and ends with it;
the other actors end soon after. If the scheduler requests a new launch or cannot be restarted by Ray, this process
resumes the run from its record. In the second case the new scheduler decides whether the run continues
(`State.end_run`).
"""

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from engine.actors.cluster import join_cluster, require_shared_files
from engine.actors.detached_actors import PackedPlan, end_actors
from engine.actors.failover import status_at_end
from engine.actors.failures import Pulse, raised, unwrapped
from engine.actors.launcher_watch import RayNode, SchedulerWatch, end_ray, ray_processes
from engine.actors.placement import on_this_node, with_gpus
from engine.actors.private_cluster import connect
from engine.actors.scheduler_actor import RelaunchNeeded, SchedulerActor, Traffic, Update
from engine.config import Config
from engine.control.requests import Drain, Operation, Stop
from engine.errors import EngineError, RunFailed, RunFinished, clean, counted
from engine.events import RunInterrupted
from engine.metrics.status import Status
from engine.plans.configured_plan import checked_inputs, planned
from engine.plans.input_changes import settle_inputs
from engine.protocols.named_code import NO_LOCAL, Local
from engine.tasks.quickstart import Progress
from engine.workers.plan import Plan, Resumption

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Seconds that actors get to end by themselves."""
RELAUNCH_DELAY_S = 5.0
"""Seconds between two relaunches of a run, because the memory of a process is freed some time after Ray reports its
end."""


def launch(
    config: Config,
    run_dir: str | Path,
    *,
    progress: Progress | None = None,
    resume: bool = False,
    force_from: str | None = None,
    settings: Sequence[tuple[str, str]] = (),
    accept_data_change: bool = False,
    local: Local = NO_LOCAL,
) -> "RunHandle":
    """Start the run of a configuration, in a directory that `storage.run_directory.create` has made.

    `resume` continues the run in the directory: from the checkpoint `force_from` if given, with `settings` of the
    scheduler as (path, value), and with changed data only if `accept_data_change` is set. `local`: functions and
    classes that other processes cannot import. If the configuration or `RAY_ADDRESS` names a cluster, it is joined, and
    the process stays connected after the run. `progress(share, text)` is called as each stage of the start begins and
    goes on; `share` is from 0 to 1. Returns when every actor is up and the first prompts are drawn.

    Raises: `ConfigError` if the configuration cannot run, before any actor starts if possible.
    """
    join_cluster(config, log.info)
    inputs = checked_inputs(config, progress, local)
    plan = dataclasses.replace(planned(config, inputs, Path(run_dir)), resume=resume)
    settle_inputs(config, inputs, plan, accept_data_change, partial(progress, 1.0) if progress else log.warning)
    if ray.is_initialized():
        require_shared_files(config, str(plan.run_dir))
    plan = dataclasses.replace(plan, resumption=Resumption(force_from=force_from, settings=tuple(settings)))
    return start(plan, progress)


def start(plan: Plan, progress: Progress | None = None) -> "RunHandle":
    """Start the run of a plan. If Ray is not initialized, starts a local cluster, which ends with the run.
    `progress(share, text)` is called as each stage of the start begins."""
    show = progress or (lambda share, text: None)
    say = partial(show, 0.0) if progress else log.warning
    plan.require_scorers()
    if plan.run_dir is None:  # without a record, the run cannot be relaunched
        plan = dataclasses.replace(plan, limits=dataclasses.replace(plan.limits, run_restarts=0))
    own = not ray.is_initialized()
    node = None
    try:
        if own:
            show(0.0, "starting Ray on this machine")
            connect(plan.object_store_bytes)
        show(0.0, f"starting {counted(plan.replicas, 'replica')} and the trainer, which load the model")
        node = RayNode(own, plan.run_dir, ray_processes())
        plan, notes = with_gpus(plan)
        for note in notes:
            say(note)
        return RunHandle(plan, Launched.of(plan, node, say), node)
    except BaseException:
        if node is not None:
            node.close()
        elif own:
            end_ray()
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
    def of(cls, plan: Plan, node: RayNode, show: Callable[[str], None]) -> "Launched":
        """Start every actor of a plan. `show` is called with what the start waits for. After an error, no actor
        remains."""
        packed = PackedPlan.of(plan)
        restarts = plan.liveness.scheduler_restarts if packed.detached else 0
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 100_000, "enable_task_events": False}
        options |= {"max_restarts": restarts, **on_this_node()}
        actor = ray.remote(SchedulerActor).options(**options).remote(packed)
        try:
            opening = actor.open.remote()
            while waits := node.answer(actor.next_wait.remote()):
                show(waits)
            url = node.answer(opening)
            process = node.answer(actor.beat.remote())
            node.answer(actor.begin.remote())
        except BaseException as error:
            if node.takes_orders:
                ray.kill(actor)
                end_actors(packed.launch)
            if isinstance(error, RayError):
                raise raised(error) from None
            raise
        return cls(actor, packed.launch, url, process)

    def end(self) -> None:
        """Kill every actor of the run."""
        ray.kill(self.actor)
        end_actors(self.launch)


class RunHandle:
    """A run on Ray, as seen by the launching process."""

    def __init__(self, plan: Plan, launched: Launched, node: RayNode) -> None:
        self.note: Callable[[str], None] = log.warning
        """Called with one line when the run restarts from its record, and, on another thread, when a hung scheduler was
        killed."""
        self.end_requested = False
        """Whether this process, or a user through `updates`, asked the run to end."""
        self._plan = plan
        self._launched = launched
        self._node = node
        self._seen = 0
        self._last: Status | None = None
        self._found: Status | None = None
        """The final status of a run that was to be relaunched but had finished."""
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
        """The status of the run after each change, at most a few times per second. The last one is the final status.

        Raises: the defect that ended the run: `PolicyError`, `InvariantViolated`, `RecordError`, …; `RayProcessEnded`
        as soon as Ray ends on this node.
        """
        while self._last is None:
            try:
                update = self._next_update()
            except RayError as error:
                story = self._story(error)
                lost = isinstance(error, RayActorError) or isinstance(story, RelaunchNeeded)
                if not lost or not self._relaunch_run(str(story), recorded=False):
                    raise story from unwrapped(error)
                continue
            self._seen = update.number
            self.end_requested |= update.end_requested
            if update.last and update.relaunch and self._relaunch_run(update.relaunch, recorded=True):
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
        """The error to report. If the scheduler was killed because it hung, this is the reason."""
        killed = self._watch.killed if isinstance(error, RayActorError) else ""
        return RunFailed(killed) if killed else raised(error)

    def _relaunch_run(self, reason: str, *, recorded: bool) -> bool:
        """Relaunch the run from its record. Returns False if there is no record or a user asked the run to end.

        `recorded`: whether the record has the reason. If the run has finished, `_found` is its final status.
        Raises: the reason why the run cannot be relaunched.
        """
        if self._plan.run_dir is None or self.end_requested:
            return False
        interrupted = None if recorded else RunInterrupted(reason=clean(reason))
        self._node.require_ray()
        self._watch.stop()
        self._launched.end()
        while True:
            self.note(f"{reason}; the run restarts from its record")
            try:
                self._launch_again(self._plan.run_dir, interrupted)
                return True
            except RelaunchNeeded as error:
                reason = f"the run could not restart: {error}"
                interrupted = RunInterrupted(reason=clean(reason), launch=True)
            threading.Event().wait(RELAUNCH_DELAY_S)
            if self.end_requested:
                raise RunFailed(reason)

    def _launch_again(self, run_dir: Path, interrupted: RunInterrupted | None) -> None:
        again = Resumption(again=True, interrupted=interrupted)
        plan = dataclasses.replace(self._plan, resume=True, resumption=again)
        try:
            self._launched = Launched.of(plan, self._node, lambda line: self.note(line))
        except RunFinished:
            from engine.runtime.metrics_endpoint import withdraw_addresses

            withdraw_addresses(self._plan)
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
        self.end_requested = True  # also set here, because the scheduler may end before its next update
        try:
            self._node.answer(self._launched.actor.tell.remote(asked))
        except RayError as error:
            raise raised(error) from unwrapped(error)

    def history(self) -> str:
        """A description of what a resumed run continues from; empty for a new run."""
        text: str = self._node.answer(self._launched.actor.history.remote())
        return text

    def traffic(self) -> Traffic:
        """Number of calls between the actors so far."""
        traffic: Traffic = self._node.answer(self._launched.actor.traffic.remote())
        return traffic

    def close(self) -> None:
        """End every process of the run, in any state. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._watch.stop()
        if self._node.takes_orders:
            if self._last is None:
                try:
                    ray.get(self._launched.actor.close.remote(), timeout=CLOSE_TIMEOUT_S)
                except (RayError, GetTimeoutError):
                    log.warning("the run did not close within %g s and is killed", CLOSE_TIMEOUT_S)
            self._launched.end()
        self._node.close()

    def __enter__(self) -> "RunHandle":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
