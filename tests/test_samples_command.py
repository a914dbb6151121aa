"""`engine samples`: what it shows, and its words for what is not there."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.cli.json_output import json_line
from engine.cli.samples import ranges
from engine.metrics.journal import line_of
from engine.record.files import RecordLock
from engine.storage.samples import FAILED, FOLDER, TRAIN, VALIDATION, SampleFiles, SampleRow

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps 0, 1 and 5 of four groups each, and validations of the weights after 0 and 4 steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    directory = tmp_path / "runs" / "mine"
    (directory / "schedule").mkdir(parents=True)
    files = SampleFiles(directory / FOLDER)
    for step in (0, 1, 5):
        files.write_step(step, [of_step(step, number) for number in range(4)])
    for validation in (0, 1, 2):
        files.write_chunk(validation, 0, [of_validation(validation, row) for row in range(3)])
    rows = [{"step": 0}, *({"validation": number, "steps": 4 * number} for number in (0, 1))]
    (directory / "metrics.jsonl").write_bytes(b"".join(map(line_of, rows)) + b'{"step": 1')
    return directory


def of_step(step: int, number: int) -> SampleRow:
    return SampleRow(
        kind=TRAIN, step=step, group=10 * step + number, sample=number, prompt_row=10 * step + number,
        reasons=("worst", "random") if number == 0 else ("best",), prompt=f"{step}+{number}=",
        response=f"Step {step} says {number}.", reward=float(number), tokens=3, oldest_version=step,
        newest_version=step + 1, finish_reason="stop", staleness=1, advantage=-0.5, logprob_gap=0.25,
    )  # fmt: skip


def of_validation(validation: int, row: int) -> SampleRow:
    return SampleRow(
        kind=VALIDATION, validation=validation, chunk=0, version=validation, sample=row, prompt_row=row,
        reasons=("validation",), prompt=f"question {row}", response=f"validation {validation}, answer {row}",
        reward=float(row == 2 or validation == 1), tokens=2,
    )  # fmt: skip


def shown(capture: Capture, *arguments: str) -> str:
    assert cli.main(["samples", *arguments]) == 0
    return capture.readouterr().out


def listed(capture: Capture, *arguments: str) -> list[Any]:
    return [json.loads(line) for line in shown(capture, *arguments, "--json").splitlines()]


def refused(capture: Capture, *arguments: str) -> str:
    assert cli.main(["samples", *arguments]) == 2
    return capture.readouterr().err


def test_the_newest_step_is_shown_with_all_that_is_known(run: Path, capsys: Capture) -> None:
    said = shown(capsys, "mine")
    for part in (
        "step 5  group 50  sample 0  (worst, random)",
        "5+3=",
        "Step 5 says 3.",
        "Steps with samples: 0 to 1, 5",
    ):
        assert part in said
    assert "reward 3.000  tokens 3  end stop  weights 5 to 6  staleness 1  advantage -0.500  log-prob gap 0.25" in said
    assert "Step 1 says" not in said


def test_responses_whose_reward_failed_are_shown_with_the_error(run: Path, capsys: Capture) -> None:
    assert "has no samples whose reward failed" in refused(capsys, "mine", "--failed")
    for group, attempt in ((3, 2), (3, 1), (700, 1)):
        row = replace(
            of_step(0, 0), kind=FAILED, step=None, group=group, attempt=attempt, version=4, reward=None,
            reasons=(FAILED,), error=f"reward raised KeyError: 'anser' {attempt}",
        )  # fmt: skip
        SampleFiles(run / FOLDER).write_failure(group, attempt, [row])
    said = shown(capsys, "mine", "--failed")
    assert "attempt 2  group 3  sample 0  (failed)" in said and "KeyError: 'anser' 2" in said
    assert [(row["group"], row["attempt"]) for row in listed(capsys, "mine", "--failed")] == [(3, 1), (3, 2), (700, 1)]
    SampleFiles(run / FOLDER).merge()
    assert {path.name for path in (run / FOLDER).glob("failure*")} == {
        "failures-000000-000255.parquet", "failure-000700-0001.jsonl",
    }  # fmt: skip
    assert [row["attempt"] for row in listed(capsys, "mine", "--failed", "--group", "3")] == [1, 2]
    assert "--step" in refused(capsys, "mine", "--failed", "--step", "1")


def test_reward_parts_and_figures_of_turns_are_shown(run: Path, capsys: Capture) -> None:
    parts, turns = '{"right": 1.0, "brief": 0.25}', '{"turns": 3.0, "tool_errors": 1.0}'
    row = replace(of_step(9, 0), reward_parts=parts, figures=turns)
    SampleFiles(run / FOLDER).write_step(9, [row])
    said = " ".join(shown(capsys, "mine").replace("│", " ").split())
    assert "parts right 1, brief 0.25" in said and "turns 3 tool_errors 1" in said
    (sample,) = listed(capsys, "mine")
    assert sample["reward_parts"] == {"right": 1.0, "brief": 0.25}
    assert sample["figures"] == {"turns": 3.0, "tool_errors": 1.0}


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        (["--step", "1"], [10, 11, 12, 13]),
        (["--worst", "1", "--best", "2"], [50, 53, 52]),
        (["--step", "0", "--best", "1"], [3]),
        (["--worst", "3", "--best", "9"], [50, 53, 52, 51]),
        (["--group", "12"], [12]),
        (["--grep", "SAYS 2"], [2, 12, 52]),
        (["--grep", "1+"], [10, 11, 12, 13]),
        (["--grep", "says", "--limit", "2"], [0, 1]),
        (["--grep", "says 1", "--step", "5"], [51]),
        (["--grep", "says", "--best", "1"], [3]),
        (["--grep", "nobody"], []),
    ],
)
def test_samples_are_chosen(run: Path, capsys: Capture, options: list[str], groups: list[int]) -> None:
    assert [row["group"] for row in listed(capsys, "mine", *options)] == groups


@pytest.mark.parametrize("worst", [1, 2, 4])
@pytest.mark.parametrize("best", [1, 3])
def test_a_sample_that_was_asked_for_says_why_it_is_shown(run: Path, capsys: Capture, worst: int, best: int) -> None:
    rows = [replace(of_step(9, number), reasons=("longest",)) for number in range(4)]
    SampleFiles(run / FOLDER).write_step(9, rows)
    said = shown(capsys, "mine", "--step", "9", "--worst", str(worst), "--best", str(best))
    labels = re.findall(r"group (\d+)  sample \d  \((.*?)\)", said)
    lowest, highest = [90, 91, 92, 93][:worst], [93, 92, 91, 90][:best]
    assert labels == [(f"{group}", "worst, longest") for group in lowest] + [
        (f"{group}", "best, longest") for group in highest
    ]
    both = shown(capsys, "mine", "--validation", "--step", "4", "--worst", "1", "--best", "1")
    assert re.findall(r"response \d  \((.*?)\)", both) == ["worst", "best"]


def test_lines_of_json_have_null_for_what_is_not_finite(run: Path, capsys: Capture) -> None:
    row = SampleRow(kind=TRAIN, step=9, prompt_row=0, prompt="?", response="!", advantage=float("nan"))
    SampleFiles(run / FOLDER).write_step(9, [row])
    assert "NaN" not in shown(capsys, "mine", "--json")
    assert json.loads(json_line({"text": "a\x9b2J\x7f"})) == {"text": "a\x9b2J\x7f"}
    assert json_line({"text": "\x9b"}) == r'{"text": "\u009b"}'
    assert listed(capsys, "mine")[0]["advantage"] is None


def test_what_is_left_out_is_said(run: Path, capsys: Capture) -> None:
    assert "2 more; show them with --limit 4" in shown(capsys, "mine", "--limit", "2")
    assert shown(capsys, "mine", "--grep", "nobody") == "No sample matches.\n"
    said = shown(capsys, "mine", "--worst", "3")
    assert said.count("Step 5 says") == 1 and "1 of 3 shown: the run did not store more of them" in said
    alike = [replace(of_step(9, number), reward=0.5, reasons=("random",)) for number in range(3)]
    SampleFiles(run / FOLDER).write_step(9, alike)
    assert len(listed(capsys, "mine", "--worst", "2")) == 2, "all rewards of the step are equal"


def test_validations_are_asked_for_by_their_steps(run: Path, capsys: Capture) -> None:
    rows = listed(capsys, "mine", "--validation", "--step", "4")
    assert [(row["validation"], row["step"], row["prompt_row"]) for row in rows] == [(1, 4, row) for row in range(3)]
    assert "validation 1 after 4 steps" in shown(capsys, "mine", "--validation", "--step", "4")
    newest = listed(capsys, "mine", "--validation")
    assert {(row["validation"], row["step"]) for row in newest} == {(2, None)}, "it has not ended, and is shown"
    assert "use one of 0, 4" in refused(capsys, "mine", "--validation", "--step", "2")


def test_a_comparison_pairs_the_same_prompts_the_greatest_change_first(run: Path, capsys: Capture) -> None:
    pairs = listed(capsys, "mine", "--validation", "--compare", "0,4")
    assert [[(row["prompt_row"], row["step"]) for row in pair] for pair in pairs] == [
        [(0, 0), (0, 4)], [(1, 0), (1, 4)], [(2, 0), (2, 4)],
    ]  # fmt: skip
    assert [[row["reward"] for row in pair] for pair in pairs] == [[0, 1], [0, 1], [1, 1]]
    said = shown(capsys, "mine", "--validation", "--compare", "0, 4", "--limit", "1")
    assert "prompt 0  reward 0.000 to 1.000" in said and said.count("question 0") == 1 and "2 more" in said


def test_steps_without_a_common_prompt_are_paired_by_reason(run: Path, capsys: Capture) -> None:
    pairs = listed(capsys, "mine", "--compare", "0,5")
    assert [[row["group"] for row in pair] for pair in pairs] == [[0, 50], [0, 50], [1, 51]]
    assert "have no prompt in common" in shown(capsys, "mine", "--compare", "0,5")


def test_what_is_not_there_is_refused_with_what_is(run: Path, capsys: Capture) -> None:
    assert "the last run by name in runs/ is runs/mine" in refused(capsys, "nowhere")
    assert "--step 7 has no samples; use one of 0 to 1, 5" in refused(capsys, "mine", "--step", "7")
    assert "--compare 7 has no samples; use one of 0 to 1, 5" in refused(capsys, "mine", "--compare", "0,7")
    assert "must be two steps; for example" in refused(capsys, "mine", "--compare", "0")
    assert "--best 1 cannot be used together with --compare" in refused(
        capsys, "mine", "--compare", "0,1", "--best", "1"
    )
    assert "--group 99 has no samples; use one of 0 to 3, 10 to 13, 50 to 53" in refused(
        capsys, "mine", "--group", "99"
    )
    assert "validation samples have no group" in refused(capsys, "mine", "--validation", "--group", "1")
    for name in ("steps-000000-000255.parquet", "step-000001.jsonl"):
        (run / FOLDER / name).write_bytes(b"PAR1 is not enough")
        assert f"{name} is not a readable file of samples" in refused(capsys, "mine")
    for path in (run / FOLDER).iterdir():
        path.unlink()
    assert "has no samples of train steps; it is not started: its process ended" in refused(capsys, "mine")
    lock = RecordLock(run)
    assert "has no samples of train steps; wait for the first" in refused(capsys, "mine")
    assert "has no samples of validations; wait for the first" in refused(capsys, "mine", "--validation")
    lock.release()
    for wrong in (["--step", "-1"], ["--best", "0"], ["--limit", "some"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["samples", "mine", *wrong])


def test_a_response_cannot_control_the_terminal(run: Path, capsys: Capture) -> None:
    SampleFiles(run / FOLDER).write_step(
        9, [SampleRow(kind=TRAIN, step=9, prompt_row=0, prompt="[bold]?[/bold]", response="\x1b[2Jgone\u202e\r\n\tok")]
    )
    said = shown(capsys, "mine")
    assert "\x1b" not in said and "\r" not in said and "\u202e" not in said
    assert r"\x1b[2Jgone\u202e\r" in said and "[bold]?[/bold]" in said


def test_steps_are_shown_as_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0 to 2, 5, 7 to 8"
    assert ranges(range(0, 60, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, … 58"


def test_responses_of_a_validation_set_are_chosen_and_compared_by_their_number(run: Path, capsys: Capture) -> None:
    for validation in (0, 1):
        rows = [
            replace(of_validation(validation, row), validation_set=name, sample=sample, answer=f"{row}\x1b")
            for row in (0, 1) for name in ("math", "code") for sample in (1, 0)
        ]  # fmt: skip
        SampleFiles(run / FOLDER).write_chunk(validation, 0, rows)
    chosen = listed(capsys, "mine", "--validation", "--step", "4", "--set", "math")
    assert [(r["validation_set"], r["prompt_row"], r["sample"]) for r in chosen] == [
        ("math", 0, 0), ("math", 0, 1), ("math", 1, 0), ("math", 1, 1),
    ]  # fmt: skip
    pairs = listed(capsys, "mine", "--validation", "--compare", "0,4", "--set", "code")
    assert len(pairs) == 4 and all(one["sample"] == other["sample"] for one, other in pairs)
    said = shown(capsys, "mine", "--validation", "--step", "4", "--set", "code", "--limit", "1")
    assert "set code  prompt 0  response 0" in said and r"answer 0\x1b" in said
    wrong = refused(capsys, "mine", "--validation", "--step", "4", "--set", "cod")
    assert "did you mean code?" in wrong
    assert "must be used together with --validation" in refused(capsys, "mine", "--set", "code")
