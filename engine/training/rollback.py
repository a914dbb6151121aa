"""An outer train step happens whole or not at all: what it changes is put back when it raises.

Used by `trainer.ModelTrainer` around its optimizer minibatches, so that a step which fails (out of memory, a kernel
error, an interrupt) can be redone with the same batch from the weights before it, as the train-step machine demands.
It keeps one copy of the weights and of the optimizer's moments in host memory for the length of a step. If the device
itself is gone, putting back raises too: then the trainer's weights are void, and recovery starts from a checkpoint.
"""

import torch
from torch import Tensor


class Snapshot:
    """Copies in host memory of everything that a train step changes. As a context: put back when the block raises."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._live = [*model.parameters(), *model.buffers()]
        self._kept = [_copy(tensor) for tensor in self._live]
        self._moments = {
            parameter: {name: _copy(value) for name, value in state.items()}
            for parameter, state in optimizer.state.items()
        }
        self._random = random_state()

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.restore()

    def restore(self) -> None:
        """Weights, buffers, optimizer state and random state are as before, in place. Gradients are dropped."""
        self._optimizer.zero_grad(set_to_none=True)
        for live, kept in zip(self._live, self._kept, strict=True):
            live.detach().copy_(kept)
        for parameter in list(self._optimizer.state):
            if parameter not in self._moments:
                del self._optimizer.state[parameter]
                continue
            for name, value in self._moments[parameter].items():
                self._optimizer.state[parameter][name].copy_(value)
        set_random_state(self._random)


def random_state() -> dict[str, Tensor]:
    """Torch's random states by device: `cpu`, and `cuda.0`, … once CUDA is in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_random_state(states: dict[str, Tensor]) -> None:
    """Undo `random_state`. States of devices that are not here are ignored."""
    torch.set_rng_state(states["cpu"])
    for name, state in states.items():
        if name.startswith("cuda.") and int(name[5:]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(name[5:]))


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)
