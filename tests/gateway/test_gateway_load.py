"""What one agent's long or odd call costs the others, and its own conversation."""

import asyncio
import threading
from typing import Any

import openai
import pytest
from gateway_rig import CONTEXT, FixedAnswers, Rig, one_group, run, tokenizer
from openai import AsyncOpenAI

from engine.rollout.agents.conversation import Chat
from engine.trajectory import Prompt

SUM = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "properties": {}}}}


async def ask(client: AsyncOpenAI, text: str, **more: Any) -> None:
    messages: Any = [{"role": "user", "content": text}]
    await client.chat.completions.create(model="model", messages=messages, **more)


def test_an_agent_whose_history_is_being_tokenized_does_not_block_the_others() -> None:
    async def scenario() -> None:
        answered, begun, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

        async def agent(client: AsyncOpenAI, prompt: Prompt) -> float:
            if client.api_key == rig.keys[0]:
                await ask(client, "a long history")
            else:
                await begun.wait()
                await ask(client, "hello")
                answered.set()
            return 1.0

        async with Rig(agent, FixedAnswers("x<end>", "x<end>")) as rig:
            encode = rig.tokens.encode

            def held(text: str, **more: Any) -> Any:
                if "a long history" in text:
                    loop.call_soon_threadsafe(begun.set)
                    assert answered.wait(60), "no other agent was answered"
                return encode(text, **more)

            rig.tokens.encode = held
            assert len((await rig.generate(samples=2)).group.trajectories) == 2

    run(scenario())


@pytest.mark.parametrize("form", ["chat", "completion"])
def test_a_history_far_beyond_the_context_is_refused_before_it_is_tokenized(form: str) -> None:
    async def scenario() -> None:
        async def agent(client: AsyncOpenAI, prompt: Prompt) -> float:
            with pytest.raises(openai.BadRequestError) as refusal:
                if form == "chat":
                    await ask(client, "x" * 100_000)
                else:
                    await client.completions.create(model="model", prompt="x" * 100_000)
            assert refusal.value.code == "context_length_exceeded"
            assert str(CONTEXT) in refusal.value.message
            await ask(client, "hello")
            return 1.0

        async with Rig(agent, FixedAnswers("x<end>")) as rig:
            encode, lengths = rig.tokens.encode, []

            def counted(text: str, **more: Any) -> Any:
                lengths.append(len(text))
                return encode(text, **more)

            rig.tokens.encode = counted
            (only,) = (await rig.generate()).group.trajectories
            assert max(lengths) < 100
            assert only.finish_reason == "stop"

    run(scenario())


def test_the_lower_bound_of_tokens_counts_only_what_no_tokenizer_drops() -> None:
    chat = Chat(tokenizer(), [1])
    for text in ("", "abab" * 50, "a b\n" * 50, " " * 1000, "é" * 1000, "[user]abcdefgh<end>" * 20):
        assert chat.fewest_tokens(text) <= len(chat.encode(text, True))
    assert chat.fewest_tokens("xy" * 1000) > 200


def test_an_answer_that_the_tool_parser_cannot_read_leaves_no_trace() -> None:
    def parser(text: str) -> Any:
        if text == "broken":
            raise ValueError("no call in it")
        return text, []

    async def agent(client: AsyncOpenAI, prompt: Prompt) -> float:
        with pytest.raises(openai.InternalServerError, match=r"agent\.tool_parser raised ValueError: no call in it"):
            await ask(client, "hello", tools=[SUM])
        await ask(client, "hello", tools=[SUM])
        return 1.0

    (only,) = run(one_group(agent, FixedAnswers("broken<end>", "whole<end>"), parser=parser))
    assert tokenizer().decode(only.token_ids) == "whole<end>"
