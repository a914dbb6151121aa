"""Isolates the code of a response from its machine: namespaces, Landlock, a filter of system calls, and limits.

`code_child.py` uses it in its own processes. It imports nothing from the engine, because it runs in a process without
the engine's path. It must never hide a failure: a function does what it says, or raises `NotIsolated`.
"""

import ctypes
import errno
import os
import resource
import site
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LEVELS = ("full", "confined", "limits")
"""From the strongest to the weakest."""
NOBODY = 65534
DISK_BYTES = 64 << 20
"""Maximum size of all files of a test, at the level `full`."""
LARGEST_FILE = 16 << 20
STACK_BYTES = 96 << 20
"""For deep recursion. The kernel keeps 128 MiB free for the stack of a program that started with a smaller limit."""
OPEN_FILES = 64
SCRATCH = "/box"
"""The directory of a test at the level `full`; `/tmp` is another name of it."""
SYSTEM_PATHS = (
    "/bin", "/sbin", "/usr/bin", "/usr/sbin", "/nix/store", "/gnu/store", "/usr/lib/locale", "/usr/share/zoneinfo",
    "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/passwd",
    "/etc/group", "/etc/nsswitch.conf",
)  # fmt: skip
"""What code may read besides Python; no directory in which users keep files."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
LIBC = ctypes.CDLL(None, use_errno=True)


class NotIsolated(Exception):
    """A mechanism of the kernel is missing or refused. The message names it."""


def require(result: int, mechanism: str) -> int:
    """The result of a call of the C library. Raises: `NotIsolated` if it failed."""
    if result < 0:
        raise NotIsolated(f"{mechanism}: {os.strerror(ctypes.get_errno())}")
    return result


@contextmanager
def needed(mechanism: str) -> Iterator[None]:
    """Raises: `NotIsolated` instead of an `OSError`."""
    try:
        yield
    except OSError as error:
        raise NotIsolated(f"{mechanism}: {error.strerror}") from error


def readable_paths() -> dict[str, str]:
    """The directories and files that code may read, each with its real path: those of the system, the interpreter, its
    modules and packages, and the directories of its shared libraries. Never a whole prefix: a project may be a virtual
    environment, or be in `/usr`."""
    mapped = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    folders = {os.path.dirname(path) for path in mapped if "/site-packages/" not in path} - {"/", "/usr/local/lib"}
    files = map(str, [*Path("/lib64").glob("ld-*"), *Path("/usr/local/lib").glob("*.so*")])
    wanted = (
        *SYSTEM_PATHS, *folders, *(folder.removeprefix("/usr") for folder in folders), *files,
        *(path for path in sys.path if path.endswith("/lib-dynload")), os.path.dirname(os.__file__),
        *site.getsitepackages(), f"{sys.prefix}/pyvenv.cfg", sys.executable, os.path.realpath(sys.executable),
    )  # fmt: skip
    return {path: os.path.realpath(path) for path in dict.fromkeys(wanted) if os.path.exists(path)}


def outermost(paths: Mapping[str, str]) -> list[str]:
    """The real paths that are not inside another one."""
    real = set(paths.values())
    return sorted(path for path in real if not any(path.startswith(f"{other}/") for other in real))


# -- processes ---------------------------------------------------------------------------------------------------------

PARENT_DEATH_SIGNAL, DUMPABLE, CHILD_SUBREAPER, NO_NEW_PRIVILEGES, SET_SECCOMP, CAPABILITIES_3 = (
    1,
    4,
    36,
    38,
    22,
    0x20080522,
)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Call it again after a change of the user."""
    require(LIBC.prctl(PARENT_DEATH_SIGNAL, 9), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)


def hide_memory(hidden: bool = True) -> None:
    """Keep other processes of the user from reading the memory of this one."""
    require(LIBC.prctl(DUMPABLE, int(not hidden), 0, 0, 0), "PR_SET_DUMPABLE")


def adopt_orphans() -> None:
    require(LIBC.prctl(CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def is_root() -> bool:
    """Whether this process is root and may become `nobody`. The root of a container that has no other user may not: it
    is an ordinary user outside."""
    if os.geteuid():
        return False
    ranges = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= NOBODY < first + count for first, _, count in ranges)


def become_nobody() -> None:
    """Change from root to the user `nobody`, who must be able to read the Python installation. The kernel does not
    limit the number of root's processes."""
    if not is_root():
        return
    with needed("the user nobody"):
        os.seteuid(NOBODY)
        readable = os.access(os.__file__, os.R_OK, effective_ids=True)
        os.seteuid(0)
        if not readable:
            raise NotIsolated(f"the user nobody, who cannot read the Python installation in {sys.base_prefix}")
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def give_up_capabilities() -> None:
    """Drop all capabilities, those of a namespace included, and refuse those of programs with the setuid bit."""
    require(LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    head, none = (ctypes.c_uint32 * 2)(CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)()
    require(LIBC.capset(head, none), "capset")


def set_limits(*, seconds: float, memory_bytes: int, processes: int) -> None:
    limits = {
        resource.RLIMIT_CPU: max(1, round(seconds + 0.5)),
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: LARGEST_FILE,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: processes,
    }
    for kind, most in limits.items():
        with suppress(ValueError):  # the user has a lower hard limit
            resource.setrlimit(kind, (most, most))


# -- namespaces --------------------------------------------------------------------------------------------------------

NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
NEW_MOUNTS = 0x00020000
BIND, PRIVATE, RECURSIVE, NO_SETUID, NO_DEVICES = 4096, 1 << 18, 16384, 2, 4
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
AT_FDCWD, AT_RECURSIVE, ATTR_READ_ONLY, ATTR_NO_SETUID, DETACH = -100, 0x8000, 1, 2, 2


def enter_namespaces(map_users: Callable[[], None]) -> None:
    """Move into new namespaces. The next child of this process is the first process of the new process namespace.
    `map_users` has the user mapping written by a process outside."""
    require(LIBC.unshare(NEW_NAMESPACES), "user namespaces (unshare)")
    map_users()


def write_user_maps(pid: int) -> None:
    """Map the users of a namespace to themselves. Root also maps `nobody`, to whom code is given."""
    root = is_root()
    users, groups = ([0, NOBODY] if root else [name] for name in (os.geteuid(), os.getegid()))
    with needed("user namespaces (the user map)"):
        if not root:
            Path(f"/proc/{pid}/setgroups").write_text("deny")
        for name, ids in (("uid_map", users), ("gid_map", groups)):
            descriptor = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
            try:
                os.write(descriptor, "".join(f"{one} {one} 1\n" for one in ids).encode())
            finally:
                os.close(descriptor)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    texts = [text.encode() if text else None for text in (source, target, kind)]
    require(LIBC.mount(*texts, flags, data.encode() or None), f"mounts ({kind or 'bind'} at {target})")


def build_root(base: str, paths: Mapping[str, str]) -> None:
    """Replace the file system by one that has only `paths`, read-only, devices, an own `/proc`, and an empty
    `SCRATCH`. `base`: any directory. Must be the first process of its namespace."""
    mount("", "/", flags=RECURSIVE | PRIVATE)
    mount("tmpfs", base, "tmpfs", NO_SETUID | NO_DEVICES, "size=1m,mode=0755")
    os.chdir(base)
    with needed("mounts (the new root)"):
        os.mkdir("old")
        require(LIBC.syscall(PIVOT_ROOT.get(os.uname().machine, -1), b".", b"old"), "mounts (pivot_root)")
        os.chdir("/")
        for path in (*outermost(paths), *DEVICES):
            _bind_read_only(f"/old{path}", path)
        for path, real in paths.items():
            if not os.path.lexists(path):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.symlink(real, path)
        os.mkdir("/proc")
        os.mkdir(SCRATCH)
        for name in ("/tmp", "/dev/shm"):
            if not os.path.lexists(name):
                os.symlink(SCRATCH, name)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
        mount("proc", "/proc", "proc", NO_SETUID | NO_DEVICES)
        require(LIBC.umount2(b"/old", DETACH), "mounts (the old root)")
        os.rmdir("/old")
    _set_read_only("/", 0)
    seen = [name for name in os.listdir("/proc") if name.isdigit()]
    if os.getpid() != 1 or seen != ["1"]:
        raise NotIsolated(f"process namespaces: {len(seen)} processes are visible")


def _bind_read_only(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, target, flags=BIND | RECURSIVE)
    _set_read_only(target, AT_RECURSIVE)


def _set_read_only(path: str, flags: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(ATTR_READ_ONLY | ATTR_NO_SETUID, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    result = LIBC.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, size)
    require(result, "mounts (mount_setattr, from Linux 5.12)")


def mount_scratch() -> None:
    """Mount an empty directory of bounded size that only this process and its children see."""
    require(LIBC.unshare(NEW_MOUNTS), "mount namespaces")
    mount("tmpfs", SCRATCH, "tmpfs", NO_SETUID | NO_DEVICES, f"size={DISK_BYTES},nr_inodes=4096,mode=1777")


# -- Landlock ----------------------------------------------------------------------------------------------------------
# https://docs.kernel.org/userspace-api/landlock.html

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
LEAST_ABI = 3
"""The first version that protects files from being truncated."""
EXECUTE, WRITE_FILE, READ_FILE, READ_DIRECTORY = 1, 2, 4, 8
RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
"""The rights on files that each version of Landlock added."""
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15
NETWORK_ABI, NETWORK, SCOPE_ABI, SCOPES = 4, 3, 6, 3


def landlock_abi() -> int:
    """Raises: `NotIsolated` if the kernel has no Landlock, or one that is too old."""
    abi = require(LIBC.syscall(CREATE_RULESET, None, 0, 1), "Landlock")
    if abi < LEAST_ABI:
        raise NotIsolated(f"Landlock: the kernel has version {abi}, but {LEAST_ABI} is needed (from Linux 6.2)")
    return abi


def restrict_files(directory: str, paths: Mapping[str, str]) -> None:
    """Only read `paths`, only write to `directory`; no TCP, and no signals to processes outside. Needs
    `give_up_capabilities`. Raises: `NotIsolated`."""
    abi = landlock_abi()
    handled = sum(rights for version, rights in RIGHTS.items() if version <= abi)
    attributes = struct.pack("QQQ", handled, NETWORK if abi >= NETWORK_ABI else 0, SCOPES if abi >= SCOPE_ABI else 0)
    rules = require(LIBC.syscall(CREATE_RULESET, attributes, len(attributes), 0), "Landlock")
    read = EXECUTE | READ_FILE | READ_DIRECTORY
    allowed = {path: read for path in outermost(paths)}
    allowed |= {device: READ_FILE | WRITE_FILE for device in DEVICES}
    allowed |= {f"/proc/{os.getpid()}": READ_FILE | READ_DIRECTORY, directory: handled}
    allowed |= {file: READ_FILE for file in ("/proc/cpuinfo", "/proc/meminfo")}
    for path, rights in allowed.items():
        if os.path.exists(path):
            with needed("Landlock"):
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            if not os.path.isdir(path):
                rights &= ON_FILES
            rule = struct.pack("=Qi", rights & handled, descriptor)
            require(LIBC.syscall(ADD_RULE, rules, 1, rule, 0), "Landlock")
            os.close(descriptor)
    require(LIBC.syscall(RESTRICT_SELF, rules, 0), "Landlock")
    os.close(rules)


# -- system calls ------------------------------------------------------------------------------------------------------

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column in `CALLS`, and the kernel's name of the architecture (AUDIT_ARCH)."""
CALLS: dict[str, dict[str, tuple[int | None, int | None]]] = {
    # Refused at every level: further ways to reach other processes, other users or the kernel.
    "kernel": {
        "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
        "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272),
        "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
        "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
        "unshare": (272, 97), "setns": (308, 268), "pivot_root": (155, 41), "mount": (165, 40), "umount2": (166, 39),
        "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
        "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
        "open_by_handle_at": (304, 265),
        "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
        "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
        "msgget": (68, 186), "mq_open": (240, 180), "mq_unlink": (241, 181),
        "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262), "syslog": (103, 116),
    },
    # Refused without namespaces, where processes and files of the user are near.
    "neighbors": {
        "socket": (41, 198), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
        "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
        "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
        "shmat": (30, 196), "shmctl": (31, 195), "semctl": (66, 191), "semop": (65, 193), "semtimedop": (220, 192),
        "msgctl": (71, 187), "msgsnd": (69, 189), "msgrcv": (70, 188), "migrate_pages": (256, 238),
        "move_pages": (279, 239),
        "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
        "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
        "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
        "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
        "file_setattr": (469, 469),
        "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    },
    "fork": {"fork": (57, None), "vfork": (58, None), "clone": (56, 220)},
}  # fmt: skip
REFUSED_ARGUMENTS = (
    # A call, the place of an argument, and its values, with which the kernel signals or opens processes of the user.
    ((72, 25), 1, (8, 10, 15, 1024)),  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE
    ((16, 29), 1, (0x5452, 0x8901, 0x8902)),  # ioctl: FIOASYNC, FIOSETOWN, SIOCSPGRP
    ((54, 208), 2, (76,)),  # setsockopt: SO_PASSPIDFD
    ((55, 209), 2, (77,)),  # getsockopt: SO_PEERPIDFD
)
CLONE, CLONE3, SOCKET, SOCKET_PAIR, PRLIMIT = (56, 220), (435, 435), (41, 198), (53, 199), (302, 261)
KILL, TGKILL = (62, 129), (234, 131)
NAMESPACE_FLAGS = 0x7E020000
INTERNET, INTERNET_6, DATAGRAM = 2, 10, 2
X32 = 0x40000000
FILTER, ALLOW, ERROR, KILL_PROCESS = 2, 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
Line = tuple[int, int, int, int]


def filter_available() -> None:
    """Raises: `NotIsolated` if the kernel or the machine has no filter of system calls that is known here."""
    if os.uname().machine not in MACHINES:
        raise NotIsolated(f"a system call filter for {os.uname().machine}")
    require(LIBC.prctl(21, 0, 0, 0, 0), "system call filters (seccomp)")


def refuse_calls(*, alone: bool, may_fork: bool) -> None:
    """Make dangerous system calls fail. `alone`: the process is in namespaces of its own. Needs
    `give_up_capabilities`. Raises: `NotIsolated`."""
    filter_available()
    lines = filter_lines(os.uname().machine, os.getpid(), alone=alone, may_fork=may_fork)
    filters = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(filters)))
    require(LIBC.prctl(SET_SECCOMP, FILTER, program, 0, 0), "system call filters (seccomp)")


def filter_lines(machine: str, own: int, *, alone: bool, may_fork: bool) -> list[Line]:
    """The program of the filter. It kills a process that calls with the numbers of another architecture."""
    column, architecture = MACHINES[machine]
    lines: list[Line] = [
        (LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, ERROR | errno.EPERM),
    ]  # fmt: skip

    def refuse(numbers: tuple[int | None, int | None], error: int = errno.EPERM) -> None:
        if numbers[column] is not None:
            lines.extend([(EQUAL, 0, 1, numbers[column] or 0), (RETURN, 0, 0, ERROR | error)])

    def refuse_if(numbers: tuple[int, int], argument: int, test: Sequence[Line]) -> None:
        """`test` sees the lower half of the argument. It must jump over the next line to allow the call."""
        body = [
            (LOAD, 0, 0, ARGUMENTS + 8 * argument),
            *test,
            (RETURN, 0, 0, ERROR | errno.EPERM),
            (LOAD, 0, 0, NUMBER),
        ]
        lines.extend([(EQUAL, 0, len(body), numbers[column]), *body])

    for kind in ("kernel", *(() if alone else ("neighbors",))):
        for numbers in CALLS[kind].values():
            refuse(numbers)
    if may_fork:
        refuse(CLONE3, errno.ENOSYS)  # its flags cannot be seen; the C library then uses `clone`
        refuse_if(CLONE, 0, [(ANY_BIT, 0, 1, NAMESPACE_FLAGS)])
    else:
        for numbers in (*CALLS["fork"].values(), CLONE3):
            refuse(numbers, errno.EAGAIN)
    # Local sockets reach programs outside by paths in every namespace, as do pairs of datagram sockets.
    refuse_if(SOCKET, 0, [(EQUAL, 2, 0, INTERNET), (EQUAL, 1, 0, INTERNET_6)])
    refuse_if(SOCKET_PAIR, 1, [(ANY_BIT, 0, 1, DATAGRAM)])
    for call, argument, values in REFUSED_ARGUMENTS:
        for value in values:
            refuse_if(call, argument, [(EQUAL, 0, 1, value)])
    refuse_if(PRLIMIT, 0, [(EQUAL, 1, 0, 0)])
    if not alone:
        for call in (KILL, TGKILL):
            refuse_if(call, 0, [(EQUAL, 1, 0, own)])
    return [*lines, (RETURN, 0, 0, ALLOW)]
