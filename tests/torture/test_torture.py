"""Nine of the points of `make torture`, on a record on disk that is cut at any byte, and the table of its results."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.torture import chain
from tests.torture.chain import MARK, ROOT, TREE, Point, strike
from tests.torture.durable import torture
from tests.torture.torture import BEGIN, Result, read_rows, replace_rows, row_of, summary, write_rows, write_summary


@pytest.mark.parametrize("seed", [*range(100, 108), 109])
def test_a_run_whose_process_dies_within_a_write_loses_nothing(seed: int, tmp_path: Path) -> None:
    kills, _ = torture(seed, tmp_path / "schedule")
    assert kills


def test_processes_that_are_started_while_others_are_killed_are_killed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"test-{os.getpid()}"
    begun = [marked_process(mark)]

    def kill_and_start(pid: int) -> None:
        strike(pid)
        if len(begun) == 1:
            begun.append(marked_process(mark))

    monkeypatch.setattr(chain, "strike", kill_and_start)
    chain.kill_others(mark)
    assert [process.wait(timeout=10.0) for process in begun] == [-signal.SIGKILL] * 2


def marked_process(mark: str) -> "subprocess.Popen[bytes]":
    """A process that ends with this one, if nobody kills it before."""
    return subprocess.Popen(["cat"], env={**os.environ, MARK: mark}, stdin=subprocess.PIPE)


def row_of_seed(seed: int, commit: str) -> dict[str, str]:
    result = Result(Point.of(seed, TREE), TREE, lives=3, killed_at=(11, 26), redone=1, seconds=24.4)
    return row_of(result, "2026-11-27", commit)


def test_the_page_has_the_summary_of_the_table() -> None:
    rows = read_rows(ROOT / "docs" / "torture.csv")
    assert len(rows) >= 250
    assert (ROOT / "docs" / "FAILURES.md").read_text("utf-8").split(BEGIN)[1].strip() == summary(rows)


def test_a_row_is_read_from_the_table_as_it_was_written(tmp_path: Path) -> None:
    rows = [row_of_seed(1, "old"), row_of_seed(2, "old")]
    write_rows(tmp_path / "torture.csv", rows)
    assert read_rows(tmp_path / "torture.csv") == rows
    assert rows[0]["events_at_each_death"] == "11 26"


def test_a_point_that_failed_has_no_row_and_an_untried_one_keeps_its_row() -> None:
    old = [row_of_seed(seed, "old") for seed in (1, 2, 3)]
    new = [row_of_seed(2, "new")]
    assert replace_rows(old, {(1, TREE), (2, TREE)}, new) == [old[2], new[0]]


def test_the_summary_replaces_the_old_one_and_keeps_the_text(tmp_path: Path) -> None:
    page = tmp_path / "TORTURE.md"
    page.write_text(f"# Crash tests\n\nText.\n\n{BEGIN}\n\nold\n", encoding="utf-8")
    write_summary(page, [row_of_seed(1, "abc"), row_of_seed(2, "def")])
    text = page.read_text("utf-8")
    assert text.startswith("# Crash tests\n\nText.") and "old" not in text
    assert "| tree | 2 | 6 | 2 | 24 | 2026-11-27 | abc, def |" in text
