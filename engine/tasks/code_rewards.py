"""The reward `python_tests`: runs the Python code of a response against the tests of its row.

Named in `reward.functions`. Each test runs in its own process, `code_child.py`, with limits on time, memory, processes
and file sizes, in an empty directory, without the environment variables of the run. docs/REWARDS.md says what this
isolates: it stops accidents, not an attacker. Never runs code of a response in this process.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import DataFailure
from engine.tasks.reward_forms import Problem, declare
from engine.tasks.rewards import column_of
from engine.trajectory import NoAnswer, Prompt, Trajectory

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
CHILD = Path(__file__).with_name("code_child.py")
LONGEST_OUTPUT = 1 << 20
"""Maximum bytes of output; a test with more output fails."""
START_S = 10.0
"""Seconds for Python to start, in addition to the time limit of the code."""


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test: what the program reads and must print, or code to run after it."""

    stdin: str = ""
    stdout: str | None = None
    code: str = ""
    imports: str = ""
    """Imports that run before the program, so that it may use their names."""


IMPORTS = """
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
from bisect import *; from collections import *; from functools import *; from heapq import *
from itertools import *; from math import *; from builtins import *; from typing import *
"""
"""Imports for programs with a function to call. Their prompts often show only a signature, such as `List[int]`."""
CALL = """
def engine_test():
    import json

    arguments, expected = json.loads({given})
    name = {name!r}
    owner = globals().get("Solution")
    function = getattr(owner(), name) if hasattr(owner, name) else globals()[name]
    result = json.loads(json.dumps(function(*arguments)))
    assert result == expected or [result] == expected


engine_test()
"""
"""The code of a test that calls a function. The conversion to JSON turns tuples into lists, and keeps an object that
claims to equal everything from passing."""


def _check(
    *, tests: str = "tests", limit_s: float = 5.0, memory_mb: int = 512, processes: int = 0, share: bool = False,
    most: int = 100,
) -> Problem:  # fmt: skip
    if type(limit_s) not in (int, float) or not 0 < limit_s <= 3600:
        return "limit_s", "must be a number of seconds above 0, 3600 at most", "use 5.0"
    if type(memory_mb) is not int or not 32 <= memory_mb <= 1 << 20:
        return "memory_mb", "must be a whole number of MiB from 32", "use 512"
    for name, value, least in (("processes", processes, 0), ("most", most, 1)):
        if type(value) is not int or not least <= value <= 10_000:
            return name, f"must be a whole number from {least} to 10000", f"use {least}"
    return None


@declare(check=_check)
def python_tests(
    prompt: Prompt, trajectory: Trajectory, *, tests: str = "tests", limit_s: float = 5.0, memory_mb: int = 512,
    processes: int = 0, share: bool = False, most: int = 100,
) -> float:  # fmt: skip
    """1.0 if the code passes every test of the column `tests`; with `share`, the share of tests that it passes.

    The code is the last block between ``` lines, else the whole response. Limits of each test: `limit_s` seconds,
    `memory_mb` MiB, `processes` further processes or threads. At most `most` tests are run.

    Raises: `DataFailure` if the row has no tests, or none that can be run."""
    found = code_tests(prompt, tests)[:most]
    blocks = _BLOCK.findall(trajectory.text)
    code = blocks[-1] if blocks else trajectory.text
    passed = 0
    for test in found:
        if passes(code, test, limit_s=limit_s, memory_mb=memory_mb, processes=processes):
            passed += 1
        elif not share:
            passed = 0
            break
    if not blocks and not passed:
        return NoAnswer()  # there is no code block, and the response as a whole passes no test
    return passed / len(found)


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
    return [test for test in found if test is not None]


def _test_of(given: Any) -> CodeTest | None:
    if isinstance(given, str) and given.strip():
        return CodeTest(code=given)
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
        given = json.dumps(json.dumps([arguments, expected]))
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(name, str) or not name.isidentifier() or not isinstance(arguments, list):
        return None
    return CodeTest(code=CALL.format(given=given, name=name), imports=IMPORTS)


def _text(given: str | Sequence[Any]) -> str:
    return given if isinstance(given, str) else "\n".join(map(str, given))


def passes(code: str, test: CodeTest, *, limit_s: float, memory_mb: int, processes: int) -> bool:
    """Whether the code passes a test within the limits."""
    with tempfile.TemporaryDirectory(prefix="engine-code-", ignore_cleanup_errors=True) as folder:
        # Only the end of the test writes the sign, so an early exit does not pass. The code runs in the same process,
        # so code that looks for the sign there can find it: this stops accidents, not an attacker.
        sign = secrets.token_hex(16)
        plan = {
            "code": code, "test": test.code, "imports": test.imports, "sign": sign, "limit_s": limit_s,
            "memory_bytes": memory_mb << 20, "processes": processes, "folder": folder, "stdin": test.stdin,
        }  # fmt: skip
        output, verdict = _run(json.dumps(plan).encode("utf-8", "surrogatepass"), folder, limit_s)
    if verdict != sign:
        return False
    return test.stdout is None or _same(output, test.stdout)


def _run(plan: bytes, folder: str, limit_s: float) -> tuple[str, str]:
    """The output of the process, and the sign that it writes if the test has passed; empty otherwise."""
    reading, writing = os.pipe()
    environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    with open(reading, "rb") as verdict, tempfile.TemporaryFile() as printed:
        with open(writing, "wb") as end:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(CHILD), str(end.fileno())],
                stdin=subprocess.PIPE, stdout=printed, stderr=subprocess.DEVNULL, cwd=folder, env=environment,
                start_new_session=True, pass_fds=(end.fileno(),),
            )  # fmt: skip
        try:
            process.communicate(plan, timeout=limit_s + START_S)
            os.set_blocking(verdict.fileno(), False)  # a process that the code started may hold the other end
            sign = (verdict.read() or b"").decode("ascii", "replace")
            printed.seek(0)
            output = printed.read(LONGEST_OUTPUT + 1)
            return ("", "") if len(output) > LONGEST_OUTPUT else (output.decode("utf-8", "replace"), sign)
        except subprocess.TimeoutExpired:
            return "", ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _same(output: str, expected: str) -> bool:
    """Whether both are equal, except for white space at the ends of lines and empty lines at the end."""
    lines, others = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    return lines == others
