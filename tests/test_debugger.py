"""`engine debug`: keys, panes, and its words where it cannot show them. The cursor behind it has tests of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from steady_world import steady_world
from textual.pilot import Pilot
from textual.widgets import Input, Static

from engine import cli
from engine.cli import debugger
from engine.cli.debugger import Debugger, Page, move_to
from engine.commands import TrainStep
from engine.errors import ConfigError
from engine.inspect import open_record
from engine.inspect.bug_report import report_bug
from engine.inspect.cursor import Cursor
from engine.record import Header, Recorder
from engine.record.bug_file import BugFile, write_bug_file

Script = Callable[[Debugger, Pilot[None]], Awaitable[None]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    limits = steady_world(steps=3).setting.limits
    recorder = Recorder(directory / "schedule", Header(run="small", limits=limits.to_plain()))
    steady_world(steps=3, recorder=recorder, snapshot_every=5).run()
    recorder.close()
    return directory


@pytest.fixture
def late(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bug file of the run that lacks its first ticks."""
    monkeypatch.setattr("engine.inspect.bug_report.LEAST_EVENTS", 20)
    report = report_bug(open_record(run), {}, ())
    write_bug_file(tmp_path / "x", BugFile(engine="1", environment={}, segment=report.recorder.to_bytes()))
    return tmp_path / "x"


def drive(run: Path, script: Script, size: tuple[int, int] = (120, 40)) -> None:
    async def main() -> None:
        app = Debugger(Cursor(lambda: open_record(run)), "runs/small")
        async with app.run_test(size=size) as pilot:
            await script(app, pilot)

    asyncio.run(main())


async def press(app: Debugger, pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await pilot.pause()
    await app.workers.wait_for_complete()
    await pilot.pause()


def text_of(app: Debugger, pane: str) -> str:
    return str(app.query_one(f"#{pane}", Static).render())


def test_a_bug_file_that_begins_late_is_shown_from_its_first_tick(late: Path) -> None:
    async def script(app: Debugger, pilot: Pilot[None]) -> None:
        first = app.cursor.first
        assert app.cursor.tick.number == app.mark == first > 0
        await press(app, pilot, "left")
        assert app.cursor.tick.number == first
        await press(app, pilot, "end", "home", "right", "d")
        assert app.cursor.tick.number == first + 1
        assert isinstance(app.screen, Page)

    drive(late, script)


def test_keys_move_by_tick_step_breakpoint_and_place(run: Path) -> None:
    async def script(app: Debugger, pilot: Pilot[None]) -> None:
        await press(app, pilot, "right", "right", "left")
        assert app.cursor.tick.number == 1 and "tick 1 of" in text_of(app, "head")
        await press(app, pilot, "right_square_bracket")
        assert app.cursor.state.training.steps_trained == 1
        await press(app, pilot, "b")
        app.screen.query_one(Input).value = "command=TrainStep"
        await press(app, pilot, "enter")
        assert any(type(one) is TrainStep for one in app.cursor.tick.commands)
        assert "-> TrainStep(step=1" in text_of(app, "tick") and "2 batched" in text_of(app, "machines")
        assert "trainer" in text_of(app, "orders") and "0 ready" in text_of(app, "replicas")
        await press(app, pilot, "p")
        assert "-> TrainStep(step=0" in text_of(app, "tick")
        await press(app, pilot, "end", "m", "home", "d")
        assert app.mark == len(app.cursor) - 1
        assert isinstance(app.screen, Page) and app.cursor.tick.number == 0

    drive(run, script)


def test_a_breakpoint_without_a_match_is_named_and_moves_nothing(run: Path) -> None:
    async def script(app: Debugger, pilot: Pilot[None]) -> None:
        await press(app, pilot, "b")
        app.screen.query_one(Input).value = "group=99999"
        await press(app, pilot, "enter")
        assert "no tick after tick 0 matches" in [*app._notifications][-1].message
        assert app.cursor.tick.number == 0

    drive(run, script)


def test_nothing_is_shown_once_the_debugger_has_closed(run: Path) -> None:
    async def main() -> None:
        app = Debugger(Cursor(lambda: open_record(run)), "runs/small")
        async with app.run_test():
            app._grow()
        app._grow()  # its timer may fire while it closes

    asyncio.run(main())


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("step=77", "is not in the record"),
        ("tick=-1", "does not exist"),
        ("event=99999", "does not exist"),
        ("time=1e9", "is not in the run"),
        ("soon", "must have a number"),
        ("day=3", "unknown name: day"),
    ],
)
def test_a_place_that_does_not_exist_is_refused(run: Path, place: str, words: str) -> None:
    cursor = Cursor(lambda: open_record(run))
    with pytest.raises(ConfigError, match=words):
        move_to(cursor, place)


def test_a_small_terminal_gets_a_message_until_it_is_large_enough(run: Path) -> None:
    async def script(app: Debugger, pilot: Pilot[None]) -> None:
        assert app.query_one("#small").display and not app.query_one("#panes").display
        assert "70 × 20" in text_of(app, "small")
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert app.query_one("#panes").display and not app.query_one("#small").display

    drive(run, script, size=(70, 20))


def test_without_a_terminal_the_command_says_what_to_use(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["debug", str(run)]) == 2
    said = capsys.readouterr().err
    assert "is not a terminal, which engine debug needs" in said and "engine replay" in said and "--at EVENT" in said
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(ConfigError, match="TERM 'dumb' is not a terminal that can show panes"):
        debugger.require_terminal("latest")
