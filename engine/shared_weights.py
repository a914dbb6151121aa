"""Shares one copy of each publication among the processes of a machine, and makes them take turns to create it.

A trainer writes its publications into shared memory. `rollout.torch.transfer` finds there the copy of another process
of the machine, or receives a publication into it. `rollout.vllm.staged_weights` shares files, with the same turns, and
tells vLLM's workers where in shared memory, or in Ray's object store, the tensors are. The kernel counts the holders of
memory: it is free when the last process has dropped it or has died, however it died. If the system has no such memory,
each process has its own. Must never show a publication that is not complete. torch is imported late, because code that
only forwards descriptions does not need it.
"""

import contextlib
import fcntl
import gc
import json
import mmap
import os
import secrets
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NAME = "step-engine-weights-"
ALIGNMENT = 64
"""Alignment of tensors in bytes, the same as torch's."""
SHARES = hasattr(os, "memfd_create")
COMPLETE = getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SHRINK", 0)
"""The seals of complete memory."""
TURN_S = 60.0
"""Seconds to wait for another process that makes the same copy. After that, this process makes its own."""


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
        """`publication`: unique to these tensors; equal names mean equal bytes."""
        super().__init__(tensors)
        self.publication = publication


def publication_of(weights: Any) -> str:
    """The name of the publication of the weights; a new name if they are not `PublishedTensors`."""
    return weights.publication if isinstance(weights, PublishedTensors) else secrets.token_hex(8)


class Memory:
    """Shared memory for the tensors of a manifest, to be filled and then shown to other processes."""

    def __init__(self, manifest: Manifest, publication: str = "") -> None:
        """Raises: `OSError` if there is too little."""
        self._manifest = manifest
        self._publication = publication or secrets.token_hex(8)
        self.handle = -1
        if not SHARES:
            self.tensors = _views(bytearray(_size(manifest)), manifest)
            return
        self.handle = os.memfd_create(NAME + self._publication, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.handle, 0, _size(manifest))
            self.tensors = tensors_in(self.handle, manifest, mmap.ACCESS_WRITE)
        except BaseException:
            self.close()
            raise

    def complete(self) -> PublishedTensors:
        """Let other processes find the memory, until this process drops the tensors."""
        if SHARES:
            fcntl.fcntl(self.handle, fcntl.F_ADD_SEALS, COMPLETE)
        return _named(self.tensors, self._manifest, self._publication)

    def close(self) -> None:
        """Drop the memory; the tensors stay as long as a process uses them."""
        if SHARES:
            os.close(self.handle)


def copy_of(weights: "Mapping[str, Tensor]") -> tuple[Memory, Manifest]:
    """Memory with a copy of weights, for processes that get its handle. Tied weights are stored once. The caller must
    close it."""
    places: dict[Any, int] = {}
    keys = {name: (value.data_ptr(), value.shape, value.dtype) for name, value in weights.items()}
    names = tuple((name, places.setdefault(key, len(places))) for name, key in keys.items())
    kinds = tuple((str(kind).removeprefix("torch."), tuple(shape)) for _, shape, kind in places)
    manifest = Manifest(tensors=kinds, names=names)
    memory = Memory(manifest)
    for name, place in names:
        memory.tensors[place].copy_(weights[name])
    return memory, manifest


def find(manifest: Manifest, publication: str) -> PublishedTensors | None:
    """The tensors of a publication, if a process of this machine has them; this process then holds them, too."""
    if not SHARES:
        return None
    wanted = f"/memfd:{NAME}{publication} (deleted)"
    for link in _links(wanted):
        try:
            handle = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # dropped meanwhile, or this process may not read it
        try:
            if os.readlink(f"/proc/self/fd/{handle}") == wanted and fcntl.fcntl(handle, fcntl.F_GET_SEALS) == COMPLETE:
                return _named(tensors_in(handle, manifest, mmap.ACCESS_READ), manifest, publication)
        finally:
            os.close(handle)
    return None


@contextlib.contextmanager
def turn(publication: str, limit_s: float = TURN_S) -> Iterator[None]:
    """Make other processes wait while this one looks for a copy of a publication, and makes one if there is none."""
    path = Path(tempfile.gettempdir()) / f"{NAME}{os.getuid()}-{publication}.lock"
    handle = _locked(path, limit_s)
    try:
        yield
    finally:
        if handle is not None:
            path.unlink(missing_ok=True)
            os.close(handle)


def _locked(path: Path, limit_s: float) -> int | None:
    """The lock of the file at `path`; None if another process has held it for `limit_s`. If a process dies, the kernel
    gives its lock to the next one."""
    taken: list[int] = []
    deciding, done = threading.Lock(), threading.Event()
    waits = True

    def take() -> None:
        while waits:
            handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
            with deciding:
                if waits and _is_at(handle, path):
                    taken.append(handle)
                    break
            os.close(handle)  # its last holder has removed the file, or the lock came too late
        done.set()

    threading.Thread(target=take, name="weights-turn", daemon=True).start()
    done.wait(limit_s)
    with deciding:
        waits = False
        return taken[0] if taken else None


def _is_at(handle: int, path: Path) -> bool:
    try:
        return path.stat().st_ino == os.fstat(handle).st_ino
    except FileNotFoundError:
        return False


def _links(wanted: str) -> Iterator[str]:
    """Open files of processes of this machine that link to `wanted`."""
    for process in os.listdir("/proc"):
        if not process.isdigit():
            continue
        with contextlib.suppress(OSError):
            for handle in os.listdir(f"/proc/{process}/fd"):
                link = f"/proc/{process}/fd/{handle}"
                with contextlib.suppress(OSError):
                    if os.readlink(link) == wanted:
                        yield link


def tensors_in(handle: int, manifest: Manifest, access: int = mmap.ACCESS_WRITE) -> "list[Tensor]":
    """Views of the memory of a manifest. As long as one of them exists, the memory stays open in this process, where
    others find it."""
    return _views(mmap.mmap(handle, _size(manifest), access=access), manifest)


def weights_in(handle: int, manifest: Manifest) -> "dict[str, Tensor]":
    """The tensors in the memory of a manifest, by name; read-only."""
    tensors = tensors_in(handle, manifest, mmap.ACCESS_READ)
    return {name: tensors[place] for name, place in manifest.names}


def _bytes_of(memory: Any) -> "Tensor":
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _views(memory: Any, manifest: Manifest) -> "list[Tensor]":
    import torch

    whole = _bytes_of(memory)
    tensors = []
    places = zip(manifest.tensors, _offsets(manifest), manifest.sizes(), strict=False)
    for (kind, shape), offset, size in places:
        tensors.append(whole[offset : offset + size].view(getattr(torch, kind)).view(shape))
    return tensors


def _named(tensors: "Sequence[Tensor]", manifest: Manifest, publication: str) -> PublishedTensors:
    return PublishedTensors({name: tensors[index] for name, index in manifest.names}, publication)


def _offsets(manifest: Manifest) -> list[int]:
    """The offset at which each tensor begins, and at which the last one ends."""
    offsets = [0]
    for size in manifest.sizes():
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets


def _size(manifest: Manifest) -> int:
    return max(1, _offsets(manifest)[-1])


# -- the same memory in a child process --------------------------------------------------------------------------------

PLACES = "places.json"
"""The file that says where in shared memory tensors lie: arguments of `Place`."""
UNUSABLE = "a worker cannot use the shared memory of the weights"
"""How a worker's report begins if it could install the same tensors from files."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in shared memory."""

    name: str
    path: str
    """Opens the memory in any process of this machine and user, while the `OpenMemory` is open."""
    offset: int
    """In bytes."""
    kind: str
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        import torch

        return self.offset + getattr(torch, self.kind).itemsize * prod(self.shape)


@dataclass(frozen=True, slots=True)
class OpenMemory:
    """The shared memory of tensors, whoever allocated it, held for child processes: its contents stay until `close`."""

    places: tuple[Place, ...]
    tensors: "dict[str, Tensor]"
    """Keep the memory allocated."""
    handles: contextlib.ExitStack

    def describe(self, directory: Path) -> None:
        """Write what `MappedTensors.of` reads."""
        (directory / PLACES).write_text(json.dumps([astuple(place) for place in self.places]))

    def close(self) -> None:
        self.handles.close()
        self.tensors.clear()


def open_memory(tensors: "Mapping[str, Tensor]") -> OpenMemory | None:
    """The shared memory that tensors lie in; None if one of them lies elsewhere, or the system does not show where."""
    mappings = _shared_mappings()
    paths: dict[tuple[str, str], str] = {}
    places: list[Place] = []
    with contextlib.ExitStack() as handles:
        for name, tensor in tensors.items():
            mapping = _mapping_of(tensor, mappings)
            if mapping is None:
                return None
            if mapping.file not in paths:
                handle = _opened(*mapping.file)
                if handle is None:
                    return None
                handles.callback(os.close, handle)
                paths[mapping.file] = f"/proc/{os.getpid()}/fd/{handle}"
            offset = mapping.offset + tensor.data_ptr() - mapping.first
            kind = str(tensor.dtype).removeprefix("torch.")
            places.append(Place(name, paths[mapping.file], offset, kind, tuple(tensor.shape)))
        return OpenMemory(tuple(places), dict(tensors), handles.pop_all())


class MappedTensors:
    """The tensors at places, by name, to be read once and not to be kept: after `OpenMemory.close`, the memory may get
    other contents."""

    def __init__(self, places: "Sequence[Place]") -> None:
        self._places = places
        self._mappings: list[weakref.ref[mmap.mmap]] = []

    @classmethod
    def of(cls, directory: Path) -> "MappedTensors | None":
        """What an `OpenMemory` has described there; None if none has."""
        try:
            places = json.loads((directory / PLACES).read_text())
        except FileNotFoundError:
            return None
        return cls([Place(*place) for place in places])

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        """Maps the memory at once. Raises: `OSError` if it was closed, or this process may not read it."""
        return self._views({path: self._window(path) for path in dict.fromkeys(place.path for place in self._places)})

    def _views(self, windows: "dict[str, tuple[int, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
        import torch

        for place in self._places:
            first, window = windows[place.path]
            flat = window[place.offset - first : place.end - first]
            yield place.name, flat.view(getattr(torch, place.kind)).view(place.shape)

    def in_use(self) -> bool:
        """Whether somebody still has one of the tensors."""
        if any(mapping() is not None for mapping in self._mappings):
            gc.collect()
        return any(mapping() is not None for mapping in self._mappings)

    def _window(self, path: str) -> "tuple[int, Tensor]":
        """The part of a memory that has all the tensors that lie in it, and the offset at which it begins."""
        inside = [place for place in self._places if place.path == path]
        first = min(place.offset for place in inside) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        size = max(place.end for place in inside) - first
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(handle, size, access=mmap.ACCESS_READ, offset=first)
        finally:
            os.close(handle)
        self._mappings.append(weakref.ref(mapping))
        return first, _bytes_of(mapping)


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A part of this process's addresses that is shared memory."""

    first: int
    stop: int
    offset: int
    """In the file."""
    file: tuple[str, str]
    """(name, device and inode)"""


def _shared_mappings() -> list[_Mapping]:
    found = []
    with contextlib.suppress(FileNotFoundError), open("/proc/self/maps") as lines:
        for line in lines:
            addresses, mode, offset, device, inode, *name = line.rstrip("\n").split(maxsplit=5)
            if mode.endswith("s") and name:
                first, stop = (int(address, 16) for address in addresses.split("-"))
                found.append(_Mapping(first, stop, int(offset, 16), (name[0], f"{device} {inode}")))
    return found


def _mapping_of(tensor: "Tensor", mappings: Sequence[_Mapping]) -> _Mapping | None:
    """The mapping that a whole tensor lies in."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    first, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return next((mapping for mapping in mappings if mapping.first <= first < stop <= mapping.stop), None)


def _opened(name: str, identity: str) -> int | None:
    """A handle to read the file of a mapping, from one that any process of this machine has; None if there is none."""
    for link in _links(name):
        with contextlib.suppress(OSError):
            handle = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(handle)
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            if f"{device} {status.st_ino}" == identity:
                return handle
            os.close(handle)
    return None
