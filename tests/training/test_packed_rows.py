"""Packed rows and shared prompts change nothing but what is computed: attention equals that of each trajectory alone,
and gradients equal those of padded rows within 1e-6."""

import copy
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from engine.errors import ConfigError
from engine.protocols import Batch
from engine.training import gradients, layout
from engine.training.advantages import set_advantages
from engine.training.batch import Packing, Sample, pack, samples_of, units_of
from engine.training.device import choose_attention
from engine.training.gradients import Policy, accumulate_gradient, checkpoint_layers, packing_for
from engine.training.layout import Bucket, Layout, Prefix, Sequences, buckets_of, load_of, split
from engine.training.lora import Lora, add_adapter
from engine.training.model_scorer import load_reference
from engine.training.model_trainer import ModelTrainer
from engine.training.packed_attention import packed_attention, varlen_attention, varlen_failure, why_not_varlen
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import TrajectoryGroup

Make = Callable[..., TrajectoryGroup]
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WINDOW: dict[str, Any] = {"sliding_window": 4}
MODELS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=1, **WINDOW),
    "mistral": MistralConfig(**SIZES, **WINDOW),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, **WINDOW),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    ),
    "gpt2": GPT2Config(vocab_size=16, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1),
}  # fmt: skip


def model_of(name: str) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(MODELS[name]).eval()


def policy_of(model: Any, **changes: Any) -> Policy:
    return Policy(model, TrainerSettings(device="cpu", **{"micro_batch_tokens": 70, **changes}), CPU, False)


def prepared(groups: Sequence[TrajectoryGroup], given: TrainerSettings) -> list[Sample]:
    made = [samples_of(group) for group in groups]
    set_advantages(made, given)
    samples = [sample for own in made for sample in own]
    for sample in samples:
        sample.weight = 1 / sum(one.tokens for one in samples)
    return samples


def uneven(group: Make) -> list[TrajectoryGroup]:
    """A long prompt, a short one; responses of one token; a response with tokens of a tool; a rewritten history."""
    groups = [
        group(0, [1.0, 0.0, 0.5, 0.0], prompt=[2, 3, 4, 5, 6, 7, 8, 9, 1, 2]),
        group(1, [1.0, 0.0, 0.5, 0.0]),
        group(2, [1.0, 0.0], responses=[[5], [6] * 9], prompt=[1] * 7),
        group(3, [0.0, 1.0, 0.3], prompt=[4, 5, 4, 5]),
    ]
    tool = groups[0].trajectories[1]
    tool.loss_mask = [0, 1] * (len(tool.token_ids) // 2) + [1] * (len(tool.token_ids) % 2)
    rewritten = copy.deepcopy(groups[3].trajectories[0])
    rewritten.prompt_ids = [4, 5, 9]
    rewritten.continues = True
    groups[3].trajectories.insert(1, rewritten)
    return groups


def gradient_of(policy: Policy, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    policy.model.zero_grad(set_to_none=True)
    accumulate_gradient(policy, samples)
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


WAYS: dict[str, dict[str, Any]] = {
    "padded": {"packing": "off"},
    "packed": {"packing": "on", "shared_prompts": "off"},
    "shared": {"packing": "on", "shared_prompts": "on"},
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    ("name", "adapted", "checkpointed"),
    [
        *((name, False, False) for name in MODELS),
        ("gpt2", True, False),
        ("llama", False, True),
        ("qwen3-moe", True, True),
    ],
)
def test_gradients_are_those_of_padded_rows(
    name: str, adapted: bool, checkpointed: bool, group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "SHORT", 4)
    monkeypatch.setattr(gradients, "LOGIT_BYTES", 5 * 4 * 16)
    found, computed = {}, {}
    for way, changes in WAYS.items():
        model = model_of(name)
        if adapted:
            add_adapter(model, Lora(rank=2, alpha=8.0))
            for parameter_name, parameter in model.named_parameters():
                if "lora_B" in parameter_name:
                    torch.nn.init.normal_(parameter, std=0.2)
        if checkpointed:
            assert checkpoint_layers(model) == 2
        policy = policy_of(model, entropy_coef=0.1, **changes)
        samples = prepared(uneven(group), policy.settings)
        found[way] = gradient_of(policy, samples)
        computed[way] = sum(micro.input_ids.numel() for micro, _ in policy.passes(samples))
        lengths = [len(sample.input_ids) for sample in samples]
    assert max(float(one.abs().max()) for one in found["padded"].values()) > 1e-2
    assert differ(found["padded"], found["packed"]) < 1e-6
    assert differ(found["padded"], found["shared"]) < 1e-6
    assert computed["padded"] > computed["packed"] == sum(lengths) > computed["shared"]


@pytest.mark.parametrize("way", ["packed", "shared"])
def test_scores_and_a_whole_step_are_those_of_padded_rows(
    model_path: str, group: Make, as_batch: Callable[..., Batch], way: str
) -> None:
    """Old log-probs, a reference, sequences as a whole: what reads rows of tokens gets the right ones."""
    steps = {"old_policy": "proximal", "policy_mini_batch_size": 2, "kl_loss_coef": 0.1, "loss": "gspo",
             "clip_low": 3e-4, "clip_high": 4e-4, "adam_eps": 1e-4, "learning_rate": 1e-2}  # fmt: skip
    plain, other = (
        ModelTrainer(model_path, TrainerSettings(micro_batch_tokens=60, **steps, **WAYS[each]))
        for each in ("padded", way)
    )
    samples = [sample for made in uneven(group) for sample in samples_of(made)]
    for mine, expected in zip(other.policy.score(samples), plain.policy.score(samples), strict=True):
        assert torch.allclose(mine, expected, atol=1e-5)
    expected_metrics, metrics = (one.train(as_batch(0, uneven(group))) for one in (plain, other))
    for metric in ("loss", "grad_norm", "entropy_estimate", "reference_kl_k3", "logprob_gap_max"):
        assert metrics[metric] == pytest.approx(expected_metrics[metric], rel=1e-4, abs=1e-6), metric
    weights = other.weights()
    assert all(torch.allclose(weights[name], value, atol=1e-5) for name, value in plain.weights().items())


# -- attention ---------------------------------------------------------------------------------------------------------


def scores_of(
    query: torch.Tensor, key: torch.Tensor, starts: Sequence[torch.Tensor], scale: float, left: int
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """The queries and keys of each piece, and its attention. [heads, queries, keys]"""
    for (first, stop), (oldest, newest) in zip(*(pairwise(one.tolist()) for one in starts), strict=True):
        mine, theirs = slice(first, stop), slice(oldest, newest)
        scores = torch.einsum("qhd,khd->hqk", query[mine], key[theirs]) * scale
        ago = torch.arange(newest - oldest - (stop - first), newest - oldest)[:, None] - torch.arange(newest - oldest)
        hidden = (ago < 0) | (ago > (left if left >= 0 else newest))
        yield mine, theirs, scores.masked_fill(hidden, -torch.inf).softmax(-1)


def each_head(query: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    return [one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in others]


@pytest.fixture(scope="module")
def varlen_on_the_cpu() -> None:
    """What the documentation of `torch.nn.attention.varlen` says, since torch has only a kernel for GPUs."""

    @varlen._varlen_attn.register_kernel("cpu")
    def _(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_starts: torch.Tensor,
        key_starts: torch.Tensor, longest_query: int, longest_key: int, causal: bool, scale: float,
        window: list[int], *others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        assert longest_query == query_starts.diff().max() and longest_key == key_starts.diff().max()
        assert causal == (window == [-1, 0]) and window[1] == 0
        assert query_starts.dtype == key_starts.dtype == torch.int32
        key, value = each_head(query, key, value)
        parts = scores_of(query, key, (query_starts, key_starts), scale, window[0])
        out = torch.cat([torch.einsum("hqk,khd->qhd", shares, value[theirs]) for _, theirs, shares in parts])
        return out, query.new_zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)

    @varlen._varlen_attn_backward.register_kernel("cpu")
    def _(
        above: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, query_starts: torch.Tensor, key_starts: torch.Tensor, longest_query: int,
        longest_key: int, causal: bool, random: torch.Tensor, scale: float, window: list[int],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        heads, (keys, values) = key.shape[1], each_head(query, key, value)
        dq, dk, dv = (torch.zeros_like(one) for one in (query, keys, values))
        for mine, theirs, shares in scores_of(query, keys, (query_starts, key_starts), scale, window[0]):
            dv[theirs] += torch.einsum("hqk,qhd->khd", shares, above[mine])
            of_shares = torch.einsum("qhd,khd->hqk", above[mine], values[theirs])
            of_scores = shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True)) * scale
            dq[mine] += torch.einsum("hqk,khd->qhd", of_scores, keys[theirs])
            dk[theirs] += torch.einsum("hqk,qhd->khd", of_scores, query[mine])
        return dq, *(one.unflatten(1, (heads, -1)).sum(2) for one in (dk, dv))


@pytest.mark.usefixtures("varlen_on_the_cpu")
@pytest.mark.parametrize("kernel", ["sdpa", "sdpa of few shapes", "varlen"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_attention_is_that_of_each_trajectory_alone(kernel: str, data: st.DataObject) -> None:
    """Any pieces behind any prefixes, any window, grouped heads, any number of mask parts; forward and backward."""
    roots = sorted(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)), reverse=True)
    children = [sorted(data.draw(st.lists(st.integers(1, 9), max_size=3)), reverse=True) for _ in roots]
    window = data.draw(st.none() | st.integers(1, 12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SHORT", data.draw(st.integers(0, 9)))
        patch.setattr(layout, "MASK_NUMBERS", data.draw(st.integers(1, 100)))
        patch.setattr(layout, "CALL_KEYS", data.draw(st.integers(1, 64)))
        patch.setattr(layout, "LEAST_WIDTH", data.draw(st.integers(1, 4)))
        buckets, start, place = [*buckets_of(roots, 0)], 0, sum(roots)
        alone: list[list[int]] = []
        for length, own in zip(roots, children, strict=True):
            alone.append(list(range(start, start + length)))
            buckets += buckets_of(own, place, Prefix(start, length))
            for child in own:
                alone.append([*range(start, start + length), *range(place, place + child)])
                place += child
            start += length
        module = torch.nn.Identity()
        module.num_key_value_groups = 2  # type: ignore[assignment]
        torch.manual_seed(data.draw(st.integers(0, 1000)))
        query, key, value = (
            torch.randn(1, heads, place, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
        )
        row = Layout(buckets=tuple(buckets))
        if kernel == "sdpa of few shapes":
            row = row.rounded()
        if kernel == "varlen":
            inputs = [one[0].transpose(0, 1) for one in (query, key, value)]
            packed = varlen_attention(*inputs, row, 0.5, window)[None]
        else:
            packed, _ = packed_attention(
                module, query, key, value, None, scaling=0.5, sliding_window=window, layout=row, varlen=True
            )
    expected = torch.zeros_like(packed)
    for tokens in alone:
        index = torch.tensor(tokens)
        q, k, v = (one[:, :, index] for one in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)))
        ago = torch.arange(len(index))[:, None] - torch.arange(len(index))
        scores = (q @ k.transpose(2, 3) * 0.5).masked_fill((ago < 0) | (ago >= (window or 99)), -torch.inf)
        expected = expected.index_copy(1, index, (scores.softmax(-1) @ v).transpose(1, 2))
    assert torch.allclose(packed, expected, atol=1e-12)
    weights = torch.randn_like(packed)
    found, wanted = (torch.autograd.grad((one * weights).sum(), (query, key, value)) for one in (packed, expected))
    assert all(torch.allclose(mine, other, atol=1e-12) for mine, other in zip(found, wanted, strict=True))


def test_cudas_attention_needs_no_plans() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        choose_attention(CPU)
        assert torch.backends.cuda.cudnn_sdp_enabled()
        choose_attention(torch.device("cuda"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("varlen_on_the_cpu")
@pytest.mark.parametrize("wrong", ["", "places", "nan"])
def test_a_kernel_is_compared_with_sdpa_before_it_is_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "nan":
        other = "engine.training.packed_attention.varlen_attention"
        monkeypatch.setattr(other, lambda query, key, value, *_: query * key.sum() * value.sum() * torch.nan)
    elif wrong:
        right = Layout.sequences

        def sequences(row: Layout, device: torch.device) -> Sequences:
            places = right(row, device).key_places
            assert places is not None
            return right(row, device)._replace(key_places=places.flip(0))

        monkeypatch.setattr(Layout, "sequences", sequences)
    found = varlen_failure(CPU, torch.bfloat16)
    assert ("differ from" in found) if wrong else (found is None), found


def test_a_kernel_for_gpus_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.attention is 'varlen'.*type cuda.*use auto"):
        Policy(model_of("llama"), TrainerSettings(attention="varlen"), CPU, False)
    policy = policy_of(model_of("llama"), packing="on")
    policy_of(policy.model, packing="on", attention="sdpa")
    assert why_not_varlen(torch.device("cuda"), torch.float32) == "computes in bfloat16 or float16, not in float32"


def test_attention_on_a_gpu_has_few_shapes_and_little_padding() -> None:
    """The figures of docs/TRAINING.md: 1 000 random rows, more different than those of a run; and rows as of GSM8K."""
    draws = random.Random(0)

    def random_groups() -> Iterator[tuple[int, list[int]]]:
        prompts = [draws.randint(20, 1500) for _ in range(draws.randint(1, 4))]
        most = draws.choice([100, 1000, 6000])
        return ((prompt, [draws.randint(1, most) for _ in range(draws.randint(0, 8))]) for prompt in prompts)

    rows = [row_of(random_groups()) for _ in range(1000)]
    (exact, scores), (rounded, more) = shapes_of(rows), shapes_of([row.rounded() for row in rows])
    assert len(rounded) <= 32 and len(exact) > 5000
    assert more < 1.7 * scores
    short = [row_of([(draws.randint(50, 150), [draws.randint(80, 300) for _ in range(8)])]) for _ in range(100)]
    (_, scores), (rounded, more) = shapes_of(short), shapes_of([row.rounded() for row in short])
    assert len(rounded) <= 8 and more < 3 * scores


def row_of(groups: Iterable[tuple[int, list[int]]]) -> Layout:
    """A row of groups: the length of each prompt and of its responses."""
    buckets: list[Bucket] = []
    start = 0
    for prompt, responses in groups:
        own = sorted(responses, reverse=True)
        buckets += [*buckets_of([prompt], start), *buckets_of(own, start + prompt, Prefix(start, prompt))]
        start += prompt + sum(own)
    return Layout(buckets=tuple(buckets))


def shapes_of(rows: Sequence[Layout]) -> tuple[set[tuple[int, int, int]], int]:
    """The shapes (pieces, columns, keys) of the calls of attention, and the number of their scores."""
    shapes: set[tuple[int, int, int]] = set()
    scores = 0
    for bucket in [bucket for row in rows for bucket in row.buckets]:
        shape = bucket.pieces, bucket.width, bucket.width + (bucket.gap + bucket.prefix.length if bucket.prefix else 0)
        shapes.add(shape)
        scores += math.prod(shape)
    return shapes, scores


@pytest.mark.parametrize(("asked", "causal"), [({"softcap": 5.0}, True), ({"s_aux": torch.ones(2)}, True), ({}, False)])
def test_attention_that_is_not_computed_is_refused(asked: dict[str, Any], causal: bool) -> None:
    module = torch.nn.Identity()
    module.is_causal = causal  # type: ignore[assignment]
    one = torch.ones(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match=r"softcap|s_aux|later tokens"):
        packed_attention(module, one, one, one, None, **asked)


# -- what lies in a row ------------------------------------------------------------------------------------------------


def test_packed_rows_keep_to_the_budget_and_lose_nothing(group: Make) -> None:
    samples = [sample for made in uneven(group) for sample in samples_of(made)]
    for packing in (Packing(packed=True), Packing(packed=True, shared=0.0)):
        for budget in (1, 20, 40, 1000):
            packed = list(pack(samples, budget, packing))
            assert sorted(index for _, indices in packed for index in indices) == list(range(len(samples)))
            for micro, indices in packed:
                assert micro.input_ids.numel() <= budget or len(indices) == 1
                assert micro.targets.tolist() == [t for index in indices for t in samples[index].targets.tolist()]
                assert micro.position_ids is not None
                at = iter(zip(micro.predictors(micro.input_ids), micro.predictors(micro.position_ids), strict=True))
                for sample in (samples[index] for index in indices):
                    for position in sample.positions.tolist():
                        assert next(at) == (sample.input_ids[position], position)


def test_a_prompt_is_shared_where_that_saves_enough(group: Make) -> None:
    responses = [[index] * 40 for index in (5, 6, 7, 8)]
    long, short = (samples_of(group(0, [1.0] * 4, prompt=[3] * tokens, responses=responses)) for tokens in (20, 8))
    auto = Packing(packed=True, shared=0.15)
    assert [(len(unit.members), unit.shared) for unit in units_of(long, auto)] == [(4, 20)]
    assert [(len(unit.members), unit.shared) for unit in units_of(short, auto)] == [(1, 0)] * 4
    assert [unit.shared for unit in units_of(short, Packing(packed=True, shared=0.0))] == [8]
    assert [unit.shared for unit in units_of(long, Packing(packed=True))] == [0] * 4


def test_equal_first_tokens_of_responses_are_shared_too(group: Make) -> None:
    made = group(0, [1.0, 0.0], prompt=[3, 4], responses=[[5, 6, 7], [5, 6, 8]])
    [unit] = units_of(samples_of(made), Packing(packed=True, shared=0.0))
    assert unit.shared == 4
    [(micro, _)] = pack(samples_of(made), 99, Packing(packed=True, shared=0.0))
    assert micro.input_ids.tolist() == [[3, 4, 5, 6]], "the last tokens are targets only"


def test_the_ranks_of_a_trainer_get_like_shares_of_one_prompt(group: Make) -> None:
    samples = samples_of(group(0, [1.0] * 16, prompt=[3] * 20, responses=[[5] * 10] * 15 + [[7] * 30]))
    lengths = [len(sample.input_ids) for sample in samples]
    shared = Packing(packed=True, shared=0.0)
    [whole] = units_of(samples, shared)
    parts = units_of(samples, shared, parts=2)
    assert sorted(index for part in parts for index in part.members) == list(range(16))
    assert len(parts) >= 2
    assert all(load_of(part, lengths) <= max(load_of(whole, lengths) // 4, 50) for part in parts)
    assert [part.shared for part in split(whole, lengths, 1)] == [0] * 16, "alone, a trajectory shares nothing"


# -- models whose rows cannot be packed --------------------------------------------------------------------------------


def lfm2() -> Any:
    return AutoModelForCausalLM.from_config(Lfm2Config(**SIZES)).eval()


class Smearing(LlamaForCausalLM):
    """Its config.json does not say that each token sees the one before it in the row."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(lambda module, ids, found: found + 0.1 * found.roll(1, 1))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lfm2, "state from token to token"),
        (lambda: Smearing(LlamaConfig(**SIZES)).eval(), "computes packed rows differently"),
        (lambda: AutoModelForCausalLM.from_config(MODELS["llama"], attn_implementation="eager"), "eager attention"),
    ],
)
def test_a_model_that_cannot_compute_packed_rows_is_padded_or_refused(
    make: Callable[[], Any], reason: str, group: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=reason) as refused:
        policy_of(model, packing="on")
    assert "trainer.packing" in str(refused.value) and "use auto" in str(refused.value)
    with pytest.raises(ConfigError, match=r"trainer\.shared_prompts"):
        policy_of(model, shared_prompts="on")
    with pytest.raises(ConfigError, match=r"trainer\.attention is 'varlen'"):
        packing_for(model, TrainerSettings(attention="varlen"))
    with caplog.at_level(logging.WARNING):
        policy = policy_of(model)
    assert reason in caplog.text
    assert model.config._attn_implementation == before
    for micro, _ in policy.passes(samples_of(group(0, [1.0, 0.0]))):
        assert micro.layout is None and len(micro.input_ids) == 2


def test_a_reference_may_be_padded_where_the_trained_model_must_not(
    tmp_path: Any, model_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    lfm2().save_pretrained(tmp_path)
    given = TrainerSettings(packing="on", shared_prompts="on", kl_loss_coef=0.1, reference_path=str(tmp_path))
    reference = load_reference(16, model_path, given, CPU, False)
    assert isinstance(reference, Policy) and not reference.packing.packed


def test_a_model_with_packed_attention_still_takes_plain_rows() -> None:
    """Whoever asks the trainer's model without a layout, as the search for its head does, gets what sdpa gives."""
    model = model_of("mistral")
    ids = torch.arange(20).reshape(2, 10) % 16
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        expected, masked = model(ids).logits, model(ids, attention_mask=mask).logits
        policy_of(model, packing="on")
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)
        assert torch.allclose(model(ids, attention_mask=mask).logits[:, 3:], masked[:, 3:], atol=1e-5)


def test_tokens_of_other_trajectories_do_not_reach_a_packed_one(model_path: str, group: Make) -> None:
    policy = policy_of(AutoModelForCausalLM.from_pretrained(model_path).eval(), packing="on", shared_prompts="on")

    def scores(other: int) -> torch.Tensor:
        made = group(0, [1.0, 0.0], prompt=[3] * 9, responses=[[5, 6, 7], [other] * 8])
        return policy.score(samples_of(made))[0]

    assert torch.equal(scores(8), scores(9))
