"""Float32 masters: the weights that the optimizer updates if a model computes with bfloat16 weights in one process.

An update of 1e-6 is lost in bfloat16, and so is a small gradient in a sum. Therefore weights, moments and summed
gradients are float32, and the weights of forward and backward passes are a rounded copy. Several ranks do not need
this: FSDP2's shards are float32, and the gathered weights are bfloat16.

Made by `gradients.Policy`; read by `model_trainer` and `model_checkpoint`. Only `Masters.round` may change a
parameter of the model.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Masters:
    """The float32 value of each parameter of one model, which is the parameter itself unless the model was `split`."""

    def __init__(self) -> None:
        self._of: dict[Tensor, nn.Parameter] = {}
        """By parameter of the model."""
        self._on_host = False

    @property
    def split(self) -> bool:
        """Whether the model's trained parameters are rounded copies of masters."""
        return bool(self._of)

    @property
    def on_host(self) -> bool:
        """Whether they stay in host memory, with gradients and moments, wherever the model is."""
        return self._on_host

    def of(self, tensor: Tensor) -> Tensor:
        """The float32 value of a tensor of the model."""
        return self._of.get(tensor, tensor)

    def trained(self, model: nn.Module) -> list[Tensor]:
        """The tensors that an optimizer of the model updates."""
        return [self.of(parameter) for parameter in model.parameters() if parameter.requires_grad]

    def divide(self, model: nn.Module) -> None:
        """Make every parameter of a float32 model bfloat16. Each trained parameter gets a master, to which every
        backward pass adds the gradient."""
        for parameter in model.parameters():
            if parameter.dtype != torch.float32:
                continue
            if parameter.requires_grad:
                self._of[parameter] = nn.Parameter(parameter.data)
            parameter.data = parameter.data.bfloat16()
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._collect)

    def place(self, device: torch.device, *, on_host: bool = False) -> None:
        """Move the masters to the model's device, or leave them on the host."""
        self._on_host = on_host
        if not on_host:
            for master in self._of.values():
                master.data = master.data.to(device)

    def round(self) -> None:
        """Copy the masters into the model's parameters, rounded."""
        with torch.no_grad():
            for parameter, master in self._of.items():
                parameter.copy_(master)

    def _collect(self, parameter: Tensor) -> None:
        """After the gradient of one backward pass: it is summed in float32, and exists in bfloat16 for one parameter at
        a time."""
        master, gradient = self._of[parameter], parameter.grad
        parameter.grad = None
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.to(master.device, torch.float32)
        else:
            master.grad.add_(gradient.to(master.device))


def move(models: Iterable[nn.Module], masters: Masters, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move models, their masters and their optimizer state to a device, and release the freed memory."""
    for model in models:
        model.to(device)
    if not masters.on_host:
        masters.place(device)
        for values in optimizer.state.values():
            for name, value in values.items():
                if isinstance(value, Tensor) and value.dim():  # step counts stay where they are
                    values[name] = value.to(device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
