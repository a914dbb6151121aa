"""Runs inside vLLM's worker processes: installs staged weights, and ends the process with its owner.

`rollout.vllm.engine_args` names it to vLLM as the worker extension; only vLLM's workers import it. The import starts
the watch: a worker must end with the process that started it, even if that process was killed.
"""

import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.weight_checksum import _weights
from vllm.platforms import current_platform

from engine.errors import counted
from engine.rollout.vllm.gloo_transfer import register
from engine.rollout.vllm.mapped_weights import UNUSABLE, MappedTensors
from engine.rollout.vllm.weight_checks import OVERDUE, checksum, checksums_of, differing, not_loaded

OWNER = "STEP_ENGINE_VLLM_OWNER"
"""Environment variable with the owner's process id, a colon, and the directory to remove when the owner dies."""

register()


class WeightsExtension:
    """Mixed into vLLM's worker class. `collective_rpc` calls its methods while generation is paused."""

    model_runner: Any
    parallel_config: Any
    vllm_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool
    _held: Mapping[str, str] | None = None
    """During a check: checksums of what this worker held when the check began."""
    _given: dict[str, str]
    """During a check: checksums of the tensors that were given to this worker to load."""
    _loaded: Set[str] | None
    """During a check: names of the parameters that were loaded; None if the model does not say them."""
    _loads_everything: bool = False
    """Whether an install is known to replace every parameter of this model."""

    def attempt(self, method: str, *arguments: Any) -> str:
        """Call a method of this worker. Returns an empty text, or why it failed. An exception must not leave a worker:
        vLLM then does not read the answers of the workers after it, and takes them for answers to its next call."""
        try:
            getattr(self, method)(*arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def install_staged_weights(self, directory: str | None, aliases: Mapping[str, str], limit_s: float) -> str:
        """`load_staged` for a server's client. Returns an empty text, or why it failed. Raises: `RuntimeError` instead
        in an engine other than the first one, because a server returns only the answers of the first."""
        parallel = self.parallel_config
        if parallel.data_parallel_size > 1 and parallel.world_size > 1:  # an exception must not leave one of several
            return "a server with several engines of several workers each cannot report failed installs"
        wrong = self.attempt("load_staged", directory, aliases, limit_s)
        if wrong and parallel.data_parallel_index:
            raise RuntimeError(wrong)
        return wrong

    def load_staged(self, directory: str | None, aliases: Mapping[str, str], limit_s: float) -> None:
        """Install the tensors of a staged directory, or with None those that the model was first loaded from.

        `aliases` maps tied names to the staged name. `limit_s`: maximum seconds. After a failure the weights are
        undefined until another call installs a complete version.

        Raises: `MemoryUnusable` if only memory is at fault, so that files would do; else any exception.
        """
        until = time.monotonic() + limit_s
        mapped: MappedTensors | None = None
        with set_current_vllm_config(self.vllm_config):
            self._forget_half_loaded()
            if directory is None:
                source = self._first_weights()
            elif (mapped := MappedTensors.of(Path(directory))) is None:
                source = staged_tensors(Path(directory))
            else:
                try:
                    source = iter(mapped)
                except OSError as error:
                    raise MemoryUnusable(f"{UNUSABLE}: {error}") from None
            self._reload(in_time(with_aliases(source, aliases), until))
        self.synchronize_device()  # type: ignore[attr-defined]
        if mapped is not None and mapped.in_use():
            said = "vLLM keeps a loaded tensor in place, but the memory will get other contents"
            raise MemoryUnusable(f"{UNUSABLE}: {said}")

    def load_adapter(self, number: int, directory: str) -> None:
        """Load an adapter in place of the one with the same number. Raises: any exception of vLLM."""
        request = LoRARequest(lora_name="policy", lora_int_id=number, lora_path=directory, load_inplace=True)
        if not self.add_lora(request):  # type: ignore[attr-defined]
            raise RuntimeError("vLLM did not load the adapter")
        if self._held is not None:  # vLLM reads the file itself
            self._given = checksums_of(dict(staged_tensors(Path(directory))))

    def begin_check(self, limit_s: float) -> None:
        """Note checksums of what this worker holds, and from now on of each tensor that it is given to load. The same
        version is then installed again, and `compare_with` says whether it made a difference. Raises: `TimeoutError`
        after `limit_s`."""
        self.end_check()
        self._held, self._given = self._held_checksums(limit_s), {}
        self._loaded = set() if self.vllm_config.lora_config is None else None
        model = self.model_runner.get_model()
        load = model.load_weights

        def load_noted(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            loaded = load(noted(weights, self._given))
            self._loaded = None if loaded is None or self._loaded is None else self._loaded | loaded
            return loaded

        model.load_weights = load_noted

    def end_check(self) -> None:
        """Forget the checksums. Does nothing if no check has begun."""
        if self._held is not None:
            self._held = None
            del self.model_runner.get_model().load_weights

    def compare_with(self, published: Mapping[str, str], limit_s: float) -> None:
        """End a check. `published`: checksums of the published tensors, by the names in the model's files. Raises:
        `TimeoutError` after `limit_s`; `RuntimeError` that names the tensors that this worker was given otherwise, or
        its own parameters, by vLLM's names, that got no new weights or changed with the second load."""
        held, given = self._held, self._given
        assert held is not None
        self.end_check()
        self._require_loaded(self._loaded)
        if wrong := differing(published, given):
            raise RuntimeError(f"this worker was given other values than the published ones: {_shown(wrong)}")
        if changed := differing(held, self._held_checksums(limit_s)):
            raise RuntimeError(f"parameters changed when the same version was loaded again: {_shown(changed)}")

    def _held_checksums(self, limit_s: float) -> Mapping[str, str]:
        """Of this worker's part of what versions consist of: the model, or the adapter."""
        until = time.monotonic() + limit_s
        model = self.model_runner.get_model()
        if self.vllm_config.lora_config is None:
            return checksums_of(dict(_weights(model)), until)
        adapter = {
            f"{name}.{part}.{index}": tensor
            for name, layer in model.named_modules()
            for part in ("lora_a_stacked", "lora_b_stacked")
            for index, tensor in enumerate(getattr(layer, part, ()))
        }
        return checksums_of(adapter, until)

    def _reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The model runner's `reload_weights`, which only warns of parameters that were not loaded. Raises:
        `RuntimeError` that names them."""
        runner = self.model_runner
        model = runner.get_model()
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights)
        finalize_layerwise_reload(model, self.vllm_config.model_config)
        runner.reset_lora_state()
        runner.reset_encoder_cache()
        runner.reset_mm_cache()
        self._require_loaded(loaded)

    def _require_loaded(self, loaded: Set[str] | None) -> None:
        """`loaded`: as for `not_loaded`. Raises: `RuntimeError` that names the parameters that were not loaded."""
        wrapped = ".base_layer." if self.vllm_config.lora_config else ""  # of a layer that adapters may change
        model = self.model_runner.get_model()
        parameters = {name.replace(wrapped, ".") if wrapped else name for name, _ in model.named_parameters()}
        missing = not_loaded(parameters, loaded, quantized=self.vllm_config.model_config.quantization is not None)
        if missing:
            raise RuntimeError(f"{counted(len(missing), 'parameter')} got no new weights: {_shown(missing)}")
        self._loads_everything = loaded is not None

    def require_complete_installs(self) -> None:
        """Raises: `RuntimeError` unless an install is known to replace every parameter: then they may be dropped."""
        if not self._loads_everything:
            raise RuntimeError("no install has shown yet that it replaces every parameter")

    def update_in_time(self, update_info: dict[str, Any], aliases: Mapping[str, str], limit_s: float) -> None:
        """vLLM's `update_weights`. `aliases`: as for `load_staged`. After `limit_s` the group is closed, because over
        NCCL a worker would wait without a limit for a sender that is lost. Raises: `TimeoutError` then, else any
        exception of vLLM."""
        engine = self.weight_transfer_engine
        limit = threading.Timer(limit_s, engine.shutdown)
        limit.start()
        try:
            with self._loading_tied_names(aliases):
                self.update_weights(update_info)  # type: ignore[attr-defined]
        finally:
            limit.cancel()
            limit.join()  # it may be closing the group
        if engine.model_update_group is None:
            raise TimeoutError(f"the weights did not arrive within {limit_s:g} s")

    @contextmanager
    def _loading_tied_names(self, aliases: Mapping[str, str]) -> Iterator[None]:
        """Context manager: inside it, the model also loads each tensor under its tied names."""
        model = self.model_runner.get_model()
        load = model.load_weights
        model.load_weights = lambda weights: load(with_aliases(iter(weights), aliases))
        try:
            yield
        finally:
            model.load_weights = load

    def abandon_weight_update(self) -> None:
        """After a failed update by vLLM's weight transfer: leave the group and drop the partly received weights."""
        if self.weight_transfer_engine is not None:
            self._weight_update_active = False
            self.weight_transfer_engine.reset_weight_update_target()
            self.weight_transfer_engine.shutdown()
        with set_current_vllm_config(self.vllm_config):
            self._forget_half_loaded()

    def _forget_half_loaded(self) -> None:
        """Restore the parameters that an interrupted reload has taken apart; does nothing if none was."""
        model = self.model_runner.get_model()
        begun = [info for info in map(get_layerwise_info, model.modules()) if info.can_load()]
        for info in begun:
            info.loaded_weights.clear()
            info.load_numel = 0
        if begun:
            finalize_layerwise_reload(model, self.vllm_config.model_config)

    def _first_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        loader: Any = get_model_loader(self.vllm_config.load_config)
        weights: Iterator[tuple[str, torch.Tensor]] = loader.get_all_weights(
            self.vllm_config.model_config, self.model_runner.get_model()
        )
        return weights


class MemoryUnusable(Exception):
    """A worker cannot install from shared memory. Its text begins with `UNUSABLE`."""


def staged_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a staged version, memory-mapped, in the order in which they were written. Raises:
    `FileNotFoundError` if there is none."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(
            f"no staged files in {directory}: either the version was removed meanwhile, or this worker is on another "
            "machine than its replica; then use rollout.transport: vllm, or for a server a rollout.weights_dir that "
            "its machine shares"
        )
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                yield name, file.get_tensor(name)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def with_aliases(
    source: Iterator[tuple[str, torch.Tensor]], aliases: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tied tensors under all their names: vLLM may keep a packed copy for each, and does not update names that are not
    given."""
    seen: set[str] = set()
    wanted = set(aliases.values())
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in source:
        seen.add(name)
        if name in wanted:
            kept[name] = tensor
        yield name, tensor
    for alias, name in aliases.items():
        if alias not in seen and name in kept:
            yield alias, kept[name].clone()


def noted(source: Iterable[tuple[str, torch.Tensor]], checksums: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors, and notes the checksum of each."""
    for name, tensor in source:
        checksums[name] = checksum(tensor)
        yield name, tensor


def in_time(source: Iterator[tuple[str, torch.Tensor]], until: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors. Raises: `TimeoutError` before the first tensor after the limit."""
    for item in source:
        if time.monotonic() > until:
            raise TimeoutError(f"the install {OVERDUE} before tensor {item[0]}")
        yield item


def end_with(owner: int, directory: str) -> None:
    """Kill this process when its owner has ended, and remove the owner's `directory`."""
    try:
        watch = select.poll()
        watch.register(os.pidfd_open(owner), select.POLLIN)
        watch.poll()
    except ProcessLookupError:
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def pack_experts_at_every_load() -> None:
    """On a CPU, vLLM packs the weights of experts only when it makes their kernel. Later it would copy new weights over
    the packed ones without packing them, and read them wrongly. Therefore it makes a new kernel at each load."""
    method: Any = UnquantizedFusedMoEMethod
    set_up = method._setup_kernel

    def set_up_anew(self: Any, *arguments: Any, **named: Any) -> None:
        self.moe_kernel = None
        set_up(self, *arguments, **named)

    method._setup_kernel = set_up_anew


if current_platform.is_cpu():
    pack_experts_at_every_load()
if OWNER in os.environ:
    _owner, _, _directory = os.environ[OWNER].partition(":")
    threading.Thread(target=end_with, args=(int(_owner), _directory), name="end-with-owner", daemon=True).start()
