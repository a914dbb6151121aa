"""The live view, the plain lines and the table at the end: what they show, and that it fits 80 columns."""

import io
import json
import math
import os
import pty
import re
import select
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from steady_world import steady_world

from engine.cli.run_view import (
    LiveView,
    PlainView,
    clock,
    figure,
    panel,
    set_rows,
    sparkline,
    step_line,
    summary,
    validation_line,
    view_for,
)
from engine.metrics.export import registry
from engine.metrics.journal import plain
from engine.metrics.status import Status, read_status, status_of
from engine.simulation.simulated_models import row_reward
from engine.states.limits import ValidationLimits

ROOT = Path(__file__).resolve().parent.parent


def middle() -> Status:
    world = steady_world(steps=40, lengths=lambda group: 1 + group % 3)
    world.until(lambda state: state.training.latest_version == 12)
    world.metrics.validated(0, 0.31)
    return read_status(world.metrics)


def crowded() -> Status:
    """A status with everything at its longest."""
    return replace(
        middle(),
        step=123_456,
        max_steps=1_000_000,
        elapsed_s=360_000.0,
        eta_s=3_600_000.0,
        reward=-123.456,
        reward_first=-1234.5,
        rewards=tuple(float(n % 17) for n in range(60)),
        slots_busy=65_536,
        slots=131_072,
        ready=100_000,
        parked=100_000,
        tokens_per_s=1e7,
        version=123_456,
        replica_versions={n: 123_456 for n in range(64)},
        replica_states=dict.fromkeys(range(64), "installing"),
        failures={"group_data": 123_456},
        last_failure="[bold]z[/bold]" * 30,
        trainer_now="x" * 200,
        rollout_now="y" * 200,
        silence="nothing has changed " * 30,
    )


def drawn(status: Status, title: str = "Step Engine  runs/20260131-235959-quickstart") -> list[str]:
    console = Console(width=80, record=True, force_terminal=True, file=io.StringIO())
    console.print(panel(status, title))
    return console.export_text().splitlines()


def table_lines(status: Status) -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary(status, where="runs/here"))
    return console.export_text().splitlines()


@pytest.mark.parametrize(
    "status", [middle(), crowded(), read_status(steady_world().metrics)], ids=["middle", "crowded", "new"]
)
def test_the_live_view_fits_80_columns_and_never_wraps(status: Status) -> None:
    lines = drawn(status)
    rows = 8 + bool(status.failures) + bool(status.silence)
    assert len(lines) == rows + 2, "a line for each row and the frame"
    assert {cell_len(line) for line in lines} == {80}


def test_the_live_view_shows_what_matters() -> None:
    status = middle()
    text = "\n".join(drawn(status))
    assert "12/40" in text and " left" in text
    assert re.search(r"reward +[\d.]+ [▁▂▃▄▅▆▇█]{12} first 0\.\d+", text)
    assert "validation 0.310" in text
    assert "bound 1" in text
    assert f"{status.slots_busy}/4 slots busy" in text and "tokens/s" in text
    assert "0: v1" in text and "1: v1" in text
    assert status.trainer_now in text and status.rollout_now in text


def test_a_long_title_is_cut() -> None:
    assert {cell_len(line) for line in drawn(middle(), "Step Engine  " + "deep/" * 60)} == {80}


def test_plain_lines_are_one_per_step_in_order_and_none_twice() -> None:
    world = steady_world(steps=5)
    stream = io.StringIO()
    with PlainView(stream) as view:
        world.to_the_end(lambda: view.show(read_status(world.metrics)))
        view.show(read_status(world.metrics))
    lines = stream.getvalue().splitlines()
    assert [int(re.match(r"step=(\d+) ", line)[1]) for line in lines] == [0, 1, 2, 3, 4]  # type: ignore[index]
    pattern = re.compile(
        r"step=\d+ done=\d+/\d+ version=\d+ reward=[\d.]+ accuracy=0\.0000 loss=[\d.e-]+ staleness=\d/[\d.]+/\d "
        r"tokens=\d+ tokens_s=\d+ busy=\d/4 data_failures=0 groups_failed=0 elapsed_s=[\d.]+ eta_s=(\d+|-)"
    )
    for line in lines:
        assert pattern.fullmatch(line), line


def test_a_line_without_figures_says_so() -> None:
    line = step_line({"step": 3, "reward_mean": math.nan}, replace(middle(), max_steps=None, eta_s=None))
    assert "done=4/- " in line and "reward=- " in line and "loss=- " in line and "staleness=-/-/-" in line


def test_the_table_at_the_end_has_every_figure() -> None:
    world = steady_world(steps=4).to_the_end()
    world.metrics.validated(0, 0.25)
    world.metrics.validated(4, 0.875)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary(read_status(world.metrics), where="runs/20260131-235959-quickstart", wall_s=12.34))
    text = console.export_text()
    for row in (
        r"train steps +│ 4 of 4",
        r"reward first / last +│ 0\.062 / 0\.\d\d\d",
        r"validation accuracy before / after +│ 0\.250 / 0\.875",
        r"staleness min / mean / max +│ 0 / 0\.5 / 1  \(bound 1\)",
        r"groups +│ \d+ consumed, 0 filtered, \d+ dropped, 0 +│",
        r"rollout idle +│ \d+ %",
        r"trainer idle +│ \d+ %",
        r"tokens generated / trained +│ 16 / 16",
        r"wall seconds of this command +│ 12\.3",
        r"run directory +│ runs/20260131-235959-quickstart",
    ):
        assert re.search(row, text), (row, text)
    assert max(cell_len(line) for line in text.splitlines()) <= 80


def test_the_table_of_a_resumed_run_says_which_figures_began_with_the_resume() -> None:
    status = replace(read_status(steady_world(steps=4).to_the_end().metrics), recoveries={"resumed": 1})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary(status, where="runs/here", wall_s=2.0))
    text = console.export_text()
    rows = re.split(r"\n(?=│ \S)", text)
    marked = {row[2:].partition("  ")[0] for row in rows if "last start" in re.sub(r"[│\s]+", " ", row)}
    counted = {"reward first / last", "tokens generated / trained", "rollout idle", "trainer idle"}
    assert marked == {*counted, "staleness min / mean / max"}
    assert max(cell_len(line) for line in text.splitlines()) <= 80


def test_failures_are_counted_and_the_last_one_is_shown() -> None:
    status = replace(
        middle(), failures={"group_data": 3, "replica_lost": 1}, last_failure="group 7: my_rewards:[score]"
    )
    said = "4 attempts, 3 on prompts, agents or rewards; the last: group 7: my_rewards:[score]"
    assert any(said[:60] in line for line in drawn(status))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary(status, where="runs/here"))
    text = " ".join(re.sub("[│]", " ", console.export_text()).split())
    assert "3 group data, 1 replica lost" in text and "my_rewards:[score]" in text
    assert not any("attempts" in line for line in drawn(middle()))


def test_groups_that_failed_on_their_rewards_are_shown_beside_the_reward() -> None:
    """The groups that are left may all have the reward 1."""
    ended = {**middle().groups_ended, "consumed": 7, "failed": 3}
    failing = replace(
        middle(),
        reward=1.0,
        failures={"group_data": 6},
        groups_ended=ended,
        last_failure="reward a.b raised KeyError: 3",
    )
    assert any("reward" in line and "1.000" in line and "without 3 failed" in line for line in drawn(failing))
    line = step_line({"step": 3, "reward_mean": 1.0}, failing)
    assert "reward=1.0000 " in line and " data_failures=6 groups_failed=3 " in line
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary(failing, where="runs/here"))
    text = " ".join(re.sub("[│]", " ", console.export_text()).split())
    assert f"3 of {sum(ended.values())} groups failed: the rewards above leave them out" in text
    stream = io.StringIO()
    with PlainView(stream) as view:
        view.show(middle())
        assert "failed;" not in stream.getvalue()
        view.show(failing)
        view.show(failing)
    assert stream.getvalue().count("a prompt, agent or reward failed") == stream.getvalue().count("KeyError: 3") == 1


def test_the_share_of_failed_responses_is_beside_each_accuracy_with_a_reason() -> None:
    """Of 22 rows, two fail."""
    world = steady_world(steps=4, validation=ValidationLimits(rows=22)).to_the_end()
    status = status_of(json.loads(json.dumps(plain(asdict(read_status(world.metrics))))))
    row = status.validations[-1]
    assert row["accuracy"] == sum(row_reward(n, 4) or 0.0 for n in range(22)) / 22
    assert any(f"validation {row['accuracy']:.3f} (9 % failed)" in line for line in drawn(status))
    text = "\n".join(table_lines(status))
    assert re.search(r"before / after +│ 0\.\d\d\d \(9 % failed\) / 0\.\d\d\d \(9 % failed\)", text), text
    cells = " ".join(line.split("│")[2].strip() for line in text.splitlines() if line.count("│") == 3)
    assert "2 of 22 validation responses (9%) failed and count as wrong: row 10: this row cannot be" in cells
    figures = {sample.name: sample.value for metric in registry(world.metrics).collect() for sample in metric.samples}
    assert figures["engine_validation_failed_ratio"] == pytest.approx(2 / 22)


def test_a_silence_is_noted_once_and_shown_while_it_lasts() -> None:
    sentence = "nothing has changed for 300 s: the trainer has been training step 3 on 4 groups for 312 s"
    silent = replace(middle(), silence=sentence)
    assert any("waiting" in line and "nothing has changed for 300 s" in line for line in drawn(silent))
    assert not any("waiting " in line for line in drawn(middle()))
    for terminal in (False, True):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=terminal, width=80)
        with view_for(console, title="t", plain=not terminal) as view:
            for status in (silent, silent, middle(), silent):
                view.show(status)
        assert stream.getvalue().count("training step 3 on") >= 2
        assert re.sub(r"\s+", " ", stream.getvalue()).count("for 312 s") == 2, "the whole of it, once for each silence"


def test_steps_of_which_nothing_can_be_learned_are_noted_once() -> None:
    flat = [{"step": step, "groups": 4, "zero_advantage_groups": 4.0, "reward_mean": 0.0} for step in range(6)]
    status = replace(middle(), recent=tuple(flat))
    sentence = "in each of the last 5 train steps, all responses to a prompt got the same reward"
    assert sentence in re.sub(r"[│\s]+", " ", " ".join(table_lines(status)))
    for terminal in (False, True):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=terminal, width=80)
        with view_for(console, title="t", plain=not terminal) as view:
            view.show(replace(status, recent=tuple(flat[:4])))
            assert "same reward" not in stream.getvalue(), "too few steps"
            view.show(status)
            view.show(status)
        assert re.sub(r"\s+", " ", stream.getvalue()).count(sentence) == 1
    learned = replace(status, recent=(*flat[:5], flat[5] | {"zero_advantage_groups": 3.0}))
    own_trainer = replace(status, recent=tuple({"step": n, "groups": 4} for n in range(6)))
    assert learned.health == own_trainer.health == []


def test_a_terminal_gets_the_live_view_and_a_pipe_plain_lines() -> None:
    terminal = Console(force_terminal=True, file=io.StringIO())
    assert isinstance(view_for(terminal, title="t"), LiveView)
    assert isinstance(view_for(terminal, title="t", plain=True), PlainView)
    assert isinstance(view_for(Console(file=io.StringIO()), title="t"), PlainView)


def test_small_pieces() -> None:
    assert sparkline((), 10) == "" and sparkline((1.0, 1.0), 10) == "▁▁"
    assert sparkline((0.0, None, math.nan, 7.0, 3.5), 10) == "▁█▅"
    assert len(sparkline(tuple(map(float, range(99))), 24)) == 24
    assert (clock(0), clock(61), clock(3_661), clock(None), clock(math.inf)) == ("0:00", "1:01", "1:01:01", "-", "-")
    assert (figure(None, ".1f"), figure(math.nan, ".1f"), figure(1.25, ".1f")) == ("-", "-", "1.2")


ON_A_TERMINAL = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from rich.console import Console
from steady_world import steady_world
from engine.cli.run_view import LiveView, view_for
from engine.metrics.status import read_status
console = Console(width=80)
view = view_for(console, title="Step Engine  runs/here")
assert isinstance(view, LiveView)
world = steady_world(steps=6)
with view:
    view.note("metrics: http://127.0.0.1:1/metrics")
    world.to_the_end(lambda: view.show(read_status(world.metrics)))
    view.show(read_status(world.metrics))
"""


def test_on_a_real_terminal_the_view_is_drawn_in_place() -> None:
    primary, secondary = pty.openpty()
    script = ON_A_TERMINAL.format(root=str(ROOT), tests=str(ROOT / "tests"))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=secondary, stderr=subprocess.PIPE, env=environment
    ) as process:
        os.close(secondary)
        output = read_all(primary)
        assert process.wait(timeout=60) == 0, process.stderr.read().decode() if process.stderr else ""
    os.close(primary)
    text = output.decode()
    assert "metrics: http://127.0.0.1:1/metrics" in text
    assert "6/6" in text and "Step Engine" in text
    assert "\x1b[1A" in text, "earlier frames are drawn over"
    assert text.rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in text, "the cursor is shown again"


def read_all(descriptor: int) -> bytes:
    """Everything until the other side closes."""
    parts: list[bytes] = []
    while select.select([descriptor], [], [], 60)[0]:
        try:
            part = os.read(descriptor, 65536)
        except OSError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def test_a_set_without_a_name_adds_only_what_the_validation_does_not_say() -> None:
    figures = {
        "prompts": 2,
        "failed_share": 0.25,
        **{f"{m}{end}": 0.5 for m in ("avg@1", "pass@2") for end in ("", "_low", "_high")},
    }
    row = {
        "validation": 0, "version": 1, "steps": 1, "outcome": "reported", "accuracy": 0.5, "reward_mean": 0.5,
        "sets": {"held_out": figures}, "measured": 3, "rows": 4, "failed_share": 0.25, "elapsed_s": 1.0,
        "reason": "row 3: no answer",
    }  # fmt: skip
    line = validation_line(row)
    assert "held_out/pass@2=0.5000[0.500,0.500]" in line and "avg@1" not in line
    assert line.endswith(" failed_share=0.250 rows=3/4 elapsed_s=1.0 reason='row 3: no answer'")
    assert [*set_rows([row])] == [("held_out pass@2", "0.500 (25 % failed)  (95 %: 0.500 to 0.500)")]
    named = {**row, "sets": {"math": figures}}
    assert "math/avg@1=" in validation_line(named)


@pytest.mark.parametrize("cause", ["reward", "agent"])
def test_the_table_at_the_end_names_the_code_that_slots_waited_for(cause: str) -> None:
    slow = replace(
        middle(), rollout_idle_s={cause: 9.0, "starting": 1.0}, slowest={cause: f"{cause} [mine], 2 s a call"}
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary(slow, where="runs/here"))
    assert f"(mostly {cause} [mine], 2 s a call)" in console.export_text()
