"""Ten of the points of `make torture`: nine on a record on disk, cut at any byte, and one of a whole process tree."""

from pathlib import Path

import pytest

from tests.torture.chain import TREE, Point
from tests.torture.durable import torture as cut
from tests.torture.torture import torture


@pytest.mark.parametrize("seed", [*range(100, 108), 109])
def test_a_run_whose_process_dies_within_a_write_loses_nothing(seed: int, tmp_path: Path) -> None:
    kills, _ = cut(seed, tmp_path / "schedule")
    assert kills


@pytest.mark.ray
@pytest.mark.timeout(500)
def test_a_run_whose_every_process_dies_at_once_loses_nothing(tmp_path: Path) -> None:
    seed = 0
    result = torture(seed, TREE, tmp_path)
    assert result.lives == len(Point.of(seed, TREE).kills) + 1
