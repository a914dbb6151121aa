"""What every rollout backend must do when requests are aborted, frozen, resumed and given new weights."""

import asyncio
from collections.abc import Callable

import pytest
from backends import BACKENDS, CONTEXT, Kind, go_on, hold, run, run_over, until_sampled

from engine.errors import DataFailure, EngineError
from engine.rollout.backend import RolloutBackend, SampleRequest, SampleResult, SamplingParams
from engine.rollout.torch.torch_backend import TorchBackend
from engine.trajectory import Span

Make = Callable[..., RolloutBackend]
LONG = 200


def request(name: str = "r", *, seed: int = 1, max_tokens: int = LONG, **changes: object) -> SampleRequest:
    changes.setdefault("prompt_ids", [5, 6, 7])
    params = changes.pop("params", SamplingParams(max_tokens=max_tokens))
    return SampleRequest(id=name, seed=seed, params=params, **changes)  # type: ignore[arg-type]


def assert_whole(result: SampleResult) -> None:
    """Books of one result agree: one log-prob per token, spans without gaps."""
    assert len(result.logprobs) == len(result.token_ids)
    assert all(value <= 0.0 for value in result.logprobs)
    ends = [0, *(span.stop for span in result.spans)]
    assert [span.start for span in result.spans] == ends[:-1]
    assert ends[-1] == len(result.token_ids)


async def whole_and_cut(backend: RolloutBackend) -> tuple[SampleResult, SampleResult]:
    """One request uninterrupted, and the same one aborted on its way."""
    reference = await backend.sample(request("whole"))
    task = asyncio.create_task(backend.sample(request("cut")))
    await until_sampled(backend, LONG + 20)
    await backend.abort(["cut", "unknown"])
    go_on(backend)
    cut = await task
    assert cut.finish_reason == "abort" and 20 <= len(cut.token_ids) < LONG
    return reference, cut


def test_aborted_request_resumes_with_exactly_the_tokens_it_would_have_had(kind: Kind) -> None:
    async def scenario(backend: RolloutBackend) -> None:
        reference, cut = await whole_and_cut(backend)
        assert cut.token_ids == reference.token_ids[: len(cut.token_ids)]
        rest = await backend.sample(request("again", prefix_ids=cut.token_ids))
        again = await backend.sample(request("again", prefix_ids=cut.token_ids))
        assert again.token_ids == rest.token_ids
        if kind.exact:
            assert cut.token_ids + rest.token_ids == reference.token_ids
            assert cut.logprobs + rest.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
        assert rest.finish_reason == "length" and len(cut.token_ids) + len(rest.token_ids) == LONG
        for result in (reference, cut, rest):
            assert_whole(result)

    run_over(kind.make("qwen2"), scenario)


def test_budgets_include_the_prefix_and_what_does_not_fit_is_a_data_failure(kind: Kind) -> None:
    async def scenario(backend: RolloutBackend) -> None:
        rest = await backend.sample(request(prefix_ids=[21, 22], max_tokens=10))
        assert len(rest.token_ids) == 8 and rest.finish_reason == "length"
        more = await backend.sample(request(prefix_ids=[21, 22, *rest.token_ids[:3]], max_tokens=10))
        assert len(more.token_ids) == 5
        if kind.exact:
            assert more.token_ids == rest.token_ids[3:]
        for prefix, most in (([21, 22, 23], 3), ([21, 22, 23, 24], 3), ([1] * (CONTEXT - 3), 10_000)):
            spent = await backend.sample(request(prefix_ids=prefix, max_tokens=most))
            assert (spent.finish_reason, spent.token_ids) == ("length", [])
        with pytest.raises(DataFailure, match=f"{CONTEXT}.*{CONTEXT}"):
            await backend.sample(request(prompt_ids=[1] * CONTEXT))
        fits = await backend.sample(request(prompt_ids=[1] * (CONTEXT - 1)))
        assert len(fits.token_ids) == 1 and fits.finish_reason == "length"
        with pytest.raises(DataFailure, match="no tokens"):
            await backend.sample(request(prompt_ids=[]))

    run_over(kind.make("qwen2"), scenario)


def test_zero_token_abort_is_a_no_op(make_backend: Make) -> None:
    async def scenario(backend: RolloutBackend) -> None:
        reference = await backend.sample(request("whole", prefix_ids=[21, 22], max_tokens=12))
        await backend.pause("keep")
        task = asyncio.create_task(backend.sample(request("r", prefix_ids=[21, 22], max_tokens=12)))
        await asyncio.sleep(0)  # let it post its request
        await backend.pause("abort")
        nothing = await task
        assert (nothing.token_ids, nothing.logprobs, nothing.spans) == ([], [], [])
        assert nothing.finish_reason == "abort"
        await backend.resume()
        again = await backend.sample(request("r", prefix_ids=[21, 22], max_tokens=12))
        assert again.token_ids == reference.token_ids  # the same request, unchanged

    run_over(make_backend("qwen2"), scenario)


def test_two_replicas_of_two_slots_end_six_requests_with_exactly_their_tokens(make_backend: Make) -> None:
    budgets = [60, 71, 82, 93, 104, 115]

    async def one(backend: RolloutBackend, index: int) -> list[int]:
        tokens: list[int] = []
        while True:
            result = await backend.sample(
                request(f"{index}", seed=index, prefix_ids=list(tokens), max_tokens=budgets[index])
            )
            tokens += result.token_ids
            if result.finish_reason != "abort":
                assert result.finish_reason == "length"
                return tokens

    async def scenario() -> None:
        replicas = [make_backend("qwen2", rows=2), make_backend("qwen2", rows=2)]
        tasks = [asyncio.create_task(one(replicas[index % 2], index)) for index in range(6)]
        for tokens in (30, 10):
            held = [hold(replica, tokens) for replica in replicas]
            for replica in replicas:
                await replica.resume()
            for replica, reached in zip(replicas, held, strict=True):
                await reached
                await replica.pause("abort")
            assert not any(task.done() for task in tasks)
        for replica in replicas:
            go_on(replica)
            await replica.resume()
        lengths = [len(tokens) for tokens in await asyncio.gather(*tasks)]
        for replica in replicas:
            await replica.close()
        assert lengths == budgets
        assert sum(replica.tokens_sampled() for replica in replicas) == sum(budgets)

    run(scenario())


def test_keep_freezes_and_goes_on(make_backend: Make) -> None:
    async def scenario(backend: RolloutBackend) -> None:
        reference = await backend.sample(request("whole"))
        task = asyncio.create_task(backend.sample(request("frozen")))
        await until_sampled(backend, LONG + 20)
        await backend.pause("keep")
        go_on(backend)
        held = backend.tokens_sampled()
        late = asyncio.create_task(backend.sample(request("late", max_tokens=4)))
        for _ in range(100):
            await asyncio.sleep(0)
        assert backend.tokens_sampled() == held < 2 * LONG
        assert not task.done() and not late.done()
        await backend.resume()
        assert (await task).token_ids == reference.token_ids
        assert (await late).token_ids == reference.token_ids[:4]

    run_over(make_backend("qwen2"), scenario)


def test_frozen_request_can_be_aborted(make_backend: Make) -> None:
    async def scenario(backend: RolloutBackend) -> None:
        task = asyncio.create_task(backend.sample(request("frozen")))
        await until_sampled(backend, 20)
        await backend.pause("keep")
        held = backend.tokens_sampled()
        go_on(backend)
        await backend.abort(["frozen"])
        assert len((await task).token_ids) == held < LONG

    run_over(make_backend("qwen2"), scenario)


def test_aborting_some_leaves_the_others_as_they_were(make_backend: Make) -> None:
    """Between tokens the aborted ones' places are taken over: nobody else's tokens may change."""

    async def scenario(backend: RolloutBackend) -> None:
        reference = [await backend.sample(request("whole", seed=i)) for i in range(4)]
        tasks = [asyncio.create_task(backend.sample(request(f"{i}", seed=i))) for i in range(4)]
        await until_sampled(backend, 4 * LONG + 80)
        await backend.abort(["0", "2"])
        go_on(backend)
        results = await asyncio.gather(*tasks)
        assert [result.finish_reason for result in results] == ["abort", "length", "abort", "length"]
        for whole, result in zip(reference, results, strict=True):
            assert result.token_ids == whole.token_ids[: len(result.token_ids)]
            assert len(result.token_ids) == len(result.logprobs)
        assert results[0].token_ids or results[2].token_ids, "they had begun"

    run_over(make_backend("qwen2"), scenario)


def test_wait_lets_running_requests_end_and_holds_later_ones(make_backend: Make) -> None:
    async def scenario(backend: RolloutBackend) -> None:
        running = [asyncio.create_task(backend.sample(request(f"{i}", seed=i))) for i in range(3)]
        await until_sampled(backend, 30)
        pausing = asyncio.create_task(backend.pause("wait"))
        await asyncio.sleep(0)
        assert not any(task.done() for task in running)
        go_on(backend)
        late = asyncio.create_task(backend.sample(request("late", max_tokens=4)))
        await pausing
        assert all(task.done() and task.result().finish_reason == "length" for task in running)
        assert backend.tokens_sampled() == 3 * LONG and not late.done()
        await backend.resume()
        assert len((await late).token_ids) == 4

    run_over(make_backend("qwen2", rows=2), scenario)


FAMILIES = [
    *((name, family) for name in BACKENDS if name != "vllm" for family in ("qwen2", "qwen2-untied", "gpt2")),
    ("vllm", "qwen2"),
]


@pytest.mark.parametrize(("kind", "family"), FAMILIES, indirect=["kind"])
def test_install_serves_the_new_weights_and_marks_the_spans(kind: Kind, family: str) -> None:
    new = kind.model(family, seed=9)

    async def scenario(backend: RolloutBackend) -> tuple[SampleResult, SampleResult, int]:
        task = asyncio.create_task(backend.sample(request("old")))
        await until_sampled(backend, 20)
        await backend.stage(3, new.state_dict())
        await backend.pause("keep")
        go_on(backend)
        seam = backend.tokens_sampled()
        assert seam < LONG
        await backend.install(3)
        await backend.resume()
        return await task, await backend.sample(request("new", max_tokens=40)), seam

    async def plain(backend: RolloutBackend) -> SampleResult:
        return await backend.sample(request("new", max_tokens=40))

    across, fresh, seam = run_over(kind.make(family), scenario)
    assert across.spans == [Span(0, seam, 0), Span(seam, LONG, 3)]
    assert_whole(across)
    expected = run_over(TorchBackend(new), plain)
    if kind.exact:
        assert fresh.token_ids == expected.token_ids
        assert fresh.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert fresh.spans == [Span(0, 40, 3)]
    assert fresh.token_ids != across.token_ids[:40], "the two versions must differ for this test to say anything"


def test_failed_install_leaves_the_old_weights(kind: Kind) -> None:
    new = kind.model("qwen2", seed=9).state_dict()
    missing = {name: tensor for name, tensor in new.items() if "q_proj.weight" not in name}
    misshapen = new | {"model.norm.weight": new["model.norm.weight"][:-1]}

    async def scenario(backend: RolloutBackend) -> None:
        reference = await backend.sample(request("whole"))
        task = asyncio.create_task(backend.sample(request("frozen")))
        await until_sampled(backend, LONG + 20)
        await backend.pause("keep")
        go_on(backend)
        assert not task.done()
        for weights, named in (
            (missing, "q_proj"),
            (misshapen, "model.norm.weight"),
            (new | {"a.b": new["model.norm.weight"]}, "a.b"),
        ):
            with pytest.raises(EngineError, match=named):
                await backend.stage(1, weights)
                await backend.install(1)
        with pytest.raises(EngineError, match=r"version \d+ cannot be installed"):
            await backend.install(2)
        await backend.resume()
        result = await task
        assert result.token_ids == reference.token_ids and result.spans == [Span(0, LONG, 0)]

    run_over(kind.make("qwen2"), scenario)


def test_weights_are_copied_when_staged(kind: Kind) -> None:
    greedy = request(params=SamplingParams(temperature=0.0, max_tokens=40))

    async def scenario(backend: RolloutBackend) -> list[int]:
        weights = kind.model("qwen2", seed=9).state_dict()
        await backend.stage(1, weights)
        for tensor in weights.values():
            tensor.zero_()
        await backend.pause("keep")
        await backend.install(1)
        await backend.resume()
        return (await backend.sample(greedy)).token_ids

    expected = run_over(TorchBackend(kind.model("qwen2", seed=9)), lambda backend: backend.sample(greedy))
    assert run_over(kind.make("qwen2"), scenario) == expected.token_ids


def test_cancelled_caller_frees_its_place(make_backend: Make) -> None:
    async def scenario(backend: RolloutBackend) -> None:
        task = asyncio.create_task(backend.sample(request("gone")))
        await until_sampled(backend, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on(backend)
        assert len((await backend.sample(request("gone", max_tokens=5))).token_ids) == 5
        assert backend.tokens_sampled() < LONG

    run_over(make_backend("qwen2", rows=1), scenario)


@pytest.mark.parametrize("kind", [name for name in BACKENDS if name != "vllm"], indirect=True)
def test_close_fails_what_is_running_and_everything_later(kind: Kind) -> None:
    async def scenario(backend: RolloutBackend) -> None:
        running = asyncio.create_task(backend.sample(request("running")))
        await until_sampled(backend, 5)
        await backend.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await backend.sample(request("later"))
        with pytest.raises(EngineError, match="closed"):
            await backend.pause("keep")

    run_over(kind.make("qwen2"), scenario)
