"""Weights for a server: each version is a directory of safetensors on shared storage, which the server's workers load.

`rollout.openai.openai_backend` uses it. The label of a version is globally unique, so that weights from another run, or
those that a restarted server loaded, are never mistaken for weights of this run.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, EngineError
from engine.ids import Version
from engine.rollout.openai.server_probe import LOAD_ADAPTER
from engine.rollout.vllm.staged_weights import StagingArea
from engine.tasks.http_client import Http
from engine.training.lora import Lora


class ServerWeights:
    """The staged versions of one backend.

    `labeled`: whether the server stores a label and reports it. `limit_s`: seconds that an install may take.
    `bucket_mb`: maximum MiB of a file. Raises: `ConfigError` if `directory` cannot be written to.
    """

    def __init__(
        self,
        http: Http,
        model: str,
        directory: str,
        *,
        labeled: bool,
        limit_s: float,
        bucket_mb: float,
        lora: Lora | None = None,
    ) -> None:
        place = Path(directory).expanduser().resolve()
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._area = StagingArea(model, bucket_mb, place, lora)
        except OSError as error:
            law = f"cannot be written to: {error.strerror or error}"
            raise ConfigError(
                "rollout.weights_dir", directory, law, "use a directory shared with the servers"
            ) from None
        self.http = http
        self._labeled = labeled
        self._limit_s = limit_s

    def model(self, version: Version, served: str) -> str:
        """The name by which a request asks for a version of the `served` model."""
        return served

    def label(self, version: Version) -> str:
        return f"{self._area.root.name}:{version}"

    def version_of(self, label: str) -> Version:
        """The version of a label. Raises: `EngineError` if another backend installed these weights."""
        root, _, version = label.rpartition(":")
        if root != self._area.root.name or not version.isdigit():
            raise EngineError(f"{self.http.url} sampled with weights of another run: {label!r}")
        return int(version)

    async def stage(self, version: Version, weights: Any) -> None:
        """Write a version. Raises: `EngineError` that names the tensors that do not fit the model."""
        await asyncio.to_thread(self._area.write, version, weights)

    def staged(self, version: Version) -> bool:
        return self._area.directory(version) is not None

    async def load(self, version: Version) -> None:
        """Make the server install a staged version. Raises: `EngineError`; the server's weights are then undefined."""
        arguments = [str(self._area.directory(version)), self._area.tensors.aliases, self._limit_s]
        call = {"method": "install_staged_weights", "args": arguments, "timeout": self._limit_s}
        answer = await self.http.call("POST", "/collective_rpc", call, further_s=self._limit_s)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not results or any(results):
            wrong = "; ".join(filter(None, results or ()))
            raise EngineError(wrong or f"{self.http.url} runs without the worker extension of the engine")
        if self._labeled:
            await self.http.call("POST", "/update_weight_version", {"new_version": self.label(version)})

    async def in_force(self, version: Version) -> bool:
        """Whether the server reports that it has a version; True if it does not report versions."""
        if not self._labeled:
            return True
        answer = await self.http.call("GET", "/weight_info")
        return isinstance(answer, dict) and answer.get("weight_version") == self.label(version)

    def keep_only(self, *versions: Version) -> None:
        self._area.keep_only(*versions)

    def close(self) -> None:
        self._area.close()


class SglangWeights(ServerWeights):
    """Versions that SGLang loads. It takes the label together with the weights."""

    async def load(self, version: Version) -> None:
        """See `ServerWeights.load`. Also raises if the server could not flush the KV cache of the old weights."""
        body = {
            "model_path": str(self._area.directory(version)),
            "load_format": "auto",  # the server may have been started with dummy weights
            "weight_version": self.label(version),
            "flush_cache": True,
        }
        answer = await self.http.call("POST", "/update_weights_from_disk", body, further_s=self._limit_s)
        if not isinstance(answer, dict) or not answer.get("success"):
            raise EngineError(f"{self.http.url} did not load the weights: {answer!r:.300}")

    async def in_force(self, version: Version) -> bool:
        answer = await self.http.call("GET", "/model_info")
        return isinstance(answer, dict) and answer.get("weight_version") == self.label(version)


class ServerAdapters(ServerWeights):
    """Versions that are adapters, each loaded by the server under a name of its own, which the requests then ask for.

    So a request is sampled by one version from its beginning to its end. The one before the newest stays loaded and on
    disk: the server may still be ending requests for it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, labeled=False, **options)
        self._loaded: dict[Version, str] = {}
        """Names of the versions that the server has loaded, the newest last."""

    def zeros(self) -> dict[str, Any]:
        """An adapter that changes nothing."""
        return self._area.tensors.zeros()

    def model(self, version: Version, served: str) -> str:
        return self._loaded[version]

    async def load(self, version: Version) -> None:
        """Have the server load a staged version, unless it has. Raises: `EngineError`; then the old ones are there."""
        if version in self._loaded:
            return
        directory = self._area.directory(version)
        assert directory is not None
        name = f"{self._area.root.name}:{directory.name}"
        call = {"lora_name": name, "lora_path": str(directory)}
        await self.http.call("POST", LOAD_ADAPTER, call, further_s=self._limit_s, reads=False)
        self._loaded[version] = name
        for old in list(self._loaded)[:-2]:
            with contextlib.suppress(EngineError):  # one that the server has no more
                await self.http.call("POST", "/v1/unload_lora_adapter", {"lora_name": self._loaded[old]}, reads=False)
            del self._loaded[old]

    async def in_force(self, version: Version) -> bool:
        """Whether the server still has the adapter of a version."""
        answer = await self.http.call("GET", "/v1/models")
        cards = answer.get("data") if isinstance(answer, dict) else None
        return self._loaded[version] in [card.get("id") for card in cards or () if isinstance(card, dict)]

    def keep_only(self, *versions: Version) -> None:
        super().keep_only(*versions, *self._loaded)
