"""The quickstart task: its solutions by hand, its long tail, and that held-out questions stay held out."""

import random
from itertools import islice

import pytest

from engine.tasks.arithmetic import Division, Question, QuestionPool, is_right, reward
from engine.trajectory import Prompt, Trajectory

SOLUTION = "130-7=420-7=710-7=010-7=300"


def test_a_question_and_its_solution() -> None:
    question = Question(divisor=7, dividend=38)
    assert (question.prompt, question.solution) == ("830-7=", SOLUTION)
    assert (question.answer, question.steps) == (3, 5)
    assert question.row() == {"prompt": "830-7=", "answer": "3", "steps": 5}
    assert Question(divisor=2, dividend=2).solution == "000"


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [
        (SOLUTION, "stop", 1.0),
        (SOLUTION, "length", 0.0),
        (SOLUTION, "truncated", 0.0),
        ("300", "stop", 0.0),
        ("130-7=420-7=710-7=110-7=300", "stop", 0.0),
        (SOLUTION + "-7=", "stop", 0.0),
        (SOLUTION[:-4], "stop", 0.0),
        ("", "stop", 0.0),
        ("٠٠٣", "stop", 0.0),
    ],
)
def test_a_response_is_right_only_when_every_step_is(text: str, finish_reason: str, expected: float) -> None:
    prompt = Prompt(row=0, text="830-7=", fields={"answer": "3"})
    assert reward(prompt, Trajectory(text=text, finish_reason=finish_reason)) == expected


def test_every_solution_is_right_and_has_the_length_it_should() -> None:
    family = Division()
    for question in islice(QuestionPool(family, 3).training("all"), 2000):
        assert is_right(question.prompt, question.solution)
        assert len(question.solution) + 1 == 6 * question.steps - 2 <= family.most_tokens
        assert int(question.solution[-3:][::-1]) == question.answer < question.divisor


def test_a_careless_solution_slips_only_across_a_ten() -> None:
    # 38 - 7 stays within the thirties; 31 - 7 comes out as 23, 23 - 7 as 15, 15 - 7 as 7; 7 - 7 crosses no ten.
    assert Question(7, 38).careless_solution(1.0, random.Random(0)) == "130-7=320-7=510-7=700-7=000"
    for question in islice(QuestionPool(Division(), 0).training("all"), 500):
        text = question.careless_solution(1.0, random.Random(0))
        assert len(text) <= Division().most_tokens and all(len(step) in (3, 5) for step in text.split("="))


@pytest.mark.parametrize("seed", range(4))
def test_lengths_have_a_long_tail(seed: int) -> None:
    pool = QuestionPool(Division(), seed)
    for questions in (islice(pool.training("rows"), 4096), pool.held_out("rows", 1024)):
        lengths = sorted(len(question.solution) + 1 for question in questions)
        assert lengths[int(0.99 * len(lengths))] >= 4 * lengths[len(lengths) // 2]


def test_held_out_questions_are_never_trained_on() -> None:
    pool = QuestionPool(Division(), 0)
    training = set(islice(pool.training("rows"), 20_000)) | set(islice(pool.evenly("short"), 20_000))
    held_out = pool.held_out("rows", 500)
    assert not training & set(held_out)
    assert len(set(pool.held_out("rows", 128))) >= 96
    assert {question.steps for question in training} == set(range(1, 25))


def test_a_seed_gives_the_same_questions_and_another_gives_others() -> None:
    def rows(seed: int) -> list[Question]:
        pool = QuestionPool(Division(), seed)
        return [*islice(pool.training("rows"), 50), *pool.held_out("rows", 50)]

    assert rows(1) == rows(1) != rows(2)


def test_the_smallest_and_the_longest_family_can_be_written() -> None:
    for family in (Division(largest_divisor=2), Division(most_steps=1), Division(median_steps=24.0)):
        pool = QuestionPool(family, 0)
        for question in [*islice(pool.evenly("all"), 200), *pool.held_out("all", 20)]:
            assert is_right(question.prompt, question.solution)
