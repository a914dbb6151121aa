"""The ranks of a trainer: the processes that hold one model together, each a shard of every parameter (FSDP2).

`ModelTrainer` and `Policy` run the same code in every rank and ask this module for what depends on the others. Every
method of `Sharded` that says "collective" must be called by all ranks in the same order. `ALONE` is a trainer of one
process, for which all of them are trivial.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engine.errors import EngineError, TrainerSpoiled, reason_of


class Whole(Protocol):
    """A whole tensor, or one in a file, of which a part is read."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, rows: Any) -> Tensor: ...


Move = Callable[[Tensor], Tensor]
"""A tensor to the same values in other memory."""


class Root(nn.Module):
    """The module that holds all of a model: `root(function, *arguments)` calls the function while the parameters that
    are in no layer are there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class Ranks:
    """One process: it has every sample and every parameter."""

    index = 0
    count = 1
    on_host = False
    """Models begin in host memory, because replicas may be on the device. `move` brings the models to the device."""

    def shard(self, model: nn.Module, device: torch.device, *, bf16: bool) -> Root:
        """Bring a model to the device. Parameters are replaced: make optimizers afterwards. Those without values get
        memory, and must then be filled."""
        return Root(model.to(self.home(device)))

    def home(self, device: torch.device) -> torch.device:
        """Where models and masters are until they are moved."""
        return device

    def release(self, root: Root) -> None:
        """Free what `root` gathered without a backward pass."""

    def move(self, root: Root, to: Move) -> None:
        """Move a model's parameters and buffers, unless the device never keeps them."""
        root._apply(to)  # of the root: each module of FSDP must see that its own parameters move

    def share(self, loads: Sequence[int]) -> list[int]:
        """Indices of the loads that belong to this rank."""
        return list(range(len(loads)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context manager: if the block raises in one rank, every rank raises. The block must not be collective, but
        the context manager is: it ends when all ranks have left the block."""
        yield

    @contextmanager
    def spoil_on_error(self) -> Iterator[None]:
        """Context manager around collective work: a rank that raises in the block has left the others waiting in it.
        Raises: `TrainerSpoiled` then, with several ranks."""
        yield

    def most(self, count: int) -> int:
        """The largest of the ranks' counts. Collective."""
        return count

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks. Collective."""
        return values

    def largest(self, values: Tensor) -> Tensor:
        """The largest over ranks, number by number. Collective."""
        return values

    def joined(self, parts: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """The parts of all ranks. Collective."""
        return parts

    def whole(self, tensor: Tensor, kind: torch.dtype | None = None) -> Tensor:
        """All of a parameter, in a type. Collective."""
        return tensor if kind is None else tensor.to(kind)

    def fill(self, target: Tensor, whole: Whole) -> None:
        """Copy this rank's part of a whole tensor into a parameter."""
        target.copy_(whole[...])


ALONE = Ranks()


class OnHost(Ranks):
    """One process whose models begin in host memory."""

    on_host = True

    def home(self, device: torch.device) -> torch.device:
        return torch.device("cpu")


ON_HOST = OnHost()


class Sharded(Ranks):
    """Ranks over torch's default process group, which must be there: NCCL on CUDA, gloo on the CPU."""

    def __init__(
        self, device: torch.device, *, cpu_offload: bool = False, shards: int = 0, on_host: bool = False
    ) -> None:
        """`shards`: number of successive ranks that hold a whole model together; 0: all ranks."""
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self.on_host = on_host
        self._shards = shards or self.count
        shape, names = (self.count // self._shards, self._shards), ("replicate", "shard")
        begin = 1 if self._shards == self.count else 0
        self._mesh: DeviceMesh = init_device_mesh(device.type, shape[begin:], mesh_dim_names=names[begin:])
        self._offload = CPUOffloadPolicy() if cpu_offload and device.type != "cpu" else OffloadPolicy()

    def shard(self, model: nn.Module, device: torch.device, *, bf16: bool) -> Root:
        """Layer by layer, so that the device never holds the whole model. With `bf16` the gathered weights are
        bfloat16 and gradients are summed in float32. The shards that the optimizer steps stay float32, those of frozen
        parameters become bfloat16."""
        for parameter in model.parameters():
            if bf16 and not parameter.requires_grad and parameter.dtype == torch.float32:
                parameter.data = parameter.data.bfloat16()
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        options: dict[str, Any] = {"mesh": self._mesh, "mp_policy": precision, "offload_policy": self._offload}
        for layer in layers_of(model):
            fully_shard(layer, **options)
        root = Root(model)
        fully_shard(root, **options)
        home = torch.device("cpu") if self.on_host or isinstance(self._offload, CPUOffloadPolicy) else device
        replace_parameters(model, lambda own: torch.empty_like(own, device=home) if own.is_meta else own)
        if self.on_host:  # FSDP has moved parameters with values, and buffers, to the device
            self.move(root, Tensor.cpu)
        return root

    def release(self, root: Root) -> None:
        assert isinstance(root, FSDPModule)
        root.reshard()

    def move(self, root: Root, to: Move) -> None:
        if not isinstance(self._offload, CPUOffloadPolicy):
            super().move(root, to)

    def share(self, loads: Sequence[int]) -> list[int]:
        """Largest first, each to the rank with the fewest tokens so far: a function of the loads, the same in every
        rank."""
        sums = [0] * self.count
        own = []
        for index in sorted(range(len(loads)), key=lambda index: -loads[index]):
            rank = sums.index(min(sums))
            sums[rank] += loads[index]
            if rank == self.index:
                own.append(index)
        return sorted(own)

    @contextmanager
    def together(self) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        reasons = [""] * self.count
        with self.spoil_on_error():
            if self.most(failure is not None):
                dist.all_gather_object(reasons, "" if failure is None else reason_of(failure))
        if failure is not None:
            raise failure
        for rank, reason in enumerate(reasons):
            if reason:
                raise EngineError(f"rank {rank} of {self.count} failed: {reason}")

    @contextmanager
    def spoil_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise TrainerSpoiled(f"rank {self.index} of {self.count} failed: {reason_of(error)}") from error

    def most(self, count: int) -> int:
        return int(self.largest(torch.tensor(count)))

    def total(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.MAX)

    def joined(self, parts: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        everyones: list[dict[int, Tensor]] = [{}] * self.count
        dist.all_gather_object(everyones, dict(parts))
        return {index: part for of_rank in everyones for index, part in of_rank.items()}

    def whole(self, tensor: Tensor, kind: torch.dtype | None = None) -> Tensor:
        """The type changes before the shards travel."""
        shard = super().whole(tensor.detach(), kind)
        if not isinstance(shard, DTensor):
            return shard
        if self._mesh.device_type != "cpu" and shard.to_local().device.type == "cpu":  # offloaded
            shard = DTensor.from_local(shard.to_local().to(self._mesh.device_type), self._mesh, shard.placements,
                                       shape=shard.shape, stride=shard.stride())  # fmt: skip
        return shard.full_tensor()

    def fill(self, target: Tensor, whole: Whole) -> None:
        if not isinstance(target, DTensor):
            target.copy_(whole[...])
            return
        own = own_part(target)
        if len(own):
            rows = -(-whole.shape[0] // self._shards)  # they are divided as by `torch.chunk`
            first = self.index % self._shards * rows
            own.copy_(whole[first : first + len(own)])

    def _reduced(self, values: Tensor, operation: Any) -> Tensor:
        reduced = values.detach().cpu().clone()
        dist.all_reduce(reduced, operation)
        return reduced


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory, without gradient."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def layers_of(model: Any) -> list[nn.Module]:
    """The transformer layers of a model: the modules that it names as not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def replace_parameters(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter of a model for which `change` returns another tensor. Tied ones stay tied."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                changed = change(parameter)
                same = changed is parameter
                made[parameter] = parameter if same else nn.Parameter(changed, requires_grad=parameter.requires_grad)
            if made[parameter] is not parameter:
                setattr(module, name, made[parameter])
