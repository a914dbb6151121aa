"""The reward `llm_judge`: asks a language model on a server with the OpenAI API for a score.

Named in `reward.functions`. The key comes from an environment variable and appears in no message, record or log. If the
judge cannot be reached, a run does not start. During a run, the group's attempt fails, and the error names the judge.
"""

import asyncio
import math
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.errors import DataFailure, EngineError
from engine.tasks.http_client import Http, RefusedRequest, Unavailable, pause, problem_of_key
from engine.tasks.reward_forms import Problem, declare
from engine.trajectory import Prompt, Trajectory

TEMPLATE = """\
Judge the response of an assistant to a request.

Request:
{prompt}

Response:
{response}

How good is the response, from 0 (useless) to 10 (perfect)? Explain briefly, then end with a line "Score: NUMBER".\
"""
PATTERN = (
    r"(?i)\bscore\b(?:\W{0,4}\([^()\n]{0,40}\))?(?:\W{1,4}(?:is|of|would be))?\W{0,8}?"
    r"(-?\d+(?:\.\d+)?)(?!\d|\.\d|\s*[-–]\s*\d)"
)
"""The last match in the judge's answer counts; group 1 is the number. A range, as in `Score (0-10)`, does not match."""
RETRIED = frozenset({200, 409})
"""HTTP statuses of a `RefusedRequest` after which the judge is asked again: 200 is an answer that is not JSON, such as
the page of a busy proxy."""
CHECK_S = 10.0
LONGEST_WAIT_S = 30.0
_NAME = re.compile(r"\{([A-Za-z_]\w*)\}")


def _check(
    *, url: str = "", model: str = "", template: str = TEMPLATE, system: str | None = None, pattern: str = PATTERN,
    low: float = 0.0, high: float = 10.0, api_key_env: str | None = None, parameters: Mapping[str, Any] | None = None,
    retries: int = 3, request_timeout_s: float = 60.0,
) -> Problem:  # fmt: skip
    problem = _form_problem(url, model, template, pattern, low, high, retries, request_timeout_s)
    if problem is not None:
        return problem
    wrong_key = None if api_key_env is None else problem_of_key(api_key_env)
    if wrong_key is not None:
        return ("api_key_env", *wrong_key)

    async def ask() -> None:
        async with Http(url, _key(api_key_env), timeout_s=CHECK_S) as http:
            await http.call("GET", "/models", reads=False)

    status = 200
    try:
        with ThreadPoolExecutor(max_workers=1) as pool:  # in a notebook, an event loop runs in this thread
            pool.submit(asyncio.run, ask()).result()
    except EngineError as error:
        if "status" not in error.details:
            return "url", f"cannot be used: {error.message}", "start the judge, or correct the address"
        status = error.details["status"]
    if status in (401, 403):
        return (
            "api_key_env",
            f"has no key that the judge accepts (HTTP {status})",
            "name the variable with the right key",
        )
    if status >= 500:
        return "url", f"answers with HTTP {status}", "look at the log of the judge's server"
    return None


def _form_problem(
    url: Any, model: Any, template: Any, pattern: Any, low: Any, high: Any, retries: Any, request_timeout_s: Any
) -> Problem:
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        return "url", "must be an http or https address", "for example http://127.0.0.1:8000/v1"
    if not isinstance(model, str) or not model:
        return "model", "must be the name of a model of the server", "for example judge"
    if not isinstance(template, str) or "response" not in _NAME.findall(template):
        return "template", "must contain {response}", "add it; {prompt} and {COLUMN} are replaced as well"
    try:
        groups = re.compile(pattern).groups
    except (re.error, TypeError) as error:
        return "pattern", f"is not a regular expression: {error}", "correct it"
    if groups < 1:
        return "pattern", "must have a group that matches the number", r"for example Score: (\d+)"
    numbers = all(type(value) in (int, float) for value in (low, high, request_timeout_s))
    if not numbers or not low < high:
        return "high", "must be a number above low", "use 10.0"
    if not request_timeout_s > 0:
        return "request_timeout_s", "must be above 0", "use 60.0"
    if type(retries) is not int or not 0 <= retries <= 100:
        return "retries", "must be a whole number from 0 to 100", "use 3"
    return None


@declare(check=_check)
async def llm_judge(
    prompt: Prompt, trajectory: Trajectory, *, url: str, model: str, template: str = TEMPLATE,
    system: str | None = None, pattern: str = PATTERN, low: float = 0.0, high: float = 10.0,
    api_key_env: str | None = None, parameters: Mapping[str, Any] | None = None, retries: int = 3,
    request_timeout_s: float = 60.0,
) -> float:  # fmt: skip
    """The score of the judge, scaled from `low` .. `high` to 0.0 .. 1.0; scores outside are clamped.

    `url`: the base address of an OpenAI-compatible API. `template`: the message to the judge; `{prompt}`, `{response}`
    and the names of the row's columns are replaced. `system`: a message before it. `parameters`: more fields of the
    request, such as `temperature` (0 by default) and `max_tokens`. An answer without a score counts as a failed try.

    Raises: `DataFailure` that names the judge, after `retries` more tries."""
    values = {**prompt.fields, "prompt": prompt.text, "response": trajectory.text}
    text = _NAME.sub(lambda found: str(values.get(found[1], found[0])), template)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    body = {"model": model, "messages": messages, "temperature": 0.0, **(parameters or {})}
    story = ""
    async with Http(url, _key(api_key_env), timeout_s=request_timeout_s) as http:
        for number in range(retries + 1):
            if number:
                await pause(min(LONGEST_WAIT_S, 0.5 * 2 ** (number - 1)))
            try:
                reply = await http.call("POST", "/chat/completions", body)
            except Unavailable as error:
                story = f"cannot be used: {error.message}"
                continue
            except RefusedRequest as error:
                story = f"cannot be used: {error.message}"
                if error.details["status"] in RETRIED:
                    continue
                break
            answer = _answer(reply)
            score = _score(answer, pattern)
            if score is not None:
                return min(1.0, max(0.0, (score - low) / (high - low)))
            story = f"at {url} gave no score that matches {pattern!r}: {http.without_key(answer or str(reply))!r:.200}"
    raise DataFailure(f"the judge {model} {story}", row=prompt.row)


def _score(answer: str, pattern: str) -> float | None:
    found = re.findall(pattern, answer)
    if not found:
        return None
    last = found[-1]
    try:
        number = float(last[0] if isinstance(last, tuple) else last)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _answer(reply: Any) -> str:
    """The text of the first choice of a chat completion; empty if there is none."""
    try:
        return str(reply["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError):
        return ""


def _key(api_key_env: str | None) -> str:
    return os.environ.get(api_key_env, "") if api_key_env else ""
