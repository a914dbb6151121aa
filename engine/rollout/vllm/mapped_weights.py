"""Lets vLLM's workers read published tensors where they lie in shared memory, whichever process allocated it.

In the replica, `rollout.vllm.staged_weights` opens the memory of a staged version and describes in a file where each
tensor lies; in a worker, `rollout.vllm.worker_extension` maps it. The replica holds the tensors while the version is
staged or installed. In Ray's object store such a version is therefore pinned: Ray can neither evict nor spill it. Must
never give a worker other memory than that of the version.
"""

import contextlib
import gc
import json
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import prod
from pathlib import Path

import torch

from engine.training.shared_weights import find_links, hold, publication_in, view_bytes

PLACES = "places.json"
"""The file that says where in shared memory tensors lie: arguments of `TensorPlace`."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
UNUSABLE = "a worker cannot use the shared memory of the weights"
"""What a worker reports if it could install the same tensors from files."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in shared memory."""

    name: str
    path: str
    """Opens the memory in any process of this machine and user, while the `OpenMemory` is open. Later it may open
    other memory, as it does on another machine."""
    identity: str
    """Of the memory: see `identify`."""
    offset: int
    """In bytes."""
    kind: str
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + getattr(torch, self.kind).itemsize * prod(self.shape)


@dataclass(frozen=True, slots=True)
class OpenMemory:
    """The shared memory of tensors, held for child processes: its contents stay until `close`."""

    places: tuple[TensorPlace, ...]
    tensors: dict[str, torch.Tensor]
    """Keep the memory allocated."""
    handles: contextlib.ExitStack

    def describe(self, directory: Path) -> None:
        """Write what `MappedTensors.of` reads."""
        (directory / PLACES).write_text(json.dumps([astuple(place) for place in self.places]))

    def close(self) -> None:
        self.handles.close()
        self.tensors.clear()


def open_memory(tensors: Mapping[str, torch.Tensor]) -> OpenMemory | None:
    """The shared memory that tensors lie in; None if one of them lies elsewhere, or the system does not show where."""
    mappings = _list_mappings()
    memories: dict[tuple[str, str], tuple[str, str]] = {}
    places: list[TensorPlace] = []
    with contextlib.ExitStack() as handles:
        for name, tensor in tensors.items():
            mapping = _find_mapping(tensor, mappings)
            if mapping is None:
                return None
            if mapping.file not in memories:
                handle = _open_file(*mapping.file)
                if handle is None:
                    return None
                handles.callback(os.close, handle)
                memories[mapping.file] = f"/proc/{os.getpid()}/fd/{handle}", identify(handle)
            offset = mapping.offset + tensor.data_ptr() - mapping.first
            kind = str(tensor.dtype).removeprefix("torch.")
            places.append(TensorPlace(name, *memories[mapping.file], offset, kind, tuple(tensor.shape)))
        return OpenMemory(tuple(places), dict(tensors), handles.pop_all())


class MappedTensors:
    """The tensors at places, by name, to be read once and not to be kept: after `OpenMemory.close`, the memory may get
    other contents."""

    def __init__(self, places: Sequence[TensorPlace]) -> None:
        self._places = places
        self._mappings: list[weakref.ref[mmap.mmap]] = []

    @classmethod
    def of(cls, directory: Path) -> "MappedTensors | None":
        """What an `OpenMemory` has described there; None if none has."""
        try:
            places = json.loads((directory / PLACES).read_text())
        except FileNotFoundError:
            return None
        return cls([TensorPlace(*place) for place in places])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Maps the memory at once. Raises: `OSError` if it was closed, or this process cannot open it."""
        return self._read({path: self._map(path) for path in dict.fromkeys(place.path for place in self._places)})

    def _read(self, windows: dict[str, tuple[int, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for place in self._places:
            first, window = windows[place.path]
            flat = window[place.offset - first : place.end - first]
            yield place.name, flat.view(getattr(torch, place.kind)).view(place.shape)

    def in_use(self) -> bool:
        """Whether somebody still has one of the tensors."""
        if any(mapping() is not None for mapping in self._mappings):
            gc.collect()
        return any(mapping() is not None for mapping in self._mappings)

    def _map(self, path: str) -> tuple[int, torch.Tensor]:
        """The part of a memory that has all the tensors that lie in it, and the offset at which it begins."""
        inside = [place for place in self._places if place.path == path]
        first = min(place.offset for place in inside) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        size = max(place.end for place in inside) - first
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not hold(handle) or identify(handle) != inside[0].identity:
                raise OSError(
                    f"{path} is not the memory that was staged: its replica has closed it, or is on another machine"
                )
            mapping = mmap.mmap(handle, size, access=mmap.ACCESS_READ, offset=first)
        finally:
            os.close(handle)
        self._mappings.append(weakref.ref(mapping))
        return first, view_bytes(mapping)


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A part of this process's addresses that is shared memory."""

    first: int
    stop: int
    offset: int
    """In the file."""
    file: tuple[str, str]
    """(name, device and inode)"""


def identify(handle: int) -> str:
    """Identifies the contents of an open file among those of all machines: the boot of the machine, the device, the
    inode, and, because memory is reused, the publication in it."""
    boot = ""
    with contextlib.suppress(FileNotFoundError):
        boot = BOOT.read_text().strip()
    return f"{boot} {_name_inode(handle)} {publication_in(handle)}"


def _name_inode(handle: int) -> str:
    """The device and the inode of an open file, as the kernel writes them in lists of mappings."""
    status = os.fstat(handle)
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino}"


def _list_mappings() -> list[_Mapping]:
    found = []
    with contextlib.suppress(FileNotFoundError), open("/proc/self/maps") as lines:
        for line in lines:
            addresses, mode, offset, device, inode, *name = line.rstrip("\n").split(maxsplit=5)
            if mode.endswith("s") and name:
                first, stop = (int(address, 16) for address in addresses.split("-"))
                found.append(_Mapping(first, stop, int(offset, 16), (name[0], f"{device} {inode}")))
    return found


def _find_mapping(tensor: torch.Tensor, mappings: Sequence[_Mapping]) -> _Mapping | None:
    """The mapping that a whole tensor lies in."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    first, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return next((mapping for mapping in mappings if mapping.first <= first < stop <= mapping.stop), None)


def _open_file(name: str, inode: str) -> int | None:
    """A handle to read the file of a mapping, from one that any process of this machine has; None if there is none."""
    for link in find_links(name):
        with contextlib.suppress(OSError):
            handle = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _name_inode(handle) == inode and hold(handle):
                    return os.dup(handle)  # shares its lock
            finally:
                os.close(handle)
    return None
