"""Tiny models with random weights, and the backends that the shared scenarios run over.

Another backend joins the suite by adding a `Kind` to `BACKENDS`. One event loop serves every test: an engine that tests
share lives on it.
"""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import vllm_engines
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm_arguments import require_vllm

from engine.rollout.backend import RolloutBackend
from engine.rollout.torch.torch_backend import TorchBackend

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other, for a very long time on a busy machine
CONTEXT = vllm_engines.CONTEXT
SHAPE = dict(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=CONTEXT,
    initializer_range=0.3,  # random weights with the usual 0.02 give nearly uniform logits, which hide mistakes
)


WIDE = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=6)
"""What vLLM's attention on a CPU can take: heads of 32."""


def build(family: str, seed: int = 0, **changes: int) -> PreTrainedModel:
    """A model of a few thousand parameters; another `seed`, other weights."""
    torch.manual_seed(seed)
    model: Any
    shape: dict[str, Any] = SHAPE | changes
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.3,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    elif family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None))
    elif family == "mistral-windowed":
        model = MistralForCausalLM(MistralConfig(**shape, sliding_window=8, bos_token_id=None, eos_token_id=None))
    elif family == "qwen2-windowed":
        config = Qwen2Config(**shape, use_sliding_window=True, sliding_window=8, max_window_layers=1)
        model = Qwen2ForCausalLM(config)
    elif family == "qwen3-moe":
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, bos_token_id=None, eos_token_id=None))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=family != "qwen2-untied"))
    return model.eval()


class HaltingBackend(TorchBackend):
    """Can be asked to stop sampling at a number of tokens until its next order, so that no test races with it."""

    halt_at = math.inf

    def halting(self, tokens: int) -> Awaitable[None]:
        self.halt_at = self.tokens_sampled() + tokens
        return self._halted(self.halt_at)

    async def _halted(self, tokens: float) -> None:
        while self.tokens_sampled() < tokens:
            await asyncio.to_thread(os.sched_yield)

    def _turn(self) -> None:
        if self.tokens_sampled() >= self.halt_at:
            order = self._inbox.get()
            self.halt_at = math.inf  # before who gave the order hears of it, and may set it anew
            self._obey(*order)
        else:
            super()._turn()


def build_torch(family: str, **options: Any) -> TorchBackend:
    return HaltingBackend(build(family), **options)


@dataclass(frozen=True)
class Kind:
    """A backend of the suite: `make(family, **options)` makes one, `model(family, seed)` the model that it samples."""

    make: Callable[..., RolloutBackend]
    model: Callable[..., PreTrainedModel] = build
    exact: bool = True
    """A resumed request has the random numbers it would have had."""


BACKENDS: dict[str, Kind] = {
    "torch": Kind(build_torch),
    "torch-deterministic": Kind(lambda family, **options: build_torch(family, deterministic=True, **options)),
    "vllm": Kind(
        lambda family, **_: vllm_engines.rent(build(family, **WIDE)),
        lambda family, seed=0: build(family, seed, **WIDE),
        exact=False,
    ),
}

Scenario = Callable[[RolloutBackend], Awaitable[Any]]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` on the loop that all tests share."""
    return vllm_engines.RUNNER.run(work)


def run_over(backend: RolloutBackend, scenario: Scenario) -> Any:
    """Run a coroutine over a backend, then close it."""

    async def whole() -> Any:
        try:
            return await scenario(backend)
        finally:
            await backend.close()

    work: Coroutine[Any, Any, Any] = whole()
    return run(work)


def hold(backend: Any, tokens: int) -> Awaitable[None]:
    """Have sampling stop after so many further tokens; what this returns ends once they have come.

    It takes effect at once, so whatever is started or resumed in the same breath is caught in its middle. The embedded
    sampler stops as a whole until its next order; vLLM's requests stop each after that many, until `go_on`.
    """
    if isinstance(backend, HaltingBackend):
        return backend.halting(tokens)
    reached: Awaitable[None] = backend.hold(tokens)
    return reached


def go_on(backend: Any) -> None:
    """Nothing is held any more."""
    if not isinstance(backend, HaltingBackend):
        backend.go_on()


async def until_sampled(backend: RolloutBackend, tokens: int) -> None:
    """Return once the backend has sampled so many tokens in its life, and is held there."""
    await hold(backend, tokens - backend.tokens_sampled())


@pytest.fixture(params=list(BACKENDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "vllm":
        require_vllm()
    return BACKENDS[request.param]


@pytest.fixture
def make_backend(kind: Kind) -> Callable[..., RolloutBackend]:
    return kind.make


@pytest.fixture(scope="session", autouse=True)
def end_of_engines() -> Iterator[None]:
    yield
    vllm_engines.close_all()


@pytest.fixture(autouse=True)
def open_gates() -> Iterator[None]:
    """A test that fails while it holds requests must not hold up those that share its engine."""
    yield
    vllm_engines.open_gates()
