"""The reward that asks a judge, against a server on the loopback address."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from engine.errors import DataFailure
from engine.tasks import http_client
from engine.tasks.judge import llm_judge
from engine.tasks.reward_forms import declared_by
from engine.trajectory import Prompt, Trajectory

PROMPT = Prompt(row=3, text="2+2?", fields={"answer": "4"})


class Judge:
    """Gives its answers in order, the last one again and again: a text, an HTTP status, or a page that is not JSON."""

    def __init__(self, answers: Sequence[str | int | bytes]) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.keys: list[str | None] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(said, int):
            return web.Response(status=said, text=f"refused {self.keys[-1]}")
        if isinstance(said, bytes):
            return web.Response(body=said, content_type="text/html")
        return web.json_response({"choices": [{"message": {"content": said}}]})

    async def models(self, request: web.Request) -> web.Response:
        said = self.answers[0]
        return web.json_response({}) if isinstance(said, str) else web.Response(status=said)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()


def judged(judge: Judge, **arguments: Any) -> float:
    async def scene() -> float:
        async with judge.serving() as url:
            return await llm_judge(PROMPT, Trajectory(text="It is 4."), url=url, model="big", **arguments)

    return asyncio.run(scene())


@pytest.mark.parametrize(
    ("said", "arguments", "value"),
    [
        ("Good. Score: 8", {}, 0.8),
        ("Score: 2, no. **Score:** 7.5", {}, 0.75),
        ("Score: 99", {}, 1.0),
        ("[[1]]", {"pattern": r"\[\[(\d)\]\]", "high": 1.0}, 1.0),
        ("Score: -1", {"low": -1.0, "high": 1.0}, 0.0),
        ("Score (0-10): 8", {}, 0.8),
        ("**Score (from 0 to 10):** 8", {}, 0.8),
        ("The score is 8.", {}, 0.8),
        ("The score would be: 8", {}, 0.8),
        ("Score (8)", {}, 0.8),
        ("I give it a score of 8 out of 10", {}, 0.8),
        ("Score: 8/10", {}, 0.8),
        ("My score: 8, as the score (0-10) asks", {}, 0.8),
        ("Score = 10", {}, 1.0),
    ],
)
def test_the_score_is_read_from_the_answer(said: str, arguments: dict[str, Any], value: float) -> None:
    assert judged(Judge([said]), **arguments) == value


def test_the_judge_reads_what_the_template_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "top-secret")
    judge = Judge(["Score: 5"])
    template = '{prompt} -> {response} (right: {answer}, {unknown}) {"json": 1}'
    judged(judge, template=template, system="Be strict.", parameters={"max_tokens": 9}, api_key_env="JUDGE_KEY")
    text = '2+2? -> It is 4. (right: 4, {unknown}) {"json": 1}'
    messages = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": text}]
    assert judge.asked == [{"model": "big", "messages": messages, "temperature": 0.0, "max_tokens": 9}]
    assert judge.keys == ["Bearer top-secret"]


@pytest.mark.parametrize("busy", [429, b"<html>The server is busy.</html>"])
def test_a_busy_judge_is_asked_again(busy: int | bytes) -> None:
    judge = Judge([busy, "Score: 4"])
    assert judged(judge, retries=1) == 0.4 and len(judge.asked) == 2


@pytest.mark.parametrize(
    ("answers", "arguments", "story", "asked"),
    [
        (
            [429],
            {"retries": 1},
            r"the judge big cannot be used: http://127.0.0.1:\d+/v1/chat/.* answered 429",
            2,
        ),
        ([400], {"retries": 5}, r"completions answered 400: refused Bearer \(the key\)", 1),
        (["Fine."], {"retries": 0}, r"the judge big at http://.*/v1 gave no score that matches .*: 'Fine\.'", 1),
        (["Bearer top-secret? Fine."], {"retries": 0}, r"gave no score that .*: 'Bearer \(the key\)\? Fine\.'", 1),
        ([" " * (2 << 20)], {"retries": 0}, r"completions cannot be .*: an answer of more than 1048576 bytes", 1),
    ],
)
def test_a_judge_without_a_score_is_named(
    answers: list[str | int], arguments: dict[str, Any], story: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "top-secret")
    monkeypatch.setattr(http_client, "LARGEST_ANSWER_BYTES", 1 << 20)
    judge = Judge(answers)
    with pytest.raises(DataFailure, match=story) as caught:
        judged(judge, api_key_env="JUDGE_KEY", **arguments)
    assert len(judge.asked) == asked and "top-secret" not in str(caught.value)


def test_a_judge_that_is_down_is_named() -> None:
    with pytest.raises(DataFailure, match=r"the judge m cannot be used: http://127.0.0.1:9/.* cannot be reached or"):
        asyncio.run(llm_judge(PROMPT, Trajectory(text=""), url="http://127.0.0.1:9", model="m", retries=0))


def checked(said: str | int) -> Any:
    """What the check says before a run, if the judge answers like this."""
    check: Callable[..., Any] | None = declared_by(llm_judge).check
    assert check is not None

    async def scene() -> Any:
        async with Judge([said]).serving() as url:
            return await asyncio.to_thread(check, url=url, model="m", api_key_env="JUDGE_KEY")

    return asyncio.run(scene())


def test_a_judge_is_tried_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    assert checked("yes") is None and checked(404) is None
    assert checked(500)[:2] == ("url", "answers with HTTP 500")
    assert checked(401)[0] == "api_key_env"


@pytest.mark.parametrize("key", ["abc\n", "abc\udcff"])
def test_a_key_that_no_header_can_have_is_refused_before_a_run(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    field, problem, _ = checked("yes")
    assert field == "api_key_env" and "control character" in problem


def test_a_judge_is_tried_where_an_event_loop_runs_as_in_a_notebook() -> None:
    check: Callable[..., Any] | None = declared_by(llm_judge).check
    assert check is not None

    async def cell() -> Any:
        return check(url="http://127.0.0.1:9", model="m")

    assert asyncio.run(cell())[0] == "url"
