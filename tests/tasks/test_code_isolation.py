"""What isolates the code of a response: the levels on various machines, and what programs can do at each of them."""

import errno
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

import engine
from engine.tasks.code_grading import FOLDER, CodeLimits, CodeTest, Rooms, fix_of, passes, sweep
from engine.tasks.code_isolation import (
    ALLOW,
    ANY_BIT,
    AT_LEAST,
    EQUAL,
    ERROR,
    KILL_PROCESS,
    LOAD,
    MACHINES,
    RETURN,
    X32,
    filter_lines,
)
from engine.tasks.control_groups import ControlGroup

STAND_INS, SCENES = (Path(__file__).with_name(name) for name in ("kernel_stand_ins.py", "code_scenes.py"))


def start(machine: str, call: str, arguments: Sequence[Any], **more: Any) -> "subprocess.Popen[str]":
    """Start a process that calls a function of `code_scenes.py`, as on another machine, and prints what it returns."""
    path = os.pathsep.join(sys.path)
    environment = {name: more.pop(name) for name in list(more) if name.isupper()}
    return subprocess.Popen(
        [sys.executable, str(STAND_INS), machine, sys.executable, str(SCENES), call, json.dumps(arguments)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path, **environment}, **more,
    )  # fmt: skip


def on(machine: str, call: str, *arguments: Any) -> Any:
    with start(machine, call, arguments) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    assert process.returncode == 0
    return json.loads(said)


# -- levels ------------------------------------------------------------------------------------------------------------


LEVELS_OF = [
    ("", "full", []),
    ("user", "full", []),
    ("user,no_namespaces", "confined", ["full: user namespaces (unshare): Operation not permitted"]),
    ("user,no_mounts", "confined", ["full: mounts (bind at /): Operation not permitted"]),
    ("user,no_user_map", "confined", ["full: user namespaces (the user map): Permission denied"]),
]


@pytest.mark.parametrize(("machine", "level", "missing"), LEVELS_OF)
def test_the_check_of_a_run_says_the_level_of_isolation(machine: str, level: str, missing: list[str]) -> None:
    said = on(machine, "reported")
    assert said["required"].startswith(f"isolation of code: {level}")
    assert all(one in said["required"] for one in missing)
    assert said["value, required"] == said["value, best_effort"] == "1.0"


def test_code_that_cannot_be_isolated_is_refused_and_no_wrong_answer() -> None:
    said = on("user,no_user_map,no_landlock", "reported")
    law = (
        "reward.functions.0.arguments.isolation is 'required': needs the level full or confined, but this machine has "
    )
    assert said["required"].startswith(law + "only limits")
    for part in (
        "the user map",
        "Landlock: Function not implemented",
        "allow user namespaces",
        "sandbox: URL",
        "best_effort",
    ):
        assert part in said["required"]
    assert said["value, required"].startswith("could not isolate the code: full: user namespaces (the user map): ")
    assert said["best_effort"].startswith("isolation of code: limits") and said["value, best_effort"] == "1.0"


def test_the_setting_of_the_kernel_is_named(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel/apparmor_restrict_unprivileged_userns").write_text("1\n")
    name = "kernel.apparmor_restrict_unprivileged_userns"
    assert fix_of("full: user namespaces", tmp_path).startswith(f"{name} is 1: run sysctl -w {name}=0")
    other = fix_of("confined: the user nobody, who cannot read", tmp_path / "none")
    assert "install Python where all users may read it" in other


def test_no_shipped_configuration_needs_isolation() -> None:
    """So that every quickstart and tutorial runs on every machine."""
    root = Path(engine.__file__).parents[1]
    files = [
        *root.glob("configs/**/*"),
        *root.glob("examples/**/*"),
        root / "engine/cli/project.py",
        root / "README.md",
    ]
    texts = [path.read_text("utf-8", "replace") for path in files if path.is_file()]
    assert len(texts) > 10 and not any("code_rewards" in text for text in texts)


# -- programs that try to leave ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "level"), [("", "full"), ("user", "full"), ("user", "confined")])
def test_no_program_leaves_its_isolation(machine: str, level: str, tmp_path: Path) -> None:
    assert on(machine, "escapes_from", level, str(tmp_path / "secret")) == []


FORKS = """
import os
made = 0
try:
    for _ in range(60):
        if not os.fork(): os.read(0, 1) or os.kill(os.getpid(), 19)
        made += 1
except OSError:
    pass
print(made)
"""
FILL = """
written = 0
try:
    for number in range(100):
        with open(str(number), 'wb') as file:
            written += file.write(bytes(8 << 20))
except OSError:
    pass
print(written >> 20 <= 64)
"""


def test_processes_and_files_are_bounded() -> None:
    limits = CodeLimits(limit_s=10.0, memory_mb=512, processes=4, deadline=monotonic() + 60, levels=["full"])
    with Rooms(limits, 1) as rooms:
        assert passes(rooms, FORKS, CodeTest(stdout="4"))
        assert passes(rooms, FILL, CodeTest(stdout="True"))


# -- what is left behind -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "level", "count"), [("", "full", 4), ("user", "confined", 3)])
def test_code_ends_with_a_killed_run(
    machine: str, level: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(machine, "hang", [level], stdin=subprocess.PIPE, TMPDIR=str(tmp_path)) as run:
        assert run.stdout is not None
        processes = [os.pidfd_open(pid) for pid in json.loads(run.stdout.readline())]
        run.kill()
    assert len(processes) == count
    for process in processes:
        assert select.select([process], [], [], 10.0)[0], "its end makes it readable"
        os.close(process)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert [path.name.startswith(FOLDER) for path in tmp_path.iterdir()] == [True]
    sweep()
    assert list(tmp_path.iterdir()), "it may belong to another container"
    sweep(older_than_s=0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_deep_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = CodeLimits(limit_s=20.0, memory_mb=512, processes=0, deadline=monotonic() + 60, levels=["limits"])
    with Rooms(limits, 1) as rooms:
        code = "import os\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')\nprint(1)"
        assert passes(rooms, code, CodeTest(stdout="1"))
    assert list(tmp_path.iterdir()) == []


def test_a_control_group_bounds_a_response_where_one_is_delegated(tmp_path: Path) -> None:
    """A stand-in: plain files, as the kernel shows a delegated group."""
    (tmp_path / "own").write_text("1:cpu:/\n0::/user/mine\n")
    parent = tmp_path / "root/user"
    (parent / "mine").mkdir(parents=True)
    for folder, controllers in ((parent, "cpu memory pids"), (parent / "mine", "")):
        (folder / "cgroup.procs").write_text("")
        (folder / "cgroup.subtree_control").write_text(controllers)
    group = ControlGroup(memory_bytes=1 << 30, processes=4, root=tmp_path / "root", own=tmp_path / "own")
    group.add(77)
    assert group.path is not None and group.path.parent == parent
    files = {path.name: path.read_text() for path in group.path.iterdir()}
    assert files == {"memory.max": str((1 << 30) + (128 << 20)), "pids.max": "20", "cgroup.procs": "77"}
    (parent / "cgroup.subtree_control").write_text("cpu")
    none = ControlGroup(memory_bytes=1 << 30, processes=4, root=tmp_path / "root", own=tmp_path / "own")
    none.add(77)
    none.close()
    assert none.path is None


# -- the filter of system calls ----------------------------------------------------------------------------------------


def test_the_filter_refuses_calls_by_their_number_and_arguments() -> None:
    for machine, (kill, clone, fcntl, chmod) in {"x86_64": (62, 56, 72, 91), "aarch64": (129, 220, 25, 52)}.items():
        lines = filter_lines(machine, 7, alone=False, may_fork=True)
        own = MACHINES[machine][1]
        assert verdict(lines, 1, own) == ALLOW
        assert verdict(lines, 1, own ^ 1) == KILL_PROCESS
        assert verdict(lines, X32 + 1, own) == ERROR | errno.EPERM
        assert verdict(lines, kill, own, 7) == ALLOW
        assert verdict(lines, kill, own, 8) == ERROR | errno.EPERM
        assert verdict(lines, clone, own, 17) == ALLOW
        assert verdict(lines, clone, own, 0x10000011) == ERROR | errno.EPERM
        assert verdict(lines, fcntl, own, 3, 8) == ERROR | errno.EPERM
        assert verdict(lines, chmod, own) == ERROR | errno.EPERM
        assert verdict(filter_lines(machine, 7, alone=True, may_fork=True), kill, own, 8) == ALLOW
        assert verdict(filter_lines(machine, 7, alone=True, may_fork=False), clone, own) == ERROR | errno.EAGAIN


def verdict(lines: Sequence[tuple[int, int, int, int]], number: int, architecture: int, *arguments: int) -> int:
    """What a filter says about a call, as the kernel runs it."""
    data = {0: number, 4: architecture} | {16 + 8 * place: value for place, value in enumerate(arguments)}
    tests = {EQUAL: int.__eq__, AT_LEAST: int.__ge__, ANY_BIT: lambda value, bits: bool(value & bits)}
    value = place = 0
    while True:
        code, if_true, if_false, operand = lines[place]
        place += 1
        if code == RETURN:
            return operand
        if code == LOAD:
            value = data.get(operand, 0)
        else:
            place += if_true if tests[code](value, operand) else if_false
