"""The reward `math_verify`: compares mathematical answers by their value with the package math-verify.

Named in `reward.functions`. The package limits its time with a signal, which only the main thread of a process
receives. Therefore the function runs in a separate process.
"""

import threading
from functools import lru_cache
from typing import Any

from engine.errors import DataFailure
from engine.extras import install_command
from engine.tasks.reward_forms import Problem, declare
from engine.tasks.rewards import column_of
from engine.trajectory import NoAnswer, Prompt, Trajectory


def _check(*, answer: str = "answer", limit_s: int = 5) -> Problem:
    try:
        _package()
    except ImportError:
        return "function", "needs the package math-verify, which is not installed", install_command("rewards")
    if type(limit_s) is not int or not 1 <= limit_s <= 3600:
        return "limit_s", "must be a whole number of seconds from 1 to 3600", "use 5"
    return None


@declare(processes=1, check=_check)
def math_verify(prompt: Prompt, trajectory: Trajectory, *, answer: str = "answer", limit_s: int = 5) -> float:
    r"""1.0 if the last answer in the response, in `\boxed{}`, LaTeX or as a number, equals that of the column
    `answer`. `limit_s`: seconds to read an expression, and to compare two.

    Raises: `DataFailure` if the column has no expression."""
    package = _package()
    seconds = limit_s if threading.current_thread() is threading.main_thread() else None
    right = str(column_of(prompt, answer))
    expected = _parse(package, right, seconds)
    if not expected:
        law = f"the column {answer!r} of row {prompt.row} has no mathematical expression: {right!r:.80}"
        raise DataFailure(law, row=prompt.row)
    given = package.parse(trajectory.text, parsing_timeout=seconds)
    return float(package.verify(expected, given, timeout_seconds=seconds)) if given else NoAnswer()


def _parse(package: Any, right: str, seconds: int | None) -> Any:
    """The parsed answer of a row. A bare expression such as `\\frac12` is read as LaTeX."""
    found = package.parse(right, parsing_timeout=seconds)
    return found or package.parse(f"${right}$", parsing_timeout=seconds)


@lru_cache
def _package() -> Any:
    import math_verify

    return math_verify
