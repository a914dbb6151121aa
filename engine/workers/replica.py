"""The worker of one `Generator`: takes the scheduler's commands, emits events about its groups and weights.

It runs on the generator's event loop. Must never report a group before it is stored, report a
group twice, or leave a command unanswered that needs an answer.
"""

import asyncio
import functools
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, get_args

from engine.commands import (
    AbortGroup,
    MeasureRows,
    ParkGroup,
    ResumeGroup,
    StartGroup,
    StopMeasuring,
    TruncateGroup,
)
from engine.errors import DataFailure, EngineError, clean, reason_of
from engine.events import Event, GroupFailed, OrderProgressed, ProcessUp
from engine.ids import GroupId, LifeNumber, Version
from engine.protocols import Fallible, Generated, GroupWork
from engine.protocols.user_code import awaited
from engine.states.limits import QUEUED
from engine.states.process import REPLICA
from engine.storage.prefixes import Growth, growth_of
from engine.trajectory import Prompt, TrajectoryGroup
from engine.workers.cache_reports import CacheReports
from engine.workers.call_reports import CallReports
from engine.workers.group_reports import (
    Versions,
    aborted_event,
    check_generated,
    checked_count,
    generated_event,
    prefix_event,
)
from engine.workers.measurement import Measurements, held_out_of
from engine.workers.plan import Plan, Restore, Rollout
from engine.workers.replica_weights import ReplicaWeights, SyncCommand
from engine.workers.sample_keeper import keeper_of
from engine.workers.threads import contained, from_any_thread, on_a_thread
from engine.workers.worker import Peers, Worker

# -- one attempt -------------------------------------------------------------------------------------------------------


FINISHED_S = 0.02
"""Seconds until ended trajectories are reported. A group that ends meanwhile, because its rewards take no time, needs
no such report."""
PARK_S = 10.0
"""Seconds that a generator has to give up a group that is being parked; then its work on the group is canceled."""


@dataclass(slots=True, eq=False)
class GroupAttempt:
    """One order to generate a group, from its arrival to its report."""

    group: GroupId
    number: int
    order: int
    """The number of its order in the order book."""
    unwanted: bool = False
    """Its outcome must not be reported."""
    truncate: bool = False
    park: bool = False
    """It must end now, unfinished, with the tokens it has."""
    begun: bool = False
    """`generate` has been called."""
    work: GroupWork | None = None
    """While `generate` runs: its argument. Not longer: both refer to each other, and only a garbage collection would
    free them."""
    finished: int = 0
    """Trajectories that have ended."""
    reported: int = 0
    """Ended trajectories that were in the last report."""
    unsaved: TrajectoryGroup | None = None
    """The newest prefix that is not in the trajectory store yet."""
    saved: TrajectoryGroup | None = None
    """The prefix that this attempt stored last."""
    saving: asyncio.Task[None] | None = None
    kept: bool = False
    """Its group is being stored. It must not be canceled: the store would have the group after it was discarded."""
    task: asyncio.Task[None] = field(init=False)


# -- the replica -------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class ReplicaWorker(Worker):
    """One life of a replica. Group commands are executed at once; weights commands one at a time, in the order of
    arrival."""

    kind = REPLICA
    rollout: Rollout | None = None
    """What it runs, once that is made."""
    _joined = False
    _finished = 0
    """Trajectories of running attempts that have ended."""
    _reported = 0
    """Ended trajectories that were in the last reports."""
    _newest_start = -1
    """Number of the newest order to start or resume a group; a repeat has no higher one. The orders of a life arrive in
    ascending order of their numbers: the executor sends them in the order of the book, and `wire.InOrder` restores
    it."""

    def __init__(self, plan: Plan, index: int, life: LifeNumber, peers: Peers) -> None:
        super().__init__(plan, index, life, peers)
        self._running: dict[GroupId, GroupAttempt] = {}
        self._unreported: dict[GroupAttempt, None] = {}
        """Attempts with trajectories that have ended since the last reports."""
        self._who = {"replica": index, "life": life}
        self._rewarded = plan.rewarded
        self._prepared = bool(plan.limits.states_at(QUEUED))
        """Whether the trajectory store may have another prompt for a group, from an added state before generation."""
        self._keeper = keeper_of(plan.run_dir, plan.sample_policy)

    @property
    def threads(self) -> int:
        return self.plan.threads.replica

    async def _open(self, restore: Restore | None) -> None:
        self.rollout = rollout = await on_a_thread(self.plan.rollout_maker, self.index)
        self.generator = generator = rollout.generator
        self._progress_every_s = self.progress_every_s(StartGroup)
        self._note_progress = from_any_thread(self._take_progress)
        self._note_finished = from_any_thread(self._take_finished)
        self._note_prefix = from_any_thread(self._save)
        self._measuring = Measurements(self, held_out_of(self.plan, rollout, self._keeper), lambda: self.version)
        sources = [generator, *([] if rollout.evaluator in (None, generator) else [rollout.evaluator])]
        CallReports(self, sources)
        self._cache = CacheReports(self, generator, lambda: self.running)
        self._weights = ReplicaWeights(
            self, generator, self._measuring, lambda: [attempt.task for attempt in self._running.values()]
        )
        self._starts = {
            StartGroup: self._start,
            ResumeGroup: self._start,
            AbortGroup: self._abort,
            ParkGroup: self._park,
            TruncateGroup: self._truncate,
            **dict.fromkeys(get_args(SyncCommand), self._weights.carry_out),
            MeasureRows: lambda command: self._measuring.measure(command, self._weights.last),
            StopMeasuring: self._stop_measuring,
        }

    def join(self) -> None:
        """Report that the replica is up, with the initial weights. Further calls do nothing. Raises: `EngineError` if
        it is not open."""
        if not self._opened:
            raise EngineError(f"replica {self.index} is not open")
        if self._joined:
            return
        self._joined = True
        self.peers.emit(
            ProcessUp(
                kind=REPLICA, index=self.index, life=self.life, slots=self.plan.slots,
                samples=self.plan.samples, version=0,
            )
        )  # fmt: skip
        if isinstance(self.generator, Fallible):
            self.spawn(self._listen(self.generator))

    async def _close(self) -> None:
        for attempt in self._running.values():
            attempt.unwanted = True
        if self._opened:
            self._measuring.close()
        await super()._close()
        if self.rollout is not None:
            try:
                await awaited(self.rollout.generator.close)
            except Exception:
                log.exception("closing the generator of replica %d failed", self.index)

    @property
    def version(self) -> Version:
        """The weights version that the replica samples from."""
        return self._weights.version

    @property
    def running(self) -> int:
        """Number of groups being generated."""
        return len(self._running)

    # groups

    def _start(self, command: StartGroup | ResumeGroup, prompt: Prompt | None = None) -> None:
        if command.number <= self._newest_start:
            return
        self._newest_start = command.number
        before = self._running.get(command.group)
        attempt = GroupAttempt(command.group, command.attempt, command.number)
        self._running[command.group] = attempt
        attempt.task = self.spawn(self._run(attempt, command, prompt, before))
        self._cache.begin()
        if before is not None:
            self._stop(before)

    async def _run(
        self,
        attempt: GroupAttempt,
        command: StartGroup | ResumeGroup,
        prompt: Prompt | None,
        before: GroupAttempt | None,
    ) -> None:
        """Run one attempt and emit exactly one event, unless it became unwanted or the worker closed."""
        try:
            if before is not None:
                await asyncio.wait([before.task])  # a generator tells groups apart, not attempts
            event = await self._attempt(attempt, command, prompt)
        except DataFailure as error:
            event = self._failed(attempt, "data", error)
            if self._keeper is not None and isinstance(error.judged, TrajectoryGroup) and not attempt.unwanted:
                self.spawn(self._keeper.keep_failed(error.judged, attempt.number, self.version, str(error)))
        except asyncio.CancelledError as error:
            if attempt.unwanted or self._closed:
                return
            event = self._failed(attempt, "infrastructure", error)
        except Exception as error:
            event = self._failed(attempt, "infrastructure", error)
        finally:
            if self._running.get(attempt.group) is attempt:
                del self._running[attempt.group]
            self._finished -= attempt.finished
            self._reported -= attempt.reported
            attempt.finished = attempt.reported = 0
            self._unreported.pop(attempt, None)
        if not attempt.unwanted and event is not None:
            self.peers.emit(event)

    async def _attempt(
        self, attempt: GroupAttempt, command: StartGroup | ResumeGroup, prompt: Prompt | None
    ) -> Event | None:
        """Generate, check and store a group; returns the event to emit."""
        if prompt is None:
            raise EngineError(f"{type(command).__name__} for group {command.group} has no prompt")
        resumes = isinstance(command, ResumeGroup)
        partial = await self.peers.trajectories.partial(command.group) if resumes or self._prepared else None
        if self._prepared and partial is not None:
            prompt = partial.prompt
        if not resumes:
            partial = None
        kept = partial.versions() if partial is not None else None
        began = self.version if kept is None else min(kept[0], self.version)
        if self._is_behind(kept) or attempt.park or self._weights.pause_mode in ("abort", "wait", "sleep"):
            group = partial or TrajectoryGroup(group=command.group, prompt=prompt, trajectories=[])
            return aborted_event(group, attempt.number, **self._who)
        every = self.plan.prefix_every_tokens
        truncate = attempt.truncate or (isinstance(command, ResumeGroup) and command.truncate)
        work = GroupWork(
            group=command.group,
            attempt=command.attempt,
            prompt=prompt.copy(),
            samples=self.plan.samples,
            partial=partial,
            truncate=truncate,
            save_every_tokens=every,
            save=functools.partial(self._note_prefix, attempt, began) if every else None,
            progress=functools.partial(self._note_progress, attempt),
            finished=functools.partial(self._check_finished, attempt),
        )
        attempt.work = work
        attempt.begun = True
        try:
            generated = await awaited(self.generator.generate, work)
        finally:
            attempt.work = attempt.unsaved = None
            if attempt.saving is not None:
                await asyncio.wait([attempt.saving])
            attempt.saved = None
        if attempt.unwanted:
            return None
        versions = Versions(admitted=command.admitted_version, oldest=began, newest=self.version)
        contained(check_generated, work, generated, versions, rewarded=self._rewarded)
        return await self._keep(attempt, generated)

    def _is_behind(self, kept: tuple[Version, Version] | None) -> bool:
        """Whether a group has tokens of a newer version than this replica's. Its last replica stored them and died
        before reporting them."""
        return kept is not None and kept[1] > self.version

    async def _keep(self, attempt: GroupAttempt, generated: Generated) -> Event | None:
        group = generated.group
        if generated.aborted:
            event: Event = aborted_event(group, attempt.number, **self._who)
        else:
            event = generated_event(group, attempt.number, **self._who, described=self.plan.described)
        # the room of a group whose trajectories have ended is reported within `FINISHED_S`
        has_room = not generated.aborted and attempt.finished == self.plan.samples
        attempt.kept = True
        await self.peers.trajectories.put(group, attempt.number, urgent=not has_room)
        if attempt.unwanted:
            await self.peers.trajectories.discard([group.group], attempt.number)
        return event

    def _save(self, attempt: GroupAttempt, began: Version, group: TrajectoryGroup) -> None:
        """Store the prefix of a running group. While one is being stored, only the newest waits."""
        work = attempt.work
        if work is None or attempt.unwanted or self._running.get(attempt.group) is not attempt:
            return
        attempt.unsaved = group
        if attempt.saving is None or attempt.saving.done():
            attempt.saving = self.spawn(self._logged(self._store_prefixes(attempt, work, began), "storing a prefix"))

    async def _store_prefixes(self, attempt: GroupAttempt, work: GroupWork, began: Version) -> None:
        while attempt.unsaved is not None:
            group, attempt.unsaved = attempt.unsaved, None
            versions = Versions(admitted=began, oldest=began, newest=self.version)
            growth = self._growth(attempt, group)
            known = () if growth is None else growth.known
            contained(check_generated, work, Generated(group=group, aborted=True), versions, known=known)
            event = prefix_event(group, attempt.number, **self._who)
            attempt.saved = None  # unknown until this one is stored
            if growth is None:
                await self.peers.trajectories.put(group, attempt.number)
            else:
                await self.peers.trajectories.grow(growth, attempt.number)
            attempt.saved = group
            if attempt.unwanted:
                await self.peers.trajectories.discard([attempt.group], attempt.number)
                return
            self.peers.emit(event)

    def _growth(self, attempt: GroupAttempt, group: TrajectoryGroup) -> Growth | None:
        """The growth of the group since its last prefix; None if the whole group must be stored."""
        if attempt.saved is None:
            return None
        try:
            return contained(growth_of, attempt.saved, group)
        except Exception:  # it is malformed, and the check says how
            return None

    def _check_finished(self, attempt: GroupAttempt, count: Any) -> None:
        """`GroupWork.finished`, on any thread. Raises: `EngineError` for another argument than a count."""
        self._note_finished(attempt, checked_count(count, attempt.group, self.plan.samples))

    def _take_progress(self, attempt: GroupAttempt) -> None:
        self.reports.within(self._progress_every_s, self._report, attempt)

    def _take_finished(self, attempt: GroupAttempt, count: int) -> None:
        """`count` trajectories of an attempt have ended. Report it once enough have ended to start another group, or
        once all of its own have: it waits for its rewards."""
        if count <= attempt.finished or not self._runs(attempt):
            return
        self._finished += count - attempt.finished
        attempt.finished = count
        self._unreported[attempt] = None
        if self._finished // self.plan.samples > self._reported // self.plan.samples or count == self.plan.samples:
            self.reports.within(FINISHED_S, self._report_finished)

    def _report_finished(self) -> None:
        unreported, self._unreported = self._unreported, {}
        for one in unreported:
            if one.finished > one.reported:
                self._report(one)

    def _report(self, attempt: GroupAttempt) -> None:
        if not self._runs(attempt):
            return
        self._reported += attempt.finished - attempt.reported
        attempt.reported = attempt.finished
        self.peers.emit(OrderProgressed(order=attempt.order, finished=attempt.finished))

    def _runs(self, attempt: GroupAttempt) -> bool:
        return self._running.get(attempt.group) is attempt and not attempt.unwanted and not self._closed

    def _failed(self, attempt: GroupAttempt, cause: str, error: BaseException) -> Event:
        which = (attempt.group, self.index, attempt.number, cause)
        log.warning("group %d failed on replica %d, attempt %d (%s)", *which, exc_info=error)
        return GroupFailed(
            group=attempt.group, attempt=attempt.number, cause=cause, reason=reason_of(error), **self._who
        )

    def _abort(self, command: AbortGroup) -> None:
        attempt = self._running.get(command.group)
        if attempt is None:
            # The attempt ended before the order arrived: delete what it stored.
            self.spawn(self.reports.done_after(lambda: self._forget(command), [command.number]))
        elif attempt.number <= command.attempt:
            attempt.unwanted = True
            self.spawn(self.reports.done_after(lambda: self._end(attempt), [command.number]))
        else:
            self.reports.done(command.number)

    async def _forget(self, command: AbortGroup) -> None:
        await self._logged(self.peers.trajectories.discard([command.group], command.attempt), "discarding")

    def _stop(self, attempt: GroupAttempt) -> None:
        """End an attempt without a report."""
        attempt.unwanted = True
        self.spawn(self._end(attempt))

    def _stop_measuring(self, command: StopMeasuring) -> None:
        self._measuring.stop(command)
        self.spawn(self.reports.done_after(self._measuring.wait_for_stopped, [command.number]))

    async def _end(self, attempt: GroupAttempt) -> None:
        if attempt.begun:
            await self._logged(awaited(self.generator.abort, [attempt.group]), "abort")
        if not attempt.kept:
            attempt.task.cancel()

    def _park(self, command: ParkGroup) -> None:
        attempt = self._running.get(command.group)
        if attempt is not None and attempt.number == command.attempt and not attempt.park:
            attempt.park = True
            self.spawn(self._give_up(attempt))

    async def _give_up(self, attempt: GroupAttempt) -> None:
        """End an attempt with the tokens it has. If it does not end within `PARK_S`, it is canceled and fails."""
        if attempt.begun:
            await self._logged(awaited(self.generator.abort, [attempt.group]), "parking")
        await asyncio.wait([attempt.task], timeout=PARK_S)
        attempt.task.cancel()

    def _truncate(self, command: TruncateGroup) -> None:
        attempt = self._running.get(command.group)
        if attempt is None or attempt.number != command.attempt or attempt.truncate:
            return
        attempt.truncate = True
        if attempt.begun:
            self.spawn(self._logged(awaited(self.generator.truncate, [command.group]), "truncate"))

    # tasks

    async def _listen(self, generator: Fallible) -> None:
        self.break_down(clean(str(await awaited(generator.failed))))

    async def _logged(self, work: Coroutine[Any, Any, Any], doing: str) -> None:
        """Run a call that no event answers; log a failure."""
        try:
            await work
        except Exception:
            log.exception("%s failed on replica %d", doing, self.index)
