"""Nine of the points of `make torture`, on a record on disk that is cut at any byte."""

from pathlib import Path

import pytest

from tests.torture.durable import torture


@pytest.mark.parametrize("seed", [*range(100, 108), 109])
def test_a_run_whose_process_dies_within_a_write_loses_nothing(seed: int, tmp_path: Path) -> None:
    kills, _ = torture(seed, tmp_path / "schedule")
    assert kills
