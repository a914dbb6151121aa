"""Adapters in a running vLLM: what it samples is what peft computes with the version in force."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm_engines
from backends import WIDE, build, go_on, hold, run
from reference_sync import digest
from safetensors.torch import load_file, save_file
from test_vllm_weights import PROMPT, assert_samples, greedy
from vllm_arguments import require_vllm

from engine.errors import EngineError
from engine.rollout.backend import SampleResult
from engine.training.lora import Lora, adapter_tensors, add_adapter
from engine.training.model_trainer import ModelTrainer
from engine.training.shared_weights import PublishedTensors
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import Span

require_vllm()
LORA = Lora(rank=4, alpha=8.0)
"""vLLM's lowest maximum rank is 8."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    backend = vllm_engines.start(build("qwen2-untied", **WIDE), lora=LORA, kv="recompute")
    yield backend
    run(backend.close())


def adapted(version: int, family: str = "qwen2-untied") -> Any:
    """The model with the adapter of a version; version 0 is the model alone."""
    model = build(family, **WIDE)
    add_adapter(model, LORA)
    draws = torch.Generator().manual_seed(version)
    for tensor in adapter_tensors(model).values():
        drawn = torch.randn(tensor.shape, generator=draws) * 0.2
        tensor.data.copy_(drawn if version else torch.zeros(tensor.shape))
    return model


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> ModelTrainer:
    folder = str(tmp_path_factory.mktemp("trained"))
    build("qwen2-untied", **WIDE).save_pretrained(folder)
    return ModelTrainer(folder, TrainerSettings(lora=LORA, device="cpu"))


def published(version: int, family: str = "qwen2-untied") -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in adapter_tensors(adapted(version, family)).items()}


def publish(trainer: ModelTrainer, version: int) -> PublishedTensors:
    """What a trainer publishes whose adapter is that of a version."""
    trainer.start_from(published(version), 0)
    return trainer.weights()


def assert_samples_in_turn(models: list[Any], result: SampleResult) -> None:
    """Each span's tokens are those of its model, over keys and values that it computed itself."""
    for model, (start, stop, _) in zip(models, result.spans, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([PROMPT + result.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.log_softmax(-1)[start:stop]
        assert result.token_ids[start:stop] == expected.argmax(-1).tolist()
        assert result.logprobs[start:stop] == pytest.approx(expected.max(-1).values.tolist(), abs=5e-4)


def files_of(engine: Any) -> list[str]:
    return sorted(path.name for path in engine.staging.glob("*/*"))


def digest_in_force(engine: Any) -> str:
    """Of the tensors in the file from which vLLM loaded the adapter in force."""
    [file] = engine.staging.glob("*/adapter_model.safetensors")
    return digest(load_file(file))


def test_each_version_is_the_trainers_adapter_and_frozen_requests_continue_with_it(
    engine: Any, trainer: ModelTrainer
) -> None:
    async def scenario() -> None:
        first = await engine.sample(greedy("first"))
        assert first.spans == [Span(0, 40, 0)]
        assert_samples(adapted(0), first)
        kept = asyncio.create_task(engine.sample(greedy("kept", 60)))
        await hold(engine, 20)
        first_adapter = publish(trainer, 1)
        await engine.stage(1, first_adapter)
        await engine.pause("keep")
        await engine.install(1)
        await engine.resume()
        assert digest_in_force(engine) == digest(first_adapter)
        go_on(engine)
        result = await kept
        assert [span.version for span in result.spans] == [0, 1]
        assert_samples_in_turn([adapted(0), adapted(1)], result)
        after = await engine.sample(greedy("after"))
        assert after.token_ids != first.token_ids
        for version in (2, 3):
            assert_samples(adapted(version - 1), after)
            adapter = publish(trainer, version)
            await engine.stage(version, adapter)
            await engine.pause("abort")
            await engine.install(version)
            await engine.resume()
            assert digest_in_force(engine) == digest(adapter), "to the bit what the trainer published"
            after = await engine.sample(greedy(f"{version}"))
            assert after.spans == [Span(0, 40, version)]
        assert_samples(adapted(3), after)
        assert files_of(engine) == ["adapter_config.json", "adapter_model.safetensors"], "only the one in force"

    run(scenario())


def test_an_adapter_that_vllm_does_not_hold_as_published_fails_a_checked_install(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        old = engine.version
        other = published(old + 1)
        altered = next(iter(other))
        other[altered] = other[altered] + 1
        monkeypatch.setattr(engine._incoming, "checks", "always")
        await engine.stage(old + 1, published(old + 1))
        [file] = engine.staging.glob(f"{old + 1}-*/adapter_model.safetensors")
        save_file(other, file)
        await engine.pause("keep")
        with pytest.raises(EngineError, match=f"given other values than the published ones: {re.escape(altered)}$"):
            await engine.install(old + 1)
        await engine.stage(old + 1, published(old + 1))
        await engine.install(old + 1)
        await engine.resume()
        assert_samples(adapted(old + 1), await engine.sample(greedy("checked")))

    run(scenario())


def test_an_adapter_that_does_not_fit_is_refused_and_a_damaged_one_undone(engine: Any) -> None:
    async def scenario() -> None:
        old = engine.version
        with pytest.raises(EngineError, match="do not fit the model: missing"):
            await engine.stage(old + 1, build("qwen2-untied", **WIDE).state_dict())
        await engine.stage(old + 1, published(old + 1))
        [file] = engine.staging.glob(f"{old + 1}-*/adapter_model.safetensors")
        intact = file.read_bytes()
        file.write_bytes(intact[:64])
        await engine.pause("keep")
        with pytest.raises(EngineError, match=f"version {old + 1} could not be installed"):
            await engine.install(old + 1)
        await engine.resume()
        assert_samples(adapted(old), await engine.sample(greedy("undone")))
        file.write_bytes(intact)
        await engine.pause("keep")
        await engine.install(old + 1)
        await engine.resume()
        assert_samples(adapted(old + 1), await engine.sample(greedy("again")))

    run(scenario())
