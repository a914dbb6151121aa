"""`engine explain` as a user calls it: text and JSON, running and resumed runs, and records that cannot be read."""

import gc
import json
import struct
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from rich.console import Console

from engine import cli
from engine.cli.advice_line import first_advice
from engine.cli.recorded_run import HISTORY_OBJECTS
from engine.cli.run_view import summary
from engine.cli.top import screen
from engine.inspect import history_reader
from engine.metrics.journal import line_of
from engine.metrics.status import read_status
from engine.record.files import RecordLock
from engine.record.frames import SCHEDULE
from tests.inspect.recorded_worlds import LIMITS, recorded
from tests.steady_world import steady_world

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recorded(LIMITS, directory=tmp_path / "run" / "schedule", run="20260131-235959-asked", slots=4)
    return tmp_path / "run"


def refused(capsys: Capture, *arguments: str) -> str:
    assert cli.main(["explain", *arguments]) == 2
    return capsys.readouterr().err


def test_garbage_is_collected_rarely_while_a_history_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, found, read = gc.get_threshold(), [], history_reader.read_history
    monkeypatch.setattr(history_reader, "read_history", lambda path: found.append(gc.get_threshold()[0]) or read(path))
    assert cli.main(["explain", str(run)]) == 0
    assert found == [HISTORY_OBJECTS] and gc.get_threshold() == before


@pytest.mark.parametrize(
    ("option", "about", "says"),
    [
        ([], {}, "bottlenecks"),
        (["--step", "2"], {"step": 2}, "The step before it ended at"),
        (["--group", "3"], {"group": 3}, "its attempt 1 began on replica"),
        (["--at", "30"], {"at": 30.0}, "Replica 0: up"),
        (["--idle"], {"idle": True}, "slots: where their time went"),
    ],
)
def test_every_question_has_an_answer_in_text_and_in_json(
    run: Path, capsys: Capture, option: list[str], about: dict[str, Any], says: str
) -> None:
    assert cli.main(["explain", str(run), *option]) == 0
    text = capsys.readouterr().out
    assert says.lower() in text.lower()
    assert cli.main(["explain", str(run), *option, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["command", "run", "about", "parts", "figures", "advice", "notes"]
    assert (answer["command"], answer["about"]) == ("explain", about)
    assert all(sentence in text for part in answer["parts"] for sentence in part["sentences"])


def test_a_run_without_an_end_is_explained_up_to_its_last_event(tmp_path: Path, capsys: Capture) -> None:
    recorded(LIMITS, steps=3, directory=tmp_path / "schedule")
    assert cli.main(["explain", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "It was interrupted: its processes were killed; it can be resumed." in text and "2 train steps in" in text
    lock = RecordLock(tmp_path / "schedule")
    assert cli.main(["explain", str(tmp_path)]) == 0
    assert "It is running." in capsys.readouterr().out
    lock.release()
    assert cli.main(["explain", str(tmp_path), "--step", "2"]) == 0
    assert "is still" in capsys.readouterr().out


def test_what_ruins_the_training_is_said_before_the_advice(run: Path, capsys: Capture) -> None:
    rows = [{"step": step, "truncated_share": 0.9} for step in range(6)]
    (run / "metrics.jsonl").write_bytes(b"".join(map(line_of, rows)))
    assert cli.main(["explain", str(run)]) == 0
    assert "were cut off: raise rollout.max_tokens" in capsys.readouterr().out.partition("\nadvice\n")[0]
    assert cli.main(["explain", str(run), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["figures"]["health"]) == ["truncated"]


def test_unknown_steps_groups_and_times_are_refused_with_the_allowed_range(run: Path, capsys: Capture) -> None:
    said = refused(capsys, str(run), "--step", "6")
    assert "--step 6 does not exist: the record has 6 train steps; use a number from 0 to 5" in said
    assert "use a number from 0 to" in refused(capsys, str(run), "--group", "9999")
    assert "use seconds from 0 to" in refused(capsys, str(run), "--at", "1e9")
    assert "must be a number of seconds" in refused(capsys, str(run), "--at", "nan")


def test_a_foreign_empty_newer_or_damaged_record_is_refused(run: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "foreign").mkdir()
    assert "foreign" in refused(capsys, str(tmp_path / "foreign"))
    (tmp_path / "empty" / "schedule").mkdir(parents=True)
    assert "is not started: its process ended" in refused(capsys, str(tmp_path / "empty"))
    (segment,) = (run / "schedule").glob("*.seg")
    whole = segment.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    segment.write_bytes(damaged)
    said = refused(capsys, str(run))
    assert "at byte" in said and "engine: restore this file from a copy of the run's directory" in said
    segment.write_bytes(whole[:-3])
    assert "at byte" in refused(capsys, str(run))
    head = SCHEDULE.magic + struct.pack("<III", SCHEDULE.version + 1, 0, 0)
    segment.write_bytes(head + struct.pack("<I", crc32(head)) + whole[len(head) + 4 :])
    assert "use a newer engine" in refused(capsys, str(run))


def test_the_first_line_of_advice_is_in_the_table_and_in_top(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = first_advice(run)
    assert " × faster, simulated over " in line
    status, console = read_status(steady_world(steps=2).metrics), Console(width=80, record=True)
    console.print(summary(status, where="runs/here", advice=line))
    console.print(screen(status, "top", advice=line.partition(";")[0]))
    shown = " ".join(console.export_text().replace("│", " ").split())
    assert shown.count(line.partition(" to ")[0]) == 2
    monkeypatch.setattr("engine.cli.advice_line.MOST_RECORD_BYTES", 10)
    assert first_advice(run) == "the record is long: use `engine explain`"
    assert first_advice(run / "none") == ""
