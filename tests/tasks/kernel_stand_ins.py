"""Runs a command as on another machine: as an ordinary user, or where the kernel refuses something. A script:

    python kernel_stand_ins.py user,no_namespaces COMMAND ...

Each refusal is the kernel's own, by a filter of system calls or by Landlock; only its cause is a stand-in.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER, NO_NEW_PRIVILEGES, SECCOMP = 0x10000000, 38, 22
ALLOW, ERROR = 0x7FFF0000, 0x00050000
UNSHARE, MOUNT = {"x86_64": 272, "aarch64": 97}, {"x86_64": 165, "aarch64": 40}
PERMISSION, NO_CALL = 1, 38


def user() -> None:
    """An ordinary user, if this one is root."""
    if os.geteuid():
        return
    assert LIBC.unshare(NEW_USER) == 0
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text("1000 0 1")
    Path("/proc/self/gid_map").write_text("1000 0 1")


def no_namespaces() -> None:
    """As in a container whose profile refuses `unshare`."""
    _refuse(UNSHARE[os.uname().machine], PERMISSION)


def no_landlock() -> None:
    """As with a kernel before 5.13."""
    _refuse(444, NO_CALL)


def no_mounts() -> None:
    """As on Ubuntu from 23.10, if another process writes the user map: AppArmor refuses mounts in the namespace."""
    _refuse(MOUNT[os.uname().machine], PERMISSION)


def no_user_map() -> None:
    """As on Ubuntu from 23.10: `unshare` succeeds, but the user map cannot be written. There, AppArmor refuses it."""
    write_file, attributes = 2, struct.pack("Q", 2)
    rules = LIBC.syscall(444, attributes, len(attributes), 0)
    assert rules >= 0, "needs Landlock"
    for path in Path("/").iterdir():
        if path.name != "proc":
            rule = struct.pack("=Qi", write_file, os.open(path, os.O_PATH))
            assert LIBC.syscall(445, rules, 1, rule, 0) == 0
    LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    assert LIBC.syscall(446, rules, 0) == 0


def _refuse(call: int, error: int) -> None:
    lines = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, ERROR | error), (0x06, 0, 0, ALLOW)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(filters)))
    LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    assert LIBC.prctl(SECCOMP, 2, program, 0, 0) == 0


STAND_INS: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (user, no_namespaces, no_landlock, no_mounts, no_user_map)
}

if __name__ == "__main__":
    for name in filter(None, sys.argv[1].split(",")):
        STAND_INS[name]()
    os.execv(sys.argv[2], sys.argv[2:])
