"""A whole run with agents and a gateway in one process: what a program that fails or is killed costs its group."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from conversations import alive, turns
from gateway_rig import Rig, model
from openai import AsyncOpenAI

from engine.events import GroupFailed, GroupGenerated
from engine.gateway.runners import CommandRunner
from engine.protocols import Batch
from engine.record import read, replay
from engine.runtime.local import RunResult, SimpleTrainer, run_async
from engine.states.limits import Limits
from engine.trajectory import Prompt


class Idle(SimpleTrainer):
    """Its weights stay as they are."""

    def train(self, batch: Batch) -> dict[str, float]:
        return {}

    def weights(self) -> Any:
        return model().state_dict()


def test_a_program_is_an_agent_and_one_that_dies_costs_its_group_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = str(Path(__file__).with_name("asking_program.py"))
    runner = CommandRunner([sys.executable, program])
    limits = Limits(train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=2)

    async def whole() -> RunResult:
        async def ask(client: AsyncOpenAI, prompt: Prompt) -> float | None:
            return await runner.run(rig.url, client.api_key, prompt)

        async with Rig(ask, reward=turns) as rig:
            return await run_async(
                generators=rig.generators, trainer=Idle(), prompts=[f"say {n}" for n in range(24)], limits=limits,
                samples=2, slots=6,
            )  # fmt: skip

    result = asyncio.run(asyncio.wait_for(whole(), 120))
    assert (result.outcome, result.steps) == ("finished", 2)
    assert replay(read(result.record)).identical
    events = list(read(result.record).events())
    failed = [(event.cause, event.reason) for event in events if isinstance(event, GroupFailed)]
    assert sorted(cause for cause, _ in failed) == ["data", "infrastructure"]
    assert any("was killed by SIGTERM" in reason for _, reason in failed)
    assert any("ended with exit code 1: there is no tool" in reason for _, reason in failed)
    assert {event.reward_mean for event in events if isinstance(event, GroupGenerated)} == {2.0}
    assert alive(program) == []
