"""Which device a model is on, at which precision it runs, and which attention kernels it may use: the same for the
trainer and for scorers.

Called by `model_trainer.ModelTrainer`, `model_scorer.ModelScorer` and `gradients.Policy`.
"""

import torch

from engine.errors import ConfigError


def device_named(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("trainer.device", name, f"cannot be used by torch: {error}", "use auto") from error


def checkpoints_activations(choice: bool | str, device: torch.device) -> bool:
    return device.type == "cuda" if choice == "auto" else bool(choice)


def runs_in_bf16(choice: str, device: torch.device) -> bool:
    supported = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if choice == "on" and not supported:
        raise ConfigError("trainer.bf16", choice, f"{device} has no bfloat16", "use auto or off")
    return choice == "on" or (choice == "auto" and device.type == "cuda" and supported)


def choose_attention(device: torch.device) -> None:
    """On CUDA: never use cuDNN's attention in this process. It builds a plan for each new shape, which takes 0.1 s or
    more, and nearly every pass has new shapes. The flash and memory-efficient kernels need none."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
