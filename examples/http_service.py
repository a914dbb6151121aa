"""A small HTTP service that samples with transformers, for `http_generator.py`. It has a model for each replica.

python examples/http_service.py 8100
"""

import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@dataclass
class Replica:
    model: Any
    version: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Weights change only between two requests."""


class Service:
    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.post("/{replica}/sample", self.sample), web.post("/{replica}/install", self.install)])
        return app

    def replica_of(self, request: web.Request, model: str) -> Replica:
        name = request.match_info["replica"]
        if name not in self.replicas:
            self.replicas[name] = Replica(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
        return self.replicas[name]

    async def sample(self, request: web.Request) -> web.Response:
        asked = await request.json()
        replica = self.replica_of(request, asked["model"])
        async with replica.turn:
            responses = await asyncio.to_thread(sampled, replica.model, asked)
            return web.json_response({"version": replica.version, "responses": responses})

    async def install(self, request: web.Request) -> web.Response:
        asked = await request.json()
        replica = self.replica_of(request, asked["model"])
        async with replica.turn:
            replica.model.load_state_dict(load_file(asked["file"]), strict=False)  # tied tensors are in it once
            replica.version = asked["version"]
        return web.json_response({})


@torch.inference_mode()
def sampled(model: Any, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Token ids and behavior log-probs of each response, up to and with its first stop id."""
    temperature, stop_ids = asked["temperature"], asked["stop_ids"]
    prompt = torch.tensor([asked["prompt_ids"]]).repeat(asked["samples"], 1)
    greedy = {"do_sample": False} if temperature == 0 else {"do_sample": True, "temperature": temperature, "top_k": 0}
    found = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=asked["max_tokens"], eos_token_id=stop_ids,
        pad_token_id=stop_ids[0], output_logits=True, return_dict_in_generate=True, **greedy,
    )  # fmt: skip
    tokens = found.sequences[:, prompt.shape[1] :]
    logprobs = (torch.stack(found.logits, 1).float() / (temperature or 1.0)).log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[..., None])[..., 0]
    responses = []
    for ids, values in zip(tokens.tolist(), chosen.tolist(), strict=True):
        end = next((place + 1 for place, token in enumerate(ids) if token in stop_ids), len(ids))
        responses.append({"token_ids": ids[:end], "logprobs": values[:end]})
    return responses


if __name__ == "__main__":
    torch.set_num_threads(1)
    web.run_app(Service().application(), host="127.0.0.1", port=int(sys.argv[1]) if sys.argv[1:] else 8100)
