"""`engine runs`, `show`, `compare` and `--json`: what they say about runs, finished, damaged and starting ones."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from steady_world import SteadyWorld

from engine import cli
from engine.config.differences import changed_fields, differing_fields
from engine.config.loading import parse_yaml
from engine.errors import ConfigError
from engine.events import GroupGenerated, SettingChanged
from engine.inspect import open_record
from engine.inspect.run_figures import curves
from engine.inspect.schedule_difference import schedule_difference
from engine.metrics.journal import Journal, line_of
from engine.record import Header, Recorder
from engine.record.files import RecordLock
from engine.runtime.run_history import require_unfinished
from engine.states.limits import Limits, ValidationLimits
from engine.states.state import State
from engine.states.timeouts import Timeouts

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def make_run(
    name: str, steps: int = 4, slots: int = 2, max_staleness_steps: int = 1, then: int | None = None,
    killed: Callable[[State], bool] | None = None, validation: ValidationLimits | None = None,
) -> Path:  # fmt: skip
    """A finished run under runs/, or one that is killed. `then`: another run.max_steps, from the second step on."""
    directory = Path("runs") / name
    directory.mkdir(parents=True)
    text = f"model: {{make: arithmetic}}\nrun: {{max_steps: {steps}}}\nrollout: {{slots: {slots}}}\n"
    (directory / "config.yaml").write_text(text)
    limits = Limits(
        train_batch_size=2, max_staleness_steps=max_staleness_steps, max_concurrent_groups=4, max_steps=steps,
        timeouts=Timeouts.every(None), validation=validation,
    )  # fmt: skip
    recorder = Recorder(directory / "schedule", Header(run=name, limits=limits.to_plain()))
    world = SteadyWorld(limits, slots=slots, journal=Journal(directory / "metrics.jsonl"), recorder=recorder)
    if then is not None:
        world.until(lambda state: state.training.steps_trained == 1)
        world.tell(SettingChanged(setting="run.max_steps", value=str(then)))
    if killed is None:
        world.run()
    else:
        world.until(killed)
    recorder.close()
    return directory


def said(capsys: Capture, *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def answered(capsys: Capture, *arguments: str) -> dict[str, Any]:
    (line,) = said(capsys, *arguments, "--json").splitlines()
    answer = json.loads(line)
    assert isinstance(answer, dict)
    return answer


def refused(capsys: Capture, *arguments: str) -> str:
    assert cli.main(arguments) == 2
    return capsys.readouterr().err


def test_a_resume_with_fewer_train_steps_than_a_run_has_is_refused() -> None:
    run = make_run("stopped", killed=lambda state: state.training.steps_trained == 3)
    require_unfinished(run, [("run.max_steps", "2")])  # without trajectories it continues from its newest checkpoint
    (run / "trajectories").mkdir()
    (run / "trajectories" / "00000000.seg").touch()
    with pytest.raises(ConfigError, match=r"run\.max_steps is 2, but must be at least 3: .*; use 3 to finish the run"):
        require_unfinished(run, [("run.max_steps", "2")])
    require_unfinished(run, [("run.max_steps", "3")])


# -- engine runs -------------------------------------------------------------------------------------------------------


def test_the_list_has_every_run_newest_first_even_a_damaged_one(capsys: Capture) -> None:
    make_run("20260101-000000-one")
    path = next((make_run("20260103-000000-broken") / "schedule").glob("*.seg"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    begun = Path("runs/20260102-000000-begun")
    (begun / "schedule").mkdir(parents=True)
    Path("runs/latest").symlink_to("20260101-000000-one")
    lock = RecordLock(begun)
    rows = answered(capsys, "runs")["runs"]
    assert [row["name"].rpartition("-")[2] for row in rows] == ["broken", "begun", "one"]
    assert [row["state"] for row in rows] == ["damaged", "starting", "finished"]
    lock.release()
    assert "; did you mean 20260101-000000-one?" in refused(capsys, "status", "2026010-000000-one")
    ended = answered(capsys, "runs")["runs"][1]
    assert ended["state"] == "not started" and "start it again with `engine run" in ended["why"]
    assert f"RUN '{begun}' is not started: its process" in refused(capsys, "compare", str(begun), "20260101-000000-one")
    assert answered(capsys, "show", str(begun))["next"] == [f"engine run {begun}/config.yaml"]
    assert (rows[2]["steps"], rows[2]["max_steps"], rows[2]["model"]) == (4, 4, "arithmetic")
    metrics = [json.loads(line) for line in Path("runs/latest/metrics.jsonl").read_text().splitlines()]
    assert rows[2]["reward_first"] == metrics[0]["reward_mean"] and rows[2]["reward_last"] == metrics[-1]["reward_mean"]
    assert rows[2]["why"] == "finished: 4 train steps" and "at byte" in rows[0]["why"]
    text = said(capsys, "runs")
    assert "20260101-000000-one     finished           4/4" in text and "UTC: 4 train steps" in text
    assert f"start it again with `engine run {begun}/config.yaml`" in text, "a line to copy is not wrapped"


def test_a_list_and_a_page_show_the_last_number_of_train_steps(capsys: Capture) -> None:
    make_run("longer", then=6)
    (row,) = answered(capsys, "runs")["runs"]
    assert (row["state"], row["steps"], row["max_steps"]) == ("finished", 6, 6)
    assert answered(capsys, "show", "longer")["configuration"]["run.max_steps"]["value"] == 6


def test_a_run_without_metrics_has_no_figures_instead_of_zeros(capsys: Capture) -> None:
    """Such as a session, whose loop keeps its own metrics."""
    (make_run("session") / "metrics.jsonl").unlink()
    (row,) = answered(capsys, "runs")["runs"]
    assert row["steps"] is None and "session  finished           -/4" in said(capsys, "runs")
    assert {*answered(capsys, "show", "session")["figures"].values()} == {None}
    assert "figures" not in said(capsys, "show", "session")


def test_a_step_that_was_not_published_does_not_count_as_finished(capsys: Capture) -> None:
    make_run("killed", killed=lambda state: state.training.steps_trained == 3 and state.publishing)
    (row,) = answered(capsys, "runs")["runs"]
    shown = answered(capsys, "show", "killed")
    assert (row["steps"], shown["figures"]["train_steps"]) == (2, 2)
    assert shown["why"].startswith("interrupted after 2 train steps and one that was not published: ")
    assert "\n  2 train steps in " in said(capsys, "explain", "killed")


def test_a_run_of_an_engine_with_other_limits_is_listed_with_its_first_settings(capsys: Capture) -> None:
    directory = Path("runs") / "newer"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("model: {make: arithmetic}\nrun: {max_steps: 4}\n")
    Recorder(directory / "schedule", Header(run="newer", limits={"of_a_newer_engine": 1})).close()
    (row,) = answered(capsys, "runs")["runs"]
    assert row["max_steps"] == 4 and row["state"] != "damaged"


def test_a_damaged_file_or_an_odd_name_of_a_run_hides_no_other(capsys: Capture) -> None:
    for name in ("good", "lines", "config", "index"):
        make_run(f"20260101-000000-{name}")
    make_run("20269999-999999-odd")
    with open("runs/20260101-000000-lines/metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"step": null, "reward_mean": "x"}\n' + b"[" * 100_000 + b"\n")
    Path("runs/20260101-000000-config/config.yaml").write_bytes(b"model: \xff")
    Path("runs/20260101-000000-index/schedule/index.json").unlink()
    rows = {row["name"].rpartition("-")[2]: row for row in answered(capsys, "runs")["runs"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "good": "finished", "odd": "finished", "lines": "finished", "config": "damaged",
        "index": "damaged",
    }  # fmt: skip
    assert rows["lines"]["steps"] == 4 and rows["lines"]["reward_last"] == rows["good"]["reward_last"]
    assert "finished: 4 train steps" in said(capsys, "show", "20260101-000000-lines")
    assert "config.yaml' cannot be read" in refused(capsys, "show", "20260101-000000-config")


def test_names_and_models_of_runs_are_neither_markup_nor_control_characters(capsys: Capture) -> None:
    config = make_run("a[red]\x1b[31m") / "config.yaml"
    config.write_text('model: {path: "m[bold]\\u001b[31m"}')
    shown = r"a[red]\x1b[31m"
    for arguments in (["runs"], ["show", "a[red]\x1b[31m"], ["compare", *["a[red]\x1b[31m"] * 2]):
        page = said(capsys, *arguments)
        assert "\x1b" not in page and shown in page and r"m[bold]\x1b[31m" in page
    assert f"engine debug 'runs/{shown}'" in said(capsys, "show", "a[red]\x1b[31m")


def test_a_directory_that_has_no_runs_is_named(capsys: Capture) -> None:
    assert "DIR 'runs' is not a directory; start a run with `engine run`" in refused(capsys, "runs")
    Path("runs").mkdir()
    assert said(capsys, "runs") == "runs has no run\n"
    make_run("one")
    assert "use `engine show runs/one`" in refused(capsys, "runs", "runs/one")


# -- engine show -------------------------------------------------------------------------------------------------------


def test_a_page_has_figures_curves_changed_fields_and_next_commands(capsys: Capture) -> None:
    make_run("one", slots=4)
    Path("runs/one/checkpoints/step-000003").mkdir(parents=True)
    page = answered(capsys, "show", "one")
    metrics = [json.loads(line) for line in Path("runs/one/metrics.jsonl").read_text().splitlines()]
    assert page["curves"]["reward"] == {"steps": [0, 1, 2, 3], "values": [row["reward_mean"] for row in metrics]}
    assert page["figures"]["train_steps"] == 4
    assert page["figures"]["tokens_trained"] == sum(row["tokens"] for row in metrics)
    assert page["configuration"]["model.make"] == {"value": "arithmetic", "default": None}
    assert page["checkpoints"] == [3] and "engine evaluate runs/one@step-3" in page["next"]
    text = said(capsys, "show", "one")
    assert "finished: 4 train steps" in text and "▁" in text and "█" in text and "step-3" in text
    (Path("runs/one") / "metrics.jsonl").unlink()
    assert "curves" not in said(capsys, "show", "one")


def test_pages_show_the_share_of_failures_beside_rewards_and_accuracies(capsys: Capture) -> None:
    """Of 11 validation rows, one fails; so does a group beside those of the last step."""
    path = make_run("some", validation=ValidationLimits(rows=11)) / "metrics.jsonl"
    page = answered(capsys, "show", "runs/some")
    text = "1 of 11 validation responses (9%) failed and count as wrong: row 10: this row cannot be measured"
    assert page["health"] == {"failed_responses": text} and page["figures"]["validation_failed_share"] == 1 - 10 / 11
    assert text in said(capsys, "show", "runs/some") and text in said(capsys, "explain", "runs/some")
    assert "the report is" in said(capsys, "report", "runs/some", "--out", "page.html")
    assert f"<p class=note>{text}</p>" in Path("page.html").read_text(encoding="utf-8")
    lines = path.read_text(encoding="utf-8").splitlines()
    last = max((json.loads(line) for line in lines if '"step"' in line), key=lambda row: row["step"])
    path.unlink()
    Journal(path).write({**last, "groups_failed": 1})
    assert "last reward without 1 failed" in said(capsys, "runs")


def test_a_page_hides_secrets_of_a_configuration(capsys: Capture) -> None:
    config = make_run("one") / "config.yaml"
    config.write_text("judge: {api_key: hunter22, url: 'https://me:hunter23@host/v1', pins: {secret: [hunter24, 7]}}\n")
    for arguments in (["show", "one"], ["show", "one", "--json"], ["compare", "one", make_run("two").name]):
        shown = said(capsys, *arguments)
        assert "hunter" not in shown and "***" in shown


def test_a_curve_takes_one_line_in_a_narrow_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": step, "reward_mean": 0.1, "loss": -1.2345e-05 * step} for step in range(100)]
    metrics = make_run("one") / "metrics.jsonl"
    metrics.write_bytes(b"".join(map(line_of, rows)))
    monkeypatch.setenv("COLUMNS", "80")
    page = said(capsys, "show", "one").partition("curves over train steps")[2].partition("\n\n")[0].strip()
    assert [line.split()[0] for line in page.splitlines()] == ["figure", "reward", "loss"]


def test_a_curve_is_binned_over_the_steps_that_it_has() -> None:
    curve = curves([{"step": step, "reward_mean": value} for step, value in ((0, 1.0), (1, 3.0), (5, 7.0))])["reward"]
    assert curve.binned(3, 0, 5) == [2.0, None, 7.0]
    assert curve.binned(60, 0, 5) == [1.0, 3.0, None, None, None, 7.0]
    assert curves([{"step": 0, "reward_mean": None, "loss": float("nan"), "tokens": "many"}]) == {}


def test_each_of_several_reward_functions_has_a_curve() -> None:
    def row(step: int, *names: str) -> dict[str, Any]:
        return {"step": step, "reward_histograms": {name: [] for name in ("reward", *names)}, "reward_form": 0.5 * step}

    found = curves([row(0, "reward_form", "reward_right"), row(1, "reward_form") | {"reward_right": 1.0}])
    assert (found["reward form"].steps, found["reward form"].values) == ((0, 1), (0.0, 0.5))
    assert found["reward right"].steps == (1,)
    assert curves([row(1, "reward_form")]) == {}, "the reward itself"
    assert curves([row(1) | {"reward_histograms": "none"}]) == {}


def test_differing_fields_are_those_without_the_default_value() -> None:
    tree = parse_yaml(
        "model: {make: arithmetic}\ntrainer: {lora: {rank: 8}}\nscheduler: {train_batch_size: 8}", "f", ""
    )
    assert changed_fields(tree) == {"model.make": ("arithmetic", None), "trainer.lora": ({"rank": 8}, None)}
    other = {"model": {"make": "arithmetic"}, "rollout": {"engine_args": {"seed": 1}}}
    assert differing_fields(tree, other) == {
        "trainer.lora": ({"rank": 8}, None), "rollout.engine_args.seed": (None, 1),
    }  # fmt: skip


# -- engine compare ----------------------------------------------------------------------------------------------------


def test_equal_runs_have_no_difference(capsys: Capture) -> None:
    make_run("one")
    make_run("two")
    assert answered(capsys, "compare", "one", "two")["schedule"] is None
    assert "the schedules are the same in every tick" in said(capsys, "compare", "one", "two")


def test_a_comparison_names_fields_figures_and_the_first_different_decision(capsys: Capture) -> None:
    make_run("one")
    make_run("two", max_staleness_steps=3, slots=1)
    found = answered(capsys, "compare", "one", "two")
    assert found["configuration"] == {"rollout.slots": [2, 1]}
    assert found["schedule"]["kind"] == "event" and found["schedule"]["field"] == "slots"
    text = said(capsys, "compare", "one", "two")
    assert "something else happened: event" in text and "field slots" in text and "A: ProcessUp(kind='replica'" in text
    assert "is not a directory" in refused(capsys, "compare", "one", "runs/one/config.yaml")


def test_the_first_difference_is_an_event_a_command_or_an_end(tmp_path: Path) -> None:
    record = open_record(make_run("one"))
    ticks = list(record.ticks())
    changed = next(tick for tick in ticks if isinstance(tick.events[0], GroupGenerated) and tick.commands)

    def copied(name: str, *, commands: bool = True, whole: bool = True) -> Any:
        recorder = Recorder(tmp_path / name / "schedule", record.header)
        for tick in ticks[: None if whole else changed.number]:
            recorder.write(tick.events, tick.commands if commands or tick is not changed else tick.commands[1:])
        recorder.close()
        return schedule_difference(record, open_record(tmp_path / name))

    assert copied("same") is None
    decided = copied("decided", commands=False)
    assert (decided.tick, decided.kind, decided.place) == (changed.number, "command", 0)
    assert "the schedulers decided differently" in str(decided)
    shorter = copied("shorter", whole=False)
    assert (shorter.tick, shorter.kind, shorter.at[1]) == (changed.number, "end", None)
    assert "then the record of the second run ends" in str(shorter)


# -- --json ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("runs",), ("show", "one"), ("compare", "one", "one"), ("status", "one"), ("waits", "one"), ("replay", "one"),
        ("replay", "one", "--at", "3", "--group", "0"), ("states",),
    ],
    ids=lambda arguments: " ".join(arguments[::2]),
)  # fmt: skip
def test_json_is_one_object_that_begins_with_command_and_run(capsys: Capture, arguments: tuple[str, ...]) -> None:
    make_run("one")
    answer = answered(capsys, *arguments)
    assert list(answer)[:2] == ["command", "run"] and len(answer) > 2
    assert answer["command"] == arguments[0] and answer["run"] == ("runs/one" if "one" in arguments else None)


@pytest.mark.parametrize("arguments", [("runs",), ("show", "one"), ("compare", "one", "one")])
def test_a_reader_that_leaves_is_no_failure(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    make_run("one")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as left:
        monkeypatch.setattr(sys, "stdout", left)
        assert cli.main(arguments) == 0


# -- completion --------------------------------------------------------------------------------------------------------


def test_a_shell_completes_commands_options_and_names_of_runs(capsys: Capture) -> None:
    Path("runs/mine/schedule").mkdir(parents=True)
    with pytest.raises(SystemExit):
        cli.main(["--completion", "bash"])
    tries = ["show m", "compare mine mi", "samples mine --valid", "sho"]
    lines = [
        f"COMP_WORDS=(engine {line}); COMP_CWORD={len(line.split())}; _shtab_engine 2>/dev/null; echo ${{COMPREPLY[@]}}"
        for line in tries
    ]
    script = "\n".join([capsys.readouterr().out, *lines])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["mine", "mine", "--validation", "show"], done.stderr
    for shell in ("zsh", "fish"):
        with pytest.raises(SystemExit):
            cli.main(["--completion", shell])
        assert "ls runs" in capsys.readouterr().out


def test_a_missing_package_for_completion_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    said = refused(capsys, "--completion", "bash")
    assert "this needs the package shtab" in said and "[inspect]" in said
