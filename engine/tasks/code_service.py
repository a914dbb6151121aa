"""Runs the code of a response in a sandbox service with the API of SandboxFusion, instead of on this machine.

`code_rewards.py` uses it if the argument `sandbox` is set. As on this machine, a verdict never originates in the
program that ran the response: output and results are compared here, and `assert` tests are a program of their own. A
failure of the service must never count as a wrong answer. The API: https://bytedance.github.io/SandboxFusion.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from engine.errors import RewardFailure, message_of
from engine.tasks import code_grading as grading
from engine.tasks import code_roles
from engine.tasks.code_grading import GRACE_S, IMPORTS, CodeLimits, CodeTest
from engine.tasks.code_roles import LONGEST_MESSAGE
from engine.tasks.reward_forms import Problem

PROGRAM = Path(code_roles.__file__).read_text(encoding="utf-8") + "\n\nrun_recorded()\n"
"""What the service runs, unless the tests read output."""


def check_service(url: str) -> Problem | str:
    """Run a program that must pass and one that must fail. For `engine check`."""
    from time import monotonic

    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        return "sandbox", "must be an http or https address", "for example http://sandbox:8080"
    limits = CodeLimits(limit_s=10.0, memory_mb=512, processes=0, deadline=monotonic() + 30.0)
    test = CodeTest(code="assert double(21) == 42")
    try:
        works = [passes_in_service(url, limits, f"def double(a): return a * {by}", test, "") for by in (2, 3)]
    except RewardFailure as failure:
        return "sandbox", f"cannot be used: {failure}", "start the service, or correct the address"
    if works != [True, False]:
        return "sandbox", "cannot be used: a right program did not pass, or a wrong one did", "check the service"
    return f"code runs in the sandbox service at {url}"


def passes_in_service(url: str | None, limits: CodeLimits, code: str, test: CodeTest, impossible: str) -> bool:
    """As `code_grading.passes`. Raises: `RewardFailure` if the service fails; `Unused`."""
    service = _Service(url or "", limits)
    if test.function:
        replies = service.play({"role": "serve", "code": code, "imports": IMPORTS}, [grading.call_of(test)]).get("sent")
        reply = replies[1] if isinstance(replies, list) and len(replies) == 2 else None
        return grading.returns(reply, impossible or test.expected)
    if test.code:
        return _passes_tests(service, code, test, impossible)
    expected = impossible or test.stdout or ""
    output = service.run(code, test.stdin, grading.longest_output(expected))
    return output is not None and grading.same_output(output.encode("utf-8", "surrogatepass"), expected)


def _passes_tests(service: "_Service", code: str, test: CodeTest, impossible: str) -> bool:
    """Run the tests until they call a function whose result is unknown; run the response to get it; repeat."""
    plan = grading.tests_plan(test, impossible)
    if test.same_process:
        return grading.is_pass(service.play(plan | {"code": code}, []).get("verdict"), plan)
    calls: list[Any] = []
    while service.limits.remaining_s:
        replies = service.play({"role": "serve", "code": code, "imports": ""}, calls).get("sent")
        if not isinstance(replies, list) or len(replies) != len(calls) + 1:
            return False
        answer = service.play(plan, replies)
        if "need" not in answer:
            return grading.is_pass(answer.get("verdict"), plan)
        calls.append(answer["need"])
    return False


class _Service:
    def __init__(self, url: str, limits: CodeLimits) -> None:
        self._url, self.limits = f"{url.rstrip('/')}/run_code", limits

    def play(self, plan: dict[str, Any], messages: Sequence[Any]) -> dict[str, Any]:
        """Run one role of `code_roles`. Empty if it gave no answer."""
        output = self.run(PROGRAM, json.dumps({"plan": plan, "messages": list(messages)}), LONGEST_MESSAGE)
        try:
            answer = json.loads((output or "").rstrip().rpartition("\n")[2])
        except (ValueError, RecursionError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def run(self, code: str, stdin: str, longest: int) -> str | None:
        """The output of a program; None if it failed, exceeded a limit or wrote too much."""
        seconds = min(self.limits.limit_s, self.limits.remaining_s)
        if not seconds:
            return None
        body = {
            "code": code, "language": "python", "stdin": stdin, "run_timeout": seconds, "compile_timeout": seconds,
            "memory_limit_MB": self.limits.memory_mb,
        }  # fmt: skip
        head = {"Content-Type": "application/json"}
        request = Request(self._url, json.dumps(body).encode(), head)
        try:
            with urlopen(request, timeout=seconds + GRACE_S) as response:
                data = response.read(8 * longest + 1)
            if len(data) > 8 * longest:
                return None
            answer = json.loads(data)
            status, result = answer["status"], answer.get("run_result") or {}
        except (OSError, URLError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RewardFailure(f"lost the sandbox service at {self._url}: {message_of(error)}") from error
        if status not in ("Success", "Failed"):
            raise RewardFailure(f"lost the sandbox service at {self._url}: {answer.get('message')!r:.200}")
        output = result.get("stdout")
        return output if status == "Success" and isinstance(output, str) and len(output) <= longest else None
