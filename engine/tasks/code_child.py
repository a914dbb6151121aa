"""The processes that run the code of a response. `code_grading.py` starts them with Python's isolated mode.

The first process starts a *room* for each socket that it receives: a process that isolates itself as far as the kernel
allows, and then starts one process for each requested run. The code of a response and the tests of its row have
separate rooms. A room sees limits and exit statuses, never code, tests, values or verdicts: these bypass it. No process
here outlives its parent.
"""

import fcntl
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from engine.tasks import code_isolation as isolation
from engine.tasks import code_roles as roles

CHANNEL, FIRST_FREE, MOST_DESCRIPTORS = 3, 10, 256
"""Descriptors: the channel of a run, the first one above those of a run, and the end of the range."""


def main() -> None:
    """`sys.argv[1]`: the settings."""
    settings = json.loads(sys.argv[1])
    isolation.die_with(settings["parent"])
    sys.stdin.buffer.read()  # until the parent has put this process into its control group
    for name in settings["warm"]:
        __import__(name)
    sys.dont_write_bytecode = True
    sys.path.remove(settings["root"])
    paths = isolation.readable_paths()
    for control in [socket.socket(fileno=_moved(number, CHANNEL)) for number in settings["rooms"]]:
        _open_room(control, settings, paths)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _moved(descriptor: int, least: int = FIRST_FREE) -> int:
    """The descriptor under another number."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(descriptor)
    return moved


def _open_room(control: socket.socket, settings: Mapping[str, Any], paths: Mapping[str, str]) -> None:
    """Start a room at the strongest level that the kernel allows. Sends its level, and why a stronger one failed."""
    missing: list[str] = []
    for level in settings["levels"]:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            ours.close()
            _enter(level, theirs, parent, control, settings, paths, missing)
        theirs.close()
        answer = _answer(ours, pid)
        ours.close()
        if answer == "ready":
            break
        missing.append(f"{level}: {answer or 'its process ended'}")
        os.waitpid(pid, 0)
    else:
        control.send(json.dumps({"level": None, "missing": missing}).encode())
    control.close()


def _answer(ours: socket.socket, pid: int) -> str:
    while (answer := ours.recv(4096).decode()) == "map":
        try:
            isolation.write_user_maps(pid)
            ours.send(b"ok")
        except isolation.NotIsolated as error:
            ours.send(str(error).encode())
    return answer


def _enter(
    level: str, outside: socket.socket, parent: int, control: socket.socket, settings: Mapping[str, Any],
    paths: Mapping[str, str], missing: Sequence[str],
) -> None:  # fmt: skip
    """Become a room of this level, and never return."""
    try:
        if level == "full":
            isolation.filter_available()
            isolation.enter_namespaces(lambda: _have_users_mapped(outside))
            isolation.die_with(parent)
            inner = os.fork()
            if inner:
                outside.close()
                control.close()
                os.waitpid(inner, 0)
                os._exit(0)
            isolation.die_with(0)
            isolation.build_root(settings["folder"], paths)
        else:
            _leave_root(level, settings["folder"])
            isolation.die_with(parent)
            isolation.adopt_orphans()
            if level == "confined":
                isolation.filter_available()
                isolation.landlock_abi()
        isolation.hide_memory()
    except isolation.NotIsolated as error:
        outside.send(str(error).encode()[:4096])
        os._exit(1)
    outside.send(b"ready")
    outside.close()
    control.send(json.dumps({"level": level, "missing": list(missing)}).encode())
    Room(level, control, settings, paths).serve()
    os._exit(0)


def _have_users_mapped(outside: socket.socket) -> None:
    outside.send(b"map")
    answer = outside.recv(4096).decode()
    if answer != "ok":
        raise isolation.NotIsolated(answer)


def _leave_root(level: str, folder: str) -> None:
    """Become `nobody`. Root stays root at the weakest level if `nobody` cannot read the Python installation."""
    if not isolation.is_root():
        return
    try:
        os.chown(folder, isolation.NOBODY, isolation.NOBODY)
        isolation.become_nobody()
        with isolation.needed(f"the user nobody, who cannot reach {folder}"):
            os.listdir(folder)
    except isolation.NotIsolated:
        if level == "confined" or os.geteuid():
            raise
        os.chown(folder, 0, 0)


class Room:
    """Starts a process for each run, and says how it ended."""

    def __init__(
        self, level: str, control: socket.socket, settings: Mapping[str, Any], paths: Mapping[str, str]
    ) -> None:
        self._level, self._control, self._settings, self._paths = level, control, settings, paths
        self._alone = level == "full"
        self._runs = 0

    def serve(self) -> None:
        """Serve requests until the other end closes the socket."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._control, 4096, 4)
            if not data:
                return
            if descriptors:  # otherwise it is a late order to stop
                self._runs += 1
                self._control.send(json.dumps(self._run(float(data), descriptors)).encode())

    def _run(self, limit_s: float, descriptors: Sequence[int]) -> dict[str, Any]:
        reading, writing = os.pipe()
        room = os.getpid()
        pid = os.fork()
        if not pid:
            self._play(room, limit_s, descriptors, writing)
        for descriptor in (*descriptors, writing):
            os.close(descriptor)
        with open(reading, "rb") as pipe:
            problem = pipe.read().decode()
        if problem != "ok":
            self._end(pid)
            return {"failed": problem or "its process ended before the code ran"}
        exit = os.pidfd_open(pid)
        ready, _, _ = select.select([exit, self._control.fileno()], [], [], limit_s)
        status = self._end(pid)
        os.close(exit)
        return {"status": os.waitstatus_to_exitcode(status) if exit in ready else None}

    def _end(self, pid: int) -> int:
        """Kill the process and every process that it started. Returns its wait status."""
        status = 0
        with suppress(ProcessLookupError):
            os.kill(-1 if self._alone else -pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                for orphan in () if self._alone else _children():
                    os.kill(orphan, signal.SIGKILL)
                ended, how = os.wait()
                status = how if ended == pid else status
        return status

    def _play(self, room: int, limit_s: float, descriptors: Sequence[int], writing: int) -> None:
        """Isolate this process, then run what the plan says."""
        try:
            os.setsid()
            with open(descriptors[0], "rb") as file:
                plan = json.loads(file.read())
            writing, *others = [_moved(number) for number in (writing, *descriptors[1:])]
            for target, number in enumerate((*others[:2], os.open(os.devnull, os.O_WRONLY), others[2])):
                os.dup2(number, target)
            os.closerange(CHANNEL + 1, writing)
            os.closerange(writing + 1, MOST_DESCRIPTORS)
            self._control.detach()  # closed: its number may get another meaning before this process ends
            self._isolate(room, limit_s, hidden=plan["role"] == "tests")
        except Exception as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode()[:4096])
            os._exit(1)
        os.write(writing, b"ok")
        os.close(writing)
        channel = None if plan["role"] == "program" else roles.RoleChannel(socket.socket(fileno=CHANNEL))
        roles.run(plan, channel)

    def _isolate(self, room: int, limit_s: float, *, hidden: bool) -> None:
        settings, directory = self._settings, isolation.SCRATCH
        others = 0  # processes of the user besides those that are allowed
        if self._alone:
            isolation.mount_scratch()
            others = 1 if isolation.is_root() else 3
            isolation.become_nobody()
        else:
            directory = f"{settings['folder']}/{room}-{self._runs}"
            os.mkdir(directory, 0o700)
        os.chdir(directory)
        os.environ |= {"HOME": directory, "TMPDIR": directory}
        isolation.die_with(room)
        isolation.hide_memory(hidden)
        isolation.give_up_capabilities()
        if self._level == "confined":
            isolation.restrict_files(directory, self._paths)
        processes = settings["processes"]
        isolation.set_limits(seconds=limit_s, memory_bytes=settings["memory_bytes"], processes=processes + others)
        try:
            isolation.refuse_calls(alone=self._alone, may_fork=processes > 0)
        except isolation.NotIsolated:
            if self._level != "limits":
                raise


def _children() -> list[int]:
    """The child processes of this process, adopted ones included."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
