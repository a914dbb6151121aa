"""The gradient of a bfloat16 head that many chunks of tokens use: summed in float32, and rounded once.

autograd sums what reaches a tensor in the tensor's own type, so that the sum over 37 chunks would be rounded 37 times.
Called by `gradients.Policy` where it computes logits chunk by chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def shared_weight(weight: Tensor) -> Callable[[], Tensor]:
    """A function that returns the weight for one chunk, each time it is called."""
    if weight.dtype == torch.float32 or not weight.requires_grad or not torch.is_grad_enabled():
        return lambda: weight
    total = _Total.apply(weight)
    return lambda: _Share.apply(total, weight.detach())


class _Total(torch.autograd.Function):
    """Where the gradients of all chunks meet: a float32 tensor of the weight's shape, without memory of its own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].to(ctx.dtype)


class _Share(torch.autograd.Function):
    """The weight, whose gradient goes to the total."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].float(), None
