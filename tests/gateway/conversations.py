"""What the tests over Ray run: agents, a rollout in Python, a reward, and a replica that dies in a conversation."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway_rig import TEMPLATE, model, tokenizer
from openai import AsyncOpenAI

from engine.errors import DataFailure
from engine.rollout.agents.program_generator import RolloutClient
from engine.rollout.backend import SampleRequest, SampleResult, nothing_new
from engine.rollout.torch.torch_backend import TorchBackend
from engine.trajectory import Prompt, Trajectory

TURNS = 3


def make_inputs(directory: Path, prompts: int) -> dict[str, Any]:
    """Model and data on disk, as sections of a configuration."""
    model().save_pretrained(directory / "model")
    saved = tokenizer(TEMPLATE)
    saved.save_pretrained(directory / "model")
    rows = "".join(f'{{"prompt": "say {n}"}}\n' for n in range(prompts))
    (directory / "rows.jsonl").write_text(rows)
    return {"model": {"path": str(directory / "model")}, "data": {"path": str(directory / "rows.jsonl")}}


def write_line(line: str) -> None:
    """For the test to read: one line, in one write."""
    with open("agents.txt", "a") as file:
        file.write(line + "\n")


async def converse(base_url: str, api_key: str, prompt: Prompt) -> None:
    write_line(f"begun {prompt.row} {api_key}")
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        for turn in range(TURNS):
            done = await client.chat.completions.create(model="model", messages=messages)
            messages += [done.choices[0].message.model_dump(), {"role": "user", "content": f"turn {turn}"}]
    write_line(f"ended {prompt.row} {api_key}")


async def program(client: RolloutClient, prompt: Prompt) -> None:
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    for turn in range(TURNS):
        answer = await client.sample(messages)
        messages += [answer.message, {"role": "user", "content": f"turn {turn}"}]


def runs(trajectory: Trajectory) -> int:
    """Stretches of sampled tokens."""
    mask = [0, *trajectory.loss_mask]
    return sum(mask[i - 1 : i + 1] == [0, 1] for i in range(1, len(mask)))


def whole(prompt: Prompt, trajectory: Trajectory) -> float:
    """Only a conversation that ended whole has a reward."""
    if runs(trajectory) != TURNS or f"say {prompt.row}" not in prompt.text:
        raise DataFailure(f"{runs(trajectory)} turns of {TURNS}")
    return float(sum(trajectory.token_ids) % 7)


class Deadly(TorchBackend):
    """Kills its process once, in the second turn of a conversation. Afterwards, each replica holds one second turn
    back until it is aborted for new weights."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held = ""
        self.aborted = asyncio.Event()

    async def abort(self, ids: Sequence[str]) -> None:
        if self.held in ids:
            self.aborted.set()
        await super().abort(ids)

    async def pause(self, mode: str) -> None:
        self.aborted.set()
        await super().pause(mode)

    async def sample(self, request: SampleRequest) -> SampleResult:
        second_turn = len(request.prompt_ids) > 40
        if second_turn and not os.path.exists("died"):
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if second_turn and not self.held:
            self.held = request.id
            await self.aborted.wait()
            return nothing_new("abort")
        return await super().sample(request)
