"""Which experts computed each token: noted where tokens are sampled, and repeated where they are trained.

Sampler and trainer round differently. In a mixture-of-experts model a token near the border between two experts then
goes to another one, and its log-prob differs by far more than rounding (rollout routing replay, arXiv 2510.11370).
`Routers` notes the choices of a model, or makes it repeat given ones. Called by `gradients.Policy` and by the embedded
sampler; vLLM notes the choices itself.

A route is what one token position chose: the ids of the experts of every transformer layer, layer by layer, zeros for
layers without experts; one byte each, or two, the low one first, with more than 256 experts. vLLM returns them so.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError

Weighing = Callable[[Tensor, Tensor], Tensor]
"""From a router's logits [tokens, experts] and the chosen experts [tokens, chosen] to the weights of these."""

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def _of_all(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.float().softmax(-1).gather(1, chosen)


def _of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    weights = _of_all(logits, chosen)
    return weights / weights.sum(-1, keepdim=True)


class Routers:
    """The routers of a model: modules that return their logits, the weights of the chosen experts and their ids.

    Raises: `ConfigError` if it has none, or if their weights cannot be computed for other experts.
    """

    def __init__(self, model: Any) -> None:
        """Runs the model once: with several ranks, it must have its parameters."""
        found = _routers_of(model)
        if not found:
            raise _refusal(model, "has no routers that return logits, weights and experts")
        self._layers: int = model.config.get_text_config().num_hidden_layers
        logits, _, chosen = found[0][2]
        self._chosen = chosen.shape[1]
        self._kind = torch.uint8 if logits.shape[1] <= 256 else torch.uint16
        self.route_bytes = self._layers * self._chosen * self._kind.itemsize
        self._noted: dict[int, Tensor] | None = None
        self._given: Tensor | None = None
        for layer, module, (logits, weights, chosen) in found:
            rules = [rule for rule in (_of_chosen, _of_all) if _equal(rule(logits, chosen), weights)]
            if not rules:
                raise _refusal(model, "weighs its experts in another way than by a softmax")
            module.register_forward_hook(self._hook(layer, rules[0]))

    def note(self) -> None:
        """Note the choices of every pass from now on, for `take`."""
        self._noted = {}

    def take(self) -> Tensor:
        """The routes of the last pass. [tokens, route bytes] uint8, on the CPU"""
        assert self._noted is not None
        some = next(iter(self._noted.values()))
        routes = torch.zeros((len(some), self._layers, self._chosen), dtype=self._kind)
        for layer, chosen in self._noted.items():
            routes[:, layer] = chosen.to("cpu", self._kind)
        self._noted.clear()
        return routes.flatten(1).view(torch.uint8)

    def repeat(self, routes: Tensor | None) -> None:
        """Choose these experts in the passes from now on, backward ones too: of each token a 1 and its route, or zeros
        if the model shall choose. [rows, length, 1 + route bytes] uint8; None: the model chooses for all.

        Raises: `ConfigError` for routes of another model.
        """
        self._given = None
        if routes is None:
            return
        flat = routes.flatten(0, 1)
        if flat.shape[1] != 1 + self.route_bytes:
            law = f"a token's experts have {flat.shape[1] - 1} bytes, but this model's have {self.route_bytes}"
            raise ConfigError("trainer.router_replay", True, law, "sample with the model that is trained")
        experts = flat[:, 1:].contiguous().view(self._kind).long().view(-1, self._layers, self._chosen)
        self._given = torch.where(flat[:, :1, None] > 0, experts, -1)

    def _hook(self, layer: int, weigh: Weighing) -> Callable[..., Any]:
        def hook(module: Any, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...] | None:
            logits, weights, chosen = output
            if self._noted is not None:
                self._noted[layer] = chosen
            if self._given is None:
                return None
            experts = self._given[:, layer]
            experts = torch.where(experts < 0, chosen, experts)
            return logits, weigh(logits, experts).to(weights.dtype), experts

        return hook


def packed_routes(routes: Sequence[bytes], positions: int) -> Tensor | None:
    """The routes of the first `positions` tokens as `Routers.repeat` takes them; zeros where one is unknown; None if
    all are. [positions, 1 + route bytes] uint8"""
    width = max(map(len, routes), default=0)
    if not width:
        return None
    known = [b"\1" + route if len(route) == width else bytes(1 + width) for route in routes[:positions]]
    known += [bytes(1 + width)] * (positions - len(known))
    return torch.frombuffer(bytearray(b"".join(known)), dtype=torch.uint8).view(positions, 1 + width)


def _routers_of(model: Any) -> list[tuple[int, Any, tuple[Tensor, Tensor, Tensor]]]:
    """The layer of each router, the router, and what it returned in a pass over two tokens."""
    found: list[tuple[int, Any, tuple[Tensor, Tensor, Tensor]]] = []

    def note(layer: int) -> Callable[..., None]:
        def hook(module: Any, given: Any, output: Any) -> None:
            if _is_routing(output):
                found.append((layer, module, output))

        return hook

    hooks = [
        module.register_forward_hook(note(int(layer[1])))
        for name, module in model.named_modules()
        if (layer := _LAYER.search(f"{name}."))
    ]
    device = model.get_input_embeddings().weight.device
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(2, device=device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _is_routing(output: Any) -> bool:
    if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(one, Tensor) for one in output)):
        return False
    logits, weights, chosen = output
    return chosen.dtype == torch.int64 and logits.ndim == 2 and weights.shape == chosen.shape == (2, chosen.shape[-1])


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-3)


def _refusal(model: Any, law: str) -> ConfigError:
    return ConfigError("trainer.router_replay", True, f"{type(model).__name__} {law}", "use false")
