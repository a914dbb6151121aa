"""Adapters on a real vLLM server, with its development routes and without: each version has a name of its own."""

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from backends import go_on, hold, run_over
from gate import Counted
from http_servers import KEY, NAME, Hiding, SmallServer, VllmServer, vllm_servers
from test_vllm_lora import LORA, adapted, published
from test_vllm_weights import assert_samples, greedy
from vllm_arguments import require_vllm

from engine.errors import ConfigError, EngineError
from engine.rollout.backend import RolloutBackend, SampleResult
from engine.rollout.openai.openai_backend import OpenAIBackend
from engine.trajectory import Span

require_vllm()
pytestmark = pytest.mark.xdist_group("engines")
DEVELOPMENT = (
    "/pause", "/resume", "/is_paused", "/abort_requests", "/inference/v1/generate", "/collective_rpc",
    "/update_weight_version", "/weight_info",
)  # fmt: skip


class CountedBackend(Counted, OpenAIBackend):
    pass


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServer, Path]]:
    directory = tmp_path_factory.mktemp("served")
    with vllm_servers(directory, lora_rank=8) as (server,):
        yield server, directory


@pytest.fixture
def connect(served: tuple[VllmServer, Path], tmp_path: Path) -> Iterator[Callable[[str], OpenAIBackend]]:
    server, directory = served

    def connected(url: str) -> OpenAIBackend:
        backend = CountedBackend(
            url, model=str(directory), key=KEY, vocabulary=32, timeout_s=30.0, sync_mode="abort", lora=LORA,
            weights_dir=str(tmp_path / "weights"),
        )  # fmt: skip
        backend.gate = server.gate
        return backend

    yield connected
    server.gate.open()


def assert_sampled(version: int, result: SampleResult) -> None:
    assert result.spans == [Span(0, len(result.token_ids), version)]
    assert_samples(adapted(version, "qwen2"), result)


def adapters_of(url: str) -> list[str]:
    asked = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return [card["id"] for card in json.load(answer)["data"] if card["id"] != NAME]


async def update(backend: RolloutBackend, version: int) -> None:
    await backend.stage(version, published(version, "qwen2"))
    await backend.pause("abort")
    await backend.install(version)
    await backend.resume()


@pytest.mark.parametrize("hidden", [(), DEVELOPMENT], ids=["development", "plain"])
def test_each_version_is_an_adapter_of_its_own_name(
    connect: Callable[[str], OpenAIBackend], served: tuple[VllmServer, Path], tmp_path: Path, hidden: tuple[str, ...]
) -> None:
    server, _ = served

    async def scenario(backend: RolloutBackend) -> None:
        assert_sampled(0, await backend.sample(greedy("first")))
        reached = hold(backend, 10)
        cut = asyncio.create_task(backend.sample(greedy("cut", 200)))
        await reached
        await update(backend, 1)
        go_on(backend)
        begun = await cut
        assert begun.finish_reason == "abort" and len(begun.token_ids) >= 10
        assert_sampled(0, begun)
        for version in (2, 3):
            assert_sampled(version - 1, await backend.sample(greedy(f"{version}")))
            await update(backend, version)
        assert_sampled(3, await backend.sample(greedy("last")))
        [root] = (tmp_path / "weights").iterdir()
        kept = sorted(path.name for path in root.iterdir() if path.is_dir())
        assert [name.partition("-")[0] for name in kept] == ["2", "3"], "old requests may still be ending"
        assert [name for name in adapters_of(server.url) if name.startswith(root.name)] == [
            f"{root.name}:{name}" for name in kept
        ]

    with Hiding(server.url, *hidden) if hidden else contextlib.nullcontext(server) as asked:
        run_over(connect(asked.url), scenario)
        if isinstance(asked, Hiding):
            assert not set(asked.asked) & set(DEVELOPMENT)


def test_an_adapter_that_cannot_be_loaded_leaves_the_one_before(
    connect: Callable[[str], OpenAIBackend], served: tuple[VllmServer, Path], tmp_path: Path
) -> None:
    """The server already serves adapters of other runs: they are not taken for the model."""

    async def scenario(backend: RolloutBackend) -> None:
        await update(backend, 1)
        await backend.stage(2, published(2, "qwen2"))
        [file] = (tmp_path / "weights").glob("*/2-*/adapter_model.safetensors")
        intact = file.read_bytes()
        file.write_bytes(intact[:64])
        await backend.pause("abort")
        with pytest.raises(EngineError, match="version 2 could not be installed"):
            await backend.install(2)
        await backend.resume()
        assert_sampled(1, await backend.sample(greedy("undone")))
        file.write_bytes(intact)
        await backend.pause("abort")
        await backend.install(2)
        await backend.resume()
        assert_sampled(2, await backend.sample(greedy("again")))

    run_over(connect(served[0].url), scenario)


def test_a_server_without_the_adapter_in_force_is_lost(
    connect: Callable[[str], OpenAIBackend], served: tuple[VllmServer, Path], tmp_path: Path
) -> None:
    server, _ = served

    async def scenario(backend: RolloutBackend) -> None:
        await update(backend, 1)
        [root] = (tmp_path / "weights").iterdir()
        for name in adapters_of(server.url):
            if name.startswith(f"{root.name}:1-"):
                post(server.url, "/v1/unload_lora_adapter", {"lora_name": name})
        with pytest.raises(EngineError, match="was restarted or was given other weights"):
            await backend.sample(greedy("orphan"))
        assert "was restarted" in await backend.failed()

    run_over(connect(server.url), scenario)


def post(url: str, path: str, body: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    asked = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=30):
        pass


def test_a_server_that_loads_no_adapters_is_refused(served: tuple[VllmServer, Path], tmp_path: Path) -> None:
    _, directory = served
    with SmallServer() as small, pytest.raises(ConfigError, match="no route /v1/load_lora_adapter") as caught:
        OpenAIBackend(
            small.url, model=str(directory), weights_dir=str(tmp_path / "weights"), sync_mode="abort", lora=LORA
        )
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in str(caught.value)
