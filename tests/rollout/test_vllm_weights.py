"""New weights in a running vLLM: what it samples afterwards is the new model's, whatever was frozen meanwhile."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_engines
from backends import WIDE, build, go_on, hold, run, run_over
from vllm_arguments import ENGINE_ARGS, require_vllm

from engine.errors import EngineError
from engine.rollout.backend import SampleRequest, SampleResult, SamplingParams
from engine.rollout.vllm import weight_receiver
from engine.rollout.vllm.mapped_weights import PLACES
from engine.training.shared_weights import copy_of, find
from engine.trajectory import Span

require_vllm()
PROMPT = [5, 6, 7]
LONG = 240


def greedy(name: str, tokens: int = 40) -> SampleRequest:
    return SampleRequest(id=name, prompt_ids=PROMPT, seed=1, params=SamplingParams(temperature=0.0, max_tokens=tokens))


def assert_samples(model: Any, result: SampleResult) -> None:
    """Every token is the likeliest under `model`, and its log-prob that of a plain forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + result.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert result.token_ids == expected.argmax(-1).tolist()
    chosen = expected[range(len(result.token_ids)), result.token_ids]
    assert result.logprobs == pytest.approx(chosen.tolist(), abs=5e-4)


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """A fresh one, with buckets so small that a version takes several files. Those of `test_backend_scenarios` install
    files, too: of a model whose embeddings are tied."""
    backend = vllm_engines.start(build("qwen2-untied", **WIDE), bucket_mb=0.05, kv="recompute")
    yield backend
    run(backend.close())


def model_of(engine: Any, version: int) -> Any:
    return build("qwen2-untied", 10 + version if version else 0, **WIDE)


def files_of(engine: Any, version: int) -> list[Path]:
    return sorted(engine.staging.glob(f"{version}-*/*.safetensors"))


REASONS = {
    "damaged": "Error",
    "late": "exceeded its time limit",
    "absent": "no staged files in",
    "unread": "could not be checked: no checksums",
}


@pytest.mark.parametrize("how", REASONS)
def test_an_install_that_fails_on_its_way_leaves_the_old_weights(
    engine: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = engine.version, engine.version + 1

    async def unread(version: int, swap_s: float, until: float, limit_s: float) -> str:
        raise EngineError("no checksums")

    async def scenario() -> None:
        if how == "unread":
            monkeypatch.setattr(engine._incoming, "check", unread)
            monkeypatch.setattr(engine._incoming, "checks", "always")
        await engine.stage(new, model_of(engine, new).state_dict())
        files = files_of(engine, new)
        assert len(files) > 3, "the buckets hold too much for this test to say anything"
        intact = files[3].read_bytes()
        directory = files[3].parent
        if how == "damaged":
            files[3].write_bytes(intact[:64])
        elif how == "absent":  # as for a worker on another node
            directory.rename(directory.with_name("aside"))
        elif how == "late":
            engine.install_timeout_s = 1e-9
        kept = asyncio.create_task(engine.sample(greedy("kept")))
        await hold(engine, 5)
        await engine.pause("keep")
        go_on(engine)
        with pytest.raises(EngineError, match=f"version {new} could not be installed: .*{REASONS[how]}"):
            await engine.install(new)
        engine.install_timeout_s = 60.0
        monkeypatch.undo()
        await engine.resume()
        for result in (await kept, await engine.sample(greedy("after"))):
            assert result.spans == [Span(0, 40, old)]
            assert_samples(model_of(engine, old), result)
        if how == "absent":
            directory.with_name("aside").rename(directory)
        files[3].write_bytes(intact)
        await engine.pause("keep")
        await engine.install(new)  # a second try is a try like the first
        await engine.resume()
        assert_samples(model_of(engine, new), await engine.sample(greedy("again")))

    run(scenario())


@pytest.mark.parametrize(
    ("calls", "late"),
    [
        (["load_staged", "begin_check", "end_check"], 1),
        (["load_staged", "begin_check", "end_check"], 2),
        (["load_staged", "begin_check", "load_staged", "end_check", "load_staged"], 3),
        (["load_staged", "begin_check", "load_staged", "compare_with", "end_check"], 3),
    ],
    ids=["at its beginning", "before the second load", "during it", "after it"],
)
def test_weights_whose_check_runs_out_of_time_are_installed_with_a_warning(
    engine: Any, calls: list[str], late: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    new, attempt = engine.version + 1, engine._incoming._attempt
    called: list[str] = []

    def clock() -> float:
        """The time is over after so many calls have begun."""
        return time.monotonic() + (1000 if len(called) >= late else 0)

    async def noted(method: str, *arguments: Any, limit_s: float) -> Any:
        called.append(method)
        if len(called) == 3 and calls[-1] == "load_staged":
            arguments = (*arguments[:-1], 0.0)  # the worker cuts the second load
        return await attempt(method, *arguments, limit_s=limit_s)

    async def scenario() -> None:
        monkeypatch.setattr(engine._incoming, "checks", "always")
        monkeypatch.setattr(engine._incoming, "_attempt", noted)
        monkeypatch.setattr(weight_receiver, "time", SimpleNamespace(monotonic=clock))
        await engine.stage(new, model_of(engine, new).state_dict())
        await engine.pause("abort")
        await engine.install(new)
        await engine.resume()
        assert called == calls
        assert f"version {new} was installed but not checked" in caplog.text
        assert_samples(model_of(engine, new), await engine.sample(greedy("after")))

    run(scenario())


def test_published_weights_are_installed_from_the_memory_they_lie_in(engine: Any) -> None:
    def published(version: int) -> tuple[Any, Any]:
        memory, manifest = copy_of(model_of(engine, version).state_dict())
        try:
            return memory.complete(), manifest
        finally:
            memory.close()

    async def scenario() -> None:
        publications = []
        for version in range(engine.version + 1, engine.version + 3):
            weights, manifest = published(version)
            publications.append(weights.publication)
            await engine.stage(version, weights)
            del weights
            assert not files_of(engine, version)
            for late in (True, False):  # the second time, what is restored lies in memory, too
                kept = asyncio.create_task(engine.sample(greedy("kept")))
                await hold(engine, 5)
                await engine.pause("keep")
                go_on(engine)
                if late:
                    engine.install_timeout_s = 1e-9
                    with pytest.raises(EngineError, match="exceeded its time limit"):
                        await engine.install(version)
                    engine.install_timeout_s = 60.0
                else:
                    await engine.install(version)
                await engine.resume()
                result = await kept
                if late:
                    assert_samples(model_of(engine, version - 1), result)
            assert_samples(model_of(engine, version), await engine.sample(greedy("after")))
        assert find(manifest, publications[0]) is None and find(manifest, publications[1]) is not None

    run(scenario())


def test_published_weights_in_memory_no_worker_can_read_are_installed_from_files(engine: Any) -> None:
    async def scenario() -> None:
        new = engine.version + 1
        memory, _ = copy_of(model_of(engine, new).state_dict())
        await engine.stage(new, memory.complete())
        memory.close()
        (places,) = engine.staging.glob(f"{new}-*/{PLACES}")
        places.write_text(places.read_text().replace("/fd/", "/fd/9"))
        await engine.pause("abort")
        await engine.install(new)
        await engine.resume()
        assert len(files_of(engine, new)) > 3
        assert_samples(model_of(engine, new), await engine.sample(greedy("after")))

    run(scenario())
    engine._area.maps = True  # for the other tests


def test_only_the_version_in_force_is_kept(engine: Any) -> None:
    async def scenario() -> None:
        for version in range(engine.version + 1, engine.version + 3):
            await engine.stage(version, model_of(engine, version).state_dict())
            await engine.pause("abort")
            await engine.install(version)
            await engine.resume()
        assert {path.name.partition("-")[0] for path in engine.staging.iterdir() if path.is_dir()} == {str(version)}

    run(scenario())


def test_close_fails_what_is_running_and_everything_later(engine: Any) -> None:
    """The last test of the engine."""

    async def scenario() -> None:
        running = asyncio.create_task(engine.sample(greedy("running", LONG)))
        failed = asyncio.create_task(engine.failed())
        await hold(engine, 5)
        assert not failed.done() and not running.done()
        await engine.close()
        assert not failed.done()
        failed.cancel()
        for call in (running, engine.sample(greedy("later")), engine.pause("keep"), engine.resume()):
            with pytest.raises(EngineError, match="closed"):
                await call
        assert not engine.staging.exists()

    run(scenario())


@pytest.mark.long
def test_a_compiled_engine_in_bfloat16_samples_with_new_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a GPU: the graph that vLLM compiles at its start must read the new weights, not those that it has seen."""
    from engine.rollout.vllm.vllm_backend import VllmBackend

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # and a process that has not read it
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # another test may have set it
    models = [build("qwen2", version, **WIDE).bfloat16() for version in range(3)]
    models[0].save_pretrained(tmp_path)
    own = {"dtype": "bfloat16", "enforce_eager": False}
    log = tmp_path / "vllm.log"
    backend = VllmBackend(str(tmp_path), rows=8, engine_args=ENGINE_ARGS | own, log=log)
    assert "saved AOT compiled function" in log.read_text()

    async def scenario(backend: VllmBackend) -> None:
        for version in range(3):
            if version:
                await backend.stage(version, models[version].state_dict())
                await backend.pause("keep")
                await backend.install(version)
                await backend.resume()
            result = await backend.sample(greedy(f"{version}"))
            gaps = [gap_to(model, result) for model in models]
            assert gaps[version] < 0.1 and min(gaps[:version] + gaps[version + 1 :]) > 1, gaps

    run_over(backend, scenario)


def gap_to(model: Any, result: SampleResult) -> float:
    """The mean difference between the log-probs of a result and those of a plain forward of `model`."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + result.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    chosen = logits.float().log_softmax(-1)[range(len(result.token_ids)), result.token_ids]
    return float((chosen - torch.tensor(result.logprobs)).abs().mean())
