"""`engine top` in a real pseudo-terminal, against the endpoint of a run whose time the test moves."""

import codecs
import fcntl
import io
import os
import pty
import re
import select
import socketserver
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console
from steady_world import SteadyWorld, steady_world

from engine import events as e
from engine.cli import main
from engine.cli.top import screen
from engine.metrics.address_files import FILE, announce, withdraw
from engine.metrics.export import registry
from engine.metrics.metrics_server import MetricsServer
from engine.metrics.status import plain_status, read_status, status_of
from engine.record.files import RecordLock
from engine.states.limits import Limits
from engine.states.replicas import SAMPLES

COLUMNS, ROWS = 80, 30
STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\x1b\][^\x07]*\x07")


class Served:
    """A run directory whose run answers, as far as the test has moved it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "schedule").mkdir(parents=True)
        self.world = steady_world(batch=4, stale=2, workers=12, steps=None, slots=6, sync_s=0.125)
        self.lock = threading.Lock()
        self.server = MetricsServer(registry(self.world.metrics), describe=self.describe)
        announce([directory / FILE], self.server.address, directory.name)

    def describe(self) -> dict[str, object]:
        with self.lock:
            return plain_status(self.world.metrics, self.world.time)

    def steps(self, count: int) -> None:
        with self.lock:
            self.world.until(lambda state: state.training.steps_trained == count)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "20260101-000000-watched")
    served.steps(3)
    yield served
    served.server.close()


class Terminal:
    """`engine top` in a pseudo-terminal of 80 columns. `gone_s`: how long it waits for a run that does not answer."""

    def __init__(self, directory: Path, gone_s: float = 60.0, **variables: str) -> None:
        self.outer, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(inner)
        self.inner = inner
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": "", **variables}
        program = f"import sys; from engine.cli import main, top; top.GONE_S = {gone_s}; sys.exit(main(sys.argv[1:]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "top", str(directory)],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={name: value for name, value in environment.items() if value},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.said = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def until(self, wanted: str, timeout_s: float = 30.0) -> None:
        """Read until a text has appeared since the last wait for one."""
        while not re.search(wanted, STYLE.sub("", self.said), re.DOTALL):
            ready, _, _ = select.select([self.outer], [], [], timeout_s)
            assert ready, f"{wanted} did not appear in:\n{STYLE.sub('', self.said)}"
            self.said += self._decode(os.read(self.outer, 65536))
        self.shown, self.said = self.said, ""

    def type(self, keys: str) -> None:
        os.write(self.outer, keys.encode())

    def close(self) -> tuple[int, str]:
        """Its exit code, and what it said since the last wait."""
        code = self.process.wait(30)
        while select.select([self.outer], [], [], 0)[0]:
            self.said += self._decode(os.read(self.outer, 65536))
        return code, STYLE.sub("", self.said)


@pytest.fixture
def open_terminal(served: Served) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(**options: Any) -> Terminal:
        opened.append(Terminal(served.directory, **options))
        return opened[-1]

    yield open_one
    for terminal in opened:
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait()
        os.close(terminal.outer)
        os.close(terminal.inner)


@pytest.fixture
def terminal(open_terminal: Callable[..., Terminal]) -> Terminal:
    return open_terminal()


def test_it_follows_a_run_and_leaves_at_a_key(served: Served, terminal: Terminal) -> None:
    terminal.until(r"step\s+3/\?.*admission.*replicas.*ready\s+v\d")
    assert "\x1b[?1049h" in terminal.shown, "on a screen of its own"
    served.steps(7)
    terminal.until(r"step\s+7/\?")
    terminal.type("x")
    served.steps(9)
    terminal.until(r"step\s+9/\?")
    terminal.type("q")
    code, said = terminal.close()
    assert code == 0 and "continues" in said and "Traceback" not in said
    assert termios.tcgetattr(terminal.inner) == terminal.before, "the terminal is as it was"


def test_it_waits_for_a_run_that_starts(served: Served, open_terminal: Callable[..., Terminal]) -> None:
    withdraw([served.directory / FILE])
    preparing = RecordLock(served.directory)
    left, stays = open_terminal(), open_terminal()
    for terminal in (left, stays):
        terminal.until("is starting; press q to leave")
    left.type("q")
    code, said = left.close()
    assert code == 0 and "is still starting" in said
    announce([served.directory / FILE], served.server.address, served.directory.name)
    stays.until(r"step\s+3/\?")
    stays.type("q")
    assert stays.close()[0] == 0
    preparing.release()


def test_an_interrupt_leaves_it_too(served: Served, terminal: Terminal) -> None:
    terminal.until("admission")
    terminal.type("\x03")
    code, said = terminal.close()
    assert code == 0 and "Traceback" not in said
    assert termios.tcgetattr(terminal.inner) == terminal.before


def test_a_run_that_ends_ends_it(served: Served, terminal: Terminal) -> None:
    terminal.until("admission")
    withdraw([served.directory / FILE])
    served.server.close()
    code, said = terminal.close()
    assert code == 0 and "the run has ended" in said and "engine replay" in said


def test_a_killed_run_is_reported_as_not_answering(served: Served, open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal(gone_s=1.0)
    terminal.until("admission")
    served.server.close()
    code, said = terminal.close()
    assert code == 2 and "does not answer at 127.0.0.1" in said and "Traceback" not in said


def test_a_run_whose_scheduler_starts_again_is_followed_to_its_new_address(served: Served, terminal: Terminal) -> None:
    terminal.until("admission")
    served.server.close()
    terminal.until("no answer from")
    served.steps(7)
    served.server = MetricsServer(registry(served.world.metrics), describe=served.describe)
    announce([served.directory / FILE], served.server.address, served.directory.name)
    terminal.until(r"step\s+7/\?")
    terminal.type("q")
    code, said = terminal.close()
    assert code == 0 and "continues" in said


def test_a_run_that_does_not_answer_can_be_left(served: Served, terminal: Terminal) -> None:
    terminal.until("admission")
    served.server.close()
    terminal.until("no answer from")
    terminal.type("q")
    assert terminal.close()[0] == 0


def test_a_terminal_that_is_not_utf_8_has_it_in_plain_letters(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal(PYTHONIOENCODING="latin-1")
    terminal.until(r"step\s+3/\?.*replicas.*ready +v\d +[#.]{24} +\d/6")
    terminal.type("q")
    code, said = terminal.close()
    assert code == 0 and "Traceback" not in said


def test_without_a_terminal_it_shows_one_picture(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(served.directory)]) == 0
    said = capsys.readouterr().out
    assert "what limits the next" in said and "as of" in said


def test_everything_fits_eighty_columns(served: Served) -> None:
    status = status_of(served.describe())
    console = Console(width=COLUMNS, record=True, file=io.StringIO())
    console.print(screen(status, "Step Engine  runs/" + "x" * 90))
    lines = console.export_text().splitlines()
    assert len(lines) <= ROWS and max(map(len, lines)) <= COLUMNS
    text = "\n".join(lines)
    for word in ("generating ", "consumed 12", "groups ready for the next", "published", "staleness", "█"):
        assert word in text, word


def test_what_interrupts_or_changes_a_run_is_shown_while_it_lasts() -> None:
    limits = Limits(
        train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, checkpoint_every=2, straggler_factor=2.0
    )
    world = SteadyWorld(limits, replicas=3, slots=4, sync_s=0.125)
    world.until(lambda state: state.training.steps_trained == 6)

    def shown() -> str:
        console = Console(width=COLUMNS, record=True, file=io.StringIO())
        status = status_of(plain_status(world.metrics, world.time + 12.0))
        console.print(screen(status, "Step Engine  runs/latest", height=ROWS))
        lines = console.export_text().splitlines()
        assert len(lines) <= ROWS and max(map(len, lines)) <= COLUMNS
        return "\n".join(lines)

    before = shown()
    assert "a checkpoint of 4 steps, 2 fewer than trained" in before and "no event for 0:12" in before
    assert "changed" not in before and "drain" not in before
    world.tell(e.SettingChanged(setting="scheduler.max_concurrent_groups", value="11"))
    world.tell(e.ReplicasWanted(replicas=5))
    world.tell(e.DrainRequested(reason="asked to"))
    slow_down(world, 1)
    after = shown()
    for text in (
        "changed   max_concurrent_groups = 11",
        "draining for 0:12",
        "draining",
        "what limits the next: draining",
    ):
        assert text in after, text


def test_on_the_smallest_terminal_everything_shown_leaves_room_for_replicas() -> None:
    """24 rows, as a terminal has that nobody made larger."""
    limits = Limits(train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, checkpoint_every=2)
    world = SteadyWorld(limits, replicas=3, slots=4, sync_s=0.125)
    world.until(lambda state: state.training.steps_trained == 6)
    status = status_of(plain_status(world.metrics, world.time + 12.0))
    full = replace(
        status, failures={"group_data": 3}, last_failure="group 4: no number", validation_now="version 3: 2 of 4 rows"
    )
    for shown in (status, full, replace(full, silence="nothing has changed for 300 s", settings={"a.b": "1"})):
        console = Console(width=COLUMNS, record=True, file=io.StringIO())
        console.print(screen(shown, "Step Engine  runs/latest", height=24))
        lines = console.export_text().splitlines()
        assert len(lines) <= 24 and "4/4" in "".join(lines[-4:]) and lines[-1].startswith("╰"), "\n".join(lines)


def test_a_run_without_a_checkpoint_says_so(served: Served) -> None:
    def shown(**figures: int) -> str:
        console = Console(width=COLUMNS, record=True, file=io.StringIO())
        status = replace(status_of(served.describe()), checkpoint_every=50, **figures)
        console.print(screen(status, "Step Engine  runs/latest"))
        return console.export_text()

    assert "saved     no checkpoint yet; one is written every 50 steps" in shown(step=3, checkpoint_steps=0)
    assert "saved     a checkpoint of 100 steps, 3 fewer than trained" in shown(step=103, checkpoint_steps=100)


def slow_down(world: SteadyWorld, id: int) -> None:
    """Make a replica slower than the others by more than may be."""
    replicas = world.scheduler.state.replicas
    world.scheduler.state.limits = replace(world.scheduler.state.limits, straggler_factor=2.0)
    for replica in replicas.by_id.values():
        replica.pace, replica.paced = 10.0 if replica.id == id else 1.0, SAMPLES


def test_a_slow_replica_and_missing_ones_are_marked() -> None:
    world = steady_world(steps=None, sync_s=0.0, replicas=3).until(lambda state: state.training.steps_trained == 2)
    slow_down(world, 1)
    world.tell(e.ProcessLost(kind="replica", index=0, life=1, reason="killed"))
    status = read_status(world.metrics)
    assert (status.replicas_slow, status.replicas_wanted, status.replicas_lost) == ((1,), 3, 1)
    console = Console(width=COLUMNS, record=True, file=io.StringIO())
    console.print(screen(status_of(plain_status(world.metrics, world.time)), "Step Engine  runs/latest"))
    text = console.export_text()
    assert "2 of 3 wanted, 1 lost" in text and re.search(r"1\s+slow\s+v\d", text)


def test_a_replica_that_reports_its_cache_shows_how_full_it_is() -> None:
    world = steady_world(steps=None).until(lambda state: state.training.steps_trained == 2)
    world.tell(e.CacheMeasured(kind="replica", index=1, life=1, used=0.84))
    console = Console(width=COLUMNS, record=True, file=io.StringIO())
    console.print(screen(status_of(plain_status(world.metrics, world.time)), "Step Engine  runs/latest"))
    rows = [line for line in console.export_text().splitlines() if "KV 84%" in line]
    assert len(rows) == 1 and re.search(r"│ +1  \w", rows[0])


def test_the_status_survives_the_way(served: Served) -> None:
    with served.lock:
        direct = read_status(served.world.metrics, served.world.time)
    again = status_of(served.describe())
    assert (again.step, again.replica_versions, again.groups_live) == (
        direct.step,
        direct.replica_versions,
        direct.groups_live,
    )
    assert again.replica_slots == {id: list(slots) for id, slots in direct.replica_slots.items()}


# -- bad input ---------------------------------------------------------------------------------------------------------


def complaint(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["top", str(directory)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("engine: RUN ") and said.count("\n") == 1, said
    return said


def test_a_run_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in complaint(tmp_path / "none", capsys)


@pytest.mark.parametrize("text", ["", "{}", "[]", '[{"targets": []}]', "\xff"])
def test_an_endpoint_file_that_says_nothing(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schedule").mkdir()
    (tmp_path / FILE).write_text(text, encoding="latin-1")
    assert "has an unreadable endpoint.json" in complaint(tmp_path, capsys)


def test_an_endpoint_that_is_gone(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.server.close()
    assert "does not answer at 127.0.0.1" in complaint(served.directory, capsys)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is not from a run of this engine version"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "is not from a run of this engine version: HTTP Error 404"),
        (b"HTTP/1.0 500 Internal Server Error\r\n\r\n", "is not from a run of this engine version: HTTP Error 500"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\n{", "is not from a run of this engine version"),
        (b"HTTP/1.0 200 OK\r\n\r\n[1]", "is not from a run of this engine version"),
        (b"", "does not answer at 127.0.0.1"),
    ],
    ids=["no http", "not found", "broken", "half of it", "a list", "nothing"],
)
def test_another_program_has_the_port(
    answer: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(answer)

    (tmp_path / "schedule").mkdir()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        announce([tmp_path / FILE], f"127.0.0.1:{other.server_address[1]}", "other")
        said = complaint(tmp_path, capsys)
        other.shutdown()
    assert expected in said


def test_an_address_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schedule").mkdir()
    announce([tmp_path / FILE], "a host:no port", "other")
    assert "a host:no port" in complaint(tmp_path, capsys)


def test_no_proxy_stands_between_it_and_the_run(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert main(["top", str(served.directory)]) == 0
    assert "what limits the next" in capsys.readouterr().out


def test_something_else_answers(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    other = MetricsServer(CollectorRegistry(), describe=lambda: {"hello": "there"})
    try:
        announce([served.directory / FILE], other.address, "other")
        assert "is not from a run of this engine version" in complaint(served.directory, capsys)
    finally:
        other.close()


def test_the_state_of_a_running_run_is_reported_by_the_run(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.steps(3)
    assert main(["status", str(served.directory)]) == 3
    assert ": running, 3 steps trained: publishing version 3, after step 2\n" in capsys.readouterr().out
    metrics = served.world.metrics
    metrics.silence = (metrics.changes, "nothing has changed for 300 s: replica 1 has been generating group 41")
    assert main(["status", str(served.directory)]) == 4
    assert (
        ": waiting, 3 steps trained: nothing has changed for 300 s: replica 1 has been generating group 41\n"
        in capsys.readouterr().out
    )
    withdraw([served.directory / FILE])
    lock = RecordLock(served.directory / "schedule")
    assert main(["status", str(served.directory)]) == 3
    lock.release()
