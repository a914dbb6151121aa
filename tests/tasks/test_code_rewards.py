"""The reward that runs code: what passes, how tests are written, and what a program may not do."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import DataFailure
from engine.tasks.code_rewards import CodeTest, code_tests, passes, python_tests
from engine.trajectory import NoAnswer, Prompt, Trajectory

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
WRONG = ADD.replace("a + b", "a - b")
ECHO = "```\nprint(int(input()) * 2)\n```"


def score(response: str, tests: Any, **arguments: Any) -> float:
    prompt = Prompt(row=3, text="?", fields={"tests": tests})
    return python_tests(prompt, Trajectory(text=response), **arguments)


@pytest.mark.parametrize(
    ("response", "tests", "value"),
    [
        (ADD, "assert add(1, 2) == 3", 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], 1.0),
        (WRONG, ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], 0.0),
        (ECHO, [{"input": "4\n", "output": "8\n"}, {"stdin": "0", "stdout": "0"}], 1.0),
        (ECHO, {"inputs": ["4"], "outputs": ["9"]}, 0.0),
        (ECHO, '{"inputs": ["4"], "outputs": ["8"]}', 1.0),
        ("def add(a, b): return a + b", "assert add(1, 2) == 3", 1.0),
        ("no code", "assert True", 0.0),
    ],
)
def test_code_is_worth_something_if_its_tests_pass(response: str, tests: Any, value: float) -> None:
    assert score(response, tests) == value


def test_a_response_without_code_is_told_from_wrong_code() -> None:
    assert isinstance(score("no code", "assert True"), NoAnswer)
    assert not isinstance(score(WRONG, "assert add(1, 2) == 3"), NoAnswer)


SOLUTION = "```python\nclass Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        return a + b\n```"
PAIR = "def pair(a): return (a, [a])"
"""As APPS writes tests of a function, and as LiveCodeBench does: one argument in each line."""
APPS = {"fn_name": "add", "inputs": [[1, 2], [0, 0]], "outputs": [[3], 0]}
LIVE = {"fn_name": "add", "inputs": ["[1]\n[2]"], "outputs": ["[1, 2]"]}


@pytest.mark.parametrize(
    ("response", "tests", "value"),
    [
        (ADD, APPS, 1.0),
        (ADD, APPS | {"outputs": [[3], 1]}, 0.0),
        (ADD, json.dumps(LIVE), 1.0),
        (SOLUTION, APPS, 1.0),
        (SOLUTION, LIVE, 1.0),
        (WRONG, APPS, 0.0),
        (PAIR, {"fn_name": "pair", "inputs": [["x"]], "outputs": [["x", ["x"]]]}, 1.0),
        (PAIR, [{"fn_name": "pair", "input": ["x"], "output": ["x", ["x"]]}], 1.0),
        ("def say(): return 'a'", {"fn_name": "say", "inputs": [[], ""], "outputs": [["a"], '"a"']}, 1.0),
        ("class All:\n def __eq__(self, other): return True\ndef add(a, b): return All()", APPS, 0.0),
        ("def sub(a, b): return 3", APPS, 0.0),
    ],
)
def test_a_function_may_be_called_with_arguments(response: str, tests: Any, value: float) -> None:
    assert score(response, tests) == value


def test_the_language_of_a_block_may_be_in_capitals() -> None:
    assert score(ADD.replace("```python", "```Python"), "assert add(1, 2) == 3") == 1.0


def test_a_share_of_the_tests_can_count() -> None:
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
    assert score(WRONG, tests, share=True) == 0.5 and score(WRONG, tests, share=True, most=1) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        [],
        [4],
        {"inputs": ["1"], "outputs": []},
        {"input": "1"},
        APPS | {"fn_name": "a b"},
        LIVE | {"inputs": ["one"]},
        [{"input": "1", "output": "1", "testtype": "functional"}],
    ],
)
def test_a_row_without_tests_is_named(tests: Any) -> None:
    with pytest.raises(DataFailure, match="the column 'tests' of row 3 has no tests: it must be code with `assert`"):
        score(ADD, tests)


FORBIDDEN = {
    "run for ever": "while True: pass",
    "take all memory": "kept = bytearray(1 << 30)",
    "start processes": "import os\nos.fork()",
    "start threads": "import threading\nthreading.Thread(target=print).start()",
    "reach the network": "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=1)\n",
    "end before its test": "import sys\nsys.exit(0)",
    "end before its test at once": "import os\nos._exit(0)",
    "write large files": "open('large', 'wb').write(bytes(1 << 26))",
    "read keys": "import os\nassert os.environ['HOME'] != os.path.expanduser('~root')\nos.environ['ENGINE_SECRET']",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_program_cannot(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_SECRET", "of the run")
    test = CodeTest(code="assert True")
    limits = {"limit_s": 0.5 if what == "run for ever" else 20.0, "memory_mb": 256, "processes": 0}
    assert not passes(FORBIDDEN[what], test, **limits)
    assert passes("pass", test, **limits | {"limit_s": 20.0})


def test_output_has_an_end() -> None:
    assert not passes("print('x' * (1 << 21))", CodeTest(stdout="x"), limit_s=20.0, memory_mb=256, processes=0)
    assert passes("print(len(input()))", CodeTest("x" * 100_000, "100000"), limit_s=20.0, memory_mb=256, processes=0)


def test_processes_may_be_allowed(tmp_path: Path) -> None:
    code = "import threading\nthread = threading.Thread(target=print)\nthread.start()\nthread.join()"
    assert passes(code, CodeTest(code="pass"), limit_s=20.0, memory_mb=512, processes=8)


def test_tests_are_read_in_order() -> None:
    prompt = Prompt(row=0, text="", fields={"tests": [{"input": ["1", "2"], "output": "3"}, "assert f()"]})
    assert code_tests(prompt, "tests") == [CodeTest("1\n2", "3"), CodeTest(code="assert f()")]
