"""Bug files: they repeat the decisions of a run, hold none of its texts, and are refused if they are damaged."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_golden import RUNS
from record_samples import FAULTS, LIMITS, events, record_run

from engine import policies
from engine.config.plain_settings import plain_settings
from engine.errors import ConfigError, RecordError
from engine.inspect import open_record, state_at
from engine.inspect.bug_report import BugReport, report_bug
from engine.inspect.cursor import Cursor
from engine.policies import registry
from engine.record import Header, MemoryRecorder, Record, read, replay
from engine.record.bug_file import BUG_VERSION, HEAD, MAGIC, BugFile, read_bug_file, write_bug_file
from engine.record.placeholders import PROCESS, WORDS, Placeholders
from engine.record.replayer import build_scheduler
from engine.record.snapshots import snapshot
from engine.states.limits import Limits
from engine.testing import assert_same_schedule

MARK = "SECRET /home/alice"


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a value, in keys too; bytes are msgpack."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield from texts_in(msgspec.msgpack.decode(value))
    elif isinstance(value, msgspec.Struct):
        yield from texts_in([getattr(value, name) for name in value.__struct_fields__])
    elif isinstance(value, dict):
        yield from texts_in([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


def marked(record: Record, snapshot_every: int = 30) -> Record:
    """The record of the same run with marks in the reasons of its events, and in what policies see of groups."""
    scheduler = build_scheduler(record.header)
    recorder = MemoryRecorder(record.header)
    for tick in record.ticks():
        found = []
        for number, event in enumerate(tick.events):
            changes: dict[str, Any] = {}
            if getattr(event, "reason", ""):
                changes["reason"] = f"KeyError: {MARK} {event.id} {number}"
            if hasattr(event, "tokens") and hasattr(event, "described"):
                changes["described"] = msgspec.json.encode({"source": MARK, "fields": {MARK: MARK, "n": 1}}).decode()
            found.append(msgspec.structs.replace(event, **changes))
        recorder.write(found, scheduler.tick(found))
        if tick.number % snapshot_every == snapshot_every - 1:
            recorder.snapshot(snapshot(scheduler))
    return read(recorder)


def reported(record: Record, monkeypatch: pytest.MonkeyPatch, least: int = 40, **options: Any) -> BugReport:
    monkeypatch.setattr("engine.inspect.bug_report.LEAST_EVENTS", least)
    return report_bug(record, {}, (), **options)


def stored(report: BugReport, path: Path) -> Path:
    write_bug_file(path, BugFile(engine="1.0", environment={}, segment=report.recorder.to_bytes()))
    return path


@given(event=events)
def test_no_text_of_an_event_is_kept_unless_the_engine_made_it(event: Any) -> None:
    placeholders = Placeholders(["kept"])
    once = placeholders.replaced(event)
    for text in texts_in(once):
        ours = not text or text in WORDS or PROCESS.fullmatch(text) or text.startswith("text ")
        assert ours or text.lstrip("-")[0].isdigit() or text[0] in "[{", f"{text!r} is no text of the engine"
    assert placeholders.replaced(event) == once, "equal texts get the same placeholder"


@given(text=st.text(min_size=1).filter(lambda text: text not in WORDS), described=st.booleans())
def test_a_text_inside_json_or_a_memory_is_replaced(text: str, described: bool) -> None:
    value = {"source": text, "fields": {text: [text, 3.5]}}
    if described:
        found = msgspec.json.decode(Placeholders([]).replaced(msgspec.json.encode(value).decode(), "described"))
    else:
        found = msgspec.msgpack.decode(Placeholders([]).replaced(msgspec.msgpack.encode(value)))
    assert found == {"source": "text 1", "fields": {"text 1": ["text 1", 3.5]}}


def test_answers_stay_equal_or_different_but_not_their_hashes() -> None:
    found = Placeholders([]).replaced({"answers": (0, 811, 4, 811)}["answers"], "answers")
    assert found == (0, 1, 2, 1)


@pytest.mark.parametrize("name", [*RUNS, "failing"])
def test_a_bug_file_repeats_the_decisions_without_the_texts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {**RUNS.get(name, {}), "max_failure_share": 0.9}
    if name == "validation":
        kept = {"name": "acme", "prompts": 13, "samples": 1, "parts": ["style"]}
        changes |= {"keep_best": "acme/reward_style", "validation": {**changes["validation"], "sets": [kept]}}
    faults = replace(FAULTS, fail_data=1.0) if name == "failing" else FAULTS
    record = marked(read(record_run(seed=5, limits=Limits.from_plain({**LIMITS.to_plain(), **changes}), faults=faults)))
    report = reported(record, monkeypatch)
    found = open_record(stored(report, tmp_path / "x"))
    assert not report.divergence and found.begin is not None
    replayed = replay(found)
    assert replayed.identical and replayed.events >= 40
    shown = zlib.decompress((tmp_path / "x").read_bytes()[HEAD.size :])
    for word in (b"SECRET", b"alice", b"acme", b"style", b"seed-5"):
        assert word not in shown, word
    assert b"(KeyError)" in shown
    last, mine = [*record.ticks()][-1], [*found.ticks()][-1]
    assert (last.number, last.last, last.at) == (mine.number, mine.last, mine.at)
    assert [type(one) for one in last.commands] == [type(one) for one in mine.commands]
    outcome = found.outcome()
    assert outcome is not None and (outcome.outcome == "failed") == (name == "failing")


def test_a_bug_file_that_begins_late_is_read_from_its_first_tick_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = marked(read(record_run(seed=5)))
    found = open_record(stored(reported(record, monkeypatch), tmp_path / "x"))
    begin = found.begin
    assert begin is not None
    cursor, whole = Cursor(lambda: found), Cursor(lambda: record)
    for tick in (begin.ticks, len(whole) - 1, begin.ticks + 3):
        cursor.seek(tick)
        whole.seek(tick)
        assert cursor.state.held == whole.state.held and cursor.tick.first == whole.tick.first
    for move in (lambda: cursor.seek(begin.ticks - 1), lambda: cursor.seek_event(begin.position - 1)):
        with pytest.raises(ConfigError, match=rf"use a number from ({begin.ticks}|{begin.position}) to"):
            move()
    with pytest.raises(ConfigError, match="does not exist"):
        state_at(found, begin.position - 1)
    moment = state_at(found, begin.position, 0)
    assert moment.events[0].id == begin.position and "the story begins at tick" in str(moment)


def test_a_whole_bug_file_is_a_golden_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = marked(read(record_run(seed=5)))
    path = stored(reported(record, monkeypatch, whole=True), tmp_path / "x")
    assert open_record(path).begin is None and next(open_record(path).ticks()).number == 0
    assert_same_schedule(path)
    late = stored(reported(record, monkeypatch), tmp_path / "y")
    with pytest.raises(ConfigError, match="but a golden schedule needs the first events"):
        assert_same_schedule(late)


def test_a_bug_file_names_where_this_engine_decides_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    record = marked(read(record_run(seed=5)))
    other = MemoryRecorder(record.header)
    for tick in record.ticks():
        other.write(tick.events, tick.commands[tick.number == 60 :])
    report = reported(read(other), monkeypatch)
    assert "diverged at tick 60" in report.divergence and report.recorder.next_tick == 61
    assert not replay(read(report.recorder)).identical


def test_a_bug_file_of_a_policy_that_is_not_here_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class KeepAll:
        def keep(self, view: Any, outcome: Any) -> bool:
            return True

    policies.register("filter", "keep-all")(KeepAll)
    try:
        record = read(record_run(seed=5, snapshot_every=30))
        head = msgspec.structs.replace(record.header, policies={"filter": "keep-all"})
        recorder = MemoryRecorder(head)
        for tick in record.ticks():
            recorder.write(tick.events, tick.commands)
        path = stored(reported(read(recorder), monkeypatch), tmp_path / "x")
        assert replay(open_record(path)).identical
    finally:
        registry.forget([KeepAll])
    with pytest.raises(RecordError, match=r"'keep-all'.* is not a registered policy"):
        replay(open_record(path))


def _with_version(data: bytes) -> bytes:
    return HEAD.pack(MAGIC, BUG_VERSION + 1, 0) + data[HEAD.size :]


def _bomb(data: bytes) -> bytes:
    packed = zlib.compress(b"\xc4" + bytes(1 << 27))
    return HEAD.pack(MAGIC, BUG_VERSION, zlib.crc32(packed)) + packed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_with_version, "is a bug file of version 2, but this engine reads 1"),
        (lambda data: b"", "is no bug file"),
        (lambda data: b"x" * 100, "is no bug file"),
        (lambda data: data[:-1], "is damaged"),
        (_bomb, "cannot be decoded"),
    ],
)
def test_what_is_no_bug_file_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], words: str) -> None:
    path = tmp_path / "x"
    write_bug_file(path, BugFile(engine="1.0", environment={}, segment=b""))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RecordError, match=words):
        read_bug_file(path)


def test_a_snapshot_of_another_engine_names_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = reported(marked(read(record_run(seed=5))), monkeypatch)
    path = stored(report, tmp_path / "x")
    monkeypatch.setattr("engine.record.snapshots.declarations", lambda: [])
    monkeypatch.setattr("engine.record.replayer.declarations", lambda: [])
    with pytest.raises(RecordError, match="use engine test, whose facts it has"):
        replay(open_record(path))


def test_settings_that_are_texts_or_unknown_are_left_out() -> None:
    given = {
        "run": {"name": MARK, "seed": 3, "dir": MARK, "extensions": [MARK]},
        "model": {"path": MARK, "make": "arithmetic"},
        "rollout": {"slots": 4, "backend": MARK, "sync_mode": "abort"},
        "cluster": {"runtime_env": {"env_vars": {"PIN": 1234}}},
        "mine": {"PIN": 1234},
    }
    found = plain_settings(given)
    assert found["run"] == {"seed": 3} and found["model"] == {"make": "arithmetic"}
    assert found["rollout"] == {"slots": 4, "sync_mode": "abort"}
    assert "1234" not in str(found) and MARK not in str(found)


def test_the_header_keeps_no_name_of_the_run() -> None:
    record = read(MemoryRecorder(Header(run=MARK, limits=LIMITS.to_plain())))
    with pytest.raises(ConfigError, match="has no event yet"):
        report_bug(record, {}, ())
