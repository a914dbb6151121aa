"""The worker of added states: passes a stored group to the user's coroutine, checks, stores and reports the result.

Called by `runtime.worker`. The scheduler decides how many groups run at once. Must never let work change a token,
nor store a group again that was discarded meanwhile.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from engine.commands import EnterState
from engine.errors import DataFailure, EngineError, clean, reason_of
from engine.events import Event, StateFailed, StateLeft
from engine.ids import GroupId, Incarnation
from engine.protocols import Closable, Fallible
from engine.protocols.user_code import awaited
from engine.storage.trajectories import Trajectories, copy_group, copy_prompt
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup
from engine.workers.call_reports import CallReports
from engine.workers.group_reports import (
    describe,
    judged_problem,
    reward_figures,
    reward_problem,
    rewards_problem,
    segment_problem,
    steps_problem,
)
from engine.workers.threads import contained, on_a_thread
from engine.workers.worker_tasks import WorkerTasks

log = logging.getLogger(__name__)

Work = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup]]
"""The work on a group in a state. It returns the group. After generation it may change rewards; before generation, the
group has no trajectories, and it may change the text and the fields of the prompt."""

KEPT = (
    "prompt_ids",
    "token_ids",
    "logprobs",
    "loss_mask",
    "spans",
    "finish_reason",
    "figures",
    "continues",
    "shown_prompt",
)
"""The fields of a trajectory that no work may change."""


REMEMBERED_ATTEMPTS = 16_384
"""Number of groups whose last reported attempt is remembered, to detect repeats."""


async def unchanged(group: TrajectoryGroup) -> TrajectoryGroup:
    """The default work of a state: returns the group unchanged."""
    return group


class StageWorker:
    """Executes `EnterState` orders with the state's entry in `works`.

    `timeout_s` limits each execution, except in `untimed` states, whose work limits its own calls. `emit` receives
    events. `described`: the columns that policies see; None: they see only figures. `broken(reason)` is called when
    `Fallible` work has failed for good, or an order cannot be answered.
    """

    def __init__(
        self,
        *,
        works: Mapping[str, Work],
        trajectories: Trajectories,
        emit: Callable[[Event], None],
        broken: Callable[[str], None],
        timeout_s: float | None = None,
        untimed: Collection[str] = (),
        incarnation: Incarnation = 0,
        described: Sequence[str] | None = None,
    ) -> None:
        self._works = works
        self._trajectories = trajectories
        self._emit = emit
        self._timeout_s = timeout_s
        self._untimed = untimed
        self._described = described
        self._running: dict[GroupId, tuple[int, asyncio.Task[None]]] = {}
        self._reported: OrderedDict[GroupId, int] = OrderedDict()
        """The last reported attempt of each group, to detect repeated orders."""
        self._tasks = WorkerTasks("the added states", broken)
        own: list[object] = list(works.values())
        self._calls = CallReports("added states", 0, incarnation, own, emit)
        for work in own:
            if isinstance(work, Fallible):
                self._tasks.spawn(self._listen(work, broken))

    def carry_out(self, command: EnterState, prompt: Prompt | None = None) -> None:
        """Start an order and return at once. A repeat changes nothing; a newer attempt cancels an older one. `prompt`:
        of a group that is not generated yet."""
        number, task = self._running.get(command.group, (0, None))
        if max(number, self._reported.get(command.group, 0)) >= command.attempt:
            return
        if task is not None:
            self._tasks.cancel(task)
        self._running[command.group] = (command.attempt, self._tasks.spawn(self._carry_out(command, prompt)))

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
        works: list[object] = list(self._works.values())
        for work in works:
            if isinstance(work, Closable):
                try:
                    await on_a_thread(work.close)
                except Exception:
                    log.warning("%s cannot be closed", type(work).__name__, exc_info=True)

    async def _listen(self, work: Fallible, broken: Callable[[str], None]) -> None:
        broken(clean(str(await awaited(work.failed))))

    async def _carry_out(self, command: EnterState, prompt: Prompt | None) -> None:
        try:
            event: Event = await (self._left(command) if prompt is None else self._prepared(command, prompt))
        except DataFailure as error:
            event = self._failed(command, "data", error)
        except Exception as error:
            event = self._failed(command, "infrastructure", error)
        except asyncio.CancelledError as error:
            if not self._wanted(command):
                raise
            event = self._failed(command, "infrastructure", error)
        if self._wanted(command):  # work may have caught its own cancellation
            del self._running[command.group]
            self._reported[command.group] = command.attempt
            self._reported.move_to_end(command.group)
            if len(self._reported) > REMEMBERED_ATTEMPTS:
                self._reported.popitem(last=False)
            self._emit(event)

    def _wanted(self, command: EnterState) -> bool:
        """Whether this is the newest order for its group, the group was not dropped and the worker is not closed."""
        return self._running.get(command.group, (0, None))[0] == command.attempt

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
        )  # fmt: skip

    async def _worked(self, command: EnterState, kept: TrajectoryGroup) -> Any:
        """What the user's work makes of a copy of a group."""
        work = self._works.get(command.state)
        if work is None:
            raise EngineError(f"no work is defined for the state {command.state}")
        timeout_s = None if command.state in self._untimed else self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await awaited(work, copy_group(kept))
        except TimeoutError as error:
            story = f"the work of {command.state} exceeded its limit of {timeout_s} s on group {command.group}"
            raise EngineError(str(error) or story, group=command.group) from error

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

    def _failed(self, command: EnterState, cause: str, error: BaseException) -> StateFailed:
        log.warning("%s failed on group %d (%s)", command.state, command.group, cause, exc_info=error)
        return StateFailed(
            group=command.group, attempt=command.attempt, state=command.state, cause=cause, reason=reason_of(error)
        )


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
    for index, (old, new) in enumerate(zip(before.trajectories, after.trajectories, strict=True)):
        changed = [name for name in KEPT if not isinstance(new, Trajectory) or getattr(new, name) != getattr(old, name)]
        if changed:
            raise EngineError(f"{who} changed {changed[0]} of trajectory {index}; it may change rewards only")
        problem = reward_problem(new.reward) or judged_problem(new) or steps_problem(new)
        problem = problem or segment_problem(after.trajectories, index)
        if problem:
            raise DataFailure(f"{who}, trajectory {index}: {problem}", group=before.group, row=before.prompt.row)
    problem = rewards_problem(after)
    if problem:
        raise DataFailure(f"{who}: {problem}", group=before.group, row=before.prompt.row)
