"""Several data sources: their shares, the rows that come next, and what a curriculum makes of outcomes."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import DataFailure
from engine.tasks.dataset import Dataset
from engine.tasks.mixture import Mixture, Source
from engine.tasks.source_files import Curriculum, CurriculumStage, PassRate


def source(directory: Path, name: str, rows: int, weight: float | None = None, rest: PassRate | None = None) -> Source:
    file = directory / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{name} {row}"}) + "\n" for row in range(rows)))
    return Source(name=name, data=Dataset.load(file), weight=weight, rest=rest)


def drawn(mixture: Mixture, groups: range) -> list[tuple[str, int]]:
    prompts = [mixture.prompt(group) for group in groups]
    return [(prompt.source, prompt.row) for prompt in prompts]


@given(rows=st.lists(st.integers(1, 7), min_size=1, max_size=4), epochs=st.integers(1, 3), seed=st.integers(0, 9))
def test_without_weights_each_row_comes_once_in_each_epoch(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], epochs: int, seed: int
) -> None:
    directory = tmp_path_factory.mktemp("rows")
    mixture = Mixture([source(directory, f"s{i}", n) for i, n in enumerate(rows)], seed=seed, epochs=epochs)
    assert mixture.total == epochs * sum(rows)
    for epoch in range(epochs):
        some = drawn(mixture, range(epoch * sum(rows), (epoch + 1) * sum(rows)))
        assert Counter(some) == {(f"s{i}", row): 1 for i, n in enumerate(rows) for row in range(n)}


@given(weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=4))
def test_each_source_stays_near_its_share(tmp_path_factory: pytest.TempPathFactory, weights: list[float]) -> None:
    directory = tmp_path_factory.mktemp("rows")
    sources = [source(directory, f"s{i}", 5, weight) for i, weight in enumerate(weights)]
    mixture, counts = Mixture(sources, seed=1), Counter[str]()
    for number in range(1, 101):
        counts[mixture.prompt(number - 1).source] += 1
        for index, weight in enumerate(weights):
            assert abs(counts[f"s{index}"] - number * weight / sum(weights)) < len(weights)


def test_draws_are_a_function_of_seed_and_number(tmp_path: Path) -> None:
    sources = [source(tmp_path, "a", 5, 1.0), source(tmp_path, "b", 3, 2.0)]
    whole = drawn(Mixture(sources, seed=1), range(40))
    late = Mixture(sources, seed=1)
    assert [late.prompt(group) for group in (39, 7)] == [Mixture(sources, seed=1).prompt(group) for group in (39, 7)]
    assert drawn(late, range(40)) == whole != drawn(Mixture(sources, seed=2), range(40))
    of_b = [row for name, row in whole if name == "b"]
    alone = Mixture([sources[1], source(tmp_path, "c", 9, 1.0)], seed=1)
    assert [row for name, row in drawn(alone, range(40)) if name == "b"][:20] == of_b[:20], "whatever else there is"


def test_a_curriculum_by_step_changes_shares_after_so_many_steps(tmp_path: Path) -> None:
    stages = (
        CurriculumStage(weights=(1.0, 0.0), until=2),
        CurriculumStage(weights=(1.0, 1.0), until=3),
        CurriculumStage(weights=(0.0, 1.0)),
    )
    sources = [source(tmp_path, "easy", 4), source(tmp_path, "hard", 4)]
    mixture = Mixture(sources, seed=0, curriculum=Curriculum(stages=stages))
    with pytest.raises(DataFailure, match="no prompt was chosen for group 0"):
        mixture.prompt(0)
    for group in range(16):
        mixture.choose(group, group // 4)
    names = [name for name, _ in drawn(mixture, range(16))]
    assert names == ["easy"] * 8 + ["easy", "hard"] * 2 + ["hard"] * 4


def by_accuracy(directory: Path, rest: PassRate | None = None) -> Mixture:
    stages = (CurriculumStage(weights=(1.0, 0.0), until=0.75), CurriculumStage(weights=(0.0, 1.0)))
    sources = [source(directory, "easy", 4, rest=rest), source(directory, "hard", 4)]
    return Mixture(sources, seed=0, curriculum=Curriculum(stages=stages, by_accuracy=True, window=4))


def test_a_stage_ends_at_its_accuracy_whatever_the_order_of_the_outcomes(tmp_path: Path) -> None:
    chosen = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 1, 0, 2]):
        mixture = by_accuracy(tmp_path)
        for group in range(6):
            mixture.choose(group, 0)
        for group in order[:5]:
            mixture.outcome(group, float(group > 2))
        mixture.choose(6, 0)
        assert mixture.stage == 0, "outcomes of the same step are not seen"
        mixture.outcome(order[5], float(order[5] > 2))
        mixture.choose(7, 1)
        assert mixture.stage == 1, "three of the newest four are right"
        chosen.append(drawn(mixture, range(8)))
    assert chosen[0] == chosen[1] and chosen[0][7][0] == "hard"


def test_rows_outside_of_the_bounds_rest_and_come_back(tmp_path: Path) -> None:
    mixture = Mixture([source(tmp_path, "a", 3, rest=PassRate(max=0.5, rest_passes=1))], seed=0, epochs=4)
    for group in range(3):
        mixture.choose(group, 0)
    solved = mixture.prompt(0).row
    mixture.outcome(0, 1.0)
    for group in range(3, 8):
        mixture.choose(group, 1)
    rows = [row for _, row in drawn(mixture, range(3, 8))]
    assert sorted(rows[:2]) == sorted({0, 1, 2} - {solved}) and sorted(rows[2:]) == [0, 1, 2]
    assert mixture.figures() == {"a": {"drawn": 8, "dropped": 0, "rested": 1}}


def test_a_source_whose_rows_all_rest_gives_them_in_order(tmp_path: Path) -> None:
    mixture = Mixture([source(tmp_path, "a", 2, rest=PassRate(min=0.5, rest_passes=None))], seed=0)
    for group in range(6):
        mixture.choose(group, group // 2)
        mixture.outcome(group, 0.0)
    assert Counter(row for _, row in drawn(mixture, range(6))) == {0: 3, 1: 3}


def test_a_branch_forgets_later_outcomes_and_keeps_rows(tmp_path: Path) -> None:
    mixture, whole = (by_accuracy(tmp_path, PassRate(max=0.9)) for _ in range(2))
    for group in range(12):
        for one in (mixture, whole):
            one.choose(group, group // 4)
            one.outcome(group, float(group % 4 > 0))
    assert mixture.stage == 1
    before = drawn(mixture, range(12))
    mixture.branch(1, [4, 5, 6, 7])
    assert drawn(mixture, range(12)) == before and mixture.stage == 0
    for group in range(4, 12):
        mixture.choose(group, group // 4)
        mixture.outcome(group, float(group % 4 > 0))
    for one in (mixture, whole):
        for group in range(12, 30):
            one.choose(group, group // 4)
    assert drawn(mixture, range(30)) == drawn(whole, range(30))
