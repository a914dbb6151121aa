"""The `Generator` of rollouts that a user writes in Python: one coroutine per sample, which runs inside the replica.

The rollout actor hosts one per replica, on any `RolloutBackend`. The coroutine samples through a `RolloutClient`, which
captures the conversation token by token. After an abort, the coroutine runs again from its beginning on the next
replica; while its calls are the same as before, they are answered with the recorded tokens. It must never sample after
`pause` has returned.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

from engine.errors import DataFailure, EngineError, message_of, place_of
from engine.ids import GroupId
from engine.protocols import Generated, GroupWork
from engine.protocols.user_code import awaited
from engine.protocols.user_values import ResultFailure, checked_result
from engine.rollout.agents.agent_calls import AgentCalls, GroupCalls
from engine.rollout.agents.conversation import Call, CallHistory, Chat, Conversation, chat, ids, key_of, text
from engine.rollout.agents.tool_calls import ParsedCall, Parser, calls_of, none
from engine.rollout.backend import RolloutBackend, SampleRequest, SampleResult, derive_seed
from engine.rollout.generator import GeneratorOfCalls, Way, all_set
from engine.rollout.reward_parts import name_of
from engine.tasks.chat import Message
from engine.trajectory import Prompt, RolloutResult, RolloutReturn, Span, Trajectory, TrajectoryGroup

CLOSE_TIMEOUT_S = 5.0
"""Seconds that a cancelled rollout may take to end."""


class ProgramFailure(DataFailure):
    """A failure of a rollout. Its message names whose code failed and the prompt row."""


Program: TypeAlias = Callable[["RolloutClient", Prompt], Awaitable[Trajectory | RolloutReturn]]
"""`async def rollout(client, prompt)`. Returns None, a reward, a result, or a trajectory that it built itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One answer of the model."""

    text: str
    """With a parser, without the tool calls."""
    token_ids: list[int]
    finish_reason: str
    calls: Sequence[ParsedCall] = ()
    """The tool calls, with a parser."""
    name: str = ""
    """Begins the ids of the tool calls."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to append to the messages of the next call. The id of tool call n, counted from 1,
        ends with `_n`."""
        if not self.calls:
            return {"role": "assistant", "content": self.text}
        calls = [
            {
                "id": f"{self.name}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(self.calls, 1)
        ]
        return {"role": "assistant", "content": self.text, "tool_calls": calls}


class RolloutClient:
    """Samples for one rollout. Only one call at a time can continue the conversation."""

    def __init__(
        self, program: "ProgramGenerator", running: "RunningProgram", index: int, recorded: list[Trajectory]
    ) -> None:
        self._program = program
        self._running = running
        self._index = index
        self._recorded = dict(enumerate(recorded))
        self._history: list[int] = []
        self._calls = 0
        self.conversation = Conversation()
        self.begin_own_time()

    def add(self, given: str | Sequence[int]) -> None:
        """Append text or ids to the history, masked from the loss. Before the first `sample`, they are the prompt."""
        new = self._program.chat.encode(given, not self._history) if isinstance(given, str) else list(given)
        self._history += new

    @property
    def seed(self) -> int:
        """A seed for this rollout only: the same in every attempt."""
        return derive_seed(self._program.seed, self._running.work.group, self._index)

    @property
    def is_judged(self) -> bool:
        """Whether a reward function judges it if it returns no reward."""
        return self._running.way.grader.judges

    @property
    def response_tokens(self) -> int:
        """Tokens after the first prompt, in the longest segment."""
        return max((len(segment.trajectory.token_ids) for segment in self.conversation.segments), default=0)

    async def sample(
        self,
        history: Sequence[Message] | Sequence[int] | str | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        parser: Parser = none,
    ) -> Sampled:
        """Sample the model's next answer.

        `history` is the whole conversation as messages, text or ids; None: the earlier answers and what `add` appended.
        `max_tokens` can only lower the configured bound. The first string of `stop` in the answer ends it. `tools` are
        JSON schemas for the chat template. `parser` finds tool calls in the answer (`rollout.agents.tool_calls`).

        Raises: `DataFailure` if the history does not fit into the model's context.
        """
        program = self._program
        call = self.conversation.begin(self._asked(history, tools))
        self._calls += 1
        self.count_own_time()
        try:
            self._replay(call, max_tokens or self._running.way.params.max_tokens)
            await program.sample(self._running, self._index, self._calls, call, max_tokens)
            self.begin_own_time()
            shown, hidden = program.chat.end(call, stop)
            left, calls = calls_of(parser, shown, tools)
        except BaseException:
            if not self._running.cut:  # after a cut, the sampled tokens are kept
                self.conversation.drop(call)
            raise
        answer = Sampled(
            text=left,
            token_ids=list(call.token_ids),
            finish_reason=call.finish_reason,
            calls=calls,
            name=f"call_{self._calls}",
        )
        self.conversation.commit(call, shown=shown, hidden=hidden, key=key_of(answer.message))
        self._history = call.segment.ids
        return answer

    def begin_own_time(self) -> None:
        """The rollout starts, or gets an answer. If the loop does not turn until it asks again, it awaits nothing."""
        loop = asyncio.get_running_loop()
        self._own_since, self._turn = loop.time(), loop.create_future()
        loop.call_soon(self._turn.cancel)

    def count_own_time(self) -> None:
        """The rollout asks the model, or has ended: it has made a call in the sense of `agent_calls`."""
        seconds = asyncio.get_running_loop().time() - self._own_since
        self._program.agent_calls.count(seconds, held=not self._turn.done())

    def _asked(self, history: Any, tools: Sequence[Mapping[str, Any]]) -> CallHistory:
        program = self._program
        if history is None:
            return ids(self._history, program.chat.encode)
        if isinstance(history, str):
            return text(history, program.chat.encode)
        if history and not isinstance(history[0], int):
            return chat(history, tools, program.chat)
        return ids(history, program.chat.encode)

    def _replay(self, call: Call, most: int) -> None:
        """Take the tokens that an earlier run of this rollout sampled at this position with the same history."""
        recorded = self._recorded.get(call.segment.number)
        if recorded is None:
            return
        at = len(call.segment.trajectory.token_ids)
        first = at if call.fresh else at + len(call.given_ids)
        before = recorded.prompt_ids if call.fresh else recorded.token_ids[at:first]
        if before != call.given_ids or any(recorded.loss_mask[at:first]):
            del self._recorded[call.segment.number]
            return
        stop = first
        while stop < len(recorded.token_ids) and recorded.loss_mask[stop] and stop - first < most:
            stop += 1
            if recorded.token_ids[stop - 1] in self._program.chat.stop_ids:
                break
        spans = [
            Span(max(s.start, first) - first, min(s.stop, stop) - first, s.version)
            for s in recorded.spans
            if s.start < stop and s.stop > first
        ]
        call.take(
            SampleResult(
                token_ids=recorded.token_ids[first:stop],
                logprobs=recorded.logprobs[first:stop],
                spans=spans,
                finish_reason="abort",
            )
        )


@dataclass(slots=True, eq=False)
class RunningProgram:
    """One running `generate` call."""

    work: GroupWork
    way: Way
    cut: str = ""
    was_cut: asyncio.Event = field(default_factory=asyncio.Event)
    requests: dict[str, None] = field(default_factory=dict)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    calls: GroupCalls | None = None
    """Set while its rollouts run."""


class ProgramGenerator(GeneratorOfCalls):
    """Runs `program` once per sample and scores the rollouts that return no reward.

    The rollouts of a group may take at most `timeout_s` together.
    """

    LIMIT: ClassVar[str] = "agent.timeout_s"
    """The setting that `timeout_s` comes from, for messages."""

    def __init__(
        self,
        backend: RolloutBackend,
        chat: Chat,
        ways: Mapping[str, Way],
        program: Program,
        *,
        seed: int,
        timeout_s: float,
        name: str = "",
    ) -> None:
        """`name`: the program's name in messages; empty: `rollout`, and its name in the source."""
        self._name = name or f"rollout {name_of(program)}"
        self.agent_calls = AgentCalls(self._name)
        super().__init__(backend, ways, self.agent_calls)
        self.chat = chat
        self._program = program
        self.seed = seed
        self._timeout_s = timeout_s

    async def generate(self, work: GroupWork) -> Generated:
        """See `protocols.Generator`.

        Raises: `DataFailure` if a rollout or the reward function fails or a rollout exceeds `timeout_s`; `EngineError`
        if the group is already being generated.
        """
        running = RunningProgram(work, self.way_of(work), cut="truncate" if work.truncate else "")
        with self._running(running):
            group = await self._run_group(running)
            if running.cut == "abort" and not group.finished:
                return Generated(group=group, aborted=True)
            for trajectory in group.trajectories:
                trajectory.finish_reason = trajectory.finish_reason or "truncated"
            await running.way.grader.score(group, work.progress)
            return Generated(group=group)

    async def sample(self, running: RunningProgram, index: int, number: int, call: Call, limit: int | None) -> None:
        """Sample the answer to a client's call. If the group is cut, it does not return: the rollout is cancelled."""
        with running.calls.sampling() if running.calls is not None else contextlib.nullcontext():
            await self._sample(running, index, number, call, limit)

    async def _sample(self, running: RunningProgram, index: int, number: int, call: Call, limit: int | None) -> None:
        await self._unpaused.wait()
        work, params = running.work, running.way.params
        params = replace(params, max_tokens=min(limit or params.max_tokens, params.max_tokens))
        name = f"{work.group}.{index}.{work.attempt}.{number}"
        seed = derive_seed(self.seed, work.group, index, call.segment.number, call.segment.calls)
        if not running.cut:
            running.requests[name] = None
            running.idle.clear()
            try:
                request = SampleRequest(
                    id=name, prompt_ids=call.prompt_ids, prefix_ids=list(call.token_ids), params=params, seed=seed,
                    session=work.group,
                )  # fmt: skip
                result = await self._backend.sample(request)
            finally:
                del running.requests[name]
                if not running.requests:
                    running.idle.set()
            call.take(result)
            work.progress()
            if result.finish_reason != "abort":
                return
        await asyncio.Event().wait()  # `_run_all` cancels it

    async def pause(self, mode: str) -> None:
        """See `protocols.Generator`. `abort` returns when all started rollouts have ended, too."""
        running = list(self._groups.values())
        if mode == "abort":
            await self.abort(list(self._groups))
            await all_set([one.done for one in running])
        await super().pause(mode)

    # inside

    async def _cut(self, groups: Sequence[GroupId], how: str) -> None:
        chosen = [self._groups[group] for group in groups if group in self._groups]
        for running in chosen:
            running.cut = running.cut or how
            running.was_cut.set()
        await self._backend.abort([name for running in chosen for name in running.requests])

    async def _run_group(self, running: RunningProgram) -> TrajectoryGroup:
        """Run every unfinished rollout of the group. After a cut, rollouts have the tokens sampled before it."""
        work = running.work
        kept = work.partial.rollouts if work.partial is not None else []
        kept = [[trajectory.copy() for trajectory in rollout] for rollout in kept]
        kept += [[] for _ in range(work.samples - len(kept))]
        finished = [bool(rollout) and all(t.finished for t in rollout) for rollout in kept]
        group = TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=[])
        if work.truncate:
            group.trajectories = [one for rollout in kept for one in rollout or [Trajectory()]]
            return group
        work.finished(sum(finished))
        clients = {n: RolloutClient(self, running, n, kept[n]) for n, done in enumerate(finished) if not done}
        with self.agent_calls.group(len(clients)) as running.calls:
            outcomes = await self._run_all(running, clients)
        for index, rollout in enumerate(kept):
            if index in clients:
                rollout = _trajectories(clients[index], outcomes.get(index))
            group.trajectories += rollout
        return group

    async def _run_all(self, running: RunningProgram, clients: dict[int, RolloutClient]) -> dict[int, Any]:
        """For each rollout that ended, a list with the value that it returned."""
        prompt, loop = running.work.prompt, asyncio.get_running_loop()
        tasks = {index: loop.create_task(self._called(client, prompt)) for index, client in clients.items()}
        cut = loop.create_task(running.was_cut.wait())
        pending: set[asyncio.Task[Any]] = {*tasks.values(), cut}
        deadline = loop.time() + self._timeout_s
        try:
            while any(not task.done() for task in tasks.values()) and not running.cut:
                done, pending = await asyncio.wait(
                    pending, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    story = f"rollouts of prompt row {prompt.row} took longer than {self.LIMIT} = {self._timeout_s:g} s"
                    raise DataFailure(story, row=prompt.row)
                for index in sorted(tasks):
                    if tasks[index].done():
                        self._check(tasks[index], prompt)
                ended = sum(task.done() for task in tasks.values())
                running.work.finished(running.work.samples - len(tasks) + ended)
            if running.requests:
                await running.idle.wait()
            return {index: [task.result()] for index, task in tasks.items() if task.done()}
        finally:
            cut.cancel()
            for task in tasks.values():
                task.cancel()
            if tasks:
                await asyncio.wait(tasks.values(), timeout=CLOSE_TIMEOUT_S)

    async def _called(self, client: RolloutClient, prompt: Prompt) -> Trajectory | RolloutResult:
        """What the program returned. Raises: `ResultFailure`, and what the program raises."""
        client.begin_own_time()
        returned = await awaited(self._program, client, prompt)
        client.count_own_time()
        return returned if isinstance(returned, Trajectory) else checked_result(returned, self._name, prompt.row)

    def _check(self, task: asyncio.Task[Any], prompt: Prompt) -> None:
        error = task.exception()
        if isinstance(error, EngineError) and not isinstance(error, DataFailure):
            raise error  # an error of the replica, not of the rollout
        if isinstance(error, ProgramFailure | ResultFailure):
            raise error
        if error is not None:
            story = f"{self._name} raised {type(error).__name__} on prompt row {prompt.row}"
            raise DataFailure(f"{story}: {message_of(error)}{place_of(error)}", row=prompt.row) from error


def _trajectories(client: RolloutClient, returned: list[Any] | None) -> list[Trajectory]:
    """The segments of a rollout, marked as finished if the rollout ended. `returned` is None if it did not end."""
    if returned is not None and isinstance(returned[0], Trajectory):
        own = returned[0]
        own.finish_reason = own.finish_reason or "stop"
        return [own]
    if returned is None:
        return client.conversation.trajectories()
    return client.conversation.finished(returned[0])
