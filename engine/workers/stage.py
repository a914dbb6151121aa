"""The worker of added states: passes stored groups, batches and weights to the user's coroutines.

Checks, stores and reports what becomes of a group, and reports whether a batch or weights pass.

Called by `runtime.worker`. The scheduler decides how many groups run at once. Must never let work change a token,
nor store a group again that was discarded meanwhile.
"""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from engine.commands import EnterState, InspectStep
from engine.errors import DataFailure, EngineError, clean, place_of, reason_of
from engine.events import Event, InspectionFailed, StateFailed, StateLeft, StepInspected
from engine.ids import NO_VERSION, GroupId, Incarnation
from engine.protocols import Batch, Closable, Fallible, PublishedWeights
from engine.protocols.user_code import awaited
from engine.storage.trajectories import Trajectories, copy_group, copy_prompt
from engine.storage.weights import Weights
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup
from engine.workers.call_reports import CallReports
from engine.workers.group_reports import (
    describe,
    describe_prompt,
    judged_problem,
    reward_figures,
    segment_problem,
)
from engine.workers.plan import Inspection, Work
from engine.workers.threads import contained, on_a_thread
from engine.workers.worker_tasks import WorkerTasks

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


class StageWorker:
    """Executes `EnterState` orders with the state's entry in `works`, and `InspectStep` orders with that in
    `inspections`.

    `timeout_s` limits each execution, except in `untimed` states, whose work limits its own calls. `emit` receives
    events. `described`: the columns that policies see; None: they see only figures. `broken(reason)` is called when
    `Fallible` work has failed for good, or an order cannot be answered.
    """

    def __init__(
        self,
        *,
        works: Mapping[str, Work],
        inspections: Mapping[str, Inspection] | None = None,
        trajectories: Trajectories,
        weights: Weights,
        emit: Callable[[Event], None],
        broken: Callable[[str], None],
        timeout_s: float | None = None,
        untimed: Collection[str] = (),
        incarnation: Incarnation = 0,
        described: Sequence[str] | None = None,
    ) -> None:
        self._works = works
        self._inspections = inspections or {}
        self._trajectories = trajectories
        self._weights = weights
        self._emit = emit
        self._timeout_s = timeout_s
        self._untimed = untimed
        self._described = described
        self._running: dict[Subject, tuple[int, asyncio.Task[None]]] = {}
        self._reported: OrderedDict[Subject, int] = OrderedDict()
        """The last reported attempt of each subject, to detect repeated orders."""
        self._tasks = WorkerTasks("the added states", broken)
        own: list[object] = [*works.values(), *self._inspections.values()]
        self._calls = CallReports("added states", 0, incarnation, own, emit)
        for work in own:
            if isinstance(work, Fallible):
                self._tasks.spawn(self._listen(work, broken))

    def carry_out(self, command: EnterState | InspectStep, prompt: Prompt | None = None) -> None:
        """Start an order and return at once. A repeat changes nothing; a newer attempt cancels an older one. `prompt`:
        of a group that is not generated yet."""
        subject = _subject(command)
        number, task = self._running.get(subject, (0, None))
        if max(number, self._reported.get(subject, 0)) >= command.attempt:
            return
        if task is not None:
            self._tasks.cancel(task)
        self._running[subject] = (command.attempt, self._tasks.spawn(self._carry_out(command, prompt)))

    def discard(self, groups: Sequence[GroupId]) -> None:
        """Cancel the work on dropped groups, without a report."""
        for group in groups:
            _, task = self._running.pop(group, (0, None))
            if task is not None:
                self._tasks.cancel(task)

    async def close(self) -> None:
        """Cancel all work without a report, and close what can be closed."""
        self._running.clear()
        self._calls.close()
        await self._tasks.close()
        works: list[object] = [*self._works.values(), *self._inspections.values()]
        for work in works:
            if isinstance(work, Closable):
                try:
                    await on_a_thread(work.close)
                except Exception:
                    log.warning("%s cannot be closed", type(work).__name__, exc_info=True)

    async def _listen(self, work: Fallible, broken: Callable[[str], None]) -> None:
        broken(clean(str(await awaited(work.failed))))

    async def _carry_out(self, command: EnterState | InspectStep, prompt: Prompt | None) -> None:
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
            self._emit(event)

    def _wanted(self, command: EnterState | InspectStep) -> bool:
        """Whether this is the newest order for its subject, which was not dropped, and the worker is not closed."""
        return self._running.get(_subject(command), (0, None))[0] == command.attempt

    async def _prepared(self, command: EnterState, prompt: Prompt) -> StateLeft:
        """Store a group without trajectories: what a replica needs of it is its prompt."""
        kept = await self._trajectories.partial(command.group)
        if kept is None or kept.trajectories:
            kept = TrajectoryGroup(group=command.group, prompt=copy_prompt(prompt), trajectories=[])
        group = await self._worked(command, kept)
        contained(check_prepared, command.state, kept, group)
        await self._trajectories.put(group, command.attempt)
        if not self._wanted(command):
            await self._trajectories.discard([command.group], command.attempt)
        return StateLeft(
            group=command.group, attempt=command.attempt, state=command.state, trainable=0, reward_mean=0.0,
            reward_spread=0.0,
            described="" if self._described is None else json.dumps(describe_prompt(group.prompt, self._described)),
        )  # fmt: skip

    async def _worked(self, command: EnterState, kept: TrajectoryGroup) -> Any:
        """What the user's work makes of a copy of a group."""
        work = self._works.get(command.state)
        if work is None:
            raise EngineError(f"no work is defined for the state {command.state}")
        return await self._called(command, work, copy_group(kept), f"group {command.group}")

    async def _called(self, command: EnterState | InspectStep, work: Any, given: Any, what: str) -> Any:
        """The result of the user's work on `given`, within the time limit."""
        timeout_s = None if command.state in self._untimed else self._timeout_s
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
            groups = [copy_group(group) for group in await self._trajectories.get(command.groups)]
            given = Batch(step=command.step, groups=groups, staleness=list(command.staleness))
        else:
            what, weights = f"version {command.version}", await self._weights.get(command.version)
            given = PublishedWeights(version=command.version, steps=command.step + 1, weights=weights)
        refused = await self._called(command, work, given, what)
        check_inspected(command.state, refused)
        return StepInspected(
            step=command.step, attempt=command.attempt, state=command.state, version=command.version,
            refused=clean(refused or ""),
        )  # fmt: skip

    async def _left(self, command: EnterState) -> StateLeft:
        (kept,) = await self._trajectories.get([command.group])
        group = await self._worked(command, kept)
        contained(check_worked, command.state, kept, group)
        await self._trajectories.replace(group, command.attempt)
        trainable, mean, spread = reward_figures(group)
        return StateLeft(
            group=command.group, attempt=command.attempt, state=command.state, trainable=trainable, reward_mean=mean,
            reward_spread=spread, described="" if self._described is None else describe(group, self._described),
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
