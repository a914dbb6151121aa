"""Router replay: a token is trained with the experts that sampled it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import OfRanks
from test_ranks import close_to
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from engine.config.model_description import tensor_shapes
from engine.config.trainer import adapter_numbers
from engine.errors import ConfigError
from engine.protocols import Batch
from engine.rollout.backend import SampleRequest, SamplingParams
from engine.rollout.torch.torch_backend import TorchBackend
from engine.training.batch import Packing, pack, samples_of
from engine.training.expert_routes import Routers, packed_routes
from engine.training.lora import Lora
from engine.training.model_trainer import ModelTrainer
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup

SHAPE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 32, "initializer_range": 0.4, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = Qwen3MoeConfig(
    **SHAPE, moe_intermediate_size=16, num_experts=16, num_experts_per_tok=2, mlp_only_layers=[1], norm_topk_prob=True
)
AsBatch = Callable[..., Batch]
ONE_PASS: dict[str, Any] = {"micro_batch_tokens": 400, "kl_loss_coef": 0.0, "old_policy": "behavior"}
"""Settings of a step without further passes."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for name, config in {"experts": EXPERTS, "dense": Qwen3Config(**SHAPE)}.items():
        torch.manual_seed(3)
        found[name] = str(tmp_path_factory.mktemp(name))
        AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
    return found


def sampled(path: str, *, notes: bool, rows: int = 6, cut: int = 0) -> TrajectoryGroup:
    """A group sampled in bfloat16; the first `cut` tokens in a request of their own."""

    async def one(backend: TorchBackend, index: int) -> Trajectory:
        trajectory = Trajectory(prompt_ids=[2, 3, 4, 5], reward=float(index % 2), finish_reason="length")
        for limit in (cut, 60) if cut else (60,):
            given, params = list(trajectory.token_ids), SamplingParams(max_tokens=limit)
            result = await backend.sample(
                SampleRequest(
                    id=f"{index}-{limit}", prompt_ids=trajectory.prompt_ids, prefix_ids=given, params=params, seed=index
                )
            )
            trajectory.extend(result.token_ids, result.logprobs, result.spans, routes=result.routes)
        return trajectory

    async def all_of_them() -> list[Trajectory]:
        backend = TorchBackend(
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), rows=rows, notes_routes=notes
        )
        found = await asyncio.gather(*(one(backend, index) for index in range(6)))
        await backend.close()
        return found

    return TrajectoryGroup(group=0, prompt=Prompt(row=0, text=""), trajectories=asyncio.run(all_of_them()))


def mean_gap(path: str, group: TrajectoryGroup, **settings: Any) -> float:
    trainer = ModelTrainer(path, TrainerSettings(bf16="off", **settings))
    samples = samples_of(group)
    gaps = [(own - sample.behavior).abs() for own, sample in zip(trainer.policy.score(samples), samples, strict=True)]
    return float(torch.cat(gaps).mean())


@pytest.fixture(scope="module")
def group(paths: dict[str, str]) -> TrajectoryGroup:
    return sampled(paths["experts"], notes=True)


def test_with_the_samplers_experts_the_gap_is_that_of_a_dense_model(
    paths: dict[str, str], group: TrajectoryGroup
) -> None:
    dense = mean_gap(paths["dense"], sampled(paths["dense"], notes=False))
    own = mean_gap(paths["experts"], group)
    for packing, shared in (("off", "off"), ("on", "on")):
        replayed = mean_gap(paths["experts"], group, router_replay=True, packing=packing, shared_prompts=shared)
        assert replayed < 1.5 * dense < 0.75 * own


def test_the_noted_experts_are_those_of_a_forward_pass(paths: dict[str, str], group: TrajectoryGroup) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(paths["experts"], dtype=torch.bfloat16)
    routers = Routers(model)
    routers.note()
    trajectory = group.trajectories[1]
    with torch.no_grad():
        model(torch.tensor([trajectory.prompt_ids + trajectory.token_ids[:-1]]))
    expected = [route.numpy().tobytes() for route in routers.take()]
    assert len(trajectory.routes) == len(expected) == 63 and len(expected[0]) == routers.route_bytes == 3 * 2
    assert {route[2:4] for route in trajectory.routes} == {b"\0\0"}, "the second layer has no experts"
    equal = sum(sorted(a[:2]) == sorted(b[:2]) for a, b in zip(expected, trajectory.routes, strict=True))
    assert equal > 57, "bfloat16 may round a batch differently, but seldom across a border"


@pytest.mark.parametrize(("rows", "cut"), [(2, 0), (6, 20)], ids=["rows that move", "a request that goes on"])
def test_every_request_gets_its_own_experts(paths: dict[str, str], group: TrajectoryGroup, rows: int, cut: int) -> None:
    other = sampled(paths["experts"], notes=True, rows=rows, cut=cut)
    for one, expected in zip(other.trajectories, group.trajectories, strict=True):
        same = next((at for at in range(60) if one.token_ids[at] != expected.token_ids[at]), 60)
        equal = sum(a == b for a, b in zip(one.routes[: same + 3], expected.routes[: same + 3], strict=True))
        assert len(one.routes) == 63 and equal > 0.8 * (same + 3)


def test_two_ranks_train_with_the_same_experts(
    paths: dict[str, str], group: TrajectoryGroup, as_batch: AsBatch, of_ranks: OfRanks
) -> None:
    weights = []
    for count, replay in ((1, True), (2, True), (1, False)):
        with of_ranks(count, paths["experts"], router_replay=replay, **ONE_PASS) as trainer:
            metrics = trainer.train(as_batch(0, [group]))
            assert metrics.get("replayed_token_share") == (1.0 if replay else None)
            weights.append({name: value.clone() for name, value in trainer.weights().items()})
    assert close_to(weights[0], weights[1]) and not close_to(weights[0], weights[2])
    before = AutoModelForCausalLM.from_pretrained(paths["experts"]).state_dict()
    assert not torch.equal(weights[0]["model.layers.0.mlp.gate.weight"], before["model.layers.0.mlp.gate.weight"])


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["whole", "adapter"])
def test_the_reference_chooses_its_own_experts(
    paths: dict[str, str], group: TrajectoryGroup, lora: Lora | None
) -> None:
    settings = TrainerSettings(bf16="off", router_replay=True, kl_loss_coef=0.1, lora=lora)
    trainer, samples = ModelTrainer(paths["experts"], settings), samples_of(group)
    assert trainer.reference is not None
    scored, repeated = torch.cat(trainer.reference.score(samples)), torch.cat(trainer.policy.score(samples))
    own = torch.cat(trainer.policy.score([replace(sample, routes=None) for sample in samples]))
    assert torch.allclose(scored, own, atol=1e-4) and not torch.allclose(scored, repeated, atol=1e-2)


def test_an_adapter_has_no_layer_of_an_expert_or_of_its_name(paths: dict[str, str]) -> None:
    lora = Lora(rank=2)
    trainer = ModelTrainer(paths["experts"], TrainerSettings(bf16="off", lora=lora))
    layers = {name.split(".")[-3] for name in trainer.weights()}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}
    numbers = sum(tensor.numel() for tensor in trainer.weights().values())
    assert adapter_numbers(lora, tensor_shapes(Path(paths["experts"]))) == numbers
    with pytest.raises(ConfigError, match="named up_proj that can have an adapter: in a model with experts"):
        ModelTrainer(paths["experts"], TrainerSettings(lora=Lora(rank=2, target_modules=("up_proj",))))


def test_a_token_without_known_experts_gets_the_models_own(paths: dict[str, str], group: TrajectoryGroup) -> None:
    routes = packed_routes([b"\1\2\0\0\3\4", b""], 3)
    assert routes is not None and routes.tolist() == [[1, 1, 2, 0, 0, 3, 4], [0] * 7, [0] * 7]
    assert packed_routes([b"", b""], 2) is None
    model: Any = AutoModelForCausalLM.from_pretrained(paths["experts"])
    routers, ids = Routers(model), torch.tensor([[2, 3, 4]])
    with torch.no_grad():
        own = model(ids).logits
        routers.repeat(torch.zeros((1, 3, 7), dtype=torch.uint8))
        assert torch.allclose(model(ids).logits, own, atol=1e-5)
        routers.repeat(routes[None])
        assert not torch.allclose(model(ids).logits, own, atol=1e-2)
        routers.repeat(None)
        assert torch.equal(model(ids).logits, own)
        with pytest.raises(ConfigError, match="a token's experts have 4 bytes, but this model's have 6"):
            routers.repeat(torch.zeros((1, 3, 5), dtype=torch.uint8))


def test_every_layout_keeps_the_experts_with_their_tokens(group: TrajectoryGroup) -> None:
    samples = samples_of(group)
    for sample in samples:
        assert sample.routes is not None
        sample.routes[:, 1] = sample.input_ids.to(torch.uint8)
    for packing in (Packing(), Packing(packed=True), Packing(packed=True, shared=0.0)):
        for micro, _ in pack(samples, 150, packing):
            assert micro.routes is not None and torch.equal(micro.routes[..., 1].long(), micro.input_ids)


def doubled(module: Any, given: Any, output: Any) -> Any:
    return output[0], 2 * output[1], output[2]


def test_a_model_whose_experts_cannot_be_repeated_is_refused() -> None:
    law = (
        r"trainer\.router_replay is True: Qwen3ForCausalLM has no routers that return logits, weights and experts; use"
    )
    with pytest.raises(ConfigError, match=law):
        Routers(AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE)))
    model: Any = AutoModelForCausalLM.from_config(EXPERTS)
    model.model.layers[2].mlp.gate.register_forward_hook(doubled)
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM weighs its experts in another way than by a softmax"):
        Routers(model)
