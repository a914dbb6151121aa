"""One vLLM engine with several workers: tensor parallelism, and data parallelism (two engine processes). The model of
the first has experts, which vLLM keeps in another form than files have them. On CPUs, data-parallel engines with
experts must run batches of one size, which depends on when requests arrive.

Each kind starts once for all tests. The second one takes long, so `make torture` runs it.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_engines
from backends import WIDE, build, run, run_over
from test_vllm_weights import assert_samples, greedy
from vllm_arguments import ENGINE_ARGS, require_vllm

from engine.errors import EngineError
from engine.rollout.vllm import engine_load, vllm_backend, weight_checks
from engine.rollout.vllm.engine_args import all_engine_args
from engine.rollout.vllm.engine_load import SessionEngines
from engine.rollout.vllm.weight_checks import checksum, checksums_of, differing, not_loaded

pytestmark = pytest.mark.timeout(600)
require_vllm()
FAMILIES = {"tensor": "qwen3-moe", "data": "qwen2-untied"}
KINDS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "data": {"data_parallel_size": 2, "distributed_executor_backend": "mp"},
}


@pytest.fixture(scope="module", params=["tensor", pytest.param("data", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_backend, "all_engine_args", faulty_arguments)
        backend = vllm_engines.start(model_of(request.param, 0), engine_args=ENGINE_ARGS | KINDS[request.param])
    backend.kind = request.param
    yield backend
    run(backend.close())


def faulty_arguments(*given: Any) -> dict[str, Any]:
    return all_engine_args(*given) | {"worker_extension_cls": "faulty_worker.FaultyExtension"}


def set_faults(engine: Any, *faults: str) -> None:
    """Of the next installs: see `faulty_worker.FaultyExtension`. A checked version is installed twice."""
    (Path(engine._engine.model_config.model) / "fault").write_text("\n".join(faults))


def model_of(kind: str, version: int) -> Any:
    return build(FAMILIES[kind], version, **WIDE | {"num_key_value_heads": 2})


async def assert_sampled(engine: Any, version: int) -> None:
    """Every worker samples with the weights of a version: data parallelism gives requests to its engines in turn. Few
    tokens: for each, two workers on two cores wait for each other."""
    requests = range(4 if engine.kind == "data" else 1)
    for result in await asyncio.gather(*(engine.sample(greedy(f"{index}", 8)) for index in requests)):
        assert_samples(model_of(engine.kind, version), result)


async def install(engine: Any, version: int, weights: Any) -> None:
    await engine.stage(version, weights)
    await engine.pause("abort")
    try:
        await engine.install(version)
    finally:
        await engine.resume()


def test_an_install_reaches_every_worker(engine: Any) -> None:
    async def scenario() -> None:
        new = engine.version + 1
        await assert_sampled(engine, engine.version)
        await install(engine, new, model_of(engine.kind, new).state_dict())
        await assert_sampled(engine, new)

    run(scenario())


@pytest.mark.long
def test_requests_of_a_session_go_to_the_engine_that_has_their_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = vllm_engines.start(build("qwen2", **WIDE), engine_args=ENGINE_ARGS | KINDS["data"])
    cached: dict[str, int] = {}
    generate = engine._engine.generate

    async def noted(*given: Any, **options: Any) -> Any:
        async for output in generate(*given, **options):
            cached[output.request_id] = output.num_cached_tokens
            yield output

    async def ask(name: str, session: int, turn: int) -> None:
        prompt = [(7 * i + session) % 32 for i in range(200 + turn)]  # longer than a block of the cache on a CPU
        await engine.sample(replace(greedy(name, 4), prompt_ids=prompt, session=session))

    async def scenario(engine: Any) -> None:
        await asyncio.gather(ask("a1", 1, 0), ask("b1", 2, 0))
        for session, name in ((2, "b2"), (1, "a2"), (2, "b3")):
            await ask(name, session, 1)
        assert (cached["a1"], cached["b1"]) == (0, 0)
        assert min(cached["a2"], cached["b2"], cached["b3"]) >= 128

    monkeypatch.setattr(engine._engine, "generate", noted)
    run_over(engine, scenario)


def test_a_new_session_goes_to_the_engine_with_the_fewest_requests() -> None:
    engines = SessionEngines(2)
    assert [engines.enter(1), engines.enter(1), engines.enter(2)] == [0, 0, 1]
    engines.leave(0)
    engines.leave(0)
    assert engines.enter(3) == 0
    assert engines.enter(2) == 1, "although it has more requests"
    engines.leave(engines.enter(None))
    assert engines.requests == [1, 2]
    assert SessionEngines(1).enter(1) is None


def test_the_least_recently_used_session_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_load, "SESSIONS_KEPT", 2)
    engines = SessionEngines(2)
    assert [engines.enter(session) for session in (1, 2, 1, 3)] == [0, 1, 0, 1]
    engines.leave(1), engines.leave(1)
    assert engines.enter(2) == 1 and engines.requests == [2, 1], "it is new again"
    assert engines.enter(1) == 1, "forgotten for 2, and new again"


FAULTS = {
    "fail": "worker 1: RuntimeError: the device is gone",
    "skip model.norm.weight": "worker 1: RuntimeError: 1 parameter got no new weights: model.norm.weight",
}


@pytest.mark.parametrize("what", FAULTS)
def test_an_install_that_fails_in_the_second_worker_leaves_the_old_weights(engine: Any, what: str) -> None:
    async def scenario() -> None:
        old, new = engine.version, engine.version + 1
        set_faults(engine, what)
        with pytest.raises(EngineError, match=f"version {new} could not be installed: {FAULTS[what]}$"):
            await install(engine, new, model_of(engine.kind, new).state_dict())
        await assert_sampled(engine, old)

    run(scenario())


@pytest.mark.parametrize(
    ("faults", "wrong"),
    [
        (["change model.norm.weight"], r"changed when the same version was loaded again: \S*model\.norm\.weight"),
        (
            ["none", "alter model.layers.0.self_attn.q_proj.weight"],
            r"given other values than the published ones: model\.layers\.0\.self_attn\.q_proj\.weight",
        ),
    ],
    ids=["in memory", "on its way"],
)
def test_a_checked_install_fails_if_the_second_worker_holds_other_weights(
    engine: Any, faults: list[str], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        old, new = engine.version, engine.version + 1
        monkeypatch.setattr(engine._incoming, "checks", "always")
        set_faults(engine, *faults)
        with pytest.raises(EngineError, match=f": worker 1: RuntimeError: .*{wrong}$"):
            await install(engine, new, model_of(engine.kind, new).state_dict())
        await assert_sampled(engine, old)
        await install(engine, new, model_of(engine.kind, new).state_dict())
        await assert_sampled(engine, new)

    run(scenario())


def test_a_server_learns_of_a_failure_in_its_second_worker(engine: Any) -> None:
    """vLLM's server returns the answers of its first engine only."""

    async def scenario() -> None:
        new = engine.version + 1
        await engine.stage(new, model_of(engine.kind, new).state_dict())
        await engine.pause("abort")
        set_faults(engine, "fail")
        given = (str(engine._area.directory(new)), engine._area.tensors.aliases, 60.0)
        asked = engine._engine.collective_rpc("install_staged_weights", args=given)
        if engine.kind == "data":
            with pytest.raises(Exception, match="the device is gone"):
                await asked
        else:
            assert await asked == ["", "RuntimeError: the device is gone"]
        await engine.install(new)
        await engine.resume()

    run(scenario())


def test_tensors_with_other_bytes_or_on_one_side_only_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    assert checksum(one) == checksum(one.t().contiguous().t())
    assert len({checksum(other) for other in (one, one.t(), one.float(), -one)}) == 4
    monkeypatch.setattr(weight_checks, "PART_BYTES", 6)
    assert checksum(one) == checksum(one.t().contiguous().t())
    assert len({checksum(other) for other in (one, one.t(), one.float(), -one, one.flip(0))}) == 5, "in several parts"
    with pytest.raises(TimeoutError, match="the check exceeded its time limit before tensor a"):
        checksums_of({"a": one}, until=0.0)
    assert differing({"a": "1", "b": "2", "c": "3"}, {"b": "4", "c": "3", "d": "5"}) == ["a", "b", "d"]


def test_parameters_without_new_weights_are_named_by_vllms_names() -> None:
    fused = {"layers.0.qkv_proj.weight", "layers.0.qkv_proj.bias", "norm.weight"}
    assert not_loaded(fused, {*fused, "lm_head.weight"}, quantized=False) == []
    assert not_loaded(fused, {"layers.0.qkv_proj.weight"}, quantized=False) == [
        "layers.0.qkv_proj.bias", "norm.weight",
    ]  # fmt: skip
    scaled = {*fused, "layers.0.qkv_proj.weight_scale"}
    assert not_loaded(scaled, fused, quantized=False) == ["layers.0.qkv_proj.weight_scale"]
    assert not_loaded(scaled, fused, quantized=True) == []
    assert not_loaded(scaled, {"norm.weight"}, quantized=True) == sorted(scaled - {"norm.weight"})
    assert not_loaded(fused, None, quantized=False) == [], "the model does not say what it loaded"


def test_several_workers_are_processes_of_the_replica_by_default() -> None:
    def chosen(engine_args: dict[str, Any]) -> Any:
        return all_engine_args("model", 8, 0, engine_args).get("distributed_executor_backend")

    assert [chosen({size: 2}) for size in ("tensor_parallel_size", "pipeline_parallel_size")] == ["mp", "mp"]
    assert chosen({"data_parallel_size": 2}) == "mp"
    assert chosen({}) is None
    assert chosen({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}) == "ray"
