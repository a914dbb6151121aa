"""Which device a model is on, and at which precision it runs: the same for the trainer and for scorers.

Called by `model_trainer.ModelTrainer` and `model_scorer.ModelScorer`.
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


def runs_in_bf16(choice: str, device: torch.device) -> bool:
    supported = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if choice == "on" and not supported:
        raise ConfigError("trainer.bf16", choice, f"{device} has no bfloat16", "use auto or off")
    return choice == "on" or (choice == "auto" and device.type == "cuda" and supported)
