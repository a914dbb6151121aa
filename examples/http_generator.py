"""A custom generator: it requests samples from an HTTP service, here `http_service.py`.

`rollout.backend: http_generator:HttpGenerator` names it. The service samples tokens; the engine scores them with the
reward of the configuration, because the trajectories have none.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from safetensors.torch import save_file

from engine.protocols import GeneratorSetup, GroupWork
from engine.runtime.local import SimpleGenerator, response
from engine.trajectory import Trajectory


class HttpGenerator(SimpleGenerator):
    """One replica. The service keeps a copy of the weights for each. `weights_dir`: a directory that the service
    sees under the same path."""

    def __init__(self, setup: GeneratorSetup, url: str, weights_dir: str) -> None:
        super().__init__()
        self.setup = setup
        self.url = f"{url.rstrip('/')}/{setup.replica}"
        self.weights_dir = Path(weights_dir).expanduser()
        self.session: aiohttp.ClientSession | None = None
        self.files: dict[int, Path] = {}

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        sampling, prompt_ids = self.setup.sampling[work.validation_set], self.setup.prompt_ids(work.prompt)
        answer = await self.ask(
            "sample",
            model=self.setup.model, prompt_ids=prompt_ids, samples=work.samples, temperature=sampling.temperature,
            max_tokens=sampling.max_tokens, stop_ids=sampling.stop_ids,
        )  # fmt: skip
        return [
            response(one["token_ids"], logprobs=one["logprobs"], prompt_ids=prompt_ids, version=answer["version"])
            for one in answer["responses"]
        ]

    async def stage(self, version: int, weights: Any) -> None:
        """Write the weights into a file while the service samples."""
        self.weights_dir.mkdir(parents=True, exist_ok=True)
        self.files[version] = self.weights_dir / f"replica-{self.setup.replica}-version-{version}.safetensors"
        await asyncio.to_thread(save_file, weights, self.files[version])
        await super().stage(version, None)

    async def install(self, version: int) -> None:
        await self.ask("install", model=self.setup.model, file=str(self.files[version]), version=version)
        await super().install(version)
        self.files.pop(version).unlink()

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()

    async def ask(self, what: str, **fields: Any) -> Any:
        """Raises: `aiohttp.ClientError` if the service fails; the engine then retries the group or the sync."""
        self.session = self.session or aiohttp.ClientSession()
        async with self.session.post(f"{self.url}/{what}", json=fields, raise_for_status=True) as answer:
            return await answer.json()
