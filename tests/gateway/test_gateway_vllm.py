"""A conversation through the gateway with vLLM behind it, new weights installed between its turns."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_engines import forked_engines
from gateway_rig import CONTEXT, Rig, tokenizer
from openai import AsyncOpenAI
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm_arguments import ENGINE_ARGS, require_vllm

from engine.trajectory import Prompt, Trajectory

PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
require_vllm()


def model(seed: int) -> Qwen2ForCausalLM:
    """Random weights, with heads of 32: vLLM's attention on a CPU takes no smaller ones."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer()), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=64, max_position_embeddings=CONTEXT, initializer_range=0.2, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def logprobs_of(model: Qwen2ForCausalLM, trajectory: Trajectory) -> list[float]:
    """Of each response token, by one forward pass over prompt and response."""
    ids = torch.tensor([trajectory.prompt_ids + trajectory.token_ids])
    with torch.inference_mode():
        scores = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    return scores[len(trajectory.prompt_ids) - 1 :].tolist()  # type: ignore[no-any-return]


def test_turns_are_kept_with_vllms_own_tokens_logprobs_and_versions(tmp_path: Path) -> None:
    from engine.rollout.vllm.vllm_backend import VllmBackend

    first, second = model(0), model(1)
    first.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    engine_args = ENGINE_ARGS | {"max_model_len": CONTEXT}
    with forked_engines():
        backend = VllmBackend(str(tmp_path), rows=4, engine_args=engine_args, structures=True)

    async def agent(client: AsyncOpenAI, prompt: Prompt) -> None:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        done = await client.chat.completions.create(model="model", messages=messages, max_tokens=12)
        messages.append(done.choices[0].message.model_dump(exclude_none=True))
        await backend.stage(1, second.state_dict())
        await backend.pause("keep")
        await backend.install(1)
        await backend.resume()
        messages.append({"role": "user", "content": "again"})
        await client.chat.completions.create(model="model", messages=messages, max_tokens=12)
        more: Any = {"tools": [ADD], "tool_choice": "required", "max_tokens": 200}
        done = await client.chat.completions.create(model="model", messages=messages[:1], **more)
        assert [call.function.name for call in done.choices[0].message.tool_calls or []][:1] == ["add"]

    async def scene() -> list[Trajectory]:
        async with Rig(agent, backend, max_tokens=200, forced_calls="constrain") as rig:
            return (await rig.generate()).group.trajectories

    trajectories = asyncio.run(asyncio.wait_for(scene(), 200))
    whole, forced = trajectories
    assert tokenizer().decode(forced.token_ids).startswith('<tool_call>\n{"name": "add", "arguments": {')
    likelier = zip(forced.logprobs, logprobs_of(second, forced), strict=True)
    assert all(constrained > free - 1e-3 for constrained, free in likelier)
    assert [span.version for span in whole.spans] == [0, 1]
    turn = whole.spans[0].stop
    assert whole.loss_mask[0] == whole.loss_mask[-1] == 1 and 0 in whole.loss_mask
    before, after = logprobs_of(first, whole), logprobs_of(second, whole)
    for place, (mask, logprob) in enumerate(zip(whole.loss_mask, whole.logprobs, strict=True)):
        if mask:
            assert logprob == pytest.approx((before if place < turn else after)[place], abs=1e-3)
