"""The reward `python_tests`: runs the Python code of a response against the tests of its row.

Named in `reward.functions`. `code_grading.py` runs the tests in processes that are isolated as far as the kernel
allows (docs/REWARDS.md). Never runs code of a response in this process.
"""

import ast
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from time import monotonic
from typing import Any
from zlib import crc32

from engine.errors import DataFailure, RewardFailure
from engine.tasks.code_grading import WARM, CodeLimits, CodeTest, Rooms, Unused, fix_of, passes
from engine.tasks.code_isolation import LEVELS
from engine.tasks.code_service import check_service, passes_in_service
from engine.tasks.extraction import last_python
from engine.tasks.reward_forms import Problem, declare
from engine.tasks.rewards import column_of
from engine.trajectory import NoAnswer, Prompt, Scored, Trajectory

log = logging.getLogger(__name__)

ISOLATION = {"required": LEVELS[:2], "best_effort": LEVELS}
"""The levels that each value of the argument `isolation` allows."""
START_S = 10.0
"""Seconds in which processes must have started, and a test of `engine check` must have ended."""
SHARE_OF_TIME = 0.8
"""The share of the time limit of a call that its tests may take together."""
IMPOSSIBLE_EVERY = 16
"""One in this many of the responses that pass also gets a test that no response can pass."""
EVALUATING = {
    "eval", "exec", "compile", "__import__", "pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "runpy",
    "importlib", "ctypes", "subprocess", "system", "popen", "read_pickle",
}  # fmt: skip
"""Names of functions and modules with which a test may run what the response returns."""
Passes = Callable[[str, CodeTest, str], bool]
"""(code, test, text that makes the test impossible) -> whether the code passes."""


def _check(
    *, tests: str = "tests", limit_s: float = 5.0, memory_mb: int = 512, processes: int = 0, share: bool = False,
    most: int = 100, same_process: bool = False, isolation: str = "required", sandbox: str | None = None,
    timeout_s: float = 30.0,
) -> Problem | str:  # fmt: skip
    if type(limit_s) not in (int, float) or not 0 < limit_s <= 3600:
        return "limit_s", "must be a number of seconds above 0, 3600 at most", "use 5.0"
    if type(memory_mb) is not int or not 32 <= memory_mb <= 1 << 20:
        return "memory_mb", "must be a whole number of MiB from 32", "use 512"
    for name, value, least in (("processes", processes, 0), ("most", most, 1)):
        if type(value) is not int or not least <= value <= 10_000:
            return name, f"must be a whole number from {least} to 10000", f"use {least}"
    if isolation not in ISOLATION:
        return "isolation", f"must be {' or '.join(ISOLATION)}", "use required"
    if sandbox is not None:
        return check_service(sandbox)
    return _check_isolation(isolation)


def _check_isolation(isolation: str) -> Problem | str:
    """Run a program that must pass and one that must fail: the level of isolation for `engine check`, or a problem."""
    limits = CodeLimits(limit_s=START_S, memory_mb=512, processes=0, deadline=monotonic() + 3 * START_S)
    try:
        with Rooms(limits) as rooms:
            level, missing = rooms.levels[0], "; ".join(rooms.missing)
            test = CodeTest(code="assert double(21) == 42")
            works = [passes(rooms, f"def double(a): return a * {factor}", test) for factor in (2, 3)] == [True, False]
    except RewardFailure as failure:
        return "isolation", f"cannot be reached: it {failure}", fix_of("")
    if not works:
        law = f"cannot be reached: at the level {level}, a right program did not pass, or a wrong one did"
        return "isolation", law, fix_of(missing)
    if level not in ISOLATION[isolation]:
        wanted = " or ".join(ISOLATION[isolation])
        law = f"needs the level {wanted}, but this machine has only {level}. Missing: {missing}"
        return "isolation", law, fix_of(missing)
    return f"isolation of code: {level}" + (f". Missing: {missing}" if missing else "")


@declare(check=_check, time_limit="timeout_s")
def python_tests(
    prompt: Prompt, trajectory: Trajectory, *, tests: str = "tests", limit_s: float = 5.0, memory_mb: int = 512,
    processes: int = 0, share: bool = False, most: int = 100, same_process: bool = False, isolation: str = "required",
    sandbox: str | None = None, timeout_s: float = 30.0,
) -> float:  # fmt: skip
    """1.0 if the code passes every test of the column `tests`; with `share`, the share of tests that it passes.

    The code is the last code block, else the whole response. Limits of each test: `limit_s` seconds,
    `memory_mb` MiB, `processes` further processes or threads. At most `most` tests are run, and those that have not
    ended after most of `timeout_s` have failed. `same_process`: run `assert` tests in the process of the response.
    `sandbox`: the address of a service that runs all code.

    Raises: `DataFailure` if the row has no tests, or one that passes without a response; `RewardFailure` if the code
    cannot be isolated as `isolation` asks for."""
    found = [replace(test, same_process=True) if same_process else test for test in code_tests(prompt, tests)[:most]]
    limits = CodeLimits(
        limit_s=limit_s, memory_mb=memory_mb, processes=processes, deadline=monotonic() + SHARE_OF_TIME * timeout_s,
        levels=ISOLATION[isolation],
    )  # fmt: skip
    block = last_python(trajectory.text)
    code = trajectory.text if block is None else block
    unsafe = [test.same_process or _evaluates(test.code) for test in found if test.code]
    together = all(test.same_process for test in found if test.code)
    with ExitStack() as stack:
        judge: Passes = partial(passes_in_service, sandbox, limits)
        if sandbox is None:
            warm = WARM if any(test.function for test in found) else ()
            judge = partial(passes, stack.enter_context(Rooms(limits, 1 if together else 2, warm)))
        passed = _passed(judge, code, found, share, prompt)
        if block is None and not passed:
            _passed(judge, "", found, False, prompt)  # a row whose tests pass without any code is refused
            return NoAnswer()
        figures = {"unsafe": sum(unsafe) / len(unsafe)} if unsafe else {}
        if passed == len(found) and crc32(code.encode("utf-8", "replace")) % IMPOSSIBLE_EVERY == 0:
            figures["forged"] = float(judge(code, found[0], secrets.token_hex(16)))
    if figures.get("forged"):
        log.warning("row %d: a response passed a test that no program can pass: it forged its verdict", prompt.row)
        return Scored(0.0, figures)
    return Scored(passed / len(found), figures)


def _passed(judge: Passes, code: str, tests: Sequence[CodeTest], share: bool, prompt: Prompt) -> int:
    """The number of tests that pass; without `share`, 0 unless all do. Raises: `DataFailure`."""
    passed = 0
    for test in tests:
        try:
            if judge(code, test, ""):
                passed += 1
            elif not share:
                return 0
        except Unused:
            law = (
                f"row {prompt.row} has a test that passes without a response: it calls no function of the response and "
                f"reads no value of it. If it does, name them in `names`. The test: {test.code.strip()!r:.200}"
            )
            raise DataFailure(law, row=prompt.row) from None
    return passed


def code_tests(prompt: Prompt, column: str) -> list[CodeTest]:
    """The tests of a row: code, a list of code, or inputs with outputs, each of them also as JSON text. With `fn_name`,
    the inputs are arguments of that function."""
    given = column_of(prompt, column)
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):
            given = json.loads(given)
    if isinstance(given, Mapping) and {"inputs", "outputs"} <= set(given):
        inputs, outputs = given["inputs"], given["outputs"]
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
            named = {"fn_name": given["fn_name"]} if given.get("fn_name") else {}
            given = [{"input": one, "output": other} | named for one, other in zip(inputs, outputs, strict=True)]
    listed = given if isinstance(given, list | tuple) else [given]
    found = [_test_of(one) for one in listed]
    if not found or None in found:
        law = (
            f"the column {column!r} of row {prompt.row} has no tests: it must be code with `assert`, a list of such "
            "code, or a list of mappings with `input` and `output`, and with `fn_name` if these are the arguments and "
            "the result of a function"
        )
        raise DataFailure(law, row=prompt.row)
    if not any(test is not None and (test.function or test.code or (test.stdout or "").strip()) for test in found):
        raise DataFailure(f"row {prompt.row} expects no output in any test, so an empty program passes", row=prompt.row)
    return [test for test in found if test is not None]


@lru_cache(1 << 12)
def _evaluates(code: str) -> bool:
    """Whether a test may run what a response returns. Raises: `SyntaxError` and others if it is not Python."""
    nodes = list(ast.walk(ast.parse(code)))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)} - {"compile"}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    names |= {name for node in imports for name in (getattr(node, "module", ""), *(one.name for one in node.names))}
    if EVALUATING & names:
        _warn_once("some tests evaluate or unpickle what a response returns, which can then forge its verdict")
    return bool(EVALUATING & names)


_warn_once = cache(log.warning)


def _test_of(given: Any) -> CodeTest | None:
    if isinstance(given, str) and given.strip():
        given = {"code": given}
    if isinstance(given, Mapping) and isinstance(given.get("code"), str) and given["code"].strip():
        names = given.get("names") or ()
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            return None
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            _evaluates(given["code"])
            return CodeTest(code=given["code"], names=tuple(names), same_process=given.get("same_process") is True)
        return None
    if isinstance(given, Mapping) and given.get("fn_name"):
        return _call_test(given["fn_name"], given.get("input"), given.get("output"))
    if isinstance(given, Mapping) and given.get("testtype") != "functional":
        stdin = given.get("input", given.get("stdin", ""))
        stdout = given.get("output", given.get("stdout"))
        if isinstance(stdout, str | list) and isinstance(stdin, str | list):
            return CodeTest(stdin=_text(stdin), stdout=_text(stdout))
    return None


def _call_test(name: Any, arguments: Any, expected: Any) -> CodeTest | None:
    """A call of a function. The arguments are a list, or JSON with one argument in each line (LiveCodeBench). The
    result may be in a list of its own (APPS)."""
    try:
        if isinstance(arguments, str):
            arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        arguments, expected = json.loads(json.dumps([arguments, expected]))
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(name, str) or not name.isidentifier() or not isinstance(arguments, list):
        return None
    return CodeTest(function=name, arguments=arguments, expected=expected)


def _text(given: str | Sequence[Any]) -> str:
    return given if isinstance(given, str) else "\n".join(map(str, given))
