"""Executes the scheduler's commands: sends each process one message with all its orders of a turn.

Called by the driver, on its event loop. It draws prompts and runs timers itself. Must never decide anything.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from engine.commands import (
    CancelTimer,
    Command,
    DeleteCheckpoint,
    DiscardGroups,
    DrawPrompts,
    EnterState,
    FinishRun,
    InspectStep,
    PublishWeights,
    ResumeGroup,
    RetireWeights,
    SaveCheckpoint,
    ScoreBatch,
    SetTimer,
    StartGroup,
    StartProcess,
    StopMeasuring,
    StopProcess,
    TrainStep,
)
from engine.errors import reason_of
from engine.events import GroupFailed, StateFailed, StopRequested
from engine.ids import GroupId
from engine.protocols import Prompts
from engine.runtime.process_port import Life, SentOrder, Stores
from engine.runtime.prompt_sources import CountedPrompts, draw_prompts, read_prompt
from engine.runtime.supervisor import Supervisor
from engine.states.limits import QUEUED
from engine.states.process import ADDED_STATES, REPLICA, SCORER, TRAINER
from engine.trajectory import Prompt
from engine.workers.clock import Timers
from engine.workers.measurement import held_out_group
from engine.workers.plan import Plan
from engine.workers.reports import Reports
from engine.workers.threads import CallHangs, OneThread

log = logging.getLogger(__name__)

TRAINER_COMMANDS = (TrainStep, PublishWeights, SaveCheckpoint, DeleteCheckpoint)


class RunExecutor:
    """`post` receives events, `finish` the end of the run. `check` raises for a prompt that cannot be sent.
    `limit_of_prompt` returns the seconds that reading a prompt may take."""

    def __init__(
        self,
        plan: Plan,
        *,
        supervisor: Supervisor,
        prompts: Prompts,
        stores: Stores,
        check: Callable[[Prompt], None] = lambda prompt: None,
        limit_of_prompt: Callable[[], float | None] = lambda: None,
        post: Callable[..., None],
        finish: Callable[[FinishRun], None],
    ) -> None:
        self._supervisor = supervisor
        self._scorer_of = {task: index for index, tasks in enumerate(plan.limits.scorers()) for task in tasks}
        self._prompts = prompts
        self._stores = stores
        self._check = check
        self._limit_of_prompt = limit_of_prompt
        self._prompts_hang = False
        self._prepares = plan.limits.states_at(QUEUED)
        """The added states before generation."""
        self._described = plan.described if self._prepares else None
        self._held_out = len(plan.held_out)
        self._post = post
        self._finish = finish
        self._messages: dict[Life, list[SentOrder]] = {}
        """The orders of this turn for each process."""
        self._discards: list[GroupId] = []
        self._discard_orders: list[int] = []
        self._reports = Reports(post)
        self._tasks: set[asyncio.Task[None]] = set()
        """Open draws and calls to the stores."""
        self._source = OneThread("prompts")
        self._reader = OneThread("prompt")
        self._timers = Timers(post)
        self.calls = 0
        """Number of messages sent to processes."""
        self._carry: dict[type[Command], Callable[[Any], None]] = {
            StartGroup: self._start,
            ResumeGroup: self._start,
            DiscardGroups: self._discard,
            DrawPrompts: lambda command: self._spawn(self._draw(command)),
            SetTimer: self._timers.set,
            CancelTimer: self._timers.cancel,
            RetireWeights: lambda command: self._expect(stores.retire(command.version), [command.number]),
            StopMeasuring: self._stop_measuring,
            StopProcess: supervisor.stop,
            StartProcess: supervisor.start,
            FinishRun: finish,
            EnterState: self._enter,
            InspectStep: lambda command: self._order(ADDED_STATES, 0, command),
            ScoreBatch: self._score,
            **dict.fromkeys(TRAINER_COMMANDS, lambda command: self._order(TRAINER, 0, command)),
        }

    def execute(self, commands: Iterable[Command]) -> None:
        """Start commands, and send each process its orders in one message."""
        carry = self._carry
        for command in commands:
            one = carry.get(type(command))
            if one is not None:
                one(command)
            else:
                self._order_replica(command)
        self._send()
        if self._discards:
            self._expect(self._stores.discard(self._discards), self._discard_orders)
            self.calls += self._stores.cut_agents(self._discards)
            self._discards, self._discard_orders = [], []

    def close(self) -> None:
        self._timers.close()
        self._reports.close()
        self._source.abandon()
        self._reader.abandon()
        for task in self._tasks:
            task.cancel()

    def _expect(self, call: Awaitable[object] | None, numbers: list[int]) -> None:
        """Acknowledge orders to a store once the call has returned; at once if there is none."""
        if call is None:
            self._reports.done(*numbers)
            return
        self.calls += 1
        self._spawn(self._answer(call, numbers))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: Awaitable[object], numbers: list[int]) -> None:
        """Acknowledge orders after a call to a store. If it fails, they stay open; the loss of the store is reported
        by the supervisor."""
        try:
            await call
        except Exception as error:
            log.warning("orders %s to a store failed: %s", numbers, reason_of(error))
        else:
            self._reports.done(*numbers)

    def _start(self, command: StartGroup | ResumeGroup) -> None:
        prompt = self._read(command.group)
        if self._prompts_hang:
            return
        if isinstance(prompt, str):
            who: dict[str, Any] = {"replica": command.replica, "life": command.life}
            self._post(GroupFailed(group=command.group, attempt=command.attempt, **who, cause="data", reason=prompt))
        else:
            self._order_replica(command, prompt)

    def _read(self, group: GroupId) -> Prompt | str:
        """The prompt of a group, or why it cannot be sent: it must not fail the other orders of the message. A source
        that hangs stops the run, and is asked no more."""
        if self._prompts_hang:
            return "its source hangs"
        limit_s: float | None = None
        try:
            if isinstance(self._prompts, CountedPrompts):
                prompt = read_prompt(self._prompts, group)
            else:  # the source is the user's: it may block
                limit_s = self._limit_of_prompt()
                prompt = self._reader.wait_for(limit_s, read_prompt, self._prompts, group)
            self._check(prompt)
        except CallHangs:
            self._prompts_hang = True
            reason = f"{type(self._prompts).__name__}.prompt({group}) exceeded {limit_s:g} s (timeouts.draw_s)"
            self._post(StopRequested(reason=reason))
            return reason
        except Exception as error:
            return f"its prompt cannot be read: {reason_of(error)}"
        return prompt

    def _enter(self, command: EnterState) -> None:
        """Send the work of an added state, before generation with the prompt."""
        prompt = self._read(command.group) if command.state in self._prepares else None
        if self._prompts_hang:
            return
        if isinstance(prompt, str):
            who = {"group": command.group, "attempt": command.attempt}
            self._post(StateFailed(**who, state=command.state, cause="data", reason=prompt))
        else:
            self._order(ADDED_STATES, 0, command, prompt)

    def _order_replica(self, command: Any, prompt: Prompt | None = None) -> None:
        """One for a life that has ended is dropped: its loss is reported."""
        life = self._supervisor.lives.get((REPLICA, command.replica))
        if life is not None and life.number == command.life:
            self._messages.setdefault(life, []).append(SentOrder(command, prompt))

    def _order(self, kind: str, index: int, command: Command, prompt: Prompt | None = None) -> None:
        life = self._supervisor.lives.get((kind, index))
        if life is not None:
            self._messages.setdefault(life, []).append(SentOrder(command, prompt))

    def _send(self) -> None:
        """Send each process its orders in one message, unless a later command has ended the process."""
        messages, self._messages = self._messages, {}
        for life, orders in messages.items():
            if self._supervisor.lives.get(life.key) is life:
                life.send(orders)
                self.calls += 1

    def _score(self, command: ScoreBatch) -> None:
        index = self._scorer_of.get(command.task)
        kind = TRAINER if index is None else SCORER
        self._order(kind, index or 0, command)

    def _discard(self, command: DiscardGroups) -> None:
        self._order(ADDED_STATES, 0, command)
        self._discards.extend(command.groups)
        self._discard_orders.append(command.number)

    def _stop_measuring(self, command: StopMeasuring) -> None:
        """Stop the measurement on the replica, and the agents of validation rows."""
        self._order_replica(command)
        groups = [held_out_group(command.validation, self._held_out, row) for row in range(self._held_out)]
        self.calls += self._stores.cut_agents(groups)

    async def _draw(self, command: DrawPrompts) -> None:
        self._post(await self._source.call(draw_prompts, self._prompts, command, self._described))
