"""What the tests over Ray run: agents, a rollout in Python, a reward, and a replica that dies in a conversation."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
from gateway_rig import TEMPLATE, model, tokenizer
from openai import AsyncOpenAI

from engine.errors import DataFailure
from engine.rollout.backend import SampleRequest, SampleResult
from engine.rollout.program import RolloutClient
from engine.rollout.torch import TorchBackend
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


def told(line: str) -> None:
    """For the test to read: one line, in one write."""
    with open("told.txt", "a") as file:
        file.write(line + "\n")


async def converse(base_url: str, api_key: str, prompt: Prompt) -> None:
    told(f"begun {prompt.row} {api_key}")
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        for turn in range(TURNS):
            done = await client.chat.completions.create(model="any", messages=messages)
            messages += [done.choices[0].message.model_dump(), {"role": "user", "content": f"turn {turn}"}]
    told(f"ended {prompt.row} {api_key}")


async def deadly(base_url: str, api_key: str, prompt: Prompt) -> None:
    """Takes the gateway's process with it."""
    os.kill(os.getpid(), signal.SIGKILL)


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
    """Takes its process with it, once, in the second turn of a conversation."""

    async def sample(self, request: SampleRequest) -> SampleResult:
        if len(request.prompt_ids) > 40 and not os.path.exists("died"):
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().sample(request)


def turns(prompt: Prompt, trajectory: Trajectory) -> float:
    return float(runs(trajectory))


def alive(marker: str) -> list[int]:
    """Processes whose command line holds a text."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if any(marker in word for word in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found
