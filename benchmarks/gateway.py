"""The time that the gateway adds to a call: an agent's HTTP call through it, compared with a direct call to the
backend.

    python benchmarks/gateway.py [--calls 200] [--ray]

The backend is the embedded sampler with a small model and one token per call, so that nearly all measured time is the
round trip. Calls alternate between both ways. `--ray` puts the replica into a separate actor, as in a run. Target: at
most 3 ms at the median.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "gateway"))
from gateway_rig import Rig, model

from engine.rollout.backend import SampleRequest, SampleResult, SamplingParams
from engine.rollout.torch.torch_backend import TorchBackend


class Replica:
    """A backend in a separate actor."""

    def __init__(self) -> None:
        self.backend = TorchBackend(model(), rows=8)

    async def sample(self, request: SampleRequest) -> SampleResult:
        return await self.backend.sample(request)


class RayBackend(TorchBackend):
    """The embedded sampler, reached as the gateway reaches a replica."""

    def __init__(self, actor: Any) -> None:
        super().__init__(model(), rows=8)
        self.actor = actor

    async def sample(self, request: SampleRequest) -> SampleResult:
        result: SampleResult = await self.actor.sample.remote(request)
        return result


async def measure(backend: TorchBackend, direct: Callable[[SampleRequest], Awaitable[Any]], calls: int) -> None:
    through: list[float] = []
    straight: list[float] = []

    async def agent(client: Any, prompt: Any) -> float:
        headers, url = {"Authorization": f"Bearer {client.api_key}"}, f"{client.base_url}completions"
        async with aiohttp.ClientSession(headers=headers) as http:
            for number in range(calls + 20):
                ids = [5 + (number + place) % 40 for place in range(200)]
                request = SampleRequest(id=f"direct-{number}", prompt_ids=ids, params=params, seed=number)
                began = time.perf_counter()
                await direct(request)
                between = time.perf_counter()
                body = {"model": "model", "prompt": ids, "max_tokens": 1}
                async with http.post(url, json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.json()
                ended = time.perf_counter()
                if number >= 20:
                    straight.append((between - began) * 1e3)
                    through.append((ended - between) * 1e3)
        return 0.0

    params = SamplingParams(max_tokens=1, stop_ids=(1,))
    async with Rig(agent, backend, timeout_s=600) as rig:
        await rig.generate()
    for name, values in (("backend directly", straight), ("through the gateway", through)):
        cuts = statistics.quantiles(values, n=20)
        print(f"{name:20} p50 {statistics.median(values):6.2f} ms   p95 {cuts[18]:6.2f} ms   ({calls} calls)")
    print(f"added at p50         {statistics.median(through) - statistics.median(straight):6.2f} ms   (target 3)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--ray", action="store_true", help="put the replica into an actor; direct calls do without it")
    given = parser.parse_args()
    local = TorchBackend(model(), rows=8)
    if not given.ray:
        asyncio.run(measure(local, local.sample, given.calls))
        return
    import ray

    from engine.actors.private_cluster import connect

    connect()
    try:
        actor = ray.remote(Replica).options(num_cpus=0, max_concurrency=1000, enable_task_events=False).remote()
        ray.get(actor.__ray_ready__.remote())
        asyncio.run(measure(RayBackend(actor), local.sample, given.calls))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
