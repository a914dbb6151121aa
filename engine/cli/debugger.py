"""`engine debug RUN`: steps through a record in the terminal, forward and backward.

Called by the CLI. It shows a `Cursor` of `engine.inspect`, which has all the logic, and needs the package textual. A
search and the notes about blocks run on other threads, each with a cursor of its own. It must never write into the run.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Vertical, VerticalScroll
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Static
from textual.worker import get_current_worker

from engine.errors import ConfigError, EngineError, visible
from engine.inspect.breakpoints import EXAMPLES, Breakpoint, parse_breakpoint
from engine.inspect.cursor import Cursor
from engine.inspect.panes import headline, machine_lines, order_lines, replica_lines, tick_lines

SMALLEST = (80, 24)
"""Columns and rows that the panes need."""
FOLLOW_EVERY_S = 1.0
STYLES = {"event": "bold", "command": "cyan", "change": "green", "rejected": "red"}
PANES = {
    "machines": "machines",
    "replicas": "replicas: a group in each slot",
    "orders": "order book",
    "tick": "events, commands, changes",
}
PLACES = "tick=12, event=40, step=3, time=12.5"


def debug(run: str, open: Callable[[], Any], where: str | None, breakpoint: str | None) -> int:
    """Show the record of a run. `run`: as messages show it. Raises: `ConfigError` without a terminal, or for a place or
    breakpoint that does not exist; `EngineError`."""
    require_terminal(run)
    from rich.console import Console

    with Console(stderr=True).status("reading the record") as status:
        cursor = Cursor(open, progress=lambda ticks: status.update(f"reading the record: {ticks:,} ticks"))
        if where is not None:
            move_to(cursor, where)
        wanted = None if breakpoint is None else parse_breakpoint(breakpoint, cursor.added_states)
    Debugger(cursor, run, wanted).run()
    return 0


def require_terminal(run: str) -> None:
    """Raises: `ConfigError` if input or output is not a terminal that can show the panes."""
    fix = f"without one, use `engine replay {run} --at EVENT`, with --json for a program"
    for name, stream in (("stdin", sys.stdin), ("stdout", sys.stdout)):
        if not stream.isatty():
            raise ConfigError("stream", name, "is not a terminal, which engine debug needs", fix)
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        raise ConfigError("TERM", os.environ.get("TERM", ""), "is not a terminal that can show panes", fix)


def move_to(cursor: Cursor, where: str) -> None:
    """Move to a tick by its number, event, train step or time. Raises: `ConfigError`."""
    name, equals, value = where.replace(" ", "").partition("=")
    if not equals:
        name, value = "tick", name
    moves: dict[str, Callable[[float], None]] = {
        "tick": lambda number: cursor.seek(int(number)),
        "event": lambda number: cursor.seek_event(int(number)),
        "step": lambda number: cursor.seek_step(int(number)),
        "time": cursor.seek_time,
    }
    if name not in moves:
        raise ConfigError("place", where, f"has an unknown name: {name}", f"for example {PLACES}")
    try:
        number = float(value) if name == "time" else int(value)
    except ValueError:
        raise ConfigError("place", where, "must have a number", f"for example {PLACES}") from None
    moves[name](number)


class LineDialog(ModalScreen[str]):
    """Asks for one line. Escape gives an empty answer."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "leave", "cancel")]

    def __init__(self, title: str, examples: str, before: str = "") -> None:
        super().__init__()
        self._title, self._examples, self._before = title, examples, before

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog"):
            yield Static(f"{self._title}, for example {self._examples}")
            yield Input(self._before)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)

    def action_leave(self) -> None:
        self.dismiss("")


class Page(ModalScreen[None]):
    """Lines to scroll. Escape closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,d,q,enter", "leave", "close")]

    def __init__(self, title: str, lines: list[str]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="page"):
            yield Static(Text("\n".join([self._title, "", *self._lines])))

    def action_leave(self) -> None:
        self.dismiss(None)


class Debugger(App[None]):
    """The panes of one cursor."""

    CSS = """
    #head, #note { height: 1; padding: 0 1; }
    #head { text-style: bold; }
    #panes { grid-size: 2 2; grid-rows: 1fr 1fr; grid-columns: 1fr 1fr; }
    #machines, #replicas, #orders { text-wrap: nowrap; text-overflow: ellipsis; }
    .pane { border: round $primary; padding: 0 0 0 1; scrollbar-size-vertical: 1; }
    .pane:focus { border: round $accent; }
    #small { display: none; padding: 1 2; }
    Debugger.too-small #panes, Debugger.too-small #head, Debugger.too-small #note { display: none; }
    Debugger.too-small #small { display: block; }
    LineDialog, Page { align: center middle; }
    #dialog { width: 76; height: 7; border: round $accent; padding: 0 1; background: $surface; }
    #page { width: 90%; height: 90%; border: round $accent; padding: 0 1; background: $surface; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1)", show=False),
        Binding("right,l", "move(1)", "tick", key_display="← →"),
        Binding("left_square_bracket", "step(False)", show=False),
        Binding("right_square_bracket", "step(True)", "step", key_display="[ ]"),
        Binding("b", "breakpoint", "break"),
        Binding("p", "find(False)", show=False),
        Binding("n", "find(True)", "find", key_display="p n"),
        Binding("g", "go", "go to"),
        Binding("m", "mark", "mark"),
        Binding("d", "changes", "diff"),
        Binding("f", "follow", "follow"),
        Binding("home", "end(False)", "first", show=False),
        Binding("end", "end(True)", "last", show=False),
        Binding("escape", "stop", "stop the search", show=False),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, cursor: Cursor, run: str, wanted: Breakpoint | None = None) -> None:
        super().__init__()
        self.cursor = cursor
        self._shown_run = run
        self.wanted = wanted
        self.mark = cursor.first
        self.following = False
        self.searching = ""

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with Grid(id="panes"):
            for name, title in PANES.items():
                pane = VerticalScroll(Static(id=name), classes="pane")
                pane.border_title = title
                yield pane
        yield Static(id="small")
        yield Static(id="note")
        yield Footer()

    def on_mount(self) -> None:
        self.title = f"engine debug {self._shown_run}"
        self._show()
        self.set_interval(FOLLOW_EVERY_S, self._grow)
        self._note_blocks()
        if self.wanted is not None:
            self.action_find(True)

    def on_resize(self, event: Resize) -> None:
        small = event.size.width < SMALLEST[0] or event.size.height < SMALLEST[1]
        self.set_class(small, "too-small")
        text = f"The terminal has {event.size.width} × {event.size.height} characters; the panes need 80 × 24. "
        self.query_one("#small", Static).update(Text(f"{text}Make it larger, or press q."))
        self._show()

    # what is shown

    def _show(self) -> None:
        state, width = self.cursor.state, max(30, self.size.width // 2 - 6)
        self.query_one("#head", Static).update(Text(f"{self._shown_run}  {headline(self.cursor)}"))
        for name, lines in (
            ("machines", machine_lines(state)),
            ("replicas", replica_lines(state, width)),
            ("orders", order_lines(state, self.cursor.tick.at)),
        ):
            self.query_one(f"#{name}", Static).update(Text(visible("\n".join(lines))))
        tick = Text()
        for kind, line in tick_lines(self.cursor):
            tick.append(f"{visible(line)}\n", style=STYLES[kind])
        self.query_one("#tick", Static).update(tick)
        self._show_note()

    def _show_note(self) -> None:
        first, last = map(self.cursor.block_of, (self.cursor.first, len(self.cursor) - 1))
        blocks, known = last - first, len(self.cursor.blocks.contents)
        parts = [self.searching or (f"breakpoint {self.wanted.text}" if self.wanted else "no breakpoint: b sets one")]
        parts += [f"mark at tick {self.mark}"] + ["following the run"] * self.following
        parts += [f"{100 * known // blocks} % indexed"] if known < blocks else []
        self.query_one("#note", Static).update(Text("  ·  ".join(parts), style="dim"))

    def _try(self, move: Callable[[], object]) -> None:
        """Move, and show the result or why it is impossible."""
        try:
            move()
        except EngineError as error:
            self.notify(str(error), severity="error", markup=False)
        self._show()

    # keys

    def action_move(self, ticks: int) -> None:
        tick = self.cursor.tick.number + ticks
        if self.cursor.first <= tick < len(self.cursor):
            self._try(lambda: self.cursor.seek(tick))

    def action_end(self, last: bool) -> None:
        self._try(lambda: self.cursor.seek(len(self.cursor) - 1 if last else self.cursor.first))

    def action_step(self, forward: bool) -> None:
        self._search(parse_breakpoint("event=StepTrained"), forward)

    def action_find(self, forward: bool) -> None:
        if self.wanted is None:
            self.action_breakpoint()
        else:
            self._search(self.wanted, forward)

    def action_breakpoint(self) -> None:
        def answered(text: str | None) -> None:
            if text:
                self._try(lambda: self._break_at(text))

        self.push_screen(LineDialog("Stop at", EXAMPLES, self.wanted.text if self.wanted else ""), answered)

    def _break_at(self, text: str) -> None:
        self.wanted = parse_breakpoint(text, self.cursor.added_states)
        self._search(self.wanted, True)

    def action_go(self) -> None:
        def answered(text: str | None) -> None:
            if text:
                self._try(lambda: move_to(self.cursor, text))

        self.push_screen(LineDialog("Go to", PLACES), answered)

    def action_mark(self) -> None:
        self.mark = self.cursor.tick.number
        self._show_note()

    def action_changes(self) -> None:
        try:
            lines = self.cursor.changes(self.mark, self.cursor.tick.number)
        except EngineError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        title = f"what changed from tick {self.mark} (the mark) to tick {self.cursor.tick.number}"
        self.push_screen(Page(title, [visible(line) for line in lines] or ["nothing"]))

    def action_follow(self) -> None:
        self.following = not self.following
        self._grow()
        if self.following:
            self.action_end(True)
        self._show_note()

    def action_stop(self) -> None:
        self.workers.cancel_group(self, "search")

    # the record

    def _grow(self) -> None:
        """Read what the run has written since; if the view follows it, show its newest tick."""
        if not self.is_running:  # it closes, and its panes are gone
            return
        try:
            added = self.cursor.grow()
        except EngineError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        if added and self.following:
            self.action_end(True)
        elif added:
            self._show()
        else:
            self._show_note()

    def _search(self, wanted: Breakpoint, forward: bool) -> None:
        if self.searching:
            return
        self.workers.cancel_group(self, "blocks")
        self.searching = f"searching {wanted.text}; Esc stops"
        self._show_note()
        self._find(wanted, forward)

    @work(thread=True, exclusive=True, group="search")
    def _find(self, wanted: Breakpoint, forward: bool) -> None:
        worker, here = get_current_worker(), self.cursor.tick.number
        said, found = "", None
        try:
            begin = here + 1 if forward else here - 1
            found = self.cursor.twin().find(wanted, begin, forward=forward, going=lambda: not worker.is_cancelled)
        except EngineError as error:
            said = str(error)
        if not said and found is None and not worker.is_cancelled:
            said = f"no tick {'after' if forward else 'before'} tick {here} matches {wanted.text}"
        self.call_from_thread(self._found, found, said)

    def _found(self, tick: int | None, said: str) -> None:
        self.searching = ""
        if said:
            self.notify(said, severity="warning", markup=False)
        if tick is not None:
            self._try(lambda: self.cursor.seek(tick))
        self._show_note()
        self._note_blocks()

    @work(thread=True, exclusive=True, group="blocks")
    def _note_blocks(self) -> None:
        """Replay every block once, so that later moves and searches are fast."""
        worker, cursor = get_current_worker(), self.cursor.twin()
        for block in range(cursor.block_of(cursor.first), cursor.block_of(len(cursor) - 1)):
            if worker.is_cancelled:
                return
            if block not in cursor.blocks.contents:
                try:
                    cursor.scan(block)
                except EngineError:
                    return  # a move there says why
