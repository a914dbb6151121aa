"""Recovers the run in a restarted scheduler: reads its record and takes over its running actors.

Called by the scheduler actor after Ray has restarted its process, before it handles an event. The run continues after
the last recorded event; must never drop a recorded event.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from engine.actors.detached_actors import RunningActors, find_actors
from engine.actors.failures import Pulse, failure_reason
from engine.errors import EngineError, RunFailed
from engine.ids import LifeNumber
from engine.metrics.collector import RunMetrics
from engine.metrics.history_log import HistoryLog
from engine.metrics.journal import keep_rows, validation_rows
from engine.metrics.status import Status, read_status
from engine.record import read, recover
from engine.record.files import RecordLock
from engine.runtime.process_port import SERVICES, source_of
from engine.runtime.run_history import RecoveredRun
from engine.states.state import State
from engine.workers.plan import Plan

STORES = ("trajectories", "weights")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunRecovery(RecoveredRun):
    """A run that its restarted scheduler continues."""

    @property
    def failure(self) -> EngineError | None:
        """The defect that ended the run, if one did: the tick after the last one failed."""
        rejected = [one for one in self.recovered.report.rejected if one.number == self.recovered.ticks]
        return RunFailed(rejected[-1].reason) if rejected else None

    @property
    def has_ended(self) -> bool:
        return self.failure is not None or self.recovered.scheduler.state.ending.outcome is not None


def recovery_of(run_dir: Path) -> RunRecovery:
    """Read the record of a run and take it over. Raises: `RecordError`; `RunFailed` if the record has no event."""
    record = read(run_dir / "schedule")
    lock = RecordLock(run_dir / "schedule")
    try:
        recovered = recover(record)
        if not recovered.events:
            raise RunFailed("the scheduler's process ended before the run began")
        state = recovered.scheduler.state
        keep_rows(run_dir / "metrics.jsonl", lambda row: _recorded(row, state))
        history = HistoryLog(run_dir, recovered.events)
    except BaseException:
        lock.release()
        raise
    return RunRecovery(recovered=recovered, lock=lock, log=history)


def status_at_end(run_dir: Path) -> Status:
    """The status of a finished run, from its record. Raises: `RecordError`."""
    recovery = recovery_of(run_dir)
    recovery.lock.release()
    return read_status(metrics_at_end(run_dir, recovery))


def metrics_at_end(run_dir: Path, recovery: RunRecovery) -> RunMetrics:
    """The metrics of a run that has ended, from its record and its rows."""
    validations = [*validation_rows(run_dir / "metrics.jsonl")]
    metrics = RunMetrics(recovery.recovered.scheduler, validations=validations)
    metrics.at = recovery.recovered.at
    return metrics


def _recorded(row: dict[str, Any], state: State) -> bool:
    """Whether the record contains what a row of the metrics reports. Otherwise the row will be written again."""
    if "validation" in row:
        validations = state.validations
        return bool(row["validation"] < validations.facts.created and row["validation"] not in validations.live)
    return bool(row["step"] < state.training.steps_trained and row["step"] not in state.training.steps)


async def take_over(launch: str, plan: Plan, recovery: RunRecovery, epoch: int) -> RunningActors:
    """Find the actors of a launch and make them take orders from this process.

    Raises: `EngineError` if an actor that cannot be replaced is gone.
    """
    actors = await asyncio.to_thread(find_actors, launch)
    known = RunningActors(actors=actors, epoch=epoch)
    for needed in (*STORES, *(("gateway",) if plan.make_gateway is not None else ())):
        if known.newest(needed) is None:
            raise EngineError(f"the actor of {needed} has ended, and its data is lost")
    state = recovery.recovered.scheduler.state
    processes = [*state.processes.values(), *(replica.process for replica in state.replicas.by_id.values())]
    listed = {
        (source_of(one.kind, one.index), one.life): one.state == "up"
        for one in processes
        if one.state != "gone" and one.kind not in SERVICES
    }
    silent = await attach_actors(known, listed, Pulse.of(plan).patience_s)
    log.info("took over %s; lost: %s", sorted({source for source, _ in actors}), silent or "none")
    return replace(known, silent=silent)


async def attach_actors(
    known: RunningActors, listed: Mapping[tuple[str, LifeNumber], bool], patience_s: float
) -> dict[str, str]:
    """Make the listed actors refuse the orders of earlier schedulers. Returns, by source, why an actor does not answer.

    `listed`: whether each life is up. Lives that are starting are not awaited, because they may wait for
    room in the cluster.
    """
    silent: dict[str, str] = {}

    async def attach(life: tuple[str, LifeNumber], is_up: bool) -> None:
        answer = known.actors[life].attach.remote(known.epoch)
        if not is_up:
            return
        try:
            await asyncio.wait_for(answer, patience_s)
        except TimeoutError:
            silent[life[0]] = f"no sign of life for {patience_s:g} s after the scheduler restarted"
        except RayError as error:
            silent[life[0]] = failure_reason(error)

    await asyncio.gather(*(attach(life, is_up) for life, is_up in sorted(listed.items()) if life in known.actors))
    return silent
