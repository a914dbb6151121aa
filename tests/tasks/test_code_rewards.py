"""The reward that runs code: what passes, how tests are written, and what a program may not do."""

import json
import re
from time import monotonic
from typing import Any
from zlib import crc32

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.config.reward import NamedReward, RewardSection
from engine.config.reward_functions import reward_of_section
from engine.errors import DataFailure
from engine.tasks import code_rewards
from engine.tasks.code_grading import CodeLimits, CodeTest, Rooms, passes
from engine.tasks.code_rewards import IMPOSSIBLE_EVERY, code_tests, python_tests
from engine.tasks.extraction import last_python
from engine.trajectory import NoAnswer, Prompt, Scored, Trajectory

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
WRONG = ADD.replace("a + b", "a - b")
ECHO = "```\nprint(int(input()) * 2)\n```"


def score(response: str, tests: Any, **arguments: Any) -> float:
    return python_tests(prompt_with(tests), Trajectory(text=response), **arguments)


@pytest.mark.parametrize(
    ("response", "tests", "value"),
    [
        (ADD, "assert add(1, 2) == 3", 1.0),
        (ADD.replace("python", "Python"), "assert add(1, 2) == 3", 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], 1.0),
        (WRONG, ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], 0.0),
        (ECHO, [{"input": "4\n", "output": "8\n"}, {"stdin": "0", "stdout": "0"}], 1.0),
        (ECHO, {"inputs": ["4"], "outputs": ["9"]}, 0.0),
        (ECHO, '{"inputs": ["4"], "outputs": ["8"]}', 1.0),
        ("def add(a, b): return a + b", "assert add(1, 2) == 3", 1.0),
        ("no code", "assert add(1, 2) == 3", 0.0),
    ],
)
def test_code_is_worth_something_if_its_tests_pass(response: str, tests: Any, value: float) -> None:
    assert score(response, tests) == value


def test_a_response_without_code_is_distinguished_from_wrong_code() -> None:
    assert isinstance(score("no code", "assert add(1, 2) == 3"), NoAnswer)
    assert not isinstance(score(WRONG, "assert add(1, 2) == 3"), NoAnswer)


FENCED = [
    ("```py\nx\n```", "x"),
    ("```python\r\nx\r\n```\r\n", "x\r"),
    ("~~~python\nx\n~~~", "x"),
    ("```{.python title='a'}\nx\n```", "x"),
    ("So: ```python\nx\n```", "x"),
    ("```python\nx```\nDone.", "x"),
    ("```python\nx", "x"),
    ('```python\nx = "```"\ny\n```', 'x = "```"\ny'),
    ('```python\ndef f():\n    """\n    ```\n    """\n```', 'def f():\n    """\n    ```\n    """'),
    ("````python\n```\nx\n````", "```\nx"),
    ("1. so\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
    ("```cpp\nx\n```\n```python\ny\n```", "y"),
    ("```python\nx\n```\nIt prints\n```\n8\n```", "x"),
    ("```\nx\n```\nand\n```\ny\n```", "y"),
    ("```text\nx\n```", None),
    ("x", None),
]


@pytest.mark.parametrize(("response", "code"), FENCED)
def test_the_code_of_a_response_is_its_last_block_of_python(response: str, code: str | None) -> None:
    found = last_python(response)
    assert (found and found.removesuffix("\n")) == code


@pytest.mark.parametrize(
    "line", ["~" * 50_000 + "`", "~~~" + " " * 50_000 + "`", "`" * 50_000 + "x`"], ids=["tildes", "spaces", "quotes"]
)
def test_a_long_line_of_marks_does_not_hold_the_process(line: str) -> None:
    assert last_python(f"{line}\n```python\nx\n```\n{line}") == "x\n"


@given(st.text("ab'\"\\n \t#"), st.text("ab`\n "), st.sampled_from(["```", "````", "~~~"]))
def test_code_between_fences_is_found_whatever_stands_around_it(code: str, before: str, fence: str) -> None:
    assume(not re.search("`{3}", before))
    assert last_python(f"{before}\n{fence}python\n{code}\n{fence}\n{before}") == f"{code}\n"


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


def test_tests_that_need_classes_may_share_the_process() -> None:
    stack = "class Stack(list):\n    def push(self, x): self.append(x)"
    test = "s = Stack()\ns.push(1)\nassert s.pop() == 1"
    assert score(stack, test) == 0.0
    together = python_tests(prompt_with(test), Trajectory(text=stack), same_process=True)
    assert isinstance(together, Scored) and (together, together.figures["unsafe"]) == (1.0, 1.0)
    half = score(stack + "\ndef one(): return 1", ["assert one() == 1", {"code": test, "same_process": True}])
    assert isinstance(half, Scored) and (half, half.figures["unsafe"]) == (1.0, 0.5)


VALUES = """
def values():
    import collections, itertools
    yield from [None, True, 1, -2.5, float("inf"), 2**200, "\\udcff", b"x", 1j, (1, [2]), {3}, frozenset([4])]
    yield from [{"a": {5: (6,)}}, range(3), collections.Counter("aa"), collections.OrderedDict(a=1)]
def fails(): raise KeyError("k")
ANSWER = {"x": [1]}
def add(a, *, b=(1,)): return [a, b]
"""


def test_plain_values_cross_between_code_and_its_tests() -> None:
    same = """
import collections, itertools
wanted = [None, True, 1, -2.5, float("inf"), 2**200, "\\udcff", b"x", 1j, (1, [2]), {3}, frozenset([4])]
wanted += [{"a": {5: (6,)}}, range(3), {"a": 2}, {"a": 1}]
found = list(values())
assert found == wanted and [type(one) for one in found] == [type(one) for one in wanted]
assert add({1: 2}, b=(3,)) == [{1: 2}, (3,)] and ANSWER == {"x": [1]}
try:
    fails()
except KeyError:
    pass
else:
    assert False
"""
    assert score(VALUES, same) == 1.0


def test_one_deadline_holds_for_all_tests_of_a_response() -> None:
    """A hundred tests that hang for an hour each."""
    tests = {"inputs": ["0", *["1"] * 99], "outputs": ["0"] * 100}
    code = "n = int(input())\nwhile n: pass\nprint(n)"
    arguments = {"share": True, "limit_s": 3600.0}
    part = NamedReward(name="code", function="engine.tasks.code_rewards:python_tests", arguments=arguments)
    reward = reward_of_section(RewardSection(functions=[part], timeout_s=2.5), None)
    assert reward is not None
    assert reward.parts[0].function(prompt_with(tests), Trajectory(text=code)) == 0.01


def prompt_with(tests: Any) -> Prompt:
    return Prompt(row=3, text="?", fields={"tests": tests})


def with_checksum(code: str) -> str:
    """The code with a comment that makes it one of the responses that get an impossible test."""
    return next(f"{code}\n# {n}" for n in range(9999) if not crc32(f"{code}\n# {n}".encode()) % IMPOSSIBLE_EVERY)


FORGED = "class E:\n def __eq__(self, other): return True\ndef add(a, b): return E()"


@pytest.mark.parametrize(
    ("code", "tests", "value"),
    [
        (FORGED, {"code": "assert add(1, 2) == 3", "same_process": True}, (0.0, 1.0)),
        ("def add(a, b): return a + b", "assert add(1, 2) == 3", (1.0, 0.0)),
        ("def add(a, b): return a + b", APPS, (1.0, 0.0)),
        ("def add(a, b): return a + b", {"code": "assert add(1, 2)", "same_process": True}, (1.0, 0.0)),
        ("print(int(input()) * 2)", {"inputs": ["4"], "outputs": ["8"]}, (1.0, 0.0)),
    ],
)
def test_a_pass_of_an_impossible_test_is_a_forgery(
    code: str, tests: Any, value: tuple[float, float], caplog: pytest.LogCaptureFixture
) -> None:
    found = score(with_checksum(code), tests)
    assert isinstance(found, Scored) and (found, found.figures["forged"]) == value
    assert ("it forged its verdict" in caplog.text) == bool(value[1])


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
        {"code": "assert add(1, 2) == 3", "names": "add"},
        APPS | {"fn_name": "a b"},
        LIVE | {"inputs": ["one"]},
        [{"input": "1", "output": "1", "testtype": "functional"}],
        "assert add(1, 2) = 3",
    ],
)
def test_a_row_without_tests_is_named(tests: Any) -> None:
    with pytest.raises(DataFailure, match="the column 'tests' of row 3 has no tests: it must be code with `assert`"):
        score(ADD, tests)


WITHOUT_CODE = {
    "asks nothing": "assert list(reversed('ab')) == ['b', 'a']",
    "asks Python only": "import math\nassert math.sqrt(4) == 2",
    "is never called": "def check(candidate): assert candidate(1, 2) == 3",
    "only looks": "from solution import add",
    "forgives": "try: assert sub(1, 2) == 3\nexcept Exception: pass",
    "shares the process": {"code": "assert True", "same_process": True},
    "expects nothing": {"input": "1", "output": "\n"},
}


@pytest.mark.parametrize("what", WITHOUT_CODE)
def test_a_test_that_passes_without_code_is_refused(what: str) -> None:
    for response in (ADD, "no code") if what != "only looks" else (ADD,):
        with pytest.raises(DataFailure, match=r"row 3 .*(passes without a response|an empty program passes)"):
            score(response, WITHOUT_CODE[what])


def test_tests_that_evaluate_an_answer_are_named(caplog: pytest.LogCaptureFixture) -> None:
    code_rewards._warn_once.cache_clear()
    found = score("def f(): return '3'", ["assert eval(f()) == 3", "assert f() == '3'"])
    assert isinstance(found, Scored) and (found, found.figures["unsafe"]) == (1.0, 0.5)
    assert caplog.text.count("some tests evaluate or unpickle what a response returns") == 1


def test_output_is_compared_by_bytes_and_lines() -> None:
    assert score("print('a \\u2028b\\r')", {"input": "", "output": "a \u2028b\n\n"}) == 1.0
    assert score("print('a\\u2028b')", {"input": "", "output": "a\nb"}) == 0.0
    assert score("import os\nos.write(1, b'\\xff')", {"input": "", "output": "\ufffd"}) == 0.0


FORBIDDEN = {
    "run for ever": "while True: pass",
    "take all memory": "kept = bytearray(1 << 30)",
    "start processes": "import os\nos.fork()",
    "start threads": "import _thread\n_thread.start_new_thread(print, ())",
    "write large files": "open('large', 'wb').write(bytes(1 << 26))",
    "read keys": "import os\nassert os.environ['HOME'] != os.path.expanduser('~root')\nos.environ['ENGINE_SECRET']",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_program_cannot(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_SECRET", "of the run")
    test = CodeTest(code="assert one == 1")
    with rooms(limit_s=0.5 if what == "run for ever" else 20.0) as opened:
        assert not passes(opened, FORBIDDEN[what] + "\none = 1", test)
        assert passes(opened, "one = 1", test)


def rooms(processes: int = 0, memory_mb: int = 256, limit_s: float = 20.0) -> Rooms:
    deadline = monotonic() + 60.0
    return Rooms(CodeLimits(limit_s=limit_s, memory_mb=memory_mb, processes=processes, deadline=deadline))


def test_output_has_an_end() -> None:
    with rooms() as opened:
        assert not passes(opened, "print('x' * (1 << 21))", CodeTest(stdout="x"))
        assert passes(opened, "print(len(input()))", CodeTest("x" * 100_000, "100000"))


def test_processes_may_be_allowed() -> None:
    code = (
        "import _thread, threading\nend = threading.Event()\n_thread.start_new_thread(end.set, ())\nend.wait()\none = 1"
    )
    with rooms(processes=8, memory_mb=512) as opened:
        assert passes(opened, code, CodeTest(code="assert one == 1"))


def test_tests_are_read_in_order() -> None:
    prompt = Prompt(row=0, text="", fields={"tests": [{"input": ["1", "2"], "output": "3"}, "assert f()"]})
    assert code_tests(prompt, "tests") == [CodeTest("1\n2", "3"), CodeTest(code="assert f()")]


def test_a_process_group_is_killed_while_its_number_is_its_own(kills: list[int]) -> None:
    assert score(ADD, "assert add(1, 2) == 3") == 1.0 and len(kills) == 1
