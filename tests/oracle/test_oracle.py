"""The oracle detects differences: its own export compares as identical; an extra, missing or changed order does not."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def oracle(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a separate process, because the oracle registers policies that break the rules."""
    command = [sys.executable, "-m", f"tests.oracle.{script}", *arguments, "--prefix", "calm-00"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oracle")
    assert oracle("export", str(folder)).returncode == 0
    return folder


def trained(world: dict[str, Any]) -> list[Any]:
    """The commands of the first event whose last command starts a train step."""
    return next(frame[4] for frame in world["frames"] if frame[4] and frame[4][-1][0] == "TrainStep")


def test_the_code_that_was_written_down_decides_the_same(data: Path) -> None:
    done = oracle("compare", str(data))
    assert (done.returncode, done.stdout) == (0, "10 of 10 worlds are identical\n"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (lambda orders: orders.pop(), "missing [], surplus ['TrainStep']"),
        (lambda orders: orders.append(["SaveCheckpoint", {"steps": 1}]), "missing ['SaveCheckpoint'], surplus []"),
        (lambda orders: orders[-1][1].update(step=99), "other values of ['TrainStep.step']"),
    ],
)
def test_another_decision_is_noticed(data: Path, tmp_path: Path, tamper: Callable[[Any], Any], says: str) -> None:
    for path in data.glob("*.msgpack"):
        world = msgpack.unpackb(path.read_bytes())
        if path.stem == "calm-003":
            tamper(trained(world))
        (tmp_path / path.name).write_bytes(msgpack.packb(world))
    done = oracle("compare", str(tmp_path))
    assert done.returncode == 1
    assert says in done.stdout and "9 of 10 worlds are identical" in done.stdout, done.stdout


def test_a_field_that_is_new_is_no_difference(data: Path, tmp_path: Path) -> None:
    """Only fields of both sides are compared: here the recorded side has fewer."""
    changed = 0
    for path in data.glob("*.msgpack"):
        world = msgpack.unpackb(path.read_bytes())
        for _, _, _, _, commands in world["frames"]:
            for kind, order in commands:
                changed += kind == "TrainStep" and bool(order.pop("staleness"))
        (tmp_path / path.name).write_bytes(msgpack.packb(world))
    assert changed
    assert oracle("compare", str(tmp_path)).returncode == 0
