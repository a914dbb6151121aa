"""Episodes of environments: what the model reads and is trained on, how they end, and whose fault a failure is."""

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).resolve().parent.parent / "gateway"))
from gateway_rig import TEMPLATE, FixedAnswers, Halting, model, runs_of, tokenizer, ways

from engine.environments import Environment, Opening, StepResult, ToolCall, Turn
from engine.environments.calls import EpisodeCalls
from engine.environments.lookup import Lookup
from engine.errors import DataFailure
from engine.protocols import Generated, GroupWork
from engine.protocols.user_code import MOST_HANGING, HangingCalls
from engine.rollout.agents.conversation import Chat
from engine.rollout.agents.environment_program import EnvironmentGenerator, EpisodeSettings
from engine.rollout.agents.tool_calls import MARKS, hermes
from engine.rollout.backend import RolloutBackend
from engine.rollout.scoring import Grader
from engine.rollout.torch.torch_backend import TorchBackend
from engine.tasks.lookup import LookupModel, rows, worked_turns
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup
from engine.workers.sample_keeper import response_text


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call><end>"


def generator(make: Any, backend: RolloutBackend, max_tokens: int = 90, **limits: Any) -> EnvironmentGenerator:
    tokens = tokenizer(limits.pop("template", TEMPLATE), limits.pop("special", ()))
    judged = ways(Grader(tokens, limits.pop("reward", None), ends=[1]), max_tokens)
    episodes = EpisodeSettings(name="tests:Made", make=make, parser=hermes, call_mark=MARKS["hermes"], **limits)
    return EnvironmentGenerator(backend, Chat(tokens, [1]), judged, episodes, seed=7, timeout_s=60)


def work(attempt: int = 1, samples: int = 1, prompt: Prompt | None = None, **more: Any) -> GroupWork:
    prompt = prompt or Prompt(row=3, text="add 1 and 2")
    return GroupWork(group=5, attempt=attempt, prompt=prompt, samples=samples, **more)


def run(scenario: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(scenario, 20)

    return asyncio.run(bounded())


async def played(make: Any, *said: str, prompt: Prompt | None = None, **limits: Any) -> Generated:
    made = generator(make, FixedAnswers(*said, special=limits.get("special", ())), **limits)
    try:
        return await made.generate(work(prompt=prompt))
    finally:
        await made.close()


def only(make: Any, *said: str, **limits: Any) -> Trajectory:
    (trajectory,) = run(played(make, *said, **limits)).group.trajectories
    return trajectory


class Adder(Environment):
    """Adds with a tool; 1 for the right sum."""

    threads: set[int]

    def __init__(self) -> None:
        self.threads = set()

    @property
    def tools(self) -> Sequence[Any]:
        return [self.add, self.divide]

    def add(self, a: int, b: int = 0) -> int:
        """The sum of two numbers."""
        self.threads.add(threading.get_ident())
        return a + b

    async def divide(self, a: float, b: float) -> float:
        return a / b

    def step(self, turn: Turn) -> StepResult:
        self.threads.add(threading.get_ident())
        assert len(self.threads) == 1, "plain methods of an episode run on one thread"
        assert threading.current_thread() is not threading.main_thread()
        return StepResult(reward=0.25) if turn.calls else StepResult(reward=float(turn.text == "3"), done=True)


def test_tools_are_called_and_only_the_models_own_tokens_are_trained() -> None:
    one = only(Adder, call("add", a=1, b=2), "3<end>")
    assert tokenizer().decode(one.prompt_ids) == "tools: add divide [user]add 1 and 2<end>[assistant]"
    assert runs_of(one) == [(1, call("add", a=1, b=2)), (0, "[tool]3<end>[assistant]"), (1, "3<end>")]
    assert (one.reward, one.finish_reason) == (1.25, "stop")


def test_parsers_environments_and_rewards_read_markers_that_are_special_tokens() -> None:
    turns: list[Turn] = []

    class Noting(Adder):
        def step(self, turn: Turn) -> StepResult:
            turns.append(turn)
            return StepResult(done=not turn.calls)

    special = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>"]
    said = "<think>so</think>" + call("add", a=1, b=2), "<pad><answer>3</answer><end>"
    one = only(Noting, *said, special=special, reward=lambda prompt, given: float("<answer>3</answer>" in given.text))
    assert [(turn.text, len(turn.calls)) for turn in turns] == [
        ("<think>so</think>", 1),
        ("<pad><answer>3</answer>", 0),
    ]
    assert one.reward == 1.0 and one.text == f"{said[0]}[tool]3<end>[assistant]<pad><answer>3</answer>"
    assert response_text([one]) == one.text


def test_a_call_continues_where_the_template_writes_calls_only_without_content() -> None:
    strict = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ c.type + c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}<end>"
        "{% endfor %}[assistant]"
    )
    one = only(Adder, call("add", a=1, b=2), "3<end>", template=strict)
    assert runs_of(one) == [(1, call("add", a=1, b=2)), (0, "[tool]3<end>[assistant]"), (1, "3<end>")]


def test_a_template_that_refuses_results_without_their_call_gets_the_call() -> None:
    strict = "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    strict += "{{ raise_exception('no call') }}{% endif %}{% endfor %}" + TEMPLATE
    one = only(Adder, call("add", a=1, b=2), "3<end>", template=strict)
    assert runs_of(one) == [(1, call("add", a=1, b=2)), (0, "[tool]3<end>[assistant]"), (1, "3<end>")]


def test_figures_count_turns_tool_calls_and_tokens_by_role() -> None:
    class Talking(Adder):
        def step(self, turn: Turn) -> StepResult:
            return StepResult(
                messages="go on" if not turn.calls else (), reward=1.0, done=turn.number == 3, figures={"x": 2}
            )

    one = only(Talking, call("add", a=1), "hm<end>", "3<end>")
    trained = sum(one.loss_mask)
    assert one.figures == {
        "turns": 3, "tool_calls": 1, "tool_errors": 0, "x": 6, "tokens_prompt": len(one.prompt_ids),
        "tokens_assistant": trained, "tokens_tool": len("[tool]1") + 1 + len("[assistant]"),
        "tokens_user": len("[user]go on") + 1 + len("[assistant]"),
    }  # fmt: skip
    assert sum(one.figures[f"tokens_{role}"] for role in ("tool", "user")) == len(one.token_ids) - trained


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (call("sub", a=1), "there is no tool 'sub'; the tools are add, divide"),
        (call("ad", a=1), "there is no tool 'ad'; the tools are add, divide; did you mean add?"),
        (call("add", a="x"), "add got wrong arguments: a: Input should be a valid integer"),
        (call("add"), "add got wrong arguments: a: Field required"),
        (call("add", a=1, c=2), "add got wrong arguments: c: Extra inputs are not permitted"),
        (call("divide", a=1, b=0), "divide raised ZeroDivisionError: float division by zero"),
        ("<tool_call>{add}</tool_call><end>", "the tool call cannot be read"),
        ("<tool_call>{<end>", "the tool call cannot be read"),
    ],
)
def test_a_tool_call_that_fails_is_reported_to_the_model_and_counted(said: str, error: str) -> None:
    one = only(Adder, said, "3<end>", max_tokens=300)
    assert f"[tool]Error: {error}" in runs_of(one)[1][1]
    assert (one.reward, one.figures["tool_errors"], one.figures["tool_calls"]) == (1.25, 1, 1)


def test_a_tool_that_hangs_is_reported_to_the_model_and_the_episode_continues() -> None:
    released = threading.Event()

    class Hanging(Environment):
        @property
        def tools(self) -> Sequence[Any]:
            return [self.wait]

        def wait(self) -> str:
            released.wait()
            return "late"

    one = only(Hanging, call("wait"), "3<end>", call_timeout_s=0.05, reward=lambda prompt, trajectory: 0.5)
    released.set()
    assert "[tool]Error: wait took too long" in runs_of(one)[1][1]
    assert (one.reward, one.finish_reason, one.figures["tool_errors"]) == (0.5, "stop", 1)


def test_too_many_calls_that_never_return_are_a_failure_that_names_their_limit() -> None:
    released = threading.Event()

    async def scene() -> None:
        hanging = HangingCalls()
        episodes = [EpisodeCalls(0.001, hanging) for _ in range(MOST_HANGING)]
        await asyncio.gather(*(calls.call(released.wait) for calls in episodes), return_exceptions=True)
        story = "64 calls of environments took longer than 0.001 s and have not returned"
        assert await asyncio.wait_for(hanging.failed(), 30) == story
        released.set()

    run(scene())


def test_calls_of_a_tool_that_is_only_a_schema_are_answered_by_the_environment() -> None:
    class Schema(Environment):
        tools = ({"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}},)

        async def step(self, turn: Turn) -> StepResult:
            if not turn.calls:
                return StepResult(reward=1.0, done=True)
            (asked,) = turn.calls
            assert isinstance(asked, ToolCall)
            assert (asked.name, asked.arguments, asked.result) == ("ask", {"q": 1}, None)
            return StepResult(messages=[asked.answer("42")])

    one = only(Schema, call("ask", q=1), "3<end>")
    assert runs_of(one)[1][1] == "[tool]42<end>[assistant]"


# -- how episodes end --------------------------------------------------------------------------------------------------


class Endless(Environment):
    """Never ends, and gives no reward."""

    def step(self, turn: Turn) -> StepResult:
        return StepResult(messages="more")


class Bounded(FixedAnswers):
    """Refuses prompts that exceed its context."""

    async def sample(self, request: Any) -> Any:
        if len(request.prompt_ids) + 1 > self.context:
            raise DataFailure("the prompt is too long", context_tokens=self.context)
        return await super().sample(request)


@pytest.mark.parametrize(
    ("limits", "said", "reason", "turns"),
    [
        ({"max_turns": 2}, ["a<end>"] * 2, "max_turns", 2),
        ({"max_tokens": 3}, ["a" * 3], "length", 1),
        ({"max_turns": 9, "max_tokens": 20}, ["a<end>"] * 9, "length", 2),
        ({"max_turns": 99}, [f"{'x' * 40}<end>"] * 99, "length", 8),
    ],
    ids=["turns", "tokens of an answer", "tokens of an episode", "context"],
)
def test_an_environment_that_never_ends_meets_a_limit(
    limits: dict[str, Any], said: list[str], reason: str, turns: int
) -> None:
    async def scenario() -> Trajectory:
        tokens = tokenizer()
        made = EnvironmentGenerator(
            Bounded(*said), Chat(tokens, [1]), ways(Grader(tokens, None, ends=[1]), 90),
            EpisodeSettings(name="tests:Endless", make=Endless, parser=hermes, **limits), seed=7, timeout_s=60,
        )  # fmt: skip
        (trajectory,) = (await made.generate(work())).group.trajectories
        assert made.call_figures()[0].function == "environment tests:Endless"
        await made.close()
        return trajectory

    one = run(scenario())
    assert (one.finish_reason, one.reward, one.figures["turns"]) == (reason, 0.0, turns)


def test_an_error_for_too_long_first_messages_names_the_environment() -> None:
    class Long(Environment):
        def reset(self, prompt: Prompt, seed: int) -> str:
            return "x" * 1000

    async def scenario() -> None:
        made = generator(Long, Bounded("3<end>"))
        await made.generate(work())

    with pytest.raises(
        DataFailure, match="environment tests:Made raised DataFailure on prompt row 3: the prompt is too"
    ):
        run(scenario())


def test_an_episode_without_any_reward_is_judged_by_the_function_or_fails() -> None:
    class Plain(Environment):
        pass

    one = only(Plain, "hello<end>", reward=lambda prompt, trajectory: float(len(trajectory.text)))
    assert one.reward == 5.0
    with pytest.raises(DataFailure, match="returned no reward"):
        only(Plain, "hello<end>")


def test_a_turn_may_have_a_reward_of_its_own() -> None:
    """It belongs to the last token of its answer, and counts in the reward of the episode."""

    class Graded(Adder):
        def step(self, turn: Turn) -> StepResult:
            return StepResult(turn_reward=0.25 if turn.number == 1 else None, reward=1.0, done=not turn.calls)

    said = call("add", a=1, b=2)
    one = only(Graded, said, "3<end>")
    assert one.reward == 2.25
    assert one.step_rewards == [(one.loss_mask.index(0) - 1, 0.25)]
    with pytest.raises(DataFailure, match="step returned the reward inf, not a finite number"):
        only(lambda: Faulty("step", StepResult(turn_reward=float("inf"), done=True)), "3<end>")


def test_an_environment_is_always_closed_and_a_close_that_raises_loses_nothing() -> None:
    closed: list[int] = []

    class Closing(Adder):
        def close(self) -> None:
            closed.append(1)
            raise RuntimeError("broken pipe")

    assert only(Closing, "3<end>").reward == 1.0
    assert closed == [1]


@pytest.mark.parametrize(("messages", "read"), [(None, "add 1 and 2"), ("Begin.", "Begin.")])
def test_reset_may_return_the_prompt_that_samples_show(messages: str | None, read: str) -> None:
    class Shown(Adder):
        def reset(self, prompt: Prompt, seed: int) -> Opening:
            return Opening(messages=messages, shown=f"{prompt.text}, please")

    one = only(Shown, "3<end>")
    assert one.shown_prompt == "add 1 and 2, please" and f"[user]{read}<end>" in tokenizer().decode(one.prompt_ids)
    assert only(Adder, "3<end>").shown_prompt == ""


# -- whose fault it is -------------------------------------------------------------------------------------------------


class Faulty(Environment):
    def __init__(self, method: str, fault: Any) -> None:
        self.method, self.fault = method, fault

    def _do(self, method: str, otherwise: Any) -> Any:
        if method != self.method:
            return otherwise
        if isinstance(self.fault, BaseException):
            raise self.fault
        if isinstance(self.fault, threading.Event):
            self.fault.wait()
        return self.fault

    def reset(self, prompt: Prompt, seed: int) -> Any:
        return self._do("reset", None)

    @property
    def tools(self) -> Any:
        return self._do("tools", ())

    def step(self, turn: Turn) -> Any:
        return self._do("step", StepResult(done=True))


@pytest.mark.parametrize(
    ("method", "fault", "story"),
    [
        ("reset", KeyError("start"), r"reset raised KeyError: 'start' \(test_environments\.py:\d+, in _do\)"),
        ("reset", [], "reset returned no message"),
        ("reset", Opening(shown=3), "reset returned a prompt to show of type int, not a text"),  # type: ignore[arg-type]
        ("reset", [{"content": "x"}], "reset returned messages that cannot be used: message 1 .* 'role'"),
        ("step", SystemExit(3), "step raised RuntimeError: .*step raised SystemExit: 3"),
        ("step", None, "step returned a NoneType, but must return a StepResult"),
        (
            "step",
            StepResult(),
            r"step returned neither a message nor done after turn 1; return .* or StepResult\(done=True\)",
        ),
        ("step", StepResult(reward=float("nan"), done=True), "step returned the reward nan, not a finite number"),
        (
            "step",
            StepResult(reward="x", done=True),
            "step returned the reward 'x' of type str, not a finite number",
        ),  # type: ignore[arg-type]
        ("reset", numpy.ones(2), "reset returned messages that cannot be used: 'messages' is ndarray"),
        ("tools", None, "tools returned a value that cannot be used: 'NoneType' object is not iterable"),
        (
            "tools",
            ["add"],
            "tools returned a value that cannot be used: a tool is 'add', but must be a Python function, or a schema",
        ),
        ("tools", [lambda x: x], ".*tool '<lambda>' has no schema: parameter 'x' has no type hint"),
        ("tools", [Adder().add] * 2, ".*two tools have the name 'add'"),
        ("tools", threading.Event(), r"tools took longer than environment.call_timeout_s = 0.05 s"),
    ],
)
def test_what_an_environment_does_wrong_is_named(method: str, fault: Any, story: str) -> None:
    limit = {"call_timeout_s": 0.05} if isinstance(fault, threading.Event) else {}
    with pytest.raises(DataFailure, match=f"environment tests:Made failed on prompt row 3: {story}"):
        only(lambda: Faulty(method, fault), "3<end>", **limit)
    if isinstance(fault, threading.Event):
        fault.set()


# -- aborts ------------------------------------------------------------------------------------------------------------


class Noisy(Environment):
    """Answers with letters drawn from the seed."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        self.seed = seed
        return f"{prompt.text} {seed % 1000}"

    def step(self, turn: Turn) -> StepResult:
        return StepResult(messages=f"{turn.number} {self.seed % 97}", reward=1.0, done=turn.number == 3)


ENDS = tuple(range(1, 30))
"""Many tokens that end an answer, so that random weights give short ones."""


def noisy(backend: RolloutBackend) -> EnvironmentGenerator:
    tokens = tokenizer()
    return EnvironmentGenerator(
        backend, Chat(tokens, ENDS), ways(Grader(tokens, None, ends=ENDS), 60, ENDS),
        EpisodeSettings(name="tests:Noisy", make=Noisy, parser=hermes), seed=7, timeout_s=60,
    )  # fmt: skip


async def _whole(samples: int) -> TrajectoryGroup:
    made = noisy(TorchBackend(model(), rows=8))
    try:
        return (await made.generate(work(samples=samples))).group
    finally:
        await made.close()


@pytest.mark.parametrize("halt_at", [1, 5, 9, 16])
def test_an_episode_cut_at_any_token_continues_as_if_it_had_not_been(halt_at: int) -> None:
    async def scenario() -> None:
        whole = await _whole(2)
        assert {t.figures["turns"] for t in whole.trajectories} == {3}
        first, second = Halting(halt_at), TorchBackend(model(), rows=8)
        cut, other = noisy(first), noisy(second)
        running = asyncio.ensure_future(cut.generate(work(samples=2)))
        while first.tokens_sampled() < halt_at and not running.done():
            await asyncio.to_thread(lambda: None)
        await cut.pause("abort")
        partial = await running
        assert partial.aborted
        had = sum(sum(t.loss_mask) for t in partial.group.trajectories)
        group = (await other.generate(work(2, samples=2, partial=partial.group))).group
        for name in ("prompt_ids", "token_ids", "loss_mask", "reward", "figures", "finish_reason"):
            assert [getattr(t, name) for t in group.trajectories] == [getattr(t, name) for t in whole.trajectories]
        assert second.tokens_sampled() == sum(sum(t.loss_mask) for t in whole.trajectories) - had
        short = (await other.generate(work(3, samples=2, partial=partial.group, truncate=True))).group
        assert [t.token_ids for t in short.trajectories] == [t.token_ids for t in partial.group.trajectories]
        assert "truncated" in {t.finish_reason for t in short.trajectories} <= {"truncated", "stop"}
        await cut.close()
        await other.close()

    run(scenario())


# -- the environment that the engine ships -----------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 9))
def test_the_answer_of_a_lookup_row_is_where_its_links_end(seed: int, most_steps: int) -> None:
    row = next(rows(str(seed), most_steps))
    data = row.as_data()
    prompt = Prompt(row=0, text=data["prompt"], fields=data)
    environment = Lookup()
    assert environment.reset(prompt, 0) == data["prompt"]
    key = row.start
    for _ in range(row.steps):
        key = environment.lookup(key)
    right, wrong = (environment.step(Turn(number=1, text=text)) for text in (key, row.links[key]))
    assert (right.reward, right.done, wrong.reward) == (1.0, True, 0.0)
    with pytest.raises(DataFailure, match="this row lacks links, answer"):
        environment.reset(Prompt(row=0, text="", fields={"start": "a", "steps": 1}), 0)


def test_the_habits_of_the_warm_up_are_as_frequent_as_asked() -> None:
    turns = worked_turns(LookupModel(haste=0.5, wrong_tool=0.25), 0)
    answers = [next(turns) for _ in range(4000)]
    wrong = sum("search" in answer for _, answer in answers)
    right = sum("lookup" in answer for _, answer in answers)
    assert 0.9 < wrong / right < 1.1, "of the turns that should call, a quarter each"
    assert all(said.endswith("assistant\n") for said, _ in answers)
