"""The files of samples: one for each unit, merged after a while, and never two rows of the same response."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RunDamaged
from engine.record.checked_lines import checked_line, object_of
from engine.storage.samples import (
    BLOCKS,
    FILTERED,
    TRAIN,
    VALIDATION,
    SampleFiles,
    SamplePolicy,
    SampleRow,
    put_samples_aside,
    samples_for_sinks,
)

STEPS, VALIDATIONS = BLOCKS["step"], BLOCKS["validation"]


def of_step(step: int, response: str = "7", **others: Any) -> SampleRow:
    return SampleRow(kind=TRAIN, step=step, group=4 * step, prompt_row=1, prompt="3+4=", response=response, **others)


def of_chunk(validation: int, chunk: int, response: str = "7") -> SampleRow:
    return SampleRow(
        kind=VALIDATION, validation=validation, chunk=chunk, version=3, prompt_row=chunk, prompt="?", response=response
    )  # fmt: skip


def said(files: SampleFiles, kind: str = TRAIN, **only: Any) -> dict[int, str]:
    rows = list(files.rows(kind, **only))
    responses = {
        row["step"] if kind == TRAIN else 100 * row["validation"] + row["chunk"]: row["response"] for row in rows
    }
    assert len(responses) == len(rows), "no row is there twice"
    return dict(sorted(responses.items()))


def test_a_row_comes_back_as_it_was_written_and_a_repeated_step_replaces_its_own(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path / "samples")
    row = of_step(
        50, "sieben ✓", sample=2, reasons=("best", "random"), reward=1.0, tokens=9, oldest_version=3, newest_version=4,
        finish_reason="stop", staleness=2, advantage=-0.5, logprob_gap=0.25,
    )  # fmt: skip
    files.write_step(50, [of_step(50, "first"), of_step(50, "second")])
    files.write_step(50, [row])
    files.write_step(51, [])
    (read,) = files.rows(TRAIN)
    assert read == {name: getattr(row, name) for name in SampleRow.__slots__} | {"reasons": ["best", "random"]}
    assert list(files.rows(VALIDATION)) == []
    assert files.numbers(TRAIN) == [50]
    assert SampleFiles(tmp_path / "nowhere").numbers(TRAIN) == []


def test_a_long_run_has_few_files_and_no_row_twice(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path)
    for step in range(STEPS + 1):
        files.write_step(step, [of_step(step, f"{step}")])
    for validation in range(VALIDATIONS + 1):
        files.write_chunk(validation, 0, [of_chunk(validation, 0)])
        files.write_chunk(validation, 1, [of_chunk(validation, 1)])
    whole, measured = said(files), said(files, VALIDATION)
    files.merge()
    assert sorted(os.listdir(tmp_path)) == [
        f"step-{STEPS:06d}.jsonl", f"steps-000000-{STEPS - 1:06d}.parquet",
        f"validation-{VALIDATIONS:06d}-0000.jsonl", f"validation-{VALIDATIONS:06d}-0001.jsonl",
        f"validations-000000-{VALIDATIONS - 1:06d}.parquet",
    ]  # fmt: skip
    assert (said(files), said(files, VALIDATION)) == (whole, measured)
    assert said(files, numbers=[3, STEPS]) == {3: "3", STEPS: f"{STEPS}"}
    files.write_step(3, [of_step(3, "again")])
    assert said(files) == whole | {3: "again"}
    files.merge()
    assert len(os.listdir(tmp_path)) == 5
    assert said(files) == whole | {3: "again"}
    assert files.numbers(TRAIN) == list(range(STEPS + 1))


def test_a_merge_that_was_cut_short_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SampleFiles(tmp_path)
    for step in (0, 1, STEPS):
        files.write_step(step, [of_step(step, f"{step}")])

    def killed(path: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "unlink", killed)
        files.merge()
    assert len(os.listdir(tmp_path)) == 4
    assert said(files) == {0: "0", 1: "1", STEPS: f"{STEPS}"}
    files.merge()
    assert len(os.listdir(tmp_path)) == 2
    assert said(files) == {0: "0", 1: "1", STEPS: f"{STEPS}"}


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path)
    files.write_step(1, [of_step(1, "there")])
    wrong: Any = "much"
    with pytest.raises(Exception, match="much"):
        files.write_step(1, [of_step(1, reward=wrong)])
    assert os.listdir(tmp_path) == ["step-000001.jsonl"]
    assert said(files) == {1: "there"}


def test_a_merge_that_meets_a_damaged_file_fails_and_changes_nothing(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path)
    for step in (0, 1, STEPS):
        files.write_step(step, [of_step(step, f"{step}")])
    (tmp_path / "step-000001.jsonl").write_bytes(b"damaged")
    there = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RunDamaged, match=r"step-000001\.jsonl is not a readable file"):
        files.merge()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == there


@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_only_its_user_may_read_it(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        SampleFiles(tmp_path / "samples").write_step(1, [of_step(1)])
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "samples", *(tmp_path / "samples").iterdir())]
    assert modes == [0o700, 0o600]


def test_the_sinks_get_samples_of_some_steps_and_of_every_validation(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path)
    for step in range(5):
        files.write_step(step, [of_step(step, f"{step}")])
    files.write_chunk(3, 1, [of_chunk(3, 1)])
    give = samples_for_sinks(tmp_path, SamplePolicy(sink_every=2))
    assert [[row["response"] for row in give({"step": step})] for step in range(6)] == [["0"], [], ["2"], [], ["4"], []]
    assert [row["chunk"] for row in give({"validation": 3, "steps": 9})] == [1]
    nothing = samples_for_sinks(tmp_path, SamplePolicy(sink_every=0))
    assert (nothing({"step": 0}), nothing({"validation": 3, "steps": 9})) == ([], [])


def test_a_run_that_goes_back_sets_later_samples_aside(tmp_path: Path) -> None:
    directory = tmp_path / "samples"
    files = SampleFiles(directory)
    for step in (0, 5, 6, STEPS, STEPS + 4, STEPS + 5):
        files.write_step(step, [of_step(step, f"{step}")])
        files.write_filtered(step, 9, [replace(of_step(step), kind=FILTERED, group=9)])
    for validation in (0, 1, 2, VALIDATIONS):
        files.write_chunk(validation, 0, [of_chunk(validation, 0)])
    files.merge()
    assert len([*tmp_path.rglob("filter*")]) == 4, "three in one file"
    all_steps = said(files)
    assert put_samples_aside(directory, STEPS + 6, [*range(VALIDATIONS + 1)]) is None
    aside = put_samples_aside(directory, STEPS + 5, [0, 1, VALIDATIONS])
    assert aside is not None and said(SampleFiles(aside)) == all_steps
    assert said(files) == {step: text for step, text in all_steps.items() if step < STEPS + 5}
    assert list(said(files, VALIDATION)) == [0, 100, 100 * VALIDATIONS]
    assert put_samples_aside(directory, 6, [0]) is not None
    assert said(files) == {0: "0", 5: "5"}
    assert [row["step"] for row in files.rows(FILTERED)] == [0, 5]
    assert list(said(files, VALIDATION)) == [0]
    assert put_samples_aside(tmp_path / "none", 0, []) is None


def test_files_without_a_column_that_came_later_are_read_merged_and_set_aside(tmp_path: Path) -> None:
    """As those written before there were several reward functions."""
    import pyarrow.parquet as pq

    files = SampleFiles(tmp_path / "samples")
    for step in range(STEPS + 1):
        files.write_step(step, [of_step(step, f"{step}", reward_parts='{"a": 1.0}')])
    for path in [tmp_path / "samples" / "step-000000.jsonl", tmp_path / "samples" / "step-000002.jsonl"]:
        row = object_of(path.read_bytes())
        del row["reward_parts"]
        path.write_bytes(checked_line(json.dumps(row)))
    assert [row["reward_parts"] for row in files.rows(TRAIN, [0, 1, 2])] == [None, {"a": 1.0}, None]
    files.merge()
    merged = tmp_path / "samples" / f"steps-000000-{STEPS - 1:06d}.parquet"
    assert [row["reward_parts"] for row in files.rows(TRAIN, [0, 1, 2])] == [None, {"a": 1.0}, None]
    pq.write_table(pq.read_table(merged).drop_columns(["reward_parts"]), merged)
    assert put_samples_aside(tmp_path / "samples", 2, []) is not None
    assert said(files) == {0: "0", 1: "1"} and {row["reward_parts"] for row in files.rows(TRAIN)} == {None}
