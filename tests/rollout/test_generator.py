"""The generator over the embedded backend: groups, partials, rewards, and what the scheduler may do to them
meanwhile."""

import asyncio
import dataclasses
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from backends import CONTEXT, build, build_torch, until_sampled

from engine.errors import DataFailure, EngineError
from engine.protocols import Generated, GroupWork, call_threads
from engine.protocols.user_code import MOST_HANGING, HangingCalls
from engine.rollout.backend import RolloutBackend, SamplingParams
from engine.rollout.generator import TRAINING, ModelGenerator, Way
from engine.rollout.reward_parts import RewardPart
from engine.rollout.scoring import Grader, RewardCalls, Waiting
from engine.tasks.chat import PromptRenderer
from engine.testing import GeneratorContract
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup

LONG = 150


class Letters:
    """A tokenizer of 32 letters."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % 31 for letter in text]

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return "".join(chr(97 + i) for i in token_ids)


def length_reward(prompt: Prompt, trajectory: Trajectory) -> float:
    return float(len(trajectory.token_ids))


def make(
    reward: Callable[..., Any] = length_reward, *, max_tokens: int = LONG, seed: int = 0, **options: Any
) -> ModelGenerator:
    grader = Grader(Letters(), reward, timeout_s=options.pop("reward_timeout_s", None))
    params = SamplingParams(max_tokens=max_tokens, stop_ids=(30,) if max_tokens > LONG else ())
    return over(build_torch("qwen2", **options), {TRAINING: Way(params, grader)}, seed)


def over(backend: RolloutBackend, ways: Mapping[str, Way], seed: int = 3) -> ModelGenerator:
    return ModelGenerator(backend, PromptRenderer(Letters()), ways, seed=seed)


def by_length(params: SamplingParams) -> dict[str, Way]:
    return {TRAINING: Way(params, Grader(Letters(), length_reward))}


def work(group: int = 1, *, text: str = "two plus two", **changes: Any) -> GroupWork:
    given: dict[str, Any] = {"attempt": 1, "prompt": Prompt(row=40 + group, text=text), "samples": 4}
    return GroupWork(group=group, **(given | changes))


def run(generator: ModelGenerator, scenario: Callable[[ModelGenerator], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        try:
            return await scenario(generator)
        finally:
            await generator.close()

    return asyncio.run(whole())


def tokens_of(group: TrajectoryGroup) -> list[list[int]]:
    return [trajectory.token_ids for trajectory in group.trajectories]


async def begin(generator: ModelGenerator, *works: GroupWork) -> list[asyncio.Task[Generated]]:
    """Start generating and let every request be posted."""
    tasks = [asyncio.create_task(generator.generate(one)) for one in works]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def sampled(generator: ModelGenerator, tokens: int) -> None:
    await until_sampled(generator._backend, tokens)


def reference(**options: Any) -> TrajectoryGroup:
    """Group 1, never interrupted."""
    generated: Generated = run(make(**options), lambda generator: generator.generate(work()))
    return generated.group


class TestModelGenerator(GeneratorContract):
    samples = 3

    def make(self) -> ModelGenerator:
        return make(max_tokens=20)

    def weights(self, version: int) -> Any:
        return dict(build("qwen2", seed=version).state_dict())


def test_group_comes_back_whole() -> None:
    group = reference()
    assert group.finished and group.tokens == 4 * LONG
    assert len({tuple(ids) for ids in tokens_of(group)}) == 4
    for trajectory in group.trajectories:
        assert trajectory.prompt_ids == Letters().encode("two plus two")
        assert len(trajectory.logprobs) == len(trajectory.loss_mask) == LONG
        assert trajectory.spans == [(0, LONG, 0)] and trajectory.finish_reason == "length"
        assert trajectory.reward == float(LONG)
        assert trajectory.text == Letters().decode(trajectory.token_ids)


def test_a_validation_set_is_sampled_and_judged_in_its_own_way() -> None:
    def way(tokens: int, reward: float) -> Way:
        return Way(SamplingParams(max_tokens=tokens), Grader(Letters(), lambda prompt, trajectory: reward))

    async def scenario(generator: ModelGenerator) -> None:
        for name, tokens, reward in ((TRAINING, 3, 0.5), ("hard", 5, 1.0)):
            group = (await generator.generate(work(samples=1, validation_set=name))).group
            assert (group.tokens, group.trajectories[0].reward) == (tokens, reward)
        with pytest.raises(EngineError, match="no validation set 'easy'"):
            await generator.generate(work(validation_set="easy"))

    run(over(build_torch("qwen2"), {TRAINING: way(3, 0.5), "hard": way(5, 1.0)}), scenario)


def test_tokens_depend_on_run_seed_group_and_sample_but_not_on_the_attempt() -> None:
    async def both(generator: ModelGenerator) -> tuple[Generated, Generated]:
        return await generator.generate(work(attempt=7)), await generator.generate(work(group=2))

    again, other = run(make(), both)
    assert tokens_of(again.group) == tokens_of(reference())
    assert not set(map(tuple, tokens_of(other.group))) & set(map(tuple, tokens_of(again.group)))
    assert tokens_of(reference(seed=1)) != tokens_of(reference())


def test_finished_siblings_are_kept_and_the_others_resume_from_their_prefixes() -> None:
    whole = reference()
    partial = TrajectoryGroup(group=1, prompt=whole.prompt, trajectories=[])
    for index, trajectory in enumerate(whole.trajectories[:3]):
        cut = [LONG, 60, 0][index]
        kept = Trajectory(prompt_ids=trajectory.prompt_ids, finish_reason="length" if cut == LONG else "")
        kept.extend(trajectory.token_ids[:cut], trajectory.logprobs[:cut], [(0, cut, 0)])  # type: ignore[list-item]
        partial.trajectories.append(kept)
    before = tokens_of(dataclasses.replace(partial))

    async def scenario(generator: ModelGenerator) -> tuple[Generated, int]:
        return await generator.generate(work(attempt=2, partial=partial)), generator.tokens_sampled()

    resumed, fresh = run(make(), scenario)
    assert tokens_of(resumed.group) == tokens_of(whole)
    assert fresh == 4 * LONG - LONG - 60
    assert [trajectory.reward for trajectory in resumed.group.trajectories] == [float(LONG)] * 4
    assert resumed.group.trajectories[1].spans == [(0, LONG, 0)]
    assert tokens_of(partial) == before, "the partial belongs to the store: it must not be changed"


def test_pause_abort_returns_partials_that_go_on_elsewhere() -> None:
    async def first(generator: ModelGenerator) -> Generated:
        (task,) = await begin(generator, work())
        await sampled(generator, 100)
        await generator.pause("abort")
        for _ in range(3):
            await asyncio.sleep(0)
        assert task.done(), "pause returned before generate did"
        return await task

    cut = run(make(), first)
    assert cut.aborted and not cut.group.finished and 100 <= cut.group.tokens < 4 * LONG
    assert all(trajectory.reward is None for trajectory in cut.group.trajectories)
    resumed = run(make(), lambda generator: generator.generate(work(attempt=2, partial=cut.group)))
    assert not resumed.aborted and tokens_of(resumed.group) == tokens_of(reference())


def test_group_that_had_finished_sampling_is_returned_finished_not_aborted() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(prompt: Prompt, trajectory: Trajectory) -> float:
        entered.set()
        assert leave.wait(30)
        return 1.0

    async def scenario(generator: ModelGenerator) -> Generated:
        (task,) = await begin(generator, work())
        await asyncio.to_thread(entered.wait, 30)
        await generator.pause("abort")  # must not wait for the reward
        assert not task.done()
        leave.set()
        return await task

    try:
        generated = run(make(slow, max_tokens=5), scenario)
    finally:
        leave.set()
    assert not generated.aborted and generated.group.finished
    assert [trajectory.reward for trajectory in generated.group.trajectories] == [1.0] * 4


def test_slow_reward_does_not_hold_up_other_groups() -> None:
    leave = threading.Event()

    def slow_for_one(prompt: Prompt, trajectory: Trajectory) -> float:
        assert prompt.row != 41 or leave.wait(30)
        return 0.0

    async def scenario(generator: ModelGenerator) -> None:
        slow, quick = await begin(generator, work(1, samples=1), work(2, samples=2))
        assert (await quick).group.finished and not slow.done()
        leave.set()
        assert (await slow).group.finished

    try:
        run(make(slow_for_one, max_tokens=5), scenario)
    finally:
        leave.set()


def test_trajectories_are_reported_as_they_end_and_kept_ones_at_the_start() -> None:
    counts: list[int] = []

    async def scenario(generator: ModelGenerator) -> TrajectoryGroup:
        generated = await generator.generate(work(finished=counts.append))
        lengths = {len(trajectory.token_ids) for trajectory in generated.group.trajectories}
        assert len(lengths) > 1 and counts == [0, 1, 2, 3, 4], "they end one after another"
        counts.clear()
        partial = TrajectoryGroup(group=1, prompt=work().prompt, trajectories=generated.group.trajectories[:3])
        await generator.generate(work(attempt=2, partial=partial, finished=counts.append))
        assert counts == [3, 4]
        return generated.group

    run(make(max_tokens=LONG + 10), scenario)


def test_a_group_progresses_with_its_own_rewards_and_in_a_queue_with_those_ahead() -> None:
    progress: list[str] = []
    turns, entered = threading.Semaphore(0), threading.Semaphore(0)

    def slow(prompt: Prompt, trajectory: Trajectory) -> float:
        entered.release()
        turns.acquire()
        return 1.0

    async def score(grader: Grader, name: str, samples: int) -> None:
        trajectories = [Trajectory(prompt_ids=[1], token_ids=[2]) for _ in range(samples)]
        group = TrajectoryGroup(group=1, prompt=Prompt(row=0, text=name), trajectories=trajectories)
        await grader.score(group, lambda: progress.append(name))

    async def scene() -> None:
        grader = Grader(Letters(), slow, threads=2)
        first = asyncio.create_task(score(grader, "first", 2))
        await asyncio.to_thread(entered.acquire)
        await asyncio.to_thread(entered.acquire)
        queued = asyncio.create_task(score(grader, "queued", 1))
        await asyncio.sleep(0)
        assert progress == ["first", "first"]
        turns.release()
        await asyncio.to_thread(entered.acquire)
        assert sorted(progress[2:]) == ["first", "queued"], "both threads are taken, now by one call of each"
        waits = asyncio.create_task(score(grader, "waits", 1))
        await asyncio.sleep(0)
        turns.release()
        await asyncio.wait([first, queued], return_when=asyncio.FIRST_COMPLETED)
        assert "waits" in progress[4:]
        turns.release(2)
        await asyncio.gather(first, queued, waits)

    asyncio.run(scene())


def judged(reward: Callable[..., Any], **options: Any) -> TrajectoryGroup:
    """One trajectory, without a model."""
    prompt = Prompt(row=41, text="")
    group = TrajectoryGroup(group=1, prompt=prompt, trajectories=[Trajectory(prompt_ids=[1])])
    return asyncio.run(Grader(Letters(), reward, **options)(group))


def raising(prompt: Prompt, trajectory: Trajectory) -> float:
    raise KeyError("answer")


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit("it has no message")


def mute(prompt: Prompt, trajectory: Trajectory) -> float:
    raise Mute


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (
            raising,
            r"test_generator\.raising raised KeyError on prompt row 41: 'answer' \(test_generator.*, in raising\)$",
        ),
        (lambda prompt, trajectory: float("nan"), "lambda.* returned nan"),
        (lambda prompt, trajectory: float("-inf"), "returned -inf"),
        (lambda prompt, trajectory: "1.0", "returned '1.0'"),
        (lambda prompt, trajectory: None, "returned None"),
        (lambda prompt, trajectory: torch.tensor([1.0, 2.0]), "of type Tensor on prompt row 41, not a finite number"),
        (lambda prompt, trajectory: next(iter([])), "raised StopIteration on prompt row 41"),
        (lambda prompt, trajectory: sys.exit(3), "raised SystemExit on prompt row 41: 3"),
        (mute, r"mute raised Mute on prompt row 41: \(its message cannot be shown\)"),
    ],
)
def test_reward_that_fails_is_a_data_failure_naming_function_and_value(reward: Any, said: str) -> None:
    with pytest.raises(DataFailure, match=said):
        judged(reward)


def test_reward_that_takes_too_long_is_a_data_failure_and_its_stack_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    leave = threading.Event()

    try:
        with pytest.raises(DataFailure, match=r"took longer than 0\.01 s"):
            judged(lambda prompt, trajectory: leave.wait(30), timeout_s=0.01)
    finally:
        leave.set()
    assert f'File "{__file__}"' in caplog.text and "self._cond.wait(timeout)" in caplog.text


def test_rewards_that_never_return_take_no_place_from_others() -> None:
    entered, leave = threading.Semaphore(0), threading.Event()

    def stuck_for_one(prompt: Prompt, trajectory: Trajectory) -> float:
        if prompt.row == 41:
            entered.release()
            leave.wait()
        return 1.0

    async def scenario(generator: ModelGenerator) -> None:
        (stuck,) = await begin(generator, work(1, samples=4))
        for _ in range(4):
            await asyncio.to_thread(entered.acquire)
        (queued,) = await begin(generator, work(2, samples=2))
        with pytest.raises(DataFailure, match=r"took longer than 2\.0 s"):
            await stuck
        assert (await queued).group.finished, "the time of a call must not count while it waits for its place"
        leave.set()

    try:
        run(make(stuck_for_one, max_tokens=5, reward_timeout_s=2.0), scenario)
    finally:
        leave.set()


def test_too_many_rewards_that_never_return_are_the_end_of_the_replica_by_name() -> None:
    leave = threading.Event()

    def stuck(prompt: Prompt, trajectory: Trajectory) -> float:
        return float(leave.wait())

    async def scenario(generator: ModelGenerator) -> None:
        failed = asyncio.create_task(generator.failed())
        for group in range(MOST_HANGING):
            assert not failed.done()
            with pytest.raises(DataFailure, match="took longer"):
                await generator.generate(work(group, samples=1))
        story = r"64 calls of reward .*stuck took longer than 0\.001 s and have not returned"
        assert re.fullmatch(story, await asyncio.wait_for(failed, 30))
        with pytest.raises(EngineError, match="64 calls of reward") as raised:
            await generator.generate(work(99))
        assert not isinstance(raised.value, DataFailure)
        leave.set()

    try:
        run(make(stuck, max_tokens=1, reward_timeout_s=0.001), scenario)
    finally:
        leave.set()


class Returning(HangingCalls):
    def __init__(self) -> None:
        super().__init__()
        self.returned = asyncio.Semaphore(0)

    def remove(self) -> None:
        super().remove()
        self.returned.release()


def test_calls_that_return_late_are_not_counted_as_stuck() -> None:
    leave = threading.Semaphore(0)

    async def scene() -> None:
        hanging = Returning()
        rewards = RewardCalls(
            RewardPart(function=lambda *_: float(leave.acquire())), threads=1, timeout_s=0.001, hanging=hanging
        )
        for _ in range(MOST_HANGING + 1):
            with pytest.raises(DataFailure, match="took longer"):
                await rewards.score(Prompt(row=1, text=""), [Trajectory(prompt_ids=[1])], Waiting(lambda: None))
            leave.release()
            await asyncio.wait_for(hanging.returned.acquire(), 30)
        assert not hanging.story

    try:
        asyncio.run(scene())
    finally:
        leave.release(MOST_HANGING + 1)


def test_calls_one_after_another_share_a_thread() -> None:
    threads: list[threading.Thread] = []

    def judge(prompt: Prompt, trajectory: Trajectory) -> float:
        threads.append(threading.current_thread())
        return 0.0

    async def scene() -> None:
        rewards = RewardCalls(RewardPart(function=judge), threads=1, timeout_s=None, hanging=HangingCalls())
        await rewards.score(Prompt(row=1, text=""), [Trajectory(prompt_ids=[1])] * 2, Waiting(lambda: None))

    asyncio.run(scene())
    assert threads[0] is threads[1]


def test_an_idle_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_threads, "IDLE_S", 0.001)
    thread = call_threads.CallThreads("idle").run(lambda: None, lambda value: None)
    thread.join(30)
    assert not thread.is_alive()


def test_a_cancelled_group_keeps_its_places_until_its_rewards_return() -> None:
    entered, leave = threading.Event(), threading.Event()
    running: list[int] = []

    def slow(prompt: Prompt, trajectory: Trajectory) -> float:
        running.append(prompt.row)
        entered.set()
        return float(leave.wait())

    async def scene() -> None:
        rewards = RewardCalls(RewardPart(function=slow), threads=1, timeout_s=None, hanging=HangingCalls())
        first, second = (
            asyncio.create_task(
                rewards.score(Prompt(row=row, text=""), [Trajectory(prompt_ids=[1])], Waiting(lambda: None))
            )
            for row in (1, 2)
        )
        await asyncio.to_thread(entered.wait)
        first.cancel()
        await asyncio.wait([first])
        for _ in range(5):
            await asyncio.sleep(0)
        assert first.cancelled() and running == [1]
        leave.set()
        assert await second == [1.0] and running == [1, 2]

    try:
        asyncio.run(scene())
    finally:
        leave.set()


STUCK_PROCESS = """
import asyncio, threading
from engine.errors import DataFailure
from engine.rollout.scoring import Grader
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup

async def scene():
    class Decoder:
        def decode(self, token_ids, **options):
            return ""

    grader = Grader(Decoder(), lambda prompt, trajectory: threading.Event().wait(), timeout_s=0.01)
    try:
        await grader(TrajectoryGroup(group=1, prompt=Prompt(row=1, text=""), trajectories=[Trajectory(prompt_ids=[1])]))
    except DataFailure:
        print("given up")

asyncio.run(scene())
"""


def test_a_process_ends_though_a_reward_is_stuck() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK_PROCESS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "given up\n")
    assert ended.stderr.startswith("reward __main__.scene.<locals>.<lambda> took longer than 0.01 s; it is in")


@pytest.mark.parametrize("how", ["abort", "truncate"])
def test_one_group_is_cut_and_the_other_goes_on(how: str) -> None:
    async def scenario(generator: ModelGenerator) -> tuple[Generated, Generated]:
        cut, other = await begin(generator, work(1), work(2))
        await sampled(generator, 100)
        await getattr(generator, how)([1, 99])
        return await cut, await other

    cut, other = run(make(), scenario)
    assert other.group.finished and other.group.tokens == 4 * LONG
    assert 0 < cut.group.tokens < 4 * LONG
    if how == "abort":
        assert cut.aborted and {t.finish_reason for t in cut.group.trajectories} == {""}
    else:
        assert not cut.aborted and {t.finish_reason for t in cut.group.trajectories} == {"truncated"}
        assert [t.reward for t in cut.group.trajectories] == [float(len(t.token_ids)) for t in cut.group.trajectories]


def test_truncating_work_samples_nothing() -> None:
    async def scenario(generator: ModelGenerator) -> None:
        (task,) = await begin(generator, work())
        await sampled(generator, 100)
        await generator.abort([1])
        partial = (await task).group
        before = generator.tokens_sampled()
        await generator.pause("keep")  # nor does it wait for a pause to end
        done = await generator.generate(work(attempt=2, partial=partial, truncate=True))
        assert generator.tokens_sampled() == before and not done.aborted
        assert tokens_of(done.group) == tokens_of(partial)
        assert {trajectory.finish_reason for trajectory in done.group.trajectories} == {"truncated"}
        assert all(trajectory.text and trajectory.reward is not None for trajectory in done.group.trajectories)

    run(make(), scenario)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_nothing_starts_while_paused(mode: str) -> None:
    async def scenario(generator: ModelGenerator) -> None:
        await generator.pause(mode)
        waiting, dropped = await begin(generator, work(1, samples=1), work(2, samples=1))
        await generator.abort([2])
        held = await dropped
        assert held.aborted and held.group.tokens == 0
        assert generator.tokens_sampled() == 0 and not waiting.done()
        await generator.resume()
        assert (await waiting).group.tokens == 7

    run(make(max_tokens=7), scenario)


def test_keep_freezes_and_wait_lets_running_groups_end() -> None:
    async def scenario(generator: ModelGenerator) -> None:
        (first,) = await begin(generator, work(1))
        await sampled(generator, 100)
        await generator.pause("keep")
        frozen = generator.tokens_sampled()
        assert not first.done() and frozen < 4 * LONG
        await generator.resume()
        pausing = asyncio.create_task(generator.pause("wait"))
        await asyncio.sleep(0)
        (late,) = await begin(generator, work(2))
        await pausing
        assert generator.tokens_sampled() == 4 * LONG and not late.done()
        assert tokens_of((await first).group) == tokens_of(whole)
        await generator.resume()
        assert (await late).group.finished

    whole = reference()
    run(make(), scenario)


def test_a_pause_that_waits_lets_a_group_end_that_has_just_started() -> None:
    async def scenario(generator: ModelGenerator) -> None:
        group = asyncio.create_task(generator.generate(work(1)))
        await asyncio.wait_for(asyncio.create_task(generator.pause("wait")), 60)
        assert (await asyncio.wait_for(group, 60)).group.finished

    run(make(max_tokens=7), scenario)


def test_prompt_longer_than_the_context_is_a_data_failure_of_that_row() -> None:
    async def scenario(generator: ModelGenerator) -> None:
        with pytest.raises(DataFailure, match=rf"row 41.*{CONTEXT + 9} tokens.*{CONTEXT}"):
            await generator.generate(work(text="x" * (CONTEXT + 9)))
        with pytest.raises(DataFailure, match="row 41 encodes to no tokens"):
            await generator.generate(work(text=""))
        assert (await generator.generate(work())).group.finished

    run(make(max_tokens=3), scenario)


def test_group_cannot_be_generated_twice_at_once() -> None:
    async def scenario(generator: ModelGenerator) -> None:
        (first,) = await begin(generator, work())
        with pytest.raises(EngineError, match="group 1"):
            await generator.generate(work(attempt=2))
        assert (await first).group.finished

    run(make(max_tokens=5), scenario)
