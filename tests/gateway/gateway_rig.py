"""Agents, gateway and embedded sampler in one process: what most tests of the gateway stand on."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from engine.gateway.agents import Agents, GatewayParts
from engine.gateway.gateway_server import GatewayServer
from engine.gateway.sessions import SessionBounds
from engine.protocols import Generated, GroupWork
from engine.protocols.user_values import checked_result
from engine.rollout.agents.agent_generator import AgentCall, AgentGenerator, GroupOutcome, OpenGroup
from engine.rollout.agents.conversation import Chat
from engine.rollout.agents.tool_calls import PARSERS, Parser
from engine.rollout.backend import RolloutBackend, SampleRequest, SampleResult, SamplingParams
from engine.rollout.generator import TRAINING, Way
from engine.rollout.scoring import Grader
from engine.rollout.torch.torch_backend import TorchBackend
from engine.trajectory import Prompt, RolloutResult, Span, Trajectory

torch.set_num_threads(1)
CONTEXT = 512
LETTERS = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% if tools %}tools: {% for t in tools %}{{ t.function.name }} {% endfor %}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<end>{% endfor %}"
    "[assistant]"
)


def tokenizer(template: str | None = TEMPLATE, special: Sequence[str] = ()) -> Any:
    """Letters, and pairs of them that a text is encoded with where it can be: one text has several encodings."""
    pairs = [(a, b) for a in "abcdefgh" for b in "abcdefgh"]
    tokens = [*LETTERS, *(a + b for a, b in pairs)]
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<end>", "<unknown>", *tokens])}
    made = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unknown>"))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<pad>", "<end>", "<unknown>", *special])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")
    wrapped.chat_template = template
    return wrapped


def model(seed: int = 0) -> Qwen2ForCausalLM:
    """Random weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer()), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=64, max_position_embeddings=CONTEXT, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def runs_of(trajectory: Trajectory, tokens: Any = None) -> list[tuple[int, str]]:
    """The response as runs of trained (1) and inserted (0) text."""
    pairs = zip(trajectory.loss_mask, trajectory.token_ids, strict=True)
    decode = (tokens or tokenizer()).decode
    return [(mask, decode([id for _, id in run])) for mask, run in groupby(pairs, key=lambda pair: pair[0])]


class Halting(TorchBackend):
    """Samples so many tokens, and no more before it is paused or gets another order: no test races with it."""

    def __init__(self, halt_at: int) -> None:
        self.halt_at = halt_at
        super().__init__(model(), rows=8)

    def _turn(self) -> None:
        if 0 <= self.halt_at <= self.tokens_sampled():
            self._obey(*self._inbox.get())
            if not self._sampler.busy or self._frozen:
                self.halt_at = -1
        else:
            super()._turn()

    async def halted(self) -> None:
        while self.tokens_sampled() < self.halt_at:
            await asyncio.to_thread(lambda: None)


class FixedAnswers:
    """A backend that gives the answers of a test, word for word, under version 0."""

    context = CONTEXT

    def __init__(self, *said: str, special: Sequence[str] = ()) -> None:
        self.said = list(said)
        self.asked: list[SampleRequest] = []
        self.tokens = tokenizer(special=special)

    async def sample(self, request: SampleRequest) -> SampleResult:
        self.asked.append(request)
        ids = self.tokens.encode(self.said.pop(0), add_special_tokens=False)[: request.params.max_tokens]
        finish = "stop" if ids[-1] == 1 else "length"
        spans = [Span(0, len(ids), 0)]
        return SampleResult(token_ids=ids, logprobs=[-0.5] * len(ids), spans=spans, finish_reason=finish)

    async def abort(self, ids: Any) -> None: ...

    async def pause(self, mode: str) -> None: ...

    async def stage(self, version: int, weights: Any) -> None: ...

    async def install(self, version: int) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...

    async def failed(self) -> str:
        return await asyncio.Event().wait() and ""

    def tokens_sampled(self) -> int:
        return 0


class Line:
    """A generator's way to the gateway, and back, without processes between."""

    def __init__(self, agents: Agents, generator: AgentGenerator) -> None:
        self.agents = agents
        self.generator = generator
        self.calls = 0

    async def open(self, work: OpenGroup) -> GroupOutcome:
        return await self.agents.open(work, self)

    async def cut(self, group: int, attempt: int, how: str) -> None:
        self.agents.cut(group, attempt, how)

    async def sample(self, call: AgentCall) -> SampleResult:
        self.calls += 1
        return await self.generator.sample(call)


Agent = Callable[[AsyncOpenAI, Prompt], Awaitable[float | None]]


def ways(grader: Grader, max_tokens: int, stop_ids: tuple[int, ...] = (1,)) -> dict[str, Way]:
    return {TRAINING: Way(SamplingParams(max_tokens=max_tokens, stop_ids=stop_ids), grader)}


def length_of(prompt: Prompt, trajectory: Trajectory) -> float:
    return float(len(trajectory.text))


class Rig:
    """`async with Rig(agent) as rig: generated = await rig.generate()`."""

    def __init__(
        self,
        agent: Agent,
        *backends: RolloutBackend,
        template: str | None = TEMPLATE,
        special: Sequence[str] = (),
        max_tokens: int = 12,
        parser: str | Parser = "hermes",
        timeout_s: float = 60.0,
        max_body_bytes: int = 1 << 20,
        reward: Any = length_of,
        forced_calls: str = "refuse",
    ) -> None:
        self.tokens = tokenizer(template, special)
        self.backends = backends or (TorchBackend(model(), rows=8),)
        limits = SessionBounds(max_tokens=max_tokens, context=CONTEXT, timeout_s=timeout_s, forced_calls=forced_calls)
        found = PARSERS[parser] if isinstance(parser, str) else parser
        parts = GatewayParts(
            chat=Chat(self.tokens, [1]), runner=self, bounds=limits, model="tiny", parser=found,
            max_body_bytes=max_body_bytes,
        )  # fmt: skip
        self.server = GatewayServer(parts)
        self.agents = self.server.agents
        self.generators = [
            AgentGenerator(backend, ways(Grader(self.tokens, reward, ends=[1]), max_tokens), seed=7)
            for backend in self.backends
        ]
        self.lines = [Line(self.agents, generator) for generator in self.generators]
        for generator, line in zip(self.generators, self.lines, strict=True):
            generator.connect(line)
        self.agent = agent
        self.keys: list[str] = []

    @property
    def url(self) -> str:
        return self.server.url

    async def failed(self) -> str:
        raise NotImplementedError

    def close(self) -> None: ...

    async def run(self, base_url: str, key: str, prompt: Prompt) -> RolloutResult:
        self.keys.append(key)
        async with self.client(key) as client:
            return checked_result(await self.agent(client, prompt), "agent", prompt.row)

    def client(self, key: str) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0)

    async def __aenter__(self) -> "Rig":
        await self.server.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.server.close()
        for generator in self.generators:
            await generator.close()

    async def generate(self, replica: int = 0, *, attempt: int = 1, samples: int = 1, **more: Any) -> Generated:
        work = GroupWork(group=5, attempt=attempt, prompt=Prompt(row=3, text="say abcd"), samples=samples, **more)
        return await self.generators[replica].generate(work)


def run(scenario: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(scenario, 60)

    return asyncio.run(bounded())


async def one_group(agent: Agent, *backends: RolloutBackend, samples: int = 1, **options: Any) -> Any:
    """The trajectories that one group of agents leaves."""
    async with Rig(agent, *backends, **options) as rig:
        generated = await rig.generate(samples=samples)
        assert not generated.aborted
        return generated.group.trajectories
