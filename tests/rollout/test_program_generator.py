"""Rollouts in Python: what a client keeps, and what is said of those that fail."""

import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "gateway"))
from gateway_rig import FixedAnswers, model, runs_of, tokenizer, ways

from engine.errors import DataFailure
from engine.protocols import Generated, GroupWork
from engine.rollout.agents.conversation import Chat
from engine.rollout.agents.program_generator import Program, ProgramGenerator, RolloutClient
from engine.rollout.backend import RolloutBackend
from engine.rollout.scoring import Grader
from engine.rollout.torch.torch_backend import TorchBackend
from engine.trajectory import Prompt, Trajectory


def generator(
    program: Program, backend: RolloutBackend, max_tokens: int = 12, timeout_s: float = 60
) -> ProgramGenerator:
    tokens = tokenizer()
    grader = Grader(tokens, lambda prompt, trajectory: float(len(trajectory.token_ids)))
    return ProgramGenerator(backend, Chat(tokens, [1]), ways(grader, max_tokens), program, seed=7, timeout_s=timeout_s)


def work(attempt: int = 1, **more: Any) -> GroupWork:
    return GroupWork(group=5, attempt=attempt, prompt=Prompt(row=3, text="say it"), samples=2, **more)


def run(scenario: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(scenario, 60)

    return asyncio.run(bounded())


async def generated(program: Program, backend: RolloutBackend, **options: Any) -> Generated:
    made = generator(program, backend, **options)
    try:
        return await made.generate(work())
    finally:
        await made.close()


def test_what_is_added_is_masked_and_a_returned_number_is_the_reward() -> None:
    async def calculator(client: RolloutClient, prompt: Prompt) -> float:
        client.add(prompt.text)
        answer = await client.sample(stop=["="])
        assert (answer.text, answer.finish_reason) == ("1+2", "stop")
        client.add(" 3 ")
        assert (await client.sample()).text == "done"
        return 0.25

    group = run(generated(calculator, FixedAnswers("1+2=9", "done<end>", "1+2=9", "done<end>"))).group
    assert [t.reward for t in group.trajectories] == [0.25, 0.25]
    for trajectory in group.trajectories:
        assert tokenizer().decode(trajectory.prompt_ids) == "say it"
        assert runs_of(trajectory) == [(1, "1+2="), (0, " 3 "), (1, "done<end>")]
        assert trajectory.finish_reason == "stop"


def test_an_answer_that_a_parser_cannot_read_leaves_no_trace() -> None:
    def broken(text: str) -> Any:
        raise ValueError(text)

    async def catching(client: RolloutClient, prompt: Prompt) -> float:
        client.add(prompt.text)
        with pytest.raises(ValueError, match="x"):
            await client.sample(parser=broken)
        await client.sample()
        return 1.0

    group = run(generated(catching, FixedAnswers(*["x<end>"] * 4))).group
    assert [runs_of(trajectory) for trajectory in group.trajectories] == [[(1, "x<end>")]] * 2


def test_a_trajectory_of_the_rollouts_own_making_is_taken_as_it_is() -> None:
    async def making(client: RolloutClient, prompt: Prompt) -> Trajectory:
        return Trajectory(prompt_ids=[4], reward=0.5)

    group = run(generated(making, FixedAnswers())).group
    assert [(t.prompt_ids, t.reward, t.finish_reason) for t in group.trajectories] == [([4], 0.5, "stop")] * 2


async def three_turns(client: RolloutClient, prompt: Prompt) -> None:
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    for turn in range(3):
        answer = await client.sample(messages)
        messages += [answer.message, {"role": "user", "content": f"turn {turn}"}]


def test_each_rollout_is_reported_as_it_ends() -> None:
    async def scenario() -> None:
        counts: list[int] = []
        running: list[RolloutClient] = []
        reported = asyncio.Event()

        def report(count: int) -> None:
            counts.append(count)
            if count:
                reported.set()

        async def one_after_the_other(client: RolloutClient, prompt: Prompt) -> float:
            client.add(prompt.text)
            await client.sample()
            running.append(client)
            if len(running) == 2:
                await reported.wait()
            return 1.0

        made = generator(one_after_the_other, FixedAnswers("done<end>", "done<end>"))
        await made.generate(work(finished=report))
        assert counts == [0, 1, 2]
        await made.close()

    run(scenario())


def test_a_rollout_that_asks_for_something_else_is_not_answered_with_the_old() -> None:
    async def scenario() -> None:
        old = (await generated(three_turns, TorchBackend(model(), rows=8))).group
        for trajectory in old.trajectories:
            trajectory.finish_reason, trajectory.reward = "", None
        old.prompt = Prompt(row=3, text="say it")

        async def other(client: RolloutClient, prompt: Prompt) -> None:
            await client.sample([{"role": "user", "content": "something else"}])

        made = generator(other, FixedAnswers("x<end>", "y<end>"))
        group = (await made.generate(work(2, partial=old))).group
        assert sorted(runs_of(t)[0][1] for t in group.trajectories) == ["x<end>", "y<end>"]
        await made.close()

    run(scenario())


@pytest.mark.parametrize(
    ("fault", "story"),
    [
        ("good", r"wrong returned the reward 'good' of type str on prompt row 3, not a finite number"),
        (KeyError("tool"), r"raised KeyError on prompt row 3: 'tool' \(test_program_generator\.py:\d+, in wrong\)"),
        (SystemExit(3), "on prompt row 3: .*wrong raised SystemExit: 3"),
        (asyncio.CancelledError("mine"), "on prompt row 3: .*wrong raised CancelledError: mine"),
        (None, r"row 3 took longer than agent\.timeout_s = 0\.05 s"),
    ],
)
def test_what_a_rollout_does_wrong_is_named(fault: BaseException | str | None, story: str) -> None:
    async def wrong(client: RolloutClient, prompt: Prompt) -> Any:
        if isinstance(fault, str):
            return fault
        if fault is not None:
            raise fault
        await asyncio.Event().wait()

    with pytest.raises(DataFailure, match=story):
        run(generated(wrong, FixedAnswers(), timeout_s=60 if fault is not None else 0.05))


@pytest.mark.parametrize("blocks", [True, False])
def test_a_rollout_that_awaits_nothing_holds_its_thread(blocks: bool) -> None:
    async def works(client: RolloutClient, prompt: Prompt) -> float:
        for _ in range(2):
            sum(range(10_000))
            if not blocks:
                await asyncio.sleep(0)
            client.add(prompt.text)
            await client.sample()
        if not blocks:
            await asyncio.sleep(0)
        return 1.0

    async def scene() -> None:
        made = generator(works, FixedAnswers("1<end>", "2<end>", "3<end>", "4<end>"))
        await made.generate(work())
        done, _ = made.call_figures()
        assert done.calls == 6 and done.seconds > 0
        assert done.held_s == (done.seconds if blocks else 0.0)
        await made.close()

    run(scene())


def test_a_rollout_that_works_is_measured_and_waited_for() -> None:
    began, leave = asyncio.Barrier(3), asyncio.Event()

    async def slow(client: RolloutClient, prompt: Prompt) -> float:
        client.add(prompt.text)
        await client.sample()
        await began.wait()
        await leave.wait()
        return 1.0

    async def scene() -> None:
        changes: list[int] = []
        made = generator(slow, FixedAnswers("1<end>", "2<end>"))
        made.watch_calls(lambda: changes.append(1))
        running = asyncio.ensure_future(made.generate(work()))
        await began.wait()
        busy, reward = made.call_figures()
        assert (busy.function, busy.setting) == (f"rollout {slow.__module__}.{slow.__qualname__}", "rollout.slots")
        assert (busy.groups, busy.at_once, busy.calls, busy.queued) == (1, 2, 2, 0), "each began once"
        assert reward.groups == 0 and changes
        pausing = asyncio.ensure_future(made.pause("wait"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not pausing.done(), "its rollouts may call again"
        leave.set()
        await pausing
        assert running.done()
        done = made.call_figures()[0]
        assert (done.groups, done.calls, done.running_s) == (0, 4, 0.0) and done.seconds > 0
        await made.close()

    run(scene())
