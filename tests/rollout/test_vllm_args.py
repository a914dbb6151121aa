"""What the engine gives vLLM: the memory of a shared GPU, the size of a batch, how its processes start."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_arguments import require_vllm

from engine.config import check_backend
from engine.config.loading import parse_config
from engine.errors import ConfigError
from engine.gpu_request import GpuRequest
from engine.ids import ReplicaId
from engine.plans.rollouts import vllm_args
from engine.plans.run_inputs import Inputs
from engine.rollout.vllm.engine_args import (
    STREAM_INTERVAL,
    all_engine_args,
    memory_args,
    prepare_environment,
    warmup_args,
)
from engine.states.limits import Limits
from engine.workers.plan import Plan, Rollout


@pytest.mark.parametrize(("gpu_part", "expected"), [(0.5, 0.46), (0.25, 0.23)])
def test_replicas_that_share_a_gpu_divide_its_memory(gpu_part: float, expected: float) -> None:
    for given in ({}, {"enable_sleep_mode": True}):  # what else sleeps there, and when, is not known
        assert memory_args(gpu_part, given) == {"gpu_memory_utilization": expected}


@pytest.mark.parametrize("gpu_part", [0.0, 1.0, 4.0])
def test_a_replica_with_whole_gpus_or_none_has_vllms_default(gpu_part: float) -> None:
    assert memory_args(gpu_part, {}) == {}


def test_memory_that_the_user_has_set_stays(tmp_path: Path) -> None:
    for given in ({"gpu_memory_utilization": 0.8}, {"kv_cache_memory_bytes": 1 << 30}):
        assert memory_args(0.5, given) == {}
    shares = replace(Inputs("model", (), None, None, "prompt"), gpu_part=0.5)
    rollout = {"backend": "vllm", "engine_args": {"max_model_len": 64}}
    config = parse_config({"run": {"dir": str(tmp_path)}, "model": {"make": "arithmetic"}, "rollout": rollout})
    start = {"kernel_config": {"enable_jit_warmup": False}}
    assert vllm_args(config, shares) == {"gpu_memory_utilization": 0.46, "max_model_len": 64, **start}
    assert vllm_args(config, replace(shares, gpu_part=1.0)) == {"max_model_len": 64, **start}


def test_vllm_computes_logits_in_the_type_of_the_trainer(tmp_path: Path) -> None:
    def given(fp32: bool, **engine_args: Any) -> Any:
        rollout = {"backend": "vllm", "engine_args": engine_args}
        sections = {"run": {"dir": str(tmp_path)}, "model": {"make": "arithmetic"}, "rollout": rollout}
        config = parse_config({**sections, "trainer": {"fp32_head": fp32}})
        arguments = vllm_args(config, Inputs("model", (), None, None, "prompt"))
        del arguments["kernel_config"]
        return arguments

    assert given(False) == {}
    own = {"rope_theta": 1e6}
    assert given(True, hf_overrides=own) == {"hf_overrides": {**own, "head_dtype": "float32"}}
    assert given(True, hf_overrides={"head_dtype": "float32"}) == {"hf_overrides": {"head_dtype": "float32"}}
    for fp32, asked in ((False, "float32"), (True, "model")):
        with pytest.raises(ConfigError, match=r"hf_overrides\.head_dtype .*must be that of the trainer.*fp32_head"):
            given(fp32, hf_overrides={"head_dtype": asked})


def test_vllm_compiles_no_kernel_at_its_start_that_a_dense_model_does_not_use() -> None:
    assert warmup_args(True, {}) == {"kernel_config": {"enable_jit_warmup": False}}
    assert warmup_args(True, {"kernel_config": {"enable_jit_warmup": True}})["kernel_config"]["enable_jit_warmup"]
    assert warmup_args(False, {}) == {}, "it has experts"


def test_a_forward_pass_takes_all_rows_and_long_prompts() -> None:
    def tokens(rows: int, **given: Any) -> Any:
        return all_engine_args("model", rows, 0, given).get("max_num_batched_tokens")

    assert (tokens(64), tokens(20_000), tokens(64, max_num_seqs=9000)) == (8192, 20_000, 9000)
    assert (tokens(8, max_model_len=256), tokens(8, max_model_len=4096)) == (8 * 256, 8192)
    assert tokens(64, max_num_batched_tokens=4096) == 4096, "the user's"
    assert tokens(64, enable_chunked_prefill=False) is None, "vLLM derives it from its context"


def test_vllm_hands_over_several_tokens_at_a_time_unless_the_user_says_otherwise() -> None:
    assert all_engine_args("model", 8, 0, {})["stream_interval"] == STREAM_INTERVAL
    assert all_engine_args("model", 8, 0, {"stream_interval": 1})["stream_interval"] == 1


def test_the_weights_of_a_draft_model_survive_vllms_sleep() -> None:
    name = "sleep_preserve_parameter_names"
    drafting = {"enable_sleep_mode": True, "speculative_config": {"model": "draft"}}
    assert all_engine_args("model", 8, 0, drafting)[name] == ["draft.*"]
    assert all_engine_args("model", 8, 0, {**drafting, name: ["draft.norm.*"]})[name] == ["draft.norm.*"]
    for absent in drafting:
        assert name not in all_engine_args("model", 8, 0, {**drafting, absent: None})


def test_vllm_returns_experts_only_for_router_replay() -> None:
    name = "enable_return_routed_experts"
    assert name not in all_engine_args("model", 8, 0, {})
    assert all_engine_args("model", 8, 0, {}, notes_routes=True)[name] is True
    with pytest.raises(ConfigError, match=r"enable_return_routed_experts is True: .*trainer\.router_replay sets it"):
        all_engine_args("model", 8, 0, {name: True})


def test_router_replay_is_refused_before_the_start_of_a_vllm_for_cpus() -> None:
    require_vllm()
    given = {"model": {"make": "arithmetic"}, "rollout": {"backend": "vllm"}, "trainer": {"router_replay": True}}
    with pytest.raises(ConfigError, match=r"^trainer\.router_replay is True: vLLM for CPUs does not say which experts"):
        check_backend(parse_config(given))


@pytest.mark.parametrize("experts", [{"num_experts": 8}, {"text_config": {"num_local_experts": 8}}])
def test_data_parallel_engines_with_experts_are_refused_in_a_vllm_for_cpus(
    tmp_path: Path, experts: dict[str, Any]
) -> None:
    require_vllm()
    given = {
        "model": {"path": str(tmp_path)}, "data": {"path": "d.jsonl"}, "reward": {"function": "rewards:r"},
        "rollout": {"backend": "vllm", "engine_args": {"data_parallel_size": 2}},
    }  # fmt: skip
    (tmp_path / "config.json").write_text("{}")
    check_backend(parse_config(given))
    (tmp_path / "config.json").write_text(json.dumps(experts))
    with pytest.raises(ConfigError, match=r"data_parallel_size is 2: in vLLM for CPUs, .* use 1, and raise rollout\."):
        check_backend(parse_config(given))


def test_a_rollout_gets_its_part_of_a_shared_gpu() -> None:
    shared: list[tuple[ReplicaId, float]] = []
    whole: list[ReplicaId] = []

    def sharing(replica: ReplicaId, gpu_part: float) -> Rollout:
        shared.append((replica, gpu_part))
        return Rollout(generator=None)  # type: ignore[arg-type]

    def alone(replica: ReplicaId) -> Rollout:
        whole.append(replica)
        return Rollout(generator=None)  # type: ignore[arg-type]

    limits = Limits(train_batch_size=1, max_staleness_steps=1, max_concurrent_groups=2)
    unused: Any = None
    plan = Plan(
        limits=limits, samples=1, make_rollout=alone, make_sharing_rollout=sharing, make_trainer=unused,
        make_prompts=unused, gpus=GpuRequest(replica_gpus=0.5, trainer_gpus=0.25),
    )  # fmt: skip
    plan.rollout_maker(3)
    for gpus in (0.0, 1.0, 2.0):
        replace(plan, gpus=GpuRequest(replica_gpus=gpus)).rollout_maker(4)
    replace(plan, make_sharing_rollout=None).rollout_maker(5)
    assert (shared, whole) == ([(3, 0.5)], [4, 4, 4, 5])


@pytest.mark.parametrize("for_cpu", [True, False])
def test_an_engine_on_gpus_is_not_forked_from_a_process_that_may_know_cuda(
    for_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    monkeypatch.setattr("engine.rollout.vllm.engine_args.built_for_cpu", lambda: for_cpu)
    prepare_environment(1)
    assert environment.get("VLLM_WORKER_MULTIPROC_METHOD") == (None if for_cpu else "spawn")
