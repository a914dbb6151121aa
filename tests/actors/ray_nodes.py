"""Ray nodes of this machine, as `ray start` starts them, and programs that use them."""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@dataclass
class Nodes:
    """Ray nodes of this machine, the head first. `environment`: its home has the cluster's token. `arguments`: options
    of `ray start` for the nodes that join the head."""

    address: str
    processes: list[subprocess.Popen[str]]
    environment: dict[str, str]
    arguments: tuple[str, ...] = ()

    def kill(self, process: subprocess.Popen[str]) -> None:
        """With every process of the node."""
        below = psutil.Process(process.pid).children(recursive=True)
        for each in (psutil.Process(process.pid), *below):
            with suppress(psutil.NoSuchProcess):  # nodes without their head end by themselves
                each.kill()
        process.wait()
        psutil.wait_procs(below, timeout=60)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        joins = {} if "--head" in arguments else {"RAY_AUTH_MODE": "token"}
        environment = self.environment | joins
        command = [*RAY, "start", "--block", "--num-cpus=1", "--object-store-memory=80000000", *arguments]
        process = subprocess.Popen(
            [*command, "--node-ip-address=127.0.0.1", "--disable-usage-stats"], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=end_with_parent,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def join(self) -> None:
        """Start one more node."""
        wait_for(self.start(f"--address={self.address}", *self.arguments))

    def replace_killed(self) -> None:
        killed = [process for process in self.processes if process.poll() is not None]
        self.processes = [process for process in self.processes if process not in killed]
        for _ in killed:
            self.join()


def end_with_parent() -> None:
    """In a new node: it ends itself if the tests are killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def wait_for(node: subprocess.Popen[str]) -> None:
    """Until it runs."""
    assert node.stdout is not None
    said = []
    for line in node.stdout:
        said.append(line)
        if "--block" in line:
            return
    raise AssertionError("".join(said))


@contextmanager
def three_nodes(*arguments: str) -> Iterator[Nodes]:
    """The last two with these arguments, the first, which is the head, without."""
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of Ray's sockets must be short
    Path(directory, ".ray").mkdir()
    Path(directory, ".ray", "auth_token").write_text("a" * 64)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    environment |= {"HOME": directory, "PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"}
    environment |= {"RAY_health_check_period_ms": "1000"}  # of 3000: a killed node is noticed sooner
    made = Nodes("", [], environment, arguments)
    try:
        wait_for(made.start("--head", "--port=0", f"--temp-dir={directory}", "--include-dashboard=false"))
        made.address = Path(directory, "ray_current_cluster").read_text().strip()
        for _ in range(2):  # one by one: together they may take each other's ports
            made.join()
        yield made
    finally:
        for process in made.processes:
            if process.poll() is None:
                made.kill(process)
        shutil.rmtree(directory, ignore_errors=True)


def engine(*arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "engine.cli", *arguments], cwd=cwd, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def note_call(run: subprocess.Popen[str], calls: RawIOBase, lives: set[int], places: set[str]) -> None:
    """The process and the module of the next call of the reward. Fails if the run ends first."""
    over = os.pidfd_open(run.pid)
    ready, _, _ = select.select([calls, over], [], [])
    os.close(over)
    assert calls in ready, run.communicate()[0]
    pid, place = calls.readline().decode().split()
    lives.add(int(pid))
    places.add(place)


def pids_of(node: subprocess.Popen[str]) -> set[int]:
    return {child.pid for child in psutil.Process(node.pid).children(recursive=True)}
