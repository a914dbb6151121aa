"""Stages weights for vLLM: a new directory for each version, in shared memory if there is room. Where the published
tensors lie in shared memory already, it only says where; else it has them as safetensors. With `trainer.lora` it is the
directory of an adapter, as peft writes it.

`rollout.vllm.vllm_backend` calls it on threads. A version is checked against the model before it is staged. At most two
versions are kept: the installed one, to go back to, and the next.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.errors import EngineError
from engine.ids import Version
from engine.rollout.model_tensors import ModelTensors, buckets
from engine.rollout.vllm.mapped_weights import OpenMemory, open_memory
from engine.training.lora import Lora, write_adapter
from engine.training.shared_weights import PublishedTensors, publication_of, turn

MEMORY = Path("/dev/shm")
PREFIX = "step-engine-weights-"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Staged:
    """A staged version."""

    directory: Path
    memory: OpenMemory | None
    """Holds the tensors, if the directory only says where they lie."""
    publication: str
    """See `PublishedTensors`."""

    def remove(self) -> None:
        if self.memory is not None:
            self.memory.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class StagingArea:
    """The staging directories of one backend, below `root`. Backends of one machine that stage the same publication
    share its files. Directories of owners that died are removed by the next one on the same machine.

    `maps`: the readers are processes of this machine and user, which can map memory. Then no files are written of
    published tensors that lie in shared memory: all backends of the machine use this one copy.
    """

    def __init__(
        self, model: str, bucket_mb: float, place: Path | None = None, lora: Lora | None = None, *, maps: bool = False
    ) -> None:
        self.tensors = ModelTensors.of(model, lora)
        self._model = model
        self._lora = lora
        self.maps = maps and lora is None  # vLLM reads adapters itself
        """Whether published tensors are left where they lie in shared memory."""
        self._bucket = int(bucket_mb * MIB)
        place = place or (MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
        self._place = place
        _sweep(place)
        made = Path(tempfile.mkdtemp(prefix=".step-engine-", dir=place))
        self._lock = _locked(made)
        name = f"{PREFIX}{_machine()}-{made.name.rpartition('-')[2]}"
        self.root = made.rename(place / name)  # locked before it can be swept
        self._staged: dict[Version, Staged] = {}
        self._changes = threading.Lock()
        """Held to change `_staged` and `_closed`: `close` may be called while another thread writes."""
        self._closed = False

    def write(self, version: Version, weights: Any) -> None:
        """Stage a version. Files have at most one bucket each; a larger tensor has a separate file, an adapter only
        one. Blocks.

        Raises: `EngineError` if the weights do not fit the model, there is no space, or the area was closed. Then
        nothing of the version is held, except what was staged before.
        """
        tensors = self.tensors.checked(version, weights)
        maps = self.maps and isinstance(weights, PublishedTensors)
        self._stage(version, tensors, publication_of(weights), maps=maps)

    def use_files(self, version: Version) -> None:
        """Write files only from now on, and those of a version that is staged in shared memory. Blocks. Raises:
        `EngineError` as `write`; then the version stays as it is."""
        self.maps = False
        staged = self._staged.get(version)
        if staged is not None and staged.memory is not None:
            self._stage(version, dict(staged.memory.tensors), staged.publication, maps=False)

    def _stage(self, version: Version, tensors: Mapping[str, torch.Tensor], publication: str, *, maps: bool) -> None:
        self._check_open(version)
        try:
            staged = self._map(version, tensors, publication) if maps else None
            self._keep(version, staged or self._write_files(version, tensors, publication))
        except (OSError, SafetensorError) as error:
            self._check_open(version)
            story = f"version {version} cannot be staged in {self.root}: {error}"
            raise EngineError(story, version=version) from error
        finally:
            if self._closed:  # `close` cannot remove a directory that is being filled
                shutil.rmtree(self.root, ignore_errors=True)

    def _check_open(self, version: Version) -> None:
        if self._closed:
            raise EngineError(f"version {version} cannot be staged: the rollout backend was closed", version=version)

    def _keep(self, version: Version, staged: Staged) -> None:
        with self._changes:
            dropped = staged if self._closed else self._staged.get(version)
            if not self._closed:
                self._staged[version] = staged
        if dropped is not None:
            dropped.remove()
        self._check_open(version)

    def _map(self, version: Version, tensors: Mapping[str, torch.Tensor], publication: str) -> Staged | None:
        """A directory that says where the tensors lie; None if they lie in no shared memory."""
        memory = open_memory(tensors)
        if memory is None:
            return None
        staged = Staged(self.root / f"{version}-{secrets.token_hex(4)}", memory, publication)
        try:
            staged.directory.mkdir(mode=0o700)
            memory.describe(staged.directory)
        except BaseException:
            staged.remove()
            raise
        return staged

    def _write_files(self, version: Version, tensors: Mapping[str, torch.Tensor], publication: str) -> Staged:
        making = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=self.root))
        try:
            with turn(publication):
                if not self._link(publication, making):
                    self._save(version, tensors, making)
                name = f"{version}-{secrets.token_hex(4)}-{publication}"
                return Staged(making.rename(self.root / name), None, publication)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise

    def _link(self, publication: str, target: Path) -> bool:
        """Link the files of another backend that has staged the same publication, so that both are one copy: the kernel
        counts the links. Returns whether there is one."""
        for staged in self._place.glob(f"{PREFIX}*/*-{publication}"):
            try:
                for path in sorted(staged.iterdir()):
                    os.link(path, target / path.name)
                return True
            except OSError:  # its owner has just removed it, or the file system has no links
                for path in target.iterdir():
                    path.unlink()
        return False

    def _save(self, version: Version, tensors: Mapping[str, torch.Tensor], target: Path) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        free = shutil.disk_usage(self.root).free
        if size > free:
            story = f"version {version} needs {size} bytes, but {self.root} has only {free} bytes left"
            raise EngineError(story, version=version)
        if self._lora is not None:
            write_adapter(target, dict(tensors), self._lora, self._model)
            return
        for number, bucket in enumerate(buckets(tensors.items(), lambda item: item[1].nbytes, self._bucket)):
            separate = {name: tensor.cpu().contiguous() for name, tensor in bucket}
            save_file(separate, target / f"{number:06}.safetensors")

    def directory(self, version: Version) -> Path | None:
        staged = self._staged.get(version)
        return None if staged is None else staged.directory

    def keep_only(self, *versions: Version) -> None:
        with self._changes:
            dropped = [self._staged.pop(version) for version in list(self._staged) if version not in versions]
        for staged in dropped:
            staged.remove()

    def close(self) -> None:
        """Remove everything. A call of `write` that is running fails."""
        with self._changes:
            if self._closed:
                return
            self._closed = True
            dropped, self._staged = self._staged, {}
        for staged in dropped.values():
            staged.remove()
        shutil.rmtree(self.root, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def _locked(root: Path) -> int | None:
    """Lock `root` for the life of this process; None if another process holds the lock."""
    lock = os.open(root / "owner", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _sweep(place: Path) -> None:
    for root in place.glob(f"{PREFIX}{_machine()}-*"):
        if root.stat().st_uid != os.getuid() or not (root / "owner").exists():
            continue
        lock = _locked(root)
        if lock is not None:
            shutil.rmtree(root, ignore_errors=True)
            os.close(lock)


def _machine() -> str:
    """Names the running kernel. On shared storage, the locks of another one may not be visible here."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:12]
    except OSError:
        return os.uname().nodename
