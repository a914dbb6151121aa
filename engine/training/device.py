"""Which device a model is on, at which precision it runs, and which attention kernels it may use: the same for the
trainer and for scorers.

Called by `model_trainer.ModelTrainer`, `model_scorer.ModelScorer` and `gradients.Policy`.
"""

import os
import re
from pathlib import Path

import torch

from engine.errors import ConfigError
from engine.hardware import gpu_count

DRIVER = Path("/proc/driver/nvidia/version")


def device_named(name: str) -> torch.device:
    """Raises: `ConfigError` for a device that torch cannot use, and for `auto` if there are GPUs that it cannot use."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        refuse_unusable_gpus(gpu_count(), torch.version.cuda)
        return torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("trainer.device", name, f"cannot be used by torch: {error}", "use auto") from error


def refuse_unusable_gpus(gpus: int | None, cuda: str | None) -> None:
    """Raises: `ConfigError` if this process may use GPUs, and torch was built for them but cannot, mostly because the
    driver is older than torch's CUDA. `gpus`: of this machine. `cuda`: torch's version of it; None: a build for CPUs.
    """
    if not gpus or cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", DRIVER.read_text()) if DRIVER.exists() else None
    driver = f"driver {found.group()}" if found else "no driver"
    law = f"torch {torch.__version__} with CUDA {cuda} cannot use the {gpus} GPUs of this machine, which has {driver}"
    fix = f"install a driver for CUDA {cuda}, or a torch for the driver's CUDA; to train on CPUs, use cpu"
    raise ConfigError("trainer.device", "auto", law, fix)


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
