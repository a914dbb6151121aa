"""Shares one copy of each publication among the processes of a machine, and makes them take turns to create it.

A trainer writes its publications into shared memory. `rollout.torch.transfer` finds there the copy of another process
of the machine, or receives a publication into it; `rollout.vllm.staged_weights` shares files, with the same turns. The
kernel counts the holders of memory, and frees it when the last process has dropped it or has died, however it died. A
trainer keeps such memory for its next publication. If the system has no shared memory, each process has its own. This
module must never show an incomplete publication, nor change one that a process holds. torch is imported late, because
code that only forwards descriptions does not need it.

Memory begins with the name of the publication in it, and its file has a lock. The process that fills the memory holds
the lock exclusively. Each process that reads the memory shares the lock for as long as it has the file open or mapped.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

NAME = "step-engine-weights"
LINK = f"/memfd:{NAME} (deleted)"
"""What `/proc` shows instead of a path."""
ALIGNMENT = 64
"""Alignment of tensors in bytes, the same as torch's."""
HEAD = ALIGNMENT
"""Bytes before the tensors. They hold the name of the publication once it is complete."""
SHARES = hasattr(os, "memfd_create")
FIXED_SIZE = getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SHRINK", 0)
TURN_S = 60.0
"""Seconds to wait for another process that makes the same copy, without a sign of progress. After that, this process
makes its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The tensors of a publication, each once and in this order, and the names of each tensor. Tied names share one."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """(type, shape)"""
    names: tuple[tuple[str, int], ...]
    """(name, index into `tensors`)"""

    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        import torch

        return [getattr(torch, kind).itemsize * prod(shape) for kind, shape in self.tensors]


class PublishedTensors(dict[str, "Tensor"]):
    """The tensors of one publication by name, in memory that others may read, so it must never be changed."""

    def __init__(self, tensors: Mapping[str, "Tensor"], publication: str) -> None:
        """`publication`: unique to these tensors; equal names mean equal bytes. Raises: `ValueError` if it is longer
        than `HEAD` bytes."""
        _head(publication)
        super().__init__(tensors)
        self.publication = publication


def publication_of(weights: Any) -> str:
    """The name of the publication of the weights; a new name if they are not `PublishedTensors`."""
    return weights.publication if isinstance(weights, PublishedTensors) else secrets.token_hex(8)


class Memory:
    """Shared memory for the tensors of a manifest, to be filled and then shown to other processes."""

    def __init__(self, manifest: Manifest, publication: str = "") -> None:
        """Raises: `OSError` if there is too little."""
        size = _size(manifest)
        self.handle = -1
        self.close: Callable[[], object] = lambda: None
        """Drop the memory. The tensors stay for as long as a process uses them."""
        self._locks = False
        """The system has locks for such files, so readers can be counted."""
        self._whole: bytearray | _Pages = bytearray(0 if SHARES else size)
        if SHARES:
            self.handle = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self.close = weakref.finalize(self, os.close, self.handle)
            self._locks = _lock(self.handle, fcntl.LOCK_EX)
            os.posix_fallocate(self.handle, 0, size)
            fcntl.fcntl(self.handle, fcntl.F_ADD_SEALS, FIXED_SIZE)
            self._whole = _Pages(self.handle, size)
        self.begin(manifest, publication)

    def begin(self, manifest: Manifest, publication: str = "") -> bool:
        """Prepare new or unused memory for a publication. Returns whether it has the right size."""
        if len(self._whole) != _size(manifest):
            return False
        view = memoryview(self._whole)
        self._holders = weakref.ref(view)  # each tensor, and what is made of it, refers to the view
        self._manifest = manifest
        self._publication = publication or secrets.token_hex(8)
        self._forks = _forks
        self.tensors = _views(view, manifest)
        return True

    def complete(self) -> PublishedTensors:
        """Let other processes find the memory. Its contents do not change while a process holds the tensors."""
        tensors, self.tensors = self.tensors, []
        if SHARES:
            os.pwrite(self.handle, _head(self._publication), 0)
            _lock(self.handle, fcntl.LOCK_UN)
        return _named(tensors, self._manifest, self._publication)

    def reclaim(self) -> bool:
        """Whether no process holds the tensors. If so, no process can find them from now on."""
        self.tensors = []
        if self._holders() is not None or (SHARES and not _lock(self.handle, fcntl.LOCK_EX)):
            return False
        if SHARES:
            os.pwrite(self.handle, _head(""), 0)  # a process may have it open, and would get the lock if this one died
        return True

    @property
    def is_counted(self) -> bool:
        """Whether its holders can be counted. A child that was forked since the memory was filled may hold the tensors,
        and no lock shows that."""
        return self._forks == _forks and (self._locks or not SHARES)

    def pin(self) -> None:
        """Pin the memory: register it with CUDA until it is unmapped. A GPU then copies at its link's full speed."""
        if not isinstance(self._whole, _Pages):
            return
        import torch

        runtime, address = torch.cuda.cudart(), view_bytes(self._whole).data_ptr()
        code = int(runtime.cudaHostRegister(address, len(self._whole), 0))
        if code == 0:
            self._whole.unpin = partial(runtime.cudaHostUnregister, address)
            return
        log.warning("CUDA cannot pin memory for weights (error %d), so publications are copied slowly", code)
        with contextlib.suppress(RuntimeError):  # CUDA's next call would raise the error
            torch.zeros(1, device="cuda")


_forks = 0
"""How often this process has forked."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_parent=_count_fork)


class _Pages(mmap.mmap):
    unpin: Callable[[], object] | None = None
    """Must be called before the memory is unmapped."""

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


class ReusedMemory:
    """Memory for the successive publications of a trainer, or for the copies that undo its failed steps. It is used
    again once no process holds it, because the system needs longer to provide new memory than the copy takes."""

    def __init__(self, *, pins: bool) -> None:
        """`pins`: pin the memory, because the weights come from a GPU."""
        self._pins = pins
        self._memories: list[Memory] = []

    def take(self, manifest: Manifest) -> Memory:
        """Memory for a publication. All other memory that no process holds is freed. Raises: `OSError`."""
        counted = [memory for memory in self._memories if memory.is_counted]
        unused = [memory for memory in counted if memory.reclaim()]
        self._memories = [memory for memory in counted if memory not in unused]
        while unused and not unused[-1].begin(manifest):
            unused.pop()
        memory = unused[-1] if unused else self._make(manifest)
        self._memories.append(memory)
        return memory

    def _make(self, manifest: Manifest) -> Memory:
        memory = Memory(manifest)
        if self._pins:
            memory.pin()
        return memory


def copy_of(weights: "Mapping[str, Tensor]") -> tuple[Memory, Manifest]:
    """Memory with a copy of weights, for processes that get its handle. Tied weights are stored once. The caller must
    close it."""
    places: dict[Any, int] = {}
    keys = {name: (value.dtype, value.shape, value.data_ptr(), value.stride()) for name, value in weights.items()}
    names = tuple((name, places.setdefault(key, len(places))) for name, key in keys.items())
    kinds = tuple((str(kind).removeprefix("torch."), tuple(shape)) for kind, shape, *_ in places)
    manifest = Manifest(tensors=kinds, names=names)
    memory = Memory(manifest)
    for name, place in names:
        memory.tensors[place].copy_(weights[name])
    return memory, manifest


def find(manifest: Manifest, publication: str, pid: int | None = None) -> PublishedTensors | None:
    """The tensors of a publication, if a process of this machine has them, or the process `pid`; this process then
    holds them, too."""
    handle = open_publication(publication, pid)
    if handle is None:
        return None
    try:
        return _named(tensors_in(handle, manifest, mmap.ACCESS_READ), manifest, publication)
    finally:
        os.close(handle)


def open_publication(publication: str, pid: int | None = None) -> int | None:
    """The open file of a publication, if a process of this machine has it, or the process `pid`. Its contents do not
    change until the caller has closed it, and all that was mapped with it. Does not import torch."""
    for link in find_links(LINK, pid) if SHARES else ():
        try:
            handle = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # dropped meanwhile, or this process may not read it
        try:
            if publication_in(handle) == publication and hold(handle) and publication_in(handle) == publication:
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    return None


def published_in(memory: Any, manifest: Manifest, publication: str) -> PublishedTensors:
    """The tensors of a publication. `memory`: a copy of its memory."""
    return _named(_views(memory, manifest), manifest, publication)


def publication_in(handle: int) -> str:
    """The name of the publication in an open file; empty if it holds none, or is not the memory of a publication."""
    if os.readlink(f"/proc/self/fd/{handle}") != LINK:
        return ""
    return os.pread(handle, HEAD, 0).rstrip(b"\0").decode(errors="replace")


def hold(handle: int) -> bool:
    """Prevent changes to an open file of shared memory while the file, or a mapping made with it, is open. Returns
    False if a process is filling it."""
    return _lock(handle, fcntl.LOCK_SH)


def _lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:  # another process has it, or the system has no such locks
        return False
    return True


def _head(publication: str) -> bytes:
    head = publication.encode().ljust(HEAD, b"\0")
    if len(head) > HEAD:
        raise ValueError(f"the name of a publication must have at most {HEAD} bytes, but has {len(head)}")
    return head


@contextlib.contextmanager
def turn(
    publication: str, limit_s: float = TURN_S, waits: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], None]]:
    """Make other processes wait while this one looks for a copy of a publication, and makes one if there is none.
    Yields a function to call after each step: the others wait on if one was made within `limit_s`. `waits` is called
    before this process waits, and again after each `limit_s`."""
    path = Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}-{publication}.lock"
    handle = _locked(path, limit_s, waits)
    try:
        yield (lambda: None) if handle is None else (lambda: os.utime(handle))
    finally:
        if handle is not None:
            path.unlink(missing_ok=True)
            os.close(handle)


def _locked(path: Path, limit_s: float, waits: Callable[[], None]) -> int | None:
    """The lock of the file at `path`; None if another process holds it and made no step for `limit_s`. If a process
    dies, the kernel gives its lock to the next one."""
    taken: list[int] = []
    deciding, done = threading.Lock(), threading.Event()
    wanted = True

    def take() -> None:
        while wanted:
            handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
            with deciding:
                if wanted and _is_at(handle, path):
                    taken.append(handle)
                    break
            os.close(handle)  # its last holder has removed the file, or the lock came too late
        done.set()

    threading.Thread(target=take, name="weights-turn", daemon=True).start()
    try:
        while True:
            step = _last_step(path)
            waits()
            if done.wait(limit_s) or _last_step(path) == step:
                break
    finally:
        with deciding:
            wanted = False
    return taken[0] if taken else None


def _last_step(path: Path) -> tuple[int, int] | None:
    """Differs after each step of the process that holds the lock, and for each such process."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _is_at(handle: int, path: Path) -> bool:
    try:
        return path.stat().st_ino == os.fstat(handle).st_ino
    except FileNotFoundError:
        return False


def find_links(name: str, pid: int | None = None) -> Iterator[str]:
    """Paths in `/proc` of the open files with a name, of the process `pid`, or of all processes of this machine that
    this one may see."""
    for process in os.listdir("/proc") if pid is None else [str(pid)]:
        if not process.isdigit():
            continue
        with contextlib.suppress(OSError):
            for handle in os.listdir(f"/proc/{process}/fd"):
                link = f"/proc/{process}/fd/{handle}"
                with contextlib.suppress(OSError):
                    if os.readlink(link) == name:
                        yield link


def tensors_in(handle: int, manifest: Manifest, access: int = mmap.ACCESS_WRITE) -> "list[Tensor]":
    """Views of the memory of a manifest. As long as one of them exists, the memory stays open in this process, where
    others find it."""
    return _views(mmap.mmap(handle, _size(manifest), access=access), manifest)


def view_bytes(memory: Any) -> "Tensor":
    """A tensor over a buffer, which may be read-only."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _views(memory: Any, manifest: Manifest) -> "list[Tensor]":
    import torch

    whole = view_bytes(memory)
    tensors = []
    places = zip(manifest.tensors, _offsets(manifest), manifest.sizes(), strict=False)
    for (kind, shape), offset, size in places:
        tensors.append(whole[offset : offset + size].view(getattr(torch, kind)).view(shape))
    return tensors


def _named(tensors: "Sequence[Tensor]", manifest: Manifest, publication: str) -> PublishedTensors:
    return PublishedTensors({name: tensors[index] for name, index in manifest.names}, publication)


def _offsets(manifest: Manifest) -> list[int]:
    """The offset at which each tensor begins, and at which the last one ends."""
    offsets = [HEAD]
    for size in manifest.sizes():
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets


def _size(manifest: Manifest) -> int:
    return _offsets(manifest)[-1]
