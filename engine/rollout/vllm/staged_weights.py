"""Stages weights for vLLM: a new directory for each version, in shared memory if there is room. Where the published
tensors lie in shared memory already, it only says where; else it has them as safetensors. With `trainer.lora` it is the
directory of an adapter, as peft writes it.

`rollout.vllm.vllm_backend` calls it on threads. A version is checked against the model before it is staged, because
vLLM would load a part of it without an error. At most two versions are kept: the installed one, to go back to, and the
next.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import EngineError
from engine.ids import Version
from engine.rollout.vllm.mapped_weights import OpenMemory, open_memory
from engine.training.lora import Lora, adapter_tensors, add_adapter, write_adapter
from engine.training.shared_weights import PublishedTensors, publication_of, turn

MEMORY = Path("/dev/shm")
PREFIX = "step-engine-weights-"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """Names in a model's `state_dict()`: the shape of each, and for tied names the first name of the same tensor."""

    shapes: dict[str, torch.Size]
    aliases: dict[str, str]

    @classmethod
    def of(cls, model: str, lora: Lora | None = None) -> "ModelTensors":
        """Created without allocating memory for weights. Of the model's adapter alone, if it has one."""
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(model, trust_remote_code=False), trust_remote_code=False
            )
            if lora is not None:
                add_adapter(whole, lora)
                return cls({name: tensor.shape for name, tensor in adapter_tensors(whole).items()}, {})
        shapes: dict[str, torch.Size] = {}
        aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, tensor in whole.state_dict(keep_vars=True).items():
            owner = first.setdefault(id(tensor), name)
            if owner == name:
                shapes[name] = tensor.shape
            else:
                aliases[name] = owner
        return cls(shapes, aliases)

    def zeros(self) -> dict[str, torch.Tensor]:
        """All of them zero: of an adapter, one that changes nothing."""
        return {name: torch.zeros(shape) for name, shape in self.shapes.items()}

    def checked(self, version: Version, weights: Any) -> dict[str, torch.Tensor]:
        """One tensor for each tensor of the model. Raises: `EngineError` that names what does not fit."""
        if not isinstance(weights, Mapping):
            raise EngineError(
                f"weights of version {version} must map names to tensors, not be {type(weights).__name__}"
            )
        found: dict[str, torch.Tensor] = {}
        unknown: list[str] = []
        for name, value in weights.items():
            owner = self.aliases.get(name, name)
            if owner not in self.shapes:
                unknown.append(name)
                continue
            tensor = torch.as_tensor(value).detach()
            if tensor.shape != self.shapes[owner]:
                raise EngineError(
                    f"weights of version {version} do not fit the model: {name} has shape {tuple(tensor.shape)}, the "
                    f"model's has {tuple(self.shapes[owner])}", version=version, name=name,
                )  # fmt: skip
            before = found.setdefault(owner, tensor)
            if before.data_ptr() != tensor.data_ptr() and not torch.equal(before, tensor):
                raise EngineError(
                    f"weights of version {version}: {owner} and {name} are one tensor in this model (tied) but were "
                    "given different values", version=version, name=name,
                )  # fmt: skip
        missing = [name for name in self.shapes if name not in found]
        if unknown or missing:
            raise EngineError(
                f"weights of version {version} do not fit the model: missing {missing[:5]}, unknown {unknown[:5]}",
                version=version, missing=missing, unknown=unknown,
            )  # fmt: skip
        return {name: found[name] for name in self.shapes}


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
        for number, bucket in enumerate(_buckets(tensors, self._bucket)):
            save_file(bucket, target / f"{number:06}.safetensors")

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


def _buckets(tensors: Mapping[str, torch.Tensor], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive tensors, at most `limit` bytes together, each copied to separate memory, as the format requires."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    if bucket:
        yield bucket


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
