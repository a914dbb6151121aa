"""Keys, refusals, strangers, and what becomes of agents that fail, are cut short, or lose their replica."""

import asyncio
import json
import logging
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from gateway_rig import CONTEXT, FixedAnswers, Halting, Rig, model, one_group, run, tokenizer, ways
from openai import AsyncOpenAI

from engine.actors.worker_actor import agent_generators
from engine.errors import DataFailure, EngineError
from engine.rollout.agents.agent_generator import AgentGenerator
from engine.rollout.backend import SampleRequest, SampleResult
from engine.rollout.scoring import Grader
from engine.rollout.torch.torch_backend import TorchBackend
from engine.trajectory import Prompt, Span
from engine.workers.plan import Rollout

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def hello(client: AsyncOpenAI, prompt: Prompt) -> None:
    await client.chat.completions.create(model="model", messages=HELLO)


async def refused(client: AsyncOpenAI, prompt: Prompt) -> float:
    """Everything that a gateway must refuse, in one conversation that continues afterwards."""
    create = client.chat.completions.create
    with pytest.raises(openai.AuthenticationError, match="does not belong to a running agent"):
        await client.with_options(api_key="sk-wrong").models.list()
    with pytest.raises(openai.APIStatusError) as large:
        await create(model="model", messages=[{"role": "user", "content": "x" * 30_000}])
    assert large.value.status_code == 413
    assert large.value.code == "request_too_large"
    with pytest.raises(openai.BadRequestError) as long:
        await create(model="model", messages=[{"role": "user", "content": "x" * (CONTEXT + 1)}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="n is 2, but must be 1") as several:
        await create(model="model", messages=HELLO, n=2)
    assert (several.value.param, several.value.code) == ("n", "unsupported_value")
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(openai.BadRequestError, match="messages"):
        await create(model="model", messages=picture)
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="model", input="x")
    with pytest.raises(openai.NotFoundError, match="model 'gpt' does not exist; this run serves 'tiny'") as unknown:
        await create(model="gpt", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    assert [m.id async for m in client.models.list()] == ["tiny"]
    await create(model="model", messages=HELLO)
    return 1.0


def test_what_is_refused_is_refused_in_openais_words_and_leaves_no_trace() -> None:
    (only,) = run(one_group(refused, FixedAnswers("hi<end>"), max_body_bytes=20_000))
    assert (only.loss_mask, only.reward, only.finish_reason) == ([1, 1, 1], 1.0, "stop")
    assert only.figures["turns"] == 1


def test_a_spent_context_ends_the_conversation_and_what_was_sampled_stays_trainable() -> None:
    async def talkative(client: AsyncOpenAI, prompt: Prompt) -> float:
        messages = list(HELLO)
        try:
            while True:
                done = await client.chat.completions.create(model="model", messages=messages)
                messages += [done.choices[0].message.model_dump(), {"role": "user", "content": "x" * 100}]
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
        return 1.0

    (only,) = run(one_group(talkative))
    assert only.finish_reason == "length"
    assert sum(only.loss_mask) >= 3
    assert len(only.prompt_ids) + len(only.token_ids) <= CONTEXT


def test_a_model_without_a_chat_template_is_named_for_chats_and_serves_completions() -> None:
    async def both(client: AsyncOpenAI, prompt: Prompt) -> float:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            await client.chat.completions.create(model="model", messages=HELLO)
        await client.completions.create(model="model", prompt="hello")
        return 0.0

    (only,) = run(one_group(both, template=None))
    assert 1 in only.loss_mask


def test_an_agent_that_raises_costs_its_group_an_attempt_and_the_next_begins_anew() -> None:
    async def scenario() -> None:
        lives = []

        async def failing(client: AsyncOpenAI, prompt: Prompt) -> None:
            await hello(client, prompt)
            lives.append(client.api_key)
            if len(lives) == 1:
                raise DataFailure("no answer in it")

        async with Rig(failing) as rig:
            with pytest.raises(DataFailure, match="no answer in it"):
                await rig.generate()
            with pytest.raises(openai.AuthenticationError):
                await rig.client(lives[0]).models.list()
            generated = await rig.generate(attempt=2)
            assert len(generated.group.trajectories) == 1
            assert generated.oldest_version is None
            with pytest.raises(openai.AuthenticationError):
                await rig.client(lives[1]).models.list()

    run(scenario())


def test_an_agent_that_takes_too_long_is_cancelled() -> None:
    async def scenario() -> None:
        cancelled = asyncio.Event()

        async def idle(client: AsyncOpenAI, prompt: Prompt) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with Rig(idle, timeout_s=0.05) as rig:
            with pytest.raises(
                DataFailure, match=r"agents \[0\] of prompt row 3 took longer than agent.timeout_s = 0.05 s"
            ):
                await rig.generate()
            await cancelled.wait()

    run(scenario())


def test_a_call_of_an_agent_reports_the_siblings_that_have_ended() -> None:
    async def scenario() -> None:
        counts: list[int] = []
        first: list[AsyncOpenAI] = []

        async def the_second_goes_on(client: AsyncOpenAI, prompt: Prompt) -> None:
            first.append(client)
            await hello(client, prompt)
            while client is not first[0] and counts[-1] < 1:
                await hello(client, prompt)

        async with Rig(the_second_goes_on, FixedAnswers(*["yes<end>"] * 1000)) as rig:
            await rig.generate(samples=2, finished=counts.append)
        assert sorted(set(counts)) == [0, 1, 2] and counts == sorted(counts)

    run(scenario())


async def long_answer(client: AsyncOpenAI, prompt: Prompt) -> float:
    done = await client.chat.completions.create(model="model", messages=HELLO, max_tokens=20, stop=[])
    return float(done.usage.completion_tokens)


def uncut() -> Any:
    (only,) = run(one_group(long_answer, TorchBackend(model(), rows=8), max_tokens=20))
    return only


@pytest.mark.parametrize("end", ["pause", "loss", "failure"])
def test_a_conversation_survives_its_replica_and_goes_on_from_its_prefix(end: str) -> None:
    async def scenario() -> Any:
        first, second = Halting(6), TorchBackend(model(), rows=8)
        async with Rig(long_answer, first, second, max_tokens=20) as rig:
            running = asyncio.ensure_future(rig.generate())
            await first.halted()
            if end == "pause":
                await rig.generators[0].pause("abort")
                partial = await running
                assert partial.aborted
                assert len(partial.group.trajectories[0].token_ids) == 6
            elif end == "failure":
                await first.close()
                with pytest.raises(EngineError, match="closed"):
                    await running
            generated = await rig.generate(1, attempt=2)
            if end == "loss":
                assert (await running).aborted, "nothing has come from the first replica, nor will it"
            assert generated.oldest_version == 0
            assert len(rig.keys) == 1, "the agent was not started again"
            assert [line.calls for line in rig.lines] == [1, 1], "nothing is asked of a replica that is taken away"
            return generated.group.trajectories[0]

    resumed, whole = run(scenario()), uncut()
    assert resumed.token_ids == whole.token_ids
    assert resumed.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


def test_a_replica_with_older_weights_cannot_go_on_so_the_agents_begin_anew() -> None:
    class Newer(FixedAnswers):
        async def sample(self, request: SampleRequest) -> SampleResult:
            if len(self.asked):
                raise EngineError("this replica is gone")
            result = await super().sample(request)
            result.spans = [Span(0, len(result.token_ids), 3)]
            return result

    async def twice(client: AsyncOpenAI, prompt: Prompt) -> float:
        await hello(client, prompt)
        await client.chat.completions.create(model="model", messages=[{"role": "user", "content": "more"}])
        return 1.0

    async def scenario() -> None:
        async with Rig(twice, Newer("new<end>"), FixedAnswers("old<end>", "older<end>")) as rig:
            with pytest.raises(EngineError, match="gone"):
                await rig.generate(0)
            generated = await rig.generate(1, attempt=2)
            assert len(rig.keys) == 2
            assert {span.version for t in generated.group.trajectories for span in t.spans} == {0}

    run(scenario())


def test_truncation_finishes_a_group_with_what_there_is_and_ends_its_agents() -> None:
    async def scenario() -> None:
        backend = Halting(6)
        async with Rig(long_answer, backend, max_tokens=20) as rig:
            running = asyncio.ensure_future(rig.generate())
            await backend.halted()
            await rig.generators[0].truncate([5])
            generated = await running
            (only,) = generated.group.trajectories
            assert (len(only.token_ids), only.finish_reason) == (6, "truncated")
            assert only.reward == len(only.text)
            assert rig.agents.session(rig.keys[0]) is None

    run(scenario())


def test_a_discarded_group_takes_its_agents_along() -> None:
    async def scenario() -> None:
        backend = Halting(6)
        refusals: list[int] = []

        async def watching(client: AsyncOpenAI, prompt: Prompt) -> None:
            try:
                await hello(client, prompt)
            except asyncio.CancelledError:
                refusals.append(1)
                raise

        async with Rig(watching, backend, max_tokens=20) as rig:
            running = asyncio.ensure_future(rig.generate())
            await backend.halted()
            await rig.generators[0].abort([5])
            assert (await running).aborted
            rig.agents.discard([5])
            await rig.agents.close()
            assert refusals == [1]
            assert rig.agents.session(rig.keys[0]) is None

    run(scenario())


def test_an_order_to_cut_that_overtakes_its_opening_is_not_lost() -> None:
    async def scenario() -> None:
        async with Rig(hello, FixedAnswers("x<end>")) as rig:
            rig.agents.cut(5, 1, "park")
            assert (await rig.generate()).aborted
            assert not (await rig.generate(attempt=2)).aborted

    run(scenario())


def test_a_caller_that_goes_away_leaves_no_answer_behind() -> None:
    async def scenario() -> Any:
        backend = Halting(6)

        async def impatient(client: AsyncOpenAI, prompt: Prompt) -> float:
            call = asyncio.ensure_future(hello(client, prompt))
            await backend.halted()
            call.cancel()
            await asyncio.wait([call])
            await client.chat.completions.create(model="model", messages=[{"role": "user", "content": "other"}])
            return 1.0

        async with Rig(impatient, backend, max_tokens=20) as rig:
            return (await rig.generate()).group.trajectories

    (only,) = run(scenario())
    assert "other" in tokenizer().decode(only.prompt_ids)


def test_a_reward_is_needed_from_somewhere() -> None:
    with pytest.raises(DataFailure, match="returned no reward"):
        run(one_group(hello, FixedAnswers("x<end>"), reward=None))


def test_an_agent_that_works_between_its_calls_is_measured_on_the_replica() -> None:
    began, leave = asyncio.Barrier(3), asyncio.Event()

    async def slow(client: AsyncOpenAI, prompt: Prompt) -> float:
        await hello(client, prompt)
        await began.wait()
        await leave.wait()
        return 1.0

    async def scene() -> None:
        async with Rig(slow, FixedAnswers("1<end>", "2<end>")) as rig:
            (generator,) = rig.generators
            running = asyncio.ensure_future(rig.generate(samples=2))
            await began.wait()
            busy = generator.call_figures()[0]
            assert (busy.function, busy.setting) == ("agent", "rollout.slots")
            assert (busy.groups, busy.at_once, busy.calls) == (1, 2, 2), "each has worked until its first request"
            leave.set()
            await running
            done = generator.call_figures()[0]
            assert (done.groups, done.calls) == (0, 4) and done.seconds > 0

    run(scene())


SECRET = b"hunter2-and-more"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "request_sent",
    [
        POST + b"Authorization: Bearer " + SECRET + b"\x00\r\n\r\n",
        POST + b"Authorization: " + SECRET + b"\r\n\r\n",
        POST + b"Authorization: Bearer \xff" + SECRET + b"\r\n\r\n",
        POST + b"Authorization: Bearer " + SECRET * 2000 + b"\r\n\r\n",
        POST + b"Expect: " + SECRET + b"\r\n\r\n",
        b"Authorization: Bearer " + SECRET + b"\r\n\r\n",
    ],
)
def test_nothing_of_a_request_is_repeated(
    request_sent: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> bytes:
        async with Rig(hello, FixedAnswers()) as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(rig.url).port)
            writer.write(request_sent)
            answer = await reader.read()
            writer.close()
            return answer

    with caplog.at_level(logging.DEBUG):
        answer = run(scenario())
    assert answer.split()[1] in (b"400", b"401")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"], "it is OpenAI's error object"
    assert SECRET not in answer and SECRET.decode() not in caplog.text + "".join(capfd.readouterr())


def test_a_replica_connects_each_generator_of_agents_once() -> None:
    def make() -> AgentGenerator:
        backend = FixedAnswers()
        return AgentGenerator(backend, ways(Grader(backend.tokens, None, ends=[1]), 12), seed=7)

    one, other = make(), make()
    assert agent_generators(Rollout(generator=one, evaluator=one)) == [one]
    assert agent_generators(Rollout(generator=one, evaluator=other)) == [one, other]
    assert agent_generators(Rollout(generator=one)) == [one]
