"""The embedded backend's numbers: against plain forwards, against the library's own `generate`, and against itself."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from backends import CONTEXT, build, build_torch, run_over, until_sampled

from engine.errors import ConfigError, EngineError
from engine.rollout.backend import SampleRequest, SampleResult, SamplingParams
from engine.rollout.torch.batch_sampler import BatchSampler
from engine.rollout.torch.causal_model import FIXED_ROWS, CausalModel
from engine.rollout.torch.torch_backend import TorchBackend

FAMILIES = ["qwen2", "qwen2-untied", "llama", "gpt2", "mistral-windowed", "qwen2-windowed"]
PROMPTS = [[3 + row, 9, (row * 7) % 32, *range(row)] for row in range(8)]


def ask(row: int, params: SamplingParams, prefix_ids: Sequence[int] = ()) -> SampleRequest:
    return SampleRequest(id=f"r{row}", prompt_ids=PROMPTS[row], prefix_ids=prefix_ids, params=params, seed=row)


def sample_all(backend: TorchBackend, requests: Sequence[SampleRequest]) -> list[SampleResult]:
    async def scenario(_: Any) -> list[SampleResult]:
        return list(await asyncio.gather(*(backend.sample(request) for request in requests)))

    results: list[SampleResult] = run_over(backend, scenario)
    return results


def behavior_logprobs(model: Any, prompt: list[int], result: SampleResult, params: SamplingParams) -> list[float]:
    """From one full forward without a cache: log-softmax after temperature, renormalised over the nucleus."""
    ids = torch.tensor([prompt + result.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / params.temperature
    expected = []
    for row, token in zip(logits, result.token_ids, strict=True):
        probabilities = row.softmax(-1)
        kept, mass = [], 0.0
        for index in probabilities.argsort(descending=True).tolist():
            if mass >= params.top_p:
                break
            kept.append(index)
            mass += probabilities[index].item()
        assert token in kept, "a token outside the nucleus was sampled"
        expected.append((probabilities[token] / mass).log().item())
    return expected


def test_greedy_equals_generate_token_for_token() -> None:
    model = build("qwen2")
    greedy = SamplingParams(temperature=0, max_tokens=60)
    results = sample_all(TorchBackend(build("qwen2")), [ask(row, greedy) for row in range(8)])
    for prompt, result in zip(PROMPTS, results, strict=True):
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=60, min_new_tokens=60, pad_token_id=0,
        )  # fmt: skip
        assert result.token_ids == output[0, len(prompt) :].tolist()
        assert result.logprobs == [0.0] * 60, "a greedy step samples a point mass"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("family", "params"),
    [*((family, (1.3, 0.8)) for family in FAMILIES), *(("qwen2", other) for other in [(1.0, 1.0), (0.7, 1.0)])],
    ids=str,
)
def test_logprobs_equal_a_full_forwards(family: str, params: tuple[float, float], deterministic: bool) -> None:
    settings = SamplingParams(temperature=params[0], top_p=params[1], max_tokens=50)
    backend = TorchBackend(build(family), deterministic=deterministic, rows=8)
    results = sample_all(backend, [ask(row, settings) for row in range(8)])
    model = build(family)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.logprobs == pytest.approx(behavior_logprobs(model, prompt, result, settings), abs=1e-4)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_recomputed_kv_is_the_new_weights_own(kv: str) -> None:
    """After an install, `recompute` samples as the new model would from the same prefix; `keep` looks at old keys and
    values."""
    new = build("qwen2", seed=9)
    params = SamplingParams(max_tokens=80)

    async def scenario(backend: Any) -> tuple[SampleResult, int]:
        task = asyncio.create_task(backend.sample(ask(4, params)))
        await until_sampled(backend, 10)
        await backend.pause("keep")
        seam = backend.tokens_sampled()
        await backend.stage(1, new.state_dict())
        await backend.install(1)
        await backend.resume()
        return await task, seam

    result, seam = run_over(build_torch("qwen2", kv=kv), scenario)
    assert 10 <= seam < 80
    expected = behavior_logprobs(new, PROMPTS[4], result, params)
    error = max(abs(a - b) for a, b in zip(result.logprobs[seam:], expected[seam:], strict=True))
    assert (error < 1e-4) == (kv == "recompute")


def test_tokens_do_not_depend_on_who_else_is_in_the_batch() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=100)
    alone = sample_all(TorchBackend(build("qwen2")), [ask(0, params)])[0]

    async def joined(backend: Any) -> SampleResult:
        first = asyncio.create_task(backend.sample(ask(0, params)))
        await until_sampled(backend, 20)
        short = SamplingParams(max_tokens=30)  # they leave again while the first continues
        others = [asyncio.create_task(backend.sample(ask(row, short))) for row in range(1, 8)]
        result = await first
        await asyncio.gather(*others)
        return result

    result = run_over(build_torch("qwen2"), joined)
    assert result.token_ids == alone.token_ids
    assert result.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_deterministic_mode_is_the_same_to_the_bit() -> None:
    """Alone, with seven others joining midway, in another row, and resumed from a prefix."""
    params = SamplingParams(max_tokens=60)

    def backend() -> TorchBackend:
        return TorchBackend(build("qwen2"), deterministic=True, rows=8)

    alone = sample_all(backend(), [ask(7, params)])[0]
    together = sample_all(backend(), [ask(row, params) for row in range(8)])[7]
    resumed = sample_all(backend(), [ask(0, params), ask(7, params, prefix_ids=alone.token_ids[:25])])[1]
    assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)
    assert (resumed.token_ids, resumed.logprobs) == (alone.token_ids[25:], alone.logprobs[25:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, "odd widths"])
@torch.inference_mode()
def test_permuted_rows_of_a_decode_batch_get_the_same_bits(family: str, dtype: torch.dtype) -> None:
    """At fixed shapes: also in the second call of a cache, and after rows that left their keys behind."""
    odd = dict(hidden_size=100, num_attention_heads=5, num_key_value_heads=5, intermediate_size=77, vocab_size=53)
    built = build("qwen2", **odd) if family == "odd widths" else build(family)
    model = CausalModel(built.to(dtype), rows=40, context=None, device="cpu", fixed_shapes=True)
    drawn = torch.Generator().manual_seed(2)
    ids = torch.randint(model.vocabulary, (FIXED_ROWS, 20), generator=drawn)
    starts = torch.randint(8, (FIXED_ROWS,), generator=drawn)  # rows are at positions of their own

    def decode(order: torch.Tensor, first: int) -> torch.Tensor:
        logits = []
        for turn in range(12):
            columns = torch.clamp(turn - starts[order], min=0)
            logits.append(model.decode(ids[order].gather(1, columns[:, None])[:, 0], columns, model.context, first))
        return torch.stack(logits, dim=1)

    plain = decode(torch.arange(FIXED_ROWS), 0)
    for first in (0, FIXED_ROWS):
        order = torch.randperm(FIXED_ROWS, generator=drawn)
        assert torch.equal(decode(order, first), plain[order])


@torch.inference_mode()
def test_logits_of_a_bfloat16_model_are_computed_in_float32_if_the_trainer_does() -> None:
    built = build("qwen2").to(torch.bfloat16)
    model = CausalModel(built, rows=4, context=20, device="cpu", fixed_shapes=False, fp32_head=True)
    seen: list[torch.Tensor] = []
    built.get_output_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    logits = model.decode(torch.tensor([1]), torch.tensor([0]), 1)
    assert torch.equal(
        logits, (seen[0][0, -1:].float() @ built.get_output_embeddings().weight.float().T).view_as(logits)
    )


def test_deterministic_bits_do_not_depend_on_how_many_rows_there_are() -> None:
    requests = [
        SampleRequest(id=str(n), prompt_ids=PROMPTS[n % 8], params=SamplingParams(max_tokens=8), seed=n)
        for n in range(70)
    ]
    few, many = (sample_all(TorchBackend(build("qwen2"), deterministic=True, rows=rows), requests) for rows in (3, 70))
    assert few == many


def test_deterministic_bits_do_not_depend_on_how_others_are_sampled() -> None:
    def sampled(others: SamplingParams) -> SampleResult:
        requests = [ask(row, SamplingParams(max_tokens=60) if row == 7 else others) for row in range(8)]
        return sample_all(TorchBackend(build("qwen2"), deterministic=True, rows=8), requests)[7]

    alone = sampled(SamplingParams(max_tokens=60))
    assert sampled(SamplingParams(max_tokens=9, temperature=0.5, top_p=0.4)) == alone
    assert sampled(SamplingParams(max_tokens=60, temperature=0.0, top_p=0.9)) == alone


def test_a_model_whose_rows_change_with_their_neighbours_is_refused() -> None:
    class Crowded(torch.nn.Module):
        """Looks at the whole batch, as experts of limited room do."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(hidden)
            return out + 1e-6 * hidden.mean()

    model: Any = build("qwen2")
    model.model.layers[0].mlp = Crowded(model.model.layers[0].mlp)
    with pytest.raises(
        ConfigError, match=r"rollout\.deterministic is True: on this machine, results of Qwen2ForCausalLM"
    ):
        TorchBackend(model, deterministic=True)


def test_a_group_of_one_prompt_has_different_samples_and_shares_its_prefill() -> None:
    backend = TorchBackend(build("qwen2"), rows=4)
    prefilled: list[int] = []
    original = backend._model.prefill

    def counted(rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        prefilled.append(len(rows))
        original(rows, token_ids)

    backend._model.prefill = counted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=20)
    requests = [SampleRequest(id=str(i), prompt_ids=[1, 2, 3, 4, 5], params=params, seed=i) for i in range(10)]

    async def scenario(_: Any) -> list[SampleResult]:
        await backend.pause("keep")
        tasks = [asyncio.create_task(backend.sample(request)) for request in requests]
        await asyncio.sleep(0)
        await backend.resume()
        return list(await asyncio.gather(*tasks))

    results = run_over(backend, scenario)
    assert len({tuple(result.token_ids) for result in results}) == 10
    model = build("qwen2")
    for result in results:
        expected = behavior_logprobs(model, [1, 2, 3, 4, 5], result, params)
        assert result.logprobs == pytest.approx(expected, abs=1e-4)
    assert sum(prefilled) <= 3, "ten samples of one prompt, four at a time, need one prefill per turnover"


def test_cache_used_is_the_share_of_the_rows_that_running_requests_fill() -> None:
    model = CausalModel(build("qwen2"), rows=4, context=20, device="cpu", fixed_shapes=False)
    sampler = BatchSampler(model, rows=2, version=0, deterministic=False)
    assert sampler.cache_used() == 0.0
    for row in range(3):  # the third waits for a row
        sampler.submit(ask(row, SamplingParams(max_tokens=4 - row)), lambda result: None)
    assert sampler.cache_used() == 0.0
    prompts = [len(prompt) for prompt in PROMPTS]
    sampler.step()
    sampler.step()
    assert sampler.cache_used() == (prompts[0] + 2 + prompts[1] + 2) / (2 * 20)
    sampler.step()  # the second has its three tokens
    assert sampler.cache_used() == (prompts[0] + 3) / (2 * 20)
    while sampler.busy:
        sampler.step()
    assert sampler.cache_used() == 0.0


def test_stop_id_ends_the_response_and_belongs_to_it() -> None:
    params = SamplingParams(max_tokens=100)
    free = sample_all(TorchBackend(build("qwen2")), [ask(row, params) for row in range(4)])
    stops = [result.token_ids[10] for result in free]
    stopping = [
        ask(row, SamplingParams(max_tokens=100, stop_ids=(*range(100, 100 + row), stops[row]))) for row in range(4)
    ]
    for before, stop, result in zip(free, stops, sample_all(TorchBackend(build("qwen2")), stopping), strict=True):
        assert result.finish_reason == "stop"
        assert result.token_ids == before.token_ids[: before.token_ids.index(stop) + 1]


def test_failed_step_surfaces_and_the_next_request_is_served() -> None:
    backend = TorchBackend(build("qwen2"))
    original = backend._sampler.step

    def broken() -> None:
        raise ZeroDivisionError("from inside the step")

    async def scenario(_: Any) -> None:
        backend._sampler.step = broken  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="from inside the step"):
            await backend.sample(ask(0, SamplingParams()))
        backend._sampler.step = original  # type: ignore[method-assign]
        assert (await backend.sample(ask(0, SamplingParams(max_tokens=3)))).finish_reason == "length"

    run_over(backend, scenario)


def test_dead_thread_fails_pending_and_later_calls(caplog: pytest.LogCaptureFixture) -> None:
    backend = TorchBackend(build("qwen2"))

    def deadly() -> None:
        raise KeyboardInterrupt

    async def scenario(_: Any) -> None:
        await backend.pause("keep")
        pending = asyncio.create_task(backend.sample(ask(0, SamplingParams())))
        backend._sampler.step = deadly  # type: ignore[method-assign]
        await backend.resume()
        with pytest.raises(EngineError, match="KeyboardInterrupt"):
            await pending
        with pytest.raises(EngineError, match="closed"):
            await backend.sample(ask(1, SamplingParams()))

    run_over(backend, scenario)
    assert "the sampling thread ended" in caplog.text


def test_weights_that_are_not_finite_fail_the_request_and_leave_no_trace() -> None:
    backend = TorchBackend(build("qwen2"))
    good = build("qwen2").state_dict()
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}
    params = SamplingParams(max_tokens=20)

    async def install(version: int, weights: dict[str, torch.Tensor]) -> None:
        await backend.stage(version, weights)
        await backend.pause("keep")
        await backend.install(version)
        await backend.resume()

    async def scenario(_: Any) -> None:
        before = await backend.sample(ask(5, params))
        await install(1, bad)
        with pytest.raises(EngineError, match=r"version 1 .* not finite"):
            await backend.sample(ask(6, params))
        await install(2, good)
        assert (await backend.sample(ask(5, params))).token_ids == before.token_ids

    run_over(backend, scenario)


def test_tied_aliases_that_disagree_are_refused() -> None:
    weights = build("qwen2", seed=9).state_dict()
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1.0

    async def scenario(backend: Any) -> None:
        await backend.stage(1, weights)
        await backend.pause("keep")
        with pytest.raises(EngineError, match="tied"):
            await backend.install(1)
        del weights["lm_head.weight"]
        await backend.stage(1, weights)
        await backend.install(1)

    run_over(TorchBackend(build("qwen2")), scenario)


def test_sampling_goes_on_while_weights_are_staged() -> None:
    """`stage` copies on a thread of its own: neither the loop nor the sampling thread does it."""
    threads: list[str] = []

    class Seen(dict[str, torch.Tensor]):
        def items(self) -> Any:
            threads.append(threading.current_thread().name)
            return super().items()

    async def scenario(backend: Any) -> None:
        await backend.stage(1, Seen(build("qwen2").state_dict()))

    run_over(TorchBackend(build("qwen2")), scenario)
    assert threads and not {"MainThread", "rollout-torch"} & set(threads)


@pytest.mark.parametrize("context", [CONTEXT + 1, 1])
def test_a_context_that_cannot_hold_is_refused(context: int) -> None:
    with pytest.raises(ConfigError, match="context"):
        TorchBackend(build("qwen2"), context=context)
