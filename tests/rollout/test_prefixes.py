"""Partial results of a running request: backends report them, and the generator makes groups of them."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from backends import Kind, build, build_torch, go_on, run_over, until_sampled
from test_generator import by_length, over

from engine.protocols import GroupWork
from engine.rollout.backend import RolloutBackend, SampleRequest, SampleResult, SamplingParams
from engine.rollout.torch.torch_backend import TorchBackend
from engine.trajectory import Prompt, Span, TrajectoryGroup

LONG = 150
EVERY = 20


def request(
    partial: list[SampleResult], *, report_every: int = EVERY, name: str = "r", max_tokens: int = LONG
) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return SampleRequest(
        id=name,
        prompt_ids=[5, 6, 7],
        prefix_ids=[8],
        params=params,
        seed=1,
        report_every=report_every,
        report=partial.append,
    )


def assert_begins(result: SampleResult, partial: SampleResult) -> None:
    """A partial result is the beginning of the final result, including versions."""
    count = len(partial.token_ids)
    assert partial.token_ids == result.token_ids[:count] and partial.finish_reason == ""
    assert partial.logprobs == pytest.approx(result.logprobs[:count], abs=1e-6)
    spans = [Span(s.start, min(s.stop, count), s.version) for s in result.spans if s.start < count]
    assert partial.spans == spans


def test_each_request_is_reported_by_its_own_count_though_others_end_before_it(kind: Kind) -> None:
    async def scenario(backend: RolloutBackend) -> None:
        lengths = [30, LONG, 50, LONG, 70, LONG - 7]
        partial: list[list[SampleResult]] = [[] for _ in lengths]
        requests = [
            request(partial[i], name=f"{i}", max_tokens=length, report_every=EVERY + i)
            for i, length in enumerate(lengths)
        ]
        results = await asyncio.gather(*map(backend.sample, requests))
        for i, (length, result) in enumerate(zip(lengths, results, strict=True)):
            counts = [len(one.token_ids) for one in partial[i]]
            if kind.exact:
                assert counts == list(range(EVERY + i, length - 1, EVERY + i))
            else:  # vLLM hands a slow reader several tokens at once
                assert all(after - before >= EVERY + i for before, after in pairwise([0, *counts]))
            for one in partial[i]:
                assert_begins(result, one)
        assert any(partial)

    run_over(kind.make("qwen2"), scenario)


def test_nothing_is_reported_unasked(kind: Kind) -> None:
    async def scenario(backend: RolloutBackend) -> None:
        partial: list[SampleResult] = []
        await backend.sample(request(partial, report_every=0))
        assert partial == []

    run_over(kind.make("qwen2"), scenario)


def test_a_report_after_an_install_says_which_version_sampled_what(kind: Kind) -> None:
    async def scenario(backend: RolloutBackend) -> None:
        partial: list[SampleResult] = []
        before = backend.tokens_sampled()
        running = asyncio.create_task(backend.sample(request(partial)))
        await until_sampled(backend, before + 30)
        await backend.pause("keep")
        go_on(backend)
        await backend.stage(1, kind.model("qwen2", seed=1).state_dict())
        await backend.install(1)
        await backend.resume()
        result = await running
        assert [span.version for span in result.spans] == [0, 1]
        assert [len(one.spans) for one in partial][:1] == [1] and len(partial[-1].spans) == 2
        for one in partial:
            assert_begins(result, one)

    run_over(kind.make("qwen2"), scenario)


def test_the_generator_saves_the_whole_group_about_once_per_round() -> None:
    saved: list[TrajectoryGroup] = []

    async def scenario() -> TrajectoryGroup:
        backend = build_torch("qwen2")
        generator = over(backend, by_length(SamplingParams(max_tokens=LONG)), seed=0)
        work = GroupWork(
            group=3, attempt=1, prompt=Prompt(row=0, text="abc"), samples=4, save_every_tokens=EVERY, save=saved.append
        )
        try:
            return (await generator.generate(work)).group
        finally:
            await generator.close()

    group = asyncio.run(scenario())
    assert [one.tokens for one in saved] == [4 * n for n in range(EVERY, LONG, EVERY)]
    for one in saved:
        assert one.group == 3 and not one.finished
        for whole, part in zip(group.trajectories, one.trajectories, strict=True):
            count = len(part.token_ids)
            assert part.token_ids == whole.token_ids[:count] and part.logprobs == whole.logprobs[:count]
            assert part.loss_mask == [1] * count and part.spans == [Span(0, count, 0)]
            assert part.token_ids is not whole.token_ids


def test_finished_siblings_are_saved_as_such_and_no_more_waited_for() -> None:
    saved: list[TrajectoryGroup] = []
    first, second = (SamplingParams(max_tokens=LONG), SamplingParams(max_tokens=LONG, stop_ids=(4,)))

    async def group_with(params: SamplingParams, partial: TrajectoryGroup | None) -> Any:
        generator = over(build_torch("qwen2"), by_length(params), seed=5)
        work = GroupWork(
            group=3, attempt=1, prompt=Prompt(row=0, text="abc"), samples=4, partial=partial, save_every_tokens=10,
            save=saved.append,
        )  # fmt: skip
        try:
            return (await generator.generate(work)).group
        finally:
            await generator.close()

    whole = asyncio.run(group_with(first, None))
    ended = asyncio.run(group_with(second, None))
    lengths = sorted(len(t.token_ids) for t in ended.trajectories)
    assert lengths[0] < lengths[-1], "the seed was chosen so that the stop token comes at different places"
    last = saved[-1]
    for before, after in zip(last.trajectories, ended.trajectories, strict=True):
        assert before.token_ids == after.token_ids[: len(before.token_ids)]
    assert any(t.finish_reason == "stop" for t in last.trajectories)
    assert last.tokens > sum(lengths) - 4 * 2 * 10
    assert whole.tokens == 4 * LONG


class OneEndsUnreported(TorchBackend):
    """Of two requests, the first reports once. The second then ends without a report, before the first one ends."""

    reported: asyncio.Event
    ended: asyncio.Event

    async def sample(self, request: SampleRequest) -> SampleResult:
        result = await super().sample(replace(request, report=None))
        if ".1." in request.id:
            await self.reported.wait()
            return result
        assert request.report is not None
        so_far = SampleResult(
            token_ids=result.token_ids[:EVERY],
            logprobs=result.logprobs[:EVERY],
            spans=[Span(0, EVERY, 0)],
            finish_reason="",
        )
        request.report(so_far)
        self.reported.set()
        await self.ended.wait()
        return result


def test_a_group_is_saved_when_the_sibling_ends_whose_report_was_missing() -> None:
    saved: list[TrajectoryGroup] = []

    async def scenario() -> None:
        backend = OneEndsUnreported(build("qwen2"))
        backend.reported, backend.ended = asyncio.Event(), asyncio.Event()
        generator = over(backend, by_length(SamplingParams(max_tokens=LONG)))
        work = GroupWork(
            group=3, attempt=1, prompt=Prompt(row=0, text="abc"), samples=2, save_every_tokens=EVERY, save=saved.append,
            finished=lambda count: backend.ended.set() if count else None,
        )  # fmt: skip
        try:
            await generator.generate(work)
        finally:
            await generator.close()

    asyncio.run(scenario())
    assert [[len(trajectory.token_ids) for trajectory in one.trajectories] for one in saved] == [[EVERY, LONG]]
