"""The quickstart task: the remainder of a division, worked out by repeated subtraction.

`38-7=` asks for 38 mod 7, and the worked solution continues with `31-7=24-7=17-7=10-7=3`. Numbers have three digits,
and the last digit is written first, as in subtraction by hand: `830-7=` is answered by `130-7=420-7=710-7=010-7=300`.
Every step is local, a response is right only when all are, and the number of steps is drawn from a long-tailed
distribution, so that a few responses are very long, as with real reasoning.

Used by `tasks.quickstart` to make data and by runs as `engine.tasks.arithmetic:reward`. Never draws from global random
state; never gives a held-out question for training.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from pydantic import Field

from engine.section import Section
from engine.trajectory import Prompt, Trajectory

ALPHABET = "0123456789-="
"""Every character of a prompt or a response."""

HELD_OUT_SHARE = 3
"""One question in this many is kept for validation. The share is large because there are few questions with each number
of steps, and rows are drawn unevenly."""

STEP_TOKENS = 6
"""A step has a number, the next subtraction and `=`; the last step has a number and the end token."""


def written(number: int) -> str:
    """Three digits, the last digit first."""
    return f"{number:03d}"[::-1]


class Question(NamedTuple):
    """What is `dividend` mod `divisor`?"""

    divisor: int
    dividend: int

    @property
    def steps(self) -> int:
        """Subtractions that the worked solution takes."""
        return self.dividend // self.divisor

    @property
    def prompt(self) -> str:
        return f"{written(self.dividend)}-{self.divisor}="

    @property
    def solution(self) -> str:
        """What is left after each subtraction; the last number is the remainder."""
        return self.careless_solution(0.0, random.Random(0))

    def careless_solution(self, carelessness: float, draws: random.Random) -> str:
        """A worked solution in which a step across a ten comes out one too small, this often (0 to 1)."""
        left, numbers = self.dividend, []
        while left >= self.divisor:
            across_ten = left % 10 < self.divisor
            left -= self.divisor
            if across_ten and draws.random() < carelessness:
                left -= 1
            numbers.append(written(left))
        return f"-{self.divisor}=".join(numbers)

    @property
    def answer(self) -> int:
        return self.dividend % self.divisor

    def row(self) -> dict[str, Any]:
        """The question as a row of a data set."""
        return {"prompt": self.prompt, "answer": str(self.answer), "steps": self.steps}


class Division(Section):
    """A family of questions. The number of steps is log-normal: p99 / median = exp(2.33 * spread), 5.7 by default."""

    largest_divisor: int = Field(9, ge=2, le=9, description="Largest divisor in a question, a single digit.")
    median_steps: float = Field(4.0, ge=1, le=24, description="Median number of subtractions that an answer takes.")
    spread: float = Field(
        0.75,
        ge=0,
        le=3,
        description="Log-normal spread of the number of subtractions: p99 / median = exp(2.33 spread).",
    )
    most_steps: int = Field(24, ge=1, le=24, description="Subtractions of the longest answer; each is 6 tokens.")
    """A dividend has at most three digits."""

    @property
    def most_tokens(self) -> int:
        """Length of the longest worked solution in tokens, its end token included."""
        return STEP_TOKENS * self.most_steps - 2


class QuestionPool:
    """Seeded questions of one family, split by question into training and held-out sides."""

    def __init__(self, family: Division, seed: int) -> None:
        self.family = family
        shuffle = random.Random(f"split {seed}")
        self._training: dict[int, list[Question]] = {}
        self._held_out: dict[int, list[Question]] = {}
        for steps in range(1, family.most_steps + 1):
            questions = [
                Question(divisor, divisor * steps + remainder)
                for divisor in range(2, family.largest_divisor + 1)
                for remainder in range(divisor)
            ]
            shuffle.shuffle(questions)
            held_out = max(1, len(questions) // HELD_OUT_SHARE)
            self._held_out[steps], self._training[steps] = questions[:held_out], questions[held_out:]

    def training(self, seed: str) -> Iterator[Question]:
        """Endless training questions, with step counts from the family's distribution."""
        draws = random.Random(f"training {seed}")
        for steps in _step_counts(draws, self.family):
            yield draws.choice(self._training[steps])

    def evenly(self, seed: str) -> Iterator[Question]:
        """Endless training questions, with every number of steps equally often."""
        draws = random.Random(f"evenly {seed}")
        while True:
            yield draws.choice(self._training[draws.randint(1, self.family.most_steps)])

    def held_out(self, seed: str, count: int) -> list[Question]:
        """Questions that `training` never gives. None repeats while another with the same number of steps is unused."""
        lengths = _step_counts(random.Random(f"held out {seed}"), self.family)
        uses: Counter[int] = Counter()
        questions = []
        for steps in islice(lengths, count):
            side = self._held_out[steps]
            questions.append(side[uses[steps] % len(side)])
            uses[steps] += 1
        return questions


def _step_counts(draws: random.Random, family: Division) -> Iterator[int]:
    """Log-normal step counts. A count above the family's bound becomes the bound."""
    middle = math.log(family.median_steps)
    while True:
        yield max(1, min(family.most_steps, round(math.exp(draws.gauss(middle, family.spread)))))


def is_right(prompt: str, response: str) -> bool:
    """Whether a response solves its prompt: every subtraction is right, and the last number is the remainder."""
    number, _, divisor = prompt.removesuffix("=").partition("-")
    return response == Question(int(divisor), int(number[::-1])).solution


def reward(prompt: Prompt, trajectory: Trajectory) -> float:
    """1.0 if the response ended by itself and all its steps are right, else 0.0.

    A reward for the last number alone would reward guesses: with a divisor of 3, one guess in three is right, and the
    model soon learns to skip the steps. No partial credit is needed.
    """
    return float(trajectory.finish_reason == "stop" and is_right(prompt.text, trajectory.text))
