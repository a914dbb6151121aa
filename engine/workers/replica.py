"""The worker of one `Generator`: takes the scheduler's commands, emits events about its groups and weights.

Called by `runtime.worker`, on the generator's event loop. Must never report a group before it is stored, report a
group twice, or leave a command unanswered that needs an answer.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from engine.commands import (
    AbortGroup,
    Command,
    MeasureRows,
    ParkGroup,
    ResumeGroup,
    StartGroup,
    StopMeasuring,
    TruncateGroup,
)
from engine.errors import DataFailure, EngineError, clean, reason_of
from engine.events import Event, GroupFailed, OrderDone, OrderProgressed, ProcessUp
from engine.ids import GroupId, Incarnation, ReplicaId, Version
from engine.protocols import Fallible, Generated, Generator, GroupWork
from engine.protocols.user_code import awaited
from engine.storage.prefixes import Growth, growth_of
from engine.storage.trajectories import Trajectories, copy_prompt
from engine.storage.weights import Weights
from engine.trajectory import Prompt, TrajectoryGroup
from engine.workers.cache_reports import CacheReports
from engine.workers.call_reports import CallReports
from engine.workers.group_reports import (
    DoneOrders,
    Versions,
    aborted_event,
    check_generated,
    checked_count,
    generated_event,
    prefix_event,
)
from engine.workers.measurement import HeldOut, Measurements
from engine.workers.progress_reports import Interval, ProgressReports
from engine.workers.replica_weights import ReplicaWeights, SyncCommand
from engine.workers.sample_keeper import SampleKeeper
from engine.workers.threads import contained, from_any_thread
from engine.workers.worker_tasks import WorkerTasks

# -- one attempt -------------------------------------------------------------------------------------------------------


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
    task: asyncio.Task[None] = field(init=False)


# -- the replica -------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class ReplicaWorker:
    """One incarnation of a replica. `emit` receives its events; `broken(reason)` is called when it has failed for good.
    If not `rewarded`, an added state assigns the rewards later. `prepared`: the trajectory store may have another
    prompt for a group, from an added state before generation. `described`: see `generated_event`.

    Group commands are executed at once; weights commands one at a time, in the order of arrival.
    """

    _finished = 0
    """Trajectories of running attempts that have ended."""
    _reported = 0
    """Ended trajectories that were in the last reports."""

    def __init__(
        self,
        *,
        replica: ReplicaId,
        incarnation: Incarnation,
        generator: Generator,
        samples: int,
        trajectories: Trajectories,
        weights: Weights,
        emit: Callable[[Event], None],
        broken: Callable[[str], None],
        prefix_every_tokens: int = 0,
        held_out: HeldOut | None = None,
        rewarded: bool = True,
        prepared: bool = False,
        described: Sequence[str] | None = None,
        progress_every_s: Interval,
        keeper: SampleKeeper | None = None,
        cache_every_s: float = 0.0,
    ) -> None:
        self.replica = replica
        self.incarnation = incarnation
        self.generator = generator
        self.samples = samples
        self.prefix_every_tokens = prefix_every_tokens
        self._rewarded = rewarded
        self._prepared = prepared
        self._described = described
        self._keeper = keeper
        self._progress = ProgressReports(progress_every_s(StartGroup), self._report)
        self._note_progress = from_any_thread(self._progress.note)
        self._note_finished = from_any_thread(self._take_finished)
        self._unreported: dict[GroupAttempt, None] = {}
        """Attempts with trajectories that have ended since the last reports."""
        self._trajectories = trajectories
        self._emit = emit
        self._broken = broken
        self._running: dict[GroupId, GroupAttempt] = {}
        self._newest_start = -1
        """Number of the newest order to start or resume a group; a repeat has no higher one. The orders of an
        incarnation arrive in ascending order of their numbers: the supervisor sends them in the order of the book, and
        `wire.InOrder` restores it."""
        self._tasks = WorkerTasks(f"replica {replica}", broken)
        self._closed = False
        self._who = {"replica": replica, "incarnation": incarnation}
        self._measuring = Measurements(
            held_out, version=lambda: self.version, emit=emit, spawn=self._tasks.spawn,
            progress_every_s=progress_every_s(MeasureRows),
        )  # fmt: skip
        sources = [generator]
        if held_out is not None and held_out.evaluator is not generator:
            sources.append(held_out.evaluator)
        self._calls = CallReports("replica", replica, incarnation, sources, emit)
        self._cache = CacheReports(replica, incarnation, generator, cache_every_s, lambda: self.running, emit)
        self._done = DoneOrders(self._report_done)
        self._weights = ReplicaWeights(
            who=self._who, generator=generator, weights=weights, measuring=self._measuring,
            running=lambda: [attempt.task for attempt in self._running.values()],
            emit=emit, done=self._done, broken=broken, spawn=self._tasks.spawn,
        )  # fmt: skip
        self._carry: dict[type[Command], Callable[[Any, Prompt | None], None]] = {
            StartGroup: self._start,
            ResumeGroup: self._start,
            AbortGroup: lambda command, _: self._abort(command),
            ParkGroup: lambda command, _: self._park(command),
            TruncateGroup: lambda command, _: self._truncate(command),
            **dict.fromkeys(get_args(SyncCommand), lambda command, _: self._weights.carry_out(command)),
            MeasureRows: lambda command, _: self._measuring.measure(command, self._weights.last),
            StopMeasuring: lambda command, _: self._stop_measuring(command),
        }

    def join(self, slots: int, version: Version = 0) -> None:
        """Report that the replica is up with weights `version`."""
        self._weights.version = version
        self._emit(
            ProcessUp(
                kind="replica", index=self.replica, incarnation=self.incarnation, slots=slots,
                samples=self.samples, version=version,
            )
        )  # fmt: skip
        if isinstance(self.generator, Fallible):
            self._tasks.spawn(self._listen(self.generator))

    def carry_out(self, command: Command, prompt: Prompt | None = None) -> None:
        """Start a command and return at once. `prompt` is required for commands that start or resume a group.

        Repeats and commands for another incarnation of the replica change nothing.
        """
        if not self._closed and getattr(command, "incarnation", None) == self.incarnation:
            self._carry[type(command)](command, prompt)

    async def close(self) -> None:
        """Cancel everything, without reports, and close the generator."""
        self._closed = True
        for attempt in self._running.values():
            attempt.unwanted = True
        self._measuring.close()
        self._calls.close()
        self._cache.close()
        await self._tasks.close()
        try:
            await awaited(self.generator.close)
        except Exception:
            log.exception("closing the generator of replica %d failed", self.replica)

    @property
    def version(self) -> Version:
        """The weights version that the replica samples from."""
        return self._weights.version

    @property
    def running(self) -> int:
        """Number of groups being generated."""
        return len(self._running)

    # groups

    def _start(self, command: StartGroup | ResumeGroup, prompt: Prompt | None) -> None:
        if command.number <= self._newest_start:
            return
        self._newest_start = command.number
        before = self._running.get(command.group)
        attempt = GroupAttempt(command.group, command.attempt, command.number)
        self._running[command.group] = attempt
        attempt.task = self._tasks.spawn(self._run(attempt, command, prompt, before))
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
                self._tasks.spawn(self._keeper.keep_failed(error.judged, attempt.number, self.version, str(error)))
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
            self._emit(event)

    async def _attempt(
        self, attempt: GroupAttempt, command: StartGroup | ResumeGroup, prompt: Prompt | None
    ) -> Event | None:
        """Generate, check and store a group; returns the event to emit."""
        if prompt is None:
            raise EngineError(f"{type(command).__name__} for group {command.group} has no prompt")
        resumes = isinstance(command, ResumeGroup)
        partial = await self._trajectories.partial(command.group) if resumes or self._prepared else None
        if self._prepared and partial is not None:
            prompt = partial.prompt
        if not resumes:
            partial = None
        kept = partial.versions() if partial is not None else None
        began = self.version if kept is None else min(kept[0], self.version)
        if self._is_behind(kept) or attempt.park or self._weights.pause_mode in ("abort", "wait", "sleep"):
            group = partial or TrajectoryGroup(group=command.group, prompt=prompt, trajectories=[])
            return aborted_event(group, attempt.number, **self._who)
        truncate = attempt.truncate or (isinstance(command, ResumeGroup) and command.truncate)
        work = GroupWork(
            group=command.group,
            attempt=command.attempt,
            prompt=copy_prompt(prompt),
            samples=self.samples,
            partial=partial,
            truncate=truncate,
            save_every_tokens=self.prefix_every_tokens,
            save=from_any_thread(functools.partial(self._save, attempt, began)) if self.prefix_every_tokens else None,
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
            event = generated_event(group, attempt.number, **self._who, described=self._described)
        await self._trajectories.put(group, attempt.number)
        if attempt.unwanted:
            await self._trajectories.discard([group.group], attempt.number)
        return event

    def _save(self, attempt: GroupAttempt, began: Version, group: TrajectoryGroup) -> None:
        """Store the prefix of a running group. While one is being stored, only the newest waits."""
        work = attempt.work
        if work is None or attempt.unwanted or self._running.get(attempt.group) is not attempt:
            return
        attempt.unsaved = group
        if attempt.saving is None or attempt.saving.done():
            attempt.saving = self._tasks.spawn(
                self._logged(self._store_prefixes(attempt, work, began), "storing a prefix")
            )

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
                await self._trajectories.put(group, attempt.number)
            else:
                await self._trajectories.grow(growth, attempt.number)
            attempt.saved = group
            if attempt.unwanted:
                await self._trajectories.discard([attempt.group], attempt.number)
                return
            self._emit(event)

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
        self._note_finished(attempt, checked_count(count, attempt.group, self.samples))

    def _take_finished(self, attempt: GroupAttempt, count: int) -> None:
        """`count` trajectories of an attempt have ended. Report it once enough have ended to start another group, or
        once all of its own have: it waits for its rewards."""
        if count <= attempt.finished or not self._runs(attempt):
            return
        self._finished += count - attempt.finished
        attempt.finished = count
        self._unreported[attempt] = None
        if self._finished // self.samples > self._reported // self.samples or count == self.samples:
            unreported, self._unreported = self._unreported, {}
            for one in unreported:
                if one.finished > one.reported:
                    self._report(one)

    def _report(self, attempt: GroupAttempt) -> None:
        if not self._runs(attempt):
            return
        self._reported += attempt.finished - attempt.reported
        attempt.reported = attempt.finished
        self._emit(OrderProgressed(order=attempt.order, finished=attempt.finished))

    def _runs(self, attempt: GroupAttempt) -> bool:
        return self._running.get(attempt.group) is attempt and not attempt.unwanted and not self._closed

    def _failed(self, attempt: GroupAttempt, cause: str, error: BaseException) -> Event:
        which = (attempt.group, self.replica, attempt.number, cause)
        log.warning("group %d failed on replica %d, attempt %d (%s)", *which, exc_info=error)
        return GroupFailed(
            group=attempt.group, attempt=attempt.number, cause=cause, reason=reason_of(error), **self._who
        )

    def _abort(self, command: AbortGroup) -> None:
        attempt = self._running.get(command.group)
        if attempt is None:
            # The attempt ended before the order arrived: delete what it stored.
            self._tasks.spawn(self._done.add_after(lambda: self._forget(command), [command.number]))
        elif attempt.number <= command.attempt:
            attempt.unwanted = True
            self._tasks.spawn(self._done.add_after(lambda: self._end(attempt), [command.number]))
        else:
            self._done.add(command.number)

    async def _forget(self, command: AbortGroup) -> None:
        await self._logged(self._trajectories.discard([command.group], command.attempt), "discarding")

    def _stop(self, attempt: GroupAttempt) -> None:
        """End an attempt without a report."""
        attempt.unwanted = True
        self._tasks.spawn(self._end(attempt))

    def _stop_measuring(self, command: StopMeasuring) -> None:
        self._measuring.stop(command)
        self._tasks.spawn(self._done.add_after(self._measuring.wait_for_stopped, [command.number]))

    def _report_done(self, event: OrderDone) -> None:
        if not self._closed:
            self._emit(event)

    async def _end(self, attempt: GroupAttempt) -> None:
        if attempt.begun:
            await self._logged(awaited(self.generator.abort, [attempt.group]), "abort")
        attempt.task.cancel()

    def _park(self, command: ParkGroup) -> None:
        attempt = self._running.get(command.group)
        if attempt is not None and attempt.number == command.attempt and not attempt.park:
            attempt.park = True
            self._tasks.spawn(self._give_up(attempt))

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
            self._tasks.spawn(self._logged(awaited(self.generator.truncate, [command.group]), "truncate"))

    # tasks

    async def _listen(self, generator: Fallible) -> None:
        self._broken(clean(str(await awaited(generator.failed))))

    async def _logged(self, work: Coroutine[Any, Any, Any], doing: str) -> None:
        """Run a call that no event answers; log a failure."""
        try:
            await work
        except Exception:
            log.exception("%s failed on replica %d", doing, self.replica)
