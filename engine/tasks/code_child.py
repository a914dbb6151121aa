"""The process that runs the code of a response. `code_rewards.py` starts it as a script, so it imports nothing from the
engine.

It reads a plan from its standard input, limits itself, and runs the code. Once the test has passed, it writes a sign to
the pipe that its argument names. If the kernel allows it, the code runs in separate namespaces: without network,
without access to other processes, and with a file system that is read-only except for its directory.
"""

import ctypes
import errno
import io
import json
import os
import resource
import runpy
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Any

NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
BIND, PRIVATE, RECURSIVE = 4096, 1 << 18, 16384
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
SET_DUMPABLE, NO_NEW_PRIVILEGES, CAPABILITIES_3 = 4, 38, 0x20080522
SET_SECCOMP, FILTER, X32, ALLOW, REFUSE = 22, 2, 0x40000000, 0x7FFF0000, 0x00050000 | errno.EAGAIN
SYSTEM_CALLS = {
    "x86_64": {"fork": (56, 57, 58, 435), "socket": (41,)},
    "aarch64": {"fork": (220, 435), "socket": (198,)},
}
"""System calls that start processes or threads, and those that open network sockets, by type of machine."""
NOBODY = 65534
LARGEST_FILE = 16 << 20


def main() -> None:
    plan = json.loads(sys.stdin.buffer.read())
    verdict = int(sys.argv[1])
    give_up_root(plan["folder"])
    isolated = isolate(plan["folder"])
    child = os.fork()  # the first process of a new process namespace: when it ends, the whole namespace ends
    if child:
        os.close(verdict)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, plan["limit_s"])
        os.waitpid(child, 0)
        os._exit(0)
    limit(plan, isolated)
    run(plan, verdict)


def give_up_root(folder: str) -> None:
    """Change from root to the user `nobody`, if that user may read the Python installation. The kernel does not limit
    the number of root's processes."""
    if os.geteuid():
        return
    os.chown(folder, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    readable = os.access(os.__file__, os.R_OK, effective_ids=True) and os.access(folder, os.W_OK, effective_ids=True)
    os.seteuid(0)
    if not readable:
        os.chown(folder, 0, 0)
    else:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        ctypes.CDLL(None).prctl(SET_DUMPABLE, 1)  # else root owns /proc/self, which maps the users of a namespace


def isolate(folder: str) -> bool:
    """Move this process into new namespaces. Returns False if the kernel does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_NAMESPACES):
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    here = folder.encode()
    failed = libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None) or libc.mount(here, here, None, BIND, None)
    if not failed:
        set_read_only(libc, b"/", AT_RECURSIVE, READ_ONLY, 0)
        set_read_only(libc, here, 0, 0, READ_ONLY)
        os.chdir(folder)
    return True


def set_read_only(libc: ctypes.CDLL, path: bytes, flags: int, wanted: int, cleared: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(wanted, cleared, 0, 0)
    libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, flags, attributes, ctypes.sizeof(attributes))


def limit(plan: dict[str, Any], isolated: bool) -> None:
    seconds = max(1, round(plan["limit_s"] + 0.5))
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: plan["memory_bytes"],
        resource.RLIMIT_FSIZE: LARGEST_FILE,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        # In a new namespace, only its own processes count. Otherwise all processes of the user count, so none is added.
        resource.RLIMIT_NPROC: plan["processes"] + 2 if isolated else plan["processes"],
    }
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))
    libc = ctypes.CDLL(None)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.capset((ctypes.c_uint32 * 2)(CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)())  # drop what the namespace gave
    kinds = ([] if plan["processes"] else ["fork"]) + ([] if isolated else ["socket"])
    refuse_calls(libc, [number for kind in kinds for number in SYSTEM_CALLS.get(os.uname().machine, {}).get(kind, ())])


def refuse_calls(libc: ctypes.CDLL, numbers: Sequence[int]) -> None:
    """Make these system calls fail with a filter in the kernel. Unlike other limits, it also applies to root."""
    if not numbers:
        return
    load, equal, above, back = 0x20, 0x15, 0x35, 0x06
    lines = [(load, 0, 0, 0)]  # the number of the call; other numbers from X32 on are the same calls
    for place, number in enumerate(numbers):
        lines.append((equal, len(numbers) - place + 1, 0, number))
    lines += [(above, 1, 0, X32), (back, 0, 0, ALLOW), (back, 0, 0, REFUSE)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(filters)))
    libc.prctl(SET_SECCOMP, FILTER, program)


def run(plan: dict[str, Any], verdict: int) -> None:
    """Run the code and its test. Writes the sign only if both end without an error."""
    read, write = os.pipe()
    text = plan["stdin"].encode()
    if len(text) <= 60_000:  # a pipe holds 64 KiB
        os.write(write, text)
        os.close(write)
    else:
        os.close(read)
        os.close(write)
        with open(".stdin", "wb") as file:
            file.write(text)
        read = os.open(".stdin", os.O_RDONLY)
    os.dup2(read, 0)
    os.close(read)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    code = plan["code"] + ("\n\n" + plan["test"] if plan["test"] else "")
    with open("solution.py", "w", encoding="utf-8", errors="replace") as file:
        file.write(code)
    sign, asserts = plan["sign"], bool(plan["test"])
    with open(".imports.py", "w", encoding="utf-8") as file:
        file.write(plan["imports"])
    names = runpy.run_path(".imports.py")
    plan.clear()
    sys.argv = ["solution.py"]
    sys.path.insert(0, os.getcwd())
    try:
        runpy.run_path("solution.py", init_globals=names, run_name="__main__")
    except SystemExit as end:
        if asserts or end.code not in (None, 0):  # an exit before the end of the test is not a success
            os._exit(1)
    except BaseException:
        os._exit(1)
    sys.stdout.flush()
    os.write(verdict, sign.encode())
    os._exit(0)


if __name__ == "__main__":
    main()
