"""What a trainer published and what replicas sample from, as digests of every bit."""

from typing import Any

import pytest
import torch
from reference_sync import digest

from engine.ids import Version
from engine.rollout.torch.torch_backend import TorchBackend
from engine.training.model_trainer import ModelTrainer
from engine.training.shared_weights import PublishedTensors


class Digested(ModelTrainer):
    """Notes the digest of every version that it publishes, and the types in it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.digests: list[str] = []
        self.kinds: set[torch.dtype] = set()

    def weights(self) -> PublishedTensors:
        weights = super().weights()
        self.digests.append(digest(weights))
        self.kinds |= {tensor.dtype for tensor in weights.values()}
        return weights


def note_installs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Version, str]]:
    """Filled with each version that a replica installs, and the digest of what it then samples from."""
    installed: list[tuple[Version, str]] = []
    install = TorchBackend.install

    async def digested(backend: TorchBackend, version: Version) -> None:
        await install(backend, version)
        held = {name: tensor.detach() for name, tensor in backend._model.installable().items()}
        installed.append((version, digest(held)))

    monkeypatch.setattr(TorchBackend, "install", digested)
    return installed
