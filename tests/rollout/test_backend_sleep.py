"""Backends that give their memory back while another task of their pool has the hardware."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import vllm_engines
from backends import BACKENDS, WIDE, build, build_torch, run_over, until_sampled
from test_generator import by_length, over
from test_torch_backend import ask
from test_vllm_weights import assert_samples, greedy
from vllm_arguments import ENGINE_ARGS, require_vllm

from engine.errors import EngineError
from engine.protocols import Sleeper
from engine.rollout.backend import SamplingParams
from engine.rollout.torch.torch_backend import TorchBackend

PARAMS = SamplingParams(max_tokens=40)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_torch_backend_gives_its_cache_back_and_samples_the_same_after(deterministic: bool) -> None:
    async def scenario(backend: Any) -> None:
        first = await backend.sample(ask(0, PARAMS))
        cache = backend._model.cache
        assert all(tensor is not None for tensor in cache.keys + cache.values)
        await backend.pause("abort")
        await backend.sleep()
        assert all(tensor is None for tensor in cache.keys + cache.values)
        await backend.wake()
        await backend.resume()
        again = await backend.sample(ask(0, PARAMS))
        assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)

    run_over(build_torch("qwen2", deterministic=deterministic, rows=4), scenario)


def test_weights_are_staged_while_the_torch_backend_sleeps() -> None:
    new = build("qwen2", seed=9)

    async def scenario(backend: Any) -> Any:
        await backend.pause("abort")
        await backend.sleep()
        await backend.stage(1, new.state_dict())
        await backend.wake()
        await backend.install(1)
        await backend.resume()
        return await backend.sample(ask(0, PARAMS))

    result = run_over(build_torch("qwen2"), scenario)
    fresh = run_over(TorchBackend(new), lambda backend: backend.sample(ask(0, PARAMS)))
    assert result.token_ids == fresh.token_ids
    assert {span.version for span in result.spans} == {1}


def test_a_backend_with_requests_under_way_does_not_sleep() -> None:
    async def scenario(backend: Any) -> None:
        with pytest.raises(EngineError, match="only when paused"):
            await backend.sleep()
        running = asyncio.create_task(backend.sample(ask(0, PARAMS)))
        await until_sampled(backend, 5)
        await backend.pause("keep")
        with pytest.raises(EngineError, match="without started requests"):
            await backend.sleep()
        await backend.resume()
        assert len((await running).token_ids) == 40

    run_over(build_torch("qwen2"), scenario)


def test_a_generator_sleeps_as_its_backend_does() -> None:
    async def scenario(backend: Any) -> None:
        generator = over(backend, by_length(PARAMS))
        assert isinstance(generator, Sleeper)
        await backend.sample(ask(0, PARAMS))
        await generator.pause("abort")
        await generator.sleep()
        assert backend._model.cache.keys[0] is None
        await generator.wake()
        await generator.resume()

    run_over(build_torch("qwen2"), scenario)


def test_vllm_on_a_cpu_forgets_its_cache_and_samples_on() -> None:
    require_vllm()

    async def scenario(backend: Any) -> None:
        with pytest.raises(EngineError, match="only when paused"):
            await backend.engine.sleep()
        await backend.pause("abort")
        await backend.engine.sleep()
        await backend.engine.wake()
        await backend.resume()
        assert len((await backend.sample(ask(0, PARAMS))).token_ids) == 40

    run_over(BACKENDS["vllm"].make("qwen2"), scenario)


def test_vllm_drops_weights_once_an_install_has_replaced_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    require_vllm()
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda platform: True)
    sleeping = {"enable_sleep_mode": True, "worker_cls": "sleeping_worker.SleepingWorker"}
    first, second = (build("qwen2-untied", seed, **WIDE) for seed in (0, 1))

    async def scenario(backend: Any) -> None:
        for version, model in ((0, first), (1, second), (1, second), (2, first)):
            await backend.pause("abort")
            await backend.sleep()
            if version > backend.version:
                await backend.stage(version, model.state_dict())
            await backend.wake()
            if version > backend.version:
                await backend.install(version)
            await backend.resume()
            assert_samples(model, await backend.sample(greedy(f"{version}")))
        assert (Path(backend._engine.model_config.model) / "levels").read_text() == "1122"

    run_over(vllm_engines.start(first, engine_args=ENGINE_ARGS | sleeping), scenario)
