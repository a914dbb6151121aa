"""Judges the code of a response by tests. The process that runs the response never gives the verdict.

`code_rewards.py` calls it in its own process, the trusted side. It starts the processes of `code_child.py`, sends them
code, inputs and calls, and compares their output and results. Tests and expected values never enter the
process of the response; `assert` tests run in a process of their own. It must never call a failure of the machine a
wrong answer.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic, time
from typing import Any

from engine.errors import RewardFailure
from engine.tasks.code_isolation import LEVELS
from engine.tasks.code_roles import RoleChannel, plain
from engine.tasks.control_groups import ControlGroup

LONGEST_OUTPUT = 1 << 20
"""Maximum bytes of output, unless a test expects much."""
GRACE_S = 10.0
"""Seconds beyond the limit of a test after which its room must have answered."""
FOLDER, STALE_S = "engine-code-", 3600.0
"""Prefix of directory names, and the age in seconds at which a directory without its process is removed."""
ROOT = str(Path(__file__).parents[2])
START = f"import sys; sys.path.append({ROOT!r}); from engine.tasks import code_child; code_child.main()"
IMPORTS = """
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
from bisect import *; from collections import *; from functools import *; from heapq import *
from itertools import *; from math import *; from builtins import *; from typing import *
"""
"""Imports for programs with a function to call. Their prompts often show only a signature, such as `List[int]`."""
WARM = ("bisect", "collections", "functools", "heapq", "itertools", "math", "random", "re", "string", "typing")
"""The slow modules of `IMPORTS`. A room imports them once, for all runs."""


class Unused(Exception):
    """A test passed, but called no function of the response and read no value of it: it passes without any code."""


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test: what the program reads and must print; a call and its result; or code that calls functions."""

    stdin: str = ""
    stdout: str | None = None
    function: str = ""
    arguments: list[Any] | None = None
    expected: Any = None
    code: str = ""
    names: tuple[str, ...] = ()
    """Names of the response that `code` uses; empty: found in `code`."""
    same_process: bool = False
    """Whether `code` runs in the process of the response, which can then forge the verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLimits:
    """Limits of each test, and the `monotonic` time at which the last test must have ended."""

    limit_s: float
    memory_mb: int
    processes: int
    deadline: float
    levels: Sequence[str] = LEVELS

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.deadline - monotonic())


class Rooms:
    """The processes for one response: a room for its code and, if there are `assert` tests, one for these."""

    def __init__(self, limits: CodeLimits, count: int = 2, warm: Sequence[str] = ()) -> None:
        """`warm`: modules to import before the first run.

        Raises: `RewardFailure` if none of the levels in `limits` can be reached."""
        self.limits = limits
        self.levels: list[str] = []
        self.missing: list[str] = []
        _sweep_once()
        self._folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-")
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        self._controls = [ours for ours, _ in pairs]
        numbers = [theirs.fileno() for _, theirs in pairs]
        settings: dict[str, Any] = {
            "parent": os.getpid(), "folder": self._folder, "levels": list(limits.levels), "warm": list(warm),
            "rooms": numbers, "root": ROOT, "processes": limits.processes,
            "memory_bytes": limits.memory_mb << 20,
        }  # fmt: skip
        self._group = ControlGroup(
            memory_bytes=count * settings["memory_bytes"], processes=count * (limits.processes + 1)
        )
        environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", START, json.dumps(settings)], cwd="/", env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
            pass_fds=numbers,
        )  # fmt: skip
        for _, theirs in pairs:
            theirs.close()
        try:
            self._await_rooms()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Rooms":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and remove their files."""
        for control in self._controls:
            control.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._group.close()
        remove(self._folder)

    def start(
        self, room: int, plan: Mapping[str, Any], channel: int, stdin: int | None = None, stdout: int | None = None
    ) -> None:
        """Start a run in a room. The caller keeps and closes the descriptors."""
        nothing = os.open(os.devnull, os.O_RDWR)
        held = memory_file(json.dumps(plan).encode())
        try:
            descriptors = [held, nothing if stdin is None else stdin, nothing if stdout is None else stdout, channel]
            seconds = min(self.limits.limit_s, self.limits.remaining_s)
            socket.send_fds(self._controls[room], [repr(seconds).encode()], descriptors)
        except OSError as error:
            raise RewardFailure(f"lost the process of the code: {error}") from error
        finally:
            os.close(held)
            os.close(nothing)

    def stop(self, room: int) -> None:
        """End a run that may be running."""
        with suppress(OSError):
            self._controls[room].send(b"stop")

    def finish(self, room: int) -> int | None:
        """Wait for the end of a run. Returns its exit status; None if it was stopped or exceeded its time."""
        answer = self._receive(room, self.limits.limit_s + GRACE_S)
        if "failed" in answer:
            raise RewardFailure(f"could not isolate the code: {answer['failed']}")
        status: int | None = answer["status"]
        return status

    def _receive(self, room: int, timeout_s: float) -> dict[str, Any]:
        self._controls[room].settimeout(timeout_s)
        try:
            data = self._controls[room].recv(1 << 16)
        except TimeoutError:
            raise RewardFailure(f"its process of the code did not answer within {timeout_s:g} s") from None
        if not data:
            self._process.kill()
            said = self._process.communicate()[1].decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise RewardFailure("lost the process of the code" + (f": {said}" if said else ""))
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _await_rooms(self) -> None:
        assert self._process.stdin is not None
        self._group.add(self._process.pid)
        self._process.stdin.close()
        self._process.stdin = None
        for room in range(len(self._controls)):
            answer = self._receive(room, max(1.0, self.limits.remaining_s))
            if answer["level"] is None:
                raise RewardFailure(f"could not isolate the code: {'; '.join(answer['missing'])}")
            self.levels.append(answer["level"])
            self.missing = answer["missing"]


def memory_file(data: bytes = b"") -> int:
    """A file in memory with this content, positioned at its beginning."""
    descriptor = os.memfd_create("engine-code")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def remove(folder: str) -> None:
    """Remove a directory, however deep it is."""
    try:
        os.rmdir(folder)  # it is empty at the level `full`
    except OSError:
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def sweep(older_than_s: float = STALE_S) -> None:
    """Remove the directories of processes that were killed. Their age protects those of other containers."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        pid = folder.name.removeprefix(FOLDER).partition("-")[0]
        with suppress(OSError):
            if not os.path.exists(f"/proc/{pid}") and time() - folder.stat().st_mtime >= older_than_s:
                remove(str(folder))


_sweep_once = cache(sweep)


# -- what to do about a missing level ----------------------------------------------------------------------------------

KERNEL_SETTINGS = {
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "user/max_user_namespaces": ("0", "15000"),
}
"""Settings of the kernel that refuse user namespaces: the value that does, and one that does not."""


def fix_of(missing: str, settings: Path = Path("/proc/sys")) -> str:
    """Two ways to run code if the level of isolation is too low. Names the setting of the kernel that refuses it."""
    changes = []
    for name, (bad, good) in KERNEL_SETTINGS.items():
        with suppress(OSError):
            if (settings / name).read_text().strip() == bad:
                changes.append(f"{name.replace('/', '.')} is {bad}: run sysctl -w {name.replace('/', '.')}={good}")
    if not changes and "nobody" in missing:
        changes.append("install Python where all users may read it, or start the run as an ordinary user")
    allow = " and ".join(changes) or (
        "allow user namespaces or Landlock (in a container, its seccomp profile must allow unshare)"
    )
    return f"{allow}; or run code elsewhere with sandbox: URL; isolation: best_effort runs it with limits only"


# -- one test ----------------------------------------------------------------------------------------------------------


def passes(rooms: Rooms, code: str, test: CodeTest, impossible: str = "") -> bool:
    """Whether the code passes a test within the limits. `impossible`: instead a variant of the test that no code can
    pass, because its result must contain this random text. Raises: `Unused`."""
    if not rooms.limits.remaining_s:
        return False
    if test.function:
        return _passes_call(rooms, code, test, impossible)
    if test.code:
        return _passes_tests(rooms, code, test, impossible)
    return _passes_program(rooms, code, test, impossible)


def _passes_program(rooms: Rooms, code: str, test: CodeTest, impossible: str) -> bool:
    stdin, stdout = memory_file(test.stdin.encode("utf-8", "replace")), memory_file()
    expected = impossible or test.stdout or ""
    longest = longest_output(expected)
    try:
        rooms.start(0, {"role": "program", "code": code}, stdout, stdin, stdout)
        status = rooms.finish(0)
        output = os.pread(stdout, longest + 1, 0)
    finally:
        os.close(stdin)
        os.close(stdout)
    return status == 0 and len(output) <= longest and same_output(output, expected)


def longest_output(expected: str) -> int:
    """Maximum bytes of output; a test with more output fails."""
    return max(LONGEST_OUTPUT, 2 * len(expected.encode("utf-8", "surrogatepass")))


def same_output(output: bytes, expected: str) -> bool:
    """Whether both are equal, except for ASCII white space at the ends of lines and empty lines at the end."""
    texts = (output, expected.encode("utf-8", "surrogatepass"))
    lines, others = ([line.rstrip() for line in text.rstrip().split(b"\n")] for text in texts)
    return lines == others


def call_of(test: CodeTest) -> dict[str, Any]:
    """The request for the call of a test. The reply is plain JSON: this process makes nothing else of it."""
    return {"call": test.function, "method": True, "json": True, "args": plain(test.arguments), "kwargs": {"dict": []}}


def _passes_call(rooms: Rooms, code: str, test: CodeTest, impossible: str) -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rooms.start(0, {"role": "serve", "code": code, "imports": IMPORTS}, theirs.fileno())
        theirs.close()
        ours.settimeout(rooms.limits.limit_s + GRACE_S)
        channel, reply = RoleChannel(ours), None
        with suppress(OSError, ValueError, RecursionError):
            if channel.receive(longest=64) == {"ready": True}:
                channel.send(call_of(test))
                reply = channel.receive(longest_output(json.dumps(test.expected)))
        rooms.stop(0)
        rooms.finish(0)
    return returns(reply, impossible or test.expected)


def returns(reply: Any, expected: Any) -> bool:
    """Whether a reply is this result, or the only element of it, by type and value. JSON turns tuples into lists."""
    try:
        return same(reply["value"], expected) or same([reply["value"]], expected)
    except Exception:  # the response may send anything
        return False


def same(result: Any, expected: Any) -> bool:
    """Whether two JSON values are equal. True and false are not numbers; 1 and 1.0 are the same number."""
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(map(same, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(same(result[key], expected[key]) for key in result)
    numbers = all(type(one) in (int, float) for one in (result, expected))
    return (numbers or type(result) is type(expected)) and bool(result == expected)


def _passes_tests(rooms: Rooms, code: str, test: CodeTest, impossible: str) -> bool:
    """`assert` tests run in a process of their own, or in that of the response. It gives the verdict."""
    plan, verdict = tests_plan(test, impossible), memory_file()
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs:
            if test.same_process:
                rooms.start(0, plan | {"code": code}, theirs.fileno(), stdout=verdict)
            else:
                rooms.start(0, {"role": "serve", "code": code, "imports": ""}, ours.fileno())
                rooms.start(1, plan, theirs.fileno(), stdout=verdict)
        if not test.same_process:
            rooms.finish(1)
            rooms.stop(0)
        rooms.finish(0)
        said = os.pread(verdict, 4096, 0)
    finally:
        os.close(verdict)
    with suppress(ValueError, RecursionError):
        return is_pass(json.loads(said), plan)
    return False


def tests_plan(test: CodeTest, impossible: str) -> dict[str, Any]:
    role, sign = "together" if test.same_process else "tests", secrets.token_hex(16)
    return {"role": role, "test": test.code, "names": test.names, "token": impossible, "sign": sign}


def is_pass(verdict: Any, plan: Mapping[str, Any]) -> bool:
    """Whether the verdict of tests has the sign of their plan. Raises: `Unused`."""
    if not isinstance(verdict, dict) or verdict.get("sign") != plan["sign"]:
        return False
    if verdict.get("used") is not True:
        raise Unused
    return True
