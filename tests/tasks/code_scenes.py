"""What tests of code run in a process of its own, as on another machine (`kernel_stand_ins.py`). A script:

    python code_scenes.py FUNCTION ARGUMENTS

It imports little, so that it starts fast.
"""

import json
import os
import socket
import sys
from pathlib import Path
from time import monotonic

from engine.errors import ConfigError, RewardFailure
from engine.tasks.code_grading import CodeLimits, CodeTest, Rooms, passes
from engine.tasks.code_rewards import python_tests
from engine.tasks.code_roles import RoleChannel
from engine.tasks.reward_forms import check_declared
from engine.trajectory import Prompt, Trajectory


def reported() -> dict[str, str]:
    """What `engine check` says about a reward for code, which `engine run` refuses as well, and its value."""
    prompt = Prompt(row=0, text="", fields={"tests": "assert one() == 1"})
    trajectory = Trajectory(text="def one(): return 1")
    said = {}
    for isolation in ("required", "best_effort"):
        try:
            said[isolation] = check_declared(python_tests, {"isolation": isolation}, "reward.functions.0.arguments")
        except ConfigError as error:
            said[isolation] = str(error)
        try:
            said[f"value, {isolation}"] = str(python_tests(prompt, trajectory, isolation=isolation))
        except RewardFailure as error:
            said[f"value, {isolation}"] = str(error)
    return said


ESCAPES = {
    "read the environment of the run": "open('/proc/$RUN/environ').read()",
    "read the environment of its parent": "open(f'/proc/{os.getppid()}/environ').read()",
    "see the processes of the machine": "assert len([n for n in os.listdir('/proc') if n.isdigit()]) > 2",
    "see the command line of the run": "assert b'python' in open('/proc/$RUN/cmdline', 'rb').read()",
    "signal the run": "os.kill($RUN, 0)",
    "signal its parent": "os.kill(os.getppid(), 9)\nfor _ in range(10**6): pass\nassert os.getppid() != PARENT",
    "signal everybody": "os.kill(-1, 0)\nassert '/box' not in os.getcwd()",
    "limit the run": "resource.prlimit($RUN, resource.RLIMIT_CPU, (1, 1))",
    "make the run less important": "os.setpriority(os.PRIO_PROCESS, $RUN, 19)",
    "read a file of the user": "open('$SECRET').read()",
    "write a file of the user": "open('$SECRET', 'a').write('x')",
    "truncate a file of the user": "os.truncate('$SECRET', 0)",
    "open and truncate a file": "os.open('$SECRET', os.O_RDONLY | os.O_TRUNC)",
    "change the mode of a file": "os.chmod('$SECRET', 0o777)",
    "remove a file of the user": "os.remove('$SECRET')",
    "write beside its directory": "open('../left', 'w').write('x')",
    "write to /var/tmp": "open('/var/tmp/left', 'w').write('x')",
    "connect to a server": "socket.create_connection(('127.0.0.1', $PORT), 1)",
    "connect to a local socket": "socket.socket(socket.AF_UNIX).connect('\\0engine-test-$PORT')",
    "open a local socket": "socket.socket(socket.AF_UNIX)",
    "send to local sockets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "be signaled for a socket": "fcntl.ioctl(PAIR[0], 0x8901, struct.pack('i', $RUN))",
    "be signaled for another socket": "fcntl.ioctl(PAIR[0], 0x8902, struct.pack('i', $RUN))",
    "ask for signals": "fcntl.ioctl(PAIR[0], 0x5452, struct.pack('i', 1))",
    "ask for signals by another call": "fcntl.fcntl(PAIR[0], fcntl.F_SETOWN, $RUN)",
    "take a lease": "fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "open its peer": "PAIR[0].getsockopt(socket.SOL_SOCKET, 77, 4)",
    "get the process with a message": "PAIR[0].setsockopt(socket.SOL_SOCKET, 76, 1)",
    "watch files": "call(INOTIFY, 0)",
    "watch all files": "call(FANOTIFY, 0, 0)",
    "read a project in /usr/src": "os.listdir('/usr/src')",
    "read a project in /usr/local/share": "os.listdir('/usr/local/share')",
    "read a project that is an environment": "open('$PREFIX/bin/activate')",
    "open a socket to the hypervisor": "socket.socket(40, socket.SOCK_STREAM)",
    "use io_uring": "call(425, 4, ctypes.create_string_buffer(120))",
    "trace a process": "call(TRACE, 16, $RUN, 0, 0)",
    "open a process": "os.pidfd_open($RUN)",
    "open its parent": "os.pidfd_open(os.getppid())",
    "load a program into the kernel": "call(BPF, 0, 0, 0)",
    "handle its own page faults": "call(USERFAULTFD, 1)",
    "make a user namespace": "call(UNSHARE, 0x10000000)",
    "make a child in a user namespace": "call(CLONE, 0x10000011, 0, 0, 0, 0)",
    "use a keyring": "call(KEYCTL, 0, -3, 1)",
    "become root": "os.setuid(0)\nassert os.getuid() != $RUN_USER",
}
"""What each program tries. It prints "held" if an error stops it."""
CALLS = {"x86_64": (101, 321, 323, 272, 56, 250, 294, 300), "aarch64": (117, 280, 282, 97, 220, 219, 26, 262)}
PROGRAM = """
import ctypes, errno, fcntl, os, resource, socket, struct
PARENT, PAIR = os.getppid(), socket.socketpair()
TRACE, BPF, USERFAULTFD, UNSHARE, CLONE, KEYCTL, INOTIFY, FANOTIFY = {calls}
def call(*arguments):
    ctypes.set_errno(0)
    failed = ctypes.CDLL(None, use_errno=True).syscall(*arguments) == -1
    if failed and ctypes.get_errno() in (errno.EPERM, errno.EAGAIN):
        raise OSError
try:
{escape}
except (OSError, AssertionError):
    print("held")
else:
    print("escaped")
"""


def escapes_from(level: str, secret: str) -> list[str]:
    """The programs that were not held at this level."""
    Path(secret).write_text("secret")
    out = []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        port = server.getsockname()[1]
        local.bind(f"\0engine-test-{port}")
        local.listen()
        limits = CodeLimits(limit_s=10.0, memory_mb=512, processes=2, deadline=monotonic() + 300, levels=[level])
        with Rooms(limits, 1) as rooms:
            for name, escape in ESCAPES.items():
                named = {
                    "$RUN_USER": os.getuid(),
                    "$RUN": os.getpid(),
                    "$SECRET": secret,
                    "$PORT": port,
                    "$PREFIX": sys.prefix,
                }
                for word, value in named.items():
                    escape = escape.replace(word, str(value))
                body = "\n".join(f"    {line}" for line in escape.splitlines())
                code = PROGRAM.format(escape=body, calls=CALLS[os.uname().machine])
                if not passes(rooms, code, CodeTest(stdout="held")):
                    out.append(name)
    intact = Path(secret).read_text() == "secret" and Path(secret).stat().st_mode & 0o777 != 0o777
    return out if intact else [*out, "a file of the user was changed"]


def hang(level: str) -> None:
    """Run code that never ends, print the processes of the run, and wait."""
    limits = CodeLimits(limit_s=300.0, memory_mb=512, processes=0, deadline=monotonic() + 300, levels=[level])
    with Rooms(limits, 1) as rooms:
        ours, theirs = socket.socketpair()
        rooms.start(0, {"role": "serve", "code": "def f():\n while True: pass", "imports": ""}, theirs.fileno())
        channel = RoleChannel(ours)
        assert channel.receive() == {"ready": True}
        channel.send({"call": "f", "args": [], "kwargs": {"dict": []}})
        print(json.dumps(descendants(os.getpid())), flush=True)
        sys.stdin.read()


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [deeper for child in children for deeper in descendants(child)]


if __name__ == "__main__":
    scene = {one.__name__: one for one in (reported, escapes_from, hang)}[sys.argv[1]]
    print(json.dumps(scene(*json.loads(sys.argv[2]))))
