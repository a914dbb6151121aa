"""What a scheduler's process that ended left behind while the actors of its run live on: the record, and the actors.

Used by the scheduler actor that Ray has started again, before it handles anything. Nothing is taken back: the run goes
on from the last event that was recorded.
"""

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from engine.actors.failures import failure_reason
from engine.actors.lasting import Living, find_living
from engine.actors.plan import Plan, Redo, Restore
from engine.commands import Command
from engine.errors import EngineError, RunFailed
from engine.ids import Incarnation, ReplicaId, StepId
from engine.metrics.collector import RunMetrics
from engine.metrics.journal import keep_rows
from engine.metrics.status import Status
from engine.metrics.steps import ReplayedRows, StepRows
from engine.metrics.transitions import Transitions
from engine.schedule import After, Recovered, read, recover
from engine.schedule.lock import RecordLock
from engine.states.state import State

SENT = 1 << 24
"""Calls that a scheduler may make to an actor for one event; far more than it does."""
PATIENCE_S = 30.0
"""For an actor to let itself be taken over, where no heartbeat says otherwise."""
Replica = tuple[Incarnation, bool, bool]
"""Its last life, whether that is up, and whether another comes."""
NOT_UP = ("lost", "joining")
"""What the record says of a replica that has no life, or none yet of which it was heard that it is up."""
STORES = ("trajectories", "weights")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Survived:
    """`orders`: those that are open, to be given again. `lock` is on the record, for the recorder that
    goes on with it."""

    recovered: Recovered
    lock: RecordLock
    orders: list[Command]
    restore: Restore
    """With the steps that the trainer may train again."""
    updates: Mapping[StepId, int]
    """The optimizer's, in these steps."""
    rows: StepRows
    """Of steps that are under way."""

    @property
    def after(self) -> After:
        """Where the record goes on."""
        return After(events=self.recovered.events, torn=self.recovered.torn)

    @property
    def failure(self) -> EngineError | None:
        """What ended the run, if a defect did: the event after the last that was handled could not be."""
        rejected = [one for one in self.recovered.report.rejected if one.event.id == self.recovered.events]
        return RunFailed(rejected[-1].reason) if rejected else None

    @property
    def ended(self) -> bool:
        return self.failure is not None or self.recovered.scheduler.state.outcome is not None

    @property
    def published(self) -> StepId:
        """Train steps in the newest weights version."""
        state = self.recovered.scheduler.state
        return state.steps_in[state.latest_version]

    def replicas(self, lives: list[ReplicaId]) -> dict[ReplicaId, Replica]:
        """Of each replica, as the record shows it: its last life, whether that is up, and whether another comes.
        `lives`: those that the run began with, of which the record need not have heard yet. One that is joining was
        ordered, and is not up: it may wait for a node."""
        known = self.recovered.scheduler.state.fleet.replicas
        shown = {id: (one.incarnation, one.state not in NOT_UP, one.returns) for id, one in known.items()}
        return dict.fromkeys(lives, (0, False, True)) | shown


def survived_of(run_dir: Path, transitions: Transitions) -> Survived:
    """Read what is left of a run and take over its record. Raises: `RecordError`."""
    record = read(run_dir / "schedule")
    lock = RecordLock(run_dir / "schedule")
    try:
        under_way = ReplayedRows(transitions)
        recovered = recover(
            record,
            transitions,
            transitions,
            replayed=lambda frame, state: under_way.watch(frame.event, frame.commands, state),
        )
        if not recovered.events:
            raise RunFailed("the scheduler's process ended before the run began")
        state = recovered.scheduler.state
        keep_rows(run_dir / "metrics.jsonl", lambda row: _recorded(row, state))
    except BaseException:
        lock.release()
        raise
    first = min(state.kept.by_step, default=state.steps_trained)
    restore = Restore(
        steps=first,
        optimizer_steps=state.updates_in[first],
        redo=tuple(Redo(step=b.step, groups=b.groups, staleness=b.staleness) for b in recovered.batches(first)),
    )
    later = {step: state.updates_in[step + 1] - state.updates_in[step] for step in range(first, state.steps_trained)}
    orders = state.orders.reissued(recovered.at)
    return Survived(recovered, lock, orders, restore, later, under_way.rows)


def status_at_end(run_dir: Path) -> Status:
    """Of a run that has finished, as its record shows it. Raises: `RecordError`."""
    transitions = Transitions()
    survived = survived_of(run_dir, transitions)
    survived.lock.release()
    return metrics_at_end(survived, transitions).status()


def metrics_at_end(survived: Survived, transitions: Transitions) -> RunMetrics:
    """Of a run that has ended, whatever its end."""
    metrics = RunMetrics(survived.recovered.scheduler, transitions)
    metrics.at = survived.recovered.at
    return metrics


def _recorded(row: dict[str, Any], state: State) -> bool:
    """Whether what a row of the metrics tells of is in the record, too; else it will be written again."""
    if "validation" in row:
        validations = state.validations
        return bool(row["validation"] < validations.created and row["validation"] not in validations.runs)
    return bool(row["step"] < state.steps_trained and row["step"] not in state.steps)


async def take_hold(launch: str, plan: Plan, events: int, replicas: Mapping[ReplicaId, Replica]) -> Living:
    """Find the actors of a launch and have them take orders from this process, after so many events of the run.
    `replicas`: as the record shows them.

    Raises: `EngineError` where one is gone that nothing can take the place of.
    """
    actors = await asyncio.to_thread(find_living, launch)
    first = events * SENT + 1
    known = Living(actors=actors, first=first)
    for needed in (*STORES, *(("gateway",) if plan.make_gateway is not None else ())):
        if known.newest(needed) is None:
            raise EngineError(f"the actor of {needed} is gone, as is what it held")
    up = {f"rollout-{replica}": life for replica, (life, there, _) in replicas.items() if there}
    silent = await let_take_over(known, up, plan.heartbeat_s * plan.missed_beats or PATIENCE_S)
    log.info("took hold of %s; lost: %s", sorted({source for source, _ in actors}), silent or "none")
    return Living(actors=actors, first=first, silent=silent)


async def let_take_over(known: Living, up: Mapping[str, Incarnation], patience_s: float) -> dict[str, str]:
    """Have each actor number its orders anew; why one does not, by its source. `up`: the lives of replicas that are up.
    One that is being started is not waited for: there may be no room for it yet."""
    silent: dict[str, str] = {}

    async def attach(source: str) -> None:
        found: tuple[Incarnation, Any] = known.newest(source) or (0, None)
        life, actor = found
        for (name, earlier), gone in known.actors.items():
            if name == source and earlier < life:
                ray.kill(gone)
        answer = actor.attach.remote(known.first)
        if source.startswith("rollout-") and up.get(source) != life:
            return
        try:
            await asyncio.wait_for(_answered(answer), patience_s)
        except TimeoutError:
            silent[source] = f"no sign of life for {patience_s:g} s after the scheduler came back"
        except RayError as error:
            silent[source] = failure_reason(error)

    sources = {source for source, _ in known.actors} - {*STORES, "gateway"}
    await asyncio.gather(*(attach(source) for source in sorted(sources)))
    return silent


async def _answered(answer: Awaitable[None]) -> None:
    await answer
