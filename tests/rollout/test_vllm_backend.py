"""A vLLM engine as a backend beyond the shared scenarios, and what is left of an owner that is killed."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import vllm_engines
from backends import WIDE, build, run_over
from forked_engines import CONTEXT, Forked, forked_engines
from test_prefixes import assert_begins
from vllm_arguments import ENGINE_ARGS, require_vllm

from engine.errors import DataFailure, EngineError
from engine.rollout.backend import SampleRequest, SamplingParams
from engine.rollout.vllm.engine_args import STREAM_INTERVAL

require_vllm()
TOKENS = 120


def model(seed: int = 0) -> Any:
    return build("qwen2", seed, **WIDE)


def asked(name: str, tokens: int = 200, **changes: Any) -> SampleRequest:
    given = {"prompt_ids": [5, 6, 7], "seed": 1, "params": SamplingParams(max_tokens=tokens)} | changes
    return SampleRequest(id=name, **given)


def own_an_engine(directory: str, said: Any) -> None:
    """In a process of its own: an engine whose processes do not know of this one by the tests' means."""
    from engine.rollout.vllm.vllm_backend import VllmBackend

    Forked.ends_with_owner = False
    backend = VllmBackend(directory, rows=8, engine_args=ENGINE_ARGS | {"distributed_executor_backend": "mp"})
    said.send(backend.staging)
    threading.Event().wait()


def test_no_process_and_no_staged_file_outlives_an_owner_that_is_killed(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    heard, said = CONTEXT.Pipe()
    with forked_engines():
        before = {*psutil.Process().children(recursive=True)}
        owner = CONTEXT.Process(target=own_an_engine, args=(str(tmp_path), said))
        owner.start()
    staging = Path(heard.recv())
    started = {*psutil.Process().children(recursive=True)} - before - {psutil.Process(owner.pid)}
    assert staging.is_dir() and len(started) >= 2, "the engine, and its worker in a process of its own"
    owner.kill()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
    assert not staging.exists()


def test_an_engine_that_ends_while_vllm_kills_it_is_closed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = vllm_engines.start(model())
    engine, children = psutil.Process(backend.process), psutil.Process.children
    engine.suspend()  # it does not end when it is asked to

    def end_first(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        engine.kill()
        engine.wait()
        return children(process, recursive)

    monkeypatch.setattr(psutil.Process, "children", end_first)
    vllm_engines.RUNNER.run(backend.close())
    assert not Path(backend.staging).exists()


def test_no_new_request_meets_the_keys_and_values_of_older_weights() -> None:
    prompt = [(7 * i) % 32 for i in range(200)]  # longer than a block of vLLM's prefix cache on a CPU

    async def scenario(backend: Any) -> None:
        likeliest = SamplingParams(temperature=0.0, max_tokens=20)
        for version in range(1, 3):
            for name in ("first", "again"):
                result = await backend.sample(asked(name, prompt_ids=prompt, params=likeliest))
                with torch.no_grad():
                    logits = model(version - 1)(input_ids=torch.tensor([prompt + result.token_ids])).logits
                expected = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                assert result.logprobs == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)
            await backend.stage(version, model(version).state_dict())
            await backend.pause("keep")
            await backend.install(version)
            await backend.resume()

    run_over(vllm_engines.rent(model()), scenario)


def test_the_use_of_the_kv_cache_is_known_while_requests_run() -> None:
    async def scenario(backend: Any) -> None:
        reached = backend.hold(17)
        running = asyncio.ensure_future(backend.sample(asked("r", TOKENS)))
        await reached
        assert 0.0 < backend.engine.cache_used() < 0.5
        backend.go_on()
        await running
        assert backend.engine.cache_used() == 0.0, "its blocks are free"

    run_over(vllm_engines.rent(model()), scenario)


def test_stop_ids_end_a_response_and_are_part_of_it() -> None:
    async def scenario(backend: Any) -> None:
        params = SamplingParams(max_tokens=100, stop_ids=tuple(range(0, 32, 4)))
        result = await backend.sample(asked("r", params=params))
        assert result.finish_reason == "stop" and result.token_ids[-1] % 4 == 0
        assert all(token % 4 for token in result.token_ids[:-1])
        over = await backend.sample(asked("r", params=params, prefix_ids=result.token_ids))
        assert (over.finish_reason, over.token_ids) == ("stop", [])
        with pytest.raises(DataFailure, match="token id 32 is not in the model's vocabulary"):
            await backend.sample(asked("r", prompt_ids=[32]))
        with pytest.raises(EngineError, match="cannot be installed while tokens are sampled"):
            await backend.stage(1, model(1).state_dict())
            await backend.install(1)

    run_over(vllm_engines.rent(model()), scenario)


def test_equal_seeds_draw_equal_tokens_whatever_else_runs() -> None:
    async def scenario(backend: Any) -> None:
        alone = await backend.sample(asked("alone", 60, seed=5))
        crowd = await asyncio.gather(*(backend.sample(asked(f"{seed}", 60, seed=seed)) for seed in range(8)))
        assert crowd[5].token_ids == alone.token_ids
        assert len({tuple(result.token_ids) for result in crowd}) == 8

    run_over(vllm_engines.rent(model()), scenario)


def test_reports_name_the_version_of_each_token_that_vllm_hands_over_late() -> None:
    reports: list[Any] = []

    async def scenario(backend: Any) -> None:
        given = {"report_every": 10, "report": reports.append}
        reached = backend.hold(STREAM_INTERVAL + 1)  # of the 25 that it gets
        backend.engine.gate.hold(25)
        processor = backend.engine._engine.output_processor
        processor.stream_interval = STREAM_INTERVAL
        try:
            running = asyncio.ensure_future(backend.sample(asked("r", TOKENS, **given)))
            await reached
            await backend.pause("keep")
            await backend.stage(1, model(1).state_dict())
            await backend.install(1)
            await backend.resume()
            backend.go_on()
            result = await running
        finally:
            processor.stream_interval = 1
        assert [span.version for span in result.spans] == [0, 1] and len(result.token_ids) == TOKENS
        said = [len(one.token_ids) for one in reports]
        assert said[0] == STREAM_INTERVAL + 1 and len(said) > 1, "before the new weights and after them"
        # vLLM joins what it hands over while the loop is busy, so some of these may be missing.
        assert said == sorted(set(said) & {*range(STREAM_INTERVAL + 1, TOKENS, STREAM_INTERVAL)})
        for one in reports:
            assert_begins(result, one)

    run_over(vllm_engines.rent(model()), scenario)
