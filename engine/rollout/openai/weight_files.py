"""Weights for a server: a directory of safetensors for each version where both sides reach it, loaded in place by the
server's workers.

Used by `rollout.openai.openai_backend`. Every version has a label of its own in the world, so that weights that
somebody else gave the server, or that it started again with, are never taken for this run's.
"""

import asyncio
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, EngineError
from engine.ids import Version
from engine.rollout.openai.http_client import Http
from engine.rollout.vllm.staged_weights import StagingArea


class ServerWeights:
    """The versions of one backend in its life. `told`: whether the server keeps a label and says it."""

    def __init__(self, http: Http, model: str, directory: str, *, told: bool, limit_s: float, bucket_mb: float) -> None:
        place = Path(directory).expanduser().resolve()
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._area = StagingArea(model, bucket_mb, place)
        except OSError as error:
            law = f"cannot be written to: {error.strerror or error}"
            raise ConfigError(
                "rollout.weights_dir", directory, law, "use a directory shared with the servers"
            ) from None
        self.http = http
        self._told = told
        self._limit_s = limit_s

    def label(self, version: Version) -> str:
        return f"{self._area.root.name}:{version}"

    def version_of(self, label: str) -> Version:
        """Raises: `EngineError` for weights that are not this backend's."""
        root, _, version = label.rpartition(":")
        if root != self._area.root.name or not version.isdigit():
            raise EngineError(f"{self.http.url} sampled under weights that are not this run's: {label!r}")
        return int(version)

    async def stage(self, version: Version, weights: Any) -> None:
        """Write a version. Raises: `EngineError` naming what does not fit the model."""
        await asyncio.to_thread(self._area.write, version, weights)

    def staged(self, version: Version) -> bool:
        return self._area.directory(version) is not None

    async def load(self, version: Version) -> None:
        """Have the server swap a staged version in. Raises: `EngineError`; the server then holds neither in whole."""
        arguments = [str(self._area.directory(version)), self._area.tensors.aliases, self._limit_s]
        call = {"method": "install_staged_weights", "args": arguments, "timeout": self._limit_s}
        answer = await self.http.call("POST", "/collective_rpc", call, further_s=self._limit_s)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not results or any(results):
            raise EngineError("; ".join(filter(None, results or ())) or f"{self.http.url} has no worker extension")
        if self._told:
            await self.http.call("POST", "/update_weight_version", {"new_version": self.label(version)})

    async def in_force(self, version: Version) -> bool:
        """Whether the server says that it holds a version; True where it says nothing."""
        if not self._told:
            return True
        answer = await self.http.call("GET", "/weight_info")
        return isinstance(answer, dict) and answer.get("weight_version") == self.label(version)

    def keep_only(self, *versions: Version) -> None:
        self._area.keep_only(*versions)

    def close(self) -> None:
        self._area.close()
