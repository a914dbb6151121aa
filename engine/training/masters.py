"""Float32 masters: the weights that the optimizer updates if a model computes with bfloat16 weights in one process.

An update of 1e-6 is lost in bfloat16, and so is a small gradient in a sum. Therefore weights, moments and summed
gradients are float32, and the weights of forward and backward passes are a rounded copy. Several ranks do not need
this: FSDP2's shards are float32, and the gathered weights are bfloat16.

Made by `gradients.Policy`; read by `model_trainer` and `model_checkpoint`. Only `Masters.round` may change a
parameter of the model.
"""

import torch
from torch import Tensor, nn

from engine.training.ranks import Move


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
        """Move the masters to the model's device, or leave them on the host for good."""
        self._on_host = on_host
        self.move(lambda tensor: tensor.to(device))

    def move(self, to: Move) -> None:
        """Move the masters, unless they stay on the host."""
        if not self._on_host:
            for master in self._of.values():
                master.data = to(master.data)

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


UNSPLIT = Masters()
"""The masters of a model whose parameters are their own masters."""
