"""What the gateway keeps of a conversation: every token, what is trained of it, and nothing that was not there."""

from typing import Any

import pytest
from gateway_rig import FixedAnswers, model, one_group, run, runs_of, tokenizer
from openai import AsyncOpenAI

from engine.rollout.agents.conversation import Call, CallHistory, Conversation, text
from engine.rollout.backend import SampleRequest, SampleResult, SamplingParams, derive_seed
from engine.rollout.torch.torch_backend import TorchBackend
from engine.trajectory import Prompt, RolloutResult, Span

SUM = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "properties": {}}}}


async def ask(client: AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    done = await client.chat.completions.create(model="model", messages=messages, **more)
    message = done.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return done


async def two_turns(client: AsyncOpenAI, prompt: Prompt) -> None:
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    await ask(client, messages)
    messages.append({"role": "user", "content": "again"})
    await ask(client, messages)


def test_turns_are_kept_token_by_token_with_what_came_between_masked() -> None:
    """The ids of `abcd` are single letters as sampled here; encoding the text would give pairs."""
    letters = FixedAnswers("x", "yy<end>")
    spelled = [tokenizer().convert_tokens_to_ids(letter) for letter in "abcd"]
    assert tokenizer().encode("abcd") != spelled

    async def spell(request: SampleRequest) -> Any:
        result = await FixedAnswers.sample(letters, request)
        if len(letters.asked) == 1:
            result.token_ids, result.logprobs = [*spelled, 1], [-1.0, -2.0, -3.0, -4.0, -5.0]
            result.spans, result.finish_reason = [result.spans[0]._replace(stop=5)], "stop"
        return result

    letters.sample = spell  # type: ignore[method-assign]
    (only,) = run(one_group(two_turns, letters))
    assert tokenizer().decode(only.prompt_ids) == "[user]say abcd<end>[assistant]"
    assert only.token_ids[:5] == [*spelled, 1]
    assert only.logprobs[:5] == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert runs_of(only) == [(1, "abcd<end>"), (0, "[user]again<end>[assistant]"), (1, "yy<end>")]
    assert [span[:2] for span in only.spans] == [(0, len(only.token_ids))]
    assert letters.asked[1].prompt_ids == only.prompt_ids + only.token_ids[: -len("yy") - 1]
    assert not only.continues
    assert only.finish_reason == "stop"


def test_what_is_captured_is_what_the_model_samples_on_the_same_tokens() -> None:
    (only,) = run(one_group(two_turns))

    async def directly() -> list[Any]:
        backend, results = TorchBackend(model(), rows=8), []
        starts = [0, only.loss_mask.index(0) + only.loss_mask[only.loss_mask.index(0) :].index(1)]
        for call, start in enumerate(starts, 1):
            params = SamplingParams(max_tokens=12, stop_ids=(1,))
            request = SampleRequest(
                id=f"{call}", prompt_ids=only.prompt_ids + only.token_ids[:start], params=params,
                seed=derive_seed(7, 5, 0, 0, call),
            )  # fmt: skip
            results.append((start, await backend.sample(request)))
        await backend.close()
        return results

    for start, result in run(directly()):
        stop = start + len(result.token_ids)
        assert only.token_ids[start:stop] == result.token_ids
        assert only.logprobs[start:stop] == pytest.approx(result.logprobs, abs=1e-5)
        assert set(only.loss_mask[start:stop]) == {1}


def test_a_rewritten_history_begins_a_segment_that_continues_the_rollout() -> None:
    async def forgetful(client: AsyncOpenAI, prompt: Prompt) -> float:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        await ask(client, messages)
        await ask(client, [{"role": "user", "content": "summary of what was"}])
        return 2.5

    first, second = run(one_group(forgetful, FixedAnswers("one<end>", "two<end>")))
    assert (runs_of(first), runs_of(second)) == ([(1, "one<end>")], [(1, "two<end>")])
    assert tokenizer().decode(second.prompt_ids) == "[user]summary of what was<end>[assistant]"
    assert [t.continues for t in (first, second)] == [False, True]
    assert [t.reward for t in (first, second)] == [2.5, 2.5]


def test_an_agent_may_return_figures_and_rewards_of_its_answers() -> None:
    """Of two segments, only the last has rewards of answers; the first answer's counts in the whole reward."""

    async def graded(client: AsyncOpenAI, prompt: Prompt) -> RolloutResult:
        for content in ("other", prompt.text):
            messages: list[Any] = [{"role": "user", "content": content}]
            await ask(client, messages)
        await ask(client, [*messages, {"role": "user", "content": "again"}])
        return RolloutResult(reward=2.0, turn_rewards=[0.5, None, 1.0], finish_reason="max_turns", figures={"right": 1})

    first, last = run(one_group(graded, FixedAnswers("one<end>", "two<end>", "three<end>")))
    assert [one.reward for one in (first, last)] == [2.0, 2.0]
    assert (first.step_rewards, last.step_rewards) == ([], [(len(last.token_ids) - 1, 1.0)])
    assert (first.finish_reason, last.finish_reason) == ("stop", "max_turns")
    assert first.figures["right"] == last.figures["right"] == 1


def test_two_conversations_under_one_key_are_kept_apart() -> None:
    async def interleaving(client: AsyncOpenAI, prompt: Prompt) -> None:
        left: list[Any] = [{"role": "user", "content": "left"}]
        right: list[Any] = [{"role": "user", "content": "right"}]
        for messages in (left, right, left, right):
            if len(messages) > 1:
                messages.append({"role": "user", "content": "more"})
            await ask(client, messages)

    said = FixedAnswers("a<end>", "a<end>", "b<end>", "c<end>")
    left, right = run(one_group(interleaving, said))
    assert runs_of(left) == [(1, "a<end>"), (0, "[user]more<end>[assistant]"), (1, "b<end>")]
    assert runs_of(right) == [(1, "a<end>"), (0, "[user]more<end>[assistant]"), (1, "c<end>")]
    assert tokenizer().decode(right.prompt_ids) == "[user]right<end>[assistant]"


SPACED = 'I add <tool_call>{"name":"sum",   "arguments":{"a":1}}</tool_call><end>'


@pytest.mark.parametrize("sent", [None, "", "{}", {}])
def test_a_call_without_arguments_continues_in_every_form(sent: Any) -> None:
    said = FixedAnswers('<tool_call>{"name": "sum", "arguments": ""}</tool_call><end>', "3<end>")

    async def agent(client: AsyncOpenAI, prompt: Prompt) -> None:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        (call,) = (await ask(client, messages, tools=[SUM])).choices[0].message.tool_calls
        assert call.function.arguments == "{}"
        messages[1]["tool_calls"][0]["function"]["arguments"] = sent
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        await ask(client, messages, tools=[SUM])

    (only,) = run(one_group(agent, said, max_tokens=90))
    assert [mask for mask, _ in runs_of(only)] == [1, 0, 1]


def test_agents_and_parsers_read_markers_that_are_special_tokens() -> None:
    special = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    said = FixedAnswers(f"<think>so</think>{SPACED}", "<think>3</think><end>", special=special)

    async def agent(client: AsyncOpenAI, prompt: Prompt) -> None:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        first = (await ask(client, messages, tools=[SUM])).choices[0].message
        assert first.content == "<think>so</think>I add" and len(first.tool_calls) == 1
        messages.append({"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"})
        second = await ask(client, messages, tools=[SUM], stop=["3</think>"])
        assert second.choices[0].message.content == "<think>"

    (only,) = run(one_group(agent, said, special=special, max_tokens=90))
    assert only.text == f"<think>so</think>{SPACED}[tool]3<end>[assistant]<think>3</think>"


def test_tool_calls_are_parsed_and_come_back_as_the_tokens_that_they_were() -> None:
    async def calculating(client: AsyncOpenAI, prompt: Prompt) -> None:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        done = await ask(client, messages, tools=[SUM])
        assert done.choices[0].finish_reason == "tool_calls"
        (call,) = done.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("sum", '{"a": 1}')
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        done = await ask(client, messages, tools=[SUM])
        assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("3", "stop")
        done = await ask(client, [{"role": "user", "content": "no tool"}], tools=[SUM], tool_choice="none")
        assert (done.choices[0].message.content, done.choices[0].message.tool_calls) == ("<tool_call>{}", None)

    said = FixedAnswers(SPACED, "3<end>", "<tool_call>{}<end>")
    only, _ = run(one_group(calculating, said, max_tokens=100))
    assert runs_of(only) == [(1, SPACED), (0, "[tool]3<end>[assistant]"), (1, "3<end>")]
    assert tokenizer().decode(only.prompt_ids).startswith("tools: sum")


@pytest.mark.parametrize("prompt", ["text", "ids"])
def test_completions_go_on_from_what_they_said(prompt: str) -> None:
    async def plain(client: AsyncOpenAI, _: Prompt) -> None:
        if prompt == "text":
            first = await client.completions.create(model="model", prompt="count: ", stop=["!"])
            text = first.choices[0].text
            assert text == "one, two"
            await client.completions.create(model="model", prompt="count: " + text + "! and ")
        else:
            ids = tokenizer().encode("count: ")
            await client.completions.create(model="model", prompt=ids)
            ids += tokenizer().encode("one, two! more<end> and ")
            await client.completions.create(model="model", prompt=ids)

    (only,) = run(one_group(plain, FixedAnswers("one, two! more<end>", "three<end>"), max_tokens=100))
    kept = "one, two!" if prompt == "text" else "one, two! more<end>"
    assert runs_of(only) == [(1, kept), (0, " and "), (1, "three<end>")]


def test_a_text_that_leaves_the_end_of_an_answer_out_begins_a_segment() -> None:
    """The model would be conditioned on an end of text that the agent's prompt does not have."""

    async def joining(client: AsyncOpenAI, _: Prompt) -> None:
        first = await client.completions.create(model="model", prompt="count: ")
        await client.completions.create(model="model", prompt="count: " + first.choices[0].text + " and ")

    first, second = run(one_group(joining, FixedAnswers("one<end>", "two<end>")))
    assert (runs_of(first), runs_of(second)) == ([(1, "one<end>")], [(1, "two<end>")])
    assert tokenizer().decode(second.prompt_ids) == "count: one and "


def answered(conversation: Conversation, call: Call, said: str) -> None:
    sampled = tokenizer().encode(said)
    call.take(SampleResult(token_ids=sampled, logprobs=[-1.0] * len(sampled), spans=[Span(0, len(sampled), 0)],
                           finish_reason="length"))  # fmt: skip
    conversation.commit(call, shown=said, hidden="")


def asking(prompt: str) -> CallHistory:
    return text(prompt, lambda added, begins: tokenizer().encode(added))


def test_of_two_segments_that_a_history_continues_it_goes_on_from_the_longer_one() -> None:
    conversation = Conversation()
    left, right = conversation.begin(asking("x")), conversation.begin(asking("x"))
    assert left.segment is not right.segment, "a segment with a call in progress is nothing to continue from"
    answered(conversation, right, "one")
    answered(conversation, left, "one two")
    assert conversation.begin(asking("xone two three")).segment is left.segment
    assert conversation.begin(asking("xone two three")).segment is right.segment


def test_a_call_that_was_dropped_is_nothing_to_go_on_from() -> None:
    conversation = Conversation()
    conversation.drop(conversation.begin(asking("hello")))
    call = conversation.begin(asking("hello world"))
    assert tokenizer().decode(call.prompt_ids) == "hello world"
    answered(conversation, call, "!")
    conversation.drop(conversation.begin(asking("hello world! more")))
    again = conversation.begin(asking("hello world! other"))
    assert tokenizer().decode(again.prompt_ids) == "hello world! other"
    (only,) = conversation.trajectories()
    assert runs_of(only) == [(1, "!")]


@pytest.mark.parametrize("text", ["so ", ""])
@pytest.mark.parametrize("tools", [False, True])
def test_a_stream_says_what_the_whole_answer_says(tools: bool, text: str) -> None:
    said = text + ('<tool_call>{"name": "sum", "arguments": {}}</tool_call>' if tools else "") + "<end>"
    more: dict[str, Any] = {"logprobs": True} | ({"tools": [SUM]} if tools else {})
    seen: list[Any] = []

    async def whole(client: AsyncOpenAI, prompt: Prompt) -> None:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        done = await client.chat.completions.create(model="model", messages=messages, **more)
        calls = done.choices[0].message.tool_calls or []
        usage = done.usage.total_tokens
        values = [token.logprob for token in done.choices[0].logprobs.content]
        seen.append((done.choices[0].message.content or "", [c.function.name for c in calls], usage, values))

    async def streaming(client: AsyncOpenAI, prompt: Prompt) -> None:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        text, names, finish, usage, values = "", [], "", 0, []
        async for chunk in await client.chat.completions.create(
            model="model", messages=messages, stream=True, stream_options={"include_usage": True}, **more
        ):
            usage = chunk.usage.total_tokens if chunk.usage else usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                names += [call.function.name for call in choice.delta.tool_calls or ()]
                finish = choice.finish_reason or finish
                values += [token.logprob for token in choice.logprobs.content] if choice.logprobs else []
        assert finish == ("tool_calls" if tools else "stop")
        seen.append((text, names, usage, values))

    results = [run(one_group(agent, FixedAnswers(said), max_tokens=100)) for agent in (whole, streaming)]
    assert seen[0] == seen[1]
    assert results[0] == results[1]


def test_a_streamed_completion_has_the_log_probs_of_the_whole_one() -> None:
    seen: list[Any] = []

    async def both(client: AsyncOpenAI, prompt: Prompt) -> None:
        whole = await client.completions.create(model="model", prompt="count", logprobs=0)
        seen.append(whole.choices[0].logprobs.token_logprobs)
        chunks = await client.completions.create(model="model", prompt="count", logprobs=0, stream=True)
        found = [chunk.choices[0].logprobs async for chunk in chunks]
        seen.append([value for one in found if one is not None for value in one.token_logprobs])

    run(one_group(both, FixedAnswers("abcd<end>", "abcd<end>")))
    assert seen[0] == seen[1] != []


def test_log_probs_are_those_of_the_sampled_tokens() -> None:
    logprobs: list[float] = []

    async def curious(client: AsyncOpenAI, prompt: Prompt) -> None:
        done = await ask(client, [{"role": "user", "content": prompt.text}], logprobs=True)
        logprobs.extend(token.logprob for token in done.choices[0].logprobs.content)

    (only,) = run(one_group(curious))
    assert logprobs == only.logprobs
