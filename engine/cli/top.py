"""`engine top`: watch a running run from another terminal.

Called by the CLI. It requests a `Status` from the run's metrics endpoint once per second and draws it. It does not use
Ray and must never disturb the run. Everything fits into 80 columns.
"""

import http.client
import json
import os
import select
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import ceil

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from engine.cli.advice_line import AdviceWatch, first_advice
from engine.cli.run_view import clock, panel
from engine.control.client import RUN_OPENER, no_answer, not_from_a_run
from engine.errors import ConfigError
from engine.metrics.address_files import FILE, address_of
from engine.metrics.status import Status, status_of
from engine.storage.run_directory import RunDirectory, open_run

EVERY_S = 1.0
PATIENCE_S = 5.0
"""Seconds that the endpoint may take to answer."""
GONE_S = 30.0
"""Maximum seconds without an answer after the first one. A restarted scheduler answers at another address."""
LARGEST_ANSWER_BYTES = 16 << 20
LEAVES = "qQ\x1b\x03"
REPLICAS_SHOWN = 16
ROWS_ALWAYS = 18
"""Rows of a screen without replicas and optional lines."""
BAR_WIDTH = 24
ADVICE_WIDTH = 60
"""Letters of a line of advice, at least."""
SILENCE_S = 5.0
"""A shorter silence is not shown; the run itself reports a long one."""
HELD, FREE = "█", "░"


def has_started(shown: str, is_starting: Callable[[], bool], console: Console) -> bool:
    """Wait while a run starts. False: the user left before."""
    if not is_starting():
        return True
    title = Text(f"Step Engine  {shown} is starting; press q to leave")
    with suppress(KeyboardInterrupt), _keys() as pressed, console.status(title):
        while is_starting():
            if pressed(EVERY_S):
                return False
        return True
    return False


def watch(run: str, console: Console) -> str:
    """Show a run until it ends or the user presses q; without a terminal, show it once. Returns the last line to print.

    Raises: `ConfigError` if the run does not exist, has ended, or does not answer (later: for `GONE_S` seconds).
    """
    directory = open_run(run)
    address = address_of(directory.path, directory.shown)
    status = ask(address, directory.shown)
    title = f"Step Engine  {directory.shown}"
    if not console.is_terminal:
        console.print(screen(status, title, advice=first_advice(directory.path).partition(";")[0]))
        return f"as of {status.elapsed_s:.0f} s after its start"
    live = Live(console=console, screen=True, auto_refresh=False)
    head, answered_at, advice = title, time.monotonic(), AdviceWatch(directory.path)
    with suppress(KeyboardInterrupt), _keys() as pressed, live:
        while True:
            live.update(screen(status, head, height=console.height, advice=advice.line), refresh=True)
            if pressed(EVERY_S) or status.outcome is not None:
                break
            try:
                address = address_of(directory.path, directory.shown)
                status, head, answered_at = ask(address, directory.shown), title, time.monotonic()
            except ConfigError:
                if not (directory.path / FILE).exists():
                    return _last_line(directory, status)
                if time.monotonic() - answered_at > GONE_S:
                    raise
                head = f"Step Engine  no answer from {address}; retrying"
    return _last_line(directory, status) if status.outcome is not None else f"{directory.shown} continues"


def ask(address: str, shown: str) -> Status:
    """Request the status of a run. Raises: `ConfigError` if there is no answer, or it is not from a run."""
    try:
        with RUN_OPENER.open(f"http://{address}/status", timeout=PATIENCE_S) as answer:
            body = answer.read(LARGEST_ANSWER_BYTES + 1)
            if len(body) > LARGEST_ANSWER_BYTES:
                raise ValueError(f"an answer of more than {LARGEST_ANSWER_BYTES} bytes")
            return status_of(json.loads(body))
    except urllib.error.HTTPError as error:
        raise not_from_a_run(address, shown, error) from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise no_answer(address, shown, error) from None
    except (ValueError, TypeError, KeyError, AttributeError, http.client.HTTPException) as error:
        raise not_from_a_run(address, shown, error) from None


def screen(status: Status, title: str, *, height: int = 50, advice: str = "") -> RenderableType:
    """The whole screen: the live view of the run, its state machines, the first line of advice and its replicas."""
    further = (
        status.failures, status.silence, status.calls_now, *status.health, status.validation_now,
        *_progress_rows(status),
    )  # fmt: skip
    room = height - ROWS_ALWAYS - sum(map(bool, further)) - ceil(len(advice) / ADVICE_WIDTH)
    upper = panel(status, title, replicas=False)
    return Group(upper, _machines(status, advice), _replicas(status, max(1, min(REPLICAS_SHOWN, room))))


def _machines(status: Status, advice: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="bold", no_wrap=True, width=9)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_row("groups", _counts(status.groups_live))
    grid.add_row("ended", _counts(status.groups_ended))
    step = f"{status.step_phase}; {status.ready} groups ready for the next, which takes {status.batch_size}"
    grid.add_row("step", step)
    grid.add_row("versions", f"{status.version} published, {status.versions_kept} kept")
    limit = status.admission_limit.replace("_", " ")
    running = f"{status.running} of K = {status.max_concurrent_groups} groups run; what limits the next: "
    grid.add_row("admission", Text(running).append(limit, style="cyan"))
    for name, said in _progress_rows(status).items():
        grid.add_row(name, said)
    if advice:
        grid.add_row("advice", Text(advice, overflow="fold", no_wrap=False))
    return Panel(grid, title="machines", title_align="left", padding=(0, 1))


def _progress_rows(status: Status) -> dict[str, Text]:
    """Rows by name: the state from which a resume would continue and, if any, a drain, a silence, and changes."""
    rows: dict[str, Text] = {}
    if status.checkpoint_every:
        behind = status.step - status.checkpoint_steps
        said = f"no checkpoint yet; one is written every {status.checkpoint_every} steps"
        if status.checkpoint_steps:
            age = clock(status.checkpoint_age_s)
            said = f"a checkpoint of {status.checkpoint_steps} steps, {behind} fewer than trained; {age} old"
        rows["saved"] = Text(said, style="yellow" if behind > 2 * status.checkpoint_every else "")
    if status.draining:
        rows["drain"] = Text(f"the run has been draining for {clock(status.draining_s)}", style="yellow")
    if status.silent_s >= SILENCE_S and not status.silence:
        rows["silence"] = Text(f"no event for {clock(status.silent_s)}")
    changes = [f"{how} {times}×" for how, times in status.recoveries.items()]
    changes += [f"{name.rpartition('.')[2]} = {value}" for name, value in status.settings.items()]
    if changes:
        rows["changed"] = Text("; ".join(changes))
    return rows


def _counts(counts: dict[str, int]) -> Text:
    """The counts above 0."""
    text = Text()
    for state, count in counts.items():
        if count:
            text.append(f"{state} ", style="dim").append(f"{count}  ")
    return text or Text("none", style="dim")


def _replicas(status: Status, shown: int) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    for width, justify in ((7, "right"), (10, "left"), (9, "left"), (BAR_WIDTH, "left"), (9, "right")):
        table.add_column(no_wrap=True, width=width, justify=justify)  # type: ignore[arg-type]
    for id, state in list(status.replica_states.items())[:shown]:
        held, slots = status.replica_slots.get(id, (0, 0))
        full = round(BAR_WIDTH * held / slots) if slots else 0
        bar = Text(HELD * full, style="green").append(FREE * (BAR_WIDTH - full), style="dim")
        if id in status.replicas_slow:
            state = "slow" if state == "ready" else state
        style = "" if state == "ready" else "yellow"
        version = f"v{status.replica_versions[id]}" if id in status.replica_versions else ""
        cache = [f"KV {100 * status.replica_caches[id]:.0f}%"] if id in status.replica_caches else []
        table.add_row(f"{id}", Text(state, style=style), version, bar, f"{held}/{slots}" if slots else "", *cache)
    more = len(status.replica_states) - shown
    notes = [f"{more} more"] if more > 0 else []
    there = len(status.replica_slots)
    notes += [f"{there} of {status.replicas_wanted} wanted"] if there != status.replicas_wanted else []
    notes += [f"{status.replicas_lost} lost"] if status.replicas_lost else []
    title = "replicas" + (f" ({', '.join(notes)})" if notes else "")
    return Panel(table, title=title, title_align="left", padding=(0, 1))


def _last_line(directory: RunDirectory, status: Status) -> str:
    return f"the run has {status.outcome or 'ended'}; use `engine replay {directory.shown}` to read its record"


class _Pressed:
    """Whether the user wants to leave. A call waits for a key, at most the given number of seconds."""

    def __init__(self, keys: int | None) -> None:
        self._keys = keys

    def __call__(self, seconds: float) -> bool:
        watched = [] if self._keys is None else [self._keys]
        ready, _, _ = select.select(watched, [], [], seconds)
        if not ready or self._keys is None:
            return False
        pressed = os.read(self._keys, 64).decode(errors="replace")
        return not pressed or any(key in LEAVES for key in pressed)


@contextmanager
def _keys() -> Iterator[_Pressed]:
    """Read single keys from the terminal, without echo. Without a terminal there are no keys."""
    if not sys.stdin.isatty():
        yield _Pressed(None)
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield _Pressed(keys)
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
