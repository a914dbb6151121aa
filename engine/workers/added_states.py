"""The worker of added states: passes stored groups, batches and weights to the user's coroutines.

Checks, stores and reports what becomes of a group, and reports whether a batch or weights pass.

The scheduler decides how many groups run at once. Must never let work change a token,
nor store a group again that was discarded meanwhile.
"""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from engine.commands import DiscardGroups, EnterState, InspectStep
from engine.errors import DataFailure, EngineError, clean, place_of, reason_of
from engine.events import Event, InspectionFailed, StateFailed, StateLeft, StepInspected
from engine.ids import NO_VERSION, GroupId, LifeNumber
from engine.policies.state_registry import work_of
from engine.protocols import Batch, Closable, Fallible, PublishedWeights
from engine.protocols.user_code import awaited
from engine.states.limits import GENERATED, PUBLISHING, QUEUED, REWARDING, SCORING
from engine.states.process import ADDED_STATES
from engine.storage.trajectories import copy_group
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup
from engine.workers.call_reports import CallReports
from engine.workers.group_reports import (
    describe,
    describe_prompt,
    judged_problem,
    reward_figures,
    segment_problem,
)
from engine.workers.plan import Inspection, Plan, Restore, Work
from engine.workers.threads import contained, on_a_thread
from engine.workers.worker import Peers, Worker

log = logging.getLogger(__name__)

KEPT = (
    "prompt_ids",
    "token_ids",
    "logprobs",
    "loss_mask",
    "spans",
    "text",
    "finish_reason",
    "figures",
    "continues",
    "shown_prompt",
    "routes",
)
"""The fields of a trajectory that no work may change."""


REMEMBERED_ATTEMPTS = 16_384
"""Number of subjects whose last reported attempt is remembered, to detect repeats."""
Subject = GroupId | tuple[str, int, int]
"""What an order is about: a group, or a state with a version and a step."""


def _subject(command: EnterState | InspectStep) -> Subject:
    return command.group if isinstance(command, EnterState) else (command.state, command.version, command.step)


async def unchanged(group: TrajectoryGroup) -> TrajectoryGroup:
    """The default work of a state: returns the group unchanged."""
    return group


class StateWorker(Worker):
    """The worker of added states, user coroutines that run concurrently. Its orders are `EnterState`, `InspectStep` and
    `DiscardGroups`."""

    kind = ADDED_STATES

    def __init__(self, plan: Plan, index: int, life: LifeNumber, peers: Peers) -> None:
        super().__init__(plan, index, life, peers)
        self._works: Mapping[str, Work] = {}
        """The work of each state on groups."""
        self._inspections: Mapping[str, Inspection] = {}
        """The work of each state of train steps."""
        self._running: dict[Subject, tuple[int, asyncio.Task[None] | None]] = {}
        """The newest attempt of each subject, and its task while that may be canceled."""
        self._reported: OrderedDict[Subject, int] = OrderedDict()
        """The last reported attempt of each subject, to detect repeated orders."""
        self._starts = {EnterState: self._begin, InspectStep: self._begin, DiscardGroups: self._discard}

    async def _open(self, restore: Restore | None) -> None:
        self._works = await on_a_thread(self._make_works)
        self._inspections = await on_a_thread(self._make_inspections)
        CallReports(self, self._user_code)
        for work in self._user_code:
            if isinstance(work, Fallible):
                self.spawn(self._listen(work))

    def _make_works(self) -> dict[str, Work]:
        """Import and make the work of each state. Raises what the user's code raises."""
        plan = self.plan
        names = [*plan.limits.states_at(QUEUED), *plan.limits.states_at(GENERATED)]
        made = {name: plan.make_work(name) for name in names} if plan.make_work is not None else {}
        return {name: made.get(name) or work_of(name) or unchanged for name in names}

    def _make_inspections(self) -> dict[str, Inspection]:
        """The same for the states of train steps."""
        plan = self.plan
        names = [*plan.limits.states_at(SCORING), *plan.limits.states_at(PUBLISHING)]
        return {name: (plan.make_inspection or work_of)(name) for name in names}

    @property
    def _user_code(self) -> list[object]:
        return [*self._works.values(), *self._inspections.values()]

    def _begin(self, command: EnterState | InspectStep, prompt: Prompt | None = None) -> None:
        """A repeat changes nothing; a newer attempt cancels an older one. `prompt`: of a group that is not generated
        yet."""
        subject = _subject(command)
        number, task = self._running.get(subject, (0, None))
        if max(number, self._reported.get(subject, 0)) >= command.attempt:
            return
        if task is not None:
            self.cancel(task)
        self._running[subject] = (command.attempt, self.spawn(self._run(command, prompt)))

    def _discard(self, command: DiscardGroups) -> None:
        """Cancel the work on dropped groups, without a report."""
        for group in command.groups:
            _, task = self._running.pop(group, (0, None))
            if task is not None:
                self.cancel(task)

    async def _close(self) -> None:
        self._running.clear()
        await super()._close()
        for work in self._user_code:
            if isinstance(work, Closable):
                try:
                    await on_a_thread(work.close)
                except Exception:
                    log.warning("%s cannot be closed", type(work).__name__, exc_info=True)

    async def _listen(self, work: Fallible) -> None:
        self.break_down(clean(str(await awaited(work.failed))))

    async def _run(self, command: EnterState | InspectStep, prompt: Prompt | None) -> None:
        try:
            event: Event
            if isinstance(command, InspectStep):
                event = await self._inspected(command)
            else:
                event = await (self._left(command) if prompt is None else self._prepared(command, prompt))
        except DataFailure as error:
            event = self._failed(command, "data", error)
        except Exception as error:
            event = self._failed(command, "infrastructure", error)
        except asyncio.CancelledError as error:
            if not self._wanted(command):
                raise
            event = self._failed(command, "infrastructure", error)
        if self._wanted(command):  # work may have caught its own cancellation
            subject = _subject(command)
            del self._running[subject]
            self._reported[subject] = command.attempt
            self._reported.move_to_end(subject)
            if len(self._reported) > REMEMBERED_ATTEMPTS:
                self._reported.popitem(last=False)
            self.peers.emit(event)

    def _wanted(self, command: EnterState | InspectStep) -> bool:
        """Whether this is the newest order for its subject, which was not dropped, and the worker is not closed."""
        return self._running.get(_subject(command), (0, None))[0] == command.attempt

    async def _prepared(self, command: EnterState, prompt: Prompt) -> StateLeft:
        """Store a group without trajectories: what a replica needs of it is its prompt."""
        kept = await self.peers.trajectories.partial(command.group)
        if kept is None or kept.trajectories:
            kept = TrajectoryGroup(group=command.group, prompt=prompt.copy(), trajectories=[])
        group = await self._worked(command, kept)
        contained(check_prepared, command.state, kept, group)
        if self._wanted(command):  # canceled from here on, it would be in the store after it was discarded
            self._running[command.group] = (command.attempt, None)
        await self.peers.trajectories.put(group, command.attempt)
        if command.group not in self._running:
            await self.peers.trajectories.discard([command.group], command.attempt)
        columns = self.plan.described
        return StateLeft(
            group=command.group, attempt=command.attempt, state=command.state, trainable=0, reward_mean=0.0,
            reward_spread=0.0,
            described="" if columns is None else json.dumps(describe_prompt(group.prompt, columns)),
        )  # fmt: skip

    async def _worked(self, command: EnterState, kept: TrajectoryGroup) -> Any:
        """What the user's work makes of a copy of a group."""
        work = self._works.get(command.state)
        if work is None:
            raise EngineError(f"no work is defined for the state {command.state}")
        return await self._called(command, work, copy_group(kept), f"group {command.group}")

    async def _called(self, command: EnterState | InspectStep, work: Any, given: Any, what: str) -> Any:
        """The result of the user's work on `given`, within the time limit."""
        timeout_s = None if command.state == REWARDING else self.plan.state_timeout_s  # a reward limits its own calls
        try:
            async with asyncio.timeout(timeout_s):
                return await awaited(work, given)
        except TimeoutError as error:
            story = f"the work of {command.state} exceeded its limit of {timeout_s} s on {what}"
            raise EngineError(str(error) or story) from error

    async def _inspected(self, command: InspectStep) -> StepInspected:
        """Ask a state of train steps about a batch or a version."""
        work = self._inspections.get(command.state)
        if work is None:
            raise EngineError(f"no work is defined for the state {command.state}")
        given: Batch | PublishedWeights
        if command.version == NO_VERSION:
            what = f"the batch of step {command.step}"
            groups = [copy_group(group) for group in await self.peers.trajectories.get(command.groups)]
            given = Batch(step=command.step, groups=groups, staleness=list(command.staleness))
        else:
            what, weights = f"version {command.version}", await self.peers.weights.get(command.version)
            given = PublishedWeights(version=command.version, steps=command.step + 1, weights=weights)
        refused = await self._called(command, work, given, what)
        check_inspected(command.state, refused)
        return StepInspected(
            step=command.step, attempt=command.attempt, state=command.state, version=command.version,
            refused=clean(refused or ""),
        )  # fmt: skip

    async def _left(self, command: EnterState) -> StateLeft:
        (kept,) = await self.peers.trajectories.get([command.group])
        group = await self._worked(command, kept)
        contained(check_worked, command.state, kept, group)
        await self.peers.trajectories.replace(group, command.attempt)
        trainable, mean, spread = reward_figures(group)
        return StateLeft(
            group=command.group, attempt=command.attempt, state=command.state, trainable=trainable, reward_mean=mean,
            reward_spread=spread, described="" if self.plan.described is None else describe(group, self.plan.described),
        )  # fmt: skip

    def _failed(self, command: EnterState | InspectStep, cause: str, error: BaseException) -> Event:
        reason = reason_of(error)
        if isinstance(error, EngineError):  # the user's work may raise it, too
            reason += place_of(error)
        if isinstance(command, InspectStep):
            log.warning("the inspection %s failed on step %d", command.state, command.step, exc_info=error)
            return InspectionFailed(
                step=command.step, attempt=command.attempt, state=command.state, version=command.version,
                reason=reason,
            )  # fmt: skip
        log.warning("%s failed on group %d (%s)", command.state, command.group, cause, exc_info=error)
        return StateFailed(
            group=command.group, attempt=command.attempt, state=command.state, cause=cause, reason=reason
        )


def check_inspected(state: str, result: Any) -> None:
    """Raise unless a state of train steps returned None or a reason. Raises: `EngineError`."""
    if result is not None and (not isinstance(result, str) or not result.strip()):
        law = "must return None if it lets them pass, or a text with the reason if it refuses them"
        raise EngineError(f"the work of {state} {law}, not {result!r:.80}")


def check_prepared(state: str, before: TrajectoryGroup, after: Any) -> None:
    """Raise unless `after` is the group `before`, with at most another text and other fields of its prompt.

    Raises: `EngineError`.
    """
    who = f"the work of {state} on group {before.group}"
    if not isinstance(after, TrajectoryGroup):
        raise EngineError(f"{who} must return the group, not {type(after).__name__}")
    if after.group != before.group or after.trajectories:
        raise EngineError(f"{who} returned another group, or trajectories, which only a generator makes")
    prompt: Any = after.prompt
    if not isinstance(prompt, Prompt) or (prompt.row, prompt.source) != (before.prompt.row, before.prompt.source):
        raise EngineError(f"{who} changed the row or the source of the prompt; it may change text and fields only")
    for name, kind in (("text", str), ("fields", Mapping)):
        if not isinstance(getattr(prompt, name), kind):
            raise EngineError(f"{who}: {name} of the prompt is a {type(getattr(prompt, name)).__name__}")


def check_worked(state: str, before: TrajectoryGroup, after: Any) -> None:
    """Raise unless `after` is the group `before`, with at most its rewards changed.

    Raises: `DataFailure` for a reward that is missing, malformed or not a finite number, `EngineError` for any other
    change.
    """
    who = f"the work of {state} on group {before.group}"
    if not isinstance(after, TrajectoryGroup):
        raise EngineError(f"{who} must return the group, not {type(after).__name__}")
    if after.group != before.group or len(after.trajectories) != len(before.trajectories):
        raise EngineError(f"{who} returned another group, or another number of trajectories")
    now, then = after.prompt, before.prompt
    if not isinstance(now, Prompt) or (now.row, now.source, now.text) != (then.row, then.source, then.text):
        raise EngineError(f"{who} changed the prompt; it may change rewards only")
    for index, (old, new) in enumerate(zip(before.trajectories, after.trajectories, strict=True)):
        changed = [name for name in KEPT if not isinstance(new, Trajectory) or getattr(new, name) != getattr(old, name)]
        if changed:
            raise EngineError(f"{who} changed {changed[0]} of trajectory {index}; it may change rewards only")
        problem = judged_problem(new) or segment_problem(after.trajectories, index)
        if problem:
            raise DataFailure(f"{who}, trajectory {index}: {problem}", group=before.group, row=before.prompt.row)
